"""Whole updates that go wrong: the old version whole, or a clear refusal, and then the next one."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from updating import (
    LIMIT_S,
    OPTIONS,
    Gate,
    attempt,
    connected,
    digests,
    engine_of,
    failed_refit,
    failing,
    faulty,
    only,
    outcomes,
    placements,
    refit,
    ways,
    weights,
)

from engine_adapter.fake import FakeEngine
from weightsync.errors import (
    DeadlineError,
    IntegrityError,
    MissingNameError,
    PeerLostError,
    ScopeError,
    TaintedError,
    UpdateFailedError,
    WeightSyncError,
)
from weightsync.link import EngineLink
from weightsync.messages import CommitRequest, HeartbeatRequest, PrepareRequest
from weightsync.receiver import JobsBy, Receiver, ReceiverHooks
from weightsync.sender import Sender
from weightsync.transports.loopback import Fault, LoopbackTransport
from weightsync.types import Outcome

__all__ = ["faulty"]

COMMITTED, ABORTED, TAINTED, UNKNOWN = Outcome


def serves(engine: FakeEngine, version: int | None, seed: int) -> None:
    assert engine.generate() == (version, digests(weights(seed)))


def refuses(engine: FakeEngine, words: str = "refuses") -> None:
    with pytest.raises(TaintedError, match=words):
        engine.generate()


def recovers(sender: Sender, engine: FakeEngine, version: int) -> None:
    """The next full update succeeds, whatever happened before."""
    refit(sender, version, weights(9))
    serves(engine, version, 9)


# --- bytes that go wrong on the way -----------------------------------------------------------------


@ways
def test_a_corrupt_byte_is_found(
    placement: str, contract: str, faulty: Callable[..., None]
) -> None:
    which = {"slots" if contract == "stream" else "reads": {}}
    engine = engine_of(0)
    # The first update passes: count what it takes to corrupt the second.
    first = 2 if contract == "direct" else 6
    which = {k: {first: Fault.CORRUPT} for k in which}
    faulty(**which)
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        refit(sender, 1, weights(1))
        report, error = attempt(sender, 2, weights(2))
        assert isinstance(error, UpdateFailedError)
        assert isinstance(error.__cause__, IntegrityError)
        assert re.search(r"what landed: 1 of 5 digests differ: '[abt]'", str(error))
        if placement == "staged":
            assert only(report).outcome is ABORTED
            serves(engine, 1, 1)
        else:
            assert only(report).outcome is TAINTED
            refuses(engine, "digests differ")
            partial = failing(lambda: refit(sender, 3, {"a": weights(3)["a"]}, scope=["a"]))
            assert isinstance(partial, ScopeError)
            assert "tainted" in str(partial)
        recovers(sender, engine, 3)


@placements
def test_a_segment_that_was_not_read_is_found(placement: str, faulty: Callable[..., None]) -> None:
    engine = engine_of(0)
    faulty(reads={2: Fault.DROP})
    with connected(engine, placement=placement, contract="direct") as (sender, _):
        refit(sender, 1, weights(1))
        error = failed_refit(sender, 2, weights(2))
        assert isinstance(error.__cause__, IntegrityError)
        recovers(sender, engine, 3)


@placements
def test_a_slot_that_never_arrives_runs_into_the_deadline(
    placement: str, faulty: Callable[..., None]
) -> None:
    engine = engine_of(0)
    faulty(slots={2: Fault.DROP})
    options = {"placement": placement, "contract": "stream", "deadline_s": 0.5, "num_slots": 8}
    with connected(engine, **options) as (sender, _):
        report, error = attempt(sender, 1, weights(1))
        assert error is not None
        assert only(report).outcome in (ABORTED, TAINTED)
        if only(report).outcome is ABORTED:
            serves(engine, None, 0)
        else:
            refuses(engine)
        recovers(sender, engine, 2)


@ways
def test_a_pair_that_breaks_is_lost_and_connected_again(
    placement: str, contract: str, faulty: Callable[..., None]
) -> None:
    engine = engine_of(0)
    faulty(**{"slots" if contract == "stream" else "reads": {1: Fault.LOSE_PEER}})
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        report, error = attempt(sender, 1, weights(1))
        assert error is not None
        assert only(report).outcome in (ABORTED, TAINTED)
        if only(report).outcome is ABORTED:
            serves(engine, None, 0)
        else:
            refuses(engine)
        recovers(sender, engine, 2)


def test_connecting_again_may_take_longer_than_the_engine_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer's former end is closed for a while before its next one is there."""
    engine = engine_of(0)
    with connected(engine) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        looked, opened = threading.Semaphore(0), LoopbackTransport.open_source
        watch = receiver._watch_peer

        def watched() -> None:
            watch()
            looked.release()

        def slow(self: LoopbackTransport, *args: Any) -> Any:
            for _ in range(3):
                assert looked.acquire(timeout=LIMIT_S)
            return opened(self, *args)

        monkeypatch.setattr(receiver, "_watch_peer", watched)
        monkeypatch.setattr(LoopbackTransport, "open_source", slow)
        sender._links[0].is_broken = True
        refit(sender, 2, weights(2))
        serves(engine, 2, 2)


# --- adapters that fail -----------------------------------------------------------------------------


class Saboteur(FakeEngine):
    """Raises a foreign error in the protocol call named by ``sabotage``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.sabotage: set[str] = set()
        super().__init__(*args, **options)


def _sabotaged(name: str) -> Any:
    original = getattr(FakeEngine, name)

    def call(self: Saboteur, *args: Any, **options: Any) -> Any:
        if name in self.sabotage:
            raise RuntimeError(f"sabotage in {name}")
        return original(self, *args, **options)

    return call


CALLS = (
    "fingerprint", "begin_update", "write", "prepare", "commit", "abort", "digest",
    "pause", "resume", "flush_cache", "refuse",
)  # fmt: skip
for _name in CALLS:
    setattr(Saboteur, _name, _sabotaged(_name))

#: What a failure in each call comes to (staged, in place).
COMES_TO = {
    "fingerprint": (ABORTED, ABORTED),
    "begin_update": (ABORTED, ABORTED),
    "pause": (TAINTED, ABORTED),
    "prepare": (ABORTED, TAINTED),
    "write": (TAINTED, TAINTED),
    "commit": (TAINTED, TAINTED),
    "flush_cache": (TAINTED, TAINTED),
    "digest": (TAINTED, TAINTED),
    "resume": (TAINTED, TAINTED),
}


@placements
@pytest.mark.parametrize("call", COMES_TO)
def test_an_adapter_that_fails(call: str, placement: str) -> None:
    engine = Saboteur(weights(0), opaque=("b",))
    with connected(engine, placement=placement) as (sender, _):
        refit(sender, 1, weights(1))
        engine.sabotage = {call}
        report, error = attempt(sender, 2, weights(2))
        assert f"sabotage in {call}" in str(error)
        outcome = COMES_TO[call][placement == "in_place"]
        assert only(report).outcome is outcome
        engine.sabotage = set()
        if outcome is ABORTED:
            serves(engine, 1, 1)
        else:
            refuses(engine, f"sabotage in {call}")
        recovers(sender, engine, 3)


@placements
@pytest.mark.parametrize("call", ["prepare", "begin_update"])
def test_an_abort_that_fails_as_well_refuses_before_any_step(call: str, placement: str) -> None:
    engine = Saboteur(weights(0))
    refusals: list[str | None] = []
    resume = engine.resume

    def resumed() -> None:
        refusals.append(engine.gate.refusal)
        resume()

    with connected(engine, placement=placement) as (sender, _):
        refit(sender, 1, weights(1))
        engine.resume = resumed  # type: ignore[method-assign]
        engine.sabotage = {call, "abort"}
        report, _ = attempt(sender, 2, weights(2))
        assert only(report).outcome is TAINTED
        assert refusals
        assert all(refusals), "no step could start in between"
        engine.sabotage = set()
        refuses(engine)
        recovers(sender, engine, 3)


def test_an_adapter_that_cannot_refuse_does_not_end_the_receiver(caplog: Any) -> None:
    engine = Saboteur(weights(0))
    with connected(engine) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        engine.sabotage = {"refuse", "commit"}
        report, error = attempt(sender, 2, weights(2))
        assert error is not None
        assert only(report).outcome in (TAINTED, UNKNOWN)
        engine.sabotage = set()
        recovers(sender, engine, 3)
        assert receiver.version == 3
    assert "could not refuse" in caplog.text


class Forgetful(FakeEngine):
    """Loads what it likes, not what it is given."""

    def write(self, name: str, tensor: Any) -> None:
        self._called("write")


class Meddling(FakeEngine):
    """Changes what landed while it makes derived tensors."""

    def commit(self, version: Any) -> None:
        super().commit(version)
        self.weights["a"][3, 4] += 1


@placements
def test_an_engine_that_ignores_what_it_is_given_is_found_out(placement: str) -> None:
    engine = Forgetful(weights(0), opaque=("b", "t"))
    with connected(engine, placement=placement) as (sender, (receiver,)):
        error = failed_refit(sender, 1, weights(1))
        assert isinstance(error.__cause__, IntegrityError)
        assert "live tensors after the update: 2 of 5 digests differ: 'b', 't'" in str(error)
        assert only(error.report).outcome is TAINTED
        assert receiver.version is None
        refuses(engine, "'b', 't'")


def test_an_engine_that_changes_what_landed_is_found_out() -> None:
    engine = Meddling(weights(0))
    with connected(engine) as (sender, _):
        error = failed_refit(sender, 1, weights(1))
        assert "live tensors after the update: 1 of 5 digests differ: 'a'" in str(error)
        refuses(engine)
    with connected(Meddling(weights(0)), verify="read") as (sender, _):
        refit(sender, 1, weights(1))  # asked for: only what was read is verified


@placements
def test_a_tensor_that_was_reallocated_is_an_error(placement: str) -> None:
    engine, kept = engine_of(0), weights(5)["a"]
    with connected(engine, placement=placement) as (sender, _):
        refit(sender, 1, weights(1))
        original = engine.weights["a"]
        engine.weights["a"] = kept
        error = failing(lambda: refit(sender, 2, weights(2)))
        assert re.search(
            r"at the beginning .* 1 tensors .* not where they were: \['a'\]", str(error)
        )
        engine.weights["a"] = original
        serves(engine, 1, 1)
        recovers(sender, engine, 3)


def test_a_tensor_that_moves_during_an_update_taints() -> None:
    class Moving(FakeEngine):
        def prepare(self) -> None:
            super().prepare()
            self.weights["a"] = self.weights["a"].copy()

    engine = Moving(weights(0))
    with connected(engine) as (sender, _):
        error = failed_refit(sender, 1, weights(1))
        assert "after an update, 1 tensors" in str(error)
        refuses(engine)


# --- hooks ------------------------------------------------------------------------------------------

HOOKS = {
    "on_begin": (ABORTED, ABORTED),
    "on_prepare": (ABORTED, TAINTED),
    "on_commit": (TAINTED, TAINTED),
}


@placements
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("abort_too", [False, True])
def test_hooks_that_raise(hook: str, abort_too: bool, placement: str) -> None:
    armed = False

    def fail(spec: Any) -> None:
        if armed:
            raise ValueError(f"not now, in version {spec.version}")

    options: dict[str, Any] = {hook: fail}
    if abort_too:
        options["on_abort"] = fail
    engine = engine_of(0)
    with connected(engine, hooks=ReceiverHooks(**options), placement=placement) as (sender, _):
        refit(sender, 1, weights(1))
        armed = True
        report, error = attempt(sender, 2, weights(2))
        armed = False
        assert "not now, in version 2" in str(error)
        outcome = HOOKS[hook][placement == "in_place"]
        assert only(report).outcome is outcome
        if outcome is ABORTED:
            serves(engine, 1, 1)
        else:
            refuses(engine, "not now")
        recovers(sender, engine, 3)


@placements
def test_hooks_are_called_in_order(placement: str) -> None:
    calls: list[str] = []
    engine = engine_of(0, opaque=())
    names = ("on_begin", "on_prepare", "on_commit", "on_abort")
    hooks = ReceiverHooks(
        **{n: lambda spec, n=n: calls.append(f"{n} {spec.version}") for n in names}
    )
    with connected(engine, hooks=hooks, placement=placement) as (sender, _):
        refit(sender, 1, weights(1))
        assert calls == ["on_begin 1", "on_prepare 1", "on_commit 1"]
        assert engine.calls == (
            ["begin_update", "prepare", "pause", "commit"]
            if placement == "staged"
            else ["pause", "begin_update", "prepare", "commit"]
        )
        attempt(sender, 2, {"a": weights(2)["a"]})
        assert calls[3:] == ["on_begin 2", "on_abort 2"]
        assert engine.calls[-1] == "abort"


# --- leaving, leases, losses ------------------------------------------------------------------------


@ways
def test_leaving_by_an_exception_aborts_and_the_note_says_so(placement: str, contract: str) -> None:
    engine = engine_of(0)
    with connected(engine, placement=placement, contract=contract) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        update = sender.update(version=2)

        def act() -> None:
            with update:
                update.send(weights(2))
                raise KeyError("loss")

        error = failing(act)
        assert isinstance(error, KeyError)
        outcome = ABORTED if placement == "staged" else TAINTED
        assert only(update.report).outcome is outcome
        (note,) = error.__notes__
        assert str(update.report) in note
        assert "left by KeyError: 'loss'" in note
        assert receiver.version == 1
        if outcome is ABORTED:
            serves(engine, 1, 1)
        recovers(sender, engine, 2)


@placements
def test_leaving_before_anything_was_sent_changes_nothing(placement: str) -> None:
    engine = engine_of(0)
    with connected(engine, placement=placement) as (sender, _):
        refit(sender, 1, weights(1))
        update = sender.update(version=2)
        with pytest.raises(KeyError), update:
            raise KeyError
        assert only(update.report).outcome is ABORTED
        serves(engine, 1, 1)
        recovers(sender, engine, 2)


def test_the_third_of_four_parts_fails() -> None:
    engine = engine_of(0)
    with connected(engine) as (sender, _):
        refit(sender, 1, weights(1))

        def parts() -> Any:
            for i, item in enumerate(weights(2).items()):
                if i == 3:
                    raise OSError("the shard is gone")
                yield item

        with pytest.raises(OSError, match="the shard is gone"):
            refit(sender, 2, parts())
        serves(engine, 1, 1)
        recovers(sender, engine, 2)


@placements
def test_a_lease_that_runs_out_aborts(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLink, "heartbeat", lambda self: None)
    engine, over = engine_of(0), threading.Event()
    hooks = ReceiverHooks(on_abort=lambda spec: over.set())
    with connected(engine, hooks=hooks, placement=placement, lease_s=0.4) as (sender, (receiver,)):
        update = sender.update(version=1)

        def act() -> None:
            with update:
                update.send(weights(1))
                assert over.wait(LIMIT_S)

        assert isinstance(failing(act), UpdateFailedError)
        assert re.search(r"no sign of life for 0\.4 s", str(update.report))
        outcome = ABORTED if placement == "staged" else TAINTED
        assert only(update.report).outcome is outcome
        assert receiver.version is None
        if outcome is ABORTED:
            serves(engine, None, 0)
        else:
            refuses(engine)
        recovers(sender, engine, 2)


class Stalling:
    """A receiver of this process that does not answer heartbeats until it may."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver, self.gate = receiver, Gate()

    def handle(self, request: Any) -> Any:
        if isinstance(request, HeartbeatRequest):
            self.gate()
        return self.receiver.handle(request)


def test_an_engine_that_does_not_answer_costs_another_no_lease() -> None:
    slow, quick = engine_of(0), engine_of(0)
    ended = threading.Event()
    with Receiver(slow) as first, Receiver(quick) as second:
        stalling = Stalling(first)
        options = {**OPTIONS, "lease_s": 0.6}
        beats = threading.Semaphore(0)
        handle = second.handle

        class Counting:
            @staticmethod
            def handle(request: Any) -> Any:
                if isinstance(request, HeartbeatRequest):
                    beats.release()
                return handle(request)

        with Sender.connect([stalling, Counting()], **options):
            stalling.gate.wait()
            for _ in range(5):  # more than two leases
                assert beats.acquire(timeout=LIMIT_S), "no heartbeat came through"
            assert second._leader.run is not None
            stalling.gate.opened.set()
            ended.set()


class Losing:
    """Carries a request out and loses the answer, once."""

    def __init__(self, receiver: Receiver, kind: type) -> None:
        self.receiver, self.kind, self.is_armed = receiver, kind, False

    def handle(self, request: Any) -> Any:
        answer = self.receiver.handle(request)
        if self.is_armed and isinstance(request, self.kind):
            self.is_armed = False
            raise PeerLostError("the answer was lost")
        return answer


@placements
def test_a_commit_whose_answer_was_lost_did_commit(placement: str) -> None:
    engine = engine_of(0)
    with Receiver(engine) as receiver:
        losing = Losing(receiver, CommitRequest)
        with Sender.connect([losing], **{**OPTIONS, "placement": placement}) as sender:
            losing.is_armed = True
            report = refit(sender, 1, weights(1))
            assert outcomes(report) == [COMMITTED]
            assert only(report).version == 1
            serves(engine, 1, 1)
            recovers(sender, engine, 2)


def test_a_prepare_whose_answer_was_lost_did_not_commit() -> None:
    engine = engine_of(0)
    with Receiver(engine) as receiver:
        losing = Losing(receiver, PrepareRequest)
        with Sender.connect([losing], **OPTIONS) as sender:
            losing.is_armed = True
            error = failed_refit(sender, 1, weights(1))
            assert outcomes(error.report) == [ABORTED]
            serves(engine, None, 0)
            recovers(sender, engine, 2)


def test_an_engine_lost_while_slots_are_filled_names_the_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Who notices first differs: a broken socket, a look at the process, the end of the channel.
    def lose(*_: Any) -> None:
        raise PeerLostError("engine e: the channel broke while sending")

    engine = engine_of(0)
    options = {**OPTIONS, "contract": "stream"}
    with Receiver(engine) as receiver, Sender.connect([receiver], **options) as sender:
        with monkeypatch.context() as patch:
            patch.setattr("weightsync.source_ends.fill_all", lose)
            error = failing(lambda: refit(sender, 1, weights(1)))
        assert "stage 'move'" in str(error)
        recovers(sender, engine, 2)


def test_an_engine_that_was_closed_is_lost_at_once() -> None:
    engine, other = engine_of(0), engine_of(0)
    options = {**OPTIONS, "connect_timeout_s": 0.3}
    with connected(engine, **options) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        address = receiver.url.removeprefix("http://")
        receiver.close()
        error = failing(lambda: refit(sender, 2, weights(2)))
        assert isinstance(error, PeerLostError | UpdateFailedError)
        # A restarted engine takes the address; it needs everything and gets it.
        with Receiver(other, listen=address):
            partial = failing(lambda: refit(sender, 3, {"a": weights(2)["a"]}, scope=["a"]))
            assert isinstance(partial, ScopeError)
            recovers(sender, other, 4)


def test_an_outcome_that_was_unknown_can_be_asked_for_again() -> None:
    gate, engine = Gate(), engine_of(0)
    hooks = ReceiverHooks(on_commit=gate)
    options = {"commit_timeout_s": 0.3, "deadline_s": 1.0}
    with connected(engine, hooks=hooks, **options) as (sender, _):
        report, error = attempt(sender, 1, weights(1))
        assert isinstance(error, UpdateFailedError)
        assert only(report).outcome in (UNKNOWN, TAINTED)
        gate.opened.set()
        assert outcomes(sender.resolve(report)) == [TAINTED]
        recovers(sender, engine, 2)


@placements
def test_a_pause_has_a_limit(placement: str) -> None:
    """Someone is within a step and stays there."""
    engine = engine_of(0)
    options = {"placement": placement, "commit_timeout_s": 0.3, "deadline_s": 0.3}
    with connected(engine, **options) as (sender, _):
        with engine.step():
            report, error = attempt(sender, 1, weights(1))
            assert error is not None
            assert re.search(r"'(pause|opening|placing)'", str(error) + only(report).detail)
        if placement == "in_place":
            serves(engine, None, 0)
        recovers(sender, engine, 2)


# --- several engines --------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("abort_too", [False, True])
def test_one_engine_of_three_fails(placement: str, contract: str, abort_too: bool) -> None:
    good, bad, also_good = engine_of(0), Saboteur(weights(0), opaque=("b",)), engine_of(0)
    options = {"placement": placement, "contract": contract}
    with connected(good, bad, also_good, **options) as (sender, receivers):
        refit(sender, 1, weights(1))
        bad.sabotage = {"prepare"} | ({"abort"} if abort_too else set())
        error = failed_refit(sender, 2, weights(2))
        bad.sabotage = set()
        is_tainted = abort_too or placement == "in_place"
        expected = [COMMITTED, TAINTED if is_tainted else ABORTED, COMMITTED]
        assert outcomes(error.report) == expected
        assert "1 of 3 engines did not commit" in str(error)
        assert receivers[1].url.removeprefix("http://") in str(error)
        assert [e.version for e in error.report.engines] == [2, None, 2]
        assert [r.version for r in receivers] == [2, 1, 2]
        serves(good, 2, 2)
        serves(also_good, 2, 2)
        if is_tainted:
            refuses(bad)
        else:
            serves(bad, 1, 1)
        refit(sender, 3, weights(3))
        for engine in (good, bad, also_good):
            serves(engine, 3, 3)


@ways
def test_one_engine_that_fails_early_does_not_stop_the_others(
    placement: str, contract: str
) -> None:
    good, bad = engine_of(0), Saboteur(weights(0))
    with connected(good, bad, placement=placement, contract=contract) as (sender, _):
        bad.sabotage = {"begin_update"}
        update = sender.update(version=1)

        def act() -> None:
            with update:
                for name, array in weights(1).items():  # moves go on after the first has failed
                    update.send({name: array})

        assert isinstance(failing(act), UpdateFailedError)
        assert update.report is not None
        assert outcomes(update.report) == [COMMITTED, ABORTED]
        serves(good, 1, 1)
        bad.sabotage = set()
        refit(sender, 2, weights(2))
        serves(bad, 2, 2)


def test_a_stream_that_breaks_on_one_engine_stops_only_that_one(
    faulty: Callable[..., None],
) -> None:
    good, bad = engine_of(0), engine_of(0)
    faulty(slots={3: Fault.LOSE_PEER})
    with connected(good, bad, contract="stream") as (sender, _):
        report, error = attempt(sender, 1, weights(1))
        assert isinstance(error, UpdateFailedError)
        assert sorted(outcomes(report)) == [ABORTED, COMMITTED]
        refit(sender, 2, weights(2))
        serves(good, 2, 2)
        serves(bad, 2, 2)


def test_engines_of_different_layouts_are_told_apart() -> None:
    full = engine_of(0)
    other = FakeEngine({n: a for n, a in weights(0).items() if n != "c"} | {"d": np.ones(2)})
    with connected(full, other) as (sender, _):
        error = failed_refit(sender, 1, weights(1))
        assert outcomes(error.report) == [COMMITTED, ABORTED]
        assert "'c'" in str(error)
        serves(full, 1, 1)


def test_all_engines_failing_alike_raises_at_once() -> None:
    with connected(engine_of(0), engine_of(0)) as (sender, _):
        error = failing(lambda: refit(sender, 1, {"nothing": np.ones(1)}))
        assert "'nothing'" in str(error)
        error = failed_refit(sender, 2, {"a": weights(1)["a"]})
        assert isinstance(error.__cause__, MissingNameError)
        assert outcomes(error.report) == [ABORTED, ABORTED]


def test_deadline_errors_name_the_engine() -> None:
    gate, engine = Gate(), engine_of(0)
    hooks = ReceiverHooks(on_prepare=gate)
    options = {"deadline_s": 0.3, "commit_timeout_s": 0.3}
    with connected(engine, hooks=hooks, **options) as (sender, (receiver,)):
        report, error = attempt(sender, 1, weights(1))
        gate.opened.set()
        assert error is not None
        assert isinstance(error.__cause__, DeadlineError)
        assert receiver.url.removeprefix("http://") in str(error)
        assert "'preparing'" in only(report).detail or "prepare" in str(error)
        recovers(sender, engine, 2)


# --- ends that come in the middle -------------------------------------------------------------------


@placements
def test_a_receiver_that_is_closed_within_an_update_leaves_no_pause_and_no_mix(
    placement: str,
) -> None:
    engine = engine_of(0)
    with connected(engine, placement=placement) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        update = sender.update(version=2)
        update.__enter__()
        update.send(weights(2))
        receiver.close()
        assert not engine.gate.is_paused
        if placement == "staged":
            serves(engine, 1, 1)
        else:
            refuses(engine, "the receiver was closed")
        with pytest.raises(UpdateFailedError):
            update.__exit__(None, None, None)


@placements
def test_a_loop_that_closes_its_receiver_within_an_update_goes_on(placement: str) -> None:
    engine = engine_of(0)
    receiver = Receiver(engine).start(JobsBy.POLL)
    options = {**OPTIONS, "placement": placement}
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(Sender.connect, [receiver.url], **options)
        with connecting.result(LIMIT_S) as sender:
            update = sender.update(version=1)
            update.__enter__()
            sending = pool.submit(update.send, weights(1))
            while not sending.done():
                receiver.poll(0.01)
            receiver.close()
            assert not engine.gate.is_paused
            if placement == "staged":
                serves(engine, None, 0)
            else:
                refuses(engine)


def test_a_receiver_is_closed_while_a_job_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.receiver._CLOSE_LIMIT_S", 0.3)
    gate, placed, engine = Gate(), threading.Event(), engine_of(0)
    monkeypatch.setattr(engine, "commit", lambda version: placed.set())
    hooks = ReceiverHooks(on_commit=gate)
    with connected(engine, hooks=hooks) as (sender, (receiver,)), ThreadPoolExecutor(1) as pool:
        running = pool.submit(attempt, sender, 1, weights(1))
        gate.wait()
        receiver.close()
        refuses(engine, "closed in the middle of an update")
        gate.opened.set()
        assert placed.wait(LIMIT_S)
        refuses(engine, "closed in the middle of an update")
        report, _ = running.result(LIMIT_S)
        assert only(report).outcome is UNKNOWN


def test_a_caller_in_this_process_hears_that_the_receiver_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weightsync.receiver._CLOSE_LIMIT_S", 0.3)
    gate, engine = Gate(), engine_of(0)
    with (
        Receiver(engine, hooks=ReceiverHooks(on_commit=gate)) as receiver,
        Sender.connect([receiver], **OPTIONS) as sender,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(attempt, sender, 1, weights(1))
        gate.wait()
        receiver.close()
        report, error = running.result(LIMIT_S)
        gate.opened.set()
        assert isinstance(error, UpdateFailedError)
        assert isinstance(error.__cause__, PeerLostError)
        assert only(report).outcome is UNKNOWN


def test_the_next_trainer_waits_for_what_is_being_given_up() -> None:
    gate, engine = Gate(), engine_of(0)
    with Receiver(engine, hooks=ReceiverHooks(on_abort=gate)) as receiver:
        first = Sender.connect([receiver.url], **OPTIONS)
        update = first.update(version=1)
        update.__enter__()
        update.send(weights(1))
        first.close()
        gate.wait()
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(Sender.connect, [receiver.url], **OPTIONS)
            with pytest.raises(FutureTimeout):
                connecting.result(0.3)
            gate.opened.set()
            with connecting.result(LIMIT_S) as second:
                recovers(second, engine, 1)


def test_a_transport_that_is_attached_too_late_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, opened, open_target = Gate(), [], LoopbackTransport.open_target

    def slow(self: LoopbackTransport, *args: Any) -> Any:
        opened.append(open_target(self, *args))
        gate()
        return opened[0]

    monkeypatch.setattr(LoopbackTransport, "open_target", slow)
    with Receiver(engine_of(0)) as receiver, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(Sender.connect, [receiver], **OPTIONS)
        gate.wait()
        receiver.close()
        assert opened[0].lost() is None
        gate.opened.set()
        with suppress(WeightSyncError):
            connecting.result(LIMIT_S).close()
        assert opened[0].lost() == "this end was closed"


@pytest.mark.parametrize(
    ("stage", "is_far"), [("prepare", False), ("commit", False), ("prepare_and_commit", True)]
)
@placements
def test_an_interrupt_while_an_update_ends_leaves_nothing_open(
    stage: str, is_far: bool, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(0)
    options = {**OPTIONS, "placement": placement}
    with (
        Receiver(engine) as receiver,
        Sender.connect([receiver.url if is_far else receiver], **options) as sender,
    ):
        refit(sender, 1, weights(1))
        update = sender.update(version=2)

        def interrupted(*_: Any) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(EngineLink, stage, interrupted)
        with pytest.raises(KeyboardInterrupt), update:
            update.send(weights(2))
        assert only(update.report).outcome is (ABORTED if placement == "staged" else TAINTED)
        recovers(sender, engine, 3)
