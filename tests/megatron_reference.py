"""Megatron's tensors of every rank, made from a model's files by plain tensor operations.

An independent reading of how Megatron lays weights out: it shares no code with what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sizes:
    """Of the model and of the cluster. ``tp`` ranks vary fastest, then ``ep``, then ``pp``."""

    layers: int = 4
    heads: int = 8
    groups: int = 4
    head_dim: int = 2
    hidden: int = 6
    width: int = 12
    vocab: int = 21
    experts: int = 0
    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    divisor: int = 4
    experts_kind: str = "grouped"  # or "sequential", "stacked"
    is_tied: bool = False
    has_bias: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.ep * self.pp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """tp, ep, pp."""
        return rank % self.tp, rank // self.tp % self.ep, rank // (self.tp * self.ep)


def hf_model(s: Sizes) -> dict[str, Any]:
    """A model in checkpoint names; every element another number."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
    for i in range(s.layers):
        p = f"model.layers.{i}."
        q, kv = s.heads * s.head_dim, s.groups * s.head_dim
        shapes |= {
            p + "input_layernorm.weight": (s.hidden,),
            p + "self_attn.q_proj.weight": (q, s.hidden),
            p + "self_attn.k_proj.weight": (kv, s.hidden),
            p + "self_attn.v_proj.weight": (kv, s.hidden),
            p + "self_attn.o_proj.weight": (s.hidden, q),
            p + "self_attn.q_norm.weight": (s.head_dim,),
            p + "self_attn.k_norm.weight": (s.head_dim,),
            p + "post_attention_layernorm.weight": (s.hidden,),
        }
        if s.has_bias:
            shapes |= {p + f"self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
        prefixes = [f"mlp.experts.{e}." for e in range(s.experts)] or ["mlp."]
        for m in prefixes:
            shapes[p + m + "gate_proj.weight"] = (s.width, s.hidden)
            shapes[p + m + "up_proj.weight"] = (s.width, s.hidden)
            shapes[p + m + "down_proj.weight"] = (s.hidden, s.width)
        if s.experts:
            shapes[p + "mlp.gate.weight"] = (s.experts, s.hidden)
            shapes[p + "mlp.gate.e_score_correction_bias"] = (s.experts,)
    shapes["model.norm.weight"] = (s.hidden,)
    if not s.is_tied:
        shapes["lm_head.weight"] = (s.vocab, s.hidden)
    found, start = {}, 0
    for name, shape in shapes.items():
        tensor = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32)
        found[name] = tensor.reshape(shape)
        start += tensor.numel()
    return found


def megatron_rank(hf: Mapping[str, Any], s: Sizes, rank: int) -> dict[str, Any]:
    """What one rank holds, in Megatron's names; layers numbered from 0 in every chunk."""
    tp, ep, pp = s.coordinates(rank)
    found: dict[str, Any] = {}
    per_chunk = s.layers // (s.pp * s.vp)
    for chunk in range(s.vp):
        prefix = f"vp{chunk}." if s.vp > 1 else "module."
        if pp == 0 and chunk == 0:
            table = padded(hf["model.embed_tokens.weight"], s)
            found[prefix + "embedding.word_embeddings.weight"] = table.chunk(s.tp)[tp].clone()
        for j in range(per_chunk):
            layer = (chunk * s.pp + pp) * per_chunk + j
            p = f"{prefix}decoder.layers.{j}."
            found |= {p + n: t.clone() for n, t in layer_of(hf, s, layer, tp, ep)}
        if pp == s.pp - 1 and chunk == s.vp - 1:
            found[prefix + "decoder.final_layernorm.weight"] = hf["model.norm.weight"].clone()
            head = hf["model.embed_tokens.weight" if s.is_tied else "lm_head.weight"]
            if not s.is_tied or s.pp > 1:
                found[prefix + "output_layer.weight"] = padded(head, s).chunk(s.tp)[tp].clone()
    return found


def padded(table: Any, s: Sizes) -> Any:
    multiple = s.divisor * s.tp
    rows = -(-s.vocab // multiple) * multiple
    return torch.cat([table, torch.full((rows - s.vocab, s.hidden), -1.0)])


def fused_qkv(q: Any, k: Any, v: Any, s: Sizes) -> Any:
    """Group after group: its queries, its key, its value."""
    tail = q.shape[1:]
    q = q.reshape(s.groups, s.heads // s.groups * s.head_dim, *tail)
    k, v = (t.reshape(s.groups, s.head_dim, *tail) for t in (k, v))
    return torch.cat([q, k, v], dim=1).reshape(-1, *tail)


def layer_of(hf: Any, s: Sizes, layer: int, tp: int, ep: int) -> Iterator[tuple[str, Any]]:
    p = f"model.layers.{layer}."

    def get(name: str) -> Any:
        return hf[p + name]

    yield "self_attention.linear_qkv.layer_norm_weight", get("input_layernorm.weight")
    for kind in ["weight", "bias"] if s.has_bias else ["weight"]:
        fused = fused_qkv(*(get(f"self_attn.{x}_proj.{kind}") for x in "qkv"), s)
        yield f"self_attention.linear_qkv.{kind}", fused.chunk(s.tp)[tp]
    yield "self_attention.linear_proj.weight", get("self_attn.o_proj.weight").chunk(s.tp, 1)[tp]
    yield "self_attention.q_layernorm.weight", get("self_attn.q_norm.weight")
    yield "self_attention.k_layernorm.weight", get("self_attn.k_norm.weight")
    if not s.experts:
        yield "mlp.linear_fc1.layer_norm_weight", get("post_attention_layernorm.weight")
        yield "mlp.linear_fc1.weight", fc1(get, "mlp.", s, tp)
        yield "mlp.linear_fc2.weight", get("mlp.down_proj.weight").chunk(s.tp, 1)[tp]
        return
    yield "pre_mlp_layernorm.weight", get("post_attention_layernorm.weight")
    yield "mlp.router.weight", get("mlp.gate.weight")
    yield "mlp.router.expert_bias", get("mlp.gate.e_score_correction_bias")
    count = s.experts // s.ep
    prefixes = [f"mlp.experts.{ep * count + e}." for e in range(count)]
    fc1s = [fc1(get, m, s, tp) for m in prefixes]
    fc2s = [get(m + "down_proj.weight").chunk(s.tp, 1)[tp] for m in prefixes]
    if s.experts_kind == "stacked":
        yield "mlp.experts.weight1", torch.stack([w.T for w in fc1s]).reshape(s.hidden, -1)
        yield "mlp.experts.weight2", torch.stack([w.T for w in fc2s]).reshape(-1, s.hidden)
        return
    for e, (one, two) in enumerate(zip(fc1s, fc2s, strict=True)):
        if s.experts_kind == "grouped":
            yield f"mlp.experts.linear_fc1.weight{e}", one
            yield f"mlp.experts.linear_fc2.weight{e}", two
        else:
            yield f"mlp.experts.local_experts.{e}.linear_fc1.weight", one
            yield f"mlp.experts.local_experts.{e}.linear_fc2.weight", two


def fc1(get: Any, prefix: str, s: Sizes, tp: int) -> Any:
    gate, up = (get(f"{prefix}{x}_proj.weight").chunk(s.tp)[tp] for x in ("gate", "up"))
    return torch.cat([gate, up])
