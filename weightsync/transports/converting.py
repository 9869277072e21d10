"""Reads that convert, where the kernel can only copy: through a scratch that stays in cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from weightsync import config
from weightsync.errors import PeerLostError
from weightsync.memory import HostMemory
from weightsync.native import CONVERT_FP32_TO_BF16, CONVERT_NONE, CancelFlag, copy_segments
from weightsync.transports.base import Table
from weightsync.transports.reads import table_bytes

#: Large enough to keep the threads of a read busy, small enough for a shared cache.
SCRATCH_BYTES: Final = 16 * 2**20
_DIMS: Final = (4, 7, 10)  # the column of each dimension's count, outermost first

Row = list[int]


class Scratch:
    """The memory between reading and converting; made when it is first needed."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None

    @property
    def ptr(self) -> int:
        if self._memory is None:
            self._memory = HostMemory.anonymous(SCRATCH_BYTES)
        return self._memory.ptr

    def pin(self) -> memoryview:
        """Keeps it mapped. Raises :class:`PeerLostError` once this end was closed."""
        if self._memory is None or not self._memory.is_open:
            raise PeerLostError("this end was closed")
        return self._memory.pin()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


@dataclass(frozen=True, slots=True)
class _Batch:
    """One filling of the scratch."""

    reads: Table
    converts: Table
    num_bytes: int


class ConvertingRead:
    """A checked table, split into rows that are read in place and rows that convert."""

    def __init__(self, rows: Table, scratch: Scratch) -> None:
        is_plain = rows[:, 3] == CONVERT_NONE
        self._plain = np.ascontiguousarray(rows[is_plain])
        self._plain_bytes = table_bytes(self._plain)
        self._scratch = scratch
        converting = [[int(n) for n in row] for row in rows[~is_plain]]
        self._batches = list(_batches(converting, scratch.ptr)) if converting else []

    def run(self, read: Callable[[Table, CancelFlag], int], flag: CancelFlag) -> int:
        """Source bytes done: all of them, unless the flag was set."""
        done = read(self._plain, flag) if len(self._plain) else 0
        if not self._batches or done < self._plain_bytes:
            return done
        with self._scratch.pin():
            for batch in self._batches:
                if read(batch.reads, flag) < batch.num_bytes:
                    break
                done += copy_segments(batch.converts, num_threads=config.num_threads(), cancel=flag)
        return done


def _batches(rows: list[Row], scratch_ptr: int) -> Iterator[_Batch]:
    reads: list[Row] = []
    converts: list[Row] = []
    used = 0
    for row in rows:
        for piece in split_row(row, SCRATCH_BYTES):
            size = _row_bytes(piece)
            if used + size > SCRATCH_BYTES:
                yield _batch(reads, converts)
                reads, converts, used = [], [], 0
            read, convert = _through(piece, scratch_ptr + used)
            reads.append(read)
            converts.append(convert)
            used = -(-(used + size) // 64) * 64  # whole lines: two threads never share one
    yield _batch(reads, converts)


def _batch(reads: list[Row], converts: list[Row]) -> _Batch:
    table = np.array(reads, dtype=np.int64)
    return _Batch(table, np.array(converts, dtype=np.int64), table_bytes(table))


def _row_bytes(row: Row) -> int:
    return row[2] * row[4] * row[7] * row[10]


def _through(row: Row, scratch_ptr: int) -> tuple[Row, Row]:
    """The same copy in two: densely into the scratch, and out of it with the conversion."""
    read, convert = list(row), list(row)
    read[1] = convert[0] = scratch_ptr
    read[3], convert[3] = CONVERT_NONE, CONVERT_FP32_TO_BF16
    stride = row[2]
    for column in reversed(_DIMS):
        read[column + 2] = convert[column + 1] = stride
        stride *= row[column]
    return read, convert


def split_row(row: Row, most_bytes: int) -> Iterator[Row]:
    """Rows of at most ``most_bytes`` (a multiple of 4) source bytes that do the same."""
    total = _row_bytes(row)
    if total <= most_bytes:
        yield row
        return
    for column in _DIMS:
        count = row[column]
        if count > 1:
            step = max(1, most_bytes // (total // count))
            for start in range(0, count, step):
                part = list(row)
                part[column] = min(step, count - start)
                part[0] += start * row[column + 1]
                part[1] += start * row[column + 2]
                yield from split_row(part, most_bytes)
            return
    for start in range(0, row[2], most_bytes):
        part = list(row)
        part[2] = min(most_bytes, row[2] - start)
        part[0] += start
        part[1] += start // 2 if row[3] == CONVERT_FP32_TO_BF16 else start
        yield part
