"""The engine's end: listens, runs the session, touches weights through the adapter.

The machines of :mod:`session_leader` and :mod:`session_rank` are fed under one lock, by whoever has
something to say to them: *control* threads (one a connection) their requests, the *job* thread what
it has done, the *session* thread the passing of time. To hand every event to one thread instead would
cost two wake-ups more in each stage, most of the time of a small update. Jobs on bytes run one at a
time on a thread of their own, or inside :meth:`Receiver.poll`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from enum import Enum
from typing import Any

from weightsync import config
from weightsync.control import ControlServer
from weightsync.deadline import CancelToken, Deadline
from weightsync.engine import EngineAdapter
from weightsync.errors import (
    BusyError,
    ConfigError,
    EpochError,
    PeerLostError,
    ProtocolError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.layout import Layout
from weightsync.messages import (
    AbortRequest,
    AttachRequest,
    BeginRequest,
    CloseRequest,
    CommitRequest,
    ConnectRequest,
    DigestRequest,
    HeartbeatRequest,
    MoveRequest,
    PlanRequest,
    PrepareRequest,
    Request,
    StatusRequest,
    verb_of,
)
from weightsync.plan import RefitPlan
from weightsync.rank_session import ReceiverHooks
from weightsync.rank_work import RankWork
from weightsync.session import (
    Abort,
    Answer,
    Begin,
    CancelJob,
    Close,
    Commit,
    Connect,
    Heartbeat,
    JobDone,
    LeaderEvent,
    Move,
    Prepare,
    RankHello,
    RankReport,
    Refuse,
    RunLost,
    Scope,
    SessionSpec,
    StartJob,
    Tell,
    Tick,
)
from weightsync.session_leader import LeaderState, Phase, outcome_of, start_leader, step_leader
from weightsync.session_rank import RankState, start_rank, step_rank
from weightsync.transports import get_transport
from weightsync.types import Availability, Contract, PauseMode, Placement, VerifyMode

_LOG = logging.getLogger(__name__)

_TICK_S = 0.1
#: Longest that a trainer's attach may keep the next one waiting.
_ATTACH_LIMIT_S = 60.0
_CLOSING_TICK_S = 0.005
_LEADER_LEASE_S = math.inf  # rank 0 and its leader live and die together
#: The longest that one request holds a thread, whatever it asks for.
_MAX_WAIT_S = 60.0
#: How long closing waits for an open session to end, and then for work on bytes.
_CLOSE_LIMIT_S = 10.0


class JobsBy(Enum):
    """Who runs work on bytes."""

    THREAD = "thread"  # the receiver's own thread, under the adapter's pause
    POLL = "poll"  # the engine's loop, inside Receiver.poll()


class Receiver:
    """Serves one rank of an engine (so far an engine has one rank).

    ``listen`` is ``HOST:PORT``, port 0 for any free one; anything but loopback needs ``token``. The
    adapter's tensors must not be re-allocated while the receiver lives. Use as a context manager, or
    ``start()`` and ``close()``.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        *,
        rank: int = 0,
        world_size: int = 1,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        hooks: ReceiverHooks | None = None,
    ) -> None:
        if (rank, world_size) != (0, 1):
            raise ConfigError(
                f"rank {rank} of {world_size}: engines of several ranks are not supported yet; "
                "use rank=0, world_size=1"
            )
        self._adapter = adapter
        self._work = RankWork(adapter, rank, config.num_threads(), hooks)
        self._listen, self._token = listen, token if token is not None else config.control_token()
        self._epoch = secrets.token_hex(8)
        self._leader: LeaderState = start_leader(self._epoch, world_size)
        self._rank: RankState | None = None
        self._machine = threading.RLock()  # around every step of the two machines
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: dict[int, Future[Mapping[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._token_of_job: CancelToken | None = None
        self._attach_lock = threading.Lock()
        self._endpoint_run: str | None = None  # whose handshake the attached endpoint belongs to
        self._server: ControlServer | None = None
        self._threads: list[threading.Thread] = []
        self._is_started = False
        self._closed = False
        self._session_start_s = 0.0
        self._jobs_by = JobsBy.THREAD

    # --- life ---------------------------------------------------------------------------------------

    def start(self, jobs_by: JobsBy = JobsBy.THREAD) -> Receiver:
        """Listen and serve. Raises :class:`ConfigError` for an address that cannot be had."""
        if self._threads:
            return self
        self._jobs_by = jobs_by
        self._rank, actions = start_rank(0, self._epoch, _LEADER_LEASE_S, time.monotonic())
        with self._machine:
            self._run_actions(deque(actions))
        self._is_started = True  # a trainer that waits for us may ask before the threads run
        try:
            self._server = ControlServer(self._listen, self.handle, self._token)
        except BaseException:
            self._is_started = False
            raise
        self._start_thread("weightsync-session", self._session_loop)
        if jobs_by is JobsBy.THREAD:
            self._start_thread("weightsync-jobs", self._job_loop)
        return self

    def poll(self, timeout_s: float = 0.0) -> int:
        """Run waiting work on bytes in the caller's thread; returns how many jobs ran.

        The first call starts the receiver. An engine calls this between its steps; the adapter's
        ``pause`` then finds the engine at a step boundary already.
        """
        if not self._threads:
            self.start(JobsBy.POLL)
        num_jobs = 0
        while True:
            try:
                job = (
                    self._jobs.get(timeout=timeout_s) if timeout_s > 0 else self._jobs.get_nowait()
                )
            except queue.Empty:
                return num_jobs
            if job is not None:
                job()
                num_jobs += 1

    def close(self) -> None:
        """Stop serving and release everything; an open session ends as its trainer's loss.

        An engine whose session does not end within some seconds refuses to generate from then on.
        """
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        self._closing.set()
        for thread in self._threads:  # the session thread first: it may need the other one yet
            self._join(thread)
            self._jobs.put(None)
        for future in list(self._answers.values()):
            with suppress(InvalidStateError):
                future.set_exception(PeerLostError("the receiver of this engine was closed"))
        self._work.close()

    def _join(self, thread: threading.Thread) -> None:
        until_s = time.monotonic() + _CLOSE_LIMIT_S + 1.0
        while thread.is_alive() and time.monotonic() < until_s:
            if self._jobs_by is JobsBy.POLL:
                self.poll()
            thread.join(timeout=0.01)

    def __enter__(self) -> Receiver:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it listens, for ``Sender.connect``."""
        if self._server is None:
            raise ConfigError("the receiver is not started")
        return self._server.url

    @property
    def version(self) -> int | None:
        """The published version, None before the first."""
        version = self._leader.version
        return None if version is None else version.number

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # --- control: called by control threads, or directly by a sender of this process ------------------

    def handle(self, request: Request) -> Mapping[str, Any]:
        """Answer one control request; raises what the caller should see."""
        if self._closed:
            raise PeerLostError("the receiver of this engine was closed")
        if not self._is_started:
            raise ConfigError("the receiver of this engine is not started; call start() or poll()")
        match request:
            case StatusRequest():
                return self._status(request.session_id)
            case HeartbeatRequest():
                self._feed(Heartbeat(request.run_id))
                return {"epoch": self._epoch}
            case AttachRequest():
                return self._attach(request)
            case PlanRequest():
                return self._add_plan(request)
            case DigestRequest():
                return self._digest(request)
            case ConnectRequest():
                answer = self._ask(request, 10.0)
                if "epoch" not in answer:
                    raise BusyError("the engine did not answer within 10 s; try again")
                return {**answer, **self._description()}
            case _:
                answer = self._ask(request, request.wait_s)
                if isinstance(request, CommitRequest) and "outcome" in answer:
                    return {**answer, "stats": self._stats()}
                return answer

    def _ask(self, request: Request, wait_s: float) -> Mapping[str, Any]:
        """Put a request to the leader and wait for its answer, or say that it is pending."""
        number = next(self._numbers)
        event = _event_of(request, number)
        future: Future[Mapping[str, Any]] = Future()
        self._answers[number] = future
        try:
            self._feed(event)
            return future.result(timeout=min(max(0.0, wait_s), _MAX_WAIT_S))
        except FutureTimeout:
            return {"pending": True, "phase": self._leader.phase.value}
        finally:
            self._answers.pop(number, None)

    def _description(self) -> dict[str, Any]:
        return {
            "layout": self._work.layout.to_json(),
            "layout_digest": self._work.layout.digest,
            "world_size": 1,
            "version": self.version,
            "tainted": self._leader.taint,
            "pid": os.getpid(),
        }

    def _status(self, session_id: str | None) -> dict[str, Any]:
        state = self._leader  # one immutable value: no lock
        spec, version = state.spec, state.version
        answer: dict[str, Any] = {
            "epoch": state.epoch,
            "phase": state.phase.value,
            "version": None if version is None else version.number,
            "run_id": None if version is None else version.run_id,
            "holder": None if state.run is None else state.run.run_id,
            "tainted": state.taint,
            "session_id": None if spec is None else spec.session_id,
        }
        if spec is not None:
            answer["updating_to"] = spec.version
            answer["updating_for_s"] = time.monotonic() - self._session_start_s
            answer["deadline_s"] = spec.deadline_s
            answer["num_bytes"] = self._work.stats.num_bytes
        if session_id is not None:
            ended = outcome_of(state, session_id)
            is_open = spec is not None and spec.session_id == session_id
            unknown = "open" if is_open else "unknown"
            answer["outcome"] = unknown if ended is None else ended.outcome.value
            answer["detail"] = "" if ended is None else ended.detail
        return answer

    def _hold(self, run_id: str) -> None:
        run = self._leader.run
        if run is None:
            raise EpochError(f"run {run_id!r} is not connected here; connect again")
        if run.run_id != run_id:
            raise BusyError(f"the engine serves run {run.run_id!r}, not {run_id!r}")

    def _attach(self, request: AttachRequest) -> dict[str, Any]:
        self._hold(request.run_id)
        peer = f"trainer run {request.run_id}"
        limit_s = min(request.timeout_s, _ATTACH_LIMIT_S)
        deadline = Deadline(limit_s, peer=peer, stage="attach")
        if not self._attach_lock.acquire(timeout=deadline.remaining_s()):
            raise BusyError(f"another attach was not over after {limit_s:.1f} s; try again")
        try:
            self._wait_for_idle(deadline)
            self._hold(request.run_id)  # another run may have come while this one waited
            reach("engine.attach")
            self._work.set_endpoint(None)
            self._endpoint_run = request.run_id
            transport = get_transport(request.transport)
            endpoint = transport.open_target(request.descriptor, deadline, self._work.device)
            try:
                direct = endpoint.probe_direct(deadline)
                stream = transport.capabilities().contracts.get(Contract.STREAM)
            except BaseException:
                endpoint.close()
                raise
            self._work.set_endpoint(endpoint)
            if self._closed:  # meanwhile: nobody else would let go of it
                self._work.set_endpoint(None)
        finally:
            self._attach_lock.release()
        reach("engine.attached")
        return {
            "contracts": {
                Contract.DIRECT.value: _availability(direct),
                Contract.STREAM.value: _availability(stream or Availability(False)),
            },
            "path": endpoint.path,
        }

    def _wait_for_idle(self, deadline: Deadline) -> None:
        """A session that is ending is waited for; one that goes on keeps its transport."""
        while (phase := self._leader.phase) is not Phase.IDLE:
            if phase not in (Phase.ABORTING, Phase.PLACING, Phase.RESUMING):
                raise BusyError("a session is open; a transport is attached between sessions")
            deadline.check()
            time.sleep(deadline.slice_s(0.01))

    def _add_plan(self, request: PlanRequest) -> dict[str, Any]:
        self._hold(request.run_id)
        plan = RefitPlan.from_json(request.plan)
        self._work.add_plan(plan, Layout.from_json(request.source_layout))
        reach("engine.planned")
        return {"digest": plan.digest}

    def _digest(self, request: DigestRequest) -> dict[str, Any]:
        names = request.names
        wanted = list(self._work.layout.index) if names is None else [str(n) for n in names]
        future: Future[Mapping[str, int]] = Future()

        def compute() -> None:
            try:
                future.set_result(self._work.digest_live(wanted))
            except Exception as error:  # handed to the caller
                future.set_exception(error)

        self._jobs.put(compute)
        try:
            found = future.result(timeout=min(max(0.0, request.wait_s), _MAX_WAIT_S))
        except FutureTimeout:
            raise BusyError(
                f"the engine did not come to a step boundary within {request.wait_s:.1f} s"
            ) from None
        return {"digests": {n: f"{d:016x}" for n, d in found.items()}}

    def _stats(self) -> dict[str, Any]:
        stats, endpoint = self._work.stats, self._work.endpoint
        return {
            "phases": dict(stats.phases),
            "buckets": stats.buckets,
            "num_bytes": stats.num_bytes,
            "pause_s": stats.pause_s,
            "path": "" if endpoint is None else endpoint.path,
        }

    # --- session thread -------------------------------------------------------------------------------

    def _session_loop(self) -> None:
        while not self._closing.wait(_TICK_S):
            try:
                self._watch_peer()
            except Exception:  # a fault of a transport must not end what every caller needs
                _LOG.exception("watching the trainer's transport failed")
            self._feed(Tick())
        end_s = time.monotonic() + _CLOSE_LIMIT_S
        self._lose_holder("the receiver was closed")
        while time.monotonic() < end_s:
            with self._machine:
                if self._is_quiet() and self._leader.phase is Phase.IDLE:
                    return
            time.sleep(_CLOSING_TICK_S)
            self._feed(Tick())
        self._refuse("the engine's receiver was closed in the middle of an update")

    def _lose_holder(self, reason: str) -> None:
        if (run := self._leader.run) is not None:
            self._feed(RunLost(run.run_id, reason))

    def _is_quiet(self) -> bool:
        """Whether no job runs, or is about to."""
        return self._rank is not None and self._rank.running is None

    def _feed(self, event: Any) -> None:
        """One event to the machine or machines that it is for, and all that follows from it."""
        with self._machine:
            if isinstance(event, Connect):
                self._start_over(event.run_id)
            actions: deque[Any] = deque()
            if isinstance(event, JobDone | Tick) and self._rank is not None:
                self._rank, found = step_rank(self._rank, event, time.monotonic())
                actions.extend(found)
            if not isinstance(event, JobDone):
                actions.extend(self._step_leader(event))
            self._run_actions(actions)

    def _step_leader(self, event: LeaderEvent) -> list[Any]:
        had_session = self._leader.spec is not None
        self._leader, found = step_leader(self._leader, event, time.monotonic())
        if not had_session and self._leader.spec is not None:
            self._session_start_s = time.monotonic()
        return list(found)

    def _run_actions(self, actions: deque[Any]) -> None:
        """Carry out actions in order; what leader and rank 0 say to each other is fed at once."""
        while actions:
            action = actions.popleft()
            match action:
                case Tell():
                    if self._rank is not None:
                        self._rank, found = step_rank(self._rank, action.order, time.monotonic())
                        actions.extend(found)
                case RankReport() | RankHello():
                    actions.extend(self._step_leader(action))
                case Answer():
                    self._answer(action)
                case Refuse():
                    self._refuse(action.reason)
                case CancelJob():
                    if self._token_of_job is not None:
                        self._token_of_job.cancel("the session is being given up")
                case StartJob():
                    self._queue_job(action)

    def _refuse(self, reason: str | None) -> None:
        try:
            self._adapter.refuse(reason)
        except Exception:  # foreign code must not end the thread that fed the machines
            _LOG.exception("the adapter could not refuse (%s)", reason)

    def _answer(self, action: Answer) -> None:
        future = self._answers.get(action.request)
        if future is None or future.done():
            return  # its caller asks again, or is gone
        if action.error is not None:
            future.set_exception(action.error)
        else:
            future.set_result(dict(action.result or {}))

    def _queue_job(self, action: StartJob) -> None:
        token = self._token_of_job = CancelToken()

        def job() -> None:
            error = WeightSyncError(f"{action.job.value}: the work was interrupted")
            done = JobDone(action.job, action.spec.session_id, error=error, touched=True)
            try:
                done = self._work.run(action, token)
            finally:  # also when the engine's own loop is interrupted inside poll()
                self._feed(done)

        self._jobs.put(job)

    def _start_over(self, run_id: str) -> None:
        """A run that connects again has given up what it had here: its session, and its transport,
        whose end must not count against the new one."""
        if self._endpoint_run == run_id:
            self._feed(RunLost(run_id, f"trainer run {run_id!r} connected again"))
            self._endpoint_run = None

    def _watch_peer(self) -> None:
        """A trainer whose process ended need not be waited for."""
        if not self._attach_lock.acquire(blocking=False):
            return  # one endpoint is being replaced by another
        try:
            self._watch_endpoint(self._endpoint_run)
        finally:
            self._attach_lock.release()

    def _watch_endpoint(self, run_id: str | None) -> None:
        endpoint = self._work.endpoint
        if endpoint is None:
            return
        lost = endpoint.lost()
        if lost is not None and run_id is not None:
            self._feed(RunLost(run_id, lost))  # of that run only: another may have come since
        run = self._leader.run
        is_over = run is None or run.run_id != run_id
        if is_over and self._is_quiet():
            self._work.set_endpoint(None)

    # --- job thread -----------------------------------------------------------------------------------

    def _job_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _availability(value: Availability) -> dict[str, Any]:
    return {
        "is_usable": value.is_usable,
        "reason": value.reason,
        "remedy": value.remedy,
        "is_slow": value.is_slow,
    }


def _event_of(request: Request, number: int) -> LeaderEvent:
    match request:
        case ConnectRequest():
            return Connect(number, request.run_id, request.lease_s)
        case BeginRequest():
            return Begin(number, request.epoch, _spec_of(request))
        case MoveRequest():
            payload = {
                "plan_digest": request.plan_digest,
                "epoch": request.epoch,
                "publication": request.publication,
            }
            return Move(number, request.session_id, request.move_id, payload)
        case PrepareRequest():
            return Prepare(number, request.session_id, {"manifest": request.manifest})
        case CommitRequest():
            return Commit(number, request.session_id)
        case AbortRequest():
            return Abort(number, request.session_id, request.reason)
        case CloseRequest():
            return Close(number, request.run_id)
        case _:
            raise ProtocolError(f"{verb_of(request)} is not a request of a session")


def _spec_of(request: BeginRequest) -> SessionSpec:
    names = None if request.scope is None else frozenset(map(str, request.scope))
    try:
        return SessionSpec(
            request.session_id,
            request.run_id,
            request.version,
            Scope(names),
            Placement(request.placement),
            request.deadline_s,
            request.commit_timeout_s,
            VerifyMode(request.verify),
            PauseMode(request.pause_mode),
        )
    except ValueError as error:
        raise ProtocolError(f"begin: {error}") from error


__all__ = ["JobsBy", "Receiver", "ReceiverHooks"]
