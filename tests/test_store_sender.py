"""A trainer that publishes to a store, and an engine that follows it: the two public ends together."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.fake import FakeEngine
from engine_adapter.module import ModuleAdapter
from weightsync.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    IntegrityError,
    LayoutError,
    SessionError,
    VersionError,
)
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.store import Publisher, Store
from weightsync.store.snapshot import Snapshot
from weightsync.store_sender import StoreSender

torch = pytest.importorskip("torch")
RUN = "run"


def model(seed: int = 0, dtype: Any = None) -> Any:
    """A small module with tied weights, a bias and a transposed parameter."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Embedding(300, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 300, bias=False)
    )
    net[2].weight = net[0].weight
    net[1].weight = torch.nn.Parameter(net[1].weight.detach().T.contiguous().T)
    return net.to(torch.bfloat16 if dtype is None else dtype).requires_grad_(False)


def step(net: Any, seed: int) -> None:
    """One in a hundred elements moves a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            mask = torch.rand(parameter.shape, generator=generator) < 0.01
            parameter[mask] *= 1.01


def connect(directory: Path, run: str = RUN, **options: Any) -> StoreSender:
    return Sender.connect([directory], transport="disk-delta", run_id=run, **options)


def same(net: Any, other: Any) -> bool:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def test_one_call_waits_until_the_version_is_visible(tmp_path: Path) -> None:
    net, served = model(0), model(1)
    with connect(tmp_path) as sender, Receiver(ModuleAdapter(served)) as receiver:
        report = sender.update_weights(net, version=3)
        assert (report.version, report.kind) == (3, "full")
        assert sender.store.versions() == [3]
        assert receiver.follow(tmp_path).pull().version == 3
        assert same(net, served)
        with pytest.raises(VersionError):
            sender.update_weights(net, version=3)


def test_what_fails_in_one_call_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync.store import publish

    def full(*_: Any) -> None:
        raise CapacityError("no space left")

    net = model()
    with connect(tmp_path) as sender:
        sender.update_weights(net, version=0)
        step(net, 1)
        with monkeypatch.context() as patch:
            patch.setattr(publish, "commit", full)
            with pytest.raises(CapacityError, match="no space left"):
                sender.update_weights(net, version=1)
        assert sender.update_weights(net, version=1).version == 1
        assert sender.store.versions() == [0, 1]


def test_a_module_is_published_behind_the_next_step_and_followed(tmp_path: Path) -> None:
    net, served = model(0), model(1)
    with connect(tmp_path) as sender, Receiver(ModuleAdapter(served)) as receiver:
        follower = receiver.follow(tmp_path)
        for version in range(4):
            with sender.update(version=version) as update:
                update.send(net)
            sent = {n: p.clone() for n, p in net.named_parameters()}
            step(net, version)  # the weights change at once; what was sent does not
            report = update.report
            assert report is not None
            assert update.is_published
            assert report.kind == ("full" if version == 0 else "delta")
            assert (version == 0) or 0 < report.num_changed < report.total_bytes // 50
            assert follower.pull().version == version
            for name, parameter in served.named_parameters():
                assert torch.equal(parameter.view(torch.int16), sent[name].view(torch.int16)), name
        assert receiver.version == 3


def test_a_state_dict_and_a_generator_are_the_same(tmp_path: Path) -> None:
    net = model()
    with connect(tmp_path / "a") as one, connect(tmp_path / "b") as other:
        for version in range(3):
            with one.update(version=version) as update:
                update.send(dict(net.named_parameters()))
            with other.update(version=version) as again:
                again.send((name, p.clone()) for name, p in net.named_parameters())
            assert update.report is not None
            assert again.report is not None
            assert update.report.root == again.report.root
            step(net, version)


def test_masters_of_fp32_are_stored_as_bf16(tmp_path: Path) -> None:
    net, served = model(0, torch.float32), model(1)
    with (
        connect(tmp_path, cast="fp32_to_bf16") as sender,
        Receiver(ModuleAdapter(served)) as receiver,
    ):
        for version in range(2):
            with sender.update(version=version) as update:
                update.send(net)
            assert update.report is not None
            receiver.follow(tmp_path).pull()
            assert same(copy.deepcopy(net).to(torch.bfloat16), served)
            step(net, version)


def test_there_is_never_more_than_one_version_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back-pressure: the second send waits for the first version to be visible."""
    from weightsync.store import publish

    gate, net = threading.Event(), model()
    commit = publish.commit

    def slow(*args: Any) -> None:
        assert gate.wait(20)
        commit(*args)

    with connect(tmp_path, fold_every=0, anchor_every=0) as sender:
        monkeypatch.setattr(publish, "commit", slow)
        with sender.update(version=0) as first:
            first.send(net)
        assert not first.is_published
        entered = threading.Event()

        def second() -> None:
            with sender.update(version=1) as update:
                entered.set()
                update.send(net)

        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
        gate.set()
        assert entered.wait(20)
        thread.join(20)
        assert sender.wait() is not None
        assert Store(tmp_path, RUN).versions() == [0, 1]


def test_what_fails_behind_the_step_is_raised_once_and_then_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync.store import publish

    net = model()
    with connect(tmp_path) as sender:
        with sender.update(version=0) as update:
            update.send(net)
        assert update.report is not None

        def full(*_: Any) -> None:
            raise CapacityError("no space left")

        step(net, 1)
        with monkeypatch.context() as patch:
            patch.setattr(publish, "commit", full)
            with sender.update(version=1) as update:
                update.send(net)
            with pytest.raises(CapacityError, match="no space left"):
                sender.wait()
        assert not update.is_published
        assert Store(tmp_path, RUN).versions() == [0]
        step(net, 2)
        with sender.update(version=1) as update:
            update.send(net)
        assert update.report is not None
        assert update.report.kind == "delta"  # on version 0, both steps in one
        served = model(1)
        with Receiver(ModuleAdapter(served)) as receiver:
            receiver.follow(tmp_path).pull()
        assert same(net, served)


def test_a_delta_that_would_not_pay_is_a_full_version(tmp_path: Path) -> None:
    net = model()
    with connect(tmp_path) as sender:
        for version in range(3):
            with sender.update(version=version) as update:
                update.send(net)
            assert update.report is not None
            assert update.report.kind == ("delta" if version == 2 else "full")
            generator = torch.Generator().manual_seed(version)
            for parameter in net.parameters():
                if version == 0:  # every bit is another one
                    bits = torch.randint(-(2**15), 2**15, parameter.shape, generator=generator)
                    parameter.view(torch.int16).copy_(bits.to(torch.int16))
                else:
                    parameter.view(torch.int16)[..., :1] ^= 1


def test_folds_anchors_and_collection_are_made_behind_the_step(tmp_path: Path) -> None:
    net, served = model(), model(1)
    options = {"fold_every": 4, "anchor_every": 6, "keep": 3, "grace_s": 0.0}
    with connect(tmp_path, **options) as sender, Receiver(ModuleAdapter(served)) as receiver:
        follower = receiver.follow(tmp_path)
        for version in range(14):
            with sender.update(version=version) as update:
                update.send(net)
            assert update.report is not None
            sender.wait_for_upkeep()
            follower.pull()
            assert same(net, served)
            step(net, version)
        store = Store(tmp_path, RUN)
        kinds = {store.read_manifest(name).kind.value for name in store.manifest_names()}
        assert {"anchor", "delta"} <= kinds
        assert store.versions()[0] > 0
        late = FakeEngine({n: torch.zeros_like(p) for n, p in net.named_parameters()})
        with Receiver(late) as other:
            assert other.follow(tmp_path).pull().version == 13
            assert all(torch.equal(late.weights[n], p) for n, p in served.named_parameters())


def test_misuse_is_named(tmp_path: Path) -> None:
    net = model()
    with connect(tmp_path) as sender:
        with sender.update(version=3) as update:
            with pytest.raises(SessionError, match="is open"):
                sender.update(version=4).__enter__()
            update.send(net)
            with pytest.raises(SessionError, match="one call"):
                update.send(net)
        assert update.report is not None
        with pytest.raises(VersionError, match="holds 3"), sender.update(version=3) as update:
            update.send(net)
        with pytest.raises(SessionError, match="nothing was sent"), sender.update(version=4):
            pass
        with pytest.raises(LayoutError), sender.update(version=4) as update:
            update.send({"another": torch.zeros(3)})
        assert Store(tmp_path, RUN).versions() == [3]
        with connect(tmp_path) as other:
            with other.update(version=5) as update:
                update.send(net)
            assert update.report is not None
        with pytest.raises((BusyError, VersionError)), sender.update(version=5) as update:
            update.send(net)
    for places, extra in (
        (["a", "b"], {}), ([7], {}), ([tmp_path], {"world_size": 2}), ([tmp_path], {"placement": "staged"}),
        ([tmp_path], {"fold_every": -1}),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            Sender.connect(places, transport="disk-delta", **extra)
    with pytest.raises(ConfigError, match="closed"):
        sender.update(version=9)


def test_a_version_is_reported_before_the_copy_has_advanced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who follows need not wait for it, but the next version does."""
    net = model()
    go = threading.Event()
    advance = Publisher.advance
    monkeypatch.setattr(Publisher, "advance", lambda *a: (go.wait(30), advance(*a))[1])
    with connect(tmp_path) as sender:
        with sender.update(version=0) as update:
            update.send(net)
        assert update.report is not None
        assert Store(tmp_path, RUN).latest() == 0
        assert not sender._advanced.done()  # type: ignore[union-attr]
        timer = threading.Timer(0.2, go.set)
        timer.start()
        step(net, 1)
        with sender.update(version=1) as update:
            update.send(net)
        assert go.is_set()
        assert update.report.kind == "delta"
        timer.join()


@pytest.mark.parametrize("error", [IntegrityError, MemoryError])
def test_a_copy_that_cannot_advance_makes_the_next_version_full(
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    advance, left = Snapshot.advance, [1]

    def fail(*args: Any) -> None:
        if left:
            left.pop()
            raise error("as if the copy had rotted")
        advance(*args)

    monkeypatch.setattr(Snapshot, "advance", fail)
    kinds = []
    with connect(tmp_path) as sender:
        for version in range(4):
            with sender.update(version=version) as update:
                update.send(net)
            assert update.report is not None
            kinds.append(update.report.kind)
            step(net, version)
    assert kinds == ["full", "delta", "full", "delta"]
    assert "after version 1, which is visible: as if the copy had rotted" in caplog.text
