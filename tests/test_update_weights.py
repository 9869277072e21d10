"""A whole update in one call: in one exchange where that can be, stage by stage elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_stages import Listening
from updating import (
    OPTIONS,
    Gate,
    connected,
    digests,
    engine_of,
    faulty,
    only,
    outcomes,
    placements,
    refit,
    weights,
)

from engine_adapter.fake import FakeEngine
from weightsync.control import HttpClient
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    IntegrityError,
    MissingNameError,
    PeerLostError,
    SessionError,
    UnknownNameError,
    UpdateFailedError,
    VersionError,
    WeightSyncError,
)
from weightsync.messages import ManifestRequest, Request, StagesRequest, name_of
from weightsync.rank_work import _JOBS, RankWork
from weightsync.receiver import Receiver, ReceiverHooks
from weightsync.sender import Sender, Update
from weightsync.session import Job
from weightsync.transports.loopback import Fault
from weightsync.types import Contract, Outcome

__all__ = ["faulty"]

ALL = "begin and move and prepare and commit"
DIRECT = {**OPTIONS, "contract": "direct"}


@pytest.fixture(autouse=True, params=["with the rest", "apart"])
def manifests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How manifests travel: those of many tensors by themselves, while the engine works."""
    found = str(request.param)
    monkeypatch.setattr("weightsync.link._FEW_TENSORS", 0 if found == "apart" else 100)
    return found


def asked(receiver: Listening) -> list[str]:
    return [name for name in receiver.stages() if name != "manifest"]


def push(sender: Sender, version: int, source: Any = None, **more: Any) -> Any:
    source = weights(version) if source is None else source
    return sender.update_weights(source, version=version, **more)


def failed(sender: Sender, version: int, source: Any = None) -> UpdateFailedError:
    with pytest.raises(UpdateFailedError) as caught:
        push(sender, version, source)
    return caught.value


def use_client(sender: Sender, client: HttpClient) -> None:
    (link,) = sender._links
    link.client.close()
    link.client = client


# --- how it is asked for ----------------------------------------------------------------------------


@placements
def test_one_trainer_and_one_engine_need_one_exchange(placement: str) -> None:
    engine = engine_of(0)
    with (
        Listening(engine) as receiver,
        Sender.connect([receiver.url], placement=placement, **DIRECT) as sender,
    ):
        for version in (1, 2):
            report = only(push(sender, version))
            assert asked(receiver) == [ALL]
            assert engine.generate() == (version, digests(weights(version)))
            assert {"begin", "move", "prepare", "commit"} <= report.phases.keys()
            assert (report.num_tensors, report.contract) == (5, Contract.DIRECT)
            assert report.num_bytes == sum(np.asarray(a).nbytes for a in weights(version).values())
            assert report.version == version
        assert report.root == only(refit(sender, 3, weights(2))).root, "the same bytes"


def test_what_one_exchange_says_of_prepare_is_known_when_bytes_move(
    monkeypatch: pytest.MonkeyPatch, manifests: str
) -> None:
    if manifests == "apart":
        pytest.skip("it may come a little later")
    seen: list[tuple[bool, bool]] = []
    move = RankWork._do_move

    def moving(this: RankWork, job: Any, token: Any) -> None:
        session_id, manifest = this._foreseen
        seen.append((session_id == job.spec.session_id, "root" in manifest))
        move(this, job, token)

    monkeypatch.setattr("weightsync.rank_work._JOBS", {**_JOBS, Job.MOVE: moving})
    with connected(engine_of(0), **DIRECT) as (sender, _):
        push(sender, 1)
    assert seen == [(True, True)]


@pytest.mark.parametrize("poll_s", [5.0, 0.1])
def test_manifests_of_many_tensors_come_while_the_engine_works(
    poll_s: float, manifests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepare waits for them, if need be over several exchanges."""
    monkeypatch.setattr("weightsync.control.POLL_S", poll_s)
    gate, engine = Gate(), engine_of(0)
    make = Update._manifests

    def late(*args: Any) -> Any:
        if manifests == "apart":
            gate()
        return make(*args)

    with Listening(engine) as receiver, Sender.connect([receiver.url], **DIRECT) as sender:
        push(sender, 1)
        monkeypatch.setattr(Update, "_manifests", late)
        threading.Timer(0.3, gate.opened.set).start()
        push(sender, 2)
        assert receiver.heard.count("manifest") == (2 if manifests == "apart" else 0)
        is_asked_again = "prepare and commit" in receiver.heard
        assert is_asked_again == (manifests == "apart" and poll_s == 0.1)
        assert engine.generate() == (2, digests(weights(2)))


def test_a_part_of_the_model() -> None:
    engine = engine_of(0)
    with connected(engine, **DIRECT) as (sender, _):
        push(sender, 1)
        push(sender, 2, {"a": weights(2)["a"]}, scope=["a"])
        assert engine.generate() == (2, digests({**weights(1), "a": weights(2)["a"]}))


def test_what_is_streamed_is_asked_for_stage_by_stage() -> None:
    engine = engine_of(0)
    with (
        Listening(engine) as receiver,
        Sender.connect([receiver.url], **{**OPTIONS, "contract": "stream"}) as sender,
    ):
        push(sender, 1)
        assert asked(receiver) == ["begin", "move", "prepare and commit"]
        assert engine.generate() == (1, digests(weights(1)))


def test_a_generator_has_parts_of_which_nobody_knows_the_last() -> None:
    engine = engine_of(0)
    with (
        Listening(engine) as receiver,
        Sender.connect([receiver.url], **{**OPTIONS, "contract": "auto"}) as sender,
    ):
        push(sender, 1, ((n, a) for n, a in weights(1).items()))
        stages = asked(receiver)
        assert (stages[0], stages[-1]) == ("begin", "prepare and commit")
        assert engine.generate() == (1, digests(weights(1)))


def test_several_engines() -> None:
    engines = [engine_of(seed) for seed in range(3)]
    with connected(*engines, **DIRECT) as (sender, _):
        report = push(sender, 1)
        assert outcomes(report) == [Outcome.COMMITTED] * 3
        assert [e.generate() for e in engines] == [(1, digests(weights(1)))] * 3


def test_an_engine_of_this_process() -> None:
    engine = engine_of(0)
    with Receiver(engine) as receiver, Sender.connect([receiver], **DIRECT) as sender:
        assert only(push(sender, 1)).outcome is Outcome.COMMITTED
        assert engine.generate() == (1, digests(weights(1)))


def test_an_engine_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    described = Receiver._description

    def former(self: Receiver) -> dict[str, Any]:
        return {k: v for k, v in described(self).items() if k != "joins_stages"}

    monkeypatch.setattr(Receiver, "_description", former)
    with (
        Listening(engine_of(0)) as receiver,
        Sender.connect([receiver.url], **DIRECT) as sender,
    ):
        push(sender, 1)
        assert asked(receiver) == ["begin", "move", "prepare", "commit"]


def test_between_updates_of_the_other_kind() -> None:
    engine = engine_of(0)
    with connected(engine, **DIRECT) as (sender, _):
        for version in range(1, 7):
            (push if version % 2 else lambda s, v: refit(s, v, weights(v)))(sender, version)
            assert engine.generate() == (version, digests(weights(version)))


# --- what goes wrong --------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_said_before_anything_is_asked() -> None:
    engine = engine_of(0)
    with (
        Listening(engine) as receiver,
        Sender.connect([receiver.url], **DIRECT) as sender,
    ):
        push(sender, 1)
        asked(receiver)
        with pytest.raises(UnknownNameError):
            push(sender, 2, {**weights(2), "aa": np.zeros(3)})
        with pytest.raises(ConfigError):
            push(sender, -1, weights(2))
        with sender.update(version=2) as update:
            with pytest.raises(SessionError, match="is open; leave it first"):
                push(sender, 3, weights(3))
            update.send(weights(2))
        assert asked(receiver) == ["begin and move", "prepare and commit"]
        assert engine.generate() == (2, digests(weights(2)))


def test_a_version_that_does_not_rise() -> None:
    engine = engine_of(0)
    with connected(engine, **DIRECT) as (sender, _):
        push(sender, 5)
        error = failed(sender, 4)
        assert isinstance(error.__cause__, VersionError)
        assert only(error.report).outcome is Outcome.ABORTED, "it was never begun"
        assert engine.generate() == (5, digests(weights(5)))
        push(sender, 6)


@placements
def test_a_tensor_that_was_not_sent(placement: str) -> None:
    engine = engine_of(0)
    with connected(engine, **DIRECT, placement=placement) as (sender, _):
        push(sender, 1)
        part = {n: a for n, a in weights(2).items() if n != "t"}
        error = failed(sender, 2, part)
        assert isinstance(error.__cause__, MissingNameError)
        refuses = placement == "in_place"
        assert only(error.report).outcome is (Outcome.TAINTED if refuses else Outcome.ABORTED)
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


@placements
def test_a_byte_that_changed_on_the_way(placement: str, faulty: Callable[..., None]) -> None:
    engine = engine_of(0)
    faulty(reads={2: Fault.CORRUPT})
    with connected(engine, **DIRECT, placement=placement) as (sender, _):
        push(sender, 1)
        error = failed(sender, 2)
        assert isinstance(error.__cause__, IntegrityError)
        refuses = placement == "in_place"
        assert only(error.report).outcome is (Outcome.TAINTED if refuses else Outcome.ABORTED)
        if not refuses:
            assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


def test_a_peer_that_is_lost_while_it_reads(faulty: Callable[..., None]) -> None:
    engine = engine_of(0)
    faulty(reads={2: Fault.LOSE_PEER})
    with connected(engine, **DIRECT) as (sender, _):
        push(sender, 1)
        error = failed(sender, 2)
        assert only(error.report).outcome is Outcome.ABORTED
        assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


def test_an_engine_that_does_not_come_to_a_step_boundary() -> None:
    engine = engine_of(0)
    with connected(engine, **{**DIRECT, "deadline_s": 0.5}, placement="in_place") as (sender, _):
        push(sender, 1)
        with engine.gate.step():
            error = failed(sender, 2)
        assert isinstance(error.__cause__, DeadlineError)
        assert only(error.report).outcome is Outcome.ABORTED
        assert engine.generate() == (1, digests(weights(1)))


def test_manifests_that_never_come(manifests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if manifests != "apart":
        pytest.skip("they come with the request")
    engine = engine_of(0)
    monkeypatch.setattr("weightsync.control.POLL_S", 0.2)
    with connected(engine, **{**DIRECT, "deadline_s": 1.0}) as (sender, (receiver,)):
        push(sender, 1)
        with monkeypatch.context() as patch:
            patch.setattr(receiver._manifests, "put", lambda *_: None)
            error = failed(sender, 2)
        assert "(deadline_s)" in str(error)
        assert only(error.report).outcome is Outcome.ABORTED
        assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)


def test_manifests_that_cannot_be_made_or_sent(
    manifests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has begun by then, where they come apart; it gives the update up."""
    engine = engine_of(0)
    with connected(engine, **DIRECT, placement="staged") as (sender, _):
        push(sender, 1)

        def failing(*_: Any) -> Any:
            raise ConfigError("no manifest today")

        with monkeypatch.context() as patch:
            patch.setattr(Update, "_manifests", failing)
            with pytest.raises(WeightSyncError, match="no manifest today"):
                push(sender, 2)
        assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


@pytest.mark.parametrize("lost", ["their connection is refused", "their answer", "the exchange"])
def test_manifests_that_are_lost_come_with_the_next_exchange(
    lost: str, manifests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if manifests != "apart":
        pytest.skip("they come with the request")
    engine = engine_of(0)
    monkeypatch.setattr("weightsync.control.POLL_S", 0.2)
    call, aside = HttpClient.call, HttpClient.aside
    failures = ["once"]

    def losing(client: HttpClient, request: Any, **more: Any) -> Any:
        if isinstance(request, ManifestRequest) and lost == "their answer":
            raise DeadlineError("the engine", "manifest", 5.0, 5.0) from TimeoutError()
        if isinstance(request, StagesRequest) and lost == "the exchange" and failures:
            failures.clear()
            raise DeadlineError("the engine", "stages", 5.0, 5.0) from TimeoutError()
        return call(client, request, **more)

    def refused(client: HttpClient) -> HttpClient:
        if lost == "their connection is refused":
            raise PeerLostError("the engine: connection refused")
        return aside(client)

    with connected(engine, **DIRECT) as (sender, _):
        push(sender, 1)
        monkeypatch.setattr(HttpClient, "call", losing)
        monkeypatch.setattr(HttpClient, "aside", refused)
        push(sender, 2)
        assert engine.generate() == (2, digests(weights(2)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


def test_the_trainer_is_lost_before_its_manifests_came(
    manifests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if manifests != "apart":
        pytest.skip("they come with the request")
    gate, engine = Gate(), engine_of(0)
    with connected(engine, **DIRECT, placement="staged") as (sender, (receiver,)):
        push(sender, 1)
        make = Update._manifests

        def late(*args: Any) -> Any:
            gate()
            return make(*args)

        monkeypatch.setattr(Update, "_manifests", late)
        caught: list[Any] = []
        thread = threading.Thread(target=lambda: caught.append(failed(sender, 2)))
        thread.start()
        gate.wait()
        while receiver._leader.spec is None or not receiver._leader.moves_done:
            assert not gate.opened.wait(0.01)
        receiver._machines.run_lost(str(receiver._machines.tag), "its process ended")
        gate.opened.set()
        thread.join(20)
        assert only(caught[0].report).outcome is Outcome.ABORTED
        assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


# --- answers that are lost --------------------------------------------------------------------------


class Losing(HttpClient):
    """Carries the whole update out, and loses the answer in some way."""

    errors: list[BaseException]
    asked: list[str]

    def call(self, request: Request, *, limit_s: float, **more: Any) -> dict[str, Any]:
        answer = super().call(request, limit_s=limit_s, **more)
        Losing.asked.append(name_of(request))
        if name_of(request) == ALL and Losing.errors:
            raise Losing.errors.pop()
        return answer


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> type[Losing]:
    monkeypatch.setattr("weightsync.sender.HttpClient", Losing)
    Losing.errors, Losing.asked = [], []
    return Losing


def test_an_answer_that_was_lost_is_asked_for_by_status(losing: type[Losing]) -> None:
    engine = engine_of(0)
    with connected(engine, **DIRECT) as (sender, _):
        push(sender, 1)
        losing.errors = [PeerLostError("the answer was lost")]
        report = only(push(sender, 2))
        assert (report.outcome, report.version, report.num_tensors) == (Outcome.COMMITTED, 2, 5)
        assert engine.generate() == (2, digests(weights(2)))
        push(sender, 3)


def test_an_exchange_that_ran_out_is_made_again(losing: type[Losing]) -> None:
    """The same request when all is done: the same answer, and nothing is done twice."""
    late = DeadlineError("engine", ALL, 5.0, 5.0)
    late.__cause__ = TimeoutError()
    engine = engine_of(0)
    with connected(engine, **DIRECT) as (sender, _):
        push(sender, 1)
        losing.errors, losing.asked = [late], []
        engine.calls.clear()
        report = only(push(sender, 2))
        assert losing.asked.count(ALL) == 2
        assert engine.calls.count("commit") == 1
        assert (report.outcome, report.version) == (Outcome.COMMITTED, 2)
        assert engine.generate() == (2, digests(weights(2)))


def test_a_request_that_comes_again_while_the_first_is_at_work(losing: type[Losing]) -> None:
    gate, engine = Gate(), engine_of(0)
    hooks = ReceiverHooks(on_prepare=lambda spec: gate() if spec.version == 2 else None)
    with connected(engine, hooks=hooks, **DIRECT) as (sender, (receiver,)):
        push(sender, 1)
        second: list[Any] = []

        class Doubling(Losing):
            """What the network may do with a request: it comes twice, over two connections."""

            def call(self, request: Request, *, limit_s: float, **more: Any) -> dict[str, Any]:
                if name_of(request) != ALL:
                    return super().call(request, limit_s=limit_s, **more)

                def again() -> None:
                    gate.wait()
                    other = HttpClient(receiver.url, None)
                    threading.Timer(0.2, gate.opened.set).start()
                    second.append(other.call(request, limit_s=limit_s))
                    other.close()

                copy = threading.Thread(target=again)
                copy.start()
                answer = super().call(request, limit_s=limit_s, **more)
                copy.join(20)
                return answer

        use_client(sender, Doubling(receiver.url, None))
        engine.calls.clear()
        assert only(push(sender, 2)).outcome is Outcome.COMMITTED
        assert second[0]["answers"][-1]["outcome"] == "committed"
        assert engine.calls.count("commit") == 1
        assert engine.generate() == (2, digests(weights(2)))


def test_an_engine_that_let_the_run_go_is_connected_again() -> None:
    engine = engine_of(0)
    with Listening(engine) as receiver, Sender.connect([receiver.url], **DIRECT) as sender:
        push(sender, 1)
        receiver._machines.run_lost(str(receiver._machines.tag), "a test says so")
        receiver.heard.clear()
        report = only(push(sender, 2))
        assert [n for n in receiver.heard if n != "manifest"][:2] == [ALL, "connect"]
        assert asked(receiver)[-1] == ALL
        assert (report.outcome, report.num_tensors) == (Outcome.COMMITTED, 5)
        assert engine.generate() == (2, digests(weights(2)))


# --- given up while it runs -------------------------------------------------------------------------


def _at_prepare(gate: Gate) -> ReceiverHooks:
    return ReceiverHooks(on_prepare=lambda spec: gate() if spec.version == 2 else None)


@placements
def test_the_trainer_is_lost_before_it_is_decided(placement: str) -> None:
    """All was asked for, but what is not decided yet is given up."""
    gate, engine = Gate(), engine_of(0)
    with connected(engine, hooks=_at_prepare(gate), placement=placement, **DIRECT) as (
        sender,
        (receiver,),
    ):
        push(sender, 1)
        caught: list[BaseException] = []

        def run() -> None:
            try:
                push(sender, 2)
            except UpdateFailedError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        gate.wait()
        receiver._machines.run_lost(str(receiver._machines.tag), "its process ended")
        gate.opened.set()
        thread.join(20)
        (error,) = caught
        assert isinstance(error, UpdateFailedError)
        refuses = placement == "in_place"
        assert only(error.report).outcome is (Outcome.TAINTED if refuses else Outcome.ABORTED)
        if not refuses:
            assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


class Interrupted(HttpClient):
    """Ctrl-C while the answer to a whole update is waited for."""

    gate: Gate
    is_armed = False

    def call(self, request: Request, *, limit_s: float, **more: Any) -> dict[str, Any]:
        if name_of(request) != ALL or not Interrupted.is_armed:
            return super().call(request, limit_s=limit_s, **more)
        Interrupted.is_armed = False
        other = HttpClient(self.peer.removeprefix("engine "), None)

        def ask() -> None:
            with pytest.raises(SessionError):
                other.call(request, limit_s=limit_s, **more)
            other.close()

        threading.Thread(target=ask, daemon=True).start()
        Interrupted.gate.wait()
        # It is given up while its prepare is at work, which then comes to its end.
        threading.Timer(0.3, Interrupted.gate.opened.set).start()
        raise KeyboardInterrupt


def test_an_interrupt_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.sender.HttpClient", Interrupted)
    Interrupted.gate = gate = Gate()
    engine = engine_of(0)
    with connected(engine, hooks=_at_prepare(gate), placement="staged", **DIRECT) as (sender, _):
        push(sender, 1)
        Interrupted.is_armed = True
        with pytest.raises(KeyboardInterrupt) as caught:
            push(sender, 2)
        assert "aborted" in "".join(caught.value.__notes__)
        assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))


def test_a_request_that_comes_after_it_was_given_up_opens_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: list[Request] = []

    class Slow(HttpClient):
        """The request is still on its way when the trainer is interrupted."""

        def call(self, request: Request, *, limit_s: float, **more: Any) -> dict[str, Any]:
            if name_of(request) == ALL and not late:
                late.append(request)
                raise KeyboardInterrupt
            return super().call(request, limit_s=limit_s, **more)

    engine: FakeEngine = engine_of(0)
    with connected(engine, **DIRECT) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        use_client(sender, Slow(receiver.url, None))
        with pytest.raises(KeyboardInterrupt):
            push(sender, 2)
        client = HttpClient(receiver.url, None)
        with pytest.raises(SessionError, match="was aborted before it began"):
            client.call(late[0], limit_s=20.0)
        client.close()
        assert engine.generate() == (1, digests(weights(1)))
        push(sender, 3)
        assert engine.generate() == (3, digests(weights(3)))
