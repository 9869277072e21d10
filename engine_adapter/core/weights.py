"""The storages of one rank, and which boxes of which checkpoint tensors lie in them.

Pure: from a configuration and a rank's shards to shapes. Fused storages (q above k above v, gate
above up, experts stacked) are one storage with several boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine_adapter.core.config import ModelConfig
from engine_adapter.core.shards import Shards
from weightsync.types import Box

Range = tuple[int, int]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the checkpoint tensor ``name`` of ``shape``; its first element lies at ``start`` of
    the storage, its dimensions are the storage's last ones."""

    name: str
    shape: tuple[int, ...]
    box: Box
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """One storage of the engine by its runtime name; its parts cover it exactly."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def storage_specs(config: ModelConfig, shards: Shards) -> list[StorageSpec]:
    """Every storage of one rank. Raises :class:`ConfigError` if the model cannot be split so."""
    hidden, vocab = config.hidden_size, config.vocab_size
    rows = shards.tp_range(vocab)
    found = [_stacked("embed_tokens", [(EMBEDDING, (vocab, hidden), rows)])]
    for layer in range(config.num_layers):
        found += _attention(config, shards, layer)
        if config.has_experts(layer):
            found += _experts(config, shards, layer)
        else:
            found += _mlp(config, shards, layer)
    found.append(_whole("norm", "model.norm.weight", (hidden,)))
    if not config.is_tied:
        found.append(_stacked("lm_head", [(HEAD, (vocab, hidden), rows)]))
    return found


def _attention(config: ModelConfig, shards: Shards, layer: int) -> Iterator[StorageSpec]:
    hidden, size = config.hidden_size, config.head_dim
    prefix, runtime = f"model.layers.{layer}.", f"layers.{layer}."
    name = f"{prefix}self_attn."
    queries = _scaled(shards.heads(config.num_heads), size)
    keys = _scaled(shards.kv_heads(config.num_kv_heads), size)
    rows = {"q": (config.num_heads, queries), "k": (config.num_kv_heads, keys)}
    rows["v"] = rows["k"]
    yield _whole(f"{runtime}input_norm", f"{prefix}input_layernorm.weight", (hidden,))
    yield _stacked(
        f"{runtime}qkv",
        [(f"{name}{p}_proj.weight", (n * size, hidden), part) for p, (n, part) in rows.items()],
    )
    if config.has_qkv_bias:
        yield _stacked(
            f"{runtime}qkv_bias",
            [(f"{name}{p}_proj.bias", (n * size,), part) for p, (n, part) in rows.items()],
        )
    if config.has_qk_norm:
        for part in "qk":
            yield _whole(f"{runtime}{part}_norm", f"{name}{part}_norm.weight", (size,))
    yield _columns(f"{runtime}o", f"{name}o_proj.weight", (hidden, rows["q"][0] * size), queries)
    if config.has_output_bias:
        yield _whole(f"{runtime}o_bias", f"{name}o_proj.bias", (hidden,))
    yield _whole(f"{runtime}post_norm", f"{prefix}post_attention_layernorm.weight", (hidden,))


def _mlp(config: ModelConfig, shards: Shards, layer: int) -> Iterator[StorageSpec]:
    hidden, width = config.hidden_size, config.intermediate_size
    name, runtime = f"model.layers.{layer}.mlp.", f"layers.{layer}."
    part = shards.tp_range(width)
    both = ("gate", "up")
    yield _stacked(
        f"{runtime}gate_up", [(f"{name}{p}_proj.weight", (width, hidden), part) for p in both]
    )
    yield _columns(f"{runtime}down", f"{name}down_proj.weight", (hidden, width), part)
    if config.has_mlp_bias:
        yield _stacked(
            f"{runtime}gate_up_bias", [(f"{name}{p}_proj.bias", (width,), part) for p in both]
        )
        yield _whole(f"{runtime}down_bias", f"{name}down_proj.bias", (hidden,))


def _experts(config: ModelConfig, shards: Shards, layer: int) -> Iterator[StorageSpec]:
    experts = config.experts
    if experts is None:
        return
    hidden, width = config.hidden_size, experts.expert_size
    name, runtime = f"model.layers.{layer}.mlp.", f"layers.{layer}."
    yield _whole(f"{runtime}router", f"{name}gate.weight", (experts.num_experts, hidden))
    first, last = shards.ep_range(experts.num_experts)
    low, high = shards.expert_width_range(width)
    gate_up, down = [], []
    for e in range(first, last):
        expert = f"{name}experts.{e}."
        box = Box((low, 0), (high, hidden))
        for row, p in ((0, "gate"), (high - low, "up")):
            start = (e - first, row, 0)
            gate_up.append(Part(f"{expert}{p}_proj.weight", (width, hidden), box, start))
        box = Box((0, low), (hidden, high))
        down.append(Part(f"{expert}down_proj.weight", (hidden, width), box, (e - first, 0, 0)))
    shape = (last - first, 2 * (high - low), hidden)
    yield StorageSpec(f"{runtime}experts_gate_up", shape, tuple(gate_up))
    shape = (last - first, hidden, high - low)
    yield StorageSpec(f"{runtime}experts_down", shape, tuple(down))


def _whole(runtime: str, name: str, shape: tuple[int, ...]) -> StorageSpec:
    part = Part(name, shape, Box.whole(shape), (0,) * len(shape))
    return StorageSpec(runtime, shape, (part,))


def _columns(runtime: str, name: str, shape: tuple[int, int], columns: Range) -> StorageSpec:
    box = Box((0, columns[0]), (shape[0], columns[1]))
    return StorageSpec(runtime, box.shape, (Part(name, shape, box, (0, 0)),))


def _stacked(runtime: str, parts: Sequence[tuple[str, tuple[int, ...], Range]]) -> StorageSpec:
    """Row ranges of tensors of equal row size, one below the other."""
    found, row = [], 0
    for name, shape, (low, high) in parts:
        rest = shape[1:]
        box = Box((low, *(0,) * len(rest)), (high, *rest))
        found.append(Part(name, shape, box, (row, *(0,) * len(rest))))
        row += high - low
    return StorageSpec(runtime, (row, *parts[0][1][1:]), tuple(found))


def _scaled(heads: Range, size: int) -> Range:
    return heads[0] * size, heads[1] * size
