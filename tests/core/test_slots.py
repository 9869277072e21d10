"""Slots: exact read-back, fixed addresses, boxes over ranks, derived tensors, sealing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from core_models import make_model, torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.core.arena import ALIGNMENT_BYTES, Arena, MemoryTag, lay_out
from engine_adapter.core.config import ModelConfig, parse_config
from engine_adapter.core.model import DecoderModel
from engine_adapter.core.parallel import Group
from engine_adapter.core.reach import reachable_tensors
from engine_adapter.core.shards import Shards
from engine_adapter.core.slots import SlotTable
from engine_adapter.core.weights import storage_specs
from weightsync.errors import CapacityError, ConfigError, LayoutError, ShapeMismatchError
from weightsync.layout import join_layouts
from weightsync.plan import make_plan
from weightsync.transports import get_transport
from weightsync.types import Box, SlotKind
from weightsync.watch import Look


def config_of(variant: str) -> ModelConfig:
    return parse_config(make_model(variant, torch.bfloat16).config.to_diff_dict())


def blank(variant: str = "dense", **options: Any) -> DecoderModel:
    return DecoderModel(config_of(variant), torch.bfloat16, **options)


def rank_of(config: ModelConfig, shards: Shards) -> DecoderModel:
    group = Group.__new__(Group)  # no step is run: a group that only knows its size
    group.process_group, group.rank, group.size = None, shards.rank, shards.world_size
    return DecoderModel(config, torch.bfloat16, shards=shards, group=group)


def fill(slots: SlotTable, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    values = {n: torch.randn(s.shape).to(s.dtype) for n, s in slots.slots.items()}
    for name, value in values.items():
        slots.write(name, value)
    return values


# --- reading and writing --------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["tied", "moe-mixed", "qwen2", "llama"])
def test_what_was_written_is_read_back_bit_for_bit(variant: str) -> None:
    slots = blank(variant).slots
    values = fill(slots)
    for name, value in values.items():
        assert torch.equal(slots.slot(name).read_whole(), value), name


def test_slots_cover_their_storages_exactly() -> None:
    model = blank("moe-mixed")
    for storage in model.slots.storages.values():
        storage.fill_(float("nan"))
    fill(model.slots)
    for name, storage in model.slots.storages.items():
        assert not storage.isnan().any(), name


def test_a_slot_refuses_another_shape_and_an_unknown_name() -> None:
    slots = blank().slots
    with pytest.raises(ShapeMismatchError, match=r"got shape \(3,\), the model has \(64,\)"):
        slots.write("model.norm.weight", torch.ones(3))
    with pytest.raises(LayoutError, match=r"closest: 'model\.norm\.weight'"):
        slots.write("model.norms.weight", torch.ones(64))


STRAY = torch.ones(3)


class Transposed:
    """A codec that keeps a matrix transposed."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.kept = torch.zeros(shape[1], shape[0], dtype=torch.bfloat16)

    def store(self, tensor: Any) -> None:
        self.kept.copy_(tensor.T)

    def load(self) -> Any:
        return self.kept.T


def test_an_opaque_slot_goes_through_its_codec() -> None:
    slots, name = blank().slots, "model.layers.0.mlp.down_proj.weight"
    codec = Transposed((64, 96))
    slots.make_opaque(name, codec)
    slots.add_constant("kept", codec.kept)
    value = torch.randn(64, 96).bfloat16()
    slots.write(name, value)
    assert torch.equal(slots.slot(name).read_whole(), value)
    assert torch.equal(codec.kept, value.T)
    layout = slots.layout()
    assert layout.tensors[layout.index[name]].kind is SlotKind.OPAQUE


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "tp_size", "ep_size", "size"),
    [
        ("dense", 2, 1, 2), ("tied", 2, 1, 2), ("mqa", 2, 1, 2), ("odd", 4, 1, 4),
        ("llama", 4, 1, 4), ("moe", 2, 1, 2), ("moe-mixed", 1, 2, 2), ("moe-mixed", 4, 4, 4),
    ],
)  # fmt: skip
def test_ranks_together_hold_every_box(variant: str, tp_size: int, ep_size: int, size: int) -> None:
    config = config_of(variant)
    ranks = [rank_of(config, Shards(r, size, tp_size, ep_size)) for r in range(size)]
    layouts = [m.slots.layout(r, size) for r, m in enumerate(ranks)]
    whole = DecoderModel(config, torch.bfloat16).slots
    joined = join_layouts(layouts)
    assert set(joined.index) == set(whole.slots)
    assert joined.aliases == dict(whole.aliases)
    for tensor in joined.tensors:
        left = [Box.whole(tensor.shape)]
        for placed in tensor.placed:
            left = [rest for box in left for rest in box.subtract(placed.box)]
        assert not left, tensor.name
        for r, layout in enumerate(layouts):
            if tensor.name in layout.index:
                mine = layout.tensors[layout.index[tensor.name]].placed
                assert {p.rank for p in mine} == {r}
    for rank, model in enumerate(ranks):
        # Norms, and attention under expert parallel alone, are on every rank.
        assert _num_bytes(model.slots) < _num_bytes(whole) * 0.85
        assert [a.region for a in model.slots.addresses()] == [0]
        assert len(joined.regions[rank]) == 1


def _num_bytes(slots: SlotTable) -> int:
    return sum(a.num_bytes for a in slots.addresses())


def test_experts_go_only_to_the_rank_that_owns_them() -> None:
    config = config_of("moe")
    layout = rank_of(config, Shards(1, 2, 1, 2)).slots.layout(1, 2)
    experts = {n.split(".experts.")[1].split(".")[0] for n in layout.index if ".experts." in n}
    assert experts == {"4", "5", "6", "7"}


def test_a_plan_sends_each_rank_only_its_share() -> None:
    config = config_of("dense")
    size = 2
    parts = [rank_of(config, Shards(r, size, 2)).slots for r in range(size)]
    joined = join_layouts([p.layout(r, size) for r, p in enumerate(parts)])
    source = DecoderModel(config, torch.bfloat16).slots.layout()
    have = get_transport("loopback").capabilities()
    plan = make_plan(source, joined, bucket_bytes=2**20, capabilities=have)
    sent = {r: sum(t.num_bytes for t in plan.transfers if t.target_rank == r) for r in range(size)}
    held = {
        r: sum(p.view.nbytes for s in parts[r].slots.values() for p in s.placed)
        for r in range(size)
    }
    assert sent == held


def test_a_slot_of_a_rank_takes_its_part_of_a_whole_tensor() -> None:
    config = config_of("dense")
    value = torch.randn(64, 128).bfloat16()
    for rank in range(2):
        slots = rank_of(config, Shards(rank, 2, 2)).slots
        slots.write("model.layers.0.self_attn.o_proj.weight", value)
        (placed,) = slots.slot("model.layers.0.self_attn.o_proj.weight").read()
        assert torch.equal(placed.view, value[:, rank * 64 : rank * 64 + 64])
        with pytest.raises(LayoutError, match="holds only a part"):
            slots.slot("model.layers.0.self_attn.o_proj.weight").read_whole()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda c: Shards(2, 2, 2), "rank 2 of an engine of 2"),
        (lambda c: Shards(0, 4, 2, 2), "each must be 1 or 4"),
        (lambda c: Shards(0, 2), "one of them 2"),
        (lambda c: storage_specs(c, Shards(0, 3, 3)), "8 attention heads .* tp_size 3"),
        (lambda c: storage_specs(c, Shards(0, 8, 8)), None),
    ],
)
def test_splits_that_cannot_be(act: Any, words: str | None) -> None:
    config = config_of("dense")
    if words is None:
        assert act(config)
        return
    with pytest.raises(ConfigError, match=words):
        act(config)


# --- derived tensors and sealing ------------------------------------------------------------------


@dataclass
class Planted:
    """A model with a tensor derived from one of its weights."""

    model: DecoderModel
    half: Any = None
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.half = torch.zeros(64, dtype=torch.bfloat16)
        self.model.slots.add_derived("half", self.half, ["model.norm.weight"], self.refresh)

    def refresh(self) -> None:
        self.calls.append("half")
        self.half.copy_(self.model.norm / 2)


def test_derived_tensors_follow_their_sources() -> None:
    planted = Planted(blank())
    slots = planted.model.slots
    fill(slots)
    assert slots.refresh(["model.embed_tokens.weight"]) == []
    assert slots.refresh(["model.norm.weight", "lm_head.weight"]) == ["half"]
    assert torch.equal(planted.half, planted.model.norm / 2)
    assert slots.refresh() == ["half"]
    assert planted.calls == ["half"] * 3


def test_a_derived_tensor_of_a_tied_name_follows_either_name() -> None:
    slots = blank("tied").slots
    slots.add_derived("d", torch.zeros(1), ["lm_head.weight"], lambda: None)
    assert slots.refresh(["model.embed_tokens.weight"]) == ["d"]
    assert slots.refresh(["lm_head.weight"]) == ["d"]


def test_registration_is_checked() -> None:
    slots = blank().slots
    with pytest.raises(ConfigError, match="has no source"):
        slots.add_derived("d", torch.zeros(1), [], lambda: None)
    with pytest.raises(LayoutError, match="'nothing' is not a tensor"):
        slots.add_derived("d", torch.zeros(1), ["nothing"], lambda: None)
    with pytest.raises(ConfigError, match="registered already"):
        slots.add_constant("rope.cos", torch.zeros(1))
    with pytest.raises(ConfigError, match="are not sealed"):
        slots.moved(Look.IDENTITY)


def test_sealing_accepts_what_is_registered_and_names_what_is_not() -> None:
    planted = Planted(blank("moe-mixed"))
    slots = planted.model.slots
    slots.seal(planted)
    assert [slots.moved(look) for look in Look] == [[], []]
    with pytest.raises(ConfigError, match="comes too late"):
        slots.add_constant("late", torch.zeros(1))
    for plant in (
        lambda m: setattr(m, "scratch", torch.ones(3)),
        lambda m: setattr(m.layers[1].mlp, "down", torch.ones(3)),
        lambda m: setattr(m, "hook", lambda x=STRAY: x),
        lambda m: setattr(m, "hooks", {"a": [partial(torch.add, torch.ones(3))]}),
        lambda m: setattr(m, "module", torch.nn.Linear(2, 2)),
    ):
        model = blank()
        plant(model)
        with pytest.raises(LayoutError, match=r"registered nowhere: DecoderModel\."):
            model.slots.seal(model)


def test_views_of_registered_memory_are_no_strays() -> None:
    model = blank()
    model.first_rows = model.embed_tokens[:4]  # type: ignore[attr-defined]
    model.slots.seal(model)


def test_a_moved_tensor_shows_by_name() -> None:
    planted = Planted(blank())
    model, slots = planted.model, planted.model.slots
    slots.seal(planted)
    fill(slots, seed=1)
    assert [slots.moved(look) for look in Look] == [[], []]
    kept = model.layers[0].attention.qkv
    model.layers[0].attention.qkv = kept.clone()
    path = "Planted.model.layers[0].attention.qkv"
    assert [slots.moved(look) for look in Look] == [[path]] * 2
    model.layers[0].attention.qkv = kept
    assert [slots.moved(look) for look in Look] == [[], []]
    planted.half = planted.half.clone()
    assert [slots.moved(look) for look in Look] == [["Planted.half"]] * 2


def test_what_only_a_close_look_sees() -> None:
    model = blank()
    model.slots.seal(model)
    model.layers[0] = replace(model.layers[0], post_norm=torch.ones(64))
    assert model.slots.moved(Look.IDENTITY) == []
    assert model.slots.moved(Look.EVERYTHING) == ["DecoderModel.layers[0].post_norm"]


def test_a_tensor_whose_memory_was_swapped_shows() -> None:
    model = blank()
    model.slots.seal(model)
    model.norm.set_(torch.ones(64, dtype=torch.bfloat16))
    assert "DecoderModel.norm" in model.slots.moved(Look.IDENTITY)


def test_tensors_are_reached_once_and_through_everything() -> None:
    shared = torch.ones(2)

    class Odd:
        __slots__ = ("kept", "unset")

        def __init__(self) -> None:
            self.kept = shared

        def method(self) -> Any:
            return self.kept

    inner = torch.zeros(1)

    def closure() -> Any:
        return inner

    root: dict[str, Any] = {"odd": Odd(), "again": shared, "method": Odd().method, "f": closure}
    root["self"] = root
    found = [held.value for held in reachable_tensors(root)]
    assert len(found) == 2
    assert any(t is shared for t in found)
    assert any(t is inner for t in found)


def test_tensors_of_an_arena_are_aligned_and_apart() -> None:
    wanted = [((3,), torch.bfloat16), ((5, 7), torch.float32), ((0, 4), torch.float32)]
    arena = Arena(MemoryTag.STATIC, wanted, remedy="")
    tensors = arena.tensors()
    assert [(tuple(t.shape), t.dtype) for t in tensors] == wanted
    assert [t.data_ptr() % ALIGNMENT_BYTES for t in tensors] == [0, 0, 0]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [set(t.flatten().tolist()) for t in arena.tensors()] == [{0}, {1}, set()]
    with pytest.raises(CapacityError, match=r"static need .*; take less"):
        Arena(MemoryTag.STATIC, [((1 << 50,), torch.float32)], remedy="take less")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 5000), max_size=30),
    st.sampled_from([None, 1024, 2048, 4096]),
    st.sampled_from([256, 512, 1024]),
)
def test_no_tensor_lies_across_the_end_of_a_piece(
    sizes: list[int], piece_bytes: int | None, unit_bytes: int
) -> None:
    layout = lay_out(sizes, piece_bytes, unit_bytes)
    ends = list(layout.piece_ends)
    assert ends == sorted(set(ends))
    assert all(end > 0 and end % unit_bytes == 0 for end in ends)
    taken = 0
    for start, size in zip(layout.starts, sizes, strict=True):
        assert start >= taken
        assert start % ALIGNMENT_BYTES == 0
        taken = start + size
        assert not any(start < end < taken for end in ends)
    assert taken <= layout.num_bytes
    gaps = layout.num_bytes - sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
    assert gaps <= unit_bytes * len(ends)
    for begin, end in zip([0, *ends], ends, strict=False):
        inside = [
            s for s, size in zip(layout.starts, sizes, strict=True) if size and begin <= s < end
        ]
        assert piece_bytes is None or end - begin <= piece_bytes or len(inside) == 1
