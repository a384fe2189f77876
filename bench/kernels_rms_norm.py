"""The fp8 RMSNorm at the shapes of Z-Image and MiniMax-H3, for ``bench.kernels``."""

from __future__ import annotations

import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor
from torch.nn import functional as F

from bench.kernel_case import Case, noise
from quantpolicy.kernels.rms_norm_fp8 import rms_norm_fp8
from quantpolicy.kernels.row_quantise_fp8 import row_quantise_fp8

# An image of 1,024 pixels a side with its text, and one of 2,048.
Z_IMAGE_TOKENS, Z_IMAGE_COLUMNS = (4_352, 16_640), 3840
# As many rows, and the packed sequence of a video of 720p.
H3_TOKENS, H3_COLUMNS = (4_352, 17_738), 5376
TABLE_ROWS = 6
EPS, FLOOR = 1e-5, 1e-12


def rms_norm_cases() -> list[Case]:
    """Return the op at each shape, against the chain that the model and its fp8 Linears run."""
    return [
        *(case for tokens in Z_IMAGE_TOKENS for case in _z_image_cases(tokens)),
        *(case for tokens in H3_TOKENS for case in _h3_cases(tokens)),
    ]


def _z_image_cases(tokens: int) -> list[Case]:
    weight = noise(Z_IMAGE_COLUMNS)

    def case(name: str, vectors: int) -> Case:
        def make() -> tuple[object, ...]:
            x, scale = noise(1, tokens, Z_IMAGE_COLUMNS), 1.0 + noise(1, vectors, Z_IMAGE_COLUMNS)
            return x, weight, scale, None, None, EPS, FLOOR

        moved = _row_bytes(tokens, Z_IMAGE_COLUMNS) + vectors * Z_IMAGE_COLUMNS * 2
        return Case(name, tokens, rms_norm_fp8, _z_image_chain, make, moved)

    return [case("rms_norm_fp8", 1), case("rms_norm_fp8 token", tokens)]


def _h3_cases(tokens: int) -> list[Case]:
    weight = noise(H3_COLUMNS)

    def by_index() -> tuple[object, ...]:
        shift, scale, *_ = noise(TABLE_ROWS, 6 * H3_COLUMNS).chunk(6, dim=1)
        index = torch.arange(tokens, device="cuda") * TABLE_ROWS // tokens
        return noise(1, tokens, H3_COLUMNS), weight, 1.0 + scale, shift, index, EPS, FLOOR

    def alone() -> tuple[object, ...]:
        return noise(1, tokens, H3_COLUMNS), weight, None, None, None, EPS, FLOOR

    moved = _row_bytes(tokens, H3_COLUMNS)
    return [
        Case("rms_norm_fp8 index", tokens, rms_norm_fp8, _h3_chain, by_index, moved + 8 * tokens),
        Case("rms_norm_fp8 weight", tokens, rms_norm_fp8, _h3_chain, alone, moved),
    ]


def _row_bytes(tokens: int, columns: int) -> int:
    """Return the bytes of rows read, codes written and a scale a row."""
    return tokens * (3 * columns + 4)


def _z_image_chain(x: Tensor, weight: Tensor, scale: Tensor, *_others: object) -> object:
    norm = RMSNorm(x.shape[-1], EPS, elementwise_affine=False)
    norm.weight = weight
    return row_quantise_fp8(norm(x) * scale, FLOOR)


def _h3_chain(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None,
    *_others: object,
) -> object:
    """Run the chain but for the sum 1 + s, which the model computes of the gathered rows."""
    rows = F.rms_norm(x, x.shape[-1:], weight, EPS)
    if scale is not None and shift is not None and index is not None:
        rows = rows * scale.index_select(0, index) + shift.index_select(0, index)
    return row_quantise_fp8(rows, FLOOR)
