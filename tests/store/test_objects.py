"""Stores in object storage: a real S3-compatible server of this machine, and fsspec's own memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_adapter.fake import FakeEngine
from store.helpers import RUN, arrays, contents, held, held_arrays, weights
from weightsync.cli.main import main
from weightsync.errors import (
    BusyError,
    ConfigError,
    IntegrityError,
    MissingDependencyError,
    UnavailableError,
    VersionError,
)
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.store import Lease, LocalCheckpoint, Publisher, Store, collect, fold
from weightsync.store.object_path import ObjectPath, place_of
from weightsync.store.weights import weights_of

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def url(object_url: str) -> str:
    """An empty place of its own."""
    return object_url


def published(url: str, *versions: int) -> tuple[Store, Publisher]:
    store = Store(url, RUN)
    publisher = Publisher(store)
    for version in versions:
        publisher.publish(version, weights(version))
    return store, publisher


def test_versions_are_published_read_and_never_overwritten(url: str, tmp_path: Path) -> None:
    store, first = published(url, 0, 1, 2)
    assert isinstance(store.path, ObjectPath)
    assert Store.runs(url) == [RUN]
    assert Store.newest_run(url) == RUN
    assert store.versions() == [0, 1, 2]
    for version in store.versions():
        store.check_files(store.manifest(version))
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        local.pull(store)
        assert held(local.path) == contents(2)
    second = Publisher(Store(url, RUN))
    late = second.encode(3, weights(3))
    first.publish(3, weights(3))
    with pytest.raises((BusyError, VersionError)):
        second.commit(late)
    assert store.versions() == [0, 1, 2, 3]
    folders = {p.name for p in store.path.iterdir() if p.is_dir()}
    assert folders == {store.manifest(v).directory for v in store.versions()}


def test_a_manifest_is_created_once(url: str) -> None:
    path = place_of(url) / "v0.json"
    assert path.create(b"one")
    assert not path.create(b"two")
    assert path.create(b"one"), "an answer that was lost is asked for again"
    assert path.read_bytes() == b"one"


def test_a_write_that_fails_leaves_nothing(url: str) -> None:
    path = place_of(url) / "folder" / "file"

    def broken(file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        path.write(broken)
    assert not path.exists()


def test_an_engine_follows_and_a_trainer_publishes(url: str) -> None:
    engine = FakeEngine(arrays(9))
    with (
        Sender.connect([url], transport="disk-delta", run_id=RUN, fold_every=2) as sender,
        Receiver(engine) as receiver,
    ):
        follower = receiver.follow(url)
        for version in range(4):
            with sender.update(version=version) as update:
                update.send(arrays(version))
            assert update.report is not None
            assert follower.pull().kinds == (("delta",) if version else ("full",))
            assert engine.generate()[0] == held_arrays(engine.weights) == version
        sender.wait_for_upkeep()
        late = FakeEngine(arrays(9))
        with Receiver(late) as other:
            other.follow(url).pull()
        assert held_arrays(late.weights) == 3


def test_folds_anchors_leases_and_collection(url: str) -> None:
    store, publisher = published(url, 0, 1, 2, 3)
    assert fold(store, 0, 3).base is not None
    publisher.anchor()
    with pytest.raises(BusyError):
        publisher.anchor()
    with Lease(store, 1):
        assert collect(store, grace_s=0.0).withdrawn == ()
    gone = collect(store, grace_s=0.0)
    assert len(gone.withdrawn) == 4  # 0, 1, 2 and the fold from 0
    assert gone.removed
    assert store.versions() == [3]
    assert store.last_number() == 3
    publisher.publish(4, weights(4))
    engine = FakeEngine(arrays(9))
    assert engine.generate()[0] is None
    assert [m.kind.value for m in store.route(None, 4)] == ["anchor", "delta"]


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_is_named_before_anything_is_applied(url: str, damage: str) -> None:
    store = Store(url, RUN)
    publisher = Publisher(store)
    publisher.publish(0, weights_of(arrays(0).items()))
    engine = FakeEngine(arrays(9))
    with Receiver(engine) as receiver:
        follower = receiver.follow(url, RUN)
        follower.pull()
        publisher.publish(1, weights_of(arrays(1).items()))
        (path,) = store.payload_path(store.manifest(1)).glob("delta-*")
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 8
        if damage == "flip":
            path.put(bytes(data))
        else:
            path.unlink()
        with pytest.raises((IntegrityError, UnavailableError)):
            follower.pull()
        assert engine.generate()[0] == held_arrays(engine.weights) == 0


def test_the_command_line_takes_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    published(url, 0, 1)
    assert main(["delta", "log", url]) == 0
    assert main(["delta", "verify", url]) == 0
    out = capsys.readouterr().out
    assert "delta" in out
    assert out.count("good") == 2


def test_what_is_absent_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        Store("nonsense://there", RUN)
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"weightsync\[object\]"):
        Store("s3://bucket", RUN)
