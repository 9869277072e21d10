"""An engine that follows a store, when its publisher or it itself ends or fails at every named point.

At every instant the engine serves exactly one version, under its label, or refuses; and all goes on by
itself.
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
from store.helpers import RUN, arrays, held_arrays

from engine_adapter.fake import FakeEngine
from weightsync import rank_apply, rank_landing, rank_work
from weightsync.errors import TaintedError, WeightSyncError
from weightsync.faults import FAULT_POINTS
from weightsync.receiver import Receiver
from weightsync.store import Cut, Publisher, Store
from weightsync.store.weights import weights_of

pytestmark = pytest.mark.timeout(120)

PUBLISHER = [p for p in FAULT_POINTS if p.startswith("store.") and p != "store.collected"]
#: What an engine reaches while it takes a delta, in order.
DELTA = (
    "engine.open", "engine.opened", "engine.move", "engine.moved", "engine.prepare", "engine.prepared",
    "engine.place", "engine.half_placed", "engine.placed", "engine.resume", "engine.resumed",
)  # fmt: skip
FULL = ("follow.landed", *DELTA)
#: A failure here comes after every rank placed: the version is published, and nothing is taken back.
PUBLISHED = ("engine.resume", "engine.resumed")
#: Where a full version has written to live weights, or is decided.
REFUSES = {
    "staged": DELTA[DELTA.index("engine.place") :],
    "in_place": ("follow.landed", *DELTA[DELTA.index("engine.moved") :]),
}
#: A recorded run: `WEIGHTSYNC_TEST_INSTANTS=200 pytest --timeout 1800 -k random_instants tests/faults`.
NUM_INSTANTS = int(os.environ.get("WEIGHTSYNC_TEST_INSTANTS", "8"))


def publish(directory: Path, *versions: int) -> Publisher:
    directory.mkdir(exist_ok=True)
    publisher = Publisher(Store(directory, RUN))
    for version in versions:
        publisher.publish(version, weights_of(arrays(version).items()))
    return publisher


@pytest.mark.parametrize("point", PUBLISHER)
def test_a_publisher_is_killed_while_an_engine_follows(
    brood: Brood, tmp_path: Path, point: str
) -> None:
    engine = FakeEngine(arrays(9))
    with Receiver(engine) as receiver:
        follower = receiver.follow(tmp_path, RUN)
        child = brood.start("store.worker:publish_arrays", f"{point}=kill@2")
        child.send([str(tmp_path)])
        assert child.receive() == "ready"
        child.send(0)
        assert child.receive() == 0
        follower.pull()
        child.send(1)
        assert child.wait() == -signal.SIGKILL
        follower.pull()
        assert engine.generate()[0] == held_arrays(engine.weights) == (point == "store.committed")
        publish(tmp_path, 2)
        assert follower.pull().kinds == ("full",)
        assert engine.generate()[0] == held_arrays(engine.weights) == 2


@pytest.mark.parametrize("point", FULL)
def test_an_engine_is_killed_and_its_successor_comes_by_itself(
    brood: Brood, tmp_path: Path, point: str
) -> None:
    publisher = publish(tmp_path, 0)
    times = 1 if point == "follow.landed" else 2  # the second session takes a delta
    child = brood.start("store.worker:follow", f"{point}=kill@{times}")
    child.send([str(tmp_path)])
    assert child.receive() == "ready"
    child.send("pull")
    if times == 2:
        assert child.receive() == [0, ["full"], True]
        publisher.publish(1, weights_of(arrays(1).items()))
        child.send("pull")
    with pytest.raises(ChildEnded):
        child.receive()
    assert child.wait() == -signal.SIGKILL
    successor = brood.start("store.worker:follow")
    successor.send([str(tmp_path)])
    assert successor.receive() == "ready"
    successor.send("pull")
    label, kinds, is_whole = successor.receive()
    assert (label, is_whole) == (times - 1, True)
    assert kinds[0] == "full"
    successor.send("end")
    assert successor.wait() == 0


def _ranks(brood: Brood, tmp_path: Path, fault_of: dict[int, str]) -> list[Any]:
    folder = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    children = [brood.start("store.worker:follow_as_rank", fault_of.get(r, "")) for r in (0, 1)]
    for rank, child in enumerate(children):
        child.send([str(tmp_path / "store"), str(folder), rank])
    for child in children:
        assert child.receive() == "ready"
    return children


def _pull(children: list[Any]) -> tuple[list[Any], list[Any]]:
    children[0].send("pull")
    first = children[0].receive()
    children[1].send("say")
    return first, children[1].receive()


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("point", ["engine.moved", "engine.half_placed", "engine.placed"])
def test_a_rank_is_killed_while_it_takes_pieces_and_a_new_engine_comes_by_itself(
    brood: Brood, tmp_path: Path, point: str, killed: int
) -> None:
    """Two processes that hold halves of matrices; what they are told in deltas are their own pieces."""
    cuts = [Cut(r".*\.weight", dim=-1, parts=2)]
    store = Store(tmp_path / "store", RUN)
    publisher = Publisher(store)
    halves = [weights_of(arrays(version).items(), cuts) for version in (0, 1, 2)]
    publisher.publish(0, halves[0])
    children = _ranks(brood, tmp_path, {killed: f"{point}=kill@3"})
    assert _pull(children) == ([0, ["full"], True], [0, [], True])
    publisher.publish(1, halves[1])
    assert _pull(children) == ([1, ["delta"], True], [1, [], True])
    publisher.publish(2, halves[2])
    children[0].send("pull")
    assert children[killed].wait() == -signal.SIGKILL
    children[1 - killed].kill()
    successors = _ranks(brood, tmp_path, {})
    first, second = _pull(successors)
    assert (first[0], first[2], second[0], second[2]) == (2, True, 2, True)
    for child in reversed(successors):
        child.send("end")
        assert child.wait() == 0


def fails_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    left = [1]

    def reach(name: str) -> None:
        if name == point and left:
            left.pop()
            raise WeightSyncError(f"failed at {point}")

    monkeypatch.setattr(rank_work, "reach", reach)
    monkeypatch.setattr(rank_apply, "reach", reach)
    monkeypatch.setattr(rank_landing, "reach", reach)


@pytest.mark.parametrize("point", DELTA)
def test_a_delta_that_fails_anywhere_leaves_one_version_or_a_refusal(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publish(tmp_path, 0)
    engine = FakeEngine(arrays(9))
    with Receiver(engine) as receiver:
        follower = receiver.follow(tmp_path, RUN)
        follower.pull()
        publisher.publish(1, weights_of(arrays(1).items()))
        fails_at(monkeypatch, point)
        with pytest.raises(WeightSyncError, match=f"failed at {point}"):
            follower.pull()
        if point in PUBLISHED:
            with pytest.raises(TaintedError, match=point):
                engine.generate()
        else:
            assert engine.generate()[0] == held_arrays(engine.weights) == 0
        report = follower.pull()
        assert report.kinds == (("full", "delta") if point in PUBLISHED else ("delta",))
        assert engine.generate()[0] == held_arrays(engine.weights) == 1


@pytest.mark.parametrize("point", FULL)
@pytest.mark.parametrize("placement", ["staged", "in_place"])
def test_a_full_version_that_fails_anywhere_leaves_one_version_or_a_refusal(
    tmp_path: Path, placement: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0)
    engine = FakeEngine(arrays(9))
    with Receiver(engine) as receiver:
        follower = receiver.follow(tmp_path, RUN, placement=placement)
        fails_at(monkeypatch, point)
        if point == "engine.half_placed" and placement == "in_place":
            assert follower.pull().kinds == (
                "full",
            )  # nothing is copied, so nothing is half copied
            return
        with pytest.raises(WeightSyncError, match=f"failed at {point}"):
            follower.pull()
        if point in REFUSES[placement]:
            with pytest.raises(TaintedError, match=point):
                engine.generate()
        else:
            assert engine.generate()[0] is None
            assert held_arrays(engine.weights) == 9
        assert follower.pull().kinds == ("full",)
        assert engine.generate()[0] == held_arrays(engine.weights) == 0


def test_what_an_engine_serves_while_it_follows_is_always_one_version(tmp_path: Path) -> None:
    """A reader at every step, while deltas, folds of several and full versions come in."""
    publish(tmp_path, 0, 1, 2, 3, 4)
    engine = FakeEngine(arrays(9))
    known = {held_arrays(arrays(v)): engine_digests(v) for v in (0, 1, 2, 3, 4)}
    stop, seen, wrong = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            label, digests = engine.generate()
            seen.add(label)
            if label is not None and digests != known[label]:
                wrong.append(label)

    reader = threading.Thread(target=read)
    with Receiver(engine) as receiver:
        follower = receiver.follow(tmp_path, RUN)
        reader.start()
        for version in (0, 1, 3, 4, 1, 2, 4, 0, 4):
            follower.pull(version)
        stop.set()
        reader.join(20)
    assert not wrong
    assert len(seen - {None}) > 1


def engine_digests(version: int) -> dict[str, int]:
    return FakeEngine(arrays(version)).generate()[1]


def test_an_engine_is_killed_at_random_instants(brood: Brood, tmp_path: Path) -> None:
    publish(tmp_path, 0, 1, 2, 3)
    chance = random.Random(3)
    for _ in range(NUM_INSTANTS):
        child = brood.start("store.worker:follow_endlessly")
        child.send([str(tmp_path), [0, 1, 3, 2] * 50])
        assert child.receive() == "ready"
        threading.Event().wait(chance.random() * 0.3)
        child.kill()
    engine: Any = FakeEngine(arrays(9))
    with Receiver(engine) as receiver:
        receiver.follow(tmp_path, RUN).pull()
    assert engine.generate()[0] == held_arrays(engine.weights) == 3
