"""What one rank of an engine is asked besides orders: to join transports, take plans, digest weights.

Rank 0 is asked by control threads, every other rank by its leader, which has checked that the run that
asks holds the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from weightsync.deadline import Deadline
from weightsync.errors import BusyError, ProtocolError
from weightsync.faults import reach
from weightsync.layout import Layout
from weightsync.messages import AttachRequest, DigestRequest, PlanRequest, Request, verb_of
from weightsync.plan import RefitPlan
from weightsync.rank_work import RankWork
from weightsync.transports import get_transport
from weightsync.types import Availability, Contract

#: Longest that a trainer's attach may keep the next one waiting.
ATTACH_LIMIT_S: Final = 60.0
#: The longest that one request holds a thread, whatever it asks for.
MAX_WAIT_S: Final = 60.0


class RankCalls:
    """``put_job`` hands work on bytes to whoever runs it; ``is_closed`` says that nobody will.

    A *tag* names one connection of one run: transports of another one are dropped before any of it.
    """

    def __init__(
        self,
        work: RankWork,
        put_job: Callable[[Callable[[], None]], None],
        is_closed: Callable[[], bool],
    ) -> None:
        self._work, self._put_job, self._is_closed = work, put_job, is_closed
        self._attaching = threading.Lock()
        self._tag: str | None = None  # of the transports that are attached

    def serve(self, request: Request, tag: str) -> dict[str, Any]:
        """Answer one request; raises what the trainer should see."""
        match request:
            case AttachRequest():
                return self.attach(request, tag, lambda deadline: None)
            case PlanRequest():
                return self.add_plan(request)
            case DigestRequest():
                return self.digest(request)
            case _:
                raise ProtocolError(f"{verb_of(request)} is not asked of a single rank")

    def attach(
        self, request: AttachRequest, tag: str, make_sure: Callable[[Deadline], None]
    ) -> dict[str, Any]:
        """Join a transport with one trainer rank. ``make_sure`` may wait, or raise: it is asked once
        nothing else is being attached."""
        peer = f"trainer run {request.run_id}"
        limit_s = min(request.timeout_s, ATTACH_LIMIT_S)
        deadline = Deadline(limit_s, peer=peer, stage="attach")
        if not self._attaching.acquire(timeout=deadline.remaining_s()):
            raise BusyError(f"another attach was not over after {limit_s:.1f} s; try again")
        try:
            make_sure(deadline)
            reach("engine.attach")
            answer = self._join(request, tag, deadline)
        finally:
            self._attaching.release()
        reach("engine.attached")
        return answer

    def _join(self, request: AttachRequest, tag: str, deadline: Deadline) -> dict[str, Any]:
        source = request.source_rank
        if tag != self._tag:
            self._work.drop_endpoints()
            self._tag = tag
        self._work.set_endpoint(None, source)
        transport = get_transport(request.transport)
        endpoint = transport.open_target(request.descriptor, deadline, self._work.device)
        try:
            contracts = dict(transport.capabilities().contracts)
            if Contract.DIRECT in contracts:
                contracts[Contract.DIRECT] = endpoint.probe_direct(deadline)
        except BaseException:
            endpoint.close()
            raise
        self._work.set_endpoint(endpoint, source)
        if self._is_closed():  # meanwhile: nobody else would let go of it
            self._work.drop_endpoints()
        return {
            "contracts": {c.value: _availability(found) for c, found in contracts.items()},
            "path": endpoint.path,
        }

    def add_plan(self, request: PlanRequest) -> dict[str, Any]:
        """Take a plan, after checking it."""
        plan = RefitPlan.from_json(request.plan)
        self._work.add_plan(plan, Layout.from_json(request.source_layout))
        reach("engine.planned")
        return {"digest": plan.digest}

    def digest(self, request: DigestRequest) -> dict[str, Any]:
        """Digests of live tensors by name, read back at a step boundary."""
        names = request.names
        wanted = list(self._work.layout.index) if names is None else [str(n) for n in names]
        future: Future[Mapping[str, int]] = Future()

        def compute() -> None:
            try:
                future.set_result(self._work.digest_live(wanted))
            except Exception as error:  # handed to the caller
                future.set_exception(error)

        self._put_job(compute)
        try:
            found = future.result(timeout=min(max(0.0, request.wait_s), MAX_WAIT_S))
        except FutureTimeout:
            if future.done() and future.exception() is not None:
                raise
            raise BusyError(
                f"the engine did not come to a step boundary within {request.wait_s:.1f} s"
            ) from None
        return {"digests": {n: f"{d:016x}" for n, d in found.items()}}

    def watch(
        self, holder: Callable[[], str | None], is_quiet: Callable[[], bool]
    ) -> tuple[str, str] | None:
        """A trainer process that ended: (tag of its connection, why). ``holder`` tells the tag that holds
        the engine now; transports of another one are closed once no job may use them."""
        if not self._attaching.acquire(blocking=False):
            return None  # one endpoint is being replaced by another
        try:
            lost = next((r for e in self._work.endpoints if (r := e.lost()) is not None), None)
            mine = self._tag
            # Asked in here: one that was read before an attach would take its transport for another's.
            if mine is not None and mine != holder() and is_quiet():
                self._work.drop_endpoints()
                self._tag = None
            return None if lost is None or mine is None else (mine, lost)
        finally:
            self._attaching.release()


def _availability(value: Availability) -> dict[str, Any]:
    return {
        "is_usable": value.is_usable,
        "reason": value.reason,
        "remedy": value.remedy,
        "is_slow": value.is_slow,
    }


def stats_of(work: RankWork) -> dict[str, Any]:
    """Where the time of the last session went on this rank, as JSON."""
    stats = work.stats
    return {
        "phases": dict(stats.phases),
        "buckets": stats.buckets,
        "num_bytes": stats.num_bytes,
        "num_changed": stats.num_changed,
        "pause_s": stats.pause_s,
        "path": ", ".join(dict.fromkeys(e.path for e in work.endpoints)),
    }
