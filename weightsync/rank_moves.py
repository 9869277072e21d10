"""How the bytes of a plan reach one rank: direct reads, or slots of a stream, into their landing.

Keeps whatever a replay needs: plans, opened publications, prepared reads, unpack tables. Several trainer
ranks are read from at once, each over a transport of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from weightsync.binding import (
    Table,
    cuts_of,
    decode_entries,
    direct_table,
    read_digest_rows,
    unpack_table,
)
from weightsync.coverage import ITEM, PlanShare, SlotIndex, plan_share
from weightsync.deadline import CancelToken, Deadline
from weightsync.device_tables import SegmentCopy, read_bytes, segment_copy
from weightsync.errors import CancelledError, PeerLostError, ProtocolError
from weightsync.faults import reach
from weightsync.glance import Glance
from weightsync.kept import NUM_KEPT, Kept
from weightsync.layout import Layout
from weightsync.manifest import Digests
from weightsync.pair_plan import PairPlan, pair_plan
from weightsync.plan import RefitPlan, check_plan
from weightsync.rank_session import OpenSession
from weightsync.session import StartJob
from weightsync.transports.base import PreparedRead, TargetEndpoint
from weightsync.types import Contract, Placement

_POLL_S: Final = 0.02
#: Of each plan there is one for each trainer rank.
_NUM_READS: Final = 4096

#: (epoch, publication or None: as it was told before) of a trainer rank.
Published = tuple[str, Any]


@dataclass(eq=False)
class _Plan:
    """A plan and what this rank gets of it."""

    share: PlanShare
    source: Layout
    pairs: dict[int, PairPlan] = field(default_factory=dict)  # by trainer rank

    def pair(self, source_rank: int) -> PairPlan:
        if source_rank not in self.pairs:
            found = pair_plan(self.share.plan, source_rank, self.share.index.rank)
            self.pairs[source_rank] = found
        return self.pairs[source_rank]


@dataclass(frozen=True)
class Beside:
    """What else is done while bytes move."""

    glance: Glance
    #: Called when a read from a single source is on lane 0 of a device, before it has landed.
    behind: Callable[[], None]
    #: Called while a device is at work.
    meanwhile: Callable[[], None]


@dataclass(frozen=True)
class _Pull:
    """One move, as each of the threads that carry it out sees it."""

    opened: OpenSession
    move_id: int
    plan: _Plan
    published: dict[int, Published]
    deadline: Deadline
    lock: threading.Lock  # around what is counted for all of them
    beside: Beside


class RankMoves:
    """The pulling end of one rank: a transport endpoint for each trainer rank, and their plans."""

    def __init__(self, index: SlotIndex, device: str, num_threads: int) -> None:
        self._index = index
        self._rank = index.rank
        self._device = device
        self._threads = num_threads
        self._reads: Kept[tuple[str, int, str, Placement, bool], PreparedRead] = Kept(_NUM_READS)
        self._unpacks: Kept[tuple[str, int, bytes, int, Placement], tuple[Table, SegmentCopy]] = (
            Kept(1024)
        )
        self._plans: dict[str, _Plan] = {}
        self._published: dict[int, tuple[str, dict[str, Any]]] = {}
        self.endpoints: dict[int, TargetEndpoint] = {}

    @property
    def plans(self) -> Sequence[str]:
        """Digests of the plans that are kept."""
        return list(self._plans)

    def add_plan(self, plan: RefitPlan, source: Layout) -> None:
        """Accept a plan after checking it against both layouts."""
        check_plan(plan, source, self._index.layout)
        if not plan.is_read.all():
            raise ProtocolError(
                "the plan has boxes that other ranks of the engine hand on, which no transport of this "
                "version does; plan without handing_on"
            )
        # The newest last, as the sender counts: both sides must forget the same one first.
        self._plans.pop(plan.digest, None)
        self._plans[plan.digest] = _Plan(plan_share(plan, self._index), source)
        while len(self._plans) > NUM_KEPT:
            del self._plans[next(iter(self._plans))]

    def set_endpoint(self, endpoint: TargetEndpoint | None, source_rank: int) -> None:
        """Another peer: what was opened of the former one is worth nothing."""
        former = self.endpoints.pop(source_rank, None)
        if endpoint is not None:
            self.endpoints[source_rank] = endpoint
        if former is not None and former is not endpoint:
            former.close()
        self._reads.clear()  # after that: what they hold is the endpoint's, which now is at rest
        self._published.pop(source_rank, None)

    def drop_endpoints(self) -> None:
        """No peer any more."""
        for source_rank in list(self.endpoints):
            self.set_endpoint(None, source_rank)

    def expect(self, opened: OpenSession, job: StartJob) -> PlanShare:
        """What a move is about to bring, noted as under way."""
        found = self._plans.get(str(job.payload.get("plan_digest")))
        if found is None:
            raise ProtocolError("the plan of this move was never handed over; connect again")
        opened.coverage.expect(job.move_id, found.share)
        return found.share

    def move(
        self,
        opened: OpenSession,
        job: StartJob,
        share: PlanShare,
        deadline: Deadline,
        beside: Beside,
    ) -> Digests | None:
        """Everything that the plan brings to this rank lands; see :meth:`_read_direct`."""
        plan = self._plans[share.plan.digest]
        published = _published_in(job.payload.get("sources"))
        pull = _Pull(opened, job.move_id, plan, published, deadline, threading.Lock(), beside)
        if share.plan.contract is Contract.DIRECT:
            found = _at_once(pull, share.sources, self._read_direct)
            opened.coverage.all_arrived(job.move_id)
            return _total(found, share)
        beside.glance.take_aside()
        _at_once(pull, share.sources, self._receive_stream)
        return None

    def _endpoint(self, source_rank: int) -> TargetEndpoint:
        if source_rank not in self.endpoints:
            raise PeerLostError(
                f"the transport of trainer rank {source_rank} is not attached; connect again"
            )
        return self.endpoints[source_rank]

    def _read_direct(self, pull: _Pull, source_rank: int, deadline: Deadline) -> Digests | None:
        """Returns the digests of ``plan.metas`` if they were taken on the way."""
        opened, plan = pull.opened, pull.plan.share.plan
        direct = self._endpoint(source_rank).direct()
        epoch, publication = pull.published.get(source_rank, ("", None))
        descriptor = self._publication(source_rank, epoch, publication)
        start_s = time.perf_counter()
        addresses = direct.open(descriptor, opened.staging.regions, deadline)
        # What is read back in place need not be digested twice.
        is_digested_later = opened.is_read_back and opened.is_in_place
        has_digests = direct.digests_reads and not is_digested_later

        def prepare() -> PreparedRead:
            source, pair = pull.plan.source, pull.plan.pair(source_rank).plan
            rows = direct_table(pair, source, addresses, opened.staging.landing, self._rank)
            digested = None
            if has_digests:
                digested = read_digest_rows(pair, source, addresses, self._rank)
            return direct.prepare(rows, digested)

        key = (plan.digest, source_rank, epoch, opened.spec.placement, has_digests)
        prepared = self._reads.get(key, prepare)
        spent_s = time.perf_counter() - start_s
        with pull.lock:
            opened.stats.add("register", spent_s)
            opened.touch()
        is_alone = len(pull.plan.share.sources) == 1

        def meanwhile() -> None:
            if is_alone and not has_digests:  # else others may still be landing
                pull.beside.behind()
            pull.beside.glance.take_here()
            pull.beside.meanwhile()

        if direct.digests_reads:
            prepared.meanwhile = meanwhile
        else:
            pull.beside.glance.take_aside()
        start_s = time.perf_counter()
        try:
            direct.read(prepared, deadline)
        finally:
            prepared.meanwhile = None
        spent_s = time.perf_counter() - start_s
        num_transfers = len(pull.plan.pair(source_rank).places)
        with pull.lock:
            if prepared.device_s is not None:
                opened.stats.add("read_device", prepared.device_s)
            opened.stats.buckets.append((prepared.num_bytes, num_transfers, spent_s))
        return prepared.digests

    def _publication(self, source_rank: int, epoch: str, descriptor: Any) -> dict[str, Any]:
        if isinstance(descriptor, dict):
            self._published[source_rank] = (epoch, descriptor)
        known = self._published.get(source_rank)
        if known is None or known[0] != epoch:
            raise ProtocolError(
                f"publication {epoch!r} of trainer rank {source_rank} was never described here; "
                "publish again"
            )
        return known[1]

    def _receive_stream(self, pull: _Pull, source_rank: int, deadline: Deadline) -> None:
        opened, move_id = pull.opened, pull.move_id
        pair, digest = pull.plan.pair(source_rank), pull.plan.share.plan.digest
        stream = self._endpoint(source_rank).stream(deadline, self._device)
        stream.begin_move(opened.spec.session_id)
        while True:
            header, slot = stream.receive(deadline)
            if header.move_id != move_id:
                stream.release(slot)
                continue
            start_s = time.perf_counter()
            words_ptr = slot.ptr + header.metadata_offset_bytes
            blob = read_bytes(words_ptr, header.metadata_bytes, self._device)
            # With the size: words that fit one slot may point outside another.
            key = (digest, source_rank, blob, header.data_bytes, opened.spec.placement)

            def make(
                blob: bytes = blob, data: int = header.data_bytes
            ) -> tuple[Table, SegmentCopy]:
                entries = decode_entries(blob, pair.plan, data)
                rows = unpack_table(pair.plan, cuts_of(entries), opened.staging.landing)
                entries = entries.copy()
                entries[:, ITEM] = pair.places[entries[:, ITEM]]
                return entries, segment_copy(rows, self._device)

            entries, unpack = self._unpacks.get(key, make)
            with pull.lock:
                opened.coverage.arrived(move_id, entries)
                opened.touch()
            self._copy(unpack, slot.ptr, stream.max_copy_blocks, deadline)
            stream.release(slot)
            spent_s = time.perf_counter() - start_s
            with pull.lock:
                opened.stats.buckets.append((header.data_bytes, len(entries), spent_s))
            reach("engine.bucket")
            if header.is_last:
                return

    def _copy(
        self, unpack: SegmentCopy, slot_ptr: int, max_blocks: int, deadline: Deadline
    ) -> None:
        cancel = None if deadline.token is None else deadline.token.native_flag
        done = unpack.run(self._threads, source_base=slot_ptr, max_blocks=max_blocks, cancel=cancel)
        if done != unpack.num_bytes:
            deadline.check()
            raise CancelledError("a copy was given up")


def _published_in(sources: Any) -> dict[int, Published]:
    if sources is None:
        return {}
    try:
        return {int(rank): (str(epoch), what) for rank, epoch, what in sources}
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"malformed publications of a move: {error!r}") from error


def _total(found: Sequence[Digests | None], share: PlanShare) -> Digests | None:
    """Digests of what the rank got (``share.metas``) from those of each source, if all were taken."""
    if any(digests is None for digests in found):
        return None
    total: Digests = np.zeros(len(share.plan.tensors), dtype=np.uint64)
    for digests in found:
        if digests is not None:
            total += digests
    return total[share.tensors]


def _at_once(
    pull: _Pull, sources: Sequence[int], act: Callable[[_Pull, int, Deadline], Digests | None]
) -> list[Digests | None]:
    """``act`` for each trainer rank, side by side. When this returns or raises, none of them runs: the
    first that fails stops the others."""
    if len(sources) <= 1:
        with pull.deadline.naming_stage():
            return [act(pull, rank, pull.deadline) for rank in sources]
    token = CancelToken()
    outer = pull.deadline
    with ThreadPoolExecutor(len(sources), "weightsync-pull") as pool:
        limits = [
            Deadline(max(outer.remaining_s(), 1e-3), peer=f"{outer.peer}, rank {rank}",
                     stage=outer.stage, token=token)
            for rank in sources
        ]  # fmt: skip

        def act_named(rank: int, limit: Deadline) -> Digests | None:
            with limit.naming_stage():
                return act(pull, rank, limit)

        futures = [pool.submit(act_named, r, d) for r, d in zip(sources, limits, strict=True)]
        _wait_for_all(futures, outer, token)
    errors = [f.exception() for f in futures]
    first = next((e for e in errors if e and not isinstance(e, CancelledError)), None)
    if first is not None:
        raise first
    outer.check()
    return [f.result() for f in futures]


def _wait_for_all(
    futures: Sequence[Future[Digests | None]], outer: Deadline, token: CancelToken
) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
        if any(f.exception() is not None for f in done):
            token.cancel("another trainer rank failed")
        elif outer.token is not None and outer.token.is_cancelled:
            token.cancel(outer.token.reason)
