"""Row-wise int8 and fp8 weights by hand, a few rows at a time, bit for bit what torchao makes.

The row maximum is taken on sign-cleared bit patterns as integers: finite floats order like their
patterns. Steps stay in cache and on the calling thread: numpy has no thread pool, and torch leaves
its own alone for at most ``TORCH_VALUES`` values. Files, names and layouts do not belong here.
"""

from __future__ import annotations

import numpy as np
import torch

from quantpolicy.runtime.weights import WEIGHT_FLOOR
from quantpolicy.schemes import ROW_SCALED, Scheme

STEP_VALUES = 1 << 19
TORCH_VALUES = 1 << 15

_PATTERNS = {
    torch.bfloat16: (np.uint16, torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (np.uint16, torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (np.uint32, torch.int32, 0x7FFFFFFF, 0x7F800000),
}
_INT8_MIN, _INT8_MAX = -128, 127
_INT8_HALF_RANGE = float(_INT8_MAX - _INT8_MIN) / 2
_INT8_LEAST_SCALE = torch.finfo(torch.float32).eps


class NonFiniteError(ValueError):
    """A weight holds NaN or infinity."""


class RowQuantiser:
    """Quantises rows of one dtype into caller-owned buffers; holds its own scratch memory.

    Args:
        scheme: int8 or fp8.
        dtype: of the rows given.
        data_dtype: of the data written: int8, float8_e4m3fn or float8_e4m3fnuz.
    """

    def __init__(self, scheme: Scheme, dtype: torch.dtype, data_dtype: torch.dtype) -> None:
        if scheme not in ROW_SCALED:
            raise ValueError(f"{scheme} is not a row-wise scheme")
        self._numpy_dtype, self._torch_dtype, self._magnitude, self._non_finite = _PATTERNS[dtype]
        self._is_int8 = scheme is Scheme.INT8
        self._largest = _INT8_MAX if self._is_int8 else torch.finfo(data_dtype).max
        self._patterns = np.empty(0, dtype=self._numpy_dtype)
        self._values = torch.empty(0, dtype=torch.float32)

    def quantise(self, rows: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
        """Quantise ``rows`` into ``data`` and ``scale``.

        Shapes: rows and data: [R, K], contiguous; scale: [R, 1] fp32.

        Raises:
            NonFiniteError: a row holds NaN or infinity.
        """
        count, features = rows.shape
        if features == 0:
            raise ValueError("rows of no features have no maximum")
        step = max(1, STEP_VALUES // features)
        if self._values.numel() < min(step, count) * features:
            self._patterns = np.empty(min(step, count) * features, dtype=self._numpy_dtype)
            self._values = torch.empty(min(step, count) * features, dtype=torch.float32)
        for first in range(0, count, step):
            last = min(first + step, count)
            self._step(rows[first:last], data[first:last], scale[first:last])

    def _step(self, rows: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
        amax = self._row_maximum(rows)
        flat = self._values[: rows.numel()]
        pieces = torch.split(flat, TORCH_VALUES)
        for piece, source in zip(pieces, torch.split(rows.view(-1), TORCH_VALUES), strict=True):
            piece.copy_(source)
        values = flat.view_as(rows).numpy()
        if self._is_int8:
            scale.copy_(torch.clamp(amax / _INT8_HALF_RANGE, min=_INT8_LEAST_SCALE))
            np.multiply(values, (1.0 / scale).numpy(), out=values)
            np.rint(values, out=values)
        else:
            scale.copy_(torch.clamp(amax, min=WEIGHT_FLOOR) / self._largest)
            np.divide(values, scale.numpy(), out=values)
        least = _INT8_MIN if self._is_int8 else -self._largest
        for piece, target in zip(pieces, torch.split(data.view(-1), TORCH_VALUES), strict=True):
            target.copy_(piece.clamp_(least, self._largest))

    def _row_maximum(self, rows: torch.Tensor) -> torch.Tensor:
        patterns = self._patterns[: rows.numel()].reshape(rows.shape)
        source = rows.view(self._torch_dtype).numpy().view(self._numpy_dtype)
        np.bitwise_and(source, self._magnitude, out=patterns)
        amax = np.maximum.reduce(patterns, axis=1, keepdims=True)
        if amax.max() >= self._non_finite:
            raise NonFiniteError
        return torch.from_numpy(amax.view(amax.dtype.str.replace("u", "i"))).view(rows.dtype)
