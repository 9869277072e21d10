"""The last published version on the device that trains: deltas are coded there, and it advances there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from weightsync.bucket import align
from weightsync.codec import encode_span, tensor_digest
from weightsync.codec.device_decode import SpanDecoder
from weightsync.codec.device_encode import DeviceSpans, SpanEncoder
from weightsync.codec.spans import Bytes, Digests, span_digests, spans_of
from weightsync.device_delta import DeviceDeltas, LiveDelta, LiveDigests, decode_there
from weightsync.device_patch import LANES, DevicePatch, Turn
from weightsync.device_tables import private_memory, read_bytes, segment_copy
from weightsync.native_delta import Place
from weightsync.store.weights import DeviceWeight
from weightsync.tables import segment_rows, table

#: Tensors of so many bytes, or one that is larger, advance in one launch.
ADVANCE_BYTES: Final = 1 << 30
_VECTOR_BYTES: Final = 16  # what a device reads at once
_UNALIGNED: Final = "its address is no multiple of 16"

_NONE: Final[Digests] = np.zeros(0, dtype=np.uint64)

Records = dict[str, list[tuple[Place, bytes | memoryview]]]


@dataclass(frozen=True, eq=False)
class MirrorDelta:
    """Records by tensor, the new block digests by tensor, the memory that records lie in, how many
    spans the host had to code, by reason, and the seconds of each part."""

    records: Records
    digests: dict[str, Digests]
    payload: list[Bytes]
    on_host: Mapping[str, int]
    seconds: Mapping[str, float]


class Mirror:
    """Copies of dense tensors on ``device``: as many bytes there as the weights have. ``weights`` are
    these copies."""

    def __init__(self, weights: Mapping[str, DeviceWeight], device: str) -> None:
        self.device = device
        self.metas = {name: weight.meta for name, weight in weights.items()}
        self._offsets, used = {}, 0
        for name, meta in self.metas.items():
            self._offsets[name] = used
            used = align(used + meta.num_bytes)
        self._memory: Any = private_memory(max(used, 1), device)
        self._encoder = SpanEncoder(device)
        self.weights = {
            name: DeviceWeight(w.meta, self._ptr(name), device, self, w.box_of)
            for name, w in weights.items()
        }
        self._spans = [(name, place) for name, m in self.metas.items() for place in spans_of(m)]
        self._places = [place for _, place in self._spans]
        self._digests = LiveDigests([(w.meta, w.ptr) for w in self.weights.values()], device)
        self.seed(weights)

    def fits(self, weights: Mapping[str, DeviceWeight], device: str) -> bool:
        """Whether :meth:`seed` may be given them."""
        held = {name: (w.meta, w.piece) for name, w in self.weights.items()}
        return device == self.device and held == {n: (w.meta, w.piece) for n, w in weights.items()}

    def block_digests(self, num_threads: int) -> dict[str, Digests]:
        """Of what it holds, by tensor."""
        return dict(zip(self.weights, self._digests.compute(num_threads), strict=True))

    def seed(self, weights: Mapping[str, DeviceWeight]) -> None:
        """Become what they are now."""
        rows = [
            row
            for name, weight in weights.items()
            if weight.meta.num_bytes
            for row in segment_rows(
                (weight.meta.num_bytes,),
                source=(weight.ptr, (1,), 1),
                target=(self._ptr(name), (1,), 1),
            )
        ]
        if rows:
            segment_copy(table(rows, 13), self.device).run(1)

    def encode(
        self,
        weights: Mapping[str, DeviceWeight],
        digests: Mapping[str, Digests],
        num_threads: int,
    ) -> MirrorDelta:
        """What changed since; the mirror stays what it is. ``digests`` are those of its blocks."""
        found = {name: digests[name].copy() for name in self.metas}
        spans, places = self._spans, self._places
        unaligned = {name for name, w in weights.items() if w.ptr % _VECTOR_BYTES}
        if unaligned:
            spans = [span for span in spans if span[0] not in unaligned]
            places = [place for _, place in spans]
        # Spans are all blocks of their tensors, in order.
        joined = [found[name] for name in self.metas if name not in unaligned]
        asked = DeviceSpans(
            places,
            [self._ptr(name) + _start_bytes(place) for name, place in spans],
            [weights[name].ptr + _start_bytes(place) for name, place in spans],
            np.concatenate([_NONE, *joined]),
        )
        results = self._encoder.encode(asked, num_threads)
        records: Records = {name: [] for name in self.metas}
        reasons: Counter[str] = Counter()
        first = 0
        for part in joined:
            part[:] = asked.digests[first : first + part.size]
            first += part.size
        for span, (outcome, coded) in zip(spans, results, strict=True):
            name, place = span
            record: bytes | memoryview | None = coded
            if outcome.reason:
                reasons[outcome.reason] += 1
                part = span_digests(found[name], place)
                part[:] = span_digests(digests[name], place)
                record = self._on_host(span, weights, part)
            if record is not None:
                records[name].append((place, record))
        for span in self._spans if unaligned else ():
            name, place = span
            if name in unaligned:
                reasons[_UNALIGNED] += 1
                record = self._on_host(span, weights, span_digests(found[name], place))
                if record is not None:
                    records[name].append((place, record))
        return MirrorDelta(
            records, found, self._encoder.payload, dict(reasons), self._encoder.seconds
        )

    def advance(
        self,
        records: Records,
        former: Mapping[str, Digests],
        digests: Mapping[str, Digests],
        num_threads: int,
    ) -> None:
        """Become the version that ``records`` lead to: its block digests are ``digests``, those of the
        one that lies here ``former``.

        Nothing is written unless everything fits; raises :class:`IntegrityError`, and what
        :class:`DevicePatch` raises. Done in short launches: whoever waits for the whole device
        meanwhile, as an engine does that pauses, waits for one of them.
        """
        decoder = SpanDecoder(self.device, LANES[Turn.EQUAL])
        found: list[DeviceDeltas] = []
        try:
            for names in self._groups([name for name in self.metas if records[name]]):
                deltas = [
                    LiveDelta(
                        self.metas[name],
                        self._ptr(name),
                        [(place, np.frombuffer(r, dtype=np.uint8)) for place, r in records[name]],
                        tensor_digest(digests[name]),
                    )
                    for name in names
                ]
                olds = [former[name] for name in names]
                found.append(
                    decode_there(
                        deltas, olds, self.device, num_threads=num_threads, decoder=decoder
                    )
                )
            for decoded in found:
                writes = [write for of in decoded.writes for write in of]
                patch = DevicePatch(writes, self.device, Turn.EQUAL)
                try:
                    patch.put()
                finally:
                    patch.close()
        finally:
            decoder.close()
            for decoded in found:
                decoded.close()

    def _groups(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Tensors that advance in one launch."""
        group: list[str] = []
        used = 0
        for name in names:
            num_bytes = self.metas[name].num_bytes
            if group and used + num_bytes > ADVANCE_BYTES:
                yield group
                group, used = [], 0
            group.append(name)
            used += num_bytes
        if group:
            yield group

    def recycle(self, payload: list[Bytes]) -> None:
        """See :meth:`SpanEncoder.recycle`."""
        self._encoder.recycle(payload)

    def close(self) -> None:
        """Free what lies on the device. Idempotent."""
        self._encoder.close()
        self._memory.close()

    def _ptr(self, name: str) -> int:
        return int(self._memory.ptr) + self._offsets[name]

    def _on_host(
        self, span: tuple[str, Place], weights: Mapping[str, DeviceWeight], digests: Digests
    ) -> bytes | None:
        name, place = span
        old, new = (
            np.frombuffer(
                read_bytes(ptr + _start_bytes(place), place.num_bytes, self.device), dtype=np.uint8
            )
            for ptr in (self._ptr(name), weights[name].ptr)
        )
        return encode_span(place, old, new, digests)


def _start_bytes(place: Place) -> int:
    return place.start_element * place.kind.element_bytes


__all__ = ["Mirror", "MirrorDelta", "Records"]
