"""Plans between random meshes, executed on plain arrays: every target box, each element once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from layouts import Held, Model, build
from meshes import CAN, Array, clusters

from weightsync.layout import Layout
from weightsync.layouts.describe import engine_layout, trainer_layout
from weightsync.plan import RefitPlan, check_plan, plan_engines
from weightsync.planning.topology import sites_in_order
from weightsync.types import (
    Box,
    TensorMeta,
)


def plans_of(source: Layout, targets: list[Layout], **options: Any) -> tuple[RefitPlan, ...]:
    return plan_engines(source, targets, bucket_bytes=2**20, capabilities=CAN, **options)


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
