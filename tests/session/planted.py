"""Bugs planted on purpose: each changes one decision of the machines, and must be found.

A simulation that finds none of these would prove nothing by finding nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from weightsync import session_leader, session_rank
from weightsync.session import RankHello, RankReport, Stage, Version
from weightsync.session_leader import LeaderState, Phase
from weightsync.session_rank import RankState
from weightsync.types import Outcome

leader: Any = session_leader
rank: Any = session_rank


@dataclass(frozen=True, slots=True)
class Plant:
    """One wrong decision: attributes to replace, and the rules that may catch it."""

    name: str
    patches: tuple[tuple[Any, str, Any], ...]
    rules: frozenset[str]

    @contextmanager
    def applied(self) -> Iterator[None]:
        saved = [(owner, name, getattr(owner, name)) for owner, name, _ in self.patches]
        for owner, name, value in self.patches:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in saved:
                setattr(owner, name, value)


def _wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> tuple[Any, str, Any]:
    return owner, name, make(getattr(owner, name))


def _first_report_is_enough(original: Any) -> Any:
    def session_report(state: LeaderState, event: RankReport, now_s: float) -> Any:
        if state.phase is Phase.PLACING and event.stage is Stage.PLACE and event.error is None:
            state = replace(state, waiting=state.waiting & {event.rank})
        return original(state, event, now_s)

    return session_report


def _commit_without_resuming(original: Any) -> Any:
    def publish(state: LeaderState, now_s: float) -> Any:
        state, told = original(state, now_s)
        state, answers = leader._end(state, Outcome.COMMITTED, None)
        return state, [*told, *answers]

    return publish


def _any_session_will_do(original: Any) -> Any:
    def rank_report(state: LeaderState, event: RankReport, now_s: float) -> Any:
        if state.spec is not None:
            event = replace(event, session_id=state.spec.session_id)
        return original(state, event, now_s)

    return rank_report


def _any_life_will_do(original: Any) -> Any:
    def rank_hello(state: LeaderState, event: RankHello, now_s: float) -> Any:
        seat = state.seats[event.rank]
        if seat.epoch is not None and event.rank_epoch != seat.epoch:
            state = leader._seat(state, event.rank, replace(seat, epoch=None))
        return original(state, event, now_s)

    return rank_hello


def _untouched(original: Any) -> Any:
    return lambda state: original(replace(state, touched=False))


def _leader_forgets_touched(original: Any) -> Any:
    def phase_done(state: LeaderState, now_s: float) -> Any:
        return original(replace(state, touched=False), now_s)

    return phase_done


def _lost_is_nothing(original: Any) -> Any:
    return property(lambda state: original.fget(replace(state, lost_leader=False)))


def _always_serve(original: Any) -> Any:
    return lambda state, seat: replace(original(state, seat), serve=True)


def _label_of_begin(original: Any) -> Any:
    """The version is published with the decision, before anybody placed."""

    def commit(state: LeaderState, event: Any, now_s: float) -> Any:
        after, actions = original(state, event, now_s)
        if after.phase is Phase.PLACING and after.spec is not None:
            version = Version(after.spec.run_id, after.spec.version)
            after = replace(after, version=version)
        return after, actions

    return commit


PLANTS = (
    Plant(
        "publish when the first rank has placed",
        (_wrapped(leader, "_session_report", _first_report_is_enough),),
        frozenset({"publish after placing"}),
    ),
    Plant(
        "publish with the decision",
        (_wrapped(leader, "_commit", _label_of_begin),),
        frozenset({"publish once"}),
    ),
    Plant(
        "report a commit before every rank has resumed",
        (_wrapped(leader, "_publish", _commit_without_resuming),),
        frozenset({"commit after resuming"}),
    ),
    Plant(
        "a rank forgets on abort that it wrote live bytes",
        (_wrapped(rank, "_give_up", _untouched),),
        frozenset({"touched means tainted", "aborted means whole", "never a mix"}),
    ),
    Plant(
        "the leader forgets on abort that a rank wrote live bytes",
        (_wrapped(leader, "_phase_done", _leader_forgets_touched),),
        frozenset({"aborted means whole"}),
    ),
    Plant(
        "a late report of another session counts",
        (_wrapped(leader, "_rank_report", _any_session_will_do),),
        frozenset({"publish after placing", "commit after resuming"}),
    ),
    Plant(
        "a rank that restarted is taken for the one that joined",
        (
            _wrapped(leader, "_rank_hello", _any_life_will_do),
            _wrapped(leader, "_welcome", _always_serve),
        ),
        frozenset({"never a mix", "never a wrong label", "never a hang"}),
    ),
    Plant(
        "a lease that ends aborts after the decision",
        ((leader, "_DECIDED", ()),),
        frozenset({"the decision stays"}),
    ),
    Plant(
        "a prepared rank that lost its leader goes on generating",
        (_wrapped(RankState, "refusal", _lost_is_nothing),),
        frozenset({"a lost follower refuses"}),
    ),
    Plant(
        "versions may go back",
        ((leader, "_version_refusal", lambda state, spec: None),),
        frozenset({"versions rise"}),
    ),
    Plant(
        "a partial update is taken where a full one is needed",
        ((leader, "_scope_refusal", lambda state, spec: None),),
        frozenset({"first a full update"}),
    ),
    Plant(
        "the engine serves before every rank has joined",
        ((LeaderState, "refusal", property(lambda state: state.taint)),),
        frozenset({"never a mix", "never a wrong label"}),
    ),
    Plant(
        "nothing ends by time alone",
        ((leader, "_expire", lambda state, now_s: (state, [])),),
        frozenset({"answered in time", "idle within a bound", "an update succeeds at last"}),
    ),
)
