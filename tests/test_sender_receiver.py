"""Whole updates through both public ends: what arrives, what is refused, what is said."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from updating import (
    LIMIT_S,
    OPTIONS,
    Arrays,
    Gate,
    connected,
    digests,
    engine_of,
    failed_refit,
    failing,
    only,
    outcomes,
    placements,
    refit,
    ways,
    weights,
)

from engine_adapter.fake import FakeEngine
from weightsync.control import ControlServer, HttpClient
from weightsync.errors import (
    BusyError,
    ConfigError,
    DTypeMismatchError,
    LayoutError,
    MissingNameError,
    ProtocolError,
    ScopeError,
    SessionError,
    ShapeMismatchError,
    UnknownNameError,
    UpdateFailedError,
    VersionError,
)
from weightsync.messages import DigestRequest, StatusRequest
from weightsync.naming import Drop, Rename
from weightsync.receiver import JobsBy, Receiver, ReceiverHooks
from weightsync.sender import Sender
from weightsync.types import Contract, Outcome


def as_module(arrays: Arrays) -> Any:
    torch = pytest.importorskip("torch")
    module = torch.nn.Module()
    for name, array in arrays.items():
        parameter = torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)
        module.register_parameter(name, parameter)
    return module


SOURCES = {
    "dict": lambda a: a,
    "module": as_module,
    "list": lambda a: list(a.items()),
    "generator": lambda a: iter(a.items()),
}


@ways
@pytest.mark.parametrize("kind", SOURCES)
def test_three_refits_arrive_bit_for_bit(kind: str, placement: str, contract: str) -> None:
    engine, source = engine_of(1), weights(2)
    if (kind, contract) == ("generator", "direct"):
        pytest.skip("temporary tensors are streamed")
    with connected(engine, placement=placement, contract=contract) as (sender, (receiver,)):
        assert receiver.version is None
        pointers = {n: w.ctypes.data for n, w in engine.weights.items()}
        for version in (1, 2, 7):
            for array in source.values():
                array[...] = array + np.ones((), array.dtype)
            report = refit(sender, version, SOURCES[kind](source))
            assert engine.generate() == (version, digests(source))
            assert receiver.version == version
            found = only(report)
            assert (found.outcome, found.version) == (Outcome.COMMITTED, version)
            assert found.num_tensors == len(source)
            assert found.num_bytes == sum(a.nbytes for a in source.values())
            assert found.contract is Contract(contract)
            assert report.is_committed
        assert {n: w.ctypes.data for n, w in engine.weights.items()} == pointers


@ways
def test_an_identity_update_changes_nothing(placement: str, contract: str) -> None:
    engine = engine_of(1)
    before = digests(engine.weights)
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        roots = [only(refit(sender, v, weights(1))).root for v in (1, 2, 3)]
    assert digests(engine.weights) == before
    assert len(set(roots)) == 1


@ways
def test_several_sends_add_up_to_one_update(placement: str, contract: str) -> None:
    engine, source = engine_of(1), weights(2)
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        for version in (1, 2):
            with sender.update(version=version) as update:
                for name, array in source.items():
                    update.send({name: array})
            assert engine.generate() == (version, digests(source))
            assert only(update.report).num_tensors == len(source)


@ways
def test_sources_may_change_once_send_has_returned(placement: str, contract: str) -> None:
    engine, source = engine_of(1), weights(2)
    expected = digests(source)
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        with sender.update(version=1) as update:
            update.send(source)
            for array in source.values():
                array[...] = 0
        assert engine.generate() == (1, expected)


@ways
def test_a_mapping_that_makes_its_tensors_anew_each_time(placement: str, contract: str) -> None:
    """Equal addresses do not mean that the memory is still the sender's to read."""
    torch = pytest.importorskip("torch")

    class Gathering(dict[str, Any]):
        def items(self) -> Any:
            return ((name, torch.from_numpy(array.copy())) for name, array in super().items())

    engine, source = engine_of(1), Gathering(weights(2))
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        for version in (1, 2, 3):
            for array in dict.values(source):
                array[...] = array + np.ones((), array.dtype)
            refit(sender, version, source)
            assert engine.generate() == (version, digests(dict(dict.items(source))))


def test_a_generator_keeps_about_a_bucket_alive() -> None:
    size, alive, most = 1000, [], 0

    def tensors() -> Iterator[tuple[str, Any]]:
        nonlocal most
        for i in range(40):
            array = np.full(size, i, np.uint8)
            alive.append(weakref.ref(array))
            most = max(most, sum(r() is not None for r in alive))
            yield f"t{i}", array
            del array

    engine = FakeEngine({f"t{i}": np.zeros(size, np.uint8) for i in range(40)})
    with connected(engine, bucket=4000) as (sender, _):
        refit(sender, 1, tensors())
    assert all((engine.weights[f"t{i}"] == i).all() for i in range(40))
    assert most <= 6, "a bucket is four, the next one and the one in hand"


def test_a_long_generator_can_be_sent_again_after_connecting_anew() -> None:
    """More parts than plans are kept on either side."""
    names = [f"t{i}" for i in range(70)]
    engine = FakeEngine({n: np.zeros(300, np.uint8) for n in names})
    with connected(engine, bucket=512) as (sender, (receiver,)):
        refit(sender, 1, ((n, np.ones(300, np.uint8)) for n in names))
        sender.close()
        with Sender.connect([receiver.url], **{**OPTIONS, "bucket": 512}) as second:
            for version in (1, 2):
                order = names if version == 1 else names[30:] + names[:30]
                refit(second, version, ((n, np.full(300, version, np.uint8)) for n in order))
                assert all((w == version).all() for w in engine.weights.values())


def test_the_plan_that_was_agreed_last_is_forgotten_last() -> None:
    engine = FakeEngine({f"t{i}": np.zeros(4, np.uint8) for i in range(70)})

    with connected(engine) as (sender, _):
        refit(sender, 1, engine.weights)
        one = {"t0": np.ones(4, np.uint8)}
        refit(sender, 2, one, scope=["t0"])
        (link,) = sender._links
        link._bound.clear()  # as after a handshake
        for i, names in enumerate([["t0"], *([f"t{j}", "t69"] for j in range(63))]):
            refit(sender, 3 + i, {n: np.ones(4, np.uint8) for n in names}, scope=names)
        refit(sender, 100, one, scope=["t0"])


@placements
def test_fp32_masters_become_bf16_as_torch_does_it(placement: str) -> None:
    torch = pytest.importorskip("torch")
    from engine_adapter.module import ModuleAdapter

    module = torch.nn.Linear(33, 17).to(torch.bfloat16)
    masters = {n: torch.randn(p.shape) for n, p in module.named_parameters()}
    for contract in ("stream", "direct"):
        with connected(ModuleAdapter(module), placement=placement, contract=contract) as (
            sender,
            _,
        ):
            refit(sender, 1, masters)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, masters[name].to(torch.bfloat16))
    with connected(ModuleAdapter(module), cast="strict") as (sender, _):
        error = failing(lambda: refit(sender, 1, masters))
    assert isinstance(error, DTypeMismatchError)
    assert "'weight': the trainer offers float32, the engine takes bfloat16" in str(error)


# --- nothing to send --------------------------------------------------------------------------------


@ways
def test_a_round_in_which_nobody_has_anything_still_ends(placement: str, contract: str) -> None:
    engine, source = engine_of(1), weights(2)
    with connected(engine, placement=placement, contract=contract) as (sender, (receiver,)):
        refit(sender, 1, source)
        with sender.update(version=2, scope=[]):
            pass
        for version, nothing in ((3, {}), (4, []), (5, iter([]))):
            refit(sender, version, nothing, scope=[])
        assert receiver.version == 5
        assert engine.generate() == (5, digests(source))


@ways
@pytest.mark.parametrize("nothing", [{}, None])
def test_full_scope_needs_something(placement: str, contract: str, nothing: Any) -> None:
    engine = engine_of(1)
    with connected(engine, placement=placement, contract=contract) as (sender, (receiver,)):

        def act() -> None:
            with sender.update(version=1) as update:
                if nothing is not None:
                    update.send(nothing)

        error = failing(act)
        assert isinstance(error, UpdateFailedError)
        assert isinstance(error.__cause__, MissingNameError)
        assert receiver.version is None
        assert engine.generate() == (None, digests(weights(1)))


# --- names and scope --------------------------------------------------------------------------------


def part(source: Arrays, *names: str) -> Arrays:
    return {n: source[n] for n in names}


@ways
def test_a_declared_part_changes_only_that_part(placement: str, contract: str) -> None:
    engine, old, new = engine_of(0), weights(1), weights(2)
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        refit(sender, 1, old)
        refit(sender, 2, part(new, "a", "b"), scope=["b", "a"])
        assert engine.generate() == (2, digests({**old, **part(new, "a", "b")}))
        refit(sender, 3, part(new, "t"), scope=["t"])
        assert engine.generate()[1]["t"] == digests(new)["t"]


@pytest.mark.parametrize(
    ("sent", "scope", "words"),
    [
        ("ab", None, r"3 tensors of the whole engine were not sent: 'c', 'empty', 't'"),
        ("abc_t", None, r"1 tensors of the whole engine were not sent: 'empty'"),
        ("a", ["a", "b"], r"1 tensors of the declared scope were not sent: 'b'"),
        ("ab", ["a"], r"sent but not in the declared scope: 'b'"),
        ("ab", [], r"sent but not in the declared scope: 'a', 'b'"),
        ("a", ["a", "zz"], r"'zz' is not a tensor of the engine"),
    ],
)
@placements
def test_what_does_not_fit_the_scope_is_refused_by_name(
    sent: str, scope: Any, words: str, placement: str
) -> None:
    engine, old = engine_of(0), weights(1)
    names = [n for n in ("a", "b", "c", "t") if n in sent]
    with connected(engine, placement=placement) as (sender, _):
        refit(sender, 1, old)
        error = failed_refit(sender, 2, part(weights(2), *names), scope)
        assert __import__("re").search(words, str(error))
        expected = Outcome.ABORTED if placement == "staged" else Outcome.TAINTED
        assert only(error.report).outcome is expected
        if placement == "staged":
            assert engine.generate() == (1, digests(old))


@pytest.mark.parametrize("scope", ["a", b"a", 3])
def test_a_scope_is_a_list_of_names(scope: Any) -> None:
    with connected(engine_of()) as (sender, _), pytest.raises(ConfigError, match="scope"):
        sender.update(version=1, scope=scope)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda s: {**s, "layers.0.x": s["a"] + 1}, UnknownNameError, "'layers.0.x'"),
        (
            lambda s: {**s, "a": s["a"].T.copy()},
            ShapeMismatchError,
            r"'a': .*\(50, 60\), the engine \(60, 50\)",
        ),
        (
            lambda s: {**s, "a": s["a"].astype(np.int64)},
            DTypeMismatchError,
            "'a': .*int64.*float32",
        ),
        (lambda s: {**s, "a": [1, 2]}, LayoutError, "'a': builtins.list is not a tensor"),
        (lambda s: [*s.items(), ("a", s["a"])], LayoutError, "'a' was given twice"),
        (lambda s: list(s.values()), ConfigError, r"\(name, tensor\) pairs"),
        (lambda s: {3: s["a"]}, ConfigError, r"\(name, tensor\) pairs"),
        (lambda s: s["a"], ConfigError, r"\(name, tensor\) pairs"),
        (lambda s: 3, ConfigError, "cannot be sent"),
        (lambda s: "a", ConfigError, r"pairs|cannot be sent"),
    ],
)
def test_sources_that_do_not_fit_change_nothing(change: Any, kind: type, words: str) -> None:
    engine, old = engine_of(0), weights(1)
    with connected(engine, placement="in_place") as (sender, _):
        refit(sender, 1, old)
        error = failing(lambda: refit(sender, 2, change(weights(2))))
        assert isinstance(error, kind)
        assert __import__("re").search(words, str(error)), error
        assert engine.generate() == (1, digests(old))
        refit(sender, 2, weights(2))


def test_a_tensor_is_sent_once_an_update() -> None:
    with connected(engine_of()) as (sender, _):

        def act() -> None:
            with sender.update(version=1) as update:
                update.send(weights(1))
                update.send(part(weights(2), "a"))

        error = failing(act)
        assert isinstance(error, ProtocolError)
        assert "sent twice in one update: 'a'" in str(error)


def test_rules_rename_and_drop_on_the_way_out() -> None:
    engine = engine_of()
    source = {f"text.{n}": a for n, a in weights(2).items()} | {"vision.x": np.ones(3)}
    rules = [Rename(r"^text\.", ""), Drop(r"vision\..*", "text only")]
    with connected(engine, rules=rules) as (sender, _):
        for version, given in ((1, source), (2, iter(source.items()))):
            report = refit(sender, version, given)
            assert dict(report.dropped) == {"vision.x": "text only"}
            assert engine.generate() == (version, digests(weights(2)))


def test_tied_and_untied_engines() -> None:
    shared = np.ones((3, 4), np.float32)
    tied = FakeEngine({"embed": shared, "head": shared})
    untied = FakeEngine({"embed": shared.copy(), "head": shared.copy()})
    new = np.full((3, 4), 7.0, np.float32)
    with connected(tied, untied) as (sender, _):
        refit(sender, 1, {"embed": new, "head": new})
        for engine in (tied, untied):
            assert (engine.weights["head"] == 7).all()
        with sender.update(version=2, scope=["embed"]) as update:
            update.send({"embed": new + 1})
        assert (tied.weights["head"] == 8).all()
        assert (untied.weights["head"] == 7).all()
        assert (untied.weights["embed"] == 8).all()


def test_a_tied_engine_refuses_two_tensors() -> None:
    shared = np.ones(3, np.float32)
    with connected(FakeEngine({"embed": shared, "head": shared})) as (sender, _):
        two = {"embed": np.ones(3, np.float32), "head": np.zeros(3, np.float32)}
        assert "ties 'head' to 'embed'" in str(failing(lambda: refit(sender, 1, two)))


# --- versions and holders ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 2, 0])
def test_versions_rise_within_a_run(version: int) -> None:
    engine, old = engine_of(), weights(1)
    with connected(engine) as (sender, _):
        refit(sender, 3, old)
        error = failing(lambda: refit(sender, version, weights(2)))
        assert isinstance(error, VersionError)
        assert f"version {version} does not rise above 3" in str(error)
        assert engine.generate() == (3, digests(old))
        refit(sender, 4, weights(2))


@pytest.mark.parametrize("version", [-1, True, 1.0, "1", None])
def test_a_version_is_a_whole_number(version: Any) -> None:
    with connected(engine_of()) as (sender, _), pytest.raises(ConfigError, match="version"):
        sender.update(version=version)


def test_an_update_within_an_update_is_refused_and_does_no_harm() -> None:
    engine = engine_of()
    with connected(engine) as (sender, _):
        with sender.update(version=1) as update:
            with pytest.raises(SessionError, match="version 1 is open"), sender.update(version=2):
                pass
            update.send(weights(1))
        assert engine.generate() == (1, digests(weights(1)))
        with pytest.raises(SessionError, match="only possible inside"):
            update.send(weights(1))


def test_a_second_sender_is_told_who_holds_the_engine() -> None:
    engine = engine_of()
    with connected(engine, run_id="first") as (sender, (receiver,)):
        options = {**OPTIONS, "connect_timeout_s": 0.3}
        with pytest.raises(BusyError, match=r"not connected after 0\.3 s: .*serves run 'first'"):
            Sender.connect([receiver.url], run_id="second", **options)
        refit(sender, 1, weights(1))
        sender.close()
        with Sender.connect([receiver.url], run_id="second", **options) as second:
            refit(second, 1, weights(2))
        assert engine.generate() == (1, digests(weights(2)))


def test_a_waiting_sender_gets_the_engine_when_the_first_closes() -> None:
    with (
        connected(engine_of(), run_id="first") as (sender, (receiver,)),
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(Sender.connect, [receiver.url], run_id="second", **OPTIONS)
        sender.close()
        with waiting.result(LIMIT_S) as second:
            refit(second, 1, weights(1))


def test_a_new_run_starts_anywhere_with_everything() -> None:
    engine, old = engine_of(), weights(1)
    with connected(engine, run_id="one") as (sender, (receiver,)):
        refit(sender, 9, old)
        sender.close()
        with Sender.connect([receiver.url], run_id="two", **OPTIONS) as second:
            error = failing(lambda: refit(second, 1, part(weights(2), "a"), scope=["a"]))
            assert isinstance(error, ScopeError)
            assert "the first update of a new run must be full" in str(error)
            assert engine.generate() == (9, digests(old))
            refit(second, 1, weights(2))
            refit(second, 2, part(weights(3), "a"), scope=["a"])


def test_a_fresh_engine_needs_everything() -> None:
    with connected(engine_of()) as (sender, _):
        error = failing(lambda: refit(sender, 1, part(weights(1), "a"), scope=["a"]))
        assert isinstance(error, ScopeError)


def test_the_same_run_may_connect_again() -> None:
    engine = engine_of()
    with connected(engine, run_id="r") as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        with Sender.connect([receiver.url], run_id="r", **OPTIONS) as again:
            refit(again, 2, weights(2))
        assert engine.generate() == (2, digests(weights(2)))


def test_an_engine_that_listens_later_is_waited_for() -> None:
    with socket.socket() as kept, ThreadPoolExecutor(1) as pool:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))  # refuses connections, and keeps the port from others
        address = f"127.0.0.1:{kept.getsockname()[1]}"
        waiting = pool.submit(Sender.connect, [address], **OPTIONS)
        with Receiver(engine_of(), listen=address), waiting.result(LIMIT_S) as sender:
            refit(sender, 1, weights(1))


def test_connecting_to_nothing() -> None:
    with pytest.raises(ConfigError, match="no engines"):
        Sender.connect([], **OPTIONS)
    with pytest.raises(ConfigError, match="a URL or a Receiver, got int"):
        Sender.connect([3], **OPTIONS)
    with pytest.raises(ConfigError, match="unknown transport 'nixel'; known: "):
        Sender.connect(["http://127.0.0.1:1"], **{**OPTIONS, "transport": "nixel"})
    with pytest.raises(ConfigError, match="trainer of 2 ranks: give a torch"):
        Sender.connect(["http://127.0.0.1:1"], rank=1, world_size=2, **OPTIONS)
    with pytest.raises(ConfigError, match="rank 2 of 2 cannot be"):
        Sender.connect(["http://127.0.0.1:1"], rank=2, world_size=2, **OPTIONS)
    with pytest.raises(ConfigError, match="engine of 2 ranks: give a torch"):
        Receiver(engine_of(), world_size=2)
    with pytest.raises(ConfigError, match="layout is of 1 ranks, the receiver of 2"):
        Receiver(engine_of(), world_size=2, store=object())
    with pytest.raises(ConfigError, match="not started"):
        _ = Receiver(engine_of()).url


def test_a_closed_sender_says_so() -> None:
    with connected(engine_of()) as (sender, _):
        sender.close()
        sender.close()
        with pytest.raises(ConfigError, match="closed"):
            sender.update(version=1)


# --- engines without processes or threads of their own ----------------------------------------------


@ways
def test_an_engine_in_the_trainers_process(placement: str, contract: str) -> None:
    engine = engine_of()
    with Receiver(engine) as receiver:
        options = {**OPTIONS, "placement": placement, "contract": contract}
        with Sender.connect([receiver], **options) as sender:
            for version in (1, 2):
                refit(sender, version, weights(version))
                assert engine.generate() == (version, digests(weights(version)))
    assert threading.active_count() < 10


def test_a_receiver_that_was_not_started_or_was_closed_says_so() -> None:
    receiver = Receiver(engine_of())
    options = {**OPTIONS, "connect_timeout_s": 0.3}
    with pytest.raises(ConfigError, match="not started"):
        Sender.connect([receiver], **options)
    receiver.start()
    receiver.close()
    receiver.close()
    with pytest.raises(ConnectionError, match="closed"):
        Sender.connect([receiver], **options)


def test_a_trainer_may_ask_as_soon_as_the_engine_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Eager(ControlServer):
        def __init__(self, listen: str, handler: Any, token: str | None) -> None:
            super().__init__(listen, handler, token)
            client = HttpClient(self.url, token)
            try:
                answers.append(client.call(StatusRequest(None), limit_s=LIMIT_S))
            finally:
                client.close()

    answers: list[Any] = []
    monkeypatch.setattr("weightsync.receiver.ControlServer", Eager)
    with Receiver(engine_of()):
        assert answers[0]["phase"] == "idle"


@ways
def test_work_may_run_in_the_engines_own_loop(placement: str, contract: str) -> None:
    engine = engine_of(1)
    receiver = Receiver(engine).start(JobsBy.POLL)
    stop, seen = threading.Event(), []

    def loop() -> None:
        while not stop.is_set():
            receiver.poll(0.005)
            if not engine.gate.is_paused:  # a paused loop takes no step, it polls
                seen.append(engine.generate())

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        options = {**OPTIONS, "placement": placement, "contract": contract}
        with Sender.connect([receiver.url], **options) as sender:
            for version in (1, 2, 3):
                refit(sender, version, weights(version))
    finally:
        stop.set()
        thread.join(LIMIT_S)
        receiver.close()
    assert engine.generate() == (3, digests(weights(3)))
    known = {None: digests(weights(1))} | {v: digests(weights(v)) for v in (1, 2, 3)}
    assert all(found == known[version] for version, found in seen)


@ways
def test_a_step_never_sees_a_mix(placement: str, contract: str) -> None:
    engine = engine_of(0)
    known: dict[int | None, dict[str, int]] = {None: digests(weights(0))}
    stop, seen = threading.Event(), []

    def generate() -> None:
        while not stop.is_set():
            seen.append(engine.generate())

    threads = [threading.Thread(target=generate) for _ in range(2)]
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        sources = [weights(v) for v in range(4)]
        for t in threads:
            t.start()
        try:
            for version in range(1, 51):
                known[version] = digests(sources[version % 4])
                refit(sender, version, sources[version % 4])
        finally:
            stop.set()
            for t in threads:
                t.join(LIMIT_S)
    assert len(seen) > 20
    assert len({v for v, _ in seen}) > 2
    for version, found in seen:
        assert found == known[version]


# --- what is said meanwhile -------------------------------------------------------------------------


def test_status_answers_while_an_update_stands_still() -> None:
    gate = Gate()
    engine = engine_of()
    hooks = ReceiverHooks(on_prepare=gate)
    with (
        connected(engine, hooks=hooks) as (sender, (receiver,)),
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(refit, sender, 5, weights(1))
        gate.wait()
        client = HttpClient(receiver.url, None)
        status = client.call(StatusRequest(None), limit_s=LIMIT_S)
        assert status["phase"] == "preparing"
        assert status["updating_to"] == 5
        assert status["updating_for_s"] >= 0
        assert status["deadline_s"] == LIMIT_S
        assert status["num_bytes"] == sum(a.nbytes for a in weights(1).values())
        assert status["version"] is None
        assert status["holder"] == sender.run_id
        session_id = status["session_id"]
        mine = client.call(StatusRequest(session_id), limit_s=LIMIT_S)
        assert mine["outcome"] == "open"
        with pytest.raises(BusyError, match="step boundary"):
            client.call(DigestRequest(None, 0.05), limit_s=LIMIT_S)
        gate.opened.set()
        running.result(LIMIT_S)
        after = client.call(StatusRequest(session_id), limit_s=LIMIT_S)
        assert (after["outcome"], after["phase"], after["session_id"]) == (
            "committed",
            "idle",
            None,
        )
        unknown = client.call(StatusRequest("never"), limit_s=LIMIT_S)
        assert unknown["outcome"] == "unknown"
        client.close()
        assert sender.status()[0]["version"] == 5


def test_live_digests_can_be_asked_for() -> None:
    engine = engine_of(3)
    with connected(engine) as (_, (receiver,)):
        client = HttpClient(receiver.url, None)
        (found,) = client.call(DigestRequest(None, LIMIT_S), limit_s=LIMIT_S)["ranks"]
        assert {n: int(d, 16) for n, d in found.items()} == digests(weights(3))
        some = client.call(DigestRequest(["a"], LIMIT_S), limit_s=LIMIT_S)["ranks"]
        assert some == [{"a": found["a"]}]
        with pytest.raises(UnknownNameError, match="'zz'"):
            client.call(DigestRequest(["zz"], LIMIT_S), limit_s=LIMIT_S)
        client.close()
        assert not engine.gate.is_paused


def test_a_report_reads_well() -> None:
    with connected(engine_of(), engine_of()) as (sender, receivers):
        report = refit(sender, 1, weights(1))
        text = str(report)
        for receiver in receivers:
            assert receiver.url.removeprefix("http://") in text
        assert "committed" in text
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        assert set(report.engines[0].phases) >= {
            "begin",
            "move",
            "prepare",
            "commit",
            "engine_move",
        }


@placements
def test_caches_are_dropped_with_the_old_weights(placement: str) -> None:
    flushes: list[int | None] = []

    class Caching(FakeEngine):
        def flush_cache(self) -> None:
            assert self.gate.is_paused
            flushes.append(None if self.version is None else self.version.number)

    engine = Caching(weights(0))
    with connected(engine, placement=placement) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        assert flushes == [1]
        sender.close()
        options = {**OPTIONS, "placement": placement, "pause_mode": "in_place"}
        with Sender.connect([receiver.url], **options) as keeping:
            refit(keeping, 1, weights(2))
        assert flushes == [1], "a pause in place keeps what requests have computed"


def test_what_was_quick_is_done_by_the_thread_that_was_asked(monkeypatch: Any) -> None:
    """Only over HTTP, and never the first time; what lasted has a thread of its own the next time."""
    seen: list[tuple[str, str]] = []
    hooks = ReceiverHooks(
        on_begin=lambda spec: seen.append(("begin", threading.current_thread().name)),
        on_commit=lambda spec: seen.append(("commit", threading.current_thread().name)),
    )
    limit_s = LIMIT_S
    monkeypatch.setattr("weightsync.receiver._SHORT_S", limit_s)
    with Receiver(engine_of(1), hooks=hooks) as receiver:
        with Sender.connect([receiver.url], **OPTIONS) as sender:
            refit(sender, 1, weights(1))
            assert {name for _, name in seen} == {"weightsync-jobs"}, "nothing is known of them yet"
            refit(sender, 2, weights(2))
            assert {stage for stage, name in seen[2:] if name != "weightsync-jobs"} == {
                "begin",
                "commit",
            }
            monkeypatch.setattr("weightsync.receiver._SHORT_S", 0.0)
            refit(sender, 3, weights(3))
            assert {name for _, name in seen[4:]} == {"weightsync-jobs"}, (
                "all of it lasted too long"
            )
        monkeypatch.setattr("weightsync.receiver._SHORT_S", limit_s)
        with Sender.connect([receiver], run_id="other", **OPTIONS) as sender:
            refit(sender, 4, weights(4))
            refit(sender, 5, weights(5))
        assert {name for _, name in seen[6:]} == {"weightsync-jobs"}, (
            "a trainer's thread is not ours"
        )
    assert len(seen) == 10
