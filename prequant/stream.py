"""Read, quantise and write at once: three threads, each in the order of the output file.

The reader hashes the source while it fills buffers, the worker turns buffers into output, and the
calling thread writes and hashes the result. Two bounded pools of buffers hold the memory down; a
fault in any thread stops all three. What is written is decided by ``layout``.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from prequant.encode import TILE_ROWS, TORCH_DTYPES
from prequant.layout import Job, Mode, ShardLayout
from prequant.rows import ROW_SCHEMES, NonFiniteError, RowQuantiser
from quantpolicy.errors import Mismatch, PlanMismatchError, QuantPolicyError, RequestError
from quantpolicy.plan import SchemeSettings
from quantpolicy.runtime.weights import quantise_weight, tensor_parts
from quantpolicy.schemes import Scheme

PIECE_BYTES = 8 << 20
POOL_BYTES = 128 << 20
FLUSH_BYTES = 64 << 20
_WAIT_S = 0.1

Progress = Callable[[int, int], None]


class _StoppedError(Exception):
    """Another thread failed; this one gives up quietly."""


class BufferPool:
    """Byte buffers of which at most ``limit_bytes`` are out at a time (one, if it is larger)."""

    def __init__(self, limit_bytes: int, stop: threading.Event) -> None:
        self._limit = limit_bytes
        self._stop = stop
        self._out_bytes = 0
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._condition = threading.Condition()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least ``nbytes``, when there is room for it."""
        size = PIECE_BYTES if nbytes <= PIECE_BYTES else nbytes
        with self._condition:
            while self._out_bytes and self._out_bytes + size > self._limit:
                if self._stop.is_set():
                    raise _StoppedError
                self._condition.wait(_WAIT_S)
            self._out_bytes += size
            if self._free[size]:
                return self._free[size].pop()
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; large ones are freed."""
        with self._condition:
            self._out_bytes -= buffer.numel()
            if buffer.numel() == PIECE_BYTES:
                self._free[PIECE_BYTES].append(buffer)
            self._condition.notify_all()


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


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """One finished pair of files: sizes and SHA-256 of the source and of the output."""

    file_name: str
    nbytes: int
    sha256: str
    source_name: str
    source_bytes: int
    source_sha256: str


def stream_shards(
    shards: Sequence[ShardLayout],
    folder: Path,
    settings: SchemeSettings,
    progress: Callable[[int], None] | None = None,
) -> list[WrittenShard]:
    """Write every shard into ``folder`` and flush it to disk.

    Args:
        progress: told the source bytes done since the last call.

    Raises:
        PlanMismatchError: a weight to quantise holds NaN or infinity.
        RequestError: a file cannot be read or written, or the source changed meanwhile.
    """
    return _Stream(shards, folder, settings, progress).run()


class _Stream:
    def __init__(
        self,
        shards: Sequence[ShardLayout],
        folder: Path,
        settings: SchemeSettings,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._shards = shards
        self._folder = folder
        self._settings = settings
        self._progress = progress
        self._stop = threading.Event()
        self._faults: list[BaseException] = []
        self._sources = BufferPool(POOL_BYTES, self._stop)
        self._results = BufferPool(POOL_BYTES, self._stop)
        self._pieces: queue.Queue[Piece] = queue.Queue(maxsize=64)
        self._ready: queue.Queue[Result] = queue.Queue(maxsize=64)
        self._source_hashes: list[str] = []

    def run(self) -> list[WrittenShard]:
        threads = [
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            for name, body in (("bake-read", self._read_all), ("bake-quantise", self._work))
        ]
        for thread in threads:
            thread.start()
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="bake-flush") as flusher:
                written = [self._write(shard, flusher) for shard in self._shards]
            for thread in threads:
                thread.join()
        except _StoppedError:
            raise self._faults[0] from None
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        return [
            WrittenShard(
                name, nbytes, digest, shard.source.path.name, shard.source.file_bytes, source
            )
            for shard, (name, nbytes, digest), source in zip(
                self._shards, written, self._source_hashes, strict=True
            )
        ]

    def _guarded(self, body: Callable[[], None]) -> None:
        """Run a thread's body; hand its fault to the calling thread."""
        try:
            body()
        except _StoppedError:
            self._stop.set()
        except (QuantPolicyError, OSError, RuntimeError, ValueError, MemoryError) as fault:
            self._faults.append(fault)
            self._stop.set()

    def _put(self, target: queue.Queue[Piece] | queue.Queue[Result], item: object) -> None:
        while not self._stop.is_set():
            try:
                target.put(item, timeout=_WAIT_S)  # type: ignore[arg-type]
            except queue.Full:
                continue
            return
        raise _StoppedError

    def _next_piece(self) -> Piece:
        while not self._stop.is_set():
            try:
                return self._pieces.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
        raise _StoppedError

    def _next_result(self) -> Result:
        while not self._stop.is_set():
            try:
                return self._ready.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
        raise _StoppedError

    # reading

    def _read_all(self) -> None:
        for shard in self._shards:
            try:
                with shard.source.path.open("rb", buffering=0) as file:
                    self._source_hashes.append(self._read_shard(shard, file))
            except OSError as error:
                raise _io_fault(shard.source.path, "read", error) from error

    def _read_shard(self, shard: ShardLayout, file: BinaryIO) -> str:
        """Read and hash a source file in its own order, then the unaligned tensors again."""
        digest = hashlib.sha256()
        by_start = sorted(shard.jobs, key=lambda job: (job.entry.start, job.entry.end))
        self._hash_only(file, shard, 0, shard.source.data_offset, digest)
        for job in by_start:
            start = shard.source.data_offset + job.entry.start
            end = shard.source.data_offset + job.entry.end
            if job.is_aligned:
                file.seek(start)
                self._read_job(job, shard, file, digest)
            else:
                self._hash_only(file, shard, start, end, digest)
        for job in shard.jobs:
            if not job.is_aligned:
                file.seek(shard.source.data_offset + job.entry.start)
                self._read_job(job, shard, file, None)
        return digest.hexdigest()

    def _hash_only(
        self, file: BinaryIO, shard: ShardLayout, start: int, end: int, digest: hashlib._Hash
    ) -> None:
        file.seek(start)
        while start < end:
            nbytes = min(PIECE_BYTES, end - start)
            buffer = self._sources.take(nbytes)
            _fill(file, buffer, nbytes, shard.source.path)
            digest.update(_view(buffer, nbytes))
            self._sources.give(buffer)
            start += nbytes

    def _read_job(
        self, job: Job, shard: ShardLayout, file: BinaryIO, digest: hashlib._Hash | None
    ) -> None:
        left = job.entry.end - job.entry.start
        step = _piece_bytes(job)
        if left == 0:
            self._put(self._pieces, Piece(job, torch.empty(0, dtype=torch.uint8), 0, True))
        while left:
            nbytes = min(step, left)
            buffer = self._sources.take(nbytes)
            _fill(file, buffer, nbytes, shard.source.path)
            if digest is not None:
                digest.update(_view(buffer, nbytes))
            left -= nbytes
            self._put(self._pieces, Piece(job, buffer, nbytes, not left))

    # working

    def _work(self) -> None:
        quantiser = _WeightQuantiser(self._settings, self._results)
        for shard in self._shards:
            for _ in shard.jobs:
                last = False
                while not last:
                    piece = self._next_piece()
                    last = piece.last
                    if piece.nbytes:
                        for result in self._turn(piece, quantiser):
                            self._put(self._ready, result)

    def _turn(self, piece: Piece, quantiser: _WeightQuantiser) -> Iterator[Result]:
        job, nbytes = piece.job, piece.nbytes
        if job.mode is Mode.COPY:
            yield Result(_view(piece.buffer, nbytes), piece.buffer, self._sources, nbytes)
            return
        source = piece.buffer[:nbytes].view(TORCH_DTYPES[job.entry.dtype])
        assert job.dtype is not None
        if job.mode is Mode.CAST:
            out_bytes = source.numel() * job.dtype.itemsize
            buffer = self._results.take(out_bytes)
            buffer[:out_bytes].view(job.dtype).copy_(source)
            yield Result(_view(buffer, out_bytes), buffer, self._results, nbytes)
        else:
            yield from quantiser.turn(job, source, nbytes, piece.last)
        self._sources.give(piece.buffer)

    # writing

    def _write(self, shard: ShardLayout, flusher: ThreadPoolExecutor) -> tuple[str, int, str]:
        path = self._folder / shard.file_name
        digest = hashlib.sha256(shard.prefix)
        written, flushed = len(shard.prefix), 0
        flush: Future[None] | None = None
        try:
            with path.open("wb", buffering=0) as file:
                _write_all(file, memoryview(shard.prefix))
                while written < shard.file_bytes:
                    result = self._next_result()
                    _write_all(file, result.view)
                    digest.update(result.view)
                    written += result.view.nbytes
                    if result.pool is not None and result.buffer is not None:
                        result.pool.give(result.buffer)
                    if self._progress is not None:
                        self._progress(result.source_bytes)
                    if written - flushed > FLUSH_BYTES and (flush is None or flush.done()):
                        flushed = written
                        flush = flusher.submit(_flush, file.fileno())
                if flush is not None:
                    flush.result()
                os.fsync(file.fileno())
        except OSError as error:
            raise _io_fault(path, "written", error) from error
        return shard.file_name, written, digest.hexdigest()


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
            if job.layer.scheme in ROW_SCHEMES:
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
                yield Result(_view(flat, flat.numel()))

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
        return Result(_view(buffer, rows.numel()), buffer, self._pool, source_bytes)

    def _by_tile(self, job: Job, rows: torch.Tensor, source_bytes: int) -> Iterator[Result]:
        """Quantise a few tiles at a time.

        A scheme with one scale for the whole tensor gets an extra tile that holds the tensor's
        largest value, so that every chunk has the same maximum; its output is dropped.
        """
        assert job.layer is not None
        scheme, tile = job.layer.scheme, TILE_ROWS[job.layer.scheme]
        amax = rows.abs().max()
        if not bool(amax.isfinite()):
            raise NonFiniteError
        step = max(tile, PIECE_BYTES // (rows.shape[1] * rows.element_size()) // tile * tile)
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
            yield Result(_view(flat, flat.numel()), source_bytes=share)


def _piece_bytes(job: Job) -> int:
    """Return how many bytes of a tensor are read at a time: whole rows, whole tiles."""
    if job.layer is None or job.mode is not Mode.QUANTISE:
        return PIECE_BYTES
    if job.layer.scheme is Scheme.NVFP4:
        return max(1, job.entry.end - job.entry.start)
    row_bytes = job.layer.shape[1] * TORCH_DTYPES[job.entry.dtype].itemsize
    tile_bytes = max(1, row_bytes * TILE_ROWS[job.layer.scheme])
    return max(1, PIECE_BYTES // tile_bytes) * tile_bytes


def _view(buffer: torch.Tensor, nbytes: int) -> memoryview:
    values: memoryview = buffer.numpy().data
    return values[:nbytes]


def _fill(file: BinaryIO, buffer: torch.Tensor, nbytes: int, path: Path) -> None:
    view = _view(buffer, nbytes)
    while view.nbytes:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise RequestError(
                str(path), "became shorter while it was read", remedy="bake from a finished copy"
            )
        view = view[count:]


def _write_all(file: BinaryIO, view: memoryview) -> None:
    while view.nbytes:
        view = view[file.write(view) :]


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _io_fault(path: Path, verb: str, error: OSError) -> RequestError:
    return RequestError(
        str(path), f"cannot be {verb}: {error.strerror}", remedy="check space and permissions"
    )


def _not_finite(job: Job) -> PlanMismatchError:
    fault = Mismatch("weight_not_finite", job.name, "finite values", "NaN or infinity")
    return PlanMismatchError(
        "source", (fault,), remedy="repair or download the dense checkpoint again"
    )
