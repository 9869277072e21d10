"""Tensors of large published models by name, beyond those that can be run here (``presets.py``).

For plans and predictions only: names, dtypes and shapes of the checkpoint, from the models' public
configurations. Multi-token-prediction layers are left out; nothing serves them without being asked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weightsync.errors import ConfigError
from weightsync.presets import PRESETS
from weightsync.types import TensorMeta

_Shapes = Iterator[tuple[str, tuple[int, ...]]]

#: Ranks of the low-rank projections of DeepSeek's attention (MLA), and its head sizes.
_MLA_QUERY_RANK, _MLA_KV_RANK = 1536, 512
_MLA_PLAIN, _MLA_ROTARY, _MLA_VALUE = 128, 64, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """A mixture of experts with dense first layers; sizes are element counts, weights bfloat16.

    ``num_kv_heads`` = 0 means multi-head latent attention as DeepSeek-V3 has it.
    """

    name: str
    hidden_size: int
    dense_size: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_experts: int
    expert_size: int
    num_shared_experts: int = 1
    head_size: int = 128

    def tensors(self) -> Iterator[TensorMeta]:
        """In the order of layers. The router's correction bias is fp32, as published."""
        for name, shape in self._shapes():
            is_fp32 = name.endswith("e_score_correction_bias")
            yield TensorMeta(name, "float32" if is_fp32 else "bfloat16", shape)

    def _shapes(self) -> _Shapes:
        table = (self.vocab_size, self.hidden_size)
        yield "model.embed_tokens.weight", table
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (self.hidden_size,)
            attention = self._attention() if self.num_kv_heads else self._latent_attention()
            for name, shape in attention:
                yield f"{prefix}self_attn.{name}", shape
            yield prefix + "post_attention_layernorm.weight", (self.hidden_size,)
            for name, shape in self._mlp(layer):
                yield f"{prefix}mlp.{name}", shape
        yield "model.norm.weight", (self.hidden_size,)
        yield "lm_head.weight", table

    def _attention(self) -> _Shapes:
        for which, heads in (("q", self.num_heads), ("k", self.num_kv_heads),
                             ("v", self.num_kv_heads)):  # fmt: skip
            yield f"{which}_proj.weight", (heads * self.head_size, self.hidden_size)
            yield f"{which}_proj.bias", (heads * self.head_size,)
        yield "o_proj.weight", (self.hidden_size, self.num_heads * self.head_size)

    def _latent_attention(self) -> _Shapes:
        hidden, heads = self.hidden_size, self.num_heads
        yield "q_a_proj.weight", (_MLA_QUERY_RANK, hidden)
        yield "q_a_layernorm.weight", (_MLA_QUERY_RANK,)
        yield "q_b_proj.weight", (heads * (_MLA_PLAIN + _MLA_ROTARY), _MLA_QUERY_RANK)
        yield "kv_a_proj_with_mqa.weight", (_MLA_KV_RANK + _MLA_ROTARY, hidden)
        yield "kv_a_layernorm.weight", (_MLA_KV_RANK,)
        yield "kv_b_proj.weight", (heads * (_MLA_PLAIN + _MLA_VALUE), _MLA_KV_RANK)
        yield "o_proj.weight", (hidden, heads * _MLA_VALUE)

    def _mlp(self, layer: int) -> _Shapes:
        if layer < self.num_dense_layers:
            yield from self._three("", self.dense_size)
            return
        yield "gate.weight", (self.num_experts, self.hidden_size)
        yield "gate.e_score_correction_bias", (self.num_experts,)
        for expert in range(self.num_experts):
            yield from self._three(f"experts.{expert}.", self.expert_size)
        if self.num_shared_experts:
            yield from self._three("shared_experts.", self.num_shared_experts * self.expert_size)

    def _three(self, prefix: str, width: int) -> _Shapes:
        yield f"{prefix}gate_proj.weight", (width, self.hidden_size)
        yield f"{prefix}up_proj.weight", (width, self.hidden_size)
        yield f"{prefix}down_proj.weight", (self.hidden_size, width)


_LARGE = (
    MoeShape(
        name="glm-4.5-air", hidden_size=4096, dense_size=10_944, num_layers=46, num_dense_layers=1,
        num_heads=96, num_kv_heads=8, vocab_size=151_552, num_experts=128, expert_size=1408,
    ),
    MoeShape(
        name="deepseek-v3", hidden_size=7168, dense_size=18_432, num_layers=61, num_dense_layers=3,
        num_heads=128, num_kv_heads=0, vocab_size=129_280, num_experts=256, expert_size=2048,
    ),
    MoeShape(
        name="kimi-k2", hidden_size=7168, dense_size=18_432, num_layers=61, num_dense_layers=1,
        num_heads=64, num_kv_heads=0, vocab_size=163_840, num_experts=384, expert_size=2048,
    ),
)  # fmt: skip

LARGE_MODELS: Mapping[str, MoeShape] = MappingProxyType({m.name: m for m in _LARGE})


def model_names() -> tuple[str, ...]:
    """Every model that :func:`model_metas` knows."""
    return (*PRESETS, *LARGE_MODELS)


def model_metas(name: str) -> tuple[TensorMeta, ...]:
    """The tensors of a model's checkpoint. Raises :class:`ConfigError` with the closest names."""
    if name in LARGE_MODELS:
        return tuple(LARGE_MODELS[name].tensors())
    if name in PRESETS:
        return tuple(TensorMeta(*tensor) for tensor in PRESETS[name].tensors())
    known = model_names()
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"closest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
    raise ConfigError(f"unknown model {name!r}; {hint}; or give a checkpoint's directory")
