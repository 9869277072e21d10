"""A rank's transitions, one by one, and that no event in any reachable state breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import IntegrityError, ScopeError, SessionError
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
    Scope,
    SessionSpec,
    Stage,
    StartJob,
    Tick,
    Verify,
    Version,
    Welcome,
)
from weightsync.session_rank import RankPhase, RankState, start_rank, step_rank
from weightsync.types import Placement

SPEC = SessionSpec("s1", "run", 1, Scope(), Placement.STAGED, 20.0, 5.0)
PARTIAL = replace(SPEC, scope=Scope(frozenset("a")))
LEASE_S = 4.0
V1 = Version("run", 1)


class Bench:
    """A rank under test, its clock, its leader's numbering, and what it did."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.seq = 0
        self.state: RankState
        self.state, self.did = start_rank(1, "e1", LEASE_S, self.now_s)

    def feed(self, event: RankEvent) -> list[RankAction]:
        self.state, self.did = step_rank(self.state, event, self.now_s)
        return self.did

    def order(self, order: Order, **stamp: Any) -> list[RankAction]:
        self.seq += 1
        stamped: dict[str, Any] = {"leader_epoch": "L1", "rank_epoch": "e1", "seq": self.seq}
        stamped |= stamp
        return self.feed(replace(order, **stamped))

    def welcome(self, serve: bool = True) -> Bench:
        self.order(Welcome("L1", serve, nonce=self.state.nonce, challenge=3))
        return self

    def done(self, job: Job, session_id: str = "s1", **also: Any) -> list[RankAction]:
        return self.feed(JobDone(job, session_id, **also))

    def reach(self, phase: RankPhase, spec: SessionSpec = SPEC) -> Bench:
        sid = spec.session_id
        way: list[tuple[RankPhase, Order, Job]] = [
            (RankPhase.OPEN, Open(spec), Job.OPEN),
            (RankPhase.PREPARED, Verify(sid, {}), Job.PREPARE),
            (RankPhase.PLACED, Place(sid), Job.PLACE),
            (RankPhase.IDLE, Resume(sid, V1), Job.RESUME),
        ]
        for reached, order, job in way:
            self.order(order)
            self.done(job, sid, touched=job is Job.PLACE)
            if reached is phase:
                break
        assert self.state.phase is phase
        return self

    def start(self, order: Order) -> Bench:
        self.order(order)
        assert self.state.running is not None
        return self

    def of(self, kind: type) -> list[Any]:
        return [a for a in self.did if isinstance(a, kind)]

    def report(self) -> RankReport:
        [report] = self.of(RankReport)
        assert isinstance(report, RankReport)
        return report

    def job(self) -> StartJob:
        [job] = self.of(StartJob)
        assert isinstance(job, StartJob)
        return job


def idle() -> Bench:
    return Bench().welcome()


HELD = [RankPhase.OPEN, RankPhase.PREPARED, RankPhase.PLACED]


class TestJoining:
    def test_it_refuses_and_says_hello_until_it_is_welcomed(self) -> None:
        bench = Bench()
        assert bench.of(Refuse) == [Refuse("joining the engine")]
        assert bench.of(RankHello) == [RankHello(1, "e1")]
        assert bench.feed(Tick()) == [RankHello(1, "e1")]
        bench.welcome()
        assert bench.of(Refuse) == [Refuse(None)]
        assert bench.of(RankHello) == [RankHello(1, "e1", "L1", 1, 3)]

    def test_without_the_engines_version_it_goes_on_refusing(self) -> None:
        bench = Bench().welcome(serve=False)
        assert "a full update is needed" in str(bench.state.refusal)

    def test_a_welcome_that_answers_an_older_hello_is_not_taken(self) -> None:
        bench = idle()
        bench.order(Welcome("L0", True, nonce=0), leader_epoch="L0")
        assert bench.state.leader_epoch == "L1"
        assert not bench.did

    def test_a_welcome_that_comes_again_is_confirmed_again(self) -> None:
        bench = idle()
        bench.order(Welcome("L1", True, nonce=0, challenge=8))
        assert bench.did == [RankHello(1, "e1", "L1", 1, 8)]

    @pytest.mark.parametrize("stamp", [{"leader_epoch": "L2"}, {"rank_epoch": "e0"}])
    @pytest.mark.parametrize("phase", [RankPhase.IDLE, *HELD])
    def test_a_stranger_is_greeted_and_not_obeyed(
        self, phase: RankPhase, stamp: dict[str, str]
    ) -> None:
        bench = idle().reach(phase)
        before = bench.state
        bench.order(Discard("s1", "mixed"), **stamp)
        assert bench.state == before
        assert bench.did == [RankHello(1, "e1", "L1", 1, 3)]

    @pytest.mark.parametrize("phase", HELD)
    def test_a_new_leaders_welcome_ends_what_the_former_had_opened(self, phase: RankPhase) -> None:
        bench = idle().reach(phase)
        bench.order(Welcome("L2", False, nonce=1), leader_epoch="L2")
        assert bench.state.refusal is not None
        assert bench.job().job is Job.DISCARD
        bench.order(Open(SPEC), leader_epoch="L2")  # even one of the same name
        bench.done(Job.DISCARD)
        assert bench.report().leader_epoch == "L1"
        assert bench.job().job is Job.OPEN
        bench.done(Job.OPEN)
        assert bench.report().leader_epoch == "L2"

    def test_what_the_leader_says_of_the_engine_binds_at_once(self) -> None:
        bench = idle()
        bench.order(Ping(), refusal="rank 0 is gone")
        assert bench.did == [Refuse("rank 0 is gone")]
        bench.order(Ping())
        assert bench.did == [Refuse(None)]

    def test_an_overtaken_order_is_dropped(self) -> None:
        bench = idle().reach(RankPhase.IDLE)
        before = bench.state
        bench.order(Open(replace(SPEC, session_id="s0")), seq=1)
        assert (bench.state, bench.did) == (before, [])


class TestStages:
    @pytest.mark.parametrize(
        ("phase", "order", "job", "stage"),
        [
            (RankPhase.IDLE, Open(SPEC), Job.OPEN, Stage.OPEN),
            (RankPhase.OPEN, Pull("s1", 2, {}), Job.MOVE, Stage.MOVE),
            (RankPhase.OPEN, Verify("s1", {}), Job.PREPARE, Stage.PREPARE),
            (RankPhase.PREPARED, Place("s1"), Job.PLACE, Stage.PLACE),
            (RankPhase.PLACED, Resume("s1", V1), Job.RESUME, Stage.RESUME),
        ],
    )
    def test_an_order_is_done_once_and_reported_each_time(
        self, phase: RankPhase, order: Order, job: Job, stage: Stage
    ) -> None:
        bench = idle() if phase is RankPhase.IDLE else idle().reach(phase)
        bench.order(order)
        assert bench.job().job is job
        assert not bench.order(order)
        bench.done(job)
        first = bench.report()
        assert (first.stage, first.error, first.leader_epoch) == (stage, None, "L1")
        bench.order(order)
        assert bench.did == [first]

    @pytest.mark.parametrize(
        ("phase", "order"),
        [
            (RankPhase.OPEN, Place("s1")),
            (RankPhase.OPEN, Resume("s1", V1)),
            (RankPhase.PREPARED, Resume("s1", V1)),
            (RankPhase.PREPARED, Pull("s1", 2, {})),
            (RankPhase.PLACED, Verify("s1", {})),
        ],
    )
    def test_an_order_out_of_turn_does_nothing(self, phase: RankPhase, order: Order) -> None:
        bench = idle().reach(phase)
        bench.order(order)
        assert not bench.did
        assert bench.state.phase is phase

    @pytest.mark.parametrize(
        ("phase", "order", "job"),
        [
            (RankPhase.OPEN, Pull("s1", 2, {}), Job.MOVE),
            (RankPhase.OPEN, Verify("s1", {}), Job.PREPARE),
            (RankPhase.PREPARED, Place("s1"), Job.PLACE),
        ],
    )
    def test_a_failure_stays_one(self, phase: RankPhase, order: Order, job: Job) -> None:
        bench = idle().reach(phase).start(order)
        bench.done(job, error=IntegrityError("differs"), touched=True)
        first = bench.report()
        assert isinstance(first.error, IntegrityError)
        assert first.touched
        bench.order(order)
        assert bench.did == [first]

    @pytest.mark.parametrize("order", [Pull("s7", 1, {}), Verify("s7", {}), Place("s7")])
    def test_a_session_that_is_not_held(self, order: Order) -> None:
        bench = idle()
        bench.order(order)
        assert isinstance(bench.report().error, SessionError)
        assert "'s7'" in str(bench.report().error)

    def test_a_lost_report_of_resuming_is_repeated_on_a_ping(self) -> None:
        bench = idle().reach(RankPhase.IDLE)
        bench.order(Ping("s1"))
        assert bench.report().stage is Stage.RESUME
        assert bench.report().error is None

    def test_a_partial_session_does_not_open_on_a_tainted_rank(self) -> None:
        bench = Bench().welcome(serve=False)
        bench.order(Open(PARTIAL))
        assert isinstance(bench.report().error, ScopeError)
        assert bench.report().tainted is not None
        assert bench.state.spec is None
        assert not bench.of(StartJob)

    def test_a_full_session_clears_the_taint_when_it_resumes(self) -> None:
        bench = Bench().welcome(serve=False).reach(RankPhase.PLACED)
        assert bench.state.refusal is not None
        bench.order(Resume("s1", V1))
        assert bench.job().version == V1
        bench.done(Job.RESUME)
        assert bench.state.refusal is None

    def test_a_taint_that_comes_while_it_resumes_stays(self) -> None:
        bench = idle().reach(RankPhase.PLACED).start(Resume("s1", V1))
        bench.order(Discard("s1", "rank 0 failed"))
        assert bench.of(Refuse) == [Refuse("rank 0 failed")]
        assert bench.of(CancelJob)
        bench.done(Job.RESUME)
        assert bench.state.refusal == "rank 0 failed"

    @pytest.mark.parametrize("event", [JobDone(Job.MOVE, "s1"), JobDone(Job.OPEN, "s0")])
    def test_the_end_of_a_job_that_does_not_run_is_nothing(self, event: JobDone) -> None:
        bench = idle().start(Open(SPEC))
        assert not bench.feed(event)
        assert bench.state.running is not None


class TestGivingUp:
    @pytest.mark.parametrize("phase", [RankPhase.OPEN, RankPhase.PREPARED])
    def test_untouched_it_serves_the_old_version_again(self, phase: RankPhase) -> None:
        bench = idle().reach(phase)
        bench.order(Discard("s1", None))
        assert bench.job().taint is None
        bench.done(Job.DISCARD)
        report = bench.report()
        assert (report.stage, report.touched, report.tainted) == (Stage.ABORT, False, None)
        assert bench.state.refusal is None
        bench.order(Discard("s1", None))
        assert bench.did == [report]

    def test_touched_it_is_tainted(self) -> None:
        bench = idle().reach(RankPhase.OPEN).start(Pull("s1", 1, {}))
        bench.order(Discard("s1", None))
        assert bench.of(CancelJob)
        assert not bench.of(StartJob)  # memory is not quiet before the job has ended
        bench.done(Job.MOVE, error=SessionError("cancelled"), touched=True)
        assert bench.job().taint is not None
        assert bench.state.refusal is not None
        bench.done(Job.DISCARD)
        assert bench.report().touched
        assert bench.report().tainted is not None
        assert "live weights" in str(bench.state.refusal)

    def test_a_job_that_succeeds_after_all_is_not_reported_as_done(self) -> None:
        bench = idle().reach(RankPhase.OPEN).start(Verify("s1", {}))
        bench.order(Discard("s1", None))
        bench.done(Job.PREPARE)
        assert "gave the session up" in str(bench.report().error)
        assert bench.job().job is Job.DISCARD

    def test_failing_to_give_up_taints(self) -> None:
        bench = idle().reach(RankPhase.OPEN).start(Discard("s1", None))
        bench.done(Job.DISCARD, error=SessionError("stuck"))
        assert "stuck" in str(bench.report().tainted)
        assert "stuck" in str(bench.state.refusal)
        assert bench.state.phase is RankPhase.IDLE

    def test_another_session_ends_the_one_that_is_held(self) -> None:
        bench = idle().reach(RankPhase.OPEN)
        bench.order(Open(replace(SPEC, session_id="s2")))
        assert bench.job().job is Job.DISCARD
        bench.done(Job.DISCARD)
        assert bench.job().spec.session_id == "s2"

    @pytest.mark.parametrize("phase", HELD)
    @pytest.mark.parametrize("session_id", [None, "s2"])
    def test_a_ping_without_it_ends_the_session_that_is_held(
        self, phase: RankPhase, session_id: str | None
    ) -> None:
        bench = idle().reach(phase)
        bench.order(Ping(session_id))
        assert bench.job().job is Job.DISCARD
        assert (bench.job().taint is None) == (phase is not RankPhase.PLACED)

    def test_a_session_that_was_given_up_does_not_open_again(self) -> None:
        bench = idle().reach(RankPhase.OPEN).start(Discard("s1", None))
        bench.done(Job.DISCARD)
        bench.order(Open(SPEC))
        assert isinstance(bench.report().error, SessionError)

    def test_a_discard_of_a_session_never_seen_is_reported(self) -> None:
        bench = idle()
        bench.order(Discard("s1", None))
        assert bench.report().stage is Stage.ABORT
        assert bench.report().error is None


class TestLostLeader:
    @pytest.mark.parametrize("phase", [RankPhase.PREPARED, RankPhase.PLACED])
    def test_a_prepared_rank_refuses_and_waits(self, phase: RankPhase) -> None:
        bench = idle().reach(phase)
        bench.now_s += LEASE_S
        bench.feed(Tick())
        assert bench.of(Refuse) == [
            Refuse("the leader of this engine is silent in the middle of an update")
        ]
        assert bench.state.phase is phase
        assert not bench.of(StartJob)
        bench.order(Ping("s1"))
        assert bench.state.refusal is None
        assert bench.state.phase is phase

    def test_a_rank_that_is_not_prepared_gives_up(self) -> None:
        bench = idle().reach(RankPhase.OPEN).start(Verify("s1", {}))
        bench.now_s += LEASE_S
        bench.feed(Tick())
        assert bench.of(CancelJob)
        bench.done(Job.PREPARE)
        assert bench.report().error is not None
        bench.done(Job.DISCARD)
        assert bench.state.spec is None
        bench.order(Verify("s1", {}))
        assert isinstance(bench.report().error, SessionError)

    def test_without_a_session_silence_means_nothing(self) -> None:
        bench = idle()
        bench.now_s += 100 * LEASE_S
        assert not bench.feed(Tick())


# --- totality ---------------------------------------------------------------------------------------

_ids = st.sampled_from(["s1", "s2"])
_specs = st.sampled_from([SPEC, PARTIAL, replace(SPEC, session_id="s2")])
_stamps: dict[str, Any] = {
    "leader_epoch": st.sampled_from(["L1", "L1", "L1", "L2"]),
    "rank_epoch": st.sampled_from(["", "e1", "e1", "e0"]),
    "seq": st.integers(0, 300),
    "refusal": st.sampled_from([None, None, "why"]),
}
_orders = st.one_of(
    st.builds(Open, _specs, **_stamps),
    st.builds(Pull, _ids, st.integers(0, 2), st.just({}), **_stamps),
    st.builds(Verify, _ids, st.just({}), **_stamps),
    st.builds(Place, _ids, **_stamps),
    st.builds(Resume, _ids, st.just(V1), **_stamps),
    st.builds(Discard, _ids, st.sampled_from([None, "mixed"]), **_stamps),
    st.builds(Ping, st.one_of(st.none(), _ids), **_stamps),
    st.builds(
        Welcome, st.sampled_from(["L1", "L2"]), st.booleans(), st.integers(0, 3),
        rank_epoch=_stamps["rank_epoch"], seq=_stamps["seq"],
    ),
)  # fmt: skip
_jobs = st.builds(
    JobDone,
    st.sampled_from(list(Job)),
    _ids,
    st.sampled_from([None, None, IntegrityError("x")]),
    st.booleans(),
)


@given(
    st.sampled_from(list(RankPhase)),
    st.lists(
        st.tuples(st.one_of(_orders, _jobs, st.just(Tick())), st.sampled_from([0.0, 1.0, 5.0])),
        max_size=15,
    ),
)
@settings(max_examples=250, deadline=None)
def test_no_event_raises_and_jobs_never_overlap(
    phase: RankPhase, events: list[tuple[RankEvent, float]]
) -> None:
    bench = Bench() if phase is RankPhase.JOINING else idle()
    if phase in HELD:
        bench.reach(phase)
    for event, wait_s in events:
        before = bench.state
        bench.now_s += wait_s
        bench.feed(event)
        after = bench.state
        if bench.of(StartJob):
            assert before.running is None or after.running is not before.running
            assert bench.job() is after.running
        if before.running is not None and not isinstance(event, JobDone):
            assert after.running is before.running
        refusals = bench.of(Refuse)
        assert [r.reason for r in refusals] == (
            [after.refusal] if after.refusal != before.refusal else []
        )
        # Written bytes never go unnoticed: they are still of the session, or they taint.
        if before.touched and after.spec is None:
            is_resumed = before.running is not None and before.running.job is Job.RESUME
            assert is_resumed or after.tainted is not None
