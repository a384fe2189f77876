"""How near a tiny model in fp8 is to itself after something rounds otherwise."""

from __future__ import annotations

from torch import Tensor

# Blocks carry on what is rounded otherwise once: codes then fall differently, which leaves the
# distance to the dense model as it was but for chance on a model this small. The distance to the
# same model before says less: on one with a large error of fp8 it is large.
SAME_ERROR = 1.3


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the distance of two tensors, as a share of the second one."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())
