"""QK-norm and rotation of a layer's heads, and who computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from engine_adapter.core.norm import Norm, native_norm
from engine_adapter.core.rope import rotate
from weightsync.native_attention import FLOAT_TYPES
from weightsync.native_heads import HeadPointers, HeadSizes
from weightsync.native_heads import rotate_rows as rotate_natively

_WORDS: Final = {getattr(torch, word): word for word in FLOAT_TYPES}

Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of one rank, and what its norms add to a mean of squares."""

    num_heads: int
    num_kv_heads: int
    eps: float

    def split(self, fused: Tensor) -> Heads:
        """Query, key and value, views of [R, heads + 2 kv_heads, head_dim]."""
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = torch.split(fused, sizes, dim=1)
        return query, key, value


class PlaceHeads(Protocol):
    """Query, key and value of a layer's fused heads, normed and rotated."""

    def __call__(self, fused: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        """[R, heads + 2 kv_heads, head_dim], which may be overwritten, and [head_dim] each, None in
        families without -> three times [R, heads, head_dim]."""
        ...


def place_heads(
    shape: HeadShape, norm: Norm, cos: Tensor, sin: Tensor, positions: Tensor
) -> PlaceHeads:
    """For the layers of one step, whose rows are at ``positions`` [R]; tables are
    [positions, head_dim / 2]. By the native core where it norms; its bits are the same."""
    if norm is native_norm:
        return _by_core(shape, cos, sin, positions)
    step_cos = cos.index_select(0, positions)[:, None]
    step_sin = sin.index_select(0, positions)[:, None]

    def place(fused: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        query, key, value = shape.split(fused)
        if q_norm is not None and k_norm is not None:
            query, key = norm(query, q_norm, shape.eps), norm(key, k_norm, shape.eps)
        return rotate(query, step_cos, step_sin), rotate(key, step_cos, step_sin), value

    return place


def _by_core(shape: HeadShape, cos: Tensor, sin: Tensor, positions: Tensor) -> PlaceHeads:
    positions = positions.contiguous()
    tables = cos, sin, positions  # kept alive by what is returned
    threads, word, eps = torch.get_num_threads(), _WORDS[cos.dtype], shape.eps

    def place(fused: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        fused = fused.contiguous()
        num_rows, num_fused, head_dim = fused.shape
        sizes = HeadSizes(
            num_rows,
            shape.num_heads,
            shape.num_kv_heads,
            head_dim,
            num_fused * head_dim,
            cos.shape[0],
        )
        pointers = HeadPointers(
            fused.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            *(table.data_ptr() for table in tables),
        )
        if num_rows:
            rotate_natively(word, eps, sizes, pointers, num_threads=threads)
        return shape.split(fused)

    return place
