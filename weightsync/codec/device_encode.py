"""Spans coded where they lie, on a device: only records and 8 bytes a block come back.

The bytes are those of :func:`weightsync.codec.encode_span`. What a device cannot do, it says
(:class:`Outcome`), and the host codes that span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync import native
from weightsync.codec.spans import Bytes, Digests
from weightsync.device_tables import CPU, cuda_errors, cuda_index, stream_of
from weightsync.native_delta import Place


class Outcome(Enum):
    """What became of a span; the value is the native code."""

    UNCHANGED = 0
    CODED = 1
    DENSE_BLOCK = 2  # more bits than elements in some block: for the host
    DENSE_SPAN = 3  # more than a quarter of it: the host tries it dense, too

    @property
    def reason(self) -> str:
        """Why the host must code it; empty if it need not."""
        return {
            Outcome.DENSE_BLOCK: "a block changed nearly everywhere",
            Outcome.DENSE_SPAN: "its record takes more than a quarter of it",
        }.get(self, "")


_OUTCOMES = tuple(Outcome)


@dataclass(frozen=True, eq=False)
class DeviceSpans:
    """Spans in both versions. ``places`` is a list that is not changed afterwards, addresses are of the
    device and multiples of 16. ``digests`` are those of all old blocks (uint64, spans in turn); those
    of coded spans become those of the new ones."""

    places: Sequence[Place]
    old_ptrs: Sequence[int]
    new_ptrs: Sequence[int]
    digests: Digests


class SpanEncoder:
    """Codes spans on ``device``; keeps its memory there from call to call: a payload, and 32 bytes a
    block of 65,536 elements. On the CPU the same code runs over memory of this process, for tests."""

    def __init__(self, device: str, capacity: int = 288) -> None:
        self._device = device
        index = -1 if device == CPU else cuda_index(device)
        self._stream = 0 if device == CPU else stream_of(index)
        with cuda_errors(device):
            self._core: Any = native.extension.DeltaEncoder(index, capacity)
        self._places: Sequence[Place] | None = None
        self._table: npt.NDArray[np.uint64] = np.empty((0, 7), dtype=np.uint64)
        #: What the records of the last call lie in.
        self.payload: Bytes = np.empty(0, dtype=np.uint8)
        self._spare: Bytes = np.empty(0, dtype=np.uint8)

    def encode(
        self, spans: DeviceSpans, num_threads: int = 1
    ) -> list[tuple[Outcome, memoryview | None]]:
        """By span what became of it, and its record.

        Raises :class:`ValueError` for an address that is no multiple of 16, and
        :class:`TransportError`.
        """
        rows = self._rows(spans)
        digests = spans.digests
        with cuda_errors(self._device):
            num_bytes = self._core.run(
                rows.ctypes.data, len(rows), digests.ctypes.data, self._stream, num_threads
            )
        payload, self._spare = self._spare, np.empty(0, dtype=np.uint8)
        if payload.size < num_bytes:  # with room for the next one
            payload = np.empty(num_bytes + num_bytes // 8, dtype=np.uint8)
        self._core.write(payload.ctypes.data, digests.ctypes.data, num_threads)
        self.payload, data = payload, payload.data
        found: list[tuple[Outcome, memoryview | None]] = []
        outcomes = np.empty((len(rows), 3), dtype=np.int64)
        self._core.outcomes(outcomes.ctypes.data)
        for code, start, size in outcomes.tolist():
            outcome = _OUTCOMES[code]
            record = data[start : start + size] if outcome is Outcome.CODED else None
            found.append((outcome, record))
        return found

    def _rows(self, spans: DeviceSpans) -> npt.NDArray[np.uint64]:
        """The native table; all but the addresses is kept for the next call with the same list."""
        if self._places is not spans.places:
            self._places = spans.places
            self._table = np.array(
                [(0, 0, *p.columns) for p in spans.places],
                dtype=np.uint64,
            ).reshape(-1, 7)
        if not len(spans.old_ptrs) == len(spans.new_ptrs) == len(self._table):
            raise ValueError(
                f"{len(self._table)} spans, {len(spans.old_ptrs)} and {len(spans.new_ptrs)} addresses"
            )
        self._table[:, 0], self._table[:, 1] = spans.old_ptrs, spans.new_ptrs
        return self._table

    def recycle(self, payload: Bytes) -> None:
        """Memory of records that nobody looks at any more, for later ones: fresh pages take longer
        than what is written to them."""
        self._spare = payload

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time of the last call on a device went."""
        names = ("sample_s", "choice_s", "blocks_s", "copy_s")
        return dict(zip(names, self._core.seconds(), strict=False))

    def close(self) -> None:
        """Free what lies on the device. Idempotent."""
        with cuda_errors(self._device):
            self._core.close()
