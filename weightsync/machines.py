"""The session machines of one rank, fed under one lock by whoever has something to say to them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from weightsync.deadline import CancelToken
from weightsync.errors import WeightSyncError
from weightsync.session import (
    Answer,
    CancelJob,
    Connect,
    Job,
    JobDone,
    LeaderEvent,
    Order,
    RankHello,
    RankReport,
    Refuse,
    RunLost,
    StartJob,
    Tell,
    Tick,
    Version,
)
from weightsync.session_leader import LeaderState, start_leader, step_leader
from weightsync.session_rank import RankState, start_rank, step_rank
from weightsync.session_wire import for_rank

_LOG = logging.getLogger(__name__)

_OWN_LEASE_S: Final = math.inf  # rank 0 and its leader live and die together
#: Silence of the leader after which another rank gives up what was not prepared; it pings every second.
_LEADER_LEASE_S: Final = 10.0


@dataclass(frozen=True)
class Hands:
    """What the machines' actions do. All but ``run_job`` are called under the machines' lock."""

    refuse: Callable[[str | None], None]
    run_job: Callable[[StartJob, CancelToken], JobDone]
    put_job: Callable[[Callable[[], None]], None]  # to whoever runs work on bytes
    tell: Callable[[int, Order], None]  # to another rank
    say: Callable[[RankHello | RankReport], None]  # to the leader, which is another rank
    answer: Callable[[Answer], None]


class Machines:
    """On rank 0 the leader's and its own, elsewhere a rank's alone."""

    def __init__(self, rank: int, world_size: int, epoch: str, hands: Hands) -> None:
        self._number, self._hands = rank, hands
        self._lock = threading.RLock()  # around every step
        self.leader: LeaderState | None = start_leader(epoch, world_size) if rank == 0 else None
        self._rank: RankState | None = None
        self._epoch = epoch
        self._token_of_job: CancelToken | None = None
        self._version: Version | None = None  # that this rank resumed with
        self._num_connections = 0
        self._lost_leader: str | None = None
        self.session_start_s = 0.0

    def tell_tag(self, told: Callable[[str | None], None]) -> None:
        """Hand on the present :attr:`tag`; no later one can be handed on before it."""
        with self._lock:
            told(self.tag)

    def start(self) -> None:
        """Say hello; to be called once everything is ready to hear the answer."""
        lease_s = _OWN_LEASE_S if self.leader is not None else _LEADER_LEASE_S
        with self._lock:
            self._rank, actions = start_rank(self._number, self._epoch, lease_s, time.monotonic())
            self._carry_out(deque(actions))

    @property
    def version(self) -> int | None:
        """The version that is served, None before the first."""
        found = self._version if self.leader is None else self.leader.version
        return None if found is None else found.number

    @property
    def tag(self) -> str | None:
        """Names the connection of the run that holds the engine (on rank 0)."""
        run = None if self.leader is None else self.leader.run
        return None if run is None else f"{run.run_id}#{self._num_connections}"

    @property
    def is_quiet(self) -> bool:
        """Whether no job runs, or is about to."""
        with self._lock:
            return self._rank is not None and self._rank.running is None

    def feed(self, event: Any) -> None:
        """One event to the machine or machines that it is for, and all that follows from it."""
        with self._lock:
            if isinstance(event, Connect):
                self._start_over(event.run_id)
            actions: deque[Any] = deque()
            if isinstance(event, JobDone | Tick) and self._rank is not None:
                self._rank, found = step_rank(self._rank, event, time.monotonic())
                actions.extend(found)
            if self.leader is not None and not isinstance(event, JobDone):
                actions.extend(self._step_leader(self.leader, event))
            if isinstance(event, Connect):
                self._count_connection(event.run_id)
            self._carry_out(actions)

    def hear(self, order: Order) -> None:
        """An order of a leader that is another rank."""
        with self._lock:
            if self._rank is None:
                return
            self._rank, found = step_rank(self._rank, order, time.monotonic())
            self._carry_out(deque(found))

    def run_lost(self, tag: str, reason: str) -> None:
        """A trainer's process ended; it counts if its connection is the one that holds the engine."""
        with self._lock:
            run = None if self.leader is None else self.leader.run
            if run is not None and tag == self.tag:
                self.feed(RunLost(run.run_id, reason))

    def _start_over(self, run_id: str) -> None:
        """A run that connects again has given up what it had here: its session, and its transport,
        whose end must not count against the new one."""
        run = None if self.leader is None else self.leader.run
        if run is not None and run.run_id == run_id:
            self.feed(RunLost(run_id, f"trainer run {run_id!r} connected again"))

    def _count_connection(self, run_id: str) -> None:
        """Of one that was accepted: whoever is refused changes nothing for the run that holds."""
        run = None if self.leader is None else self.leader.run
        if run is not None and run.run_id == run_id:
            self._num_connections += 1

    def _step_leader(self, leader: LeaderState, event: LeaderEvent) -> list[Any]:
        had_session = leader.spec is not None
        self.leader, found = step_leader(leader, event, time.monotonic())
        if not had_session and self.leader.spec is not None:
            self.session_start_s = time.monotonic()
        return list(found)

    def _carry_out(self, actions: deque[Any]) -> None:
        """Carry out actions in order; what leader and rank 0 say to each other is fed at once."""
        while actions:
            action = actions.popleft()
            match action:
                case Tell():
                    actions.extend(self._deliver(action))
                case RankReport() | RankHello():
                    if self.leader is not None:
                        actions.extend(self._step_leader(self.leader, action))
                    else:
                        self._hands.say(action)
                case Answer():
                    self._hands.answer(action)
                case Refuse():
                    self.refuse(action.reason)
                case CancelJob():
                    if self._token_of_job is not None:
                        self._token_of_job.cancel("the session is being given up")
                case StartJob():
                    self._queue_job(action)

    def _deliver(self, action: Tell) -> list[Any]:
        if action.rank != self._number:
            self._hands.tell(action.rank, action.order)
            return []
        if self._rank is None:
            return []
        order = for_rank(action.order, self._number)
        self._rank, found = step_rank(self._rank, order, time.monotonic())
        return list(found)

    def lose_leader(self, reason: str) -> None:
        """The channel to the leader is gone: nobody says any more what this rank may serve."""
        with self._lock:
            self._lost_leader = reason
            self.refuse(None)

    def refuse(self, reason: str | None) -> None:
        """Refuse to generate, or (None) do so again, unless the leader is lost for good."""
        try:
            self._hands.refuse(reason or self._lost_leader)
        except Exception:  # foreign code must not end the thread that fed the machines
            _LOG.exception("the adapter could not refuse (%s)", reason)

    def _queue_job(self, action: StartJob) -> None:
        token = self._token_of_job = CancelToken()

        def job() -> None:
            error = WeightSyncError(f"{action.job.value}: the work was interrupted")
            done = JobDone(action.job, action.spec.session_id, error=error, touched=True)
            try:
                done = self._hands.run_job(action, token)
            finally:  # also when the engine's own loop is interrupted inside poll()
                if action.job is Job.RESUME and done.error is None:
                    self._version = action.version
                self.feed(done)

        self._hands.put_job(job)
