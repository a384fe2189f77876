"""The row-wise view: which inputs need no copy, and where each row starts."""

from __future__ import annotations

import pytest
import torch

from quantpolicy.kernels.rows import as_rows, flat_rows, row_scales_like

BASE = torch.arange(2 * 3 * 5 * 8.0).view(2, 3, 5, 8)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Read the rows of ``x`` through its view, as a kernel does."""
    rows = as_rows(x)
    values = torch.tensor([], dtype=x.dtype).set_(rows.data.untyped_storage())
    start = rows.data.storage_offset()
    out = []
    for r in range(rows.total):
        at = start + r // rows.inner * rows.outer_stride + r % rows.inner * rows.inner_stride
        out.append(values[at : at + rows.columns])
    return torch.stack(out) if out else x.new_empty((0, rows.columns))


VIEWS = {
    "contiguous": (BASE, True),
    "one row": (BASE[0, 0, 0], True),
    "sliced tokens": (BASE[0, :, 1:4], True),
    "sliced columns": (BASE[0, 0, :, 2:6], True),
    "columns of a batch": (BASE[0, :, :, 2:6], True),
    "transposed tokens": (BASE[0].transpose(0, 1), True),
    "expanded": (BASE[0, 0, :1].expand(4, 8), True),
    "expanded batch": (BASE[0, :1].expand(6, 5, 8), True),
    "batch of one": (BASE[:1, :, :3], True),
    "steps": (BASE[0, 0, ::2], True),
    "transposed columns": (BASE[0].transpose(1, 2), False),
    "three levels": (BASE.transpose(0, 1)[:, :, ::2], False),
    "no rows": (BASE[:0], True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_rows_are_found_where_they_are(name: str) -> None:
    x, without_copy = VIEWS[name]
    assert torch.equal(gathered(x), x.reshape(-1, x.shape[-1]))
    if x.numel():
        assert (as_rows(x).data.data_ptr() == x.data_ptr()) is without_copy


def test_flat_rows_keeps_an_empty_input() -> None:
    assert flat_rows(torch.empty(2, 0, 8)).shape == (0, 8)
    assert flat_rows(torch.empty(2, 3, 0)).shape == (6, 0)
    assert flat_rows(torch.empty(8)).shape == (1, 8)


def test_scales_are_one_a_row() -> None:
    scales = row_scales_like(BASE.to(torch.bfloat16))
    assert scales.shape == (2, 3, 5, 1)
    assert scales.dtype is torch.float32
