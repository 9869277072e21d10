"""Records decoded where their old values lie, on a device: only records and 8 bytes a block travel.

What is found are the changes of :func:`weightsync.codec.decode_record`, in no order, and the digests that
the blocks would have. What a device cannot do, it says (:class:`Outcome`), and the host decodes that span.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightsync import native
from weightsync.codec.record import num_changed
from weightsync.codec.spans import Bytes, Digests
from weightsync.device_tables import (
    CPU,
    DeviceMemory,
    copy_memory,
    cuda_errors,
    cuda_index,
    read_bytes,
    stream_of,
)
from weightsync.native_delta import Place
from weightsync.types import BUCKET_ALIGNMENT_BYTES as _ALIGNMENT

PADDING_BYTES: Final = 16  # behind the last record: whole words are read


class Outcome(Enum):
    """What became of a span; the value is the native code."""

    DECODED = 0
    FORM = 1  # dense blocks, or absolute ones: for the host
    CROWDED = 2  # some block changes more than a device takes at once
    DAMAGED = 3  # it cannot be, or does not fit its base: the host's decoder says how

    @property
    def reason(self) -> str:
        """Why the host must decode it; empty if it need not."""
        return {
            Outcome.FORM: "it has dense or absolute blocks",
            Outcome.CROWDED: "a block changed in many places",
            Outcome.DAMAGED: "it is damaged, or the base differs from the sender's",
        }.get(self, "")


_OUTCOMES = tuple(Outcome)

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CodedSpans:
    """Spans with their records in host memory. ``old_ptrs`` are addresses of the device and multiples of
    16; ``digests`` (uint64, all blocks of the spans in turn) are those of the old blocks. ``buffer``: all
    records one behind the other, and ``PADDING_BYTES``; None: they are brought together."""

    places: Sequence[Place]
    records: Sequence[Bytes]
    old_ptrs: Sequence[int]
    digests: Digests
    buffer: Bytes | None = None


@dataclass(slots=True, eq=False)
class DecodedSpan:
    """``count`` positions (uint32, in the span) and new values, on the device."""

    outcome: Outcome
    positions_ptr: int
    values_ptr: int
    count: int


class DecodedSpans:
    """What was found, and the memory it lies in. ``digests`` are the new ones of what was decoded."""

    def __init__(
        self, spans: Sequence[DecodedSpan], digests: Digests, memory: Any, device: str
    ) -> None:
        self.spans, self.digests = spans, digests
        self._memory, self._device = memory, device

    def changes(self, number: int, place: Place) -> tuple[npt.NDArray[np.uint32], Bytes]:
        """Positions and values of one span, copied to the host."""
        span, width = self.spans[number], place.kind.element_bytes
        positions = read_bytes(span.positions_ptr, 4 * span.count, self._device)
        values = read_bytes(span.values_ptr, width * span.count, self._device)
        return np.frombuffer(positions, dtype=np.uint32), np.frombuffer(values, dtype=np.uint8)

    def close(self) -> None:
        """Free it. Idempotent."""
        if isinstance(self._memory, DeviceMemory):
            self._memory.close()


class SpanDecoder:
    """Decodes spans on ``device``, on one of its streams (``lane``); on the CPU the same code runs over
    memory of this process, for tests."""

    def __init__(self, device: str, lane: int = 0) -> None:
        self._device = device
        index = -1 if device == CPU else cuda_index(device)
        self._stream = 0 if device == CPU else stream_of(index, lane)
        with cuda_errors(device):
            self._core: Any = native.extension.DeltaDecoder(index)
        self._upload_s = 0.0

    def decode(self, coded: CodedSpans, num_threads: int = 1) -> DecodedSpans:
        """By span what became of it, and where its changes lie.

        Memory of the device: the records, and position and value of each change. Raises
        :class:`ValueError` for an address that is no multiple of 16, and :class:`TransportError`.
        """
        widths = np.array([p.kind.element_bytes for p in coded.places], dtype=np.int64)
        counts = np.array(
            [_count_of(r, p) for r, p in zip(coded.records, coded.places, strict=True)],
            dtype=np.int64,
        )
        positions, values, room = _offsets(widths, counts)
        memory, base = self._room(room)
        try:
            packed, starts = _packed(coded)
            held, records_ptr = self._room(packed.size)
            try:
                start_s = time.perf_counter()
                copy_memory(records_ptr, packed.ctypes.data, packed.size, self._device, num_threads)
                self._upload_s = time.perf_counter() - start_s
                rows = _rows(coded, starts + records_ptr, positions + base, values + base)
                outcomes, digests = self._run(rows, packed, starts, coded, num_threads)
            finally:
                if isinstance(held, DeviceMemory):
                    held.close()
        except BaseException:
            if isinstance(memory, DeviceMemory):
                memory.close()
            raise
        columns = ((positions + base).tolist(), (values + base).tolist(), counts.tolist())
        found = [DecodedSpan(*row) for row in zip(outcomes, *columns, strict=True)]
        return DecodedSpans(found, digests, memory, self._device)

    def _run(
        self,
        rows: npt.NDArray[np.uint64],
        packed: Bytes,
        starts: Offsets,
        coded: CodedSpans,
        num_threads: int,
    ) -> tuple[list[Outcome], Digests]:
        inputs = np.zeros((len(rows), 2), dtype=np.uint64)
        inputs[:, 0] = starts + packed.ctypes.data
        inputs[:, 1] = [record.size for record in coded.records]
        digests = coded.digests.copy()
        codes = np.zeros(len(rows), dtype=np.int64)
        with cuda_errors(self._device):
            self._core.run(
                rows.ctypes.data, inputs.ctypes.data, len(rows), digests.ctypes.data,
                codes.ctypes.data, self._stream, num_threads,
            )  # fmt: skip
        return [_OUTCOMES[code] for code in codes.tolist()], digests

    def _room(self, num_bytes: int) -> tuple[Any, int]:
        """Memory of the device, and its address, a multiple of 16."""
        if self._device != CPU:
            memory = DeviceMemory(max(num_bytes, 1), self._device)
            return memory, memory.ptr
        data = np.empty(num_bytes + 16, dtype=np.uint8)
        return data, data.ctypes.data + -data.ctypes.data % 16

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of the last call on a device went."""
        names = ("index_s", "tables_s", "blocks_s", "copy_s")
        return {"upload_s": self._upload_s} | dict(zip(names, self._core.seconds(), strict=False))

    def close(self) -> None:
        """Free what lies on the device. Idempotent."""
        with cuda_errors(self._device):
            self._core.close()


def _count_of(record: Bytes, place: Place) -> int:
    """Changes that a record says it has, at most what the place has; whether it may be believed, the
    core says, which looks at the checksum."""
    return min(num_changed(record), place.num_elements)


def _offsets(widths: Offsets, counts: Offsets) -> tuple[Offsets, Offsets, int]:
    """Where positions and values of each span lie, and the size of all."""
    sizes = np.stack([4 * counts, widths * counts], axis=1).reshape(-1)
    ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    return starts[:-1:2], starts[1:-1:2], int(starts[-1])


def _packed(coded: CodedSpans) -> tuple[Bytes, Offsets]:
    """All records in one piece of memory, with room behind, and where each begins."""
    sizes = np.array([0, *(record.size for record in coded.records)], dtype=np.int64)
    ends = np.cumsum(sizes)
    if coded.buffer is not None:
        return coded.buffer, ends[:-1]
    packed = np.zeros(int(ends[-1]) + PADDING_BYTES, dtype=np.uint8)
    for start, record in zip(ends.tolist(), coded.records, strict=False):
        packed[start : start + record.size] = record
    return packed, ends[:-1]


def _rows(
    coded: CodedSpans, records: Offsets, positions: Offsets, values: Offsets
) -> npt.NDArray[np.uint64]:
    """The native table; the core fills in how many changes a record has."""
    rows = np.zeros((len(coded.places), 10), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = coded.old_ptrs, records, positions, values
    if coded.places:
        rows[:, 4:9] = np.array([place.columns for place in coded.places], dtype=np.uint64)
    return rows


__all__ = ["PADDING_BYTES", "CodedSpans", "DecodedSpan", "DecodedSpans", "Outcome", "SpanDecoder"]
