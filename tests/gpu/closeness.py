"""How near a tiny model in fp8 is to itself after something rounds otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

# Blocks carry on what is rounded otherwise once: codes then fall differently, which leaves the
# distance to the dense model as it was but for chance on a model this small. The distance to the
# same model before says less: on one with a large error of fp8 it is large.
SAME_ERROR = 1.3


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors, as a share of the second one."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


Rows = tuple[Tensor, Tensor]


def assert_near_codes(found: Rows, expected: Rows, share: float = 0.01) -> None:
    """Check codes and scales of rows that may have been rounded otherwise before.

    No value may be further off than to the next code, in whichever row.

    Args:
        found: e4m3 codes [..., K] and scales, one a row; ``expected`` likewise.
        share: of the codes that may differ in rows of one scale, besides two. A row whose scale was
            rounded to the next number has other codes here and there; few are.
    """
    columns = found[0].shape[-1]
    codes, others = (each[0].reshape(-1, columns).view(torch.uint8) for each in (found, expected))
    scale, other_scale = (each[1].reshape(-1) for each in (found, expected))
    # A step of the largest value, and one of the scale that is made of it.
    torch.testing.assert_close(scale, other_scale, rtol=2**-6, atol=0)
    same = scale == other_scale
    assert int((~same).sum()) <= 2 + 0.1 * len(same)
    assert int((codes != others)[same].sum()) <= 2 + share * codes[same].numel()
    value, other = (
        each[0].reshape(-1, columns).float() * each[1].reshape(-1, 1) for each in (found, expected)
    )
    # A step of e4m3 and a rounding of the scale; near zero, some steps of its subnormals.
    limit = (2**-3 + 2**-6) * torch.maximum(value.abs(), other.abs())
    assert bool(((value - other).abs() <= limit + 2**-7 * other_scale[:, None]).all())
