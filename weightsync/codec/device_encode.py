"""Spans coded where they lie, on a device: only records and 8 bytes a block come back.

The bytes are those of :func:`weightsync.codec.encode_span`. What a device cannot do, it says
(:class:`Outcome`), and the host codes that span.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, Final

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
#: Streams of the device that each core runs on, and samples: not lane 0, where others work.
_LANES: Final = ((8, 12), (9, 13), (14, 15))
_PARTS: Final = ("sample_s", "choice_s", "blocks_s", "copy_s")


@dataclass(eq=False)
class _Core:
    """One native encoder, its streams, and where the time of its last chunk went."""

    native: Any
    streams: tuple[int, int]
    seconds: Mapping[str, float] = field(default_factory=dict)


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
    block of 65,536 elements. On the CPU the same code runs over memory of this process, for tests.

    Many spans are coded ``chunk_spans`` at a time, by ``num_cores`` (1 to 3) in turn: while the host lays
    out what one has found, the device works for another.
    """

    def __init__(
        self, device: str, capacity: int = 352, chunk_spans: int = 512, num_cores: int = 3
    ) -> None:
        self._device, self._chunk_spans = device, chunk_spans
        index = -1 if device == CPU else cuda_index(device)
        with cuda_errors(device):
            self._cores = [
                _Core(
                    native.extension.DeltaEncoder(index, capacity),
                    (0, 0) if device == CPU else (stream_of(index, a), stream_of(index, b, -1)),
                )
                for a, b in _LANES[:num_cores]
            ]
        self._places: Sequence[Place] | None = None
        self._table: npt.NDArray[np.uint64] = np.empty((0, 7), dtype=np.uint64)
        self._blocks: list[int] = [0]
        #: What the records of the last call lie in.
        self.payload: list[Bytes] = []
        self._spare: list[Bytes] = []
        #: Where the time of the last call went; of chunks that overlap, the sum.
        self.seconds: dict[str, float] = {}

    def encode(
        self, spans: DeviceSpans, num_threads: int = 1
    ) -> list[tuple[Outcome, memoryview | None]]:
        """By span what became of it, and its record.

        Raises :class:`ValueError` for an address that is no multiple of 16, and
        :class:`TransportError`.
        """
        rows = self._rows(spans)
        starts = range(0, len(rows), self._chunk_spans)
        self.payload = [np.empty(0, dtype=np.uint8) for _ in starts]
        found: list[list[tuple[Outcome, memoryview | None]]] = [[] for _ in starts]
        seconds: Counter[str] = Counter()
        lock, left = threading.Lock(), iter(enumerate(starts))

        def work(core: _Core) -> None:
            while True:
                with lock:
                    number, start = next(left, (-1, 0))
                if number < 0:
                    return
                part = rows[start : start + self._chunk_spans]
                digests = spans.digests[self._blocks[start] : self._blocks[start + len(part)]]
                found[number] = self._encode_chunk(core, number, part, digests, num_threads)
                with lock:
                    seconds.update(core.seconds)

        with cuda_errors(self._device):
            if len(starts) <= 1:
                work(self._cores[0])
            else:
                with ThreadPoolExecutor(len(self._cores), "weightsync-code") as pool:
                    list(pool.map(work, self._cores))
        self._spare = []
        self.seconds = dict(seconds)
        return [one for chunk in found for one in chunk]

    def _encode_chunk(
        self,
        core: _Core,
        number: int,
        rows: npt.NDArray[np.uint64],
        digests: Digests,
        num_threads: int,
    ) -> list[tuple[Outcome, memoryview | None]]:
        start_s = time.perf_counter()
        num_bytes = core.native.run(
            rows.ctypes.data, len(rows), digests.ctypes.data, *core.streams, num_threads
        )
        ran_s = time.perf_counter()
        payload = self._spare[number] if number < len(self._spare) else self.payload[number]
        if payload.size < num_bytes:  # with room for the next one
            payload = np.empty(num_bytes + num_bytes // 8, dtype=np.uint8)
        core.native.write(payload.ctypes.data, digests.ctypes.data, num_threads)
        self.payload[number], data = payload, payload.data
        written_s = time.perf_counter()
        outcomes = np.empty((len(rows), 3), dtype=np.int64)
        core.native.outcomes(outcomes.ctypes.data)
        found: list[tuple[Outcome, memoryview | None]] = []
        for code, start, size in outcomes.tolist():
            outcome = _OUTCOMES[code]
            record = data[start : start + size] if outcome is Outcome.CODED else None
            found.append((outcome, record))
        parts = core.native.seconds()
        core.seconds = dict(zip(_PARTS, parts, strict=False)) | {
            "layout_s": ran_s - start_s - sum(parts),
            "write_s": written_s - ran_s,
            "list_s": time.perf_counter() - written_s,
        }
        return found

    def _rows(self, spans: DeviceSpans) -> npt.NDArray[np.uint64]:
        """The native table; all but the addresses is kept for the next call with the same list."""
        if self._places is not spans.places:
            self._places = spans.places
            self._table = np.array(
                [(0, 0, *p.columns) for p in spans.places],
                dtype=np.uint64,
            ).reshape(-1, 7)
            self._blocks = [0, *accumulate(p.num_blocks for p in spans.places)]
        if not len(spans.old_ptrs) == len(spans.new_ptrs) == len(self._table):
            raise ValueError(
                f"{len(self._table)} spans, {len(spans.old_ptrs)} and {len(spans.new_ptrs)} addresses"
            )
        self._table[:, 0], self._table[:, 1] = spans.old_ptrs, spans.new_ptrs
        return self._table

    def recycle(self, payload: list[Bytes]) -> None:
        """Memory of records that nobody looks at any more, for later ones: fresh pages take longer
        than what is written to them."""
        self._spare = payload

    def close(self) -> None:
        """Free what lies on the device. Idempotent."""
        with cuda_errors(self._device):
            for core in self._cores:
                core.native.close()
