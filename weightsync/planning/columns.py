"""A layout as integer columns: what planning looks at, however many tensors there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightsync.layout import Layout
from weightsync.planning.transfers import padded, padded_boxes
from weightsync.types import item_bytes

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LayoutColumns:
    """Placements of all tensors, those of one tensor next to each other.

    Placement ``j`` of tensor ``i`` is row ``first[i] + j``.
    """

    world_size: int
    first: Int64  # [tensors + 1]
    rank: Int64  # [placements]
    start: Int64  # [placements, dims], padded with 0
    stop: Int64  # [placements, dims], padded with 1

    @property
    def num_dims(self) -> int:
        return int(self.start.shape[1])

    @cached_property
    def boxes(self) -> Int64:
        """[placements, 2 * dims] starts and stops beside each other."""
        return np.ascontiguousarray(np.concatenate([self.start, self.stop], axis=1))

    def widened(self, dims: int) -> LayoutColumns:
        """The same with more (padded) dimensions."""
        start, stop = widened(self.start, self.stop, dims)
        return LayoutColumns(self.world_size, self.first, self.rank, start, stop)


def widened(start: Int64, stop: Int64, dims: int) -> tuple[Int64, Int64]:
    """Boxes [n, fewer dims] padded to ``dims`` dimensions."""
    more = dims - start.shape[1]
    if not more:
        return start, stop
    pad = ((0, 0), (0, more))
    return np.pad(start, pad), np.pad(stop, pad, constant_values=1)


def columns_of(layout: Layout) -> LayoutColumns:
    """The columns of a layout."""
    counts = [len(t.placed) for t in layout.tensors]
    first = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=first[1:])
    placed = [p for t in layout.tensors for p in t.placed]
    start, stop = padded_boxes([p.box.start for p in placed], [p.box.stop for p in placed])
    ranks = np.array([p.rank for p in placed], dtype=np.int64)
    return LayoutColumns(layout.world_size, first, ranks, start, stop)


@dataclass(frozen=True, eq=False)
class MemoryColumns:
    """How placements lie in memory, row by row as in :class:`LayoutColumns`."""

    region: Int64  # [placements]
    offset_bytes: Int64  # [placements]
    strides_bytes: Int64  # [placements, dims], padded with 0
    dtype: Int64  # [placements] index in ``dtypes``
    dtypes: tuple[str, ...]

    @cached_property
    def item_bytes(self) -> Int64:
        """[placements] stored bytes of one element."""
        sizes = np.array([item_bytes(d) for d in self.dtypes], dtype=np.int64)
        return sizes[self.dtype] if len(sizes) else self.dtype


def memory_of(layout: Layout) -> MemoryColumns:
    """The memory columns of a layout."""
    placed = [p for t in layout.tensors for p in t.placed]
    dtypes = {d: i for i, d in enumerate(sorted({p.dtype for p in placed}))}
    return MemoryColumns(
        np.array([p.region for p in placed], dtype=np.int64),
        np.array([p.offset_bytes for p in placed], dtype=np.int64),
        padded([p.strides_bytes for p in placed], 0),
        np.array([dtypes[p.dtype] for p in placed], dtype=np.int64),
        tuple(dtypes),
    )
