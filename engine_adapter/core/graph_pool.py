"""The memory of decode graphs, in ranges of our own: torch asks for it by an allocator plug-in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from engine_adapter.core.backing import equal_pieces, map_range
from engine_adapter.core.memory import Backup
from weightsync import native

_owners: Final = itertools.count(1)


class GraphPool:
    """What graphs of one engine are captured into. Their contents nobody needs between two replays."""

    has_backup = False

    def __init__(self, device: torch.device) -> None:
        self._device = device.index if device.index is not None else torch.cuda.current_device()
        self._owner = next(_owners)
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(native.extension.__file__), "weightsync_pool_allocate", "weightsync_pool_free"
        )
        self._pool = torch.cuda.MemPool(self._allocator.allocator())  # type: ignore[no-untyped-call]

    @property
    def id(self) -> Any:
        """What ``torch.cuda.graph(pool=...)`` takes."""
        return self._pool.id

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Around captures: ranges that are taken meanwhile are this pool's."""
        native.extension.cuda_pool_own(self._owner)
        try:
            yield
        finally:
            native.extension.cuda_pool_own(0)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of each."""
        return [(base, size) for base, size in native.extension.cuda_pool_ranges(self._owner)]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.ranges)

    def release(self, backup: Backup) -> int:
        """See :class:`Part`; there is nothing to keep."""
        torch.cuda.synchronize(self._device)
        before = native.extension.cuda_free_bytes(self._device)
        for base, _ in self.ranges:
            native.extension.cuda_arena_unmap(base, self._device)
        return int(native.extension.cuda_free_bytes(self._device) - before)

    def resume(self) -> int:
        """See :class:`Part`."""
        before = native.extension.cuda_free_bytes(self._device)
        try:
            for base, size in self.ranges:
                map_range(base, equal_pieces(size), self._device)
        except BaseException:
            self.release(Backup.NONE)
            raise
        return int(before - native.extension.cuda_free_bytes(self._device))
