"""Deltas of live weights in device memory, decoded where they lie (docs/delta.md).

The digest of every block is taken by one launch, records go up, and what changed stays there: nothing of
the weights is read through the host, but the spans that a device does not decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightsync import native
from weightsync.codec import decode_record, num_blocks
from weightsync.codec.device_decode import CodedSpans, DecodedSpans, Outcome, SpanDecoder
from weightsync.codec.spans import Bytes, Digests, span_digests, spans_of
from weightsync.device_patch import DecodedWrite, DeviceWrite
from weightsync.device_tables import OwnedDigests, owned_digests, read_bytes
from weightsync.errors import IntegrityError
from weightsync.native_delta import BLOCK_ELEMENTS, Place
from weightsync.types import TensorMeta

#: Of the address of a tensor that is decoded where it lies, bytes.
DECODE_ALIGNMENT: Final = 16

_NONE: Final[Digests] = np.zeros(0, dtype=np.uint64)

Records = Sequence[tuple[Place, Bytes]]


@dataclass(frozen=True, eq=False)
class LiveDelta:
    """A dense tensor at ``ptr``, a multiple of 16, the records that change it, and the digest that it must
    have then."""

    meta: TensorMeta
    ptr: int
    records: Records
    digest: int | None


class LiveDigests:
    """Block digests of dense tensors in device memory, by one launch that is made once."""

    def __init__(self, tensors: Sequence[tuple[TensorMeta, int]], device: str) -> None:
        tables, counts = [], []
        for meta, ptr in tensors:
            tables.append(_block_rows(meta, ptr))
            counts.append(num_blocks(meta))
        self._cuts = np.cumsum([0, *counts])
        rows: Any = np.concatenate(
            [np.zeros((0, len(native.DIGEST_COLUMNS)), dtype=np.int64), *tables]
        )
        total = int(self._cuts[-1])
        self._table: OwnedDigests = owned_digests(rows, range(total), total, device)

    def compute(self, num_threads: int) -> list[Digests]:
        """By tensor, uint64 [blocks]; the caller's own."""
        found: Digests = np.array(self._table.run(num_threads), dtype=np.uint64)
        return [found[a:b] for a, b in zip(self._cuts[:-1], self._cuts[1:], strict=True)]


def _block_rows(meta: TensorMeta, ptr: int) -> npt.NDArray[np.int64]:
    """Digest rows of a dense tensor, one a block."""
    places = list(spans_of(meta))
    rows = np.zeros((num_blocks(meta), len(native.DIGEST_COLUMNS)), dtype=np.int64)
    if not places:
        return rows
    width, word_bytes = places[0].kind.element_bytes, places[0].word_bytes
    first = np.arange(len(rows), dtype=np.int64) * BLOCK_ELEMENTS
    last = np.minimum(first + BLOCK_ELEMENTS, meta.num_bytes // width)
    rows[:, 0] = ptr + first * width
    rows[:, 1] = word_bytes
    rows[:, 2] = (last - first) * width // word_bytes
    rows[:, 3] = np.array(places[0].seed, dtype=np.uint64).astype(np.int64)
    rows[:, 4] = first * width // word_bytes
    rows[:, [6, 9, 12]] = 1  # counts of the dimensions that are not there
    return rows


class DeviceDeltas:
    """What deltas do to tensors of a device. ``writes``, and the block ``digests`` that there will be, by
    tensor; valid until :meth:`close`. ``seconds``: where the time went."""

    def __init__(
        self,
        writes: Sequence[Sequence[DeviceWrite | DecodedWrite]],
        digests: Sequence[Digests],
        decoded: DecodedSpans,
        seconds: Mapping[str, float],
    ) -> None:
        self.writes, self.digests, self.seconds = writes, digests, seconds
        self._decoded = decoded

    def close(self) -> None:
        """Free what was decoded. Idempotent."""
        self._decoded.close()


def decode_there(
    deltas: Sequence[LiveDelta],
    digests: Sequence[Digests],
    device: str,
    *,
    buffer: Bytes | None = None,
    num_threads: int = 1,
    decoder: SpanDecoder | None = None,
) -> DeviceDeltas:
    """``digests`` are the block digests of the live tensors; ``buffer`` is as in :class:`CodedSpans`.
    ``decoder`` is that of a caller who has more to decode; None: one is made. Nothing is written.

    Raises :class:`IntegrityError` naming a tensor that would not be what it must be: a record is
    damaged, or live weights are not its base.
    """
    coded = CodedSpans(
        [place for delta in deltas for place, _ in delta.records],
        [record for delta in deltas for _, record in delta.records],
        [
            delta.ptr + place.start_element * place.kind.element_bytes
            for delta in deltas
            for place, _ in delta.records
        ],
        np.concatenate([_NONE, *map(_digests_of, deltas, digests)]),
        buffer,
    )
    used = SpanDecoder(device) if decoder is None else decoder
    try:
        decoded = used.decode(coded, num_threads)
        seconds = used.seconds
    finally:
        if decoder is None:
            used.close()
    try:
        writes, new_digests = _settle(deltas, digests, coded, decoded, device)
        return DeviceDeltas(writes, new_digests, decoded, seconds)
    except BaseException:
        decoded.close()
        raise


def _settle(
    deltas: Sequence[LiveDelta],
    digests: Sequence[Digests],
    coded: CodedSpans,
    decoded: DecodedSpans,
    device: str,
) -> tuple[list[list[DeviceWrite | DecodedWrite]], list[Digests]]:
    """What each delta writes, and the digests then. Raises if anything would not be what it must."""
    found: list[list[DeviceWrite | DecodedWrite]] = []
    new_digests: list[Digests] = []
    number = first = 0
    for delta, old in zip(deltas, digests, strict=True):
        writes: list[DeviceWrite | DecodedWrite] = []
        result = old.copy()
        for place, record in delta.records:
            span, width = decoded.spans[number], place.kind.element_bytes
            target_ptr, end = coded.old_ptrs[number], first + place.num_blocks
            if span.outcome is Outcome.DECODED:
                at = (span.positions_ptr, span.values_ptr, span.count)
                writes.append(DecodedWrite(target_ptr, *at, width, place))
            else:
                new = decoded.digests[first:end]
                new[:] = coded.digests[first:end]
                writes.append(_decode_here(delta.meta, place, record, target_ptr, new, device))
            span_digests(result, place)[:] = decoded.digests[first:end]
            number, first = number + 1, end
        _check(delta, int(result.sum(dtype=np.uint64)))
        found.append([write for write in writes if write.count])
        new_digests.append(result)
    return found, new_digests


def _digests_of(delta: LiveDelta, digests: Digests) -> Digests:
    """Of the blocks that its records are of."""
    places = [place for place, _ in delta.records]
    if sum(place.num_blocks for place in places) == digests.size:
        return digests
    return np.concatenate([_NONE, *(span_digests(digests, place) for place in places)])


def _decode_here(
    meta: TensorMeta, place: Place, record: Bytes, ptr: int, digests: Digests, device: str
) -> DeviceWrite:
    """One span by the host, from a copy of its old values."""
    old = np.frombuffer(read_bytes(ptr, place.num_bytes, device), dtype=np.uint8)
    try:
        changes = decode_record(place, record, old, digests, are_digests_known=True)
    except IntegrityError as error:
        raise IntegrityError(f"{meta.name!r}: {error}") from error
    width = place.kind.element_bytes
    return DeviceWrite(ptr, changes.positions, changes.values.view(f"u{width}"), place)


def _check(delta: LiveDelta, result: int) -> None:
    if result != delta.digest:
        raise IntegrityError(
            f"{delta.meta.name!r} would digest to {result:016x}, expected {delta.digest or 0:016x}: the "
            "live weights are not the version that this delta stands on"
        )


__all__ = ["DECODE_ALIGNMENT", "DeviceDeltas", "LiveDelta", "LiveDigests", "decode_there"]
