"""How the bytes of a plan reach one rank: direct reads, or slots of a stream, into their landing.

Keeps whatever a replay needs: plans, opened publications, prepared reads, unpack tables.
"""

from __future__ import annotations

import time
from typing import Any

from weightsync.binding import (
    Table,
    cuts_of,
    decode_entries,
    direct_table,
    read_digest_rows,
    unpack_table,
)
from weightsync.coverage import PlanShare, SlotIndex, plan_share
from weightsync.deadline import Deadline
from weightsync.device_tables import SegmentCopy, read_bytes, segment_copy
from weightsync.errors import CancelledError, PeerLostError, ProtocolError
from weightsync.faults import reach
from weightsync.kept import NUM_KEPT, Kept
from weightsync.layout import Layout
from weightsync.manifest import Digests
from weightsync.plan import RefitPlan, check_plan
from weightsync.rank_session import OpenSession
from weightsync.session import StartJob
from weightsync.transports.base import PreparedRead, TargetEndpoint
from weightsync.types import Contract, Placement


class RankMoves:
    """The pulling end of one rank: one transport endpoint, and the plans of its trainer."""

    def __init__(self, index: SlotIndex, device: str, num_threads: int) -> None:
        self._index = index
        self._rank = index.rank
        self._device = device
        self._threads = num_threads
        self._reads: Kept[tuple[str, str, Placement, bool], PreparedRead] = Kept()
        self._unpacks: Kept[tuple[str, bytes, int, Placement], tuple[Table, SegmentCopy]] = Kept(
            1024
        )
        self.plans: dict[str, RefitPlan] = {}
        self._shares: dict[str, PlanShare] = {}
        self._sources: dict[str, Layout] = {}
        self._published: tuple[str, dict[str, Any]] | None = None
        self.endpoint: TargetEndpoint | None = None

    def add_plan(self, plan: RefitPlan, source: Layout) -> None:
        """Accept a plan after checking it against both layouts."""
        check_plan(plan, source, self._index.layout)
        # The newest last, as the sender counts: both sides must forget the same one first.
        self.plans.pop(plan.digest, None)
        self.plans[plan.digest] = plan
        self._sources[plan.digest] = source
        self._shares[plan.digest] = plan_share(plan, self._index)
        while len(self.plans) > NUM_KEPT:
            oldest = next(iter(self.plans))
            del self.plans[oldest], self._sources[oldest], self._shares[oldest]

    def set_endpoint(self, endpoint: TargetEndpoint | None) -> None:
        """Another peer: what was opened of the former one is worth nothing."""
        former, self.endpoint = self.endpoint, endpoint
        if former is not None and former is not endpoint:
            former.close()
        self._reads.clear()  # after that: what they hold is the endpoint's, which now is at rest
        self._published = None

    def expect(self, opened: OpenSession, job: StartJob) -> RefitPlan:
        """The plan that a move is about, noted as under way."""
        plan = self.plans.get(str(job.payload.get("plan_digest")))
        if plan is None:
            raise ProtocolError("the plan of this move was never handed over; connect again")
        opened.coverage.expect(job.move_id, self._shares[plan.digest])
        return plan

    def move(
        self, opened: OpenSession, job: StartJob, plan: RefitPlan, deadline: Deadline
    ) -> Digests | None:
        """Everything that the plan brings to this rank lands; see :meth:`_read_direct`."""
        if plan.contract is Contract.DIRECT:
            return self._read_direct(opened, job, plan, deadline)
        self._receive_stream(opened, job, plan, deadline)
        return None

    def _endpoint(self) -> TargetEndpoint:
        if self.endpoint is None:
            raise PeerLostError("the transport of this run is not attached; connect again")
        return self.endpoint

    def _read_direct(
        self, opened: OpenSession, job: StartJob, plan: RefitPlan, deadline: Deadline
    ) -> Digests | None:
        """Returns the digests of ``plan.metas`` if they were taken on the way."""
        direct = self._endpoint().direct()
        epoch, placement = str(job.payload.get("epoch")), opened.spec.placement
        descriptor = self._publication(epoch, job.payload.get("publication"))
        with opened.stats.timed("register"):
            addresses = direct.open(descriptor, opened.staging.regions, deadline)
        # What is read back in place need not be digested twice.
        is_digested_later = opened.is_read_back and opened.is_in_place
        has_digests = direct.digests_reads and not is_digested_later

        def prepare() -> PreparedRead:
            source = self._sources[plan.digest]
            rows = direct_table(plan, source, addresses, opened.staging.landing, self._rank)
            digested = None
            if has_digests:
                digested = read_digest_rows(plan, source, addresses, self._rank)
            return direct.prepare(rows, digested)

        with opened.stats.timed("register"):
            key = (plan.digest, epoch, placement, has_digests)
            prepared = self._reads.get(key, prepare)
        opened.touch()
        start_s = time.perf_counter()
        direct.read(prepared, deadline)
        spent_s = time.perf_counter() - start_s
        if prepared.device_s is not None:
            opened.stats.add("read_device", prepared.device_s)
        opened.stats.buckets.append((prepared.num_bytes, len(plan.transfers), spent_s))
        opened.coverage.all_arrived(job.move_id)
        return prepared.digests

    def _publication(self, epoch: str, descriptor: Any) -> dict[str, Any]:
        if isinstance(descriptor, dict):
            self._published = (epoch, descriptor)
        if self._published is None or self._published[0] != epoch:
            raise ProtocolError(f"publication {epoch!r} was never described here; publish again")
        return self._published[1]

    def _receive_stream(
        self, opened: OpenSession, job: StartJob, plan: RefitPlan, deadline: Deadline
    ) -> None:
        if not any(t.target_rank == self._rank for t in plan.transfers):
            return  # nobody fills a slot for this rank
        stream = self._endpoint().stream(deadline, self._device)
        stream.begin_move(opened.spec.session_id)
        while True:
            header, slot = stream.receive(deadline)
            if header.move_id != job.move_id:
                stream.release(slot)
                continue
            start_s = time.perf_counter()
            words_ptr = slot.ptr + header.metadata_offset_bytes
            blob = read_bytes(words_ptr, header.metadata_bytes, self._device)
            # With the size: words that fit one slot may point outside another.
            key = (plan.digest, blob, header.data_bytes, opened.spec.placement)

            def make(
                blob: bytes = blob, data: int = header.data_bytes
            ) -> tuple[Table, SegmentCopy]:
                entries = decode_entries(blob, plan, data)
                rows = unpack_table(plan, cuts_of(entries), opened.staging.landing)
                return entries, segment_copy(rows, self._device)

            entries, unpack = self._unpacks.get(key, make)
            opened.coverage.arrived(job.move_id, entries)
            opened.touch()
            self._copy(unpack, slot.ptr, deadline)
            stream.release(slot)
            spent_s = time.perf_counter() - start_s
            opened.stats.buckets.append((header.data_bytes, len(entries), spent_s))
            reach("engine.bucket")
            if header.is_last:
                return

    def _copy(self, unpack: SegmentCopy, slot_ptr: int, deadline: Deadline) -> None:
        cancel = None if deadline.token is None else deadline.token.native_flag
        done = unpack.run(self._threads, source_base=slot_ptr, cancel=cancel)
        if done != unpack.num_bytes:
            deadline.check()
            raise CancelledError("a copy was given up")
