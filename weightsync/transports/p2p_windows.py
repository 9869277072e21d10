"""Which bytes of a CUDA read go straight to their place, and which through a window.

A descriptor costs microseconds of the CPU whatever its size. A *straight* read is one descriptor and
one pass over memory. A *window* is a stretch of the source that holds many segments: one descriptor
brings it into landing memory, and one segment copy takes all its segments to their places, with
strides and conversion if need be, at the price of a second pass. Descriptors are made by the CPU and
passes by the device, at the same time, so the best is a mixture that keeps both equally busy.

Pure integer work on arrays; nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from weightsync.transports.converting import split_row
from weightsync.transports.nixl_reads import Reads, cut, expand, fold, merge
from weightsync.transports.reads import source_bounds, table_bytes

Int64Array = npt.NDArray[np.int64]

#: A gap between two segments that is cheaper read than skipped, as a part of what surrounds it.
_MAX_GAP_BYTES: Final = 256 * 1024
#: Offsets within landing memory keep the low bits of source addresses, so that copies stay aligned.
_ALIGNMENT_BYTES: Final = 256
_DIMS: Final = (4, 7, 10)  # the column of each dimension's count in a segment table
#: Runs of strided rows from here on are worth a descriptor of their own.
_MIN_RUN_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """What decides: see the module. Measured; ``wire_bytes_per_s`` at connect."""

    op_s: float
    wire_bytes_per_s: float
    unpack_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Piece:
    """One NIXL request: straight reads, or the windows of one landing chunk and their unpacking.

    ``target_ptr`` of a chunk's reads and the sources of ``unpack`` are offsets within the chunk.
    """

    reads: Reads
    unpack: Int64Array | None = None

    @property
    def is_chunk(self) -> bool:
        return self.unpack is not None


@dataclass(frozen=True, slots=True)
class PieceLimits:
    """Sizes of requests. ``chunk_bytes`` is what one landing slot holds."""

    chunk_bytes: int
    straight_bytes: int
    straight_reads: int


def plan_pieces(
    rows: Int64Array,
    spans: Int64Array,
    *,
    costs: ReadCosts,
    limits: PieceLimits,
    target_starts: Int64Array | None,
) -> list[Piece]:
    """The requests that do what a normalised segment table says, in the order to post them.

    ``spans``: int64[n, 2], address and size of each allocation of the source, by rising address: no
    window reaches over an end. ``target_starts``: rising addresses of the target's allocations, or
    None where its memory may not be read into straight.
    """
    plain, other = _sort(rows, spans[:, 0], target_starts, limits.chunk_bytes)
    windows = _Windows.of(plain, other, spans, limits.chunk_bytes)
    is_straight = np.zeros(len(windows), dtype=bool)
    if target_starts is not None:
        is_straight = windows.choose(costs)
    straight = _straight_pieces(windows.plain_of(is_straight), limits)
    return _interleave(straight, windows.chunks(~is_straight, limits.chunk_bytes))


def _sort(
    rows: Int64Array,
    source_starts: Int64Array,
    target_starts: Int64Array | None,
    chunk_bytes: int,
) -> tuple[Reads, Int64Array]:
    """Plain reads, neighbours on both sides joined, and the rows that only a kernel can do."""
    converts = rows[:, 3] != 0
    folded = fold(rows[~converts])
    is_plain = (folded[:, 2] >= _MIN_RUN_BYTES) | (folded[:, [4, 7, 10]] == 1).all(axis=1)
    plain = merge(expand(folded[is_plain]), source_starts, target_starts)
    if target_starts is None:
        plain = cut(plain, chunk_bytes // 2)
    other = np.concatenate((rows[converts], folded[~is_plain]))
    low, high = source_bounds(other).T if len(other) else (np.empty(0), np.empty(0))
    is_wide = high - low > chunk_bytes // 2
    if np.any(is_wide):
        parts = [
            part
            for row in other[is_wide]
            for part in _narrow([int(n) for n in row], chunk_bytes // 2)
        ]
        other = np.concatenate((other[~is_wide], np.array(parts, dtype=np.int64)))
    return plain, other


def _narrow(row: list[int], most_bytes: int) -> Iterator[list[int]]:
    """Rows that do the same, and touch stretches of at most ``most_bytes`` of the source each."""
    widths = [(abs(row[c + 1]) * (row[c] - 1), c) for c in _DIMS]
    if row[2] + sum(width for width, _ in widths) <= most_bytes:
        yield row
        return
    width, column = max(widths)
    if not width:  # one run, longer than that
        yield from split_row(row, most_bytes // 4 * 4)
        return
    step = max(1, min(row[column] // 2, most_bytes // 2 // abs(row[column + 1])))
    for start in range(0, row[column], step):
        part = list(row)
        part[column] = min(step, row[column] - start)
        part[0] += start * row[column + 1]
        part[1] += start * row[column + 2]
        yield from _narrow(part, most_bytes)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Segments by rising source address, and the windows that they fall into."""

    plain: Reads
    other: Int64Array
    is_plain: npt.NDArray[np.bool_]  # of each segment, in order
    index: Int64Array  # of each segment, in order: its row in plain or other
    first: Int64Array  # of each window: its first segment
    low: Int64Array  # of each window
    high: Int64Array

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def of(cls, plain: Reads, other: Int64Array, spans: Int64Array, chunk_bytes: int) -> _Windows:
        bounds = source_bounds(other) if len(other) else np.empty((0, 2), dtype=np.int64)
        low = np.concatenate((plain.source_ptr, bounds[:, 0]))
        high = np.concatenate((plain.source_ptr + plain.num_bytes, bounds[:, 1]))
        is_plain = np.arange(len(low)) < len(plain)
        index = np.concatenate((np.arange(len(plain)), np.arange(len(other))))
        order = np.lexsort((high, low))
        low, high, is_plain, index = low[order], high[order], is_plain[order], index[order]
        span = np.searchsorted(spans[:, 0], low, side="right") - 1
        first, starts, stops = _cut_windows(low, high, span, chunk_bytes)
        return cls(plain, other, is_plain, index, first, starts, stops)

    @property
    def _ends(self) -> Int64Array:
        return np.append(self.first[1:], len(self.index))

    def choose(self, costs: ReadCosts) -> npt.NDArray[np.bool_]:
        """Which windows are better read segment by segment, straight to their places."""
        if not len(self):
            return np.zeros(0, dtype=bool)
        size = np.zeros(len(self.index), dtype=np.int64)
        size[self.is_plain] = self.plain.num_bytes[self.index[self.is_plain]]
        num_segments = self._ends - self.first
        useful = np.add.reduceat(size, self.first)
        can: npt.NDArray[np.bool_] = np.logical_and.reduceat(self.is_plain, self.first)
        # As windows: one descriptor each, a pass over the stretch and another over what is useful.
        num_bytes = self.high - self.low
        cpu_s = len(self) * costs.op_s
        device_s = (num_bytes / costs.wire_bytes_per_s + useful / costs.unpack_bytes_per_s).sum()
        # A window for one segment costs the same descriptor.
        chosen: npt.NDArray[np.bool_] = can & (num_segments == 1)
        saved = (num_bytes - useful) / costs.wire_bytes_per_s + useful / costs.unpack_bytes_per_s
        device_s -= saved[chosen].sum()
        worth = np.where(can & ~chosen, saved / num_segments, -1.0)
        for window in np.argsort(-worth, kind="stable"):
            extra_s = (num_segments[window] - 1) * costs.op_s
            if worth[window] < 0 or cpu_s + extra_s > device_s - saved[window]:
                break
            chosen[window] = True
            cpu_s, device_s = cpu_s + extra_s, device_s - saved[window]
        return chosen

    def plain_of(self, is_chosen: npt.NDArray[np.bool_]) -> Reads:
        """The segments of these windows, all of them plain."""
        return self.plain.take(self.index[np.repeat(is_chosen, self._ends - self.first)])

    def chunks(self, is_chosen: npt.NDArray[np.bool_], chunk_bytes: int) -> list[Piece]:
        """These windows packed into landing chunks."""
        windows = np.flatnonzero(is_chosen)
        size = self.high - self.low
        # The low bits of the address in front, and whole alignments in all.
        room = -(-(size + _ALIGNMENT_BYTES) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        found: list[list[int]] = []
        used = chunk_bytes
        for window in windows:
            if used + room[window] > chunk_bytes and (used or not found):
                found.append([])
                used = 0
            found[-1].append(int(window))
            used += int(room[window])
        return [self._chunk(np.array(part), room) for part in found]

    def _chunk(self, windows: Int64Array, room: Int64Array) -> Piece:
        low, size = self.low[windows], (self.high - self.low)[windows]
        base = np.cumsum(room[windows]) - room[windows]
        offset = base + low % _ALIGNMENT_BYTES
        counts = self._ends[windows] - self.first[windows]
        segments = np.concatenate(
            [np.arange(self.first[w], self._ends[w], dtype=np.int64) for w in windows]
        )
        shift = np.repeat(offset - low, counts)  # from a source address to its place in the chunk
        is_plain, index = self.is_plain[segments], self.index[segments]
        unpack = np.zeros((len(segments), 13), dtype=np.int64)
        part = self.plain.take(index[is_plain])
        unpack[is_plain, 0], unpack[is_plain, 1] = part.source_ptr, part.target_ptr
        unpack[is_plain, 2] = part.num_bytes
        unpack[:, [4, 7, 10]] = 1
        unpack[~is_plain] = self.other[index[~is_plain]]
        unpack[:, 0] += shift
        return Piece(Reads(low, offset, size), unpack)


def _cut_windows(
    low: Int64Array,
    high: Int64Array,
    span: Int64Array,
    chunk_bytes: int,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """First segment, start and stop of each window: small gaps bridged, ends of spans never.

    A plain segment too large for a chunk has a window of its own, which can only go straight; others
    were made narrow enough.
    """
    most = chunk_bytes - 2 * _ALIGNMENT_BYTES
    first: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    last_span = -1
    for i, (a, b, s) in enumerate(zip(low.tolist(), high.tolist(), span.tolist(), strict=True)):
        is_near = bool(first) and s == last_span and a <= stops[-1] + _MAX_GAP_BYTES
        if is_near and max(b, stops[-1]) - starts[-1] <= most:
            stops[-1] = max(b, stops[-1])
            continue
        first.append(i)
        starts.append(a)
        stops.append(b)
        last_span = s
    columns = (np.array(column, dtype=np.int64) for column in (first, starts, stops))
    return next(columns), next(columns), next(columns)


def _straight_pieces(reads: Reads, limits: PieceLimits) -> list[Piece]:
    reads = cut(reads, limits.straight_bytes)
    pieces: list[Piece] = []
    start, used = 0, 0
    for i, size in enumerate(reads.num_bytes.tolist()):
        if i > start and (
            used + size > limits.straight_bytes or i - start >= limits.straight_reads
        ):
            pieces.append(Piece(reads.take(slice(start, i))))
            start, used = i, 0
        used += size
    if start < len(reads):
        pieces.append(Piece(reads.take(slice(start, len(reads)))))
    return pieces


def _interleave(left: list[Piece], right: list[Piece]) -> list[Piece]:
    """Both kinds evenly spread, so that the CPU has work while the device has."""
    keyed = [
        ((i + 0.5) / len(side), piece) for side in (left, right) for i, piece in enumerate(side)
    ]
    return [piece for _, piece in sorted(keyed, key=lambda pair: pair[0])]


def num_reads(pieces: list[Piece]) -> int:
    """Descriptors in all."""
    return sum(len(piece.reads) for piece in pieces)


def num_unpacked_bytes(pieces: list[Piece]) -> int:
    """Source bytes that take the second pass."""
    return sum(table_bytes(piece.unpack) for piece in pieces if piece.unpack is not None)
