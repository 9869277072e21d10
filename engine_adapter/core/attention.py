"""Causal attention over the paged cache: the contract, and its reference in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine_adapter.core.batch import StepBatch
from engine_adapter.core.kv_cache import KvCache


class Attention(Protocol):
    """Writes a step's K and V into the cache, then attends causally; scale = head_dim ** -0.5."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        """Returns [R, heads * head_dim] in the model's dtype; padding rows are zero.

        ``query`` [R, heads, head_dim], ``key`` and ``value`` [R, kv_heads, head_dim], after QK-norm
        and RoPE, in the model's dtype. Query head h reads KV head h // (heads / kv_heads).
        """
        ...


def write_kv(layer: int, key: Tensor, value: Tensor, batch: StepBatch, cache: KvCache) -> None:
    """Put each row's K and V where ``slot_mapping`` says."""
    rows = (batch.slot_mapping >= 0).nonzero().squeeze(1)
    slots = batch.slot_mapping[rows]
    cache.keys[layer].flatten(0, 1)[slots] = key[rows]
    cache.values[layer].flatten(0, 1)[slots] = value[rows]


class ReferenceAttention:
    """One sequence at a time, in the order of operations of transformers' ``eager``.

    In bf16 its results equal transformers' bit for bit. Slow, and in fp32 a row's bits depend on
    how many rows its sequence has in the step, so it is an oracle and not for serving.
    """

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        write_kv(layer, key, value, batch, cache)
        out = torch.zeros_like(query)
        starts = batch.query_starts.tolist()
        for sequence, context_len in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[sequence], starts[sequence + 1])
            num_pages = -(-context_len // cache.page_size)
            pages = batch.block_tables[sequence, :num_pages].long()
            keys = cache.keys[layer, pages].flatten(0, 1)[:context_len]
            values = cache.values[layer, pages].flatten(0, 1)[:context_len]
            out[rows] = _attend_one(query[rows], keys, values)
        return out.flatten(1)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Rows are the last of the context. [rows, heads, D], [context, kv_heads, D] -> like query."""
    num_rows, num_heads, head_dim = query.shape
    context_len = keys.shape[0]
    group = num_heads // keys.shape[1]
    repeated_keys = keys.transpose(0, 1).repeat_interleave(group, dim=0)[None]
    repeated_values = values.transpose(0, 1).repeat_interleave(group, dim=0)[None]
    scores = torch.matmul(query.transpose(0, 1)[None], repeated_keys.transpose(2, 3))
    scores = scores * head_dim**-0.5
    ahead = torch.arange(context_len, device=query.device)[None, :] > torch.arange(
        context_len - num_rows, context_len, device=query.device
    )[:, None]  # fmt: skip
    scores = scores + torch.zeros_like(ahead, dtype=scores.dtype).masked_fill(
        ahead, torch.finfo(scores.dtype).min
    )
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, repeated_values)[0].transpose(0, 1)
