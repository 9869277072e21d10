"""The leader's transitions, one by one, and that no event in any reachable state breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    EpochError,
    IntegrityError,
    PeerLostError,
    ScopeError,
    SessionError,
    TaintedError,
    VersionError,
    WeightSyncError,
)
from weightsync.session import (
    NUM_REMEMBERED_OUTCOMES,
    Abort,
    Answer,
    Begin,
    Close,
    Commit,
    Connect,
    Discard,
    Heartbeat,
    LeaderAction,
    LeaderEvent,
    Move,
    Open,
    Ping,
    Place,
    Prepare,
    Pull,
    RankHello,
    RankReport,
    Resume,
    RunLost,
    Scope,
    SessionSpec,
    Stage,
    Tell,
    Tick,
    Verify,
    Version,
    Welcome,
)
from weightsync.session_leader import (
    LeaderState,
    LeaderTiming,
    Phase,
    outcome_of,
    start_leader,
    step_leader,
)
from weightsync.types import Outcome, Placement

SPEC = SessionSpec("s1", "run", 1, Scope(), Placement.STAGED, 20.0, 5.0)
LEASE_S = 10.0


class Bench:
    """A leader of two ranks under test, its clock, and what it did."""

    def __init__(self) -> None:
        self.state: LeaderState = start_leader("L1", 2, LeaderTiming(resend_s=1.0))
        self.now_s = 100.0
        self.did: list[LeaderAction] = []

    def feed(self, *events: LeaderEvent) -> list[LeaderAction]:
        self.did = []
        for event in events:
            self.state, actions = step_leader(self.state, event, self.now_s)
            self.did += actions
        return self.did

    def hello(self, rank: int, epoch: str = "", leader: str | None = None, nonce: int = 0) -> None:
        self.feed(RankHello(rank, epoch or f"e{rank}", leader, nonce))

    def confirm(self, rank: int, epoch: str = "", challenge: int | None = None) -> None:
        """What a rank says that took the newest welcome."""
        if challenge is None:
            challenge = self.state.num_challenges
        self.feed(RankHello(rank, epoch or f"e{rank}", "L1", 1, challenge))

    def seat(self, rank: int, epoch: str = "") -> None:
        self.hello(rank, epoch)
        self.confirm(rank, epoch)

    def join(self) -> Bench:
        self.seat(0)
        self.seat(1)
        return self

    def connect(self, run_id: str = "run") -> Bench:
        self.feed(Connect(1, run_id, LEASE_S))
        return self

    def report(self, stage: Stage, *ranks: int, **also: Any) -> list[LeaderAction]:
        spec = self.state.spec or SPEC
        made = [
            RankReport(r, f"e{r}", spec.session_id, stage, leader_epoch="L1", **also)
            for r in ranks or (0, 1)
        ]
        return self.feed(*made)

    def reach(self, phase: Phase, spec: SessionSpec = SPEC) -> Bench:
        """Bring the session there; request numbers: begin 2, move 3, prepare 4, commit 5."""
        sid = spec.session_id
        way: list[tuple[Phase, list[LeaderEvent], Stage | None]] = [
            (Phase.OPENING, [Begin(2, "L1", spec)], None),
            (Phase.OPEN, [], Stage.OPEN),
            (Phase.MOVING, [Move(3, sid, 7)], None),
            (Phase.PREPARING, [], Stage.MOVE),
            (Phase.PREPARED, [], Stage.PREPARE),
            (Phase.PLACING, [Commit(5, sid)], None),
            (Phase.RESUMING, [], Stage.PLACE),
            (Phase.IDLE, [], Stage.RESUME),
        ]
        for reached, events, stage in way:
            self.feed(*events)
            if stage is not None:
                self.report(stage, **({"move_id": 7} if stage is Stage.MOVE else {}))
            if reached is Phase.PREPARING:
                self.feed(Prepare(4, sid))
            if reached is phase:
                break
        assert self.state.phase is phase
        return self

    # Methods, because a type checker takes a narrowed attribute for unchanged after the next step.
    def refusal(self) -> str | None:
        return self.state.refusal

    def seated(self, rank: int) -> str | None:
        return self.state.seats[rank].epoch

    def version(self) -> Version | None:
        return self.state.version

    def orders(self, kind: type) -> list[Any]:
        return [a.order for a in self.did if isinstance(a, Tell) and isinstance(a.order, kind)]

    def answers(self) -> dict[int, Answer]:
        return {a.request: a for a in self.did if isinstance(a, Answer)}

    def error(self, request: int) -> WeightSyncError:
        error = self.answers()[request].error
        assert error is not None
        return error


def ready() -> Bench:
    return Bench().join().connect()


def committed(spec: SessionSpec = SPEC) -> Bench:
    return ready().reach(Phase.IDLE, spec)


IN_SESSION = [p for p in Phase if p not in (Phase.IDLE, Phase.ABORTING)]
UNDECIDED = [p for p in IN_SESSION if p not in (Phase.PLACING, Phase.RESUMING)]
DECIDED = [Phase.PLACING, Phase.RESUMING]


class TestSeats:
    def test_a_fresh_engine_serves_once_every_rank_took_the_welcome(self) -> None:
        bench = Bench()
        assert bench.refusal() == "waiting for rank 0, 1 to join the engine"
        bench.hello(0)
        [welcome] = bench.orders(Welcome)
        assert (welcome.serve, welcome.nonce, welcome.rank_epoch) == (True, 0, "e0")
        bench.confirm(0)
        bench.hello(1)
        assert bench.refusal() == "waiting for rank 1 to join the engine"
        bench.confirm(1)
        assert bench.refusal() is None
        assert {order.refusal for order in bench.orders(Ping)} == {None}

    def test_a_lost_welcome_is_repeated(self) -> None:
        bench = Bench()
        bench.hello(1)
        bench.now_s += 1.0
        bench.feed(Tick())
        assert [w.nonce for w in bench.orders(Welcome)] == [0]

    def test_a_copy_of_an_old_hello_changes_nothing(self) -> None:
        bench = ready().reach(Phase.PREPARED)
        before = bench.state
        bench.hello(1)
        assert bench.state == before
        assert not bench.did

    def test_a_rank_that_joins_late_is_told_what_it_missed(self) -> None:
        bench = Bench()
        bench.seat(0)
        bench.connect().feed(Begin(2, "L1", SPEC))
        bench.hello(1)
        assert not bench.orders(Open)
        bench.confirm(1)
        assert "e1" in {order.rank_epoch for order in bench.orders(Open)}

    def test_only_the_newest_challenge_seats(self) -> None:
        """Hellos and confirmations of a life that ended may come after those of the present one."""
        bench = Bench()
        bench.hello(1, "old")
        bench.hello(1, "new")
        bench.confirm(1, "old", challenge=1)  # sent before it died
        assert bench.seated(1) is None
        bench.hello(1, "new")
        bench.confirm(1, "new")
        bench.hello(1, "old")
        bench.confirm(1, "old", challenge=1)
        assert bench.seated(1) == "new"
        bench.confirm(1, "new")  # the welcome of the dead one provoked it
        assert bench.state.seats[1].candidate is None
        assert bench.state.taint is None

    def test_a_confirmation_that_was_overtaken_is_asked_for_again(self) -> None:
        bench = Bench()
        bench.hello(1)
        bench.hello(1, "dead")
        bench.confirm(1, challenge=1)
        [welcome] = bench.orders(Welcome)
        assert (welcome.rank_epoch, welcome.challenge) == ("e1", bench.state.num_challenges)

    def test_a_rank_of_a_former_leader_taints(self) -> None:
        bench = Bench()
        bench.hello(1, leader="L0", nonce=4)
        assert bench.state.taint is not None
        assert "former life" in bench.state.taint
        [welcome] = bench.orders(Welcome)
        assert not welcome.serve

    @pytest.mark.parametrize("phase", IN_SESSION)
    def test_a_restarted_rank_taints_in_every_phase(self, phase: Phase) -> None:
        bench = ready().reach(phase)
        version = bench.state.version
        bench.hello(1, "e1b")
        assert not bench.orders(Welcome)[0].serve
        bench.confirm(1, "e1b")
        assert bench.state.taint == "rank 1 was restarted; a full update is needed"
        assert bench.version() == version
        expected = Phase.IDLE if phase in DECIDED else Phase.ABORTING
        assert bench.state.phase is expected

    def test_a_report_of_a_former_life_is_ignored(self) -> None:
        bench = ready()
        bench.seat(1, "e1b")
        bench.reach(Phase.OPENING)
        before = bench.state
        bench.feed(RankReport(1, "e1", "s1", Stage.OPEN, leader_epoch="L1"))
        bench.feed(RankReport(1, "e1b", "s1", Stage.OPEN, leader_epoch="L0"))
        assert bench.state == before

    @pytest.mark.parametrize("rank", [-1, 2, 99])
    def test_a_rank_that_cannot_be_is_ignored(self, rank: int) -> None:
        bench = ready()
        bench.feed(RankHello(rank, "x"), RankReport(rank, "x", "s1", Stage.OPEN))
        assert not bench.did

    def test_orders_are_numbered_and_name_both_lives(self) -> None:
        bench = ready().reach(Phase.OPENING)
        first, second = bench.orders(Open)
        assert first.seq < second.seq == bench.state.seq
        assert (first.leader_epoch, first.rank_epoch, second.rank_epoch) == ("L1", "e0", "e1")


class TestRuns:
    def test_a_second_run_is_refused_and_told_who_holds(self) -> None:
        bench = ready()
        bench.feed(Connect(9, "other", 5.0))
        assert isinstance(bench.error(9), BusyError)
        assert "'run'" in str(bench.error(9))
        assert "10.0 s" in str(bench.error(9))

    def test_connecting_again_renews(self) -> None:
        bench = ready()
        bench.now_s += 9.0
        bench.feed(Connect(9, "run", LEASE_S))
        assert bench.answers()[9].result == {"epoch": "L1"}
        bench.now_s += 9.0
        bench.feed(Tick())
        assert bench.state.run is not None

    @pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
    def test_a_lease_that_cannot_be(self, lease_s: float) -> None:
        bench = Bench()
        bench.feed(Connect(1, "run", lease_s))
        assert isinstance(bench.error(1), ConfigError)

    def test_another_run_may_connect_after_the_lease_whatever_the_ticks(self) -> None:
        bench = ready()
        bench.now_s += LEASE_S
        bench.feed(Connect(9, "other", 5.0))
        assert bench.answers()[9].result == {"epoch": "L1"}

    @pytest.mark.parametrize("phase", UNDECIDED)
    @pytest.mark.parametrize("how", ["close", "lost", "lease"])
    def test_the_end_of_a_run_aborts_what_is_not_decided(self, phase: Phase, how: str) -> None:
        bench = ready().reach(phase)
        if how == "lease":
            bench.now_s += LEASE_S
        events: dict[str, LeaderEvent] = {
            "close": Close(8, "run"),
            "lost": RunLost("run", "died"),
            "lease": Tick(),
        }
        bench.feed(events[how])
        assert bench.state.phase is Phase.ABORTING
        assert bench.state.run is None
        bench.report(Stage.ABORT)
        ended = outcome_of(bench.state, "s1")
        assert ended is not None
        assert ended.outcome is Outcome.ABORTED

    @pytest.mark.parametrize("phase", DECIDED)
    @pytest.mark.parametrize("how", ["close", "lost", "lease"])
    def test_the_end_of_a_run_means_nothing_after_the_decision(
        self, phase: Phase, how: str
    ) -> None:
        spec = replace(SPEC, commit_timeout_s=50.0)
        bench = ready().reach(phase, spec)
        if how == "lease":
            bench.now_s += LEASE_S
        events: dict[str, LeaderEvent] = {
            "close": Close(8, "run"),
            "lost": RunLost("run", "died"),
            "lease": Tick(),
        }
        bench.feed(events[how])
        assert bench.state.phase is phase
        if phase is Phase.PLACING:
            bench.report(Stage.PLACE)
        bench.report(Stage.RESUME)
        assert bench.answers()[5].result == {"outcome": "committed"}

    def test_a_stopped_trainer_finds_its_session_ended(self) -> None:
        bench = ready().reach(Phase.PREPARED)
        bench.now_s += LEASE_S + 5.0
        bench.feed(Commit(5, "s1"))  # no tick came in between
        assert bench.state.phase is Phase.ABORTING
        assert isinstance(bench.error(5), DeadlineError)
        assert "lease" in str(bench.error(5))
        bench.feed(Heartbeat("run"))
        assert bench.state.run is None
        bench.feed(Begin(6, "L1", replace(SPEC, session_id="s2")))
        assert isinstance(bench.error(6), EpochError)
        assert "not connected" in str(bench.error(6))

    def test_heartbeats_and_requests_renew(self) -> None:
        bench = ready().reach(Phase.OPEN)
        for event in (Heartbeat("run"), Move(3, "s1", 1), Heartbeat("other")):
            bench.now_s += 6.0
            bench.feed(event)
        assert bench.state.phase is Phase.MOVING


class TestBegin:
    def refused(self, bench: Bench, **changes: Any) -> WeightSyncError:
        bench.feed(Begin(9, "L1", replace(SPEC, session_id="s9", **changes)))
        return bench.error(9)

    def test_of_a_former_life(self) -> None:
        bench = ready()
        bench.feed(Begin(9, "L0", SPEC))
        assert isinstance(bench.error(9), EpochError)
        assert "'L0'" in str(bench.error(9))

    def test_of_another_run(self) -> None:
        error = self.refused(ready(), run_id="other")
        assert isinstance(error, BusyError)
        assert "'run'" in str(error)

    @pytest.mark.parametrize("phase", IN_SESSION)
    def test_while_a_session_is_open(self, phase: Phase) -> None:
        error = self.refused(ready().reach(phase), version=5)
        assert isinstance(error, BusyError)
        assert "'s1' of version 1" in str(error)
        assert phase.value in str(error)

    @pytest.mark.parametrize("version", [0, 1, -3])
    def test_of_a_version_that_does_not_rise(self, version: int) -> None:
        error = self.refused(committed(), version=version)
        assert isinstance(error, VersionError)
        assert f"version {version} " in str(error)
        assert "above 1" in str(error)

    def test_versions_of_a_run_rise_even_with_another_run_in_between(self) -> None:
        bench = committed(replace(SPEC, version=5))
        bench.feed(Close(8, "run"))
        bench.connect("other").reach(
            Phase.IDLE, replace(SPEC, session_id="s2", run_id="other", version=1)
        )
        assert bench.version() == Version("other", 1)
        bench.feed(Close(8, "other"))
        bench.connect()
        assert isinstance(self.refused(bench, version=3), VersionError)

    def test_partial_over_nothing(self) -> None:
        error = self.refused(ready(), scope=Scope(frozenset("a")))
        assert isinstance(error, ScopeError)
        assert "no version yet" in str(error)

    def test_partial_over_another_run(self) -> None:
        bench = committed()
        bench.feed(Close(8, "run"))
        bench.connect("other")
        error = self.refused(bench, run_id="other", scope=Scope(frozenset("a")))
        assert isinstance(error, ScopeError)
        assert "version 1 is of run 'run'" in str(error)

    def test_partial_over_a_taint(self) -> None:
        bench = committed()
        bench.seat(1, "e1b")
        error = self.refused(bench, version=2, scope=Scope(frozenset("a")))
        assert isinstance(error, ScopeError)
        assert "rank 1 was restarted" in str(error)

    @pytest.mark.parametrize("changes", [{"deadline_s": 0.0}, {"commit_timeout_s": float("nan")}])
    def test_with_limits_that_cannot_be(self, changes: dict[str, float]) -> None:
        assert isinstance(self.refused(ready(), **changes), ConfigError)

    def test_of_a_session_id_that_was_used(self) -> None:
        bench = committed()
        bench.feed(Begin(9, "L1", replace(SPEC, version=2)))
        assert type(bench.error(9)) is SessionError
        assert "'s1'" in str(bench.error(9))

    def test_after_its_own_abort(self) -> None:
        bench = ready()
        bench.feed(Abort(8, "s1", "gave up"), Begin(9, "L1", SPEC))
        assert type(bench.error(8)) is SessionError
        assert "before it began" in str(bench.error(9))
        assert bench.state.phase is Phase.IDLE

    def test_a_copy_waits_with_the_first(self) -> None:
        bench = ready().reach(Phase.OPENING)
        bench.feed(Begin(12, "L1", SPEC))
        bench.report(Stage.OPEN)
        assert {2, 12} <= bench.answers().keys()
        bench.feed(Begin(13, "L1", SPEC))
        assert bench.answers()[13].error is None


class TestStages:
    @pytest.mark.parametrize(
        ("phase", "kind", "stage"),
        [
            (Phase.OPENING, Open, Stage.OPEN),
            (Phase.MOVING, Pull, Stage.MOVE),
            (Phase.PREPARING, Verify, Stage.PREPARE),
            (Phase.PLACING, Place, Stage.PLACE),
            (Phase.RESUMING, Resume, Stage.RESUME),
        ],
    )
    def test_unreported_orders_are_repeated(self, phase: Phase, kind: type, stage: Stage) -> None:
        bench = ready().reach(phase)
        bench.report(stage, 1, move_id=7)
        bench.now_s += 1.0
        bench.feed(Tick())
        assert [a.rank for a in bench.did if isinstance(a, Tell) and isinstance(a.order, kind)] == [
            0
        ]
        assert [p.session_id for p in bench.orders(Ping)] == ["s1"]

    def test_a_move_is_done_once_and_answered_again(self) -> None:
        bench = ready().reach(Phase.MOVING)
        bench.feed(Move(13, "s1", 7))
        bench.report(Stage.MOVE, move_id=6)
        assert bench.state.phase is Phase.MOVING
        bench.report(Stage.MOVE, move_id=7)
        assert {3, 13} <= bench.answers().keys()
        bench.feed(Move(14, "s1", 7))
        assert bench.answers()[14].result == {"move_id": 7}
        assert not bench.orders(Pull)

    @pytest.mark.parametrize(
        ("phase", "event"),
        [
            (Phase.OPENING, Move(9, "s1", 1)),
            (Phase.MOVING, Move(9, "s1", 1)),
            (Phase.MOVING, Prepare(9, "s1")),
            (Phase.PREPARED, Move(9, "s1", 1)),
            (Phase.OPEN, Commit(9, "s1")),
            (Phase.PREPARING, Commit(9, "s1")),
        ],
    )
    def test_out_of_turn(self, phase: Phase, event: LeaderEvent) -> None:
        bench = ready().reach(phase)
        bench.feed(event)
        assert type(bench.error(9)) is SessionError
        assert f"'s1' is '{phase.value}'" in str(bench.error(9))
        assert bench.state.phase is phase

    @pytest.mark.parametrize("event", [Move(9, "s7", 1), Prepare(9, "s7"), Commit(9, "s7")])
    def test_of_a_session_that_is_not_open(self, event: LeaderEvent) -> None:
        bench = ready().reach(Phase.PREPARED)
        bench.feed(event)
        assert "'s7' is not open" in str(bench.error(9))

    def test_prepare_is_answered_again(self) -> None:
        bench = ready().reach(Phase.PREPARING)
        bench.feed(Prepare(14, "s1"))
        bench.report(Stage.PREPARE)
        bench.feed(Prepare(15, "s1"))
        assert bench.answers()[15].result == {"phase": "prepared"}

    @pytest.mark.parametrize("phase", [p for p in UNDECIDED if p is not Phase.OPEN])
    def test_a_failing_rank_aborts_and_the_caller_learns_why(self, phase: Phase) -> None:
        bench = ready().reach(phase)
        bench.report(Stage.MOVE, 1, error=IntegrityError("digest of 'x' differs"))
        assert bench.state.phase is Phase.ABORTING
        bench.report(Stage.ABORT)
        failures = [a.error for a in bench.answers().values()]
        assert all(isinstance(e, IntegrityError) and "still serves" in str(e) for e in failures)
        assert bench.state.taint is None

    def test_a_begin_that_is_asked_again_learns_why_too(self) -> None:
        """Its answer was lost, and with it what went wrong."""
        bench = ready().reach(Phase.MOVING)
        bench.report(Stage.MOVE, 1, error=IntegrityError("digest of 'x' differs"))
        assert bench.state.phase is Phase.ABORTING
        bench.feed(Begin(77, "L1", SPEC))
        error = bench.answers()[77].error
        assert isinstance(error, IntegrityError)
        assert "digest of 'x' differs" in str(error)

    def test_a_rank_that_gave_up_aborts(self) -> None:
        bench = ready().reach(Phase.OPEN)
        bench.report(Stage.ABORT, 1)
        assert bench.state.phase is Phase.ABORTING

    def test_an_error_of_a_foreign_kind_is_no_obstacle(self) -> None:
        class Odd(WeightSyncError):
            def __init__(self, a: str, b: str) -> None:
                super().__init__(a + b)

        bench = ready().reach(Phase.MOVING)
        bench.report(Stage.MOVE, 1, error=Odd("a", "b"))
        bench.report(Stage.ABORT)
        assert type(bench.error(3)) is SessionError
        assert "ab" in str(bench.error(3))


class TestAbort:
    @pytest.mark.parametrize("phase", UNDECIDED)
    def test_asked(self, phase: Phase) -> None:
        bench = ready().reach(phase)
        bench.feed(Abort(8, "s1", "enough"), Abort(9, "s1", "enough"))
        assert {d.taint for d in bench.orders(Discard)} == {None}
        bench.report(Stage.ABORT)
        assert bench.answers()[8].result == bench.answers()[9].result
        assert outcome_of(bench.state, "s1") is not None
        bench.feed(Abort(10, "s1", "late"))
        assert (bench.answers()[10].result or {})["outcome"] == "aborted"

    @pytest.mark.parametrize("phase", DECIDED)
    def test_asked_after_the_decision(self, phase: Phase) -> None:
        bench = ready().reach(phase)
        bench.feed(Abort(8, "s1", "enough"))
        assert "decided" in str(bench.error(8))
        assert bench.state.phase is phase

    def test_requests_meanwhile_get_the_reason(self) -> None:
        bench = ready().reach(Phase.OPEN)
        bench.feed(Abort(8, "s1", "enough"), Move(9, "s1", 1))
        assert "being aborted: aborted by the trainer: enough" in str(bench.error(9))

    @pytest.mark.parametrize("also", [{"touched": True}, {"tainted": "cannot discard"}])
    def test_one_written_rank_taints_the_whole_engine(self, also: dict[str, Any]) -> None:
        bench = ready().reach(Phase.MOVING, replace(SPEC, placement=Placement.IN_PLACE))
        bench.feed(Abort(8, "s1", "enough"))
        bench.report(Stage.ABORT, 0)
        bench.report(Stage.ABORT, 1, **also)
        assert (bench.answers()[8].result or {})["outcome"] == "tainted"
        assert [d.taint is None for d in bench.orders(Discard)] == [False, False]
        bench.feed(Commit(9, "s1"))
        assert isinstance(bench.error(9), TaintedError)

    def test_a_rank_that_cannot_discard_taints(self) -> None:
        bench = ready().reach(Phase.MOVING)
        bench.feed(Abort(8, "s1", "enough"))
        bench.report(Stage.ABORT, 0, error=SessionError("stuck"))
        bench.report(Stage.ABORT, 1)
        assert bench.state.taint is not None

    def test_an_aborted_attempt_leaves_an_older_taint(self) -> None:
        bench = ready()
        bench.seat(1, "e1b")
        bench.feed(Begin(2, "L1", SPEC))
        bench.feed(Abort(8, "s1", "enough"))
        bench.report(Stage.ABORT, 0)
        bench.feed(RankReport(1, "e1b", "s1", Stage.ABORT, leader_epoch="L1"))
        assert (bench.answers()[8].result or {})["outcome"] == "tainted"
        assert bench.state.taint == "rank 1 was restarted; a full update is needed"

    @pytest.mark.parametrize(
        ("placement", "phase", "outcome"),
        [
            (Placement.STAGED, Phase.MOVING, Outcome.ABORTED),
            (Placement.STAGED, Phase.PREPARED, Outcome.ABORTED),
            (Placement.IN_PLACE, Phase.OPEN, Outcome.ABORTED),
            (Placement.IN_PLACE, Phase.MOVING, Outcome.TAINTED),
            (Placement.IN_PLACE, Phase.PREPARED, Outcome.TAINTED),
            (Placement.DELTA, Phase.MOVING, Outcome.ABORTED),
            (Placement.DELTA, Phase.PREPARED, Outcome.ABORTED),
        ],
    )
    def test_a_silent_rank_taints_only_if_it_may_have_written(
        self, placement: Placement, phase: Phase, outcome: Outcome
    ) -> None:
        bench = ready().reach(phase, replace(SPEC, placement=placement))
        bench.feed(Abort(8, "s1", "enough"))
        bench.report(Stage.ABORT, 0)
        bench.now_s += 5.0
        bench.feed(Tick())
        assert (bench.answers()[8].result or {})["outcome"] == outcome.value
        bench.report(Stage.ABORT, 1, touched=True)  # too late: the outcome stays
        ended = outcome_of(bench.state, "s1")
        assert ended is not None
        assert ended.outcome is outcome

    def test_the_deadline_names_who_did_not_report(self) -> None:
        bench = ready().reach(Phase.MOVING, replace(SPEC, deadline_s=4.0))
        bench.report(Stage.MOVE, 0, move_id=7)
        bench.now_s += 4.0
        bench.feed(Tick())
        bench.report(Stage.ABORT)
        error = bench.error(3)
        assert isinstance(error, DeadlineError)
        assert "stage 'moving' passed its limit of 4.0 s (deadline_s)" in str(error)
        assert "did not report: 1" in str(error)


class TestDecision:
    def test_the_version_is_published_when_every_rank_placed(self) -> None:
        bench = ready().reach(Phase.PLACING)
        bench.report(Stage.PLACE, 0)
        assert bench.version() is None
        bench.report(Stage.PLACE, 1)
        assert bench.version() == Version("run", 1)
        assert bench.state.phase is Phase.RESUMING
        assert 5 not in bench.answers()

    def test_commit_is_answered_when_every_rank_resumed(self) -> None:
        bench = ready().reach(Phase.RESUMING)
        bench.feed(Commit(15, "s1"))
        bench.report(Stage.RESUME, 1)
        assert not bench.answers()
        bench.report(Stage.RESUME, 0)
        assert bench.answers()[5] == Answer(5, {"outcome": "committed"})
        assert bench.answers()[15] == Answer(15, {"outcome": "committed"})
        bench.feed(Commit(16, "s1"))
        assert bench.answers()[16].result == {"outcome": "committed"}

    def test_all_that_led_to_it_may_be_asked_again(self) -> None:
        """In one exchange, whose answer was lost. Nothing is done for it, and nothing else is answered."""
        bench = committed()
        before = bench.state
        bench.feed(
            Begin(12, "L1", SPEC), Move(13, "s1", 7), Prepare(14, "s1"), Commit(15, "s1"),
        )  # fmt: skip
        assert {n: answer.result for n, answer in bench.answers().items()} == {
            12: {"phase": "open"}, 13: {"move_id": 7}, 14: {"phase": "prepared"},
            15: {"outcome": "committed"},
        }  # fmt: skip
        bench.feed(Begin(22, "L1", replace(SPEC, version=2)), Move(23, "s1", 8))
        assert "was used before" in str(bench.error(22))
        assert "ended: committed" in str(bench.error(23))
        bench.feed(Begin(32, "L0", SPEC))
        assert isinstance(bench.error(32), EpochError)
        assert bench.state == before

    def test_what_was_aborted_is_not_answered_as_done(self) -> None:
        bench = ready().reach(Phase.PREPARED)
        bench.feed(Abort(8, "s1", "gave up"))
        bench.report(Stage.ABORT)
        bench.feed(
            Begin(12, "L1", SPEC), Move(13, "s1", 7), Prepare(14, "s1"), Commit(15, "s1"),
        )  # fmt: skip
        assert all(bench.error(n) for n in (12, 13, 14, 15))
        assert bench.version() is None

    @pytest.mark.parametrize("phase", DECIDED)
    def test_an_overrun_taints(self, phase: Phase) -> None:
        bench = ready().reach(phase)
        bench.now_s += 5.0
        bench.feed(Tick())
        assert isinstance(bench.error(5), DeadlineError)
        assert "commit_timeout_s" in str(bench.error(5))
        assert "refuses to generate" in str(bench.error(5))
        assert bench.state.taint is not None
        assert (bench.state.version is None) == (phase is Phase.PLACING)

    @pytest.mark.parametrize("phase", DECIDED)
    def test_a_failure_taints(self, phase: Phase) -> None:
        bench = ready().reach(phase)
        stage = Stage.PLACE if phase is Phase.PLACING else Stage.RESUME
        bench.report(stage, 1, error=IntegrityError("read back"))
        assert isinstance(bench.error(5), IntegrityError)
        ended = outcome_of(bench.state, "s1")
        assert ended is not None
        assert ended.outcome is Outcome.TAINTED

    @pytest.mark.parametrize("is_late", [False, True])
    def test_a_delta_is_taken_back_while_no_rank_has_resumed(self, is_late: bool) -> None:
        bench = ready().reach(Phase.PLACING, replace(SPEC, placement=Placement.DELTA))
        bench.report(Stage.PLACE, 0)
        if is_late:
            bench.now_s += 5.0
            bench.feed(Tick())
        else:
            bench.report(Stage.PLACE, 1, error=IntegrityError("read back"))
        assert bench.state.phase is Phase.ABORTING
        assert bench.orders(Discard)
        bench.report(Stage.ABORT, 0)
        bench.report(Stage.ABORT, 1)
        assert isinstance(bench.error(5), DeadlineError if is_late else IntegrityError)
        ended = outcome_of(bench.state, "s1")
        assert ended is not None
        assert ended.outcome is Outcome.ABORTED
        assert bench.state.taint is None
        assert bench.version() is None

    @pytest.mark.parametrize("is_silent", [False, True])
    def test_a_delta_that_cannot_be_taken_back_taints(self, is_silent: bool) -> None:
        bench = ready().reach(Phase.PLACING, replace(SPEC, placement=Placement.DELTA))
        bench.report(Stage.PLACE, 1, error=IntegrityError("read back"))
        bench.report(Stage.ABORT, 0)
        if is_silent:
            bench.now_s += 5.0
            bench.feed(Tick())
        else:
            bench.report(Stage.ABORT, 1, touched=True)
        ended = outcome_of(bench.state, "s1")
        assert ended is not None
        assert ended.outcome is Outcome.TAINTED

    def test_a_delta_that_was_published_is_not_taken_back(self) -> None:
        bench = ready().reach(Phase.RESUMING, replace(SPEC, placement=Placement.DELTA))
        bench.report(Stage.RESUME, 1, error=IntegrityError("resume"))
        ended = outcome_of(bench.state, "s1")
        assert ended is not None
        assert ended.outcome is Outcome.TAINTED

    def test_the_sessions_deadline_means_nothing_any_more(self) -> None:
        bench = ready().reach(Phase.PREPARED, replace(SPEC, deadline_s=4.0))
        bench.now_s += 3.0
        bench.feed(Commit(5, "s1"))
        bench.now_s += 3.0
        bench.feed(Tick())
        assert bench.state.phase is Phase.PLACING

    def test_a_full_update_clears_a_taint(self) -> None:
        bench = ready()
        bench.state = replace(bench.state, taint="broken")
        bench.reach(Phase.RESUMING)
        assert bench.state.taint is None
        assert {r.refusal for r in bench.orders(Resume)} == {None}

    def test_the_last_outcomes_are_remembered(self) -> None:
        bench = ready()
        for i in range(NUM_REMEMBERED_OUTCOMES + 1):
            spec = replace(SPEC, session_id=f"s{i}", version=i)
            bench.reach(Phase.IDLE, spec)
        assert outcome_of(bench.state, "s0") is None
        assert all(outcome_of(bench.state, f"s{i}") for i in range(1, NUM_REMEMBERED_OUTCOMES + 1))


# --- totality ---------------------------------------------------------------------------------------

_ids = st.sampled_from(["s1", "s2", ""])
_runs = st.sampled_from(["run", "other"])
_ranks = st.sampled_from([-1, 0, 1, 5])
_epochs = st.sampled_from(["e0", "e1", "new"])
_leaders = st.sampled_from(["L1", "L0"])
_errors = st.sampled_from([None, IntegrityError("x"), PeerLostError("y")])
_specs = st.builds(
    SessionSpec,
    _ids,
    _runs,
    st.integers(0, 3),
    st.sampled_from([Scope(), Scope(frozenset("a"))]),
    st.sampled_from(list(Placement)),
    st.sampled_from([0.0, 3.0, 9.0]),
    st.sampled_from([2.0, 5.0]),
)
_good_reports = st.builds(
    lambda r, stage, error: RankReport(
        r, f"e{r}", "s1", stage, move_id=1, error=error, leader_epoch="L1"
    ),
    st.sampled_from([0, 1]),
    st.sampled_from(list(Stage)),
    _errors,
)
_events = st.one_of(
    st.builds(Connect, st.just(1), _runs, st.sampled_from([0.0, 5.0])),
    st.builds(Begin, st.just(1), _leaders, _specs),
    st.builds(Move, st.just(1), _ids, st.integers(-1, 2)),
    st.builds(Prepare, st.just(1), _ids),
    st.builds(Commit, st.just(1), _ids),
    st.builds(Abort, st.just(1), _ids, st.just("why")),
    st.builds(Heartbeat, _runs),
    st.builds(Close, st.just(1), _runs),
    st.builds(RunLost, _runs, st.just("why")),
    st.builds(RankHello, _ranks, _epochs, st.one_of(st.none(), _leaders),
              st.integers(0, 2), st.integers(0, 6)),
    st.builds(
        RankReport, _ranks, _epochs, _ids, st.sampled_from(list(Stage)), st.integers(-1, 2),
        _errors, st.booleans(), _leaders,
    ),
    _good_reports,
    st.just(Tick()),
)  # fmt: skip


@given(
    st.sampled_from(list(Phase)[:-1]),
    st.lists(st.tuples(_events, st.sampled_from([0.0, 0.4, 3.0])), max_size=12),
)
@settings(max_examples=250, deadline=None)
def test_no_event_raises_and_only_placing_publishes(
    phase: Phase, events: list[tuple[LeaderEvent, float]]
) -> None:
    bench = ready() if phase is Phase.IDLE else ready().reach(phase)
    for event, wait_s in events:
        before = bench.state
        bench.now_s += wait_s
        bench.feed(event)
        after = bench.state
        if after.version != before.version:
            assert before.phase is Phase.PLACING
            assert after.phase is Phase.RESUMING
            assert isinstance(event, RankReport)
        assert (after.spec is None) == (after.phase is Phase.IDLE)
        assert len({a.request for a in bench.did if isinstance(a, Answer)}) <= 3
