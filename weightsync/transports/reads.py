"""Checks of read tables, and copies that can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, TransportError
from weightsync.memory import merge_spans
from weightsync.native import CONVERT_FP32_TO_BF16, SEGMENT_COLUMNS, CancelFlag
from weightsync.transports.base import Table

#: Shorter copies end by themselves before a thread to watch them would pay.
_WATCHED_BYTES: Final = 16 * 2**20
_LIMIT: Final = float(2**62)
_COUNTS: Final = slice(4, 13, 3)
_SOURCE_STRIDES: Final = slice(5, 13, 3)
_TARGET_STRIDES: Final = slice(6, 13, 3)

Int64Array = npt.NDArray[np.int64]


def normalise_table(table: Table) -> Table:
    """A copy of a segment table without rows that move nothing.

    Raises :class:`ProtocolError` for a table that no memory could satisfy.
    """
    if table.ndim != 2 or table.shape[1] != len(SEGMENT_COLUMNS) or table.dtype != np.int64:
        raise ProtocolError(
            f"read table: expected int64 [n, {len(SEGMENT_COLUMNS)}], got {table.dtype} "
            f"{list(table.shape)}"
        )
    moves = (table[:, 2] != 0) & (table[:, _COUNTS] != 0).all(axis=1)
    rows = np.ascontiguousarray(table[moves])
    if (rows[:, 2] < 0).any() or (rows[:, _COUNTS] < 0).any():
        raise ProtocolError("read table: a negative count or size")
    if not np.isin(rows[:, 3], (0, CONVERT_FP32_TO_BF16)).all():
        raise ProtocolError("read table: an unknown conversion")
    wide = rows.astype(np.float64)  # cannot overflow, and 2^62 is exact enough
    for strides in (_SOURCE_STRIDES, _TARGET_STRIDES):
        reach = np.abs(wide[:, strides] * wide[:, _COUNTS]).sum(axis=1)
        if (reach + np.abs(wide[:, :3]).sum(axis=1) >= _LIMIT).any():
            raise ProtocolError("read table: addresses overflow")
    if (wide[:, 2] * wide[:, _COUNTS].prod(axis=1)).sum() >= _LIMIT:
        raise ProtocolError("read table: more than 2^62 bytes")
    return rows.copy() if rows is table else rows


def table_bytes(rows: Table) -> int:
    """Source bytes that a normalised table moves."""
    return int((rows[:, 2] * rows[:, _COUNTS].prod(axis=1)).sum())


def _bounds(rows: Table, ptr_column: int, strides: slice, run_bytes: Int64Array) -> Int64Array:
    """First and past-the-last address that each row touches, int64[n, 2]."""
    reach = (rows[:, _COUNTS] - 1) * rows[:, strides]
    low = rows[:, ptr_column] + np.minimum(reach, 0).sum(axis=1)
    high = rows[:, ptr_column] + np.maximum(reach, 0).sum(axis=1) + run_bytes
    return np.stack((low, high), axis=1)


def source_bounds(rows: Table) -> Int64Array:
    """First and past-the-last source address that each row touches, int64[n, 2]."""
    return _bounds(rows, 0, _SOURCE_STRIDES, rows[:, 2])


def check_sources(rows: Table, spans: Sequence[tuple[int, int]]) -> None:
    """Every source byte must lie within (ptr, num_bytes) ``spans``."""
    _check_within(source_bounds(rows), spans, "source", "published")


def check_targets(rows: Table, spans: Sequence[tuple[int, int]]) -> None:
    """Every target byte must lie within (ptr, num_bytes) ``spans``."""
    is_converted = rows[:, 3] == CONVERT_FP32_TO_BF16
    run_bytes = np.where(is_converted, rows[:, 2] // 2, rows[:, 2])
    _check_within(_bounds(rows, 1, _TARGET_STRIDES, run_bytes), spans, "target", "local")


def _check_within(
    bounds: Int64Array, spans: Sequence[tuple[int, int]], end: str, whose: str
) -> None:
    if not len(bounds):
        return
    merged, _ = merge_spans(spans, page_bytes=1)
    inside = np.zeros(len(bounds), dtype=bool)
    if merged:
        starts = np.array([ptr for ptr, _ in merged], dtype=np.int64)
        stops = np.array([ptr + size for ptr, size in merged], dtype=np.int64)
        nearest = np.searchsorted(starts, bounds[:, 0], side="right") - 1
        inside = (nearest >= 0) & (bounds[:, 1] <= stops[nearest])
    if not inside.all():
        row = int(np.argmin(inside))
        low, high = (int(n) for n in bounds[row])
        raise ProtocolError(
            f"read table row {row}: {end} bytes {low:#x}..{high:#x} are outside the {whose} regions"
        )


def run_stoppable(
    copy: Callable[[CancelFlag], int],
    num_bytes: int,
    deadline: Deadline,
    lost: Callable[[], str | None],
) -> None:
    """Run a native copy that the deadline, its token or a lost peer stops.

    When this returns or raises, nothing is copying any more.
    """
    deadline.check()
    flag = CancelFlag()
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(deadline.slice_s(0.02)):
            is_cancelled = deadline.token is not None and deadline.token.is_cancelled
            if deadline.remaining_s() <= 0 or is_cancelled or lost() is not None:
                flag.set()
                return

    watcher: threading.Thread | None = None
    if num_bytes >= _WATCHED_BYTES:
        watcher = threading.Thread(target=watch, name="weightsync-watch", daemon=True)
        watcher.start()
    try:
        copied = copy(flag)
    finally:
        is_done.set()
        if watcher is not None:
            watcher.join()
    if copied < num_bytes:
        deadline.check()
        if (reason := lost()) is not None:
            raise deadline.lost(reason)
        raise TransportError(f"{deadline.peer}: only {copied} of {num_bytes} B were read")
