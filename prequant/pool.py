"""Byte buffers shared by the threads of a bake, of which only so many exist at a time."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

PIECE_BYTES = 2 << 20
WAIT_S = 0.1


class StoppedError(Exception):
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
                    raise StoppedError
                self._condition.wait(WAIT_S)
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


def view_of(buffer: torch.Tensor, nbytes: int) -> memoryview:
    """Return the first bytes of a buffer, without a copy."""
    values: memoryview = buffer.numpy().data
    return values[:nbytes]
