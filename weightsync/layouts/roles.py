"""What a tensor of a decoder is for, by its checkpoint name: which way parallelism cuts it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from weightsync.errors import ConfigError
from weightsync.types import TensorMeta


class Role(Enum):
    """How tensor parallel cuts a tensor."""

    REPLICATED = "replicated"  # norms, routers, biases of outputs, down-projections of MLA
    VOCABULARY = "vocabulary"  # rows are tokens
    HEADS = "heads"  # rows are attention heads
    KV_HEADS = "kv_heads"  # rows are key or value heads, of which there may be fewer than ranks
    ROWS = "rows"
    COLUMNS = "columns"


_ROLES = (
    (r"(.*\.)?(embed_tokens|lm_head)\.weight", Role.VOCABULARY),
    (r".*\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.(weight|bias)", Role.HEADS),
    (r".*\.self_attn\.[kv]_proj\.(weight|bias)", Role.KV_HEADS),
    (r".*\.self_attn\.o_proj\.weight", Role.COLUMNS),
    (r".*\.mlp\.(.*\.)?(gate|up)_proj\.(weight|bias)", Role.ROWS),
    (r".*\.mlp\.(.*\.)?down_proj\.weight", Role.COLUMNS),
)
_ROLE = re.compile("|".join(f"(?P<r{i}>{pattern})" for i, (pattern, _) in enumerate(_ROLES)))
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SCALE_SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a model a tensor belongs. ``layer`` and ``expert`` are None outside of any."""

    role: Role
    layer: int | None
    expert: int | None


@lru_cache(maxsize=2**17)
def place_of(name: str) -> Place:
    """By checkpoint name; a name that is not known is replicated. A scale goes with its weight."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    stem = name
    for suffix in _SCALE_SUFFIXES:
        stem = stem.removesuffix(suffix)
    found = _ROLE.fullmatch(stem)
    role = Role.REPLICATED
    if found is not None:
        role = next(r for i, (_, r) in enumerate(_ROLES) if found[f"r{i}"] is not None)
    return Place(
        role,
        None if layer is None else int(layer[1]),
        None if expert is None else int(expert[1]),
    )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Counts that a list of tensors shows."""

    num_layers: int
    num_experts: int
    num_heads: int  # of queries; 0 if no tensor is cut by key heads
    num_kv_heads: int  # 0 if no tensor is cut by key heads
    is_guess: bool = False  # that a head has 128 elements


def model_sizes(metas: Iterable[TensorMeta], head_dim: int | None = None) -> ModelSizes:
    """Layers, experts and key heads of a model.

    The head size is that of ``q_norm`` or ``k_norm`` if there is one, else ``head_dim``, else 128 if that
    fits. Raises :class:`ConfigError` if it cannot be told.
    """
    layers = experts = query_rows = key_rows = 0
    for meta in metas:
        place = place_of(meta.name)
        layers = max(layers, 0 if place.layer is None else place.layer + 1)
        experts = max(experts, 0 if place.expert is None else place.expert + 1)
        if meta.name.endswith("self_attn.q_proj.weight"):
            query_rows = meta.shape[0]
        if meta.name.endswith("self_attn.k_proj.weight"):
            key_rows = meta.shape[0]
        if meta.name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
            head_dim = meta.shape[0]
    if not key_rows:
        return ModelSizes(layers, experts, 0, 0)
    size = 128 if head_dim is None else head_dim
    if size < 1 or key_rows % size or query_rows % size:
        raise ConfigError(
            f"projections of {query_rows} and {key_rows} rows are no whole heads of size {size}; "
            "give head_dim="
        )
    heads = query_rows // size, key_rows // size
    return ModelSizes(layers, experts, *heads, is_guess=head_dim is None)
