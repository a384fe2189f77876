"""From pieces of source tensors to the bytes that are written: copied, cast or quantised.

The arithmetic belongs to ``rows`` and ``quantpolicy.runtime``, threads and files to ``stream``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from prequant import pool
from prequant.encode import TILE_ROWS, TORCH_DTYPES
from prequant.layout import Job, Mode
from prequant.pool import BufferPool, view_of
from prequant.rows import NonFiniteError, RowQuantiser
from quantpolicy.errors import Mismatch, PlanMismatchError
from quantpolicy.plan import SchemeSettings
from quantpolicy.runtime.weights import quantise_weight, tensor_parts
from quantpolicy.schemes import ROW_SCALED, Scheme


@dataclass(slots=True)
class Piece:
    """Consecutive bytes of one source tensor; ``last`` closes the tensor."""

    job: Job
    buffer: torch.Tensor
    nbytes: int
    last: bool


@dataclass(slots=True)
class Result:
    """Bytes to write next, and where their buffer goes back to."""

    view: memoryview
    buffer: torch.Tensor | None = None
    pool: BufferPool | None = None
    source_bytes: int = 0


class Turner:
    """Turns pieces into results, in order.

    Args:
        sources: where the pieces' buffers come from and go back to.
        results: where the results' buffers come from.
    """

    def __init__(self, settings: SchemeSettings, sources: BufferPool, results: BufferPool) -> None:
        self._sources = sources
        self._results = results
        self._quantiser = _WeightQuantiser(settings, results)

    def turn(self, piece: Piece) -> Iterator[Result]:
        """Yield what is written for a piece; a weight's last one yields its scales too."""
        job, nbytes = piece.job, piece.nbytes
        if job.mode is Mode.COPY:
            yield Result(view_of(piece.buffer, nbytes), piece.buffer, self._sources, nbytes)
            return
        source = piece.buffer[:nbytes].view(TORCH_DTYPES[job.entry.dtype])
        assert job.dtype is not None
        if job.mode is Mode.CAST:
            out_bytes = source.numel() * job.dtype.itemsize
            buffer = self._results.take(out_bytes)
            buffer[:out_bytes].view(job.dtype).copy_(source)
            yield Result(view_of(buffer, out_bytes), buffer, self._results, nbytes)
        else:
            yield from self._quantiser.turn(job, source, nbytes, piece.last)
        self._sources.give(piece.buffer)


class _WeightQuantiser:
    """Turns the pieces of one weight after another into the parts it is stored as."""

    def __init__(self, settings: SchemeSettings, pool: BufferPool) -> None:
        self._settings = settings
        self._pool = pool
        self._by_rows: dict[tuple[Scheme, torch.dtype, torch.dtype], RowQuantiser] = {}
        self._scales: list[dict[str, torch.Tensor]] = []

    def turn(
        self, job: Job, source: torch.Tensor, source_bytes: int, last: bool
    ) -> Iterator[Result]:
        """Yield the data of these rows, and with the last ones the scales of all."""
        assert job.layer is not None
        assert job.encoding is not None
        rows = source.view(-1, job.layer.shape[1]).to(job.dtype)
        try:
            if job.layer.scheme in ROW_SCALED:
                yield self._by_row(job, rows, source_bytes)
            else:
                yield from self._by_tile(job, rows, source_bytes)
        except NonFiniteError as error:
            raise _not_finite(job) from error
        if last:
            scales, self._scales = self._scales, []
            for part in job.encoding.parts[1:]:
                pieces = [scale[part.name] for scale in scales if part.name in scale]
                if not pieces:
                    whole = torch.zeros(part.shape, dtype=part.dtype)
                else:
                    whole = torch.cat(pieces) if part.shape else pieces[0]
                flat = whole.reshape(-1).view(torch.uint8)
                yield Result(view_of(flat, flat.numel()))

    def _by_row(self, job: Job, rows: torch.Tensor, source_bytes: int) -> Result:
        assert job.layer is not None
        assert job.encoding is not None
        data_dtype = job.encoding.parts[0].dtype
        key = (job.layer.scheme, rows.dtype, data_dtype)
        if key not in self._by_rows:
            self._by_rows[key] = RowQuantiser(*key)
        buffer = self._pool.take(rows.numel())
        data = buffer[: rows.numel()].view(data_dtype).view_as(rows)
        scale = torch.empty(len(rows), 1)
        self._by_rows[key].quantise(rows, data, scale)
        self._scales.append({"scale": scale})
        return Result(view_of(buffer, rows.numel()), buffer, self._pool, source_bytes)

    def _by_tile(self, job: Job, rows: torch.Tensor, source_bytes: int) -> Iterator[Result]:
        """Quantise a few tiles at a time.

        A scheme with one scale for the whole tensor gets an extra tile that holds the tensor's
        largest value, so that every chunk has the same maximum; its output is dropped.
        """
        assert job.layer is not None
        scheme, tile = job.layer.scheme, TILE_ROWS[job.layer.scheme]
        amax = torch.maximum(rows.max(), -rows.min())
        if not bool(amax.isfinite()):
            raise NonFiniteError
        step = max(tile, pool.PIECE_BYTES // (rows.shape[1] * rows.element_size()) // tile * tile)
        for first in range(0, len(rows), step):
            chunk = rows[first : first + step]
            extra = 0
            if scheme is Scheme.NVFP4 and len(rows) > step:
                extra = tile
                chunk = torch.cat([amax.expand(tile, rows.shape[1]), chunk])
            parts = tensor_parts(quantise_weight(chunk, scheme, self._settings))
            data = parts.pop("qdata")[extra:].contiguous()
            if extra:
                tiles = -(-len(chunk) // tile)
                parts["scale"] = parts["scale"][parts["scale"].shape[0] // tiles :]
            self._scales.append(parts)
            flat = data.view(torch.uint8).reshape(-1)
            share = source_bytes * len(chunk[extra:]) // len(rows)
            yield Result(view_of(flat, flat.numel()), source_bytes=share)


def piece_bytes(job: Job) -> int:
    """Return how many bytes of a tensor are read at a time: whole rows, whole tiles."""
    if job.layer is None or job.mode is not Mode.QUANTISE:
        return pool.PIECE_BYTES
    if job.layer.scheme is Scheme.NVFP4:
        return max(1, job.entry.end - job.entry.start)
    row_bytes = job.layer.shape[1] * TORCH_DTYPES[job.entry.dtype].itemsize
    tile_bytes = max(1, row_bytes * TILE_ROWS[job.layer.scheme])
    return max(1, pool.PIECE_BYTES // tile_bytes) * tile_bytes


def _not_finite(job: Job) -> PlanMismatchError:
    fault = Mismatch("weight_not_finite", job.name, "finite values", "NaN or infinity")
    return PlanMismatchError(
        "source", (fault,), remedy="repair or download the dense checkpoint again"
    )
