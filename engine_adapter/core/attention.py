"""Causal attention over the paged cache: the contract, the reference, and the native kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_adapter.core.batch import StepBatch
from engine_adapter.core.kv_cache import KvCache
from weightsync.errors import ConfigError
from weightsync.native_attention import (
    FLOAT_TYPES,
    AttentionPointers,
    AttentionSizes,
    attend_paged,
)


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


@dataclass(frozen=True, slots=True)
class FusedHeads:
    """What a layer's projection gave: query, key and value before norms and rotation."""

    states: (
        Tensor  # [R, heads + 2 kv_heads, head_dim], heads and elements contiguous; is overwritten
    )
    q_norm: Tensor | None  # [head_dim]; None in families without
    k_norm: Tensor | None
    cos: Tensor  # [positions, head_dim / 2], the model's dtype
    sin: Tensor
    eps: float


class FusedAttention(ABC):
    """An :class:`Attention` that can do a layer's norms and rotation on the way."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        """See :meth:`Attention.attend`."""

    @abstractmethod
    def attend_fused(
        self, layer: int, heads: FusedHeads, batch: StepBatch, cache: KvCache
    ) -> Tensor:
        """As ``attend``, of heads that are normed and rotated by it."""


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


class PagedAttention:
    """The native kernel (CPU). A row's bits depend on its own sequence up to itself, nothing else.

    ``num_threads`` limits threads of a call, None for torch's number; results do not depend on it.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._batch: StepBatch | None = None  # the last one checked: a step has many layers
        self._batch_ptrs: tuple[int, int, int, int] = (0, 0, 0, 0)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        if batch is not self._batch:
            self._batch_ptrs = _batch_pointers(batch)
            self._batch = batch
        dtype = _check_dtypes(query, key, value, cache)
        query, key, value = _by_rows(query), _by_rows(key), _by_rows(value)
        num_rows, num_heads, head_dim = query.shape
        output = torch.empty((num_rows, num_heads * head_dim), dtype=query.dtype)
        sizes = AttentionSizes(
            num_rows=num_rows,
            num_sequences=batch.num_sequences,
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            table_width=batch.block_tables.shape[1],
            query_stride=query.stride(0),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
        )
        layer_bytes = layer * cache.keys.stride(0) * cache.keys.element_size()
        pointers = AttentionPointers(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output.data_ptr(),
            cache.keys.data_ptr() + layer_bytes,
            cache.values.data_ptr() + layer_bytes,
            *self._batch_ptrs,
        )
        threads = torch.get_num_threads() if self._num_threads is None else self._num_threads
        attend_paged(dtype, head_dim**-0.5, sizes, pointers, num_threads=threads)
        return output


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor, cache: KvCache) -> str:
    name = str(query.dtype).removeprefix("torch.")
    found = {query.dtype, key.dtype, value.dtype, cache.keys.dtype}
    if len(found) != 1 or name not in FLOAT_TYPES or query.device.type != "cpu":
        raise ConfigError(
            f"paged attention got query {query.dtype}, key {key.dtype}, value {value.dtype} and a "
            f"cache of {cache.keys.dtype} on {query.device}; it takes one dtype of "
            f"{', '.join(FLOAT_TYPES)}, on the CPU"
        )
    if key.shape != value.shape or key.shape[1:] != cache.keys.shape[3:]:
        raise ConfigError(
            f"paged attention got key {tuple(key.shape)} and value {tuple(value.shape)} for a cache "
            f"of {tuple(cache.keys.shape[3:])} a token"
        )
    return name


def _by_rows(tensor: Tensor) -> Tensor:
    """A view or copy whose heads and elements are contiguous within a row."""
    is_dense = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if is_dense else tensor.contiguous()


def _batch_pointers(batch: StepBatch) -> tuple[int, int, int, int]:
    expected = (
        ("slot_mapping", torch.int64),
        ("query_starts", torch.int32),
        ("context_lens", torch.int32),
        ("block_tables", torch.int32),
    )
    for name, dtype in expected:
        tensor = getattr(batch, name)
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ConfigError(
                f"step batch: {name} is {tensor.dtype} on {tensor.device}, "
                f"expected contiguous {dtype} on the CPU"
            )
    slots, starts, lens, tables = (getattr(batch, name).data_ptr() for name, _ in expected)
    return slots, starts, lens, tables
