"""The engine's end: listens, runs the session, touches weights through the adapter.

The machines of :mod:`session_leader` and :mod:`session_rank` are fed under one lock, by whoever has
something to say to them: *control* threads (one a connection) their requests, the *job* thread what
it has done, the *session* thread the passing of time. To hand every event to one thread instead would
cost two wake-ups more in each stage, most of the time of a small update. Jobs on bytes run one at a
time on a thread of their own, or inside :meth:`Receiver.poll`.

An engine of several ranks has a receiver on each. Rank 0 leads: it alone listens and decides; the others
are told what to do and report to it (:mod:`followers`).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weightsync import config
from weightsync.control import ControlServer
from weightsync.deadline import Deadline
from weightsync.engine import EngineAdapter
from weightsync.errors import (
    BusyError,
    ConfigError,
    EpochError,
    IntegrityError,
    PeerLostError,
    ProtocolError,
)
from weightsync.followers import Followers, Uplink
from weightsync.job_lane import JobLane
from weightsync.machines import Hands, Machines
from weightsync.manifest_box import ManifestBox
from weightsync.messages import (
    AttachRequest,
    CommitRequest,
    ConnectRequest,
    DigestRequest,
    HeartbeatRequest,
    ManifestRequest,
    PlanRequest,
    PrepareRequest,
    Request,
    StagesRequest,
    StatusRequest,
    decode_stage,
    verb_of,
)
from weightsync.rank_calls import MAX_WAIT_S, RankCalls, stats_of
from weightsync.rank_session import ReceiverHooks
from weightsync.rank_work import RankWork
from weightsync.ranks import Meeting, answers_of
from weightsync.session import (
    Answer,
    Heartbeat,
    LeaderEvent,
    Order,
    RankHello,
    RankReport,
    RunLost,
    Stage,
    Tick,
    Version,
)
from weightsync.session_events import event_of
from weightsync.session_leader import LeaderState, Phase, outcome_of

if TYPE_CHECKING:
    from weightsync.following import PullReport, StoreFollower

_LOG = logging.getLogger(__name__)

_TICK_S = 0.1
_CLOSING_TICK_S = 0.005
#: How long closing waits for an open session to end, and then for work on bytes.
_CLOSE_LIMIT_S = 10.0
#: What lasted no longer the last time is done by the thread that was asked for it.
_SHORT_S = 0.1
#: Beyond its own wait, how long a rank's answer to its leader may take.
_GRACE_S = 1.0

Ask = Callable[[Request, float], Mapping[str, Any]]


class JobsBy(Enum):
    """Who runs work on bytes."""

    THREAD = "thread"  # threads of the receiver, one job at a time, under the adapter's pause
    POLL = "poll"  # the engine's loop, inside Receiver.poll()


class Receiver:
    """Serves one rank of an engine.

    ``listen`` is ``HOST:PORT`` of rank 0, port 0 for any free one; anything but loopback needs
    ``token``. An engine of several ranks has one on each, with ``group`` (a ``torch.distributed``
    process group of the engine's ranks) or ``store`` (as torch's stores are) to find rank 0; ``name``
    tells engines apart that share a store. ``start`` then returns once all ranks have come, and every
    rank calls it. The adapter's tensors must not be re-allocated while the receiver lives. Use as a
    context manager, or ``start()`` and ``close()``.
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
        group: Any = None,
        store: Any = None,
        name: str = "engine",
        join_timeout_s: float = 120.0,
    ) -> None:
        self._meeting = Meeting(rank, world_size, group, store, "engine", name)
        self._adapter, self._hooks = adapter, hooks
        self._own_layout = adapter.layout()
        if self._own_layout.world_size != world_size:
            raise ConfigError(
                f"the adapter's layout is of {self._own_layout.world_size} ranks, the receiver of "
                f"{world_size}: make both of the engine's size"
            )
        self._listen, self._token = listen, token if token is not None else config.control_token()
        self._join_timeout_s = join_timeout_s
        self._epoch = secrets.token_hex(8)
        self._jobs = JobLane()
        self._machines = Machines(rank, world_size, self._epoch, self._hands())
        self._followers: Followers | None = None
        self._uplink: Uplink | None = None
        self._work_of_rank: RankWork | None = None
        self._calls_of_rank: RankCalls | None = None
        self._closing = threading.Event()
        self._manifests = ManifestBox()
        self._answers: dict[int, Future[Mapping[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._server: ControlServer | None = None
        self._threads: list[threading.Thread] = []
        self._is_started = False
        self._closed = False
        self._jobs_by = JobsBy.THREAD
        self._took_s: dict[type[Request], float] = {}  # the last work of each kind
        self._began_s: dict[type[Request], float] = {}  # of what is asked for and not yet answered
        if world_size == 1:
            self._make_work(self._own_layout)

    def _hands(self) -> Hands:
        return Hands(
            refuse=lambda reason: self._adapter.refuse(reason),
            run_job=lambda action, token: self._work.run(action, token),
            put_job=self._jobs.put,
            tell=self._tell,
            say=self._say,
            answer=self._answer,
        )

    def _make_work(self, layout: Any) -> None:
        meeting = self._meeting
        self._work_of_rank = RankWork(
            self._adapter, meeting.rank, config.num_threads(), self._hooks, layout
        )
        self._calls_of_rank = RankCalls(self._work_of_rank, self._jobs.put, lambda: self._closed)

    @property
    def _work(self) -> RankWork:
        if self._work_of_rank is None:
            raise ConfigError(f"rank {self._meeting.rank} of the engine is not started")
        return self._work_of_rank

    @property
    def _calls(self) -> RankCalls:
        if self._calls_of_rank is None:
            raise ConfigError(f"rank {self._meeting.rank} of the engine is not started")
        return self._calls_of_rank

    @property
    def _leader(self) -> LeaderState:
        leader = self._machines.leader  # one immutable value: no lock
        if leader is None:
            raise ConfigError(f"rank {self._meeting.rank} of the engine does not lead it")
        return leader

    # --- life ---------------------------------------------------------------------------------------

    def start(self, jobs_by: JobsBy = JobsBy.THREAD) -> Self:
        """Find the other ranks, listen and serve. Raises :class:`ConfigError` for an address that
        cannot be had, :class:`DeadlineError` naming ranks that did not come."""
        if self._threads:
            return self
        self._jobs_by = jobs_by
        try:
            self._meet()
            self._machines.start()
            self._is_started = True  # a trainer that waits may ask before the threads run
            if self._meeting.rank == 0:
                self._server = ControlServer(self._listen, self._serve, self._token)
        except BaseException:
            self._is_started = False
            self._part()
            raise
        self._start_thread("weightsync-session", self._session_loop)
        if jobs_by is JobsBy.THREAD:
            self._start_thread("weightsync-jobs", self._job_loop)
        return self

    def _meet(self) -> None:
        meeting = self._meeting
        if meeting.world_size == 1:
            return
        deadline = Deadline(self._join_timeout_s, peer="the engine's ranks", stage="join")
        if meeting.rank == 0:
            self._followers = Followers(
                meeting, self._own_layout, self._machines.feed, self._machines.run_lost
            )
            self._make_work(self._followers.wait(deadline))
            return
        self._uplink = Uplink(
            meeting, self._own_layout, self._machines.hear, self._serve_call, self._lost_leader
        )
        self._make_work(self._uplink.join(deadline))

    def _part(self) -> None:
        if self._followers is not None:
            self._followers.close()
        if self._uplink is not None:
            self._uplink.close()

    def poll(self, timeout_s: float = 0.0) -> int:
        """Run waiting work on bytes in the caller's thread; returns how many jobs ran.

        The first call starts the receiver. An engine calls this between its steps; the adapter's
        ``pause`` then finds the engine at a step boundary already.
        """
        if not self._threads:
            self.start(JobsBy.POLL)
        num_jobs = 0
        while self._jobs.run_next(max(0.0, timeout_s)):
            num_jobs += 1
        return num_jobs

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
            self._jobs.end()
        if self._threads and not any(thread.is_alive() for thread in self._threads):
            self._jobs.wait_until_free(_CLOSE_LIMIT_S)  # for a thread that was lent
        for future in list(self._answers.values()):
            with suppress(InvalidStateError):
                future.set_exception(PeerLostError("the receiver of this engine was closed"))
        self._part()
        if self._work_of_rank is not None:
            self._work_of_rank.close()

    def _join(self, thread: threading.Thread) -> None:
        until_s = time.monotonic() + _CLOSE_LIMIT_S + 1.0
        while thread.is_alive() and time.monotonic() < until_s:
            if self._jobs_by is JobsBy.POLL:
                self.poll()
            thread.join(timeout=0.01)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where it listens, for ``Sender.connect``: rank 0 alone does."""
        if self._meeting.rank != 0:
            raise ConfigError(
                f"rank {self._meeting.rank} does not listen; rank 0 of its engine does"
            )
        if self._server is None:
            raise ConfigError("the receiver is not started")
        return self._server.url

    @property
    def version(self) -> int | None:
        """The published version, None before the first."""
        return self._machines.version

    def follow(
        self, directory: Path | str, run_id: str | None = None, **options: Any
    ) -> StoreFollower:
        """A follower of a store of versions, on rank 0: ``pull()`` once, or ``watch()``.

        ``options`` are the fields of :class:`weightsync.following.FollowOptions`. See
        :class:`weightsync.following.StoreFollower`.
        """
        from weightsync.following import FollowOptions, StoreFollower

        return StoreFollower(self, directory, run_id, FollowOptions(**options))

    def load(self, checkpoint: Path | str, version: int, run_id: str, **options: Any) -> PullReport:
        """Put a Hugging Face directory of safetensors into the engine, on rank 0, as one update."""
        from weightsync.following import FollowOptions, load_checkpoint

        return load_checkpoint(self, checkpoint, version, run_id, FollowOptions(**options))

    @property
    def epoch(self) -> str:
        """Names this life of the engine."""
        return self._epoch

    @property
    def label(self) -> Version | None:
        """The published version with its run, None before the first or while the engine is tainted."""
        leader = self._leader
        return None if leader.taint is not None else leader.version

    def newest_of(self, run_id: str) -> int | None:
        """The highest version that a run has published here, None if it has not."""
        return next((v.number for v in self._leader.published if v.run_id == run_id), None)

    def update_stats(self) -> dict[str, Any]:
        """Where the time of the last update went, over all ranks."""
        return self._stats()

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # --- control: called by control threads, or directly by a sender of this process ------------------

    def handle(self, request: Request) -> Mapping[str, Any]:
        """Answer one control request; raises what the caller should see."""
        return self._handle(request, self._ask)

    def _serve(self, request: Request) -> Mapping[str, Any]:
        """The same for a trainer elsewhere, whose thread here has nothing to do but wait."""
        return self._handle(request, self._ask_lending)

    def _handle(self, request: Request, ask: Ask) -> Mapping[str, Any]:
        if self._closed:
            raise PeerLostError("the receiver of this engine was closed")
        if not self._is_started:
            raise ConfigError("the receiver of this engine is not started; call start() or poll()")
        match request:
            case StatusRequest():
                return self._status(request.session_id)
            case HeartbeatRequest():
                self._machines.feed(Heartbeat(request.run_id))
                return {"epoch": self._epoch}
            case AttachRequest():
                return self._attach(request)
            case PlanRequest():
                return self._add_plan(request)
            case DigestRequest():
                return self._digest(request)
            case ConnectRequest():
                answer = ask(request, 10.0)
                if "epoch" not in answer:
                    raise BusyError("the engine did not answer within 10 s; try again")
                return {**answer, **self._description()}
            case StagesRequest():
                return self._stages(request, ask)
            case ManifestRequest():
                return self._take_manifests(request)
            case _:
                answer = ask(request, request.wait_s)
                if isinstance(request, CommitRequest) and "outcome" in answer:
                    return {**answer, "stats": self._stats()}
                return answer

    def _stages(self, request: StagesRequest, ask: Ask) -> Mapping[str, Any]:
        """One after the other, until one fails or time is up."""
        stages = [decode_stage(entry) for entry in request.stages]
        until_s = time.monotonic() + min(max(0.0, request.wait_s), MAX_WAIT_S)
        answers: list[Mapping[str, Any]] = []
        self._foresee(stages)
        for stage in stages:
            start_s = time.monotonic()
            if isinstance(stage, PrepareRequest) and not stage.manifests:
                manifests = self._come_apart(stage.session_id, until_s)
                if manifests is None:
                    return {"answers": answers, "pending": True}
                stage = replace(stage, manifests=manifests)
            left_s = max(0.0, until_s - time.monotonic())
            answer = self._handle(replace(stage, wait_s=left_s), ask)
            if answer.get("pending"):
                return {"answers": answers, "pending": True}
            answers.append({**answer, "took_s": time.monotonic() - start_s})
        return {"answers": answers}

    def _come_apart(self, session_id: str, until_s: float) -> list[Any] | None:
        """Manifests that come by themselves; None: not yet."""

        def is_over() -> bool:
            state = self._leader
            is_open = state.spec is not None and state.spec.session_id == session_id
            return not is_open or state.phase is Phase.ABORTING

        found = self._manifests.wait(session_id, until_s, is_over)
        if found is None and is_over():
            return [{}] * self._meeting.world_size  # nobody will look at them: the leader says why
        return found

    def _take_manifests(self, request: ManifestRequest) -> dict[str, Any]:
        # Whether there is such a session, the exchange that needs them is told.
        if len(request.manifests) != self._meeting.world_size:
            raise ProtocolError(
                f"{len(request.manifests)} manifests for an engine of {self._meeting.world_size} ranks"
            )
        self._manifests.put(request.session_id, request.manifests)
        if len(request.manifests) == 1:
            self._work.foresee(request.session_id, request.manifests[0])
        return {"epoch": self._epoch}

    def _foresee(self, stages: Sequence[Request]) -> None:
        """What a later stage brings may be read while bytes move."""
        for stage in stages:
            if isinstance(stage, PrepareRequest) and len(stage.manifests) == 1:
                self._work.foresee(stage.session_id, stage.manifests[0])

    def _ask(
        self,
        request: Request,
        wait_s: float,
        around: AbstractContextManager[None] | None = None,
    ) -> Mapping[str, Any]:
        """Put a request to the leader and wait for its answer, or say that it is pending."""
        world_size = self._meeting.world_size
        return self.ask(lambda number: event_of(request, number, world_size), wait_s, around)

    def _ask_lending(self, request: Request, wait_s: float) -> Mapping[str, Any]:
        """The same; where the last of its kind was short, this thread does the work. Meanwhile it cannot
        say that something is pending, but a caller who hears nothing for long asks again."""
        kind = type(request)
        # Of work that takes several requests, from the first of them on.
        start_s = self._began_s.setdefault(kind, time.monotonic())
        is_short = self._took_s.get(kind, math.inf) < _SHORT_S
        lending = is_short and self._jobs_by is JobsBy.THREAD
        try:
            answer = self._ask(request, wait_s, self._jobs.lending() if lending else nullcontext())
        except BaseException:
            self._began_s.pop(kind, None)
            raise
        if not answer.get("pending"):
            self._began_s.pop(kind, None)
            self._took_s[kind] = time.monotonic() - start_s
        return answer

    def ask(
        self,
        event_of_number: Callable[[int], LeaderEvent],
        wait_s: float,
        around: AbstractContextManager[None] | None = None,
    ) -> Mapping[str, Any]:
        """The same with an event of this process's own: what a store's follower does on rank 0.
        ``around`` is entered to tell the machines of it."""
        number = next(self._numbers)
        event = event_of_number(number)
        future: Future[Mapping[str, Any]] = Future()
        self._answers[number] = future
        until_s = time.monotonic() + min(max(0.0, wait_s), MAX_WAIT_S)
        try:
            with around or nullcontext():
                self._machines.feed(event)
            return future.result(timeout=max(0.0, until_s - time.monotonic()))
        except FutureTimeout:
            if future.done() and future.exception() is not None:
                raise  # a deadline of the session's
            return {"pending": True, "phase": self._leader.phase.value}
        finally:
            self._answers.pop(number, None)

    def _answer(self, action: Answer) -> None:
        future = self._answers.get(action.request)
        if future is None or future.done():
            return  # its caller asks again, or is gone
        if action.error is not None:
            future.set_exception(action.error)
        else:
            future.set_result(dict(action.result or {}))

    def _description(self) -> dict[str, Any]:
        return {
            "layout": self._work.layout.to_json(),
            "layout_digest": self._work.layout.digest,
            "world_size": self._meeting.world_size,
            "version": self.version,
            "tainted": self._leader.taint,
            "pid": os.getpid(),
            "joins_stages": True,
            "takes_manifests": True,
        }

    def _status(self, session_id: str | None) -> dict[str, Any]:
        state = self._leader
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
            answer["updating_for_s"] = time.monotonic() - self._machines.session_start_s
            answer["deadline_s"] = spec.deadline_s
            answer["num_bytes"] = self._work.stats.num_bytes
        if session_id is not None:
            ended = outcome_of(state, session_id)
            is_open = spec is not None and spec.session_id == session_id
            unknown = "open" if is_open else "unknown"
            answer["outcome"] = unknown if ended is None else ended.outcome.value
            answer["detail"] = "" if ended is None else ended.detail
        return answer

    def _hold(self, run_id: str) -> str:
        """The tag of the run's connection. Raises if it does not hold the engine."""
        run, tag = self._leader.run, self._machines.tag
        if run is None or tag is None:
            raise EpochError(f"run {run_id!r} is not connected here; connect again")
        if run.run_id != run_id:
            raise BusyError(f"the engine serves run {run.run_id!r}, not {run_id!r}")
        return tag

    def _attach(self, request: AttachRequest) -> dict[str, Any]:
        tag = self._hold(request.run_id)

        def make_sure(deadline: Deadline) -> None:
            self._wait_for_idle(deadline)
            self._hold(request.run_id)  # another run may have come while this one waited

        if request.target_rank == 0:
            return self._calls.attach(request, tag, make_sure)
        deadline = Deadline(request.timeout_s, peer=f"trainer run {request.run_id}", stage="attach")
        make_sure(deadline)
        return self._rank(request.target_rank).ask(
            request.target_rank, request, tag, deadline.remaining_s() + _GRACE_S
        )

    def _rank(self, rank: int) -> Followers:
        if self._followers is None or not 0 < rank < self._meeting.world_size:
            raise ConfigError(f"this engine has no rank {rank}: it has {self._meeting.world_size}")
        return self._followers

    def _wait_for_idle(self, deadline: Deadline) -> None:
        """A session that is ending is waited for; one that goes on keeps its transport."""
        while (phase := self._leader.phase) is not Phase.IDLE:
            if phase not in (Phase.ABORTING, Phase.PLACING, Phase.RESUMING):
                raise BusyError("a session is open; a transport is attached between sessions")
            deadline.check()
            time.sleep(deadline.slice_s(0.01))

    def _on_all(self, request: Request, tag: str, limit_s: float) -> list[dict[str, Any]]:
        """What every rank answers, in rank order; all are asked before any is waited for."""
        others = range(1, self._meeting.world_size)
        asked = {r: self._rank(r).call(r, request, tag) for r in others}
        own = self._calls.serve(request, tag)
        found = answers_of(asked, "the engine's", verb_of(request), limit_s)
        return [own, *(found[rank] for rank in others)]

    def _add_plan(self, request: PlanRequest) -> dict[str, Any]:
        tag = self._hold(request.run_id)
        answers = self._on_all(request, tag, MAX_WAIT_S)
        digests = {answer["digest"] for answer in answers}
        if len(digests) != 1:
            raise IntegrityError(f"the engine's ranks understood different plans: {digests}")
        return answers[0]

    def _digest(self, request: DigestRequest) -> dict[str, Any]:
        if request.names is not None:
            self._work.layout.resolve(map(str, request.names), "engine")
        answers = self._on_all(request, "", request.wait_s + _GRACE_S)
        return {"ranks": [answer["digests"] for answer in answers]}

    def _stats(self) -> dict[str, Any]:
        own = stats_of(self._work)
        if self._followers is None:
            return own
        ranks = [own, *(self._followers.stats[r] for r in sorted(self._followers.stats))]
        phases: dict[str, float] = {}
        for stats in ranks:  # the slowest rank is what the trainer waits for
            for name, seconds in stats["phases"].items():
                phases[name] = max(phases.get(name, 0.0), seconds)
        return {
            **own,
            "phases": phases,
            "num_bytes": sum(stats["num_bytes"] for stats in ranks),
            "num_changed": sum(stats["num_changed"] for stats in ranks),
            "pause_s": max(stats["pause_s"] for stats in ranks),
            "ranks": ranks,
        }

    # --- between ranks ----------------------------------------------------------------------------------

    def _tell(self, rank: int, order: Order) -> None:
        if self._followers is not None:
            self._followers.tell(rank, order)

    def _say(self, record: RankHello | RankReport) -> None:
        if self._uplink is None:
            return
        is_end = isinstance(record, RankReport) and record.stage is Stage.RESUME
        self._uplink.say(record, stats_of(self._work) if is_end else None)

    def _serve_call(self, request: Request, tag: str) -> dict[str, Any]:
        return self._calls.serve(request, tag)

    def _lost_leader(self, reason: str) -> None:
        if not self._closed:
            _LOG.error("rank %d lost the leader of its engine: %s", self._meeting.rank, reason)
            self._machines.lose_leader(
                f"rank {self._meeting.rank} lost the leader of its engine ({reason}); restart the engine"
            )

    # --- session thread -------------------------------------------------------------------------------

    def _session_loop(self) -> None:
        while not self._closing.wait(_TICK_S):
            try:
                self._watch_peer()
            except Exception:  # a fault of a transport must not end what every caller needs
                _LOG.exception("watching the trainer's transport failed")
            self._machines.feed(Tick())
        if self._meeting.rank == 0:
            self._end_session()

    def _end_session(self) -> None:
        end_s = time.monotonic() + _CLOSE_LIMIT_S
        if (run := self._leader.run) is not None:
            self._machines.feed(RunLost(run.run_id, "the receiver was closed"))
        while time.monotonic() < end_s:
            if self._machines.is_quiet and self._leader.phase is Phase.IDLE:
                return
            time.sleep(_CLOSING_TICK_S)
            self._machines.feed(Tick())
        self._machines.refuse("the engine's receiver was closed in the middle of an update")

    def _watch_peer(self) -> None:
        """A trainer whose process ended need not be waited for."""
        if self._followers is not None:
            self._machines.tell_tag(self._followers.set_tag)
        lost = self._calls.watch(self._holder, lambda: self._machines.is_quiet)
        if lost is None:
            return
        if self._uplink is not None:
            self._uplink.say_run_lost(*lost)
        else:
            self._machines.run_lost(*lost)

    def _holder(self) -> str | None:
        return self._machines.tag if self._uplink is None else self._uplink.tag

    # --- job thread -----------------------------------------------------------------------------------

    def _job_loop(self) -> None:
        while self._jobs.run_next(None):
            pass


__all__ = ["JobsBy", "Receiver", "ReceiverHooks"]
