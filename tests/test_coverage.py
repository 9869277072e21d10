"""What has arrived: each element of each transfer once, in whatever pieces."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import Held, Model, build, whole
from test_plan import can

from weightsync.bucket import Cut
from weightsync.coverage import Coverage, PlanShare, SlotIndex, plan_share
from weightsync.errors import MissingNameError, ProtocolError
from weightsync.layout import NO_REGION, Layout, PlacedBox, TensorLayout
from weightsync.plan import RefitPlan, make_plan
from weightsync.types import Box, ContractChoice, SlotKind, TensorMeta


def plan_of(source: Model, target: Model) -> RefitPlan:
    return make_plan(
        source.layout, target.layout, bucket_bytes=512, capabilities=can(),
        choice=ContractChoice.STREAM,
    )  # fmt: skip


def share_of(tensors: Any) -> PlanShare:
    source, target = build(1, tensors), build(1, tensors)
    return plan_share(plan_of(source, target), SlotIndex(target.layout, 0))


def simple() -> PlanShare:
    return share_of({"a": ("float32", (8,), [whole((8,))]), "b": ("int8", (5,), [whole((5,))])})


def entries(*cuts: Cut) -> Any:
    rows = [(c.item, c.start_bytes, c.num_bytes, c.offset_bytes) for c in cuts]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def covering() -> tuple[Coverage, PlanShare]:
    share = simple()
    coverage = Coverage(share.index)
    coverage.expect(0, share)
    return coverage, share


def test_everything_once_is_complete() -> None:
    coverage, share = covering()
    coverage.arrived(0, entries(Cut(1, 0, 5, 0), Cut(0, 16, 16, 0)))
    coverage.arrived(0, entries(Cut(0, 0, 16, 0)))
    coverage.settle()
    assert share.index.names(coverage.complete) == ["a", "b"]
    coverage.check_scope(None)
    coverage.check_scope(frozenset({"a", "b"}))


def test_a_gap_is_named() -> None:
    coverage, _ = covering()
    coverage.arrived(0, entries(Cut(0, 0, 28, 0), Cut(1, 0, 5, 0)))
    with pytest.raises(MissingNameError, match="1 tensors did not arrive whole: 'a'"):
        coverage.settle()


@pytest.mark.parametrize(
    "again", [Cut(0, 0, 16, 0), Cut(0, 12, 8, 0), Cut(0, 4, 4, 0), Cut(0, 0, 32, 0)]
)
@pytest.mark.parametrize("together", [False, True])
def test_bytes_that_arrive_twice_are_refused(again: Cut, together: bool) -> None:
    coverage, _ = covering()
    first = [Cut(0, 0, 16, 0)]
    if not together:
        coverage.arrived(0, entries(*first))
        first = []
    with pytest.raises(ProtocolError, match=r"'a': bytes .* arrived twice"):
        coverage.arrived(0, entries(*first, again))


@pytest.mark.parametrize("together", [False, True])
def test_whole_transfers_that_arrive_twice_are_refused(together: bool) -> None:
    coverage, _ = covering()
    whole_b = Cut(1, 0, 5, 0)
    first = [whole_b]
    if not together:
        coverage.arrived(0, entries(whole_b))
        first = []
    with pytest.raises(ProtocolError, match=r"'b': bytes 0:5 arrived twice"):
        coverage.arrived(0, entries(*first, whole_b))
    coverage, _ = covering()
    coverage.arrived(0, entries(whole_b))
    with pytest.raises(ProtocolError, match=r"'b': bytes 1:2 arrived twice"):
        coverage.arrived(0, entries(Cut(1, 1, 1, 0)))
    with pytest.raises(ProtocolError, match="arrived before"):
        coverage.all_arrived(0)


def test_a_tensor_is_sent_once_an_update() -> None:
    coverage, share = covering()
    with pytest.raises(ProtocolError, match="sent twice in one update: 'a', 'b'"):
        coverage.expect(1, share)
    coverage.all_arrived(0)
    coverage.settle()
    with pytest.raises(ProtocolError, match="sent twice"):
        coverage.expect(1, share)


def test_exactly_the_scope_arrives() -> None:
    coverage, share = covering()
    words = "2 tensors of the whole engine were not sent: 'a', 'b'"
    with pytest.raises(MissingNameError, match=words):
        coverage.check_scope(None)
    coverage.all_arrived(0)
    coverage.settle()
    with pytest.raises(ProtocolError, match="not in the declared scope: 'b'"):
        coverage.check_scope(frozenset({"a"}))
    with pytest.raises(ProtocolError, match="'a', 'b'"):
        coverage.check_scope(frozenset())
    Coverage(share.index).check_scope(frozenset())
    words = "1 tensors of the declared scope were not sent: 'b'"
    with pytest.raises(MissingNameError, match=words):
        Coverage(share.index).check_scope(frozenset({"b"}))


def test_two_moves_are_counted_apart() -> None:
    tensors: Any = {"a": ("int8", (4,), [whole((4,))]), "b": ("int8", (4,), [whole((4,))])}
    target = build(1, tensors)
    index = SlotIndex(target.layout, 0)
    coverage = Coverage(index)
    for move, name in enumerate("ab"):
        share = plan_share(plan_of(build(1, {name: tensors[name]}), target), index)
        coverage.expect(move, share)
        coverage.arrived(move, entries(Cut(0, 0, 4, 0)))
        coverage.settle()
    coverage.check_scope(None)


def test_nothing_is_complete_without_having_been_moved() -> None:
    share = share_of({"empty": ("int8", (0, 3), [whole((0, 3))])})
    coverage = Coverage(share.index)
    with pytest.raises(MissingNameError, match="'empty'"):
        coverage.check_scope(None)
    coverage.expect(0, share)
    coverage.settle()
    coverage.check_scope(None)


def test_a_plan_that_does_not_bring_whole_slots_is_refused() -> None:
    share = simple()
    short = PlanShare(
        share.plan, share.index, share.transfers[:1], share.slots[:1], share.num_bytes[:1] - 4
    )
    with pytest.raises(ProtocolError, match="'a' brings 28 of 32 B"):
        Coverage(share.index).expect(0, short)


def test_what_is_meant_for_another_rank_is_refused() -> None:
    halves = [Held(0, Box((0,), (2,)), (0,)), Held(1, Box((2,), (4,)), (0,))]
    target = build(2, {"a": ("int8", (4,), halves)})
    plan = plan_of(build(1, {"a": ("int8", (4,), [whole((4,))])}), target)
    index = SlotIndex(target.layout, 1)
    coverage = Coverage(index)
    coverage.expect(0, plan_share(plan, index))
    with pytest.raises(ProtocolError, match="another rank"):
        coverage.arrived(0, entries(Cut(0, 0, 2, 0)))


def test_opaque_slots_are_known() -> None:
    def entry(name: str, kind: SlotKind, region: int) -> TensorLayout:
        meta = TensorMeta(name, "int8", (2,))
        placed = PlacedBox(0, Box.whole((2,)), region, 0, (1,), "int8")
        return TensorLayout(name, (meta,), (placed,), kind)

    region = build(1, {"a": ("int8", (2,), [whole((2,))])}).layout.regions
    layout = Layout(
        1, (entry("a", SlotKind.AFFINE, 0), entry("b", SlotKind.OPAQUE, NO_REGION)), region
    )
    index = SlotIndex(layout, 0)
    assert index.is_opaque.tolist() == [False, True]
    assert index.mask({"b"}).tolist() == [False, True]
    assert index.mask(None).all()


@given(data=st.data())
def test_any_cutting_in_any_order_is_complete_once(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    share = share_of({f"t{i}": ("int8", (n,), [whole((n,))]) for i, n in enumerate(sizes)})
    cuts = []
    for i, n in enumerate(sizes):
        edges = sorted({0, n, *data.draw(st.sets(st.integers(0, n), max_size=3))})
        cuts += [Cut(i, a, b - a, 0) for a, b in itertools.pairwise(edges)]
    cuts = data.draw(st.permutations(cuts))
    coverage = Coverage(share.index)
    coverage.expect(0, share)
    split = data.draw(st.integers(0, len(cuts)))
    coverage.arrived(0, entries(*cuts[:split]))
    if split < len(cuts):
        with pytest.raises(MissingNameError):
            coverage.settle()
    coverage.arrived(0, entries(*cuts[split:]))
    coverage.settle()
    coverage.check_scope(None)
    again = data.draw(st.sampled_from(cuts))
    with pytest.raises(ProtocolError, match="twice"):
        coverage.arrived(0, entries(again))
