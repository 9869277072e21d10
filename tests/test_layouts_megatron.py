"""Megatron's coordinates: put together from all ranks, tensors equal the model they were made from."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_ranks import Whole
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigError, LayoutError
from weightsync.layouts import (
    MegatronModel,
    MegatronName,
    MegatronPlace,
    MegatronRules,
    megatron_named,
)
from weightsync.layouts.megatron_names import QWEN_SHARED_EXPERT_NAMES, Cut
from weightsync.naming import Drop
from weightsync.sources import NamedSource
from weightsync.types import CastPolicy

torch = pytest.importorskip("torch")

from megatron_reference import Sizes, hf_model, megatron_rank  # noqa: E402


def model_of(s: Sizes) -> MegatronModel:
    return MegatronModel(
        num_layers=s.layers, num_heads=s.heads, num_kv_heads=s.groups, head_dim=s.head_dim,
        vocab_size=s.vocab, num_experts=s.experts, is_tied=s.is_tied, vocab_divisor=s.divisor,
    )  # fmt: skip


def place_of(s: Sizes, rank: int) -> MegatronPlace:
    tp, ep, pp = s.coordinates(rank)
    return MegatronPlace(
        tp_rank=tp, tp_size=s.tp, pp_rank=pp, pp_size=s.pp, vp_size=s.vp, ep_rank=ep, ep_size=s.ep
    )


def gathered(s: Sizes, hf: Any) -> Whole:
    whole, alive = Whole(), []
    for rank in range(s.world):
        rules = [MegatronRules(model_of(s), place_of(s, rank))]
        alive.append(megatron_rank(hf, s, rank))
        source = NamedSource(rules, CastPolicy.STRICT, rank, s.world)
        whole.add(source.collect(list(alive[-1].items()))[0])
    return whole


CASES = {
    "alone": Sizes(),
    "tp": Sizes(tp=2),
    "tp of the groups": Sizes(tp=4),
    "10 tokens padded to 12": Sizes(tp=4, vocab=10, divisor=1),
    "biases": Sizes(tp=2, has_bias=True),
    "pp": Sizes(pp=2),
    "vp": Sizes(pp=2, vp=2),
    "tied over stages": Sizes(pp=4, tp=2, is_tied=True),
    "tied in one": Sizes(tp=2, is_tied=True),
    "ep": Sizes(experts=6, ep=3, tp=2),
    "ep, an expert a rank": Sizes(experts=4, ep=4, experts_kind="sequential"),
    "grouped in one matrix": Sizes(experts=6, ep=2, tp=2, experts_kind="stacked"),
    "everything": Sizes(experts=4, ep=2, tp=2, pp=2, vp=2, experts_kind="sequential"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_model_that_they_were_cut_from(case: str) -> None:
    s = CASES[case]
    hf = hf_model(s)
    gathered(s, hf).check(hf)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_sizes(data: st.DataObject) -> None:
    tp, pp, vp, ep = (
        data.draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2), (1, 2), (1, 2))
    )
    groups = tp * data.draw(st.integers(1, 2))
    s = Sizes(
        layers=pp * vp * data.draw(st.integers(1, 2)),
        groups=groups,
        heads=groups * data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.integers(1, 3)),
        width=tp * data.draw(st.integers(1, 3)),
        vocab=data.draw(st.integers(1, 19)),
        divisor=data.draw(st.integers(1, 5)),
        experts=ep * data.draw(st.integers(0, 2)),
        experts_kind=data.draw(st.sampled_from(["grouped", "sequential", "stacked"])),
        is_tied=data.draw(st.booleans()),
        tp=tp, pp=pp, vp=vp, ep=ep,
    )  # fmt: skip
    hf = hf_model(s)
    gathered(s, hf).check(hf)


def test_the_configuration_of_a_model_says_it_all() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(num_experts=16, tie_word_embeddings=True, head_dim=64)
    model = MegatronModel.from_config(config, vocab_divisor=1)
    assert MegatronModel.from_config(config.to_dict(), vocab_divisor=1) == model
    assert (model.num_experts, model.is_tied, model.head_dim) == (16, True, 64)
    with pytest.raises(ConfigError, match="hidden_size"):
        MegatronModel.from_config({"num_hidden_layers": 2})


def test_latent_attention_has_its_own_names() -> None:
    model = MegatronModel(
        num_layers=1, num_heads=4, num_kv_heads=4, head_dim=4, vocab_size=8, has_latent_attention=True
    )  # fmt: skip
    rules = MegatronRules(model, MegatronPlace(tp_rank=1, tp_size=2))
    (found,) = (
        rules.apply("decoder.layers.0.self_attention.q_layernorm.weight", torch.ones(3)) or ()
    )
    assert found[0] == "model.layers.0.self_attn.q_a_layernorm.weight"
    name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
    ((new, part),) = rules.apply(name, torch.ones(6, 3)) or ()
    assert (new, part.shape) == ("model.layers.0.self_attn.q_b_proj.weight", (12, 3))
    assert part.pieces[0].start == (6, 0)


def test_a_user_adds_and_replaces_lines() -> None:
    s = Sizes(tp=2)
    own = [
        MegatronName("decoder.layers.{layer}.extra.weight", ("model.layers.{layer}.x",), Cut.COLUMNS),
        MegatronName("decoder.final_layernorm.weight", ("model.other_norm.weight",)),
        MegatronName(
            "decoder.layers.{layer}.odd", ("model.layers.{layer}.odd",),
            lambda rules, local, name, targets: [(targets[0], local[:1])],
        ),
    ]  # fmt: skip
    rules = MegatronRules(model_of(s), place_of(s, 1), own)
    ((name, part),) = rules.apply("decoder.layers.2.extra.weight", torch.ones(2, 3)) or ()
    assert (name, part.shape, part.pieces[0].start) == ("model.layers.2.x", (2, 6), (0, 3))
    assert (rules.apply("decoder.final_layernorm.weight", torch.ones(6)) or ())[0][0] == (
        "model.other_norm.weight"
    )
    ((_, part),) = rules.apply("decoder.layers.2.odd", torch.ones(2)) or ()
    assert part.shape == (1,)
    with pytest.raises(ConfigError, match="layr"):
        MegatronName("decoder.layers.{layr}.x", ("x",))


def test_shared_experts_go_by_the_names_of_their_family() -> None:
    s = Sizes(tp=2, experts=2)
    name = "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"
    for names, prefix in (((), "shared_experts"), (QWEN_SHARED_EXPERT_NAMES, "shared_expert")):
        rules = MegatronRules(model_of(s), place_of(s, 1), names)
        (gate, gate_part), (up, up_part) = rules.apply(name, torch.arange(8.0).reshape(4, 2)) or ()
        assert (gate, up) == tuple(
            f"model.layers.0.mlp.{prefix}.{p}_proj.weight" for p in ("gate", "up")
        )
        for part, first in ((gate_part, 0.0), (up_part, 4.0)):
            assert (part.shape, part.pieces[0].start) == ((4, 2), (2, 0))
            assert part.pieces[0].tensor[0, 0] == first


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.layers.0.mlp.unknown.weight", (2,), "no name of a Megatron-core decoder"),
        ("decoder.layers.7.mlp.linear_fc2.weight", (2, 2), "layer 7 of 4"),
        ("vp3.decoder.layers.0.mlp.linear_fc2.weight", (2, 2), "chunk 3"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (8, 6), "8 rows; 2 groups"),
        ("decoder.layers.0.mlp.linear_fc1.weight", (7, 6), "7 rows"),
        ("decoder.layers.0.mlp.linear_fc2.weight", (7,), "by columns"),
        # the whole table on every rank, and a table too short
        ("embedding.word_embeddings.weight", (21 + 3, 6), "24 rows on each of 2 ranks are 48"),
        ("embedding.word_embeddings.weight", (10, 6), "20, the vocabulary has 21"),
        ("decoder.layers.0.twice", (1,), "2 lines know it"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    s = Sizes(tp=2)
    twice = MegatronName("decoder.layers.{layer}.twice", ("x",))
    rules = MegatronRules(model_of(s), place_of(s, 0), [twice, twice])
    with pytest.raises(LayoutError, match=message):
        rules.apply(name, torch.ones(shape))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.ones(6, 8).T, "gaps"), (torch.ones(3, 3), "no stack of 2"), (torch.ones(2, 2, 2), "one whole"),
    ],
    ids=["transposed", "odd", "3-D"],
)  # fmt: skip
def test_what_is_no_stack_of_experts_is_refused(matrix: Any, message: str) -> None:
    rules = MegatronRules(model_of(Sizes(experts=2)), MegatronPlace())
    for part in ("weight1", "weight2"):
        with pytest.raises(LayoutError, match=message):
            rules.apply(f"decoder.layers.0.mlp.experts.{part}", matrix)


@pytest.mark.parametrize(
    ("model", "place", "message"),
    [
        ({}, {"tp_size": 3}, "whole groups"),
        ({"num_experts": 5}, {"ep_size": 2}, "5 experts"),
        ({}, {"pp_size": 3}, "first_layers"),
        ({}, {"vp_size": 2, "first_layers": [0]}, "one a chunk"),
        ({}, {"tp_rank": 2, "tp_size": 2}, "tp_rank 2"),
        ({}, {"etp_size": 2}, "together"),
        ({}, {"vp_size": 0}, "vp_size 0"),
    ],
)
def test_coordinates_that_cannot_be_are_refused(model: Any, place: Any, message: str) -> None:
    fields = {f: getattr(model_of(Sizes()), f) for f in MegatronModel.__dataclass_fields__}
    with pytest.raises(ConfigError, match=message):
        MegatronRules(MegatronModel(**{**fields, **model}), MegatronPlace(**place))


def test_stages_of_unequal_length() -> None:
    s = Sizes()
    place = MegatronPlace(pp_rank=1, pp_size=3, first_layers=[1])
    rules = MegatronRules(model_of(s), place)
    ((name, _),) = rules.apply("decoder.layers.2.mlp.router.weight", torch.ones(2)) or ()
    assert name == "model.layers.3.mlp.gate.weight"


def test_state_of_transformer_engine_is_dropped_and_listed() -> None:
    s = Sizes()
    rules = [Drop("module.rope", "a constant"), MegatronRules(model_of(s), place_of(s, 0))]
    source = NamedSource(rules, CastPolicy.STRICT)
    name = "decoder.layers.0.mlp.linear_fc1._extra_state"
    named = [("decoder.final_layernorm.weight", torch.ones(6)), (name, torch.ones(1))]
    local, dropped = source.collect(named)
    assert list(local.views) == ["model.norm.weight"]
    assert "Transformer Engine" in dropped[name]


def test_chunks_of_a_virtual_pipeline_are_named() -> None:
    chunks = [torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2)]
    named = dict(megatron_named(chunks))
    assert list(named)[:2] == ["vp0.weight", "vp1.weight"]
    assert named["vp0.weight"].data_ptr() == chunks[0].weight.data_ptr()
    assert "vp1.running_mean" in named  # buffers that a state dict has
