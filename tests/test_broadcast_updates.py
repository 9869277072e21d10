"""Whole updates by ``broadcast``: engines of one layout share a group, and a group outlives its losses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from updating import (
    attempt,
    connected,
    digests,
    engine_of,
    outcomes,
    placements,
    refit,
    weights,
)

from weightsync.errors import WeightSyncError
from weightsync.link import EngineLink
from weightsync.transports import broadcast_group
from weightsync.transports.collective_gloo import GlooCollective
from weightsync.types import Outcome

OPTIONS = {"transport": "broadcast", "bucket": "4KiB"}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many targets each group has that is made."""
    found: list[int] = []
    original = broadcast_group.make_group

    def make(members: Any, *rest: Any) -> Any:
        found.append(len(members))
        return original(members, *rest)

    monkeypatch.setattr("weightsync.transports.broadcast.make_group", make)
    return found


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every broadcast of this process that brings something, counted at all its ends."""
    found: list[int] = []
    original = GlooCollective.broadcast

    def broadcast(self: GlooCollective, ptr: int, num_bytes: int) -> Any:
        found.append(num_bytes)
        return original(self, ptr, num_bytes)

    monkeypatch.setattr(GlooCollective, "broadcast", broadcast)
    return found


@placements
def test_one_engine(placement: str, groups: list[int]) -> None:
    engine = engine_of()
    with connected(engine, **OPTIONS, placement=placement) as (sender, _):
        for version in range(1, 4):
            report = refit(sender, version, weights(version))
            assert outcomes(report) == [Outcome.COMMITTED]
            assert engine.digest(list(weights(0))) == digests(weights(version))
            assert report.engines[0].path == "gloo broadcast"
    assert groups == [1]


def test_engines_of_one_layout_are_sent_each_bucket_once(
    groups: list[int], sent: list[int]
) -> None:
    engines = [engine_of(seed) for seed in range(3)]
    with connected(*engines, **OPTIONS) as (sender, _):
        refit(sender, 1, weights(1))
        sent.clear()
        report = refit(sender, 2, weights(2))
        assert outcomes(report) == [Outcome.COMMITTED] * 3
        for engine in engines:
            assert engine.digest(list(weights(0))) == digests(weights(2))
        # Four ends took part in each broadcast, of the trainer one only.
        assert len(sent) % 4 == 0
        total = sum(a.nbytes for a in weights(2).values())
        assert total <= sum(sent) / 4 < 1.5 * total + 4096
    assert groups == [3]


def test_a_generator_is_streamed_to_all(groups: list[int]) -> None:
    engines = [engine_of(seed) for seed in range(2)]
    with connected(*engines, **OPTIONS) as (sender, _):
        for version in (1, 2):
            refit(sender, version, iter(weights(version).items()))
            for engine in engines:
                assert engine.digest(list(weights(0))) == digests(weights(version))
    assert set(groups) == {2}


def test_the_group_is_made_anew_without_the_engine_that_was_fenced(groups: list[int]) -> None:
    engines = [engine_of(seed) for seed in range(2)]
    with connected(*engines, **{**OPTIONS, "connect_timeout_s": 2.0}) as (sender, receivers):
        refit(sender, 1, weights(1))
        receivers[1].close()
        report, error = attempt(sender, 2, weights(2))
        assert error is not None
        assert report.engines[1].outcome is not Outcome.COMMITTED
        report, _ = attempt(sender, 3, weights(3))
        assert report.engines[0].outcome is Outcome.COMMITTED
        assert engines[0].digest(list(weights(0))) == digests(weights(3))
    assert groups[0] == 2
    assert groups[-1] == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_connecting_one_engine_again_connects_those_of_its_group(
    lost: int, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its group looked well when the update began, and are parted with by that alone."""
    engines = [engine_of(seed) for seed in range(2)]
    with connected(*engines, **OPTIONS) as (sender, _):
        refit(sender, 1, weights(1))
        links = list(sender._links)
        looked = threading.Event()
        original = EngineLink.connect

        def connect_late(link: EngineLink) -> None:
            assert looked.wait(10.0)
            original(link)

        def look(link: EngineLink) -> str | None:
            found = link.ends.lost()
            if link is links[1 - lost]:
                looked.set()
            return found

        monkeypatch.setattr(EngineLink, "connect", connect_late)
        monkeypatch.setattr(EngineLink, "lost", look)
        links[lost].is_stale = True
        report = refit(sender, 2, weights(2))
        assert outcomes(report) == [Outcome.COMMITTED] * 2
        for engine in engines:
            assert engine.digest(list(weights(0))) == digests(weights(2))
    assert groups == [2, 2]


def test_an_engine_that_refuses_to_begin_does_not_stop_the_others() -> None:
    engines = [engine_of(seed) for seed in range(2)]
    with connected(*engines, **OPTIONS) as (sender, _):
        refit(sender, 1, weights(1))

        def refuse(session: Any) -> None:
            raise WeightSyncError("this engine has no time")

        engines[1].begin_update = refuse  # type: ignore[method-assign]
        report, error = attempt(sender, 2, weights(2))
        assert error is not None
        assert outcomes(report) == [Outcome.COMMITTED, Outcome.ABORTED]
        assert engines[0].digest(list(weights(0))) == digests(weights(2))
        assert engines[1].digest(list(weights(0))) == digests(weights(1))
        del engines[1].begin_update
        report = refit(sender, 3, weights(3))
        assert outcomes(report) == [Outcome.COMMITTED] * 2


def test_an_exception_in_the_update_leaves_the_group_usable(groups: list[int]) -> None:
    engines = [engine_of(seed) for seed in range(2)]
    with connected(*engines, **OPTIONS) as (sender, _):
        refit(sender, 1, weights(1))

        def broken() -> Iterator[tuple[str, Any]]:
            yield from list(weights(2).items())[:3]
            raise KeyError("the trainer's own")

        with pytest.raises(KeyError), sender.update(version=2) as update:
            update.send(broken())
        for engine in engines:
            assert engine.digest(list(weights(0))) == digests(weights(1))
        report = refit(sender, 3, weights(3))
        assert outcomes(report) == [Outcome.COMMITTED] * 2
