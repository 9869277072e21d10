"""Segment tables as lists of plain reads, which is all that a network card can do.

Pure integer work on arrays: strided segments become runs, neighbours that continue each other on
both sides become one read, and big ones are cut so that a transfer can be given up between pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from weightsync.errors import TransportError
from weightsync.types import format_bytes

Int64Array = npt.NDArray[np.int64]

#: A read costs microseconds and memory for its descriptor: above this many a ring is the better way.
MAX_READS: Final = 1_000_000

_NUM_BYTES, _CONVERT = 2, 3
#: (count, source stride, target stride) columns of a segment table, outermost first.
_DIMS: Final = ((4, 5, 6), (7, 8, 9), (10, 11, 12))


@dataclass(frozen=True, slots=True)
class Reads:
    """Contiguous reads; each array is int64[n]."""

    source_ptr: Int64Array
    target_ptr: Int64Array
    num_bytes: Int64Array

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    def take(self, index: npt.NDArray[np.intp] | slice) -> Reads:
        return Reads(self.source_ptr[index], self.target_ptr[index], self.num_bytes[index])


def reads_of(table: Int64Array) -> Reads:
    """The fewest reads that do what a segment table says."""
    if np.any(table[:, _CONVERT] != 0):
        raise TransportError(
            f"{int(np.count_nonzero(table[:, _CONVERT]))} of {len(table)} segments convert elements: "
            "p2p reads move bytes only; convert while filling a ring (stream)"
        )
    return merge(expand(fold(table)))


def fold(table: Int64Array) -> Int64Array:
    """Dimensions that are dense on both sides moved into the run; segments without a byte dropped."""
    has_bytes = table[:, _NUM_BYTES] > 0
    for count, _, _ in _DIMS:
        has_bytes &= table[:, count] > 0
    rows = np.array(table[has_bytes], dtype=np.int64)
    is_inner_done = np.ones(len(rows), dtype=bool)
    for count, source_stride, target_stride in reversed(_DIMS):
        run = rows[:, _NUM_BYTES]
        is_dense = (rows[:, source_stride] == run) & (rows[:, target_stride] == run)
        joins = is_inner_done & (is_dense | (rows[:, count] == 1))
        rows[joins, _NUM_BYTES] *= rows[joins, count]
        rows[joins, count] = 1
        is_inner_done &= rows[:, count] == 1
    return rows


def expand(rows: Int64Array) -> Reads:
    """Every run of every row."""
    counts = [rows[:, count] for count, _, _ in _DIMS]
    per_row = counts[0] * counts[1] * counts[2]
    num_runs = int(per_row.sum())
    if num_runs > MAX_READS:
        total = int((per_row * rows[:, _NUM_BYTES]).sum())
        raise TransportError(
            f"{num_runs} reads for {format_bytes(total)}: p2p takes at most {MAX_READS} in one list, "
            "because each costs microseconds; pack through a ring instead (stream)"
        )
    row = np.repeat(np.arange(len(rows)), per_row)
    index = np.arange(num_runs) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    source, target = rows[row, 0], rows[row, 1]
    for count, source_stride, target_stride in reversed(_DIMS):
        index, step = np.divmod(index, rows[row, count])
        source = source + step * rows[row, source_stride]
        target = target + step * rows[row, target_stride]
    return Reads(source, target, rows[row, _NUM_BYTES])


def merge(
    reads: Reads, source_starts: Int64Array | None = None, target_starts: Int64Array | None = None
) -> Reads:
    """Reads by rising source address, neighbours on both sides joined.

    ``source_starts`` and ``target_starts``, rising addresses of allocations: nothing is joined over
    the start of one.
    """
    if not len(reads):
        return reads
    reads = reads.take(np.lexsort((reads.target_ptr, reads.source_ptr)))
    size = reads.num_bytes
    goes_on = (reads.source_ptr[1:] == reads.source_ptr[:-1] + size[:-1]) & (
        reads.target_ptr[1:] == reads.target_ptr[:-1] + size[:-1]
    )
    for ptrs, starts in ((reads.source_ptr, source_starts), (reads.target_ptr, target_starts)):
        if starts is not None:
            owner = np.searchsorted(starts, ptrs, side="right")
            goes_on &= owner[1:] == owner[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return Reads(reads.source_ptr[first], reads.target_ptr[first], np.add.reduceat(size, first))


def cut(reads: Reads, most_bytes: int) -> Reads:
    """The same bytes in reads of at most ``most_bytes`` each."""
    parts = -(-reads.num_bytes // most_bytes)
    row = np.repeat(np.arange(len(reads)), parts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * most_bytes
    left = np.minimum(most_bytes, reads.num_bytes[row] - offset)
    return Reads(reads.source_ptr[row] + offset, reads.target_ptr[row] + offset, left)


def pieces(num_bytes: Int64Array, most_bytes: int, most_reads: int) -> list[tuple[int, int]]:
    """Index ranges ``[first, last)`` of about ``most_bytes`` and at most ``most_reads`` reads."""
    if not len(num_bytes):
        return []
    by_bytes = (np.cumsum(num_bytes) - num_bytes) // most_bytes
    by_count = np.arange(len(num_bytes)) // most_reads
    starts = np.flatnonzero(np.diff(by_bytes, prepend=-1) | np.diff(by_count, prepend=-1))
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(num_bytes)], strict=True))
