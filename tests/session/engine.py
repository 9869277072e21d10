"""One simulated engine: the two state machines, the bytes that their jobs write, the invariants.

The invariants are checked after every step that may have changed anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from weightsync import session_leader, session_rank
from weightsync.errors import IntegrityError, MissingNameError, TransportError, WeightSyncError
from weightsync.session import (
    Answer,
    Begin,
    CancelJob,
    Job,
    JobDone,
    LeaderEvent,
    Order,
    RankEvent,
    RankHello,
    RankReport,
    Refuse,
    SessionSpec,
    StartJob,
    Tell,
    Tick,
    Version,
)
from weightsync.session_leader import LeaderState, LeaderTiming, Phase
from weightsync.session_rank import RankPhase
from weightsync.types import Outcome, Placement

from .world import Process, Violation, World

TENSORS = ("a", "b", "c")
INITIAL = "initial"
TICK_S = 0.5
RESEND_S = 1.0
LEADER_LEASE_S = 2.5
#: A request may wait this much longer than its limit: for the tick that notices the limit.
SLACK_S = 2 * TICK_S
_COMMITTED = Outcome.COMMITTED


class RankModel:
    """One rank: its machine and its memory."""

    __slots__ = (
        "cancelled", "heard_s", "job", "label", "parked", "process", "rank", "refusal", "staging",
        "state", "touched", "undo", "weights", "writing",
    )  # fmt: skip

    def __init__(self, rank: int, process: Process) -> None:
        self.rank = rank
        self.process = process
        self.state: session_rank.RankState
        self.reset()

    def reset(self) -> None:
        """What a crash leaves: the weights of a fresh start, nothing else."""
        self.weights = dict.fromkeys(TENSORS, INITIAL)
        self.staging: dict[str, str] = {}
        self.undo: dict[str, str] = {}  # what a delta has overwritten
        self.label: Version | None = None
        self.refusal: str | None = "not started"
        self.parked = False
        self.writing = False
        self.touched = False
        self.job: StartJob | None = None
        self.cancelled = False
        self.heard_s = 0.0  # when the present leader's newest order came


@dataclass(slots=True)
class PendingRequest:
    due_s: float
    reply: Callable[[Answer], None]
    text: str


class Engine:
    """One engine of ``world_size`` ranks in as many processes; rank 0 shares the leader's."""

    def __init__(self, world: World, world_size: int) -> None:
        self.world = world
        self.processes = [Process(f"rank{r}") for r in range(world_size)]
        self.ranks = [RankModel(r, p) for r, p in enumerate(self.processes)]
        self.cut: set[int] = set()  # ranks whose link to the leader is down
        self.pending: dict[int, PendingRequest] = {}
        self.sources: set[str] = set()  # sessions whose trainer still holds its sources still
        self.num_requests = 0
        self.outcomes: dict[str, Outcome] = {}
        self.placed: set[tuple[str, int]] = set()
        self.resumed: set[tuple[str, int]] = set()
        self.on_phase: Callable[[Phase], None] = lambda phase: None
        self.leader: LeaderState
        self.expected: dict[str, str] = {}
        self.published: dict[str, int] = {}
        self.can_generate = False
        for rank in range(world_size):
            self.start(rank)

    # --- processes -------------------------------------------------------------------------------

    def start(self, rank: int) -> None:
        process, model = self.processes[rank], self.ranks[rank]
        process.alive = True
        process.life += 1
        process.stalled_until_s = 0.0
        model.reset()
        epoch = f"e{rank}.{process.life}"
        if rank == 0:
            timing = LeaderTiming(resend_s=RESEND_S)
            size = len(self.ranks)
            self.leader = session_leader.start_leader(f"L{process.life}", size, timing)
            self.expected = dict.fromkeys(TENSORS, INITIAL)
            self.published = {}
            self.world.after(TICK_S * self.world.rng.random(), process, self._tick_leader)
        # Rank 0 shares its leader's process and cannot lose it; a stall would look as if it had.
        lease_s = LEADER_LEASE_S if rank > 0 else math.inf
        model.state, actions = session_rank.start_rank(rank, epoch, lease_s, self.world.now_s)
        self._act(model, actions)
        self.world.after(TICK_S * self.world.rng.random(), process, self._tick_rank, model)

    def crash(self, rank: int) -> None:
        self.world.log(f"rank{rank}", "CRASH")
        process = self.processes[rank]
        process.alive = False
        process.life += 1
        if rank == 0:
            self.pending.clear()  # their connections break; the callers' time-outs stand for that
        self.can_generate = False

    def stall(self, rank: int, for_s: float) -> None:
        self.world.log(f"rank{rank}", f"STALL {for_s:.1f} s")
        process = self.processes[rank]
        process.stalled_until_s = self.world.now_s + for_s
        if rank == 0:
            for request in self.pending.values():
                request.due_s += for_s

    def _tick_leader(self) -> None:
        self.lead(Tick())
        for request in self.pending.values():
            if self.world.now_s > request.due_s:
                raise Violation("answered in time", f"{request.text} has waited too long")
        self.world.after(TICK_S, self.processes[0], self._tick_leader)

    def _tick_rank(self, model: RankModel) -> None:
        self.step(model, Tick())
        is_bound = model.state.phase in (RankPhase.PREPARED, RankPhase.PLACED)
        is_lost = self.world.now_s >= model.heard_s + LEADER_LEASE_S
        if is_bound and is_lost and model.rank > 0 and model.refusal is None:
            raise Violation("a lost follower refuses", f"rank {model.rank} {model.state.phase}")
        self.world.after(TICK_S, model.process, self._tick_rank, model)

    # --- the leader --------------------------------------------------------------------------------

    def ask(self, request: int, event: LeaderEvent, limit_s: float, reply: Any) -> None:
        """A request arrived at the leader's process."""
        if request in self.pending:  # a copy made by the network: one connection, one answer
            self.lead(event)
            return
        if isinstance(event, Begin) and self.outcomes.get(event.spec.session_id) is _COMMITTED:
            self.world.seen["asked again after it committed"] += 1
        text = f"request {request} {type(event).__name__}"
        self.pending[request] = PendingRequest(self.world.now_s + limit_s + SLACK_S, reply, text)
        self.lead(event)

    def lead(self, event: LeaderEvent) -> None:
        world, before = self.world, self.leader
        after, actions = session_leader.step_leader(before, event, world.now_s)
        self.leader = after
        if world.trace is not None and not isinstance(event, Tick):
            world.log("leader", f"{_short(event)} -> {after.phase}")
        if after is not before:
            self._observe(before, after, event)
        for action in actions:
            if isinstance(action, Tell):
                self._tell(action.rank, action.order)
            else:
                self._answer(action)
        self.check()

    def _answer(self, answer: Answer) -> None:
        request = self.pending.pop(answer.request, None)
        if answer.error is not None:
            self.world.seen[f"answer {type(answer.error).__name__}"] += 1
        if request is None:
            self.world.seen["answer to a copy or a broken connection"] += 1
            return
        outcome = None if answer.result is None else answer.result.get("outcome")
        self.world.log("leader", f"answers {request.text}: {answer.result or answer.error}")
        if outcome is not None:
            self.world.seen[f"answer outcome {outcome}"] += 1
        request.reply(answer)

    def _tell(self, rank: int, order: Order) -> None:
        model = self.ranks[rank]
        if rank == 0:
            self.world.after(0.0, model.process, self.step, model, order)
        elif rank not in self.cut:
            self.world.send(model.process, self.step, model, order)

    def _observe(self, before: LeaderState, after: LeaderState, event: LeaderEvent) -> None:
        """The invariants of a leader's step, and what to count."""
        if after.version is not before.version:
            self._published(before, after)
        if after.outcomes is not before.outcomes:
            self._ended(before, after, event)
        if after.phase is not before.phase:
            if after.phase is Phase.ABORTING:
                spec = before.spec
                is_delta = spec is not None and spec.placement is Placement.DELTA
                is_undone = is_delta and before.phase is Phase.PLACING
                if before.phase in (Phase.PLACING, Phase.RESUMING) and not is_undone:
                    raise Violation("the decision stays", f"{before.phase}: {after.abort_error}")
                self.world.seen[f"abort in {before.phase}"] += 1
                text = str(after.abort_error)
                if "(its lease)" in text:
                    self.world.seen["lease expired"] += 1
                if "(deadline_s)" in text:
                    self.world.seen["deadline passed"] += 1
            self.on_phase(after.phase)

    def _published(self, before: LeaderState, after: LeaderState) -> None:
        spec, version = before.spec, after.version
        if before.phase is not Phase.PLACING or spec is None or version is None:
            raise Violation("publish once", f"version {version} out of {before.phase}")
        missing = [r.rank for r in self.ranks if (spec.session_id, r.rank) not in self.placed]
        if missing:
            raise Violation("publish after placing", f"{version}: ranks {missing} did not place")
        if version.number <= self.published.get(version.run_id, version.number - 1):
            raise Violation("versions rise", f"{version} after {self.published}")
        if not spec.scope.is_full:
            old = before.version
            if before.taint is not None or old is None or old.run_id != version.run_id:
                text = f"{version} is partial, over {old}, taint {before.taint}"
                raise Violation("first a full update", text)
            self.world.seen["partial update published"] += 1
        self.published[version.run_id] = version.number
        self.expected.update(dict.fromkeys(scope_names(spec), spec.session_id))
        self.world.seen["published"] += 1

    def _ended(self, before: LeaderState, after: LeaderState, event: LeaderEvent) -> None:
        ended = after.outcomes[-1]
        if self.outcomes.setdefault(ended.session_id, ended.outcome) is not ended.outcome:
            raise Violation("outcome stays", f"{ended} was {self.outcomes[ended.session_id]}")
        seen = self.world.seen
        seen[f"outcome {ended.outcome}"] += 1
        if before.phase is Phase.ABORTING:
            seen[f"{ended.outcome} after {'a' if before.moves_done else 'no'} move"] += 1
        if not isinstance(event, RankReport | RankHello):  # no rank ended it, so time did
            seen[f"overrun in {before.phase}"] += 1
        if ended.outcome is Outcome.COMMITTED:
            late = [r.rank for r in self.ranks if (ended.session_id, r.rank) not in self.resumed]
            if late:
                raise Violation("commit after resuming", f"{ended}: ranks {late} did not resume")
            if after.taint is not None:
                raise Violation("committed means serving", f"{ended}: {after.taint}")
        if ended.outcome is Outcome.ABORTED:
            written = [r.rank for r in self.ranks if r.touched]
            if after.taint is not None or written:
                text = f"{ended}: taint {after.taint}, ranks {written} hold written weights"
                raise Violation("aborted means whole", text)
        if ended.outcome is Outcome.TAINTED and after.taint is None:
            raise Violation("tainted means refusing", f"{ended}")

    # --- the ranks -----------------------------------------------------------------------------------

    def step(self, model: RankModel, event: RankEvent) -> None:
        world, before = self.world, model.state
        if isinstance(event, Tick | JobDone):
            pass
        elif event.leader_epoch != before.leader_epoch:
            world.seen["order of an unknown leader"] += 1
        elif event.seq <= before.seq:
            world.seen["late or doubled order"] += 1
        else:
            model.heard_s = world.now_s
        model.state, actions = session_rank.step_rank(before, event, world.now_s)
        if world.trace is not None and not isinstance(event, Tick):
            world.log(model.process.name, f"{_short(event)} -> {model.state.phase}")
        if model.state.lost_leader and not before.lost_leader:
            world.seen[f"leader lost while {before.phase}"] += 1
        if actions:
            self._act(model, actions)
        if model.state is not before:
            self.check()

    def _act(self, model: RankModel, actions: Iterable[object]) -> None:
        world, leader = self.world, self.processes[0]
        for action in actions:
            match action:
                case Refuse():
                    model.refusal = action.reason
                case RankReport() | RankHello():
                    if model.rank == 0:
                        world.after(0.0, leader, self.lead, action)
                    elif model.rank not in self.cut:
                        world.send(leader, self.lead, action)
                case StartJob():
                    self._start_job(model, action)
                case CancelJob():
                    world.seen["job cancelled"] += 1
                    model.cancelled = True

    # --- jobs ------------------------------------------------------------------------------------------

    def _start_job(self, model: RankModel, job: StartJob) -> None:
        if model.job is not None:
            raise Violation("one job at a time", f"{job} while {model.job} runs")
        world, chaos = self.world, self.world.chaos
        model.job, model.cancelled = job, False
        world.log(model.process.name, f"starts {job.job}")
        is_in_place = job.spec.placement is Placement.IN_PLACE
        if job.job is Job.OPEN:
            model.staging, model.touched, model.undo = {}, False, {}
        if job.job is Job.PLACE or (job.job is Job.OPEN and is_in_place):
            model.parked = True
        time_s = 0.01 + 0.1 * world.rng.random()
        if world.rng.random() < chaos.job_hangs:
            world.seen["job hangs"] += 1
            time_s += 6.0 * world.rng.random()
        fails_at = world.rng.randrange(4) if world.rng.random() < chaos.job_fails else None
        writes = self._writes_of(job, model)
        model.writing = bool(writes) and (job.job is Job.PLACE or is_in_place)
        world.after(time_s, model.process, self._go_on, model, job, writes, fails_at)

    def _writes_of(self, job: StartJob, model: RankModel) -> list[tuple[str, str]]:
        """The tensors that a job still has to write, last one first."""
        if job.job is Job.MOVE:
            return [(name, job.spec.session_id) for name in job.payload["names"]][::-1]
        if job.job is Job.PLACE and job.spec.placement is not Placement.IN_PLACE:
            return list(model.staging.items())[::-1]
        return []

    def _go_on(
        self,
        model: RankModel,
        job: StartJob,
        writes: list[tuple[str, str]],
        fails_at: int | None,
    ) -> None:
        """Write one tensor, or finish."""
        error: WeightSyncError | None = None
        if model.cancelled and job.job is not Job.DISCARD:
            error = TransportError("cancelled")
        elif fails_at == 0:
            error = TransportError("broken on purpose")
            self.world.seen[f"job {job.job} failed"] += 1
        if error is not None or not writes:
            self._finish_job(model, job, error)
            return
        name, tag = writes.pop()
        if job.job is Job.MOVE and job.spec.session_id not in self.sources:
            tag = "garbage"  # the trainer went on training: its memory holds something else
            self.world.seen["read changed sources"] += 1
        if self.world.rng.random() < self.world.chaos.corrupts:
            self.world.seen["byte corrupted"] += 1
            tag = "corrupt"
        if job.job is Job.PLACE or job.spec.placement is Placement.IN_PLACE:
            if not model.parked:
                raise Violation("write only while parked", f"{model.process.name} {job}")
            if job.spec.placement is Placement.DELTA:
                model.undo.setdefault(name, model.weights[name])
            model.weights[name] = tag
            model.touched = True
            self.check()
        else:
            model.staging[name] = tag
        left = None if fails_at is None else fails_at - 1
        delay_s = 0.05 * self.world.rng.random()
        self.world.after(delay_s, model.process, self._go_on, model, job, writes, left)

    def _finish_job(self, model: RankModel, job: StartJob, error: WeightSyncError | None) -> None:
        is_in_place = job.spec.placement is Placement.IN_PLACE
        if error is None and job.job is Job.PREPARE:
            error = verify(job.spec, model.weights if is_in_place else model.staging)
        if error is None and job.job is Job.PLACE:
            error = verify(job.spec, model.weights)
        if error is None and job.job is Job.DISCARD:
            self._discarded(model, job)
        if error is None and job.job is Job.PLACE:
            self.placed.add((job.spec.session_id, model.rank))
        if error is None and job.job is Job.RESUME:
            model.label = job.version
            model.parked = model.touched = False
            model.undo = {}
            self.resumed.add((job.spec.session_id, model.rank))
        model.job, model.writing = None, False
        self.world.log(model.process.name, f"finished {job.job} {error or ''}")
        touched = model.touched and job.spec.placement is not Placement.DELTA
        done = JobDone(job.job, job.spec.session_id, error=error, touched=touched)
        self.step(model, done)

    def _discarded(self, model: RankModel, job: StartJob) -> None:
        if job.spec.placement is Placement.DELTA and model.touched:
            if not model.parked:
                raise Violation("write only while parked", f"{model.process.name} {job}")
            model.weights.update(model.undo)
            model.undo, model.touched = {}, False
            self.world.seen["delta taken back"] += 1
        if job.taint is None and model.touched:
            raise Violation(
                "touched means tainted", f"{model.process.name} resumes written weights"
            )
        model.staging = {}
        if job.taint is None:
            model.parked = False

    # --- the promises ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Whatever could be generated now must come from one whole version, rightly labelled."""
        self.can_generate = False
        leader = self.leader
        for model in self.ranks:
            if model.refusal is not None or model.parked or not model.process.alive:
                return
        if leader.refusal is not None or leader.seats[0].epoch is None:
            return
        self.can_generate = True
        if leader.version is None:
            self.world.seen["initial weights could serve"] += 1
        for model in self.ranks:
            if model.weights != self.expected:
                text = f"rank {model.rank} holds {model.weights}, not {self.expected}"
                raise Violation("never a mix", text)
            if model.writing:
                raise Violation("never a mix", f"rank {model.rank} is being written")
            if model.label != leader.version:
                text = f"rank {model.rank} says {model.label}, the leader {leader.version}"
                raise Violation("never a wrong label", text)

    def refusals(self) -> list[str]:
        """Every reason that somebody gives for not generating."""
        reasons = [self.leader.refusal, *(m.refusal for m in self.ranks)]
        return [r for r in reasons if r is not None]


def scope_names(spec: SessionSpec) -> tuple[str, ...]:
    return TENSORS if spec.scope.names is None else tuple(sorted(spec.scope.names))


def verify(spec: SessionSpec, held: dict[str, str]) -> WeightSyncError | None:
    """Coverage and digests: every tensor in scope is there, as the trainer had it."""
    for name in scope_names(spec):
        if name not in held:
            return MissingNameError(f"{name!r} did not arrive")
        if held[name] != spec.session_id:
            return IntegrityError(f"{name!r} is {held[name]!r}, not {spec.session_id!r}")
    return None


def _short(event: object) -> str:
    text = repr(event)
    return text if len(text) < 180 else text[:177] + "..."
