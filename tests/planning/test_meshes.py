"""Plans between random meshes, executed on plain arrays: every target box, each element once."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from layouts import Held, Model, build, fill

from weightsync.layout import Layout
from weightsync.layouts.describe import engine_layout, trainer_layout
from weightsync.plan import RefitPlan, check_plan, plan_engines
from weightsync.planning.topology import sites_in_order
from weightsync.types import (
    Availability,
    Box,
    Capabilities,
    Contract,
    CostConstants,
    TensorMeta,
)

CAN = Capabilities(
    "fake",
    {c: Availability(True) for c in Contract},
    {c: CostConstants(0.0, 1e9) for c in Contract},
    True,
)
Array = np.ndarray[Any, Any]


def plans_of(source: Layout, targets: list[Layout], **options: Any) -> tuple[RefitPlan, ...]:
    return plan_engines(source, targets, bucket_bytes=2**20, capabilities=CAN, **options)


def cuts(draw: st.DrawFn, extent: int, parts: int) -> list[tuple[int, int]]:
    """A dimension in ``parts`` ranges: even, in chunks rounded up (the last ones short or empty), or
    anywhere."""
    how = draw(st.sampled_from(["even", "ceil", "any"]))
    if how == "ceil":
        size = -(-extent // parts)
        stops = [min((i + 1) * size, extent) for i in range(parts)]
    elif how == "even":
        stops = [(i + 1) * extent // parts for i in range(parts)]
    else:
        inner = sorted(
            draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1))
        )
        stops = [*inner, extent]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def interleaved(extent: int, parts: int, groups: int) -> list[list[tuple[int, int]]]:
    """Part i has the i-th slice of each group, as fused and interleaved projections are cut."""
    size = -(-extent // groups)
    found: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for g in range(groups):
        low, high = min(g * size, extent), min((g + 1) * size, extent)
        for i in range(parts):
            a = low + i * (high - low) // parts
            found[i].append((a, low + (i + 1) * (high - low) // parts))
    return found


@st.composite
def mesh(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[Held]:
    """One tensor over ``world`` ranks: cut along up to two dimensions, the rest of the ranks replicas.

    Boxes without an element stay in: ranks with nothing of a tensor do declare that.
    """
    if not shape:
        return [Held(r, Box((), ()), ()) for r in range(world)]
    outer = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    inner = draw(
        st.sampled_from([n for n in range(1, world // outer + 1) if world // outer % n == 0])
    )
    d, e = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1))
    groups = draw(st.integers(1, 3))
    first = interleaved(shape[d], outer, groups)
    if groups == 1:
        first = [[part] for part in cuts(draw, shape[d], outer)]
    second = cuts(draw, shape[e], inner) if e != d else [(0, shape[e])] * inner
    replicas_first = draw(st.booleans())
    found = []
    for rank in range(world):
        place = rank // (world // (outer * inner)) if replicas_first else rank % (outer * inner)
        for low, high in first[place // inner]:
            start, stop = [0] * len(shape), list(shape)
            start[d], stop[d] = low, high
            if e != d:
                start[e], stop[e] = second[place % inner]
            order = tuple(draw(st.permutations(range(len(shape)))))
            found.append(Held(rank, Box(tuple(start), tuple(stop)), order))
    return found


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Model, list[Model], dict[str, Array]]:
    """A trainer, one to three engines, and what the tensors hold."""
    worlds = [draw(st.integers(1, 8)) for _ in range(draw(st.integers(2, 4)))]
    tensors: list[dict[str, Any]] = [{} for _ in worlds]
    reference = {}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        dtype = draw(st.sampled_from(["int8", "uint16", "float32"]))
        reference[f"t{i}"] = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
        for side, world in zip(tensors, worlds, strict=True):
            side[f"t{i}"] = (dtype, shape, draw(mesh(shape, world)))
    source, *targets = (build(w, t) for w, t in zip(worlds, tensors, strict=True))
    fill(source, reference)
    return source, targets, reference


def execute(plan: RefitPlan, source: Model, target: Model) -> Counter[tuple[int, int]]:
    """Copy boxes as the plan says; elements that each slot got."""
    got: Counter[tuple[int, int]] = Counter()
    for t in plan.transfers:
        if not t.num_bytes:  # a name without bytes
            continue
        planned = plan.tensors[t.tensor]
        views = []
        for model, i, j in (
            (source, planned.source, t.source_placed),
            (target, planned.target, t.target_placed),
        ):
            entry = model.layout.tensors[i]
            base = entry.placed[j].box.start
            part = tuple(
                slice(a - o, b - o) for a, b, o in zip(t.box.start, t.box.stop, base, strict=True)
            )
            views.append(model.view(entry.name, j)[(*part, ...)])  # a view also of no dimension
        assert views[0].shape == views[1].shape == t.box.shape
        views[1][...] = views[0]
        got[planned.target, t.target_placed] += t.box.num_elements
    return got


@given(clusters(), st.integers(1, 4))
def test_every_engine_gets_its_boxes_and_each_element_once(
    case: tuple[Model, list[Model], dict[str, Array]], gpus_per_host: int
) -> None:
    source, targets, reference = case
    layouts = [t.layout for t in targets]
    plans = plans_of(
        source.layout,
        layouts,
        source_sites=sites_in_order(source.layout.world_size, gpus_per_host=gpus_per_host),
        target_sites=[sites_in_order(t.world_size, gpus_per_host=gpus_per_host) for t in layouts],
    )
    for plan, target in zip(plans, targets, strict=True):
        check_plan(plan, source.layout, target.layout)
        for memory in target.memory:
            memory[:] = 0xAA
        got = execute(plan, source, target)
        wanted = {
            (i, j): p.box.num_elements
            for i, t in enumerate(target.layout.tensors)
            for j, p in enumerate(t.placed)
        }
        assert {key: n for key, n in wanted.items() if n} == {k: n for k, n in got.items() if n}
        for name, value in reference.items():
            for j, p in enumerate(target.layout.tensors[target.layout.index[name]].placed):
                part = value[tuple(map(slice, p.box.start, p.box.stop))]
                np.testing.assert_array_equal(target.view(name, j), part)
        # The least there is: every rank gets what its slots hold, and nothing else.
        lacks = sum(v.nbytes for v in (target.view(t.name, j) for t in target.layout.tensors
                                       for j in range(len(t.placed))))  # fmt: skip
        assert plan.total_bytes == lacks


def moe_metas(num_experts: int, layers: int = 2) -> list[TensorMeta]:
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (23, 8))]
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes += [
            (at + "input_layernorm.weight", (8,)),
            (at + "self_attn.q_proj.weight", (16, 8)),
            (at + "self_attn.k_proj.weight", (8, 8)),
            (at + "self_attn.q_norm.weight", (4,)),
            (at + "self_attn.o_proj.weight", (8, 16)),
            (at + "mlp.gate.weight", (num_experts, 8)),
        ]
        for e in range(num_experts):
            shapes += [
                (f"{at}mlp.experts.{e}.up_proj.weight", (6, 8)),
                (f"{at}mlp.experts.{e}.down_proj.weight", (8, 6)),
            ]
    return [TensorMeta(name, "bfloat16", shape) for name, shape in shapes]


def held_bytes(layout: Layout) -> int:
    return sum(
        p.box.num_elements * t.wire_forms[0].num_bytes // max(1, t.wire_forms[0].num_elements)
        for t in layout.tensors
        for p in t.placed
    )


@given(
    num_experts=st.integers(1, 9), fsdp=st.integers(1, 3), tp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]), pp=st.integers(1, 2), engine_tp=st.sampled_from([1, 2]),
    engine_ep=st.sampled_from([1, 2, 4]), engine_dp=st.integers(1, 2),
)  # fmt: skip
def test_described_clusters_of_any_expert_count(
    num_experts: int, fsdp: int, tp: int, ep: int, pp: int, engine_tp: int, engine_ep: int,
    engine_dp: int,
) -> None:  # fmt: skip
    from weightsync.errors import ConfigError

    metas = moe_metas(num_experts)
    try:
        source = trainer_layout(metas, fsdp=fsdp, tp=tp, ep=ep, pp=pp)
        target = engine_layout(metas, tp=engine_tp, ep=engine_ep, dp=engine_dp)
    except ConfigError:  # counts that do not fit each other are its own tests' subject
        return
    (plan,) = plans_of(source, [target])
    check_plan(plan, source, target)
    assert plan.total_bytes == held_bytes(target)


# --- balance and topology ---------------------------------------------------------------------------


def replicas(world: int, num_tensors: int = 8) -> Layout:
    whole = Box.whole((64,))
    held = [Held(r, whole, (0,)) for r in range(world)]
    return build(world, {f"t{i}": ("int8", (64,), held) for i in range(num_tensors)}).layout


def bytes_out(plans: tuple[RefitPlan, ...], world: int) -> list[int]:
    sent: Array = np.zeros(world, dtype=np.int64)
    for plan in plans:
        np.add.at(sent, plan.transfers.source_rank, plan.transfers.num_bytes)
    found: list[int] = sent.tolist()
    return found


def test_engines_share_the_replicas_of_the_trainer() -> None:
    plans = plans_of(replicas(4), [replicas(2)] * 3)
    assert bytes_out(plans, 4) == [8 * 2 * 3 * 64 // 4] * 4


def test_what_leaves_no_choice_is_counted_before_what_does() -> None:
    whole = Box.whole((64,))
    source = build(
        2,
        {"only": ("int8", (64,), [Held(0, whole, (0,))]),
         "both": ("int8", (64,), [Held(0, whole, (0,)), Held(1, whole, (0,))])},
    ).layout  # fmt: skip
    target = build(1, {n: ("int8", (64,), [Held(0, whole, (0,))]) for n in ("both", "only")}).layout
    assert bytes_out(plans_of(source, [target]), 2) == [64, 64]


def test_network_cards_are_balanced_before_ranks() -> None:
    """Ranks 0 and 1 share a card, rank 2 has its own."""
    source, target = replicas(3, 4), replicas(1, 4)
    sites = replace(sites_in_order(3, gpus_per_host=1), nic=(0, 0, 1))
    plans = plans_of(
        source, [target], source_sites=sites,
        target_sites=[sites_in_order(1, gpus_per_host=1, first_host=9)],
    )  # fmt: skip
    assert bytes_out(plans, 3) == [64, 64, 128]


def test_the_nearest_replica_gives() -> None:
    """Two hosts of two GPUs: engine rank 0 is on the GPU of trainer rank 3, rank 1 beside it."""
    source, target = replicas(4), replicas(2)
    there = sites_in_order(4, gpus_per_host=2)
    here = replace(sites_in_order(2, gpus_per_host=2), host=(1, 1), gpu=(1, 0))
    (plan,) = plans_of(source, [target], source_sites=there, target_sites=[here])
    assert plan.bytes_by_pair() == {(3, 0): 512, (2, 1): 512}
    far = replace(here, host=(1, 7))
    (plan,) = plans_of(source, [target], source_sites=there, target_sites=[far])
    pairs = plan.bytes_by_pair()
    assert pairs.pop((3, 0)) == 512
    assert {target for _, target in pairs} == {1}
    # What rank 3 gives on its own GPU costs its card nothing, but the rank is the busiest.
    assert pairs == {(0, 1): 128, (1, 1): 128, (2, 1): 128, (3, 1): 128}
