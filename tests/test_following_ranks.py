"""Engines of several ranks that follow a store: each reads what it owns, and all change together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_engines import FakeRank, Store, engine_ranks, split
from updating import LIMIT_S

from weightsync.errors import WeightSyncError
from weightsync.receiver import Receiver
from weightsync.store import Publisher
from weightsync.store import Store as VersionStore
from weightsync.store.weights import weights_of
from weightsync.types import Box

Arrays = Mapping[str, Any]


def whole(version: int) -> dict[str, Any]:
    """Six matrices, of which two in a hundred elements move with each version."""
    rng = np.random.default_rng(1)
    found = {f"layer.{i}": rng.standard_normal((40, 48)).astype(np.float16) for i in range(6)}
    for step in range(version):
        for array in found.values():
            array[np.random.default_rng(step).random(array.shape) < 0.02] *= np.float16(1.01)
    return found


def pipeline(world_size: int) -> list[FakeRank]:
    """Every rank holds whole layers of its own, and all of them the first."""
    start = whole(9)
    ranks = []
    for rank in range(world_size):
        boxes = {
            name: Box.whole(array.shape)
            for i, (name, array) in enumerate(start.items())
            if i == 0 or i % world_size == rank
        }
        ranks.append(FakeRank(start, boxes, rank, world_size))
    return ranks


@contextmanager
def serving(ranks: list[Any]) -> Iterator[Receiver]:
    store = Store()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(ranks)))
        made = [
            Receiver(a, rank=r, world_size=len(ranks), store=store, join_timeout_s=LIMIT_S)
            for r, a in enumerate(ranks)
        ]
        for receiver in made:
            stack.callback(receiver.close)
        list(pool.map(Receiver.start, made))
        yield made[0]


def served(ranks: list[Any], version: int | None, number: int) -> None:
    assert [r.generate()[0] for r in ranks] == [version] * len(ranks)
    assert all(r.holds(whole(number)) for r in ranks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_whole_tensors_take_deltas(tmp_path: Path, world_size: int) -> None:
    publisher = Publisher(VersionStore(tmp_path, "run"))
    ranks = pipeline(world_size)
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        for version in range(3):
            manifest = publisher.publish(version, weights_of(whole(version).items()))
            report = follower.pull()
            assert report.kinds == (("delta",) if version else ("full",))
            served(ranks, version, version)
            if version:  # the first layer is on every rank, the others are read once
                first = next(e for e in manifest.tensors if e.meta.name == "layer.0")
                expected = manifest.num_bytes + (world_size - 1) * first.num_bytes
                assert report.payload_bytes == expected


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("call", ["prepare", "commit"])
def test_a_rank_that_fails_makes_all_take_their_delta_back(
    tmp_path: Path, call: str, failing: int
) -> None:
    publisher = Publisher(VersionStore(tmp_path, "run"))
    ranks = pipeline(2)

    class Once(FakeRank):
        """Fails the first time that it is asked."""

        def _called(self, name: str) -> None:
            self.calls.append(name)
            if self.fail_in == name:
                self.fail_in = ""
                raise WeightSyncError(f"failed in {name}")

    for rank in ranks:
        rank.__class__ = Once
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        publisher.publish(0, weights_of(whole(0).items()))
        follower.pull()
        publisher.publish(1, weights_of(whole(1).items()))
        ranks[failing].fail_in = call
        with pytest.raises(WeightSyncError, match=f"rank {failing}: failed in {call}"):
            follower.pull()
        served(ranks, 0, 0)
        assert follower.pull().kinds == ("delta",)
        served(ranks, 1, 1)


def test_ranks_with_parts_of_tensors_take_full_versions_and_the_deltas_on_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(VersionStore(tmp_path, "run"))
    ranks = engine_ranks(whole(9), 2)
    assert ranks[0].boxes["layer.0"] == split((40, 48), 0, 2, dim=1)
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        for version in range(3):
            publisher.publish(version, weights_of(whole(version).items()))
            assert follower.pull().kinds == ("full", *("delta",) * version)
            served(ranks, version, version)
    assert "cut over ranks" in caplog.text
