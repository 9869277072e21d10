"""Shares: what one rank needs of a plan, over a wire, checked, and bound to addresses."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import Held, Model, build, fill, partitions, replicated, shards, whole

from weightsync import native
from weightsync.binding import direct_table, slot_spots
from weightsync.errors import LayoutError, ProtocolError, WeightSyncError
from weightsync.plan import RefitPlan, make_plan
from weightsync.planning.bind import Located, bind_reads
from weightsync.planning.contract import SourceMemory
from weightsync.planning.share import RankShare
from weightsync.types import Availability, Box, Capabilities, Contract, CostConstants

CAN = Capabilities(
    "fake",
    {c: Availability(True) for c in Contract},
    {c: CostConstants(0.0, 1e9) for c in Contract},
    True,
)


def plan_of(source: Model, target: Model) -> RefitPlan:
    return make_plan(source.layout, target.layout, bucket_bytes=2**20, capabilities=CAN)


def located(model: Model, *, epoch: int = 0) -> dict[tuple[int, int], Located]:
    return {
        (r, 0): Located(memory.ctypes.data, memory.nbytes, epoch)
        for r, memory in enumerate(model.memory)
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, Model, dict[str, Any]]:
    worlds = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source, target, reference = {}, {}, {}
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
        dtype = draw(st.sampled_from(["int8", "uint16", "float32", "complex128"]))
        box, name = Box.whole(shape), f"t{i}"
        source[name] = (dtype, shape, draw(replicated(box, worlds[0])))
        target[name] = (dtype, shape, draw(partitions(box, worlds[1])))
        reference[name] = rng.integers(0, 100, shape).astype(dtype)
    return build(worlds[0], source), build(worlds[1], target), reference


@given(cases())
def test_bound_shares_bring_everything(case: tuple[Model, Model, dict[str, Any]]) -> None:
    source, target, reference = case
    fill(source, reference)
    plan, memory = plan_of(source, target), SourceMemory(source.layout)
    for rank, mine in enumerate(target.memory):
        mine[:] = 0xAA
        share = plan.share(memory, target_rank=rank)
        again = RankShare.from_json(json.loads(json.dumps(share.to_json())))
        assert again.digest == share.digest
        assert (again.transfers, again.tensors) == (share.transfers, share.tensors)
        again.check(target.layout)
        landing = slot_spots(target.layout, rank, target.addresses(rank))
        native.copy_segments(bind_reads(again, located(source), landing).rows)
    for t in target.layout.tensors:
        for j, p in enumerate(t.placed):
            part = reference[t.name][tuple(map(slice, p.box.start, p.box.stop))]
            assert target.view(t.name, j).tobytes() == np.ascontiguousarray(part).tobytes()


@given(cases())
def test_shares_are_a_partition_of_the_plan(case: tuple[Model, Model, dict[str, Any]]) -> None:
    source, target, _ = case
    plan = plan_of(source, target)
    for side, world in (("source_rank", source), ("target_rank", target)):
        shares = [plan.share(source.layout, **{side: r}) for r in range(world.layout.world_size)]
        assert sum(len(s.transfers) for s in shares) == len(plan.transfers)
        assert sum(s.num_bytes for s in shares) == plan.total_bytes
        for share in shares:
            for t in share.transfers:
                assert getattr(t, side) == share.rank


def sample() -> tuple[Model, Model, RefitPlan]:
    shape = (4, 6)
    source = build(2, {
        "a": ("float32", shape, shards(shape, 0, [2, 4])), "b": ("int8", (5,), [whole((5,), 1)]),
    })  # fmt: skip
    halves = [Held(0, Box((0, 0), (4, 3)), (0, 1)), Held(0, Box((0, 3), (4, 6)), (0, 1))]
    target = build(1, {"a": ("float32", shape, halves), "b": ("int8", (5,), [whole((5,))])})
    return source, target, plan_of(source, target)


def test_rows_are_those_of_the_plan_itself() -> None:
    source, target, plan = sample()
    landing = slot_spots(target.layout, 0, target.addresses(0))
    bound = bind_reads(plan.share(source.layout, target_rank=0), located(source), landing)
    everywhere = {0: 0}
    rows = direct_table(plan, source.layout, everywhere, landing, 0)
    base = np.array([source.memory[bound.regions[i][0]].ctypes.data for i in bound.region_of])
    mine = bound.rows.copy()
    mine[:, 0] -= base
    assert sorted(map(tuple, mine.tolist())) == sorted(map(tuple, rows.tolist()))
    assert len(bound.of_rank(0)) + len(bound.of_rank(1)) == len(bound.rows)


def test_only_regions_of_another_epoch_are_moved() -> None:
    source, target, plan = sample()
    landing = slot_spots(target.layout, 0, target.addresses(0))
    places = located(source)
    bound = bind_reads(plan.share(source.layout, target_rank=0), places, landing)
    assert bound.rebound(dict(places)) is bound
    there = places[1, 0]
    moved = {**places, (1, 0): Located(there.ptr + 4096, there.num_bytes, 1)}
    again = bound.rebound(moved)
    shift = again.rows[:, 0] - bound.rows[:, 0]
    of_one = np.array([bound.regions[i][0] == 1 for i in bound.region_of])
    assert (shift == np.where(of_one, 4096, 0)).all()
    assert (again.rows[:, 1:] == bound.rows[:, 1:]).all()
    with pytest.raises(ProtocolError, match=r"came back with 1 B"):
        bound.rebound({**places, (1, 0): Located(there.ptr, 1, 1)})


def test_what_was_not_published_or_is_too_short_is_refused() -> None:
    source, target, plan = sample()
    share = plan.share(source.layout, target_rank=0)
    landing = slot_spots(target.layout, 0, target.addresses(0))
    places = located(source)
    with pytest.raises(ProtocolError, match="region 0 of trainer rank 1 was not published"):
        bind_reads(share, {(0, 0): places[0, 0]}, landing)
    short = {**places, (1, 0): Located(places[1, 0].ptr, 47)}
    with pytest.raises(ProtocolError, match=r"'a'|'b'.*lie outside region"):
        bind_reads(share, short, landing)
    with pytest.raises(ProtocolError, match=r"placement 1 of 'a' has no landing \(2 have none\)"):
        bind_reads(share, places, {key: s for key, s in landing.items() if key != (0, 1)})
    with pytest.raises(ProtocolError, match="reads nothing"):
        bind_reads(plan.share(source.layout, source_rank=0), places, landing)


def test_a_share_is_of_one_rank() -> None:
    source, _, plan = sample()
    for ranks in ({}, {"source_rank": 0, "target_rank": 0}):
        with pytest.raises(LayoutError, match="a share is of one rank"):
            plan.share(source.layout, **ranks)


def test_a_share_that_leaves_something_out_is_refused() -> None:
    source, target, plan = sample()
    share = plan.share(source.layout, target_rank=0)
    for left_out in range(len(share.transfers)):
        rows = np.array([i for i in range(len(share.transfers)) if i != left_out])
        bad = RankShare(
            share.plan_digest, share.side, 0, share.tensors, share.transfers.take(rows),
            share.dtypes, share.source.take(rows),
        )  # fmt: skip
        with pytest.raises(ProtocolError, match=r"'a'|'b'"):
            bad.check(target.layout)
    with pytest.raises(ProtocolError, match="trainer rank was given to an engine"):
        plan.share(source.layout, source_rank=0).check(target.layout)


def redigested(value: Any) -> Any:
    """As somebody would send it who means what it says, if it can be digested at all."""
    try:
        head = {k: v for k, v in value.items() if k not in ("columns", "digest")}
        body = json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
        columns = zlib.decompress(base64.b64decode(value["columns"]))
        return {**value, "digest": hashlib.sha256(body + columns).hexdigest()}
    except Exception:
        return value


def test_a_share_that_changed_on_the_way_is_refused() -> None:
    source, _, plan = sample()
    good = json.loads(json.dumps(plan.share(source.layout, target_rank=0).to_json()))
    assert redigested(good) == good
    for changed in ({"plan": "0" * 64}, {"rank": 1}, {"digest": "0" * 64}):
        with pytest.raises(ProtocolError, match="its digest is"):
            RankShare.from_json({**good, **changed})


def test_malformed_shares_raise_only_our_errors() -> None:
    from test_layout import mutations

    source, target, plan = sample()
    good = json.loads(json.dumps(plan.share(source.layout, target_rank=0).to_json()))
    landing = slot_spots(target.layout, 0, target.addresses(0))
    for bad in mutations(good):
        try:
            share = RankShare.from_json(redigested(bad))
            share.check(target.layout)
            bind_reads(share, located(source), landing)
        except WeightSyncError:
            continue


def test_every_changed_number_is_refused_or_harmless() -> None:
    """Whatever one column entry is changed to, nothing outside of the two memories is named."""
    source, target, plan = sample()
    good = plan.share(source.layout, target_rank=0).to_json()
    flat = np.frombuffer(zlib.decompress(base64.b64decode(good["columns"])), "<i8")
    landing = slot_spots(target.layout, 0, target.addresses(0))
    for i in range(len(flat)):
        for value in (-1, int(flat[i]) + 1, 2**40, -(2**40)):
            changed = flat.copy()
            changed[i] = value
            text = base64.b64encode(zlib.compress(changed.tobytes())).decode()
            try:
                share = RankShare.from_json(redigested({**good, "columns": text}))
                share.check(target.layout)
                rows = bind_reads(share, located(source), landing).rows
            except WeightSyncError:
                continue
            assert_inside(rows, source, target)


def assert_inside(rows: Any, source: Model, target: Model) -> None:
    for row in rows.tolist():
        for column, models in ((0, source), (1, target)):
            ptr, reach = (
                row[column],
                row[2] + sum((row[d] - 1) * row[d + 1 + column] for d in (4, 7, 10)),
            )
            assert any(
                m.ctypes.data <= ptr and ptr + reach <= m.ctypes.data + m.nbytes
                for m in models.memory
            )
