"""The leader of an engine: opens, drives, decides and publishes one session at a time.

::

    IDLE ──begin──▶ OPENING ──▶ OPEN ⇄ MOVING
                                  │ prepare
                                  ▼
                               PREPARING ──▶ PREPARED ──commit = the decision──▶ PLACING
                                                                                    │ publish
                                                                     IDLE ◀── RESUMING
    any state before the decision ──failure, abort, lease, deadline──▶ ABORTING ──▶ IDLE

Before the decision every way out is ABORTING; it ends *tainted* if live bytes were written, or may
have been by a rank that does not answer. After it the only ways out are "every rank placed" (the
version is published, and the ranks resume) and *tainted*; a delta alone may also be taken back by every
rank, as long as not all have placed it. A version is published in one place,
:func:`_publish`. The leader also seats its ranks: the engine must not generate before each of them
took this leader's welcome, and a rank of another life makes the engine tainted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weightsync.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    EpochError,
    PeerLostError,
    ScopeError,
    SessionError,
    TaintedError,
    VersionError,
    WeightSyncError,
)
from weightsync.records import evolve
from weightsync.session import (
    NUM_REMEMBERED_OUTCOMES,
    Abort,
    Answer,
    Begin,
    Close,
    Commit,
    Connect,
    Discard,
    EndedSession,
    Heartbeat,
    LeaderAction,
    LeaderEvent,
    Move,
    Open,
    Order,
    Payload,
    Ping,
    Place,
    Prepare,
    Pull,
    RankHello,
    RankReport,
    Resume,
    RunLost,
    SessionSpec,
    Stage,
    Tell,
    Tick,
    Verify,
    Version,
    Welcome,
)
from weightsync.types import Outcome, Placement


class Phase(StrEnum):
    """Where the leader's one session stands."""

    IDLE = "idle"
    OPENING = "opening"
    OPEN = "open"
    MOVING = "moving"
    PREPARING = "preparing"
    PREPARED = "prepared"
    PLACING = "placing"
    RESUMING = "resuming"
    ABORTING = "aborting"


#: The stage whose reports each phase waits for.
_AWAITED = {
    Phase.OPENING: Stage.OPEN,
    Phase.MOVING: Stage.MOVE,
    Phase.PREPARING: Stage.PREPARE,
    Phase.PLACING: Stage.PLACE,
    Phase.RESUMING: Stage.RESUME,
    Phase.ABORTING: Stage.ABORT,
}
#: The decision was made: no lease, deadline or wish of the trainer counts any more.
_DECIDED = (Phase.PLACING, Phase.RESUMING)

#: Of how many runs the newest published version is remembered.
_NUM_REMEMBERED_RUNS = 64


@dataclass(frozen=True)
class LeaderTiming:
    """Periods in seconds; orders that were not reported are repeated every ``resend_s``."""

    resend_s: float = 1.0


@dataclass(frozen=True)
class RunHolder:
    run_id: str
    lease_s: float
    lease_until_s: float


@dataclass(frozen=True)
class Candidate:
    """A life of a rank that said hello; it is seated when it repeats the challenge."""

    epoch: str
    nonce: int
    challenge: int


@dataclass(frozen=True)
class Seat:
    """What the leader knows of one rank."""

    epoch: str | None = None  # the life that took this leader's welcome
    nonce: int = -1  # of its newest hello
    candidate: Candidate | None = None


@dataclass(frozen=True)
class LeaderState:
    """All that a leader knows. ``epoch`` names this life of the engine."""

    epoch: str
    world_size: int
    timing: LeaderTiming = LeaderTiming()
    phase: Phase = Phase.IDLE
    run: RunHolder | None = None
    spec: SessionSpec | None = None
    version: Version | None = None
    published: tuple[Version, ...] = ()  # the newest of each run
    taint: str | None = None
    outcomes: tuple[EndedSession, ...] = ()
    spoiled: tuple[str, ...] = ()  # aborted before their begin arrived: they must not open
    seats: tuple[Seat, ...] = ()
    num_challenges: int = 0
    seq: int = 0  # orders given so far
    # of the open session
    waiting: frozenset[int] = frozenset()  # ranks whose report is outstanding
    order: Order | None = None  # what they were told, to repeat
    sent_s: float = 0.0
    callers: tuple[int, ...] = ()  # requests that wait for the present phase
    phase_until_s: float = 0.0  # limit of the present phase (session or commit deadline)
    moves_done: frozenset[int] = frozenset()
    move_id: int | None = None  # the newest move that was ordered
    touched: bool = False
    was_placing: bool = False  # ranks were told to place; a delta may still be taken back
    abort_error: WeightSyncError | None = None
    aborters: tuple[int, ...] = ()

    @property
    def refusal(self) -> str | None:
        """Why the engine as a whole must not generate, or None."""
        if self.taint is not None:
            return self.taint
        absent = [str(rank) for rank, seat in enumerate(self.seats) if seat.epoch is None]
        return f"waiting for rank {', '.join(absent)} to join the engine" if absent else None


Step = tuple[LeaderState, list[LeaderAction]]


def start_leader(epoch: str, world_size: int, timing: LeaderTiming | None = None) -> LeaderState:
    """The state of an engine that has just started, with fresh weights and no version."""
    return LeaderState(
        epoch=epoch,
        world_size=world_size,
        timing=LeaderTiming() if timing is None else timing,
        seats=(Seat(),) * world_size,
    )


def outcome_of(state: LeaderState, session_id: str) -> EndedSession | None:
    """How a session ended; None: it is open, was never begun here, or is no longer remembered."""
    return next((e for e in reversed(state.outcomes) if e.session_id == session_id), None)


def step_leader(state: LeaderState, event: LeaderEvent, now_s: float) -> Step:
    """One step of the leader. Total: no event in any state raises."""
    # Limits first: a request that comes after its lease or deadline must find the session ended,
    # however late the tick is.
    after, actions = _expire(state, now_s)
    after, more = _react(after, event, now_s)
    return _stamp(state, after, [*actions, *more])


def _react(state: LeaderState, event: LeaderEvent, now_s: float) -> Step:
    match event:
        case Connect():
            return _connect(state, event, now_s)
        case Begin():
            return _begin(_renew(state, event.spec.run_id, now_s), event, now_s)
        case Move():
            return _move(_renew_session(state, event.session_id, now_s), event, now_s)
        case Prepare():
            return _prepare(_renew_session(state, event.session_id, now_s), event, now_s)
        case Commit():
            return _commit(_renew_session(state, event.session_id, now_s), event, now_s)
        case Abort():
            return _abort_asked(state, event, now_s)
        case Heartbeat():
            return _renew(state, event.run_id, now_s), []
        case Close():
            return _close(state, event, now_s)
        case RunLost():
            return _run_lost(state, event.run_id, PeerLostError(event.reason), now_s)
        case RankHello():
            return _rank_hello(state, event, now_s)
        case RankReport():
            return _rank_report(state, event, now_s)
        case Tick():
            return _tick(state, now_s)


def _stamp(before: LeaderState, state: LeaderState, actions: list[LeaderAction]) -> Step:
    """Stamp every order; when generating became (im)possible, every rank hears of it at once."""
    if not actions and before.seats is state.seats and before.taint is state.taint:
        return state, actions
    refusal = state.refusal
    if before.refusal != refusal:
        told = {a.rank for a in actions if isinstance(a, Tell)}
        actions += _tell_rest(state, told)
    seq = state.seq
    stamped: list[LeaderAction] = []
    for action in actions:
        if isinstance(action, Tell):
            seq += 1
            order = evolve(
                action.order,
                leader_epoch=state.epoch,
                rank_epoch=action.order.rank_epoch or state.seats[action.rank].epoch or "",
                seq=seq,
                refusal=refusal,
            )
            action = Tell(action.rank, order)
        stamped.append(action)
    return (state if seq == state.seq else evolve(state, seq=seq)), stamped


def _tell_rest(state: LeaderState, told: set[int]) -> list[LeaderAction]:
    """To each rank that was not told anything: what it has not reported yet, or a ping."""
    actions: list[LeaderAction] = []
    ping = Ping(None if state.spec is None else state.spec.session_id)
    for rank in range(state.world_size):
        if rank in told:
            continue
        if state.seats[rank].candidate is not None:
            actions.append(Tell(rank, _welcome(state, state.seats[rank])))
        if state.order is not None and rank in state.waiting:
            actions.append(Tell(rank, state.order))
        else:
            actions.append(Tell(rank, ping))
    return actions


# --- trainer requests -----------------------------------------------------------------------------


def _connect(state: LeaderState, event: Connect, now_s: float) -> Step:
    holder = state.run
    if holder is not None and holder.run_id != event.run_id:
        return state, [Answer(event.request, error=_held(holder, now_s))]
    if not event.lease_s > 0:
        return state, [Answer(event.request, error=ConfigError(f"lease_s={event.lease_s} <= 0"))]
    run = RunHolder(event.run_id, event.lease_s, now_s + event.lease_s)
    return evolve(state, run=run), [Answer(event.request, {"epoch": state.epoch})]


def _held(holder: RunHolder, now_s: float) -> BusyError:
    left_s = max(0.0, holder.lease_until_s - now_s)
    return BusyError(
        f"the engine serves run {holder.run_id!r} (its lease ends in {left_s:.1f} s unless "
        "renewed); close that sender, or wait for its lease"
    )


def _begin(state: LeaderState, event: Begin, now_s: float) -> Step:
    spec = event.spec
    if state.spec is not None and state.spec == spec and state.phase is not Phase.ABORTING:
        if state.phase is Phase.OPENING:  # a repeated request waits with the first
            return evolve(state, callers=(*state.callers, event.request)), []
        return state, [Answer(event.request, {"phase": state.phase.value})]
    if state.spec == spec and event.epoch == state.epoch:  # asked again: why it is being aborted
        refused = _not_usable(state, spec.session_id, event.request)
        return state, [] if refused is None else [refused]
    ended = _committed(state, spec.session_id)
    if ended is not None and ended.spec == spec and event.epoch == state.epoch:
        return state, [Answer(event.request, {"phase": Phase.OPEN.value})]
    error = _refusal(state, event, now_s)
    if error is not None:
        return state, [Answer(event.request, error=error)]
    state = evolve(
        state,
        spec=spec,
        phase_until_s=now_s + spec.deadline_s,
        moves_done=frozenset(),
        move_id=None,
        touched=False,
        was_placing=False,
        abort_error=None,
        aborters=(),
        callers=(event.request,),
    )
    return _order_all(state, Phase.OPENING, Open(spec), now_s)


def _refusal(state: LeaderState, event: Begin, now_s: float) -> WeightSyncError | None:
    """Why this begin cannot be, in the order in which a caller can mend it."""
    spec = event.spec
    if event.epoch != state.epoch:
        return EpochError(
            f"the engine was restarted (epoch {state.epoch!r}, the handshake had {event.epoch!r}); "
            "connect again and send everything"
        )
    if state.run is None:
        return EpochError(f"run {spec.run_id!r} is not connected; connect again")
    if state.run.run_id != spec.run_id:
        return _held(state.run, now_s)
    if state.spec is not None:
        return BusyError(
            f"session {state.spec.session_id!r} of version {state.spec.version} is open "
            f"({state.phase}); commit or abort it first"
        )
    if spec.session_id in state.spoiled:
        return SessionError(f"session {spec.session_id!r} was aborted before it began")
    ended = outcome_of(state, spec.session_id)
    if ended is not None:
        return SessionError(
            f"session id {spec.session_id!r} was used before ({ended.outcome}); take a new one"
        )
    if not (spec.deadline_s > 0 and spec.commit_timeout_s > 0):
        return ConfigError(f"deadline_s and commit_timeout_s must be > 0, got {spec}")
    return _scope_refusal(state, spec) or _version_refusal(state, spec)


def _scope_refusal(state: LeaderState, spec: SessionSpec) -> ScopeError | None:
    if spec.scope.is_full:
        return None
    if state.taint is not None:
        return ScopeError(f"the engine is tainted ({state.taint}); it needs a full update")
    if state.version is None:
        return ScopeError("the engine has no version yet; it needs a full update")
    if state.version.run_id != spec.run_id:
        return ScopeError(
            f"the engine's version {state.version.number} is of run {state.version.run_id!r}; "
            "the first update of a new run must be full"
        )
    return None


def _version_refusal(state: LeaderState, spec: SessionSpec) -> VersionError | None:
    newest = next((v.number for v in state.published if v.run_id == spec.run_id), None)
    if newest is None or spec.version > newest:
        return None
    return VersionError(
        f"version {spec.version} does not rise above {newest}, which run {spec.run_id!r} has "
        "already published"
    )


def _committed(state: LeaderState, session_id: str) -> EndedSession | None:
    """That session, if it did commit: what was asked for together with its commit may be asked again, by a
    caller that heard nothing, and is answered as it was."""
    ended = outcome_of(state, session_id)
    return ended if ended is not None and ended.outcome is Outcome.COMMITTED else None


def _move(state: LeaderState, event: Move, now_s: float) -> Step:
    ended = _committed(state, event.session_id)
    if ended is not None and event.move_id in ended.moves_done:
        return state, [Answer(event.request, {"move_id": event.move_id})]
    if (wrong := _not_usable(state, event.session_id, event.request)) is not None:
        return state, [wrong]
    if event.move_id in state.moves_done:
        return state, [Answer(event.request, {"move_id": event.move_id})]
    if state.phase is Phase.MOVING and state.move_id == event.move_id:
        return evolve(state, callers=(*state.callers, event.request)), []
    if state.phase is not Phase.OPEN:
        return state, [Answer(event.request, error=_out_of_turn("move", state))]
    state = evolve(state, move_id=event.move_id, callers=(event.request,))
    pull = Pull(event.session_id, event.move_id, event.payload)
    return _order_all(state, Phase.MOVING, pull, now_s)


def _prepare(state: LeaderState, event: Prepare, now_s: float) -> Step:
    if _committed(state, event.session_id) is not None:
        return state, [Answer(event.request, {"phase": Phase.PREPARED.value})]
    if (wrong := _not_usable(state, event.session_id, event.request)) is not None:
        return state, [wrong]
    if state.phase is Phase.PREPARED or state.phase in _DECIDED:
        return state, [Answer(event.request, {"phase": Phase.PREPARED.value})]
    if state.phase is Phase.PREPARING:
        return evolve(state, callers=(*state.callers, event.request)), []
    if state.phase is not Phase.OPEN:
        return state, [Answer(event.request, error=_out_of_turn("prepare", state))]
    state = evolve(state, callers=(event.request,))
    return _order_all(state, Phase.PREPARING, Verify(event.session_id, event.payload), now_s)


def _commit(state: LeaderState, event: Commit, now_s: float) -> Step:
    ended = _committed(state, event.session_id)
    if ended is not None:
        return state, [Answer(event.request, {"outcome": ended.outcome.value})]
    if (wrong := _not_usable(state, event.session_id, event.request)) is not None:
        return state, [wrong]
    if state.phase in _DECIDED:
        return evolve(state, callers=(*state.callers, event.request)), []
    if state.phase is not Phase.PREPARED or state.spec is None:
        return state, [Answer(event.request, error=_out_of_turn("commit", state))]
    # The decision. From here on leases and the session's deadline mean nothing.
    state = evolve(
        state,
        callers=(event.request,),
        phase_until_s=now_s + state.spec.commit_timeout_s,
        was_placing=True,
    )
    return _order_all(state, Phase.PLACING, Place(event.session_id), now_s)


def _abort_asked(state: LeaderState, event: Abort, now_s: float) -> Step:
    ended = outcome_of(state, event.session_id)
    if ended is not None:
        result = {"outcome": ended.outcome.value, "detail": ended.detail}
        return state, [Answer(event.request, result)]
    if state.spec is None or state.spec.session_id != event.session_id:
        # Its begin may still be on the way; opened after this it would hold the engine for nobody.
        spoiled = (*state.spoiled, event.session_id)[-NUM_REMEMBERED_OUTCOMES:]
        return evolve(state, spoiled=spoiled), [_not_open(event.session_id, event.request)]
    if state.phase in _DECIDED:
        error = SessionError(f"session {event.session_id!r} is decided; ask for its status")
        return state, [Answer(event.request, error=error)]
    state = evolve(state, aborters=(*state.aborters, event.request))
    return _abort(state, SessionError(f"aborted by the trainer: {event.reason}"), now_s)


def _close(state: LeaderState, event: Close, now_s: float) -> Step:
    done = Answer(event.request, {"closed": event.run_id})
    if state.run is None or state.run.run_id != event.run_id:
        return state, [done]
    state, actions = _run_lost(state, event.run_id, SessionError("the sender was closed"), now_s)
    return state, [*actions, done]


def _run_lost(state: LeaderState, run_id: str, error: WeightSyncError, now_s: float) -> Step:
    if state.run is None or state.run.run_id != run_id:
        return state, []
    return _abort(evolve(state, run=None), error, now_s)


# --- rank events ----------------------------------------------------------------------------------


def _rank_hello(state: LeaderState, event: RankHello, now_s: float) -> Step:
    """Seat a life of a rank only when it repeats the newest challenge: then it lives now.

    Lives have no order, so a late hello of one that ended looks like a restart; and whatever a late
    hello says of weights may be past. Neither can answer a challenge.
    """
    if not 0 <= event.rank < state.world_size:
        return state, []
    seat, candidate = state.seats[event.rank], state.seats[event.rank].candidate
    is_ours = event.leader_epoch == state.epoch
    if event.rank_epoch == seat.epoch:
        if is_ours and candidate is not None:  # it lives; a candidate that does too says so again
            return _seat(state, event.rank, evolve(seat, candidate=None)), []
        if is_ours or event.nonce <= seat.nonce:
            return state, []
    if candidate is not None and candidate.epoch == event.rank_epoch:
        if is_ours and candidate.challenge == event.challenge:
            return _join(state, event, now_s)
        if event.nonce < candidate.nonce:
            return state, []  # overtaken by a newer hello
    if event.leader_epoch is not None and not is_ours and seat.epoch is None:
        was = f"rank {event.rank} holds weights of a former life of this engine"
        state = evolve(state, taint=state.taint or f"{was}; a full update is needed")
    if candidate is None or (candidate.epoch, candidate.nonce) != (event.rank_epoch, event.nonce):
        state = evolve(state, num_challenges=state.num_challenges + 1)
        candidate = Candidate(event.rank_epoch, event.nonce, state.num_challenges)
        seat = evolve(seat, candidate=candidate)
        state = _seat(state, event.rank, seat)
    return state, [Tell(event.rank, _welcome(state, seat))]


def _welcome(state: LeaderState, seat: Seat) -> Welcome:
    """For the candidate of that seat, who is there."""
    candidate = seat.candidate or Candidate("", -1, 0)
    # Fresh weights serve as long as every rank has them; a version cannot be had by joining, and
    # whoever takes the seat of another life taints the engine by that.
    serve = state.taint is None and state.version is None and seat.epoch is None
    return Welcome(
        state.epoch,
        serve,
        nonce=candidate.nonce,
        challenge=candidate.challenge,
        rank_epoch=candidate.epoch,
    )


def _join(state: LeaderState, event: RankHello, now_s: float) -> Step:
    """The rank took the welcome: it counts, and may have missed what the others were told."""
    former = state.seats[event.rank].epoch
    state = _seat(state, event.rank, Seat(event.rank_epoch, event.nonce))
    if former is not None:
        # Its weights are fresh and its part of any session is gone: no label fits the engine.
        error = PeerLostError(f"rank {event.rank} was restarted; a full update is needed")
        return _taint_now(state, error, now_s)
    if state.order is not None and event.rank in state.waiting:
        return state, [Tell(event.rank, state.order)]
    return state, []


def _seat(state: LeaderState, rank: int, seat: Seat) -> LeaderState:
    return evolve(state, seats=(*state.seats[:rank], seat, *state.seats[rank + 1 :]))


def _taint_now(state: LeaderState, error: WeightSyncError, now_s: float) -> Step:
    state = evolve(state, taint=state.taint or str(error), touched=True)
    if state.phase in _DECIDED:
        return _end(state, Outcome.TAINTED, error)
    return _abort(state, error, now_s)


def _rank_report(state: LeaderState, event: RankReport, now_s: float) -> Step:
    if not 0 <= event.rank < state.world_size:
        return state, []
    if event.leader_epoch != state.epoch or event.rank_epoch != state.seats[event.rank].epoch:
        return state, []  # of a former life of the leader or of that rank
    if state.spec is None or event.session_id != state.spec.session_id:
        return state, []
    return _session_report(state, event, now_s)


def _session_report(state: LeaderState, event: RankReport, now_s: float) -> Step:
    is_dirty = event.touched or event.tainted is not None
    error = _named(event.error, event.rank, state.world_size)
    if state.phase is Phase.ABORTING:
        # A rank that could not give the session up refuses by itself; the others must as well.
        is_dirty = is_dirty or (error is not None and event.stage is Stage.ABORT)
    elif error is None and event.stage is Stage.ABORT:
        error = SessionError(f"rank {event.rank} gave the session up")
    if is_dirty and not state.touched:
        state = evolve(state, touched=True)
    if error is not None and state.phase is not Phase.ABORTING:
        if state.phase in _DECIDED:
            return _fail_decided(state, error, now_s)
        return _abort(state, error, now_s)
    is_awaited = _AWAITED.get(state.phase) is event.stage
    if event.stage is Stage.MOVE:
        is_awaited = is_awaited and event.move_id == state.move_id
    if not is_awaited or event.rank not in state.waiting:
        return state, []
    state = evolve(state, waiting=state.waiting - {event.rank})
    return (state, []) if state.waiting else _phase_done(state, now_s)


def _phase_done(state: LeaderState, now_s: float) -> Step:
    match state.phase:
        case Phase.OPENING:
            return _settle(state, Phase.OPEN, {"phase": Phase.OPEN.value})
        case Phase.MOVING if state.move_id is not None:
            moves = state.moves_done | {state.move_id}
            return _settle(evolve(state, moves_done=moves), Phase.OPEN, {"move_id": state.move_id})
        case Phase.PREPARING:
            return _settle(state, Phase.PREPARED, {"phase": Phase.PREPARED.value})
        case Phase.PLACING:
            return _publish(state, now_s)
        case Phase.RESUMING:
            return _end(state, Outcome.COMMITTED, None)
        case _:  # ABORTING
            is_tainted = state.touched or state.taint is not None
            outcome = Outcome.TAINTED if is_tainted else Outcome.ABORTED
            return _end(state, outcome, state.abort_error)


# --- endings --------------------------------------------------------------------------------------


def _publish(state: LeaderState, now_s: float) -> Step:
    """Every rank holds the new weights, verified: they get their label, and the ranks resume."""
    spec = state.spec
    if spec is None:  # cannot be: a session is placing
        return state, []
    version = Version(spec.run_id, spec.version)
    others = [v for v in state.published if v.run_id != spec.run_id]
    state = evolve(
        state,
        version=version,
        published=(*others, version)[-_NUM_REMEMBERED_RUNS:],
        taint=None if spec.scope.is_full else state.taint,
        phase_until_s=now_s + spec.commit_timeout_s,
    )
    return _order_all(state, Phase.RESUMING, Resume(spec.session_id, version), now_s)


def _abort(state: LeaderState, error: WeightSyncError, now_s: float) -> Step:
    """Give the open session up, if there is one that is not decided."""
    spec = state.spec
    if spec is None or state.phase is Phase.ABORTING or state.phase in _DECIDED:
        return state, []
    state = evolve(state, abort_error=error, phase_until_s=now_s + spec.commit_timeout_s)
    return _order_all(state, Phase.ABORTING, Discard(spec.session_id, None), now_s)


def _fail_decided(state: LeaderState, error: WeightSyncError, now_s: float) -> Step:
    """A failure after the decision. No rank has resumed before all of a delta is in place, and each
    keeps what it overwrote: then all take it back. Otherwise the engine is tainted."""
    spec = state.spec
    can_undo = spec is not None and spec.placement is Placement.DELTA
    if spec is None or not can_undo or state.phase is not Phase.PLACING or state.touched:
        return _end(state, Outcome.TAINTED, error)
    state = evolve(state, abort_error=error, phase_until_s=now_s + spec.commit_timeout_s)
    return _order_all(state, Phase.ABORTING, Discard(spec.session_id, None), now_s)


def _end(state: LeaderState, outcome: Outcome, error: WeightSyncError | None) -> Step:
    spec = state.spec
    if spec is None:  # cannot be: only phases with a session end one
        return state, []
    detail = "" if error is None else str(error)
    ended = EndedSession(spec.session_id, outcome, detail, spec, state.moves_done)
    actions: list[LeaderAction] = []
    if outcome is Outcome.TAINTED:
        taint = state.taint or detail or "an update failed after the first live byte"
        state = evolve(state, taint=taint)
        told = Discard(spec.session_id, taint)
        actions += [Tell(rank, told) for rank in range(state.world_size)]
    if outcome is Outcome.COMMITTED:
        actions += [Answer(c, {"outcome": outcome.value}) for c in state.callers]
    else:
        failure = _ended_error(ended, error)
        actions += [Answer(c, error=failure) for c in state.callers]
    result = {"outcome": outcome.value, "detail": detail}
    actions += [Answer(c, result) for c in state.aborters]
    state = evolve(
        state,
        phase=Phase.IDLE,
        spec=None,
        waiting=frozenset(),
        order=None,
        callers=(),
        aborters=(),
        abort_error=None,
        outcomes=(*state.outcomes, ended)[-NUM_REMEMBERED_OUTCOMES:],
    )
    return state, actions


def _ended_error(ended: EndedSession, error: WeightSyncError | None) -> WeightSyncError:
    now = "still serves" if ended.outcome is Outcome.ABORTED else "refuses to generate"
    text = f"session {ended.session_id!r} {ended.outcome}: {ended.detail}; the engine {now}"
    return _alike(error, text)


def _alike(error: WeightSyncError | None, text: str) -> WeightSyncError:
    """The same kind of error with another text; an adapter's own kind may not allow that."""
    try:
        return SessionError(text) if error is None else type(error)(text)
    except TypeError:
        return SessionError(text)


def _named(error: WeightSyncError | None, rank: int, world_size: int) -> WeightSyncError | None:
    """Of several ranks' errors it must show whose it is."""
    if error is None or world_size == 1 or str(error).startswith(f"rank {rank}"):
        return error
    return _alike(error, f"rank {rank}: {error}")


# --- small parts ----------------------------------------------------------------------------------


def _order_all(state: LeaderState, phase: Phase, order: Order, now_s: float) -> Step:
    ranks = range(state.world_size)
    state = evolve(state, phase=phase, order=order, waiting=frozenset(ranks), sent_s=now_s)
    return state, [Tell(rank, order) for rank in ranks]


def _settle(state: LeaderState, phase: Phase, result: Payload) -> Step:
    answers: list[LeaderAction] = [Answer(c, result) for c in state.callers]
    return evolve(state, phase=phase, callers=(), order=None), answers


def _tick(state: LeaderState, now_s: float) -> Step:
    if now_s < state.sent_s + state.timing.resend_s:
        return state, []
    return evolve(state, sent_s=now_s), _tell_rest(state, set())


def _expire(state: LeaderState, now_s: float) -> Step:
    """What the passing of time alone ends: the run's lease, or the limit of the phase."""
    actions: list[LeaderAction] = []
    run = state.run
    if run is not None and now_s >= run.lease_until_s and state.phase not in _DECIDED:
        late = DeadlineError(
            f"trainer run {run.run_id!r}: no sign of life for {run.lease_s:.1f} s (its lease)"
        )
        state, actions = _run_lost(state, run.run_id, late, now_s)
    if state.spec is not None and now_s >= state.phase_until_s:
        state, more = _overrun(state, state.spec, now_s)
        actions = [*actions, *more]
    return state, actions


def _overrun(state: LeaderState, spec: SessionSpec, now_s: float) -> Step:
    ranks = ", ".join(map(str, sorted(state.waiting))) or "none"
    if state.phase is Phase.ABORTING or state.phase in _DECIDED:
        limit_s, name = spec.commit_timeout_s, "commit_timeout_s"
    else:
        limit_s, name = spec.deadline_s, "deadline_s"
    late = DeadlineError(
        f"session {spec.session_id!r}: stage {state.phase.value!r} passed its limit of "
        f"{limit_s:.1f} s ({name}); ranks that did not report: {ranks}"
    )
    if state.phase in _DECIDED:
        return _fail_decided(state, late, now_s)
    if state.phase is not Phase.ABORTING:
        return _abort(state, late, now_s)
    # Nobody knows what the silent ranks hold, unless no rank was ever allowed a live byte.
    had_live_bytes = {
        Placement.STAGED: False,
        Placement.IN_PLACE: state.move_id is not None,
        Placement.DELTA: state.was_placing,
    }
    is_maybe_mixed = had_live_bytes[spec.placement]
    is_tainted = is_maybe_mixed or state.touched or state.taint is not None
    outcome = Outcome.TAINTED if is_tainted else Outcome.ABORTED
    return _end(state, outcome, state.abort_error or late)


def _renew(state: LeaderState, run_id: str, now_s: float) -> LeaderState:
    run = state.run
    if run is None or run.run_id != run_id:
        return state
    return evolve(state, run=evolve(run, lease_until_s=now_s + run.lease_s))


def _renew_session(state: LeaderState, session_id: str, now_s: float) -> LeaderState:
    if state.spec is None or state.spec.session_id != session_id:
        return state
    return _renew(state, state.spec.run_id, now_s)


def _not_usable(state: LeaderState, session_id: str, request: int) -> Answer | None:
    """The refusal of a request for a session that is not open, or is being aborted."""
    if state.spec is not None and state.spec.session_id == session_id:
        if state.phase is not Phase.ABORTING:
            return None
        error = state.abort_error
        return Answer(
            request, error=_alike(error, f"session {session_id!r} is being aborted: {error}")
        )
    ended = outcome_of(state, session_id)
    if ended is None:
        return _not_open(session_id, request)
    text = f"session {session_id!r} ended: {ended.outcome} {ended.detail}".rstrip()
    kind = TaintedError if ended.outcome is Outcome.TAINTED else SessionError
    return Answer(request, error=kind(text))


def _not_open(session_id: str, request: int) -> Answer:
    text = f"session {session_id!r} is not open here; begin a session first"
    return Answer(request, error=SessionError(text))


def _out_of_turn(verb: str, state: LeaderState) -> SessionError:
    name = "" if state.spec is None else f" {state.spec.session_id!r}"
    return SessionError(f"cannot {verb} while session{name} is {state.phase.value!r}")
