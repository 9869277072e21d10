"""SIGKILL of a publisher or of a puller at every named point, and at random instants.

Whatever was killed where: the store holds whole versions only, the checkpoint holds exactly one version,
bit for bit and under its label, and both go on by themselves.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from nursery import Brood
from processes import ChildEnded
from store.helpers import RUN, contents, held, published, published_in_pieces, weights

from weightsync.faults import FAULT_POINTS
from weightsync.store import LocalCheckpoint, Publisher, Store, collect

pytestmark = pytest.mark.timeout(120)

PULLER = [p for p in FAULT_POINTS if p.startswith("local.") and p != "local.seeded"]
PUBLISHER = [p for p in FAULT_POINTS if p.startswith("store.") and p != "store.collected"]
#: From here on the update is done by whoever opens the checkpoint next.
DECIDED = {"local.applying", "local.half", "local.written", "local.ready"}
#: A recorded run: `WEIGHTSYNC_TEST_INSTANTS=200 pytest --timeout 1800 -k random_instants tests/faults`.
NUM_INSTANTS = int(os.environ.get("WEIGHTSYNC_TEST_INSTANTS", "8"))


def check_local(directory: Path) -> int | None:
    """The version that a checkpoint holds after it was opened, checked bit for bit."""
    with LocalCheckpoint(directory) as local:
        state = local.state
        if state is None:
            return None
        version = state[1].version
        assert held(local.path) == contents(version)
        assert local.verify() == state[1]
        left = [p.name for p in local.path.iterdir() if p.name.startswith(".weightsync-")]
        assert left == [".weightsync-state.json"]
        assert len(list(directory.glob("data-*"))) == 1
        return version


def check_store(directory: Path) -> list[int]:
    """The versions of a store, each of them whole."""
    store = Store(directory, RUN)
    for version in store.versions():
        store.check_files(store.manifest(version))
    return store.versions()


@pytest.mark.parametrize(("point", "times"), [*((p, 1) for p in PULLER), ("local.half", 3)])
def test_a_puller_is_killed(brood: Brood, tmp_path: Path, point: str, times: int) -> None:
    store, _ = published(tmp_path / "store", 1)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
    child = brood.start("store.worker:pull", f"{point}=kill@{times}")
    child.send([str(tmp_path / "store"), str(tmp_path / "local"), [1]])
    assert child.receive() == "ready"
    with pytest.raises(ChildEnded):
        child.receive()
    assert child.wait() == -signal.SIGKILL
    assert check_local(tmp_path / "local") == (1 if point in DECIDED else 0)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
    assert check_local(tmp_path / "local") == 1


@pytest.mark.parametrize(("point", "times"), [*((p, 1) for p in PULLER), ("local.half", 3)])
def test_a_puller_of_pieces_is_killed(brood: Brood, tmp_path: Path, point: str, times: int) -> None:
    """What they change is in the log as changes of whole tensors."""
    store, _ = published_in_pieces(tmp_path / "store", 1)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
    child = brood.start("store.worker:pull", f"{point}=kill@{times}")
    child.send([str(tmp_path / "store"), str(tmp_path / "local"), [1]])
    assert child.receive() == "ready"
    assert child.wait() == -signal.SIGKILL
    assert check_local(tmp_path / "local") == (1 if point in DECIDED else 0)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
    assert check_local(tmp_path / "local") == 1


@pytest.mark.parametrize("has_old", [False, True])
def test_a_puller_is_killed_before_a_full_version_is_current(
    brood: Brood, tmp_path: Path, has_old: bool
) -> None:
    store, publisher = published(tmp_path / "store", 0)
    if has_old:
        with LocalCheckpoint(tmp_path / "local") as local:
            local.pull(store)
        publisher.publish_full(1, weights(1))
        (store.path / "v000000000000.json").unlink()
    child = brood.start("store.worker:pull", "local.seeded=kill")
    child.send([str(tmp_path / "store"), str(tmp_path / "local"), [int(has_old)]])
    assert child.receive() == "ready"
    assert child.wait() == -signal.SIGKILL
    assert check_local(tmp_path / "local") == (0 if has_old else None)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
    assert check_local(tmp_path / "local") == int(has_old)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("point", PUBLISHER)
def test_a_publisher_is_killed(brood: Brood, tmp_path: Path, point: str, times: int) -> None:
    (tmp_path / "store").mkdir()
    child = brood.start("store.worker:publish", f"{point}=kill@{times}")
    child.send([str(tmp_path / "store"), 1])
    assert child.receive() == "ready"
    assert child.wait() == -signal.SIGKILL
    whole = times - 1 + (point == "store.committed")
    assert check_store(tmp_path / "store") == list(range(whole))
    store = Store(tmp_path / "store", RUN)
    Publisher(store).publish(2, weights(2))  # a new publisher knows no base: it writes all
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
    assert check_local(tmp_path / "local") == 2
    collect(store, grace_s=0.0)
    folders = {p.name for p in store.path.iterdir() if p.is_dir()}
    assert folders == {store.manifest(2).directory}


def _ranks(brood: Brood, tmp_path: Path, fault_of: dict[int, str]) -> list[Any]:
    """Two processes that are a trainer."""
    folder = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    children = [brood.start("store.worker:publish_as_rank", fault_of.get(r, "")) for r in (0, 1)]
    for rank, child in enumerate(children):
        child.send([str(tmp_path / "store"), str(folder), rank])
    for child in children:
        assert child.receive() == "ready"
    return children


@pytest.mark.parametrize(
    ("killed", "point"),
    [(0, "store.payload"), (1, "store.payload"), (0, "store.manifest"), (0, "store.committed")],
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_rank_of_a_publisher_is_killed(
    brood: Brood, tmp_path: Path, killed: int, point: str, times: int
) -> None:
    """In the full version, or in the delta on it. The other one hears of it, and nobody sees a part."""
    children = _ranks(brood, tmp_path, {killed: f"{point}=kill@{times}"})
    for version in range(times):
        for child in children:
            child.send(version)
        if version < times - 1:
            assert [child.receive() for child in children] == ["visible", "visible"]
    assert children[killed].wait() == -signal.SIGKILL
    assert children[1 - killed].receive() == "PeerLostError"
    children[1 - killed].kill()
    whole = times - 1 + (point == "store.committed")
    assert check_store(tmp_path / "store") == list(range(whole))
    successors = _ranks(brood, tmp_path, {})
    for version in (5, 6):
        for child in successors:
            child.send(version)
        assert [child.receive() for child in successors] == ["visible", "visible"]
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(Store(tmp_path / "store", RUN))
    assert check_local(tmp_path / "local") == 6
    for child in reversed(successors):
        child.send("end")
    for child in successors:
        assert child.wait() == 0


def test_a_collector_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between withdrawal and removal: whoever collects next removes."""
    store, publisher = published(tmp_path / "store", 1)
    publisher.publish_full(2, weights(2))

    def end(point: str) -> None:
        raise KeyboardInterrupt(point)

    monkeypatch.setattr("weightsync.store.collecting.reach", end)
    with pytest.raises(KeyboardInterrupt, match=r"store\.collected"):
        collect(store, grace_s=0.0)
    monkeypatch.undo()
    assert check_store(tmp_path / "store") == [2]
    assert len(collect(store, grace_s=0.0).removed) == 2


def test_a_puller_is_killed_at_random_instants(brood: Brood, tmp_path: Path) -> None:
    store, _ = published(tmp_path / "store", 4)
    chance = random.Random(1)
    seen = set()
    for _ in range(NUM_INSTANTS):
        child = brood.start("store.worker:pull")
        child.send([str(store.directory), str(tmp_path / "local"), [1, 2, 3, 4, 0] * 20])
        assert child.receive() == "ready"
        threading.Event().wait(chance.random() * 0.4)
        child.kill()
        seen.add(check_local(tmp_path / "local"))
    assert seen - {None}


def test_a_publisher_is_killed_at_random_instants(brood: Brood, tmp_path: Path) -> None:
    chance = random.Random(2)
    for number in range(NUM_INSTANTS // 2):
        directory = tmp_path / f"store-{number}"
        directory.mkdir()
        child = brood.start("store.worker:publish")
        child.send([str(directory), 4])
        assert child.receive() == "ready"
        threading.Event().wait(chance.random() * 0.2)
        child.kill()
        versions = check_store(directory)
        assert versions == list(range(len(versions)))
        if versions:
            with LocalCheckpoint(tmp_path / f"local-{number}") as local:
                local.pull(Store(directory, RUN))
            assert check_local(tmp_path / f"local-{number}") == versions[-1]
