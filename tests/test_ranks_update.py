"""Updates between several ranks of each side: everything arrives, each rank checks its own, and one
transaction holds for all of them."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from rank_engines import Store, engine_ranks, job
from updating import OPTIONS, Arrays, digests, only, ways

from weightsync.errors import (
    DeadlineError,
    PeerLostError,
    UpdateFailedError,
    WeightSyncError,
)
from weightsync.ranks import answer_of, answers_of
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.transports.nixl_binding import NIXL_MODULES
from weightsync.types import Outcome

needs_nixl = pytest.mark.skipif(
    all(importlib.util.find_spec(name.partition(".")[0]) is None for name in NIXL_MODULES),
    reason="NIXL is not installed: pip install 'weightsync[p2p]'",
)


def weights(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "wide": rng.standard_normal((30, 50)).astype(np.float32),
        "tall": rng.integers(-99, 99, (70, 7)).astype(np.int8),
        "norm": rng.standard_normal(33).astype(np.float32),
        "scalar": np.array(rng.standard_normal()),
        "expert": rng.standard_normal((24, 16)).astype(np.float32),
    }


def served(ranks: list[Any], version: int | None, whole: Arrays) -> None:
    assert [r.holds(whole) for r in ranks] == [True] * len(ranks)
    assert [None if r.version is None else r.version.number for r in ranks] == [version] * len(
        ranks
    )


# --- one trainer rank, engines of several ------------------------------------------------------------


TRANSPORTS = ["loopback", "ipc", pytest.param("p2p", marks=needs_nixl)]


@ways
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_rank_of_an_engine_gets_its_share(
    transport: str, placement: str, contract: str
) -> None:
    ranks = engine_ranks(weights(0), 3)
    with job(ranks, transport=transport, placement=placement, contract=contract) as both:
        for version in (1, 2, 5):
            source = weights(version)
            (report,) = both.refit(version, [source])
            assert only(report).outcome is Outcome.COMMITTED
            served(ranks, version, source)
        held = sum(w.nbytes for rank in ranks for w in rank.weights.values())
        assert only(report).num_bytes == held, "nothing is sent that no rank holds"
        assert [r.version for r in both.receivers[0]] == [5] * 3


def test_the_root_of_an_update_does_not_depend_on_ranks() -> None:
    whole = weights(1)
    one, three = engine_ranks(weights(0), 1), engine_ranks(weights(0), 3)
    with job(one, three) as both:
        (report,) = both.refit(1, [whole])
    first, second = report.engines
    assert first.root == second.root


def test_engines_of_different_sizes_are_updated_together() -> None:
    engines = [engine_ranks(weights(0), size) for size in (1, 2, 3)]
    with job(*engines) as both:
        for version in (1, 2):
            (report,) = both.refit(version, [weights(version)])
            assert report.is_committed
            for ranks in engines:
                served(ranks, version, weights(version))


def test_a_partial_update_touches_only_what_it_names() -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks) as both:
        both.refit(1, [weights(1)])
        (report,) = both.refit(2, [{"expert": weights(2)["expert"]}], scope=["expert"])
        assert report.is_committed
        served(ranks, 2, {**weights(1), "expert": weights(2)["expert"]})


@pytest.mark.parametrize("fault", ["begin_update", "pause", "prepare"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_the_decision_aborts_all(fault: str, failing: int) -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, placement="staged") as both:
        both.refit(1, [weights(1)])
        ranks[failing].fail_in = fault
        ((report, error),) = both.attempt(2, [weights(2)])
        assert f"rank {failing}: the fake engine was told to fail in {fault}" in str(error)
        if fault == "pause":  # staged pauses after the decision: then it is tainted, all of it
            assert only(report).outcome is Outcome.TAINTED
            for rank in ranks:
                with pytest.raises(WeightSyncError, match="refuses"):
                    rank.generate()
        else:
            assert only(report).outcome is Outcome.ABORTED
            served(ranks, 1, weights(1))
        ranks[failing].fail_in = ""
        both.refit(3, [weights(3)])
        served(ranks, 3, weights(3))
        for rank in ranks:
            rank.generate()


def test_a_rank_that_lost_a_bit_is_found_by_its_own_manifest() -> None:
    """Also where another rank holds the same tensor whole."""
    ranks = engine_ranks(weights(0), 2)
    commit = ranks[1].commit

    def flips(version: Any) -> None:
        ranks[1].weights["norm"].view(np.uint8)[5] ^= 1
        commit(version)

    ranks[1].commit = flips  # type: ignore[method-assign]
    with job(ranks) as both:
        ((report, error),) = both.attempt(1, [weights(1)])
        assert only(report).outcome is Outcome.TAINTED
        assert "rank 1: live tensors after the update: 1 of 5 digests differ: 'norm'" in str(error)


def test_digests_of_live_weights_come_from_every_rank() -> None:
    from updating import LIMIT_S

    from weightsync.control import HttpClient
    from weightsync.messages import DigestRequest

    whole = weights(0)
    ranks = engine_ranks(whole, 2)
    with job(ranks) as both:
        client = HttpClient(both.receivers[0][0].url, None)
        found = client.call(DigestRequest(None, LIMIT_S), limit_s=LIMIT_S)["ranks"]
        client.close()
    assert len(found) == 2
    assert "expert" not in found[0]
    expected = digests(whole)
    assert int(found[1]["expert"], 16) == expected["expert"]
    wide = sum(int(rank["wide"], 16) for rank in found) % 2**64
    assert wide == expected["wide"], "parts of a tensor add up"


# --- trainers of several ranks ------------------------------------------------------------------------


def stages(whole: Arrays, num: int) -> list[Arrays]:
    """Each rank has some of the tensors, and all of them have one."""
    names = list(whole)
    parts = [{n: whole[n] for n in names[r::num]} for r in range(num)]
    return [{"norm": whole["norm"], **part} for part in parts]


@ways
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_rank_of_a_trainer_gives_its_part(
    transport: str, placement: str, contract: str
) -> None:
    ranks = engine_ranks(weights(0), 2)
    options = {"transport": transport, "placement": placement, "contract": contract}
    with job(ranks, num_trainers=3, **options) as both:
        for version in (1, 2, 5):
            whole = weights(version)
            reports = both.refit(version, stages(whole, 3))
            served(ranks, version, whole)
            assert reports[0] == reports[1] == reports[2]
        held = sum(w.nbytes for rank in ranks for w in rank.weights.values())
        assert only(reports[0]).num_bytes == held, "replicas are sent once"


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_ranks_update_in_one_call(num_trainers: int) -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, num_trainers=num_trainers, contract="direct") as both:
        for version in (1, 2):
            whole = weights(version)
            parts = stages(whole, num_trainers)
            reports = both.on_trainer_ranks(
                lambda rank, sender, v=version, p=parts: sender.update_weights(p[rank], version=v)
            )
            served(ranks, version, whole)
            assert reports == [reports[0]] * num_trainers
            assert only(reports[0]).outcome is Outcome.COMMITTED
        ranks[1].fail_in = "prepare"

        def failing(rank: int, sender: Any) -> BaseException:
            with pytest.raises(UpdateFailedError) as caught:
                sender.update_weights(weights(3), version=3)
            assert caught.value.report is not None
            return caught.value

        for error in both.on_trainer_ranks(failing):
            assert not error.report.is_committed  # type: ignore[attr-defined]


def test_several_trainer_ranks_update_several_engines() -> None:
    engines = [engine_ranks(weights(0), size) for size in (2, 1, 2)]
    with job(*engines, num_trainers=2) as both:
        for version in (1, 2):
            whole = weights(version)
            both.refit(version, stages(whole, 2))
            for ranks in engines:
                served(ranks, version, whole)


def test_generators_of_unequal_length_are_streamed_together() -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, num_trainers=3, bucket="1KiB") as both:
        for version in (1, 2):
            whole = weights(version)
            parts: list[Any] = [iter(part.items()) for part in stages(whole, 2)]
            parts[1] = iter([i for i in parts[1] if i[0] != "norm"])
            parts[0] = iter([i for i in parts[0] if i[0] != "norm"])
            both.refit(version, [*parts, {"norm": whole["norm"]}])
            served(ranks, version, whole)


def test_a_rank_may_have_nothing() -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, num_trainers=2) as both:
        both.refit(1, [{}, weights(1)])
        served(ranks, 1, weights(1))
        both.refit(2, [weights(2), {}])
        served(ranks, 2, weights(2))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank_aborts_the_update_on_all(failing: int) -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, num_trainers=2) as both:
        both.refit(1, stages(weights(1), 2))
        sources: list[Any] = stages(weights(2), 2)
        sources[failing] = ValueError("the loss is not a number")
        found = both.attempt(2, sources)
        assert isinstance(found[failing][1], ValueError)
        other = found[1 - failing][1]
        assert isinstance(other, WeightSyncError)
        assert "ValueError: the loss is not a number" in str(other)
        served(ranks, 1, weights(1))
        both.refit(3, stages(weights(3), 2))
        served(ranks, 3, weights(3))


def test_a_rank_that_fails_after_it_has_sent_aborts_the_update() -> None:
    ranks = engine_ranks(weights(0), 2)
    sources = stages(weights(1), 2)
    with job(ranks, num_trainers=2) as both:

        def act(rank: int, sender: Any) -> Any:
            try:
                with sender.update(1) as update:
                    update.send(sources[rank])
                    if rank == 1:
                        raise ValueError("too late")
            except Exception as error:
                return error
            return None

        first, second = both.on_trainer_ranks(act)
        assert "trainer rank 1 left the update by ValueError: too late" in str(first)
        assert isinstance(second, ValueError)
        served(ranks, None, weights(0))
        both.refit(2, stages(weights(2), 2))


def test_an_engine_that_fails_is_reported_on_every_rank() -> None:
    good, bad = engine_ranks(weights(0), 2), engine_ranks(weights(0), 2)
    with job(good, bad, num_trainers=2) as both:
        bad[1].fail_in = "prepare"
        found = both.attempt(1, stages(weights(1), 2))
        for report, error in found:
            assert isinstance(error, UpdateFailedError)
            assert [e.outcome for e in report.engines] == [Outcome.COMMITTED, Outcome.ABORTED]
        served(good, 1, weights(1))
        served(bad, None, weights(0))
        bad[1].fail_in = ""
        both.refit(2, stages(weights(2), 2))
        served(bad, 2, weights(2))


def test_ranks_that_hold_different_forms_of_a_tensor_are_named() -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, num_trainers=2) as both:
        one, two = stages(weights(1), 2)
        two["norm"] = two["norm"].astype(np.float64)
        ((_, error), _) = both.attempt(1, [one, two])
        assert "'norm': ranks 0 and 1 disagree about its form" in str(error)
        both.refit(2, stages(weights(2), 2))


def test_a_rank_that_does_not_come_is_named() -> None:
    store = Store()
    with pytest.raises(DeadlineError, match="trainer rank 1"):
        Sender.connect(
            ["http://127.0.0.1:1"], rank=0, world_size=2, store=store,
            **{**OPTIONS, "connect_timeout_s": 0.3},
        )  # fmt: skip
    (rank,) = engine_ranks(weights(0), 1)
    rank._layout = engine_ranks(weights(0), 2)[0]._layout
    lonely = Receiver(rank, rank=0, world_size=2, store=Store(), join_timeout_s=0.3)
    with pytest.raises(DeadlineError, match="rank 1 of the engine"):
        lonely.start()
    late = Receiver(
        engine_ranks(weights(0), 2)[1], rank=1, world_size=2, store=Store(), join_timeout_s=0.3
    )
    with pytest.raises(DeadlineError, match="join"):
        late.start()


def test_a_rank_that_is_late_to_send_is_named() -> None:
    ranks = engine_ranks(weights(0), 1)
    with job(ranks, num_trainers=2, deadline_s=0.5) as both:
        with pytest.raises(DeadlineError, match="trainer rank 1"), both.senders[0].update(1) as u:
            u.send(weights(1))
        served(ranks, None, weights(0))


def test_an_update_that_rank_0_gave_up_before_another_rank_entered_it_is_over() -> None:
    """Both count on: the next update is the same one on both."""
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, num_trainers=2) as both:
        both.refit(1, stages(weights(1), 2))
        first, second = both.senders
        with pytest.raises(ValueError, match="no loss"), first.update(2):
            raise ValueError("no loss")
        with pytest.raises(WeightSyncError, match="ValueError: no loss"), second.update(2) as late:
            late.send(weights(2))
        both.refit(3, stages(weights(3), 2))
        served(ranks, 3, weights(3))


def test_several_sends_of_all_ranks_add_up() -> None:
    ranks = engine_ranks(weights(0), 2)
    with job(ranks, num_trainers=3) as both:
        for version in range(1, 6):
            whole = weights(version)
            parts = stages(whole, 3)

            def act(rank: int, sender: Any, version: int = version, parts: Any = parts) -> None:
                with sender.update(version) as update:
                    update.send({n: a for n, a in parts[rank].items() if n != "norm"})
                    update.send({"norm": parts[rank]["norm"]})

            both.on_trainer_ranks(act)
            served(ranks, version, whole)


def test_a_deadline_of_another_rank_is_told_as_it_is() -> None:
    future: Future[dict[str, Any]] = Future()
    future.set_exception(DeadlineError("engine rank 3", "attach", 5.0, 5.1))
    with pytest.raises(DeadlineError, match="engine rank 3"):
        answer_of(future, "trainer rank 1", "attach", 60.0)


def test_the_rank_that_failed_is_named_though_another_hangs() -> None:
    hanging: Future[dict[str, Any]] = Future()
    failed: Future[dict[str, Any]] = Future()
    failed.set_exception(PeerLostError("trainer rank 2: its process ended"))
    with pytest.raises(PeerLostError, match="rank 2"):
        answers_of({1: hanging, 2: failed}, "trainer", "move", 60.0)
    with pytest.raises(DeadlineError, match="trainer rank 1"):
        answers_of({1: hanging}, "trainer", "move", 0.01)
