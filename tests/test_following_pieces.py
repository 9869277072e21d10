"""Engines whose ranks hold parts of tensors: a store published in pieces gives them deltas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_engines import FakeRank, engine_ranks
from store.test_pieces import lies
from test_following_ranks import served, serving, whole

from weightsync.errors import IntegrityError, WeightSyncError
from weightsync.layout import Layout, join_layouts
from weightsync.sender import Sender
from weightsync.store import Cut, Publisher, fold
from weightsync.store import Store as VersionStore
from weightsync.store.cutting import Cuts
from weightsync.store.weights import weights_of
from weightsync.types import Box

Arrays = Mapping[str, Any]
COLUMNS = [Cut(r"layer\..*", dim=1, parts=2)]


def layout_of(ranks: list[FakeRank]) -> Layout:
    return join_layouts([rank.layout() for rank in ranks])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_by_layout", [True, False])
def test_ranks_with_parts_of_tensors_take_deltas(
    tmp_path: Path, world_size: int, is_by_layout: bool
) -> None:
    ranks = engine_ranks(whole(9), world_size)
    cuts: Cuts = layout_of(ranks) if is_by_layout else [Cut(r"layer\..*", dim=-1, parts=6)]
    publisher = Publisher(VersionStore(tmp_path, "run"))
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        for version in range(3):
            manifest = publisher.publish(version, weights_of(whole(version).items(), cuts))
            report = follower.pull()
            assert report.kinds == (("delta",) if version else ("full",))
            served(ranks, version, version)
            if version:  # each piece is read by the one rank that holds it
                assert report.payload_bytes == manifest.num_bytes
        for version in (3, 4):
            publisher.publish(version, weights_of(whole(version).items(), cuts))
        assert follower.pull().kinds == ("delta", "delta")
        served(ranks, 4, 4)


def test_a_piece_that_lies_on_two_ranks_means_full_versions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = engine_ranks(whole(9), 3)
    publisher = Publisher(VersionStore(tmp_path, "run"))
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        for version in range(2):
            publisher.publish(version, weights_of(whole(version).items(), COLUMNS))
            assert follower.pull().kinds == ("full", *("delta",) * version)
            served(ranks, version, version)
    assert "each piece that it was published in" in caplog.text


def test_deltas_that_are_cut_each_in_another_way_mean_a_full_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A publisher that was started again may cut otherwise; what was folded then is cut one way."""
    ranks = engine_ranks(whole(9), 2)
    store = VersionStore(tmp_path, "run")
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        first, second = Publisher(store), Publisher(store)
        first.publish(0, weights_of(whole(0).items(), COLUMNS))
        follower.pull()
        first.publish(1, weights_of(whole(1).items(), COLUMNS))
        # one that knows the same base, and cuts by fours
        finer = [Cut(r"layer\..*", dim=1, parts=4)]
        encoded = second.encode_full(2, weights_of(whole(1).items(), finer))
        snapshot = second._snapshot
        assert snapshot is not None
        snapshot.identity = store.manifest(1).target
        del encoded
        second.publish(2, weights_of(whole(2).items(), finer))
        assert follower.pull().kinds == ("full", "delta", "delta")
        served(ranks, 2, 2)
        assert "not cut alike" in caplog.text
        fold(store, 0, 2)
        third = receiver.follow(tmp_path)
        third.pull(0)
        assert third.pull().kinds == ("fold",)
        served(ranks, 2, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_live_weights_of_a_rank_that_are_not_the_base_are_noticed(
    tmp_path: Path, rank: int
) -> None:
    ranks = engine_ranks(whole(9), 2)
    publisher = Publisher(VersionStore(tmp_path, "run"))
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        publisher.publish(0, weights_of(whole(0).items(), COLUMNS))
        follower.pull()
        ranks[rank].weights["layer.1"][0, 0] += np.float16(1)
        publisher.publish(1, weights_of(whole(1).items(), COLUMNS))
        assert follower.pull().kinds == ("full", "delta")
        served(ranks, 1, 1)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("call", ["prepare", "commit"])
def test_a_rank_that_fails_makes_all_take_their_pieces_back(
    tmp_path: Path, call: str, failing: int
) -> None:
    class Once(FakeRank):
        """Fails the first time that it is asked."""

        def _called(self, name: str) -> None:
            self.calls.append(name)
            if self.fail_in == name:
                self.fail_in = ""
                raise WeightSyncError(f"failed in {name}")

    publisher = Publisher(VersionStore(tmp_path, "run"))
    ranks = engine_ranks(whole(9), 2)
    for one in ranks:
        one.__class__ = Once
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        publisher.publish(0, weights_of(whole(0).items(), COLUMNS))
        follower.pull()
        publisher.publish(1, weights_of(whole(1).items(), COLUMNS))
        ranks[failing].fail_in = call
        with pytest.raises(WeightSyncError, match=f"rank {failing}: failed in {call}"):
            follower.pull()
        served(ranks, 0, 0)
        assert follower.pull().kinds == ("delta",)
        served(ranks, 1, 1)


@pytest.mark.parametrize("number", range(4))
def test_untruths_about_pieces_do_not_reach_live_weights(tmp_path: Path, number: int) -> None:
    """Found while ranks decode. What the shares say is of full versions: pieces have digests of their
    own, by which live weights are the version's."""
    store = VersionStore(tmp_path, "run")
    publisher = Publisher(store)
    ranks = engine_ranks(whole(9), 2)
    with serving(ranks) as receiver:
        follower = receiver.follow(tmp_path)
        publisher.publish(0, weights_of(whole(0).items(), COLUMNS))
        follower.pull()
        manifest = publisher.publish(1, weights_of(whole(1).items(), COLUMNS))
        lie = list(lies(manifest))[number]
        (store.path / manifest.file_name).write_bytes(lie.to_bytes())
        if number == 2:  # two shares changed places: the whole that they add up to is right
            assert follower.pull().kinds == ("delta",)
            served(ranks, 1, 1)
            return
        with pytest.raises(IntegrityError, match=r"layer\.0"):
            follower.pull()
        served(ranks, 0, 0)
        (store.path / manifest.file_name).write_bytes(manifest.to_bytes())
        assert follower.pull().kinds == ("delta",)
        served(ranks, 1, 1)


def test_a_sender_cuts_by_the_layout_of_an_engine(tmp_path: Path) -> None:
    ranks = engine_ranks(whole(9), 2)
    cut = layout_of(ranks)
    with (
        Sender.connect([tmp_path], transport="disk-delta", run_id="run", cut=cut) as sender,
        serving(ranks) as receiver,
    ):
        follower = receiver.follow(tmp_path)
        for version in range(3):
            with sender.update(version=version) as update:
                update.send(whole(version))
            assert update.report is not None
            assert follower.pull().kinds == (("delta",) if version else ("full",))
            served(ranks, version, version)


# --- any cuts, any engine -----------------------------------------------------------------------------


@st.composite
def boxes_of_ranks(draw: st.DrawFn) -> list[dict[str, Box]]:
    """Per rank one box of each tensor, cut along a dimension at drawn places."""
    world_size = draw(st.integers(2, 3))
    found: list[dict[str, Box]] = [{} for _ in range(world_size)]
    for name, array in whole(0).items():
        dim = draw(st.integers(0, 1))
        extent = array.shape[dim]
        inner = draw(
            st.lists(st.integers(1, extent - 1), min_size=world_size - 1,
                     max_size=world_size - 1, unique=True)
        )  # fmt: skip
        ends = [0, *sorted(inner), extent]
        for rank in range(world_size):
            low, high = [0, 0], list(array.shape)
            low[dim], high[dim] = ends[rank], ends[rank + 1]
            found[rank][name] = Box(tuple(low), tuple(high))
    return found


cuts_drawn = st.lists(
    st.builds(
        Cut,
        st.sampled_from([r"layer\.[0-2]", r"layer\.[1-4]", r".*"]),
        st.integers(-2, 1),
        st.integers(1, 6),
    ),
    max_size=3,
)


@given(boxes_of_ranks(), cuts_drawn, st.booleans())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_cuts_and_any_engine_end_in_the_exact_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    boxes: list[dict[str, Box]],
    cuts: list[Cut],
    is_by_layout: bool,
) -> None:
    """Deltas where the ranks hold whole pieces, full versions where they do not; never other bytes."""
    directory = tmp_path_factory.mktemp("store")
    world_size = len(boxes)
    ranks = [FakeRank(whole(9), boxes[r], r, world_size) for r in range(world_size)]
    publisher = Publisher(VersionStore(directory, "run"))
    how: Cuts = layout_of(ranks) if is_by_layout else cuts
    with serving(ranks) as receiver:
        follower = receiver.follow(directory)
        for version in range(3):
            manifest = publisher.publish(version, weights_of(whole(version).items(), how))
            report = follower.pull()
            served(ranks, version, version)
            if not manifest.is_full:
                assert report.kinds[-1] == "delta"
                fits = all(
                    _holds_whole(entry.boxes, [b[entry.meta.name] for b in boxes])
                    for entry in manifest.tensors
                )
                assert (report.kinds == ("delta",)) == fits
                assert fits or not is_by_layout


def _holds_whole(pieces: tuple[Box, ...], held: list[Box]) -> bool:
    common = [piece.intersect(box) for piece in pieces for box in held]
    return all(part is None or part in pieces for part in common)
