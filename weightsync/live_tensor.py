"""A tensor of live weights as the codec sees it, and what an update writes into it.

The codec speaks of elements in row-major order of the whole tensor; an engine may keep them in several
boxes with strides of its own. Host memory.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync import native, native_delta
from weightsync.binding import Spot
from weightsync.codec import Changes
from weightsync.codec.spans import Bytes
from weightsync.device_patch import DeviceWrite
from weightsync.device_tables import CPU, bytes_at
from weightsync.errors import IntegrityError
from weightsync.tables import dense_strides, segment_rows, table
from weightsync.types import Box, TensorMeta, item_bytes

Index = npt.NDArray[Any]  # unsigned or signed integers


@dataclass(eq=False)
class Write:
    """Elements of live memory that get new values; what they held is kept from :meth:`put` on.

    ``view`` is memory of unsigned integers, ``positions`` index it, ``values`` are of its dtype. For a
    dense tensor of 2-byte elements: 8 bytes a changed element, what was overwritten included.
    """

    view: npt.NDArray[Any]
    positions: Index
    values: npt.NDArray[Any]
    former: npt.NDArray[Any] | None = field(default=None)

    @property
    def count(self) -> int:
        return int(self.positions.size)

    @property
    def num_bytes(self) -> int:
        """Of this record, once it was put."""
        return int(self.positions.nbytes + 2 * self.values.nbytes)

    def put(self) -> None:
        """Write, keeping the old values."""
        if self.positions.dtype != np.uint32:
            self.former = self.view[self.positions]
            self.view[self.positions] = self.values
            return
        former = np.empty_like(self.values)
        self._exchange(self.values, former)  # raises before the first byte, or not at all
        self.former = former

    def check(self) -> None:
        """Raises :class:`IntegrityError` unless every element holds its new value."""
        self._compare(self.values, "written")

    def take_back(self) -> None:
        """Undo :meth:`put`, if it was done. Raises :class:`IntegrityError` if that cannot be seen."""
        if self.former is None:
            return
        self.view[self.positions] = self.former
        self._compare(self.former, "taken back")

    def _exchange(self, values: npt.NDArray[Any], former: npt.NDArray[Any]) -> None:
        native_delta.exchange(
            self.view.itemsize,
            (self.view.ctypes.data, self.view.size),
            self.positions.ctypes.data,
            values.ctypes.data,
            former.ctypes.data,
            self.values.size,
        )

    def _compare(self, expected: npt.NDArray[Any], what: str) -> None:
        if self.positions.dtype == np.uint32:
            wrong = native_delta.count_different(
                self.view.itemsize,
                (self.view.ctypes.data, self.view.size),
                self.positions.ctypes.data,
                expected.ctypes.data,
                expected.size,
            )
        else:
            wrong = int(np.count_nonzero(self.view[self.positions] != expected))
        if wrong:
            raise IntegrityError(f"{wrong} of {expected.size} elements are not what was {what}")


class LiveTensor:
    """``spots`` are the boxes of one rank; together they hold each element of the tensor once. On a
    ``device`` it must be dense."""

    def __init__(self, meta: TensorMeta, spots: Sequence[Spot], device: str = CPU) -> None:
        self.meta = meta
        self.device = device
        self.spots = tuple(spots)
        strides = dense_strides(meta.shape, item_bytes(meta.dtype))
        self.is_dense = len(spots) == 1 and tuple(spots[0].strides_bytes) == tuple(strides)
        held = sum(spot.box.num_elements for spot in spots)
        pairs = itertools.combinations(spots, 2)
        is_once = not any(a.box.intersect(b.box) for a, b in pairs)
        self.is_whole = held == meta.num_elements and is_once

    def bytes(self) -> Bytes:
        """The wire form, uint8 [meta.num_bytes]: live memory where it is dense on the host, else a
        copy."""
        if self.device != CPU:
            return bytes_at(self.spots[0].ptr, self.meta.num_bytes, self.device)
        if self.is_dense:
            return _memory(self.spots[0].ptr, self.meta.num_bytes)
        found = np.empty(self.meta.num_bytes, dtype=np.uint8)
        copy_parts(self.meta, found.ctypes.data, self.spots, is_gather=True)
        return found

    def writes_of(self, changes: Changes) -> list[Write | DeviceWrite]:
        """What one span's changes are in live memory."""
        width = changes.place.kind.element_bytes
        values = changes.values.view(f"u{width}")
        start = changes.place.start_element
        if self.device != CPU:
            target = self.spots[0].ptr + start * width
            return [DeviceWrite(target, changes.positions, values, changes.place)]
        if self.is_dense:
            whole = _memory(self.spots[0].ptr, self.meta.num_bytes).view(f"u{width}")
            part = whole[start : start + changes.place.num_elements]
            return [Write(part, changes.positions, values)]
        at = (changes.positions.astype(np.int64) + start) * width
        item = item_bytes(self.meta.dtype)
        index = np.unravel_index(at // item, self.meta.shape) if self.meta.shape else ()
        found: list[Write | DeviceWrite] = []
        for spot in self.spots:
            inside = np.ones(at.size, dtype=bool)
            for axis, a, b in zip(index, spot.box.start, spot.box.stop, strict=True):
                inside &= (axis >= a) & (axis < b)
            if not inside.any():
                continue
            low, high = _bounds(spot, item)
            where = at[inside] % item + (spot.ptr - low)
            for axis, a, s in zip(index, spot.box.start, spot.strides_bytes, strict=True):
                where += (axis[inside] - a) * s
            view = _memory(low, high - low).view(f"u{width}")
            found.append(Write(view, where // width, values[inside]))
        return found


def live_part(meta: TensorMeta, box: Box, spots: Sequence[Spot], device: str = CPU) -> LiveTensor:
    """The box of a larger tensor as a tensor of its own, ``meta``: what ``spots`` of the larger one hold
    of it. What they hold twice leaves it not whole."""
    found: list[Spot] = []
    for spot in spots:
        common = spot.box.intersect(box)
        if common is None:
            continue
        low = tuple(a - b for a, b in zip(common.start, box.start, strict=True))
        high = tuple(a - b for a, b in zip(common.stop, box.start, strict=True))
        found.append(Spot(Box(low, high), spot.at(common), spot.strides_bytes, spot.dtype))
    return LiveTensor(meta, found, device)


def copy_parts(
    meta: TensorMeta,
    dense_ptr: int,
    spots: Sequence[Spot],
    *,
    is_gather: bool,
    num_threads: int = 1,
) -> None:
    """Between a dense tensor at ``dense_ptr`` and the boxes that spots hold of it, in host memory."""
    item = item_bytes(meta.dtype)
    dense = Spot(Box.whole(meta.shape), dense_ptr, dense_strides(meta.shape, item), meta.dtype)
    rows: list[tuple[int, ...]] = []
    for spot in spots:
        whole = (dense.at(spot.box), dense.strides_bytes, item)
        part = (spot.ptr, spot.strides_bytes, item)
        source, target = (part, whole) if is_gather else (whole, part)
        rows += segment_rows(spot.box.shape, source=source, target=target)
    native.copy_segments(table(rows, 13), num_threads=num_threads)


def _bounds(spot: Spot, item: int) -> tuple[int, int]:
    reach = [(n - 1) * s for n, s in zip(spot.box.shape, spot.strides_bytes, strict=True)]
    low = spot.ptr + sum(r for r in reach if r < 0)
    return low, spot.ptr + sum(r for r in reach if r > 0) + item


def _memory(ptr: int, num_bytes: int) -> Bytes:
    """Live memory without a copy; valid while it is."""
    if not num_bytes:
        return np.empty(0, dtype=np.uint8)
    found: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(ptr))
    return found
