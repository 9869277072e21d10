"""Plans: full coverage exactly once, errors that help, the choice of contract, and tampering.

``test_binding.py`` moves real bytes with them.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import Held, Model, build, partitions, replicated, shards, whole

from weightsync.errors import (
    DTypeMismatchError,
    LayoutError,
    MissingNameError,
    ProtocolError,
    ShapeMismatchError,
    UnavailableError,
    UnknownNameError,
    WeightSyncError,
)
from weightsync.layout import Layout
from weightsync.plan import (
    RefitPlan,
    check_plan,
    make_plan,
    max_entries,
    num_direct_ops,
    slot_bytes,
)
from weightsync.types import (
    Availability,
    Box,
    Capabilities,
    Contract,
    ContractChoice,
    CostConstants,
    RegionKind,
)

YES = Availability(True)
FREE = CostConstants(0.0, 1e9)


def can(
    *,
    stream: Availability | None = YES,
    direct: Availability | None = YES,
    converts: bool = True,
    stream_cost: CostConstants = FREE,
    direct_cost: CostConstants = FREE,
) -> Capabilities:
    have = {Contract.STREAM: stream, Contract.DIRECT: direct}
    return Capabilities(
        "fake",
        {c: a for c, a in have.items() if a is not None},
        {Contract.STREAM: stream_cost, Contract.DIRECT: direct_cost},
        converts,
    )


def plan_of(source: Layout, target: Layout, bucket_bytes: int = 2**20, **options: Any) -> RefitPlan:
    options.setdefault("capabilities", can())
    return make_plan(source, target, bucket_bytes=bucket_bytes, **options)


def one(
    name: str = "w", dtype: str = "float32", shape: tuple[int, ...] = (4, 6), **options: Any
) -> Layout:
    return build(1, {name: (dtype, shape, [whole(shape)])}, **options).layout


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Model, Model]:
    """A source and a target of random worlds that hold the same tensors."""
    world = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    source, target = {}, {}
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(["float32", "int8", "uint16", "complex128"]))
        box = Box.whole(shape)
        source[f"t{i}"] = (dtype, shape, draw(replicated(box, world[0])))
        target[f"t{i}"] = (dtype, shape, draw(partitions(box, world[1])))
    return build(world[0], source), build(world[1], target)


@given(pairs())
def test_every_target_box_is_covered_exactly_once(case: tuple[Model, Model]) -> None:
    source, target = case
    plan = plan_of(source.layout, target.layout)
    check_plan(plan, source.layout, target.layout)
    hits: Counter[tuple[int, int, tuple[int, ...]]] = Counter()
    for t in plan.transfers:
        planned = plan.tensors[t.tensor]
        held = source.layout.tensors[planned.source].placed[t.source_placed]
        assert held.rank == t.source_rank
        assert held.box.intersect(t.box) == t.box
        assert t.num_bytes > 0
        for index in np.ndindex(*t.box.shape):
            at = tuple(a + i for a, i in zip(t.box.start, index, strict=True))
            hits[planned.target, t.target_placed, at] += 1
    wanted = {
        (i, j, tuple(a + k for a, k in zip(p.box.start, index, strict=True)))
        for i, t in enumerate(target.layout.tensors)
        for j, p in enumerate(t.placed)
        for index in np.ndindex(*p.box.shape)
    }
    assert set(hits) == wanted
    assert set(hits.values()) <= {1}
    assert sum(plan.bytes_by_pair().values()) == plan.total_bytes


@given(pairs())
def test_plans_are_deterministic_and_json_is_an_exact_inverse(case: tuple[Model, Model]) -> None:
    source, target = case
    plan = plan_of(source.layout, target.layout)
    again = plan_of(
        Layout.from_json(json.loads(json.dumps(source.layout.to_json()))),
        Layout.from_json(json.loads(json.dumps(target.layout.to_json()))),
    )
    assert again == plan
    back = RefitPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back == plan
    assert back.digest == plan.digest
    assert back.buckets == plan.buckets


def test_the_digest_is_stable_over_versions_of_this_code() -> None:
    plan = plan_of(one(), one())
    assert plan.digest == plan_of(one(), one()).digest
    assert plan.digest != plan_of(one(), one(), bucket_bytes=2**19).digest


def test_replicas_share_the_work() -> None:
    shape = (8, 4)
    source = build(4, {"w": ("int8", shape, [whole(shape, r) for r in range(4)])}).layout
    target = build(4, {"w": ("int8", shape, [whole(shape, r) for r in range(4)])}).layout
    assert plan_of(source, target).bytes_by_pair() == {(r, r): 32 for r in range(4)}


def test_a_rank_gets_only_what_it_owns() -> None:
    shape = (5, 3)
    source = build(2, {"w": ("int8", shape, shards(shape, 0, [3, 5]))}).layout
    target = build(3, {"w": ("int8", shape, shards(shape, 0, [2, 4, 5]))}).layout
    assert plan_of(source, target).bytes_by_pair() == {(0, 0): 6, (0, 1): 3, (1, 1): 3, (1, 2): 3}


def test_a_plan_explains_itself() -> None:
    text = plan_of(one(), one(), choice=ContractChoice.STREAM).explain()
    for words in (
        "1 tensors, 1 transfers, 96 B",
        "stream: asked for",
        "1 buckets",
        "rank 0 -> engine rank 0",
    ):
        assert words in text


def test_a_large_plan_explains_its_busiest_pairs() -> None:
    ranks = range(40)
    vectors = {f"t{r}": ("int8", (r + 1,), [whole((r + 1,), r)]) for r in ranks}
    layout = build(40, vectors).layout
    lines = plan_of(layout, layout, choice=ContractChoice.DIRECT).explain().splitlines()
    assert lines[1] == "the busiest 32 of 40 pairs of ranks:"
    assert lines[2] == "trainer rank 39 -> engine rank 39: 40 B"
    assert len(lines) == 2 + 32


# --- names, shapes, dtypes --------------------------------------------------------------------------


def test_unknown_names_are_listed_with_the_closest_that_exist() -> None:
    source = build(
        1, {f"text.layers.{i}.w": ("int8", (2,), [whole((2,))]) for i in range(8)}
    ).layout
    target = build(
        1, {f"model.layers.{i}.w": ("int8", (2,), [whole((2,))]) for i in range(8)}
    ).layout
    with pytest.raises(UnknownNameError) as caught:
        plan_of(source, target)
    text = str(caught.value)
    assert "8 tensors" in text
    assert "and 3 more" in text
    assert "closest: 'model.layers.0.w'" in text
    assert "rename or drop" in text


def test_shapes_and_dtypes_that_differ_name_both() -> None:
    with pytest.raises(
        ShapeMismatchError, match=r"'w': the trainer has shape \(4, 6\), the engine \(6, 4\)"
    ):
        plan_of(one(), one(shape=(6, 4)))
    for source, target in (
        ("float32", "int64"),
        ("bfloat16", "float16"),
        ("float32", "int32"),
        ("float16", "bfloat16"),
    ):
        with pytest.raises(
            DTypeMismatchError, match=rf"'w': .*{source}, the engine takes {target}"
        ):
            plan_of(one(dtype=source), one(dtype=target))


def test_padding_is_no_reason_to_guess() -> None:
    with pytest.raises(ShapeMismatchError, match=r"\(12, 4\), the engine \(10, 4\)"):
        plan_of(one(shape=(12, 4)), one(shape=(10, 4)))


def test_fp32_goes_to_bf16_only_where_the_source_offers_it() -> None:
    target = one(dtype="bfloat16")
    with pytest.raises(
        DTypeMismatchError, match="float32, the engine takes bfloat16; the only cast"
    ):
        plan_of(one(), target)
    offering = one(wire={"w": ["float32", "bfloat16"]})
    assert plan_of(offering, target).metas[0].dtype == "bfloat16"
    assert plan_of(offering, one()).metas[0].dtype == "float32"


def test_a_part_that_nobody_holds_is_named() -> None:
    shape = (5, 2)
    source = build(2, {"w": ("int8", shape, shards(shape, 0, [2, 4]))}).layout
    with pytest.raises(MissingNameError, match=r"'w': no trainer rank holds .*4, 0.*engine rank 0"):
        plan_of(source, one("w", "int8", shape))


# --- tied names -------------------------------------------------------------------------------------


def tied(*names: str, ties: dict[str, str] | None = None) -> Layout:
    return build(1, {n: ("int8", (3,), [whole((3,))]) for n in names}, aliases=ties).layout


TIE = {"head": "embed"}


@pytest.mark.parametrize(
    ("source", "target", "moved"),
    [
        (tied("embed", ties=TIE), tied("embed", ties=TIE), ["embed"]),
        (tied("head", ties={"embed": "head"}), tied("embed", ties=TIE), ["embed"]),
        (tied("embed"), tied("embed", ties=TIE), ["embed"]),
        (tied("head"), tied("embed", ties=TIE), ["embed"]),
        (tied("embed", ties=TIE), tied("embed", "head"), ["embed", "head"]),
        (tied("embed", "head"), tied("embed", "head"), ["embed", "head"]),
        (tied("embed"), tied("embed", "head"), ["embed"]),
    ],
)
def test_tied_and_untied_sides(source: Layout, target: Layout, moved: list[str]) -> None:
    assert [m.name for m in plan_of(source, target).metas] == moved


def test_two_tensors_do_not_fit_one_tied_slot() -> None:
    with pytest.raises(LayoutError, match=r"ties 'head' to 'embed', the trainer holds them as two"):
        plan_of(tied("embed", "head"), tied("embed", ties=TIE))


def test_an_alias_that_the_engine_does_not_have_is_unknown() -> None:
    with pytest.raises(UnknownNameError, match="'head'"):
        plan_of(tied("embed", ties=TIE), tied("embed"))


# --- contract ---------------------------------------------------------------------------------------

NO = Availability(False, "ptrace is off", "turn it on")


@pytest.mark.parametrize(
    ("have", "choice", "contract", "reason"),
    [
        (can(), "stream", "stream", "asked for"),
        (can(), "direct", "direct", "asked for"),
        (can(direct=NO), "auto", "stream", "ptrace is off. turn it on"),
        (can(direct=None), "auto", "stream", "no direct reads"),
        (can(stream=NO), "auto", "direct", "stream cannot be used: ptrace is off"),
        (can(stream=None), "auto", "direct", "no stream"),
        (can(direct_cost=CostConstants(1.0, 1e9)), "auto", "stream", "predicted 24.0"),
        (can(direct_cost=CostConstants(1e-6, 1e9)), "auto", "stream", "predicted"),
        (can(stream_cost=CostConstants(1.0, 1e9)), "auto", "direct", "predicted"),
        (can(stream_cost=CostConstants(0.0, 1e3)), "auto", "direct", "predicted"),
    ],
)
def test_the_contract_is_chosen_by_what_works_and_what_it_costs(
    have: Capabilities, choice: str, contract: str, reason: str
) -> None:
    shape = (4, 6)
    columns = Held(0, Box.whole(shape), (1, 0))
    source = build(1, {"w": ("float32", shape, [columns])}).layout  # 24 runs of one element
    plan = plan_of(source, one(), capabilities=have, choice=ContractChoice(choice))
    assert plan.contract.value == contract
    assert reason in plan.contract_reason


@pytest.mark.parametrize(
    ("have", "choice", "words"),
    [
        (can(direct=NO), "direct", "'direct' of 'fake' cannot be used: ptrace is off. turn it on"),
        (can(stream=NO), "stream", "'stream' of 'fake' cannot be used: ptrace is off"),
        (can(stream=None), "stream", "no stream"),
        (can(stream=NO, direct=NO), "auto", "direct: ptrace is off.*stream: ptrace is off"),
    ],
)
def test_a_contract_that_cannot_be_had_is_refused(
    have: Capabilities, choice: str, words: str
) -> None:
    with pytest.raises(UnavailableError, match=words):
        plan_of(one(), one(), capabilities=have, choice=ContractChoice(choice))


def test_temporary_tensors_and_conversions_are_streamed() -> None:
    gathered = one(kind=RegionKind.TEMPORARY)
    assert "'w' is a temporary tensor" in plan_of(gathered, one()).contract_reason
    with pytest.raises(UnavailableError, match="'w' is a temporary tensor"):
        plan_of(gathered, one(), choice=ContractChoice.DIRECT)
    master = one(wire={"w": ["float32", "bfloat16"]})
    wire = one(dtype="bfloat16")
    have = can(converts=False)
    assert "'w' is converted" in plan_of(master, wire, capabilities=have).contract_reason
    assert plan_of(master, one(), capabilities=have).contract is Contract.DIRECT
    assert plan_of(master, wire).contract is Contract.DIRECT


@pytest.mark.parametrize(
    ("order", "box", "runs"),
    [
        ((0, 1), Box.whole((4, 6)), 1),
        ((1, 0), Box.whole((4, 6)), 24),
        ((0, 1), Box((0, 0), (4, 3)), 4),
        ((0, 1), Box((1, 0), (3, 6)), 1),
    ],
)
def test_direct_operations_are_runs_of_the_source(
    order: tuple[int, ...], box: Box, runs: int
) -> None:
    source = build(1, {"w": ("int8", (4, 6), [Held(0, Box.whole((4, 6)), order)])}).layout
    target = build(1, {"w": ("int8", (4, 6), [Held(0, box, (0, 1))])}).layout
    plan = plan_of(source, target)
    assert num_direct_ops(plan.tensors, plan.transfers, source) == runs


# --- buckets ----------------------------------------------------------------------------------------


def test_large_transfers_are_cut_and_slots_are_never_above_their_size() -> None:
    names = {"a": (100,), "big": (3000,), "c": (10,)}
    layout = build(1, {n: ("int8", s, [whole(s)]) for n, s in names.items()}).layout
    plan = plan_of(layout, layout, bucket_bytes=1024)
    assert [[(c.item, c.num_bytes) for c in b] for b in plan.buckets] == [
        [(0, 100), (1, 768)], [(1, 1024)], [(1, 1024)], [(1, 184), (2, 10)],
    ]  # fmt: skip
    for bucket in plan.buckets:
        used = max(c.offset_bytes + c.num_bytes for c in bucket)
        assert -(-used // 16) * 16 + len(bucket) * 32 <= slot_bytes(1024)


def test_a_slot_has_room_for_its_entries_however_many_tensors_there_are() -> None:
    layout = build(1, {f"t{i:04}": ("int8", (0,), [whole((0,))]) for i in range(200)}).layout
    plan = plan_of(layout, layout, bucket_bytes=4096)
    assert max_entries(4096) == 64
    assert [len(b) for b in plan.buckets] == [64, 64, 64, 8]


# --- tampering --------------------------------------------------------------------------------------


def sample() -> tuple[Layout, Layout, RefitPlan]:
    shape = (4, 6)
    tensors: dict[str, Any] = {
        "a": ("float32", shape, shards(shape, 0, [2, 4])),
        "b": ("int8", (5,), [whole((5,))]),
    }
    source = build(2, tensors).layout
    halves = [
        Held(0, Box((0, 0), (4, 3)), (0, 1)),
        Held(0, Box((0, 3), (4, 6)), (0, 1)),
    ]
    target = build(1, {"a": ("float32", shape, halves), "b": ("int8", (5,), [whole((5,))])}).layout
    return source, target, plan_of(source, target, choice=ContractChoice.STREAM)


#: (field, new value) of transfer 0, which brings box (0,0):(2,3) of "a" from rank 0.
TAMPERED: list[tuple[str, dict[str, Any]]] = [
    ("another tensor", {"tensor": 1}),
    ("another source box", {"source_placed": 1}),
    ("a source box that is not there", {"source_placed": 9}),
    ("another slot", {"target_placed": 1}),
    ("a slot that is not there", {"target_placed": 9}),
    ("another source rank", {"source_rank": 1}),
    ("another target rank", {"target_rank": 1}),
    ("a larger box", {"box": Box((0, 0), (2, 4))}),
    ("a smaller box", {"box": Box((0, 0), (2, 2))}),
    ("an overlapping box", {"box": Box((1, 0), (2, 3))}),
    ("a box of fewer dimensions", {"box": Box((0,), (2,))}),
    ("a box outside", {"box": Box((100, 0), (102, 3))}),
    ("an empty box", {"box": Box((0, 0), (0, 3))}),
]


@pytest.mark.parametrize(("what", "change"), TAMPERED, ids=[w for w, _ in TAMPERED])
def test_a_tampered_transfer_is_refused(what: str, change: dict[str, Any]) -> None:
    source, target, plan = sample()
    check_plan(plan, source, target)
    bad = replace(plan.transfers[0], **change)
    with pytest.raises(WeightSyncError, match=r"'a'|'b'|plan"):
        check_plan(replace(plan, transfers=(bad, *plan.transfers[1:])), source, target)


def test_transfers_that_are_missing_repeated_or_overlap_are_refused() -> None:
    source, target, plan = sample()
    a, b, *rest = plan.transfers
    shifted = replace(b, box=a.box, source_placed=a.source_placed, source_rank=a.source_rank)
    for bad in ((b, *rest), (a, a, b, *rest), (a, shifted, *rest)):
        with pytest.raises(ProtocolError, match="'a'"):
            check_plan(replace(plan, transfers=bad), source, target)


def test_tampered_tensors_are_refused() -> None:
    source, target, plan = sample()
    a, b = plan.tensors
    for bad in (
        replace(a, source=7), replace(a, source=-1), replace(a, target=7), replace(a, target=-1),
        replace(a, source=1), replace(a, target=1), b,
        replace(a, meta=replace(a.meta, dtype="int32")),
        replace(a, meta=replace(a.meta, shape=(4, 7))),
        replace(a, meta=replace(a.meta, name="c")),
    ):  # fmt: skip
        with pytest.raises(WeightSyncError):
            check_plan(replace(plan, tensors=(bad, b)), source, target)


def test_a_wire_form_that_the_source_does_not_offer_is_refused() -> None:
    offering = one(wire={"w": ["float32", "bfloat16"]})
    target = one(dtype="bfloat16")
    plan = plan_of(offering, target)
    strict = one()
    with pytest.raises(ProtocolError, match="'w'"):
        check_plan(replace(plan, source_digest=strict.digest), strict, target)


def test_a_plan_of_other_layouts_is_refused() -> None:
    source, target, plan = sample()
    for change, words in (
        ({"target_digest": "0"}, "this engine's"),
        ({"source_digest": "0"}, "the trainer's"),
    ):
        with pytest.raises(ProtocolError, match=words):
            check_plan(replace(plan, **change), source, target)


@pytest.mark.parametrize("size", [0, -1, 255, 2**63])
def test_a_bucket_size_that_cannot_be_is_refused(size: int) -> None:
    source, target, plan = sample()
    with pytest.raises(WeightSyncError, match="bucket"):
        check_plan(replace(plan, bucket_bytes=size), source, target)


def test_malformed_plans_raise_only_our_errors() -> None:
    from test_layout import mutations

    source, target, plan = sample()
    good = json.loads(json.dumps(plan.to_json()))
    survivors = 0
    for bad in mutations(good):
        try:
            check_plan(RefitPlan.from_json(bad), source, target)
            survivors += 1
        except WeightSyncError:
            continue
    # What may be anything: the reason, a bucket size that fits, and what rounds to the same number.
    assert survivors < 40
