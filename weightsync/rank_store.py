"""What one rank of an engine takes from a store of versions, and how a delta gets into live weights.

Everything is read, decoded and compared while the engine generates: the digest of *every* tensor that
the rank holds, changed or not, as it will be. Only then may ``rank_apply.py`` write, under a pause.
Full versions land like any other update, in the staging copy or in the slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from weightsync import native
from weightsync.codec import block_digests
from weightsync.codec.spans import Digests
from weightsync.config import DecodePlace, decode_place
from weightsync.coverage import SlotIndex
from weightsync.deadline import Deadline
from weightsync.device_delta import (
    DECODE_ALIGNMENT,
    DeviceDeltas,
    LiveDelta,
    LiveDigests,
    decode_there,
)
from weightsync.device_fold import (
    COPIES_BYTES,
    DecodedTurns,
    LiveChain,
    bytes_in_turn,
    decode_in_turn,
)
from weightsync.device_patch import DecodedWrite, DeviceWrite
from weightsync.device_tables import CPU, KeptBuffer, cuda_index, synchronize
from weightsync.digest import DigestPart, DigestTable
from weightsync.errors import (
    CapacityError,
    ConfigError,
    DTypeMismatchError,
    IntegrityError,
    MissingNameError,
    ShapeMismatchError,
    TransportError,
    WeightSyncError,
)
from weightsync.kept import Kept
from weightsync.layout import Layout
from weightsync.live_tensor import LiveTensor, Write, live_part
from weightsync.manifest import name_some
from weightsync.rank_landing import Lander
from weightsync.rank_session import Landing, OpenSession
from weightsync.store.bulk import read_records
from weightsync.store.chain import Chain, ChainTensor, open_chain
from weightsync.types import SlotKind, TensorMeta, format_bytes

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class Fetched:
    """What a session has taken from a store: ``digests`` (of full versions) are those of the boxes of
    this rank, by the store's names; ``writes`` are of a delta, ``later`` what several deltas write behind
    them in turn."""

    parts: dict[str, tuple[TensorMeta, tuple[tuple[int, int], ...]]]  # meta, slots of this rank
    digests: dict[str, int] = field(default_factory=dict)
    writes: list[Write | DeviceWrite | DecodedWrite] = field(default_factory=list)
    later: list[list[DeviceWrite | DecodedWrite]] = field(default_factory=list)
    read_back: DigestTable | None = None  # of live tensors, where they are to be digested again
    num_payload_bytes: int = 0
    num_changed: int = 0
    growth: int | None = None  # what writes on a device add to the digests of live tensors
    # Memory of a device that writes speak of.
    decoded: list[DeviceDeltas | DecodedTurns] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # parts of fetching

    def close(self) -> None:
        """Free what lies on a device. Idempotent."""
        for decoded in self.decoded:
            decoded.close()


@dataclass(frozen=True, eq=False)
class _Match:
    """Where the tensors of a store live here: as in :class:`Fetched`, and by name what is coded as one."""

    parts: dict[str, tuple[TensorMeta, tuple[tuple[int, int], ...]]]
    lives: dict[str, list[LiveTensor | None]]


class RankStore:
    """Of one rank: ``slots`` are its live affine boxes."""

    def __init__(
        self, layout: Layout, index: SlotIndex, slots: Landing, device: str, num_threads: int
    ) -> None:
        self._layout, self._index, self._slots = layout, index, slots
        self._device, self._threads = device, num_threads
        self._decodes_at = DecodePlace.HOST if device == CPU else decode_place()
        self._buffer = KeptBuffer(device)
        self._tables: Kept[tuple[Any, ...], DigestTable] = Kept(2)
        self._matches: Kept[tuple[Any, ...], _Match] = Kept(2)
        self._live_digests: Kept[tuple[tuple[str, int], ...], LiveDigests] = Kept(2)

    # --- full versions ------------------------------------------------------------------------------

    def land(self, opened: OpenSession, source: Mapping[str, Any], deadline: Deadline) -> Fetched:
        """A full version, and the deltas on it, into the landing of the session.

        Raises :class:`IntegrityError` if bytes are not what the manifest says,
        :class:`UnavailableError`, :class:`LayoutError` and what becomes of it.
        """
        chain = open_chain(source)
        fetched = self._fetched(chain)
        landing = opened.staging.landing
        mine = [
            (tensor, [landing[key] for key in fetched.parts[tensor.meta.name][1]])
            for tensor in chain.tensors()
            if tensor.meta.name in fetched.parts  # others are of other ranks
        ]
        lander = Lander(self._device, self._threads, deadline, opened.touch)
        fetched.digests |= lander.land(mine)
        fetched.num_payload_bytes += sum(tensor.meta.num_bytes for tensor, _ in mine)
        return fetched

    # --- deltas ---------------------------------------------------------------------------------------

    def decode(self, source: Mapping[str, Any], deadline: Deadline) -> Fetched:
        """What a chain of deltas does to the live weights; nothing is written.

        Several deltas are folded span by span, or on a device decoded in turn. Raises
        :class:`IntegrityError` if any tensor, changed or not, would not be the target's afterwards: a
        record is damaged, or live weights are not the base; :class:`ConfigError` where deltas cannot
        be applied to this engine.
        """
        start_s = time.perf_counter()
        chain = open_chain(source)
        opened_s = time.perf_counter()
        key = tuple((tensor.meta, tensor.boxes) for tensor in chain.tensors())
        match = self._matches.get(key, lambda: self._match(chain))
        fetched = Fetched(match.parts)
        mine: list[tuple[ChainTensor, LiveTensor]] = []
        for tensor in chain.tensors():
            name = tensor.meta.name
            if name in match.parts:
                mine += _live_parts(tensor, match.lives[name])
        synchronize(self._device)
        fetched.seconds["fetch_open"] = opened_s - start_s
        fetched.seconds["fetch_match"] = time.perf_counter() - opened_s
        if self._decodes_at is DecodePlace.DEVICE:
            try:
                self._decode_there(fetched, mine, deadline)
            except BaseException:
                fetched.close()
                raise
            return fetched

        def one(item: tuple[ChainTensor, LiveTensor]) -> tuple[list[Write | DeviceWrite], int]:
            deadline.check()
            return _writes(*item)

        for writes, num_bytes in self._on_each(mine, one):
            fetched.writes += writes
            fetched.num_payload_bytes += num_bytes
            fetched.num_changed += sum(w.count for w in writes)
        return fetched

    def _decode_there(
        self,
        fetched: Fetched,
        mine: Sequence[tuple[ChainTensor, LiveTensor]],
        deadline: Deadline,
    ) -> None:
        """On a device: one launch digests everything that lives, one decodes the records of one delta,
        or of tensors that several deltas change those of each in turn."""
        ptrs = [(part.meta, live.spots[0].ptr) for part, live in mine]
        where = tuple((meta.name, ptr) for meta, ptr in ptrs)
        table = self._live_digests.get(where, lambda: LiveDigests(ptrs, self._device))
        here = [
            i
            for i, ((part, _), (_, ptr)) in enumerate(zip(mine, ptrs, strict=True))
            if len(part.steps) <= 1 and ptr % DECODE_ALIGNMENT == 0
        ]
        chained = [
            i
            for i, ((part, _), (_, ptr)) in enumerate(zip(mine, ptrs, strict=True))
            if len(part.steps) > 1 and ptr % DECODE_ALIGNMENT == 0
        ]
        start_s = time.perf_counter()
        with ThreadPoolExecutor(1, "weightsync-digest") as pool:  # while files are read
            live_digests = pool.submit(table.compute, self._threads)
            steps = [mine[i][0].steps[0] for i in here if mine[i][0].steps]
            buffer, records = read_records(steps, self._threads, self._buffer.room, deadline.check)
            read_s = time.perf_counter()
            digests = live_digests.result()
        old = sum(int(one.sum(dtype=np.uint64)) for one in digests)
        fetched.growth = (sum(part.digest or 0 for part, _ in mine) - old) % (1 << 64)
        deadline.check()
        found = iter(records)
        deltas = [
            LiveDelta(part.meta, ptrs[i][1], next(found) if part.steps else [], part.digest)
            for i, part in ((i, mine[i][0]) for i in here)
        ]
        digested_s = time.perf_counter()
        decoded = decode_there(
            deltas,
            [digests[i] for i in here],
            self._device,
            buffer=buffer,
            num_threads=self._threads,
        )
        fetched.decoded.append(decoded)
        end_s = time.perf_counter()
        fetched.seconds |= {
            "fetch_read": read_s - start_s,
            "fetch_digest": digested_s - read_s,
            "fetch_decode": end_s - digested_s,
            **{f"fetch_decode_{n}": s for n, s in decoded.seconds.items()},
        }
        writes: dict[int, Sequence[Any]] = dict(zip(here, decoded.writes, strict=True))
        if chained:
            chains = [(mine[i][0], ptrs[i][1], digests[i]) for i in chained]
            if self._decode_chains(fetched, chains, deadline):
                writes |= dict.fromkeys(chained, ())
            fetched.seconds["fetch_fold"] = time.perf_counter() - end_s
        for i, (part, live) in enumerate(mine):
            if i not in writes:
                deadline.check()
                writes[i], _ = _writes(part, live)
        for i, (part, _) in enumerate(mine):
            fetched.writes += writes[i]
            fetched.num_payload_bytes += part.num_bytes
            fetched.num_changed += sum(write.count for write in writes[i])

    def _decode_chains(
        self,
        fetched: Fetched,
        chains: Sequence[tuple[ChainTensor, int, Digests]],
        deadline: Deadline,
    ) -> bool:
        """Of tensors that several deltas change: what each delta writes. False if the device has no room
        for it: the host folds them."""
        steps = [step for part, _, _ in chains for step in part.steps]
        _, records = read_records(steps, self._threads, check=deadline.check)
        found = iter(records)
        lives = [
            LiveChain(part.meta, ptr, [(next(found), entry.digest) for _, _, entry in part.steps])
            for part, ptr, _ in chains
        ]
        try:
            _check_room(bytes_in_turn(lives) + COPIES_BYTES, self._device)
            turns = decode_in_turn(
                lives,
                [digests for _, _, digests in chains],
                self._device,
                num_threads=self._threads,
                check=deadline.check,
            )
        except (CapacityError, TransportError) as error:
            if not _is_out_of_memory(error):
                raise
            _LOG.warning("several deltas are folded by the host, which takes longer: %s", error)
            return False
        fetched.decoded.append(turns)
        fetched.later = turns.turns
        fetched.num_changed += sum(write.count for turn in turns.turns for write in turn)
        return True

    def close(self) -> None:
        """Let go of memory that is kept from delta to delta; no job may be under way."""
        self._buffer.close()

    def _match(self, chain: Chain) -> _Match:
        """Where what the deltas of a way speak of lives: as :meth:`_fetched`, and raises
        :class:`ConfigError` where no delta can be applied."""
        parts = self._fetched(chain).parts
        lives = {
            tensor.meta.name: self._lives(tensor, parts[tensor.meta.name][1])
            for tensor in chain.tensors()
            if tensor.meta.name in parts
        }
        return _Match(parts, lives)

    def _lives(
        self, tensor: ChainTensor, keys: Sequence[tuple[int, int]]
    ) -> list[LiveTensor | None]:
        """Of what is coded as one, in turn, where this rank holds it; None: of other ranks."""
        name = tensor.meta.name
        if any(key not in self._slots for key in keys):
            raise ConfigError(
                f"{name!r} is an opaque slot of this engine: its wire form is not in memory, so no "
                "delta can be applied to it; take full versions"
            )
        spots = [self._slots[key] for key in keys]
        found: list[LiveTensor | None] = []
        for box, part in tensor.parts():
            live = live_part(part.meta, box, spots, self._device)
            if live.spots and not live.is_whole:
                raise ConfigError(
                    f"{name!r} is cut over ranks of this engine, and a delta needs all old values of "
                    f"{_what_is_coded(tensor)}; take full versions, or let the trainer publish pieces "
                    "that the ranks hold whole (option cut)"
                )
            if live.spots and self._device != CPU and not live.is_dense:
                raise ConfigError(
                    f"{part.meta.name!r} is not dense in the memory of {self._device}; take full "
                    "versions"
                )
            found.append(live if live.spots else None)
        return found

    def _on_each(self, items: Sequence[T], act: Callable[[T], R]) -> Iterator[R]:
        if self._threads <= 1 or len(items) <= 1:
            yield from map(act, items)
            return
        with ThreadPoolExecutor(self._threads, "weightsync-decode") as pool:
            yield from pool.map(act, items)

    # --- what was fetched ---------------------------------------------------------------------------

    def _fetched(self, chain: Chain) -> Fetched:
        """Which slots each tensor fills. Raises what names and forms that do not fit deserve."""
        layout = self._layout
        parts: dict[str, tuple[TensorMeta, tuple[tuple[int, int], ...]]] = {}
        seen: dict[str, str] = {}
        for meta in chain.metas:
            (name,) = layout.resolve([meta.name], "engine")
            if name in seen:
                if meta.name == name:  # the tied name is in the file as well: one of them is enough
                    del parts[seen[name]]
                else:
                    continue
            seen[name] = meta.name
            i = layout.index[name]
            _check_form(meta, layout.tensors[i].wire_forms)
            keys = tuple(
                (i, j) for j, p in enumerate(layout.tensors[i].placed) if p.rank == self._index.rank
            )
            if keys:
                parts[meta.name] = (meta, keys)
        missing = sorted(layout.index.keys() - seen.keys())
        if missing:
            raise MissingNameError(
                f"{chain.where} does not hold {len(missing)} tensors of the engine: "
                f"{name_some(missing)}"
            )
        return Fetched(parts)

    def check(self, fetched: Fetched, table: DigestTable, what: str) -> None:
        """Digest what a table of :meth:`digest_table` covers. Raises :class:`IntegrityError`."""
        synchronize(self._device)
        self.compare(fetched, table.compute(self._threads), what)

    def digest_table(self, fetched: Fetched, spots: Landing) -> DigestTable:
        """Of what lies at ``spots``, to be made before a pause."""
        parts: list[DigestPart] = []
        for meta, keys in fetched.parts.values():
            for key in keys:
                if key in spots:
                    spot = spots[key]
                    parts.append(
                        DigestPart(meta, spot.box, spot.ptr, spot.strides_bytes, spot.dtype)
                    )
        return DigestTable(parts, self._device)

    def live_table(self, fetched: Fetched) -> DigestTable:
        """The same of what lives; kept, as the next version mostly has the same tensors."""
        key = tuple((name, meta) for name, (meta, _) in fetched.parts.items())
        return self._tables.get(key, lambda: self.digest_table(fetched, self._slots))

    def compare(self, fetched: Fetched, found: Mapping[str, int], what: str) -> None:
        """Digests by the store's names against those expected."""
        wrong = [name for name, digest in found.items() if fetched.digests[name] != digest]
        if wrong:
            raise IntegrityError(
                f"{what}: {len(wrong)} tensors are not the version's: {name_some(wrong)}; got "
                f"{found[wrong[0]]:016x} for the first, expected {fetched.digests[wrong[0]]:016x}"
            )

    def opaque(self, fetched: Fetched) -> dict[str, str]:
        """Engine's name -> store's name of the opaque slots."""
        tensors = self._layout.tensors
        return {
            tensors[keys[0][0]].name: name
            for name, (_, keys) in fetched.parts.items()
            if tensors[keys[0][0]].kind is SlotKind.OPAQUE
        }


def _live_parts(
    tensor: ChainTensor, lives: Sequence[LiveTensor | None]
) -> list[tuple[ChainTensor, LiveTensor]]:
    """What of a tensor is coded as one, with a digest of its own, and where it lives."""
    return [
        (part, live)
        for (_, part), live in zip(tensor.parts(), lives, strict=True)
        if live is not None  # of other ranks, or nothing at all
    ]


def _what_is_coded(tensor: ChainTensor) -> str:
    return "each piece that it was published in" if tensor.boxes else "the whole"


def _check_form(meta: TensorMeta, forms: Sequence[TensorMeta]) -> None:
    if meta.shape != forms[0].shape:
        raise ShapeMismatchError(
            f"{meta.name!r}: the store has shape {meta.shape}, the engine {forms[0].shape}"
        )
    if meta.dtype != forms[0].dtype:
        raise DTypeMismatchError(
            f"{meta.name!r}: the store has {meta.dtype}, the engine takes {forms[0].dtype}"
        )


def _writes(tensor: ChainTensor, live: LiveTensor) -> tuple[list[Write | DeviceWrite], int]:
    """What a tensor's records do to its live elements, and the bytes of the records."""
    old = live.bytes()
    digests = block_digests(tensor.meta, old)
    try:
        changes = tensor.changes(old, digests)
        found = [write for change in changes for write in live.writes_of(change)]
    except IntegrityError as error:
        raise IntegrityError(f"{tensor.meta.name!r}: {error}") from error
    result = int(digests.sum(dtype=np.uint64))
    if result != tensor.digest:
        raise IntegrityError(
            f"{tensor.meta.name!r} would digest to {result:016x}, expected {tensor.digest:016x}: the "
            "live weights are not the version that this delta stands on"
        )
    return found, tensor.num_bytes


def _check_room(num_bytes: int, device: str) -> None:
    """Raises :class:`CapacityError` if so much would take more than half of what is free on a device: the
    engine generates meanwhile."""
    if device == CPU:
        return
    free_bytes = native.extension.cuda_free_bytes(cuda_index(device))
    if num_bytes > free_bytes // 2:
        raise CapacityError(
            f"{device}: they take {format_bytes(num_bytes)}, and only {format_bytes(free_bytes)} are free"
        )


def _is_out_of_memory(error: WeightSyncError) -> bool:
    cause = error.__cause__
    is_refused = isinstance(cause, native.CudaError)
    return isinstance(error, CapacityError) or (
        is_refused and getattr(cause, "error_name", "") == "cudaErrorMemoryAllocation"
    )
