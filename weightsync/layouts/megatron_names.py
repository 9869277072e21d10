"""Parameter names of Megatron-core decoders and what they are in checkpoint names.

The names are those that converters of several public projects agree on. Everything here is a table that
a user may put further lines in front of (see :class:`weightsync.layouts.megatron.MegatronRules`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from weightsync.errors import ConfigError
from weightsync.layouts.sharded import Sharded


class Cut(Enum):
    """How tensor parallel lays a Megatron tensor out over its ranks."""

    REPLICATED = "replicated"
    ROWS = "rows"  # column-parallel layers: outputs are dimension 0
    COLUMNS = "columns"  # row-parallel layers
    VOCABULARY = "vocabulary"  # rows, with padding behind the last token
    GATED = "gated"  # rows; every rank has its gate rows above its up rows
    QKV = "qkv"  # rows; for each group of heads its queries, then its key, then its value
    STACKED_GATED = "stacked_gated"  # local experts in one matrix, as grouped products want them
    STACKED_DOWN = "stacked_down"


#: Own code for what no :class:`Cut` is: (rules, the local tensor, its name, names of targets) -> tensors.
CutFunction = Callable[[Any, Sharded, str, tuple[str, ...]], Iterable[tuple[str, Sharded]]]


@dataclass(frozen=True)
class MegatronName:
    """A line of the table: a Megatron name, checkpoint names, and how the tensor is cut.

    ``{layer}`` and ``{expert}`` stand for numbers: on this rank in ``name``, of the whole model in
    ``targets``. A name with an expert is cut over expert tensor parallel.
    """

    name: str
    targets: tuple[str, ...]
    cut: Cut | CutFunction = Cut.REPLICATED

    def __post_init__(self) -> None:
        wanted = {"layer", "expert"}
        for text in (self.name, *self.targets):
            unknown = set(re.findall(r"{(\w*)}", text)) - wanted
            if unknown:
                raise ConfigError(
                    f"{text!r}: {sorted(unknown)} is neither {{layer}} nor {{expert}}"
                )

    @property
    def is_expert(self) -> bool:
        """Whether expert parallel places it."""
        return "{expert}" in "".join(self.targets)

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Of the whole local name."""
        text = re.escape(self.name)
        for word in ("layer", "expert"):
            text = text.replace(re.escape(f"{{{word}}}"), f"(?P<{word}>\\d+)")
        return re.compile(text)


_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def _line(name: str, *targets: str, cut: Cut = Cut.REPLICATED) -> MegatronName:
    return MegatronName(_LAYER + name, tuple(_HF + t for t in targets), cut)


def _gated(name: str, prefix: str) -> MegatronName:
    return _line(name, f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight", cut=Cut.GATED)


def _expert(name: str, *parts: str, cut: Cut) -> MegatronName:
    prefix = f"{_HF}mlp.experts.{{expert}}."
    return MegatronName(
        f"{_LAYER}mlp.experts.{name}", tuple(f"{prefix}{p}_proj.weight" for p in parts), cut
    )


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

#: Outside of layers.
OUTER_NAMES = (
    MegatronName("embedding.word_embeddings.weight", (EMBEDDING,), Cut.VOCABULARY),
    MegatronName("output_layer.weight", (HEAD,), Cut.VOCABULARY),
    MegatronName("decoder.final_layernorm.weight", ("model.norm.weight",)),
)

_NORMS = (
    _line("input_layernorm.weight", "input_layernorm.weight"),
    _line("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _line("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _line("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
)

_PROJECTIONS = tuple(f"self_attn.{p}_proj" for p in "qkv")

#: Attention with heads of their own keys, or groups of heads that share one.
GROUPED_ATTENTION_NAMES = (
    _line("self_attention.linear_qkv.weight", *(f"{p}.weight" for p in _PROJECTIONS), cut=Cut.QKV),
    _line("self_attention.linear_qkv.bias", *(f"{p}.bias" for p in _PROJECTIONS), cut=Cut.QKV),
    _line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", cut=Cut.COLUMNS),
    _line("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    _line("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _line("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)

#: Multi-head latent attention: the down-projections are whole on every rank.
LATENT_ATTENTION_NAMES = (
    _line("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", cut=Cut.ROWS),
    _line("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    _line("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", cut=Cut.ROWS),
    _line("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    _line("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    _line("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    _line("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", cut=Cut.ROWS),
    _line("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    _line("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _line("self_attention.linear_proj.weight", "self_attn.o_proj.weight", cut=Cut.COLUMNS),
)

_MLP = (
    _gated("mlp.linear_fc1.weight", "mlp."),
    _line("mlp.linear_fc1.bias", "mlp.gate_proj.bias", "mlp.up_proj.bias", cut=Cut.GATED),
    _line("mlp.linear_fc2.weight", "mlp.down_proj.weight", cut=Cut.COLUMNS),
    _line("mlp.linear_fc2.bias", "mlp.down_proj.bias"),
)

_EXPERTS = (
    _line("mlp.router.weight", "mlp.gate.weight"),
    _line("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    _gated("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts."),
    _line(
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
        cut=Cut.COLUMNS,
    ),
    _expert("linear_fc1.weight{expert}", "gate", "up", cut=Cut.GATED),
    _expert("linear_fc2.weight{expert}", "down", cut=Cut.COLUMNS),
    _expert("local_experts.{expert}.linear_fc1.weight", "gate", "up", cut=Cut.GATED),
    _expert("local_experts.{expert}.linear_fc2.weight", "down", cut=Cut.COLUMNS),
    _expert("weight1", "gate", "up", cut=Cut.STACKED_GATED),
    _expert("weight2", "down", cut=Cut.STACKED_DOWN),
)

#: To put in front for Qwen2-MoE and Qwen3-Next, which have one shared expert behind a gate.
QWEN_SHARED_EXPERT_NAMES = (
    _gated("mlp.shared_experts.linear_fc1.weight", "mlp.shared_expert."),
    _line(
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_expert.down_proj.weight",
        cut=Cut.COLUMNS,
    ),
    _line("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)

#: Every line of decoders with grouped attention (Llama, Qwen), dense or with experts.
GROUPED_NAMES = (*OUTER_NAMES, *_NORMS, *GROUPED_ATTENTION_NAMES, *_MLP, *_EXPERTS)
#: Every line of decoders with latent attention (DeepSeek-V3, Kimi-K2).
LATENT_NAMES = (*OUTER_NAMES, *_NORMS, *LATENT_ATTENTION_NAMES, *_MLP, *_EXPERTS)
