"""Words of an update session: what the trainer asks, what the leader orders, what a rank reports.

The two machines that speak them are pure functions ``(state, event, now_s) -> (state, actions)``:
:mod:`weightsync.session_leader` (one an engine, on its rank 0: it alone decides) and
:mod:`weightsync.session_rank` (one a rank: it alone touches weights). Neither does I/O, reads a
clock or starts a thread; `docs/protocol.md` holds their state tables. ``now_s`` is the receiver's
monotonic clock in seconds.

For whoever carries these records between processes:

- Carry every field. Each order inherits :class:`Stamp`, and reports and hellos name epochs and a
  nonce: with them a late, repeated or reordered message is recognised. An order without its stamp is
  taken for one of an unknown leader and answered with a hello, so nothing would ever open.
- Orders, hellos and reports may be lost, delayed, repeated and reordered. Between the leader and its
  own rank 0 they must not be lost: deliver them in order, in the same process.
- ``start_rank``'s ``leader_lease_s`` is some ``resend_s`` long; for rank 0, which shares the leader's
  process and cannot lose it, it is ``math.inf``: a stalled process must not give its session up.
- Feed :class:`Tick` to both machines a few times per ``resend_s``. Limits are also checked on every
  other event, so a late tick delays an ending but never lets a late request through.
- Carry out the actions of one step in order. :class:`Refuse` comes before the reports and jobs of
  its step. ``RankState.refusal`` and ``LeaderState.refusal`` say at any time why not to generate; a
  rank's already includes what its leader told it.
- A job that was cancelled still ends in :class:`JobDone`; :class:`CancelJob` may be repeated.
- ``Commit`` is answered when every rank has resumed (or the engine is tainted): at the latest twice
  ``commit_timeout_s`` after the decision. Every other request of a session is answered at the latest
  ``deadline_s`` after its begin plus ``commit_timeout_s``. When the process of the leader dies its
  callers see a broken connection; its successor answers with :class:`EpochError`.
- ``outcome_of(leader_state, session_id)`` answers a status question (None: open, or not known).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weightsync.errors import WeightSyncError
from weightsync.types import Outcome, PauseMode, Placement, VerifyMode

#: What travels for a stage without the machine looking at it (plan digest, manifest, ...).
Payload = Mapping[str, Any]

NUM_REMEMBERED_OUTCOMES = 16


@dataclass(frozen=True)
class Scope:
    """Which tensors a session promises to replace: all of them, or a named set."""

    names: frozenset[str] | None = None  # None: every tensor of the engine

    @property
    def is_full(self) -> bool:
        return self.names is None


@dataclass(frozen=True)
class SessionSpec:
    """Everything ``begin`` fixes. Durations are seconds on the receiver's clock."""

    session_id: str
    run_id: str
    version: int
    scope: Scope
    placement: Placement
    deadline_s: float
    commit_timeout_s: float
    # for the ranks' work only; the machines do not look at them
    verify: VerifyMode = VerifyMode.READ_BACK
    pause_mode: PauseMode = PauseMode.RETRACT


@dataclass(frozen=True)
class Version:
    """A published version: the number rises within one run."""

    run_id: str
    number: int


@dataclass(frozen=True)
class EndedSession:
    """A remembered outcome."""

    session_id: str
    outcome: Outcome
    detail: str
    spec: SessionSpec | None = None  # as its begin said it
    moves_done: frozenset[int] = frozenset()


# --- what the leader hears from the trainer; ``request`` names the caller that waits -------------


@dataclass(frozen=True)
class Connect:
    request: int
    run_id: str
    lease_s: float


@dataclass(frozen=True)
class Begin:
    request: int
    epoch: str  # the engine epoch of the handshake
    spec: SessionSpec


@dataclass(frozen=True)
class Move:
    """Pull one batch of tensors; the same ``move_id`` again attaches to the running one."""

    request: int
    session_id: str
    move_id: int
    payload: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Prepare:
    request: int
    session_id: str
    payload: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    request: int
    session_id: str


@dataclass(frozen=True)
class Abort:
    request: int
    session_id: str
    reason: str


@dataclass(frozen=True)
class Heartbeat:
    run_id: str


@dataclass(frozen=True)
class Close:
    request: int
    run_id: str


@dataclass(frozen=True)
class RunLost:
    """The transport saw the trainer's process end; a lease need not be waited for."""

    run_id: str
    reason: str


# --- what the leader hears from its ranks ---------------------------------------------------------


class Stage(StrEnum):
    """A step that every rank carries out and reports."""

    OPEN = "open"
    MOVE = "move"
    PREPARE = "prepare"
    PLACE = "place"
    RESUME = "resume"
    ABORT = "abort"


@dataclass(frozen=True)
class RankHello:
    """A rank asks to be welcomed, or (``leader_epoch`` is the leader's own) says that it was.

    ``rank_epoch`` differs from every earlier start of that rank. ``leader_epoch`` names the leader
    whose welcome it took last; None: it holds the fresh weights of its start. ``nonce`` rises with
    every welcome that the rank takes, so that it can tell an old welcome; ``challenge`` repeats what
    its welcome said, so that the leader can tell a hello of a life that has ended meanwhile.
    """

    rank: int
    rank_epoch: str
    leader_epoch: str | None = None
    nonce: int = 0
    challenge: int = 0


@dataclass(frozen=True)
class RankReport:
    """A rank finished a stage, or failed in it. ``touched``: live bytes of this session exist.

    ``leader_epoch``: the leader that opened the session. ``tainted``: why this rank by itself
    refuses to generate until a full update.
    """

    rank: int
    rank_epoch: str
    session_id: str
    stage: Stage
    move_id: int = -1
    error: WeightSyncError | None = None
    touched: bool = False
    leader_epoch: str = ""
    tainted: str | None = None


@dataclass(frozen=True)
class Tick:
    """Time passed."""


LeaderEvent = (
    Connect | Begin | Move | Prepare | Commit | Abort | Heartbeat | Close | RunLost
    | RankHello | RankReport | Tick
)  # fmt: skip


# --- what the leader does -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What every order carries; :func:`step_leader` fills it in."""

    leader_epoch: str = ""  # the life of the leader that speaks
    rank_epoch: str = ""  # the life of the rank that is meant ("": not known yet)
    seq: int = 0  # rises with every order of that leader; a rank drops what was overtaken
    refusal: str | None = None  # why the engine as a whole must not generate now


@dataclass(frozen=True)
class Welcome(Stamp):
    """The rank belongs to this engine life; ``serve``: it may generate with its present weights."""

    leader_epoch: str = field()  # said, never stamped: without the default of the other orders
    serve: bool
    nonce: int = 0  # of the hello that this answers
    challenge: int = 0  # to be said again by whoever takes this welcome


@dataclass(frozen=True)
class Open(Stamp):
    spec: SessionSpec


@dataclass(frozen=True)
class Pull(Stamp):
    session_id: str
    move_id: int
    payload: Payload


@dataclass(frozen=True)
class Verify(Stamp):
    session_id: str
    payload: Payload


@dataclass(frozen=True)
class Place(Stamp):
    """The decision was made: park, place or finalise, read back, stay parked."""

    session_id: str


@dataclass(frozen=True)
class Resume(Stamp):
    """Every rank placed: take the version's label and go on."""

    session_id: str
    version: Version


@dataclass(frozen=True)
class Discard(Stamp):
    """Give the session up; ``taint`` is not None when live weights anywhere may be mixed."""

    session_id: str
    taint: str | None


@dataclass(frozen=True)
class Ping(Stamp):
    """The leader lives, and this (None: no) session is open; a rank gives up any other."""

    session_id: str | None = None


Order = Welcome | Open | Pull | Verify | Place | Resume | Discard | Ping


@dataclass(frozen=True)
class Tell:
    """Deliver an order to a rank. May be lost; the leader repeats what was not reported."""

    rank: int
    order: Order


@dataclass(frozen=True)
class Answer:
    """Answer a waiting caller: a result, or an error."""

    request: int
    result: Payload | None = None
    error: WeightSyncError | None = None


LeaderAction = Tell | Answer


# --- what a rank hears and does besides orders ----------------------------------------------------


class Job(StrEnum):
    """Work on bytes; at most one runs on a rank at a time."""

    OPEN = "open"  # pause if in place, restore
    MOVE = "move"  # pull into staging or slots
    PREPARE = "prepare"  # coverage, digests
    PLACE = "place"  # park; staged: copy into slots; read back
    RESUME = "resume"  # take the label, leave the pause
    DISCARD = "discard"  # drop staging; untouched: leave the pause; touched: taint


@dataclass(frozen=True)
class StartJob:
    job: Job
    spec: SessionSpec
    move_id: int = -1
    payload: Payload = field(default_factory=dict)
    version: Version | None = None
    taint: str | None = None  # DISCARD only


@dataclass(frozen=True)
class CancelJob:
    """Stop the running job soon; its ``JobDone`` still comes, and only then is memory quiet."""


@dataclass(frozen=True)
class Refuse:
    """Refuse to generate with this reason, or (None) generate again."""

    reason: str | None


@dataclass(frozen=True)
class JobDone:
    job: Job
    session_id: str
    error: WeightSyncError | None = None
    touched: bool = False  # bytes of live weights were written


RankEvent = Order | JobDone | Tick
RankAction = StartJob | CancelJob | Refuse | RankReport | RankHello
