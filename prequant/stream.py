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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch

from prequant import pool
from prequant.layout import Job, ShardLayout
from prequant.pool import WAIT_S, BufferPool, StoppedError, view_of
from prequant.turn import Piece, Result, Turner, piece_bytes
from quantpolicy.errors import QuantPolicyError, RequestError
from quantpolicy.plan import SchemeSettings

POOL_BYTES = 32 << 20
FLUSH_BYTES = 64 << 20

_Item = TypeVar("_Item")


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
        except StoppedError:
            for fault in self._faults:
                raise fault from None
            raise RuntimeError("a thread of the bake died; its traceback stands above") from None
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
        """Run a thread's body; whatever ends it early stops the others."""
        finished = False
        try:
            body()
            finished = True
        except StoppedError:
            pass
        except (QuantPolicyError, OSError, RuntimeError, ValueError, MemoryError) as fault:
            self._faults.append(fault)
        finally:
            if not finished:
                self._stop.set()

    def _put(self, target: queue.Queue[_Item], item: _Item) -> None:
        while not self._stop.is_set():
            try:
                target.put(item, timeout=WAIT_S)
            except queue.Full:
                continue
            return
        raise StoppedError

    def _take(self, source: queue.Queue[_Item]) -> _Item:
        while not self._stop.is_set():
            try:
                return source.get(timeout=WAIT_S)
            except queue.Empty:
                continue
        raise StoppedError

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
            nbytes = min(pool.PIECE_BYTES, end - start)
            buffer = self._sources.take(nbytes)
            _fill(file, buffer, nbytes, shard.source.path)
            digest.update(view_of(buffer, nbytes))
            self._sources.give(buffer)
            start += nbytes

    def _read_job(
        self, job: Job, shard: ShardLayout, file: BinaryIO, digest: hashlib._Hash | None
    ) -> None:
        left = job.entry.end - job.entry.start
        step = piece_bytes(job)
        if left == 0:
            self._put(self._pieces, Piece(job, torch.empty(0, dtype=torch.uint8), 0, True))
        while left:
            nbytes = min(step, left)
            buffer = self._sources.take(nbytes)
            _fill(file, buffer, nbytes, shard.source.path)
            if digest is not None:
                digest.update(view_of(buffer, nbytes))
            left -= nbytes
            self._put(self._pieces, Piece(job, buffer, nbytes, not left))

    def _work(self) -> None:
        turner = Turner(self._settings, self._sources, self._results)
        for shard in self._shards:
            for _ in shard.jobs:
                last = False
                while not last:
                    piece = self._take(self._pieces)
                    last = piece.last
                    if piece.nbytes:
                        for result in turner.turn(piece):
                            self._put(self._ready, result)

    def _write(self, shard: ShardLayout, flusher: ThreadPoolExecutor) -> tuple[str, int, str]:
        path = self._folder / shard.file_name
        digest = hashlib.sha256(shard.prefix)
        written, flushed = len(shard.prefix), 0
        flush: Future[None] | None = None
        try:
            with path.open("wb", buffering=0) as file:
                _write_all(file, memoryview(shard.prefix))
                while written < shard.file_bytes:
                    result = self._take(self._ready)
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


def _fill(file: BinaryIO, buffer: torch.Tensor, nbytes: int, path: Path) -> None:
    view = view_of(buffer, nbytes)
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
