"""The last published version once more, on the device that trains: deltas are coded there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from weightsync.bucket import align
from weightsync.codec import Changes, encode_span
from weightsync.codec.device_encode import DeviceSpans, SpanEncoder
from weightsync.codec.spans import Bytes, Digests, span_bytes, span_digests, spans_of
from weightsync.device_patch import DevicePatch, DeviceWrite
from weightsync.device_tables import private_memory, read_bytes, segment_copy
from weightsync.native_delta import Place
from weightsync.store.weights import DeviceWeight, Weight
from weightsync.tables import segment_rows, table

_VECTOR_BYTES: Final = 16  # what a device reads at once
_UNALIGNED: Final = "its address is no multiple of 16"
_UNSIGNED: Final[Mapping[int, Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}

Records = dict[str, list[tuple[Place, bytes | memoryview]]]


@dataclass(frozen=True, eq=False)
class MirrorDelta:
    """Records by tensor, the new block digests by tensor, the memory that records lie in, and how many
    spans the host had to code, by reason."""

    records: Records
    digests: dict[str, Digests]
    payload: Bytes
    on_host: Mapping[str, int]


class Mirror:
    """Copies of dense tensors on ``device``: as many bytes there as the weights have."""

    def __init__(self, weights: Mapping[str, DeviceWeight], device: str) -> None:
        self.device = device
        self.metas = {name: weight.meta for name, weight in weights.items()}
        self._offsets, used = {}, 0
        for name, meta in self.metas.items():
            self._offsets[name] = used
            used = align(used + meta.num_bytes)
        self._memory: Any = private_memory(max(used, 1), device)
        self._encoder = SpanEncoder(device)
        self.seed(weights)

    def fits(self, weights: Mapping[str, DeviceWeight], device: str) -> bool:
        """Whether :meth:`seed` may be given them."""
        return device == self.device and self.metas == {n: w.meta for n, w in weights.items()}

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
        former: Mapping[str, Weight],
        digests: Mapping[str, Digests],
        num_threads: int,
    ) -> MirrorDelta:
        """What changed since; the mirror stays what it is.

        ``former`` are the same old weights on the host, for spans that a device cannot code, and
        ``digests`` those of their blocks.
        """
        found = self._new_digests(digests)
        spans = [(name, place) for name, m in self.metas.items() for place in spans_of(m)]
        on_device = [s for s in spans if weights[s[0]].ptr % _VECTOR_BYTES == 0]
        joined = [span_digests(found[name], place) for name, place in on_device]
        asked = DeviceSpans(
            [place for _, place in on_device],
            [self._ptr(name) + _start_bytes(place) for name, place in on_device],
            [weights[name].ptr + _start_bytes(place) for name, place in on_device],
            np.concatenate(joined) if joined else np.empty(0, dtype=np.uint64),
        )
        results = self._encoder.encode(asked, num_threads)
        first = 0
        coded: dict[tuple[str, Place], bytes | memoryview | None] = {}
        reasons: Counter[str] = Counter()
        for span, part, (outcome, record) in zip(on_device, joined, results, strict=True):
            part[:] = asked.digests[first : first + part.size]
            first += part.size
            coded[span] = record
            if outcome.reason:
                reasons[outcome.reason] += 1
                coded[span] = self._on_host(span, weights, former, part)
        records: Records = {name: [] for name in self.metas}
        for span in spans:
            name, place = span
            if span not in coded:
                reasons[_UNALIGNED] += 1
                part = span_digests(found[name], place)
                coded[span] = self._on_host(span, weights, former, part)
            known = coded[span]
            if known is not None:
                records[name].append((place, known))
        return MirrorDelta(records, found, self._encoder.payload, dict(reasons))

    def advance(self, changes: Iterable[tuple[str, Changes]]) -> None:
        """Write what a version changed. Raises what :class:`DevicePatch` raises."""
        writes = [
            DeviceWrite(
                self._ptr(name) + _start_bytes(change.place),
                change.positions,
                change.values.view(_UNSIGNED[change.place.kind.element_bytes]),
            )
            for name, change in changes
        ]
        patch = DevicePatch(writes, self.device)
        patch.put()
        patch.check()
        patch.close()

    def recycle(self, payload: Bytes) -> None:
        """See :meth:`SpanEncoder.recycle`."""
        self._encoder.recycle(payload)

    def close(self) -> None:
        """Free what lies on the device. Idempotent."""
        self._encoder.close()
        self._memory.close()

    def _ptr(self, name: str) -> int:
        return int(self._memory.ptr) + self._offsets[name]

    def _new_digests(self, digests: Mapping[str, Digests]) -> dict[str, Digests]:
        return {name: digests[name].copy() for name in self.metas}

    def _on_host(
        self,
        span: tuple[str, Place],
        weights: Mapping[str, DeviceWeight],
        former: Mapping[str, Weight],
        digests: Digests,
    ) -> bytes | None:
        name, place = span
        ptr = weights[name].ptr + _start_bytes(place)
        new = np.frombuffer(read_bytes(ptr, place.num_bytes, self.device), dtype=np.uint8)
        return encode_span(place, span_bytes(former[name].data, place), new, digests)


def _start_bytes(place: Place) -> int:
    return place.start_element * place.kind.element_bytes


__all__ = ["Mirror", "MirrorDelta", "Records"]
