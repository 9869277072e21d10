"""One rank of an engine: carries out the leader's orders, one job at a time.

::

    JOINING ──welcome──▶ IDLE ──open──▶ OPEN ⇄ (move)
                                          │ verify
                                          ▼
                                       PREPARED ──place──▶ PLACED ──resume──▶ IDLE
    any ──discard──▶ (cancel, wait, discard job) ──▶ IDLE

A rank *refuses* to generate while it is JOINING, tainted, told so by its leader, or in the middle of
a session whose leader is silent. It never decides anything: a prepared rank that lost its leader
waits, refusing, for whatever leader comes. A leader of another life is answered with a hello; its
welcome ends what the former leader had opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weightsync.errors import ScopeError, SessionError, WeightSyncError
from weightsync.records import evolve
from weightsync.session import (
    CancelJob,
    Discard,
    Job,
    JobDone,
    Open,
    Order,
    Ping,
    Place,
    Pull,
    RankAction,
    RankEvent,
    RankHello,
    RankReport,
    Refuse,
    Resume,
    SessionSpec,
    Stage,
    StartJob,
    Tick,
    Verify,
    Welcome,
)


class RankPhase(StrEnum):
    """What a rank holds of the open session."""

    JOINING = "joining"
    IDLE = "idle"
    OPEN = "open"
    PREPARED = "prepared"
    PLACED = "placed"  # parked: new weights, old label, until told to resume


_STAGE = {
    Job.OPEN: Stage.OPEN,
    Job.MOVE: Stage.MOVE,
    Job.PREPARE: Stage.PREPARE,
    Job.PLACE: Stage.PLACE,
    Job.RESUME: Stage.RESUME,
    Job.DISCARD: Stage.ABORT,
}
_AFTER = {
    Job.OPEN: RankPhase.OPEN,
    Job.MOVE: RankPhase.OPEN,
    Job.PREPARE: RankPhase.PREPARED,
    Job.PLACE: RankPhase.PLACED,
    Job.RESUME: RankPhase.IDLE,
}
_ASKED = {Pull: Stage.MOVE, Verify: Stage.PREPARE, Place: Stage.PLACE, Resume: Stage.RESUME}

Step = tuple["RankState", list[RankAction]]


@dataclass(frozen=True)
class RankState:
    """All that a rank knows. ``touched``: live bytes of the open session were written."""

    rank: int
    epoch: str
    leader_lease_s: float
    phase: RankPhase = RankPhase.JOINING
    leader_epoch: str | None = None  # whose welcome was taken last
    nonce: int = 0  # how many welcomes were taken
    challenge: int = 0  # of the newest one
    seq: int = 0  # of the newest order of that leader
    leader_refusal: str | None = None  # what that order said of the engine as a whole
    spec: SessionSpec | None = None
    opened_by: str = ""  # leader epoch of ``spec``
    running: StartJob | None = None
    queued: Order | None = None  # the newest order that must wait for the running job
    touched: bool = False
    tainted: str | None = None
    lost_leader: bool = False
    heard_s: float = 0.0
    last: RankReport | None = None  # repeated when the leader repeats its order

    @property
    def refusal(self) -> str | None:
        """Why this rank must not generate, or None."""
        if self.phase is RankPhase.JOINING:
            return "joining the engine"
        if self.tainted is not None:
            return self.tainted
        if self.leader_refusal is not None:
            return self.leader_refusal
        if self.lost_leader and self.spec is not None:
            return "the leader of this engine is silent in the middle of an update"
        return None


def start_rank(rank: int, epoch: str, leader_lease_s: float, now_s: float) -> Step:
    """A rank that has just started: it says hello and refuses until it is welcomed."""
    state = RankState(rank, epoch, leader_lease_s, heard_s=now_s)
    return state, [Refuse(state.refusal), _hello(state)]


def step_rank(state: RankState, event: RankEvent, now_s: float) -> Step:
    """One step of a rank. Total: no event in any state raises."""
    if isinstance(event, JobDone):
        after, actions = _job_done(state, event)
    elif isinstance(event, Tick):
        after, actions = _tick(state, now_s)
    else:
        after, actions = _hear(state, event, now_s)
    if after.refusal != state.refusal:
        actions = [Refuse(after.refusal), *actions]
    return after, actions


# --- whose orders count -----------------------------------------------------------------------------


def _hello(state: RankState) -> RankHello:
    return RankHello(state.rank, state.epoch, state.leader_epoch, state.nonce, state.challenge)


def _hear(state: RankState, order: Order, now_s: float) -> Step:
    if order.rank_epoch not in ("", state.epoch):  # meant for a former life of this rank
        return state, [_hello(state)]
    if isinstance(order, Welcome):
        return _welcome(state, order, now_s)
    if order.leader_epoch != state.leader_epoch:
        return state, [_hello(state)]
    if order.seq <= state.seq:  # a copy, or overtaken by a newer order
        return state, []
    state = evolve(
        state, seq=order.seq, leader_refusal=order.refusal, heard_s=now_s, lost_leader=False
    )
    if isinstance(order, Discard) and order.taint is not None:
        state = evolve(state, tainted=order.taint)  # at once, whatever is running
    return _obey(state, order)


def _welcome(state: RankState, order: Welcome, now_s: float) -> Step:
    if order.leader_epoch == state.leader_epoch:  # our confirmation was lost, or came too late
        state = evolve(state, challenge=max(state.challenge, order.challenge))
        return state, [_hello(state)]
    if order.nonce != state.nonce:  # answers an older hello; its leader may be gone
        return state, []
    tainted = state.tainted
    if not order.serve and tainted is None:
        tainted = f"rank {state.rank} does not hold the engine's version; a full update is needed"
    state = evolve(
        state,
        phase=RankPhase.IDLE if state.phase is RankPhase.JOINING else state.phase,
        leader_epoch=order.leader_epoch,
        nonce=state.nonce + 1,
        challenge=order.challenge,
        seq=order.seq,
        leader_refusal=order.refusal,
        heard_s=now_s,
        lost_leader=False,
        tainted=tainted,
        queued=None,
    )
    state, actions = _give_up(state)
    return state, [_hello(state), *actions]


def _tick(state: RankState, now_s: float) -> Step:
    if state.phase is RankPhase.JOINING:
        return state, [_hello(state)]
    is_silent = now_s >= state.heard_s + state.leader_lease_s
    if not is_silent or state.lost_leader or state.spec is None:
        return state, []
    state = evolve(state, lost_leader=True)
    if state.phase in (RankPhase.PREPARED, RankPhase.PLACED):
        return state, []  # it may have decided either way: wait for it, refusing
    return _give_up(state)  # not prepared, so no leader can have decided to commit


# --- orders -----------------------------------------------------------------------------------------


def _obey(state: RankState, order: Order) -> Step:
    if state.running is not None:
        return _while_running(state, state.running, order)
    match order:
        case Ping():
            return _reconcile(state, order)
        case Open():
            return _open(state, order)
        case Discard():
            return _discard(state, order)
        case Pull() | Verify() | Place() | Resume():
            return _proceed(state, order)
        case _:
            return state, []


def _while_running(state: RankState, running: StartJob, order: Order) -> Step:
    if isinstance(order, Ping):
        is_current = order.session_id == running.spec.session_id
        return (state, []) if is_current else _give_up(state)
    if state.opened_by == state.leader_epoch and _same_work(running, order):
        return state, []  # a repeated order; the report will come
    state = evolve(state, queued=order)
    # Only what gives the session up may interrupt work on bytes.
    stops = isinstance(order, Discard | Open) and running.job is not Job.DISCARD
    return state, [CancelJob()] if stops else []


def _same_work(running: StartJob, order: Order) -> bool:
    session_id = running.spec.session_id
    match order:
        case Open():
            return running.job is Job.OPEN and order.spec.session_id == session_id
        case Pull():
            same = running.job is Job.MOVE and running.move_id == order.move_id
            return same and order.session_id == session_id
        case Verify():
            return running.job is Job.PREPARE and order.session_id == session_id
        case Place():
            return running.job is Job.PLACE and order.session_id == session_id
        case Resume():
            return running.job is Job.RESUME and order.session_id == session_id
        case Discard():
            return running.job is Job.DISCARD and order.session_id == session_id
        case _:
            return True


def _holds(state: RankState, session_id: str) -> bool:
    """Is this the session that is open here, of the present leader?"""
    spec = state.spec
    if spec is None or spec.session_id != session_id:
        return False
    return state.opened_by == state.leader_epoch


def _reconcile(state: RankState, order: Ping) -> Step:
    """Catch up with an order that was lost: the ping names the only session that may be open."""
    session_id = order.session_id
    if session_id is not None and _holds(state, session_id):
        return state, []
    if state.spec is not None:
        return _give_up(state)
    if session_id is None:
        return state, []
    return state, [_not_held(state, session_id, Stage.ABORT)]


def _open(state: RankState, order: Open) -> Step:
    spec = order.spec
    if _holds(state, spec.session_id):
        return state, _repeat(state, Stage.OPEN)
    if state.spec is not None:  # the leader has moved on; what it said of the older one was lost
        return _give_up(evolve(state, queued=order))
    if _has_ended(state, spec.session_id):
        return state, [_not_held(state, spec.session_id, Stage.OPEN)]
    state = evolve(state, spec=spec, opened_by=order.leader_epoch, touched=False, last=None)
    if state.tainted is not None and not spec.scope.is_full:
        error = ScopeError(f"rank {state.rank} needs a full update: {state.tainted}")
        report = evolve(_report(state, spec.session_id, Stage.OPEN), error=error)
        return evolve(state, spec=None, last=report), [report]
    return _start(state, StartJob(Job.OPEN, spec))


def _discard(state: RankState, order: Discard) -> Step:
    if _holds(state, order.session_id):
        return _give_up(state)
    if state.spec is not None:
        return _give_up(evolve(state, queued=order))
    last = state.last
    if last is not None and last.session_id == order.session_id and last.stage is Stage.ABORT:
        return state, [last]
    return state, [_report(state, order.session_id, Stage.ABORT)]


def _give_up(state: RankState) -> Step:
    """Stop whatever runs for the session that is held, then discard it."""
    spec = state.spec
    if spec is None:
        return state, []
    if state.running is not None:
        if state.running.job is Job.DISCARD:
            return state, []
        return evolve(state, queued=Discard(spec.session_id, None)), [CancelJob()]
    if state.touched and state.tainted is None:
        mixed = "an update was given up after live weights had been written"
        state = evolve(state, tainted=mixed)
    return _start(state, StartJob(Job.DISCARD, spec, taint=state.tainted))


def _proceed(state: RankState, order: Pull | Verify | Place | Resume) -> Step:
    spec, last = state.spec, state.last
    if spec is None or not _holds(state, order.session_id):
        return state, [_not_held(state, order.session_id, _ASKED[type(order)])]
    if last is not None and last.error is not None:
        return state, [last]  # a failure stays one: a second try could contradict a late report
    match order:
        case Pull() if state.phase is RankPhase.OPEN:
            if last is not None and last.stage is Stage.MOVE and last.move_id == order.move_id:
                return state, [last]
            job = StartJob(Job.MOVE, spec, move_id=order.move_id, payload=order.payload)
        case Verify() if state.phase is RankPhase.OPEN:
            job = StartJob(Job.PREPARE, spec, payload=order.payload)
        case Place() if state.phase is RankPhase.PREPARED:
            job = StartJob(Job.PLACE, spec)
        case Resume() if state.phase is RankPhase.PLACED:
            # The taint ends here, not when the job does: one that comes meanwhile must stay.
            state = evolve(state, tainted=None if spec.scope.is_full else state.tainted)
            job = StartJob(Job.RESUME, spec, version=order.version)
        case _:
            return state, _repeat(state, _ASKED[type(order)])
    return _start(state, job)


# --- reports ----------------------------------------------------------------------------------------


def _report(state: RankState, session_id: str, stage: Stage) -> RankReport:
    return RankReport(
        state.rank,
        state.epoch,
        session_id,
        stage,
        leader_epoch=state.leader_epoch or "",
        tainted=state.tainted,
    )


def _repeat(state: RankState, stage: Stage) -> list[RankAction]:
    return [state.last] if state.last is not None and state.last.stage is stage else []


def _has_ended(state: RankState, session_id: str) -> bool:
    """Was this session the last one here? (It is over: only called while none is held.)"""
    last = state.last
    if last is None or last.session_id != session_id:
        return False
    return last.leader_epoch == state.leader_epoch


def _not_held(state: RankState, session_id: str, stage: Stage) -> RankReport:
    """The session is not open here: it was resumed (said again), or given up (an error)."""
    last = state.last if _has_ended(state, session_id) else None
    if last is not None and last.stage is Stage.RESUME and last.error is None:
        return last
    error = SessionError(f"rank {state.rank} does not hold session {session_id!r} (any more)")
    touched = last is not None and last.touched
    return evolve(_report(state, session_id, stage), error=error, touched=touched)


# --- jobs -------------------------------------------------------------------------------------------


def _start(state: RankState, job: StartJob) -> Step:
    return evolve(state, running=job), [job]


def _job_done(state: RankState, event: JobDone) -> Step:
    running = state.running
    if running is None or running.job is not event.job:
        return state, []
    if running.spec.session_id != event.session_id:
        return state, []
    state = evolve(state, running=None, touched=state.touched or event.touched)
    if running.job is Job.DISCARD:
        state, actions = _discarded(state, running, event.error)
    else:
        state, actions = _finish(state, running, event.error)
    queued = state.queued
    if queued is None:
        return state, actions
    state, more = _obey(evolve(state, queued=None), queued)
    return state, [*actions, *more]


def _discarded(state: RankState, job: StartJob, error: WeightSyncError | None) -> Step:
    tainted = state.tainted
    if tainted is None and error is not None:
        tainted = f"rank {state.rank} could not give an update up: {error}"
    if tainted is None and state.touched:
        tainted = "live weights were written while an update was given up"
    state = evolve(state, tainted=tainted)
    report = evolve(
        _report(state, job.spec.session_id, Stage.ABORT),
        error=error,
        touched=state.touched,
        leader_epoch=state.opened_by,
    )
    state = evolve(state, phase=RankPhase.IDLE, spec=None, touched=False, last=report)
    return state, [report]


def _finish(state: RankState, job: StartJob, error: WeightSyncError | None) -> Step:
    if error is None and isinstance(state.queued, Discard | Open):
        # Given up while the last bytes arrived. A leader that heard of success could still decide
        # to commit what this rank is about to drop.
        error = SessionError(f"rank {state.rank} gave the session up")
    report = RankReport(
        state.rank,
        state.epoch,
        job.spec.session_id,
        _STAGE[job.job],
        job.move_id,
        error,
        state.touched,
        state.opened_by,
        state.tainted,
    )
    if error is not None:
        return evolve(state, last=report), [report]  # the leader answers with a Discard
    phase = _AFTER[job.job]
    if job.job is Job.RESUME:
        return evolve(state, last=report, phase=phase, spec=None, touched=False), [report]
    return evolve(state, last=report, phase=phase), [report]
