"""Row-wise int8 and fp8 weights by hand, a few rows at a time, bit for bit what torchao makes.

The row maximum is taken on sign-cleared bit patterns as integers: finite floats order like their
patterns. Every step works on at most ``STEP_VALUES`` values, which torch runs on the calling thread
in cache and without its thread pool. Files, names and layouts do not belong here.
"""

from __future__ import annotations

import torch

from quantpolicy.runtime.weights import WEIGHT_FLOOR
from quantpolicy.schemes import Scheme

ROW_SCHEMES = frozenset({Scheme.INT8, Scheme.FP8})
STEP_VALUES = 32768

_PATTERNS = {
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
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
        if scheme not in ROW_SCHEMES:
            raise ValueError(f"{scheme} is not a row-wise scheme")
        self._pattern_dtype, self._magnitude, self._first_non_finite = _PATTERNS[dtype]
        self._is_int8 = scheme is Scheme.INT8
        self._largest = _INT8_MAX if self._is_int8 else torch.finfo(data_dtype).max
        self._patterns = torch.empty(0, dtype=self._pattern_dtype)
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
        self._reserve(min(step, count) * features)
        for first in range(0, count, step):
            last = min(first + step, count)
            self._step(rows[first:last], data[first:last], scale[first:last])

    def _reserve(self, values: int) -> None:
        if self._values.numel() < values:
            self._patterns = torch.empty(values, dtype=self._pattern_dtype)
            self._values = torch.empty(values, dtype=torch.float32)

    def _step(self, rows: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
        amax = self._row_maximum(rows)
        values = self._values[: rows.numel()].view_as(rows)
        values.copy_(rows)
        if self._is_int8:
            scale.copy_(torch.clamp(amax / _INT8_HALF_RANGE, min=_INT8_LEAST_SCALE))
            values.mul_(1.0 / scale).round_().clamp_(_INT8_MIN, _INT8_MAX)
        else:
            scale.copy_(torch.clamp(amax, min=WEIGHT_FLOOR) / self._largest)
            values.div_(scale).clamp_(-self._largest, self._largest)
        data.copy_(values)

    def _row_maximum(self, rows: torch.Tensor) -> torch.Tensor:
        patterns = self._patterns[: rows.numel()].view_as(rows)
        torch.bitwise_and(rows.view(self._pattern_dtype), self._magnitude, out=patterns)
        amax = torch.amax(patterns, dim=1, keepdim=True)
        if int(amax.max()) >= self._first_non_finite:
            raise NonFiniteError
        return amax.view(rows.dtype)
