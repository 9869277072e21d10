"""Several deltas of live weights in device memory, decoded one after the other before any is applied.

Each stands on what the one before it leaves, so they are decoded on a copy of the tensors that is
brought forward from delta to delta, some tensors at a time; nothing live is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weightsync.bucket import align
from weightsync.codec.device_decode import SpanDecoder
from weightsync.codec.record import num_changed
from weightsync.codec.spans import Digests
from weightsync.device_delta import DeviceDeltas, LiveDelta, Records, decode_there
from weightsync.device_patch import DecodedWrite, DevicePatch, DeviceWrite, Turn
from weightsync.device_tables import private_memory, segment_copy
from weightsync.tables import segment_rows, table
from weightsync.types import TensorMeta

#: Copies take at most so much of a device at once, or what the largest tensor takes.
COPIES_BYTES: Final = 1 << 30

DeviceWrites = list[DeviceWrite | DecodedWrite]


@dataclass(frozen=True, eq=False)
class LiveChain:
    """A dense tensor at ``ptr``, a multiple of 16; by delta the records that change it, and the digest
    that it must have then."""

    meta: TensorMeta
    ptr: int
    steps: Sequence[tuple[Records, int | None]]


def bytes_in_turn(chains: Sequence[LiveChain]) -> int:
    """Of a device, that turns of these take until they are written: position, new and former value of
    every change."""
    return sum(
        min(num_changed(record), place.num_elements) * (4 + 2 * place.kind.element_bytes)
        for chain in chains
        for records, _ in chain.steps
        for place, record in records
    )


class DecodedTurns:
    """``turns`` are to be written one after the other. Valid until :meth:`close`."""

    def __init__(self) -> None:
        self.turns: list[DeviceWrites] = []
        self._decoded: list[DeviceDeltas] = []

    def add(self, turn: int, decoded: DeviceDeltas, writes: DeviceWrites) -> None:
        """What was decoded for a turn, and its writes in live memory."""
        self._decoded.append(decoded)
        while len(self.turns) <= turn:
            self.turns.append([])
        self.turns[turn] += writes

    def close(self) -> None:
        """Free what was decoded. Idempotent."""
        for decoded in self._decoded:
            decoded.close()


def decode_in_turn(
    chains: Sequence[LiveChain],
    digests: Sequence[Digests],
    device: str,
    *,
    num_threads: int = 1,
    check: Callable[[], None] = lambda: None,
    copies_bytes: int = COPIES_BYTES,
) -> DecodedTurns:
    """``digests`` are the block digests of the live tensors; ``check`` is called now and then, and raises
    what ends this.

    Raises :class:`IntegrityError` naming a tensor that would not be what one of the versions on the
    way says: a record is damaged, or live weights are not the base.
    """
    found = DecodedTurns()
    decoder = SpanDecoder(device)
    try:
        for first, last in _groups(chains, copies_bytes):
            _decode_group(
                found, chains[first:last], digests[first:last], decoder, device, num_threads, check
            )
    except BaseException:
        found.close()
        raise
    finally:
        decoder.close()
    return found


def _groups(chains: Sequence[LiveChain], copies_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges whose tensors are copied together."""
    first = used = 0
    for i, chain in enumerate(chains):
        size = align(chain.meta.num_bytes)
        if i > first and used + size > copies_bytes:
            yield first, i
            first, used = i, 0
        used += size
    if chains:
        yield first, len(chains)


def _decode_group(
    found: DecodedTurns,
    chains: Sequence[LiveChain],
    digests: Sequence[Digests],
    decoder: SpanDecoder,
    device: str,
    num_threads: int,
    check: Callable[[], None],
) -> None:
    offsets, used = [], 0
    for chain in chains:
        offsets.append(used)
        used = align(used + chain.meta.num_bytes)
    copies = private_memory(max(used, 1), device)
    try:
        ptrs = [copies.ptr + offset for offset in offsets]
        _copy(chains, ptrs, device, num_threads)
        now = list(digests)
        num_turns = max(len(chain.steps) for chain in chains)
        for turn in range(num_turns):
            check()
            here = [i for i, chain in enumerate(chains) if turn < len(chain.steps)]
            deltas = [LiveDelta(chains[i].meta, ptrs[i], *chains[i].steps[turn]) for i in here]
            olds = [now[i] for i in here]
            decoded = decode_there(deltas, olds, device, num_threads=num_threads, decoder=decoder)
            writes: DeviceWrites = []
            for i, of_tensor, new in zip(here, decoded.writes, decoded.digests, strict=True):
                now[i] = new
                shift = chains[i].ptr - ptrs[i]
                writes += [replace(w, target_ptr=w.target_ptr + shift) for w in of_tensor]
            found.add(turn, decoded, writes)
            if turn + 1 < num_turns:
                _bring_forward([w for of in decoded.writes for w in of], device)
    finally:
        copies.close()


def _copy(chains: Sequence[LiveChain], ptrs: Sequence[int], device: str, num_threads: int) -> None:
    rows = [
        row
        for chain, ptr in zip(chains, ptrs, strict=True)
        if chain.meta.num_bytes
        for row in segment_rows(
            (chain.meta.num_bytes,), source=(chain.ptr, (1,), 1), target=(ptr, (1,), 1)
        )
    ]
    if rows:
        segment_copy(table(rows, 13), device).run(num_threads)


def _bring_forward(writes: DeviceWrites, device: str) -> None:
    patch = DevicePatch(writes, device, Turn.EQUAL)
    try:
        patch.put()
    finally:
        patch.close()


__all__ = ["DecodedTurns", "LiveChain", "bytes_in_turn", "decode_in_turn"]
