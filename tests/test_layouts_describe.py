"""Described layouts: against the bundled core's own slots, and by what they must cover."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.core.config import parse_config
from engine_adapter.core.shards import Shards
from engine_adapter.core.weights import storage_specs
from weightsync.errors import ConfigError
from weightsync.layout import Layout
from weightsync.layouts import check_layout, engine_layout, preset_metas, trainer_layout
from weightsync.layouts.quantised import FP8, fp8_metas
from weightsync.plan import check_plan, make_plan
from weightsync.presets import get_preset
from weightsync.types import (
    Availability,
    Box,
    Capabilities,
    Contract,
    CostConstants,
    SlotKind,
    TensorMeta,
)

TINY = ("tiny", "tiny-moe")


def counts(layout: Layout) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """How many ranks hold each element of each tensor; no rank may hold one twice."""
    for tensor in layout.tensors:
        ranks = [p.rank for p in tensor.placed]
        assert len(set(ranks)) == len(ranks), tensor.name  # one box a rank
        held = np.zeros(tensor.shape, np.int32)
        for p in tensor.placed:
            held[tuple(map(slice, p.box.start, p.box.stop))] += 1
        yield tensor.name, held


def core_boxes(preset: str, tp: int, ep: int) -> set[tuple[str, int, Box]]:
    world = max(tp, ep)
    config = parse_config(get_preset(preset).config())
    return {
        (part.name, rank, part.box)
        for rank in range(world)
        for spec in storage_specs(config, Shards(rank, world, tp, ep))
        for part in spec.parts
        if part.box.num_elements
    }


def boxes_of(layout: Layout) -> set[tuple[str, int, Box]]:
    return {(t.name, p.rank, p.box) for t in layout.tensors for p in t.placed}


@pytest.mark.parametrize(
    ("preset", "tp", "ep"),
    [
        ("tiny", 1, 1), ("tiny", 2, 1), ("tiny", 4, 1),
        ("tiny-moe", 2, 1), ("tiny-moe", 1, 2), ("tiny-moe", 1, 3), ("tiny-moe", 2, 2),
        ("tiny-moe", 4, 4), ("tiny-moe", 4, 1), ("tiny-moe", 1, 7),
    ],
)  # fmt: skip
def test_an_engine_is_described_as_the_core_declares_it(preset: str, tp: int, ep: int) -> None:
    layout = engine_layout(preset_metas(preset), tp=tp, ep=ep)
    assert boxes_of(layout) == core_boxes(preset, tp, ep)
    assert layout.world_size == max(tp, ep)


def test_an_engine_is_described_as_the_real_slots_are(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from engine_adapter.core.model import DecoderModel
    from engine_adapter.core.parallel import Group

    preset = get_preset("tiny-moe")
    described = engine_layout(preset_metas("tiny-moe"), tp=2, ep=2)
    for rank in range(2):

        class OfTwo(Group):
            def __init__(self, rank: int) -> None:
                self.process_group, self.rank, self.size = None, rank, 2

        shards = Shards(rank, 2, 2, 2)
        model = DecoderModel(
            parse_config(preset.config()), torch.bfloat16, shards=shards, group=OfTwo(rank)
        )
        real = model.slots.layout(rank, 2)
        forms = {t.name: (t.wire_forms, t.kind) for t in described.tensors}
        assert {t.name: (t.wire_forms, t.kind) for t in real.tensors}.items() <= forms.items()
        own = {entry for entry in boxes_of(described) if entry[1] == rank}
        assert boxes_of(real) == own


ENGINES = [
    ({"tp": 4, "dp": 2}, {"dense": 2, "expert": 2}),
    ({"tp": 2, "dp": 2, "ep": 4}, {"dense": 2, "expert": 1}),
    ({"tp": 4, "ep": 2}, {"dense": 1, "expert": 1}),
    ({"tp": 2, "dp": 4, "ep": 4}, {"dense": 4, "expert": 2}),
    ({"ep": 5}, {"dense": 5, "expert": 1}),
]


@pytest.mark.parametrize(("sizes", "copies"), ENGINES, ids=str)
def test_an_engine_holds_everything_as_often_as_said(
    sizes: dict[str, int], copies: dict[str, int]
) -> None:
    layout = engine_layout(preset_metas("tiny-moe"), **sizes)
    key_copies = max(1, sizes.get("tp", 1) // 2)  # there are two key heads
    for name, held in counts(layout):
        if "_proj" not in name:
            assert held.min() >= 1, name
            continue
        expected = copies["expert" if ".experts." in name else "dense"]
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            expected *= key_copies
        assert held.min() == held.max() == expected, name


TRAINERS = [
    {}, {"fsdp": 3}, {"fsdp": 7}, {"tp": 2}, {"tp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 2}, {"pp": 3},
    {"pp": 2, "ep": 4}, {"ep": 8, "fsdp": 4}, {"ep": 2, "fsdp": 4, "tp": 2}, {"ep": 16, "fsdp": 32},
    {"ep": 2, "dp": 2, "fsdp": 2, "pp": 2}, {"fsdp": 20},
]  # fmt: skip


@pytest.mark.parametrize("sizes", TRAINERS, ids=str)
@pytest.mark.parametrize("preset", TINY)
def test_a_trainer_holds_every_element(preset: str, sizes: dict[str, int]) -> None:
    layout = trainer_layout(preset_metas(preset), **sizes)
    dense = sizes.get("dp", 1) * sizes.get("fsdp", 1) * sizes.get("tp", 1)
    assert layout.world_size == sizes.get("pp", 1) * max(dense, sizes.get("ep", 1))
    for name, held in counts(layout):
        assert held.min() == held.max() >= 1, name  # every element as often as the others


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_trainer_gives_any_engine_what_it_lacks(data: st.DataObject) -> None:
    def draw(*names: str) -> dict[str, int]:
        return {name: data.draw(st.sampled_from([1, 2, 4]), name) for name in names}

    trainer, engine = draw("fsdp", "tp", "pp", "dp"), draw("tp", "ep", "dp")
    trainer["ep"] = data.draw(st.sampled_from([1, trainer["fsdp"] * trainer["tp"]]))
    metas = preset_metas("tiny-moe")
    source = trainer_layout(metas, **trainer)
    target = engine_layout(metas, **engine)
    check_layout(source)
    check_layout(target, "engine")
    streams = Capabilities(
        "any", {Contract.STREAM: Availability(True)}, {Contract.STREAM: CostConstants(1e-6, 1e9)}
    )
    plan = make_plan(source, target, bucket_bytes=2**20, capabilities=streams)
    check_plan(plan, source, target)
    assert plan.total_bytes == sum(2 * p.box.num_elements for t in target.tensors for p in t.placed)


def test_pipeline_stages_hold_their_layers() -> None:
    layout = trainer_layout(preset_metas("tiny"), pp=3)
    ranks = {t.name: {p.rank for p in t.placed} for t in layout.tensors}
    assert ranks["model.embed_tokens.weight"] == {0}
    assert ranks["model.norm.weight"] == {2}
    first = [ranks[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(4)]
    assert first == [{0}, {1}, {2}, {2}]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "3"), ({"tp": 0}, "tp=0"), ({"tp": 4, "ep": 3}, "tp=4, ep=3"),
        ({"dp": 3, "ep": 2}, "number of ranks"), ({"wire": "int4"}, "int4"), ({"tp": 8}, "cut by tp=8"),
    ],
    ids=str,
)  # fmt: skip
def test_engines_that_cannot_be_are_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_layout(preset_metas("tiny-moe"), **sizes)  # type: ignore[arg-type]


def test_the_size_of_a_head_is_not_guessed_where_it_matters() -> None:
    """Eight key heads of 64: as many rows as four of 128."""
    shapes = {"q": (1024, 8), "k": (512, 8), "v": (512, 8)}
    metas = [
        TensorMeta(f"model.layers.0.self_attn.{p}_proj.weight", "bfloat16", s)
        for p, s in shapes.items()
    ]
    with pytest.raises(ConfigError, match="head_dim="):
        engine_layout(metas, tp=8)
    rows = [p.box.shape[0] for p in engine_layout(metas, tp=8, head_dim=64).tensors[1].placed]
    assert rows == [64] * 8
    rows = [p.box.shape[0] for p in engine_layout(metas, tp=8, head_dim=128).tensors[1].placed]
    assert rows == [128] * 8
    assert boxes_of(engine_layout(metas, tp=4)) == boxes_of(engine_layout(metas, tp=4, head_dim=64))


def test_parts_of_experts_lie_on_neighbours() -> None:
    layout = trainer_layout(preset_metas("tiny-moe"), ep=4, fsdp=8, dp=2)
    ranks = [
        [p.rank for p in layout.tensors[layout.index[name]].placed]
        for name in (f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in (0, 2, 4, 15))
    ]
    assert ranks == [[0, 8], [4, 12], [1, 9], [7, 15]]  # two sharers of a part, two replicas


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"pp": 5}, "4 layers"), ({"fsdp": 3, "ep": 2}, "must divide"), ({"fsdp": True}, "fsdp=True")],
    ids=str,
)
def test_trainers_that_cannot_be_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_layout(preset_metas("tiny-moe"), **sizes)


def test_a_quantised_engine_takes_both_wire_forms() -> None:
    metas = [
        TensorMeta("model.layers.0.mlp.up_proj.weight", "bfloat16", (320, 130)),
        TensorMeta("model.layers.0.mlp.gate.weight", "bfloat16", (8, 130)),
        TensorMeta("model.norm.weight", "bfloat16", (130,)),
    ]
    layout = engine_layout(metas, tp=2, wire="fp8")
    up, scale, gate, norm = layout.tensors
    assert [f.dtype for f in up.wire_forms] == [FP8, "bfloat16"]
    assert (scale.name, scale.shape, scale.wire_forms[0].dtype) == (
        "model.layers.0.mlp.up_proj.weight_scale_inv", (3, 2), "float32",
    )  # fmt: skip
    assert up.kind is scale.kind is SlotKind.OPAQUE
    assert gate.kind is norm.kind is SlotKind.AFFINE
    # 160 rows a rank: the block in the middle is needed by both.
    assert [p.box.start[0] for p in scale.placed] == [0, 1]
    assert [p.box.stop[0] for p in scale.placed] == [2, 3]
    sent = fp8_metas(metas)
    assert [(m.name, m.dtype, m.shape) for m in sent[:2]] == [
        (t.name, t.wire_forms[0].dtype, t.shape) for t in (up, scale)
    ]
    assert boxes_of(engine_layout(sent, tp=2, wire="fp8")) == boxes_of(layout)
    source = trainer_layout(sent, fsdp=2)
    assert {t.kind for t in source.tensors} == {SlotKind.AFFINE}
