"""Paged attention on a CUDA device: norms, rotation and the cache in one kernel, attention in two."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from engine_adapter.core.attention import FusedAttention, FusedHeads, write_kv
from engine_adapter.core.batch import StepBatch, StepCounts
from engine_adapter.core.cuda_launch import launch_on, word_of
from engine_adapter.core.kv_cache import KvCache
from weightsync import native_cuda_core
from weightsync.errors import ConfigError
from weightsync.native_attention import ATTENTION_CHUNK
from weightsync.native_cuda_core import (
    TILE_ENTRIES,
    WARP_ENTRIES,
    AttentionLimits,
    AttentionWorkPointers,
    CudaAttentionPointers,
    CudaAttentionSizes,
    HeadPointers,
    HeadSizes,
)

_SPARE: Final = 1.25  # room is made for so many times what a step needs, so that few make it anew


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory of a step's lists and partial results; replaced by a larger one, never resized."""

    lists: Tensor  # uint8
    first_split: Tensor  # int32
    partials: Tensor  # fp32
    max_split: int
    max_tiles: int

    @classmethod
    def make(
        cls, max_split: int, max_tiles: int, max_sequences: int, floats: int, device: torch.device
    ) -> Workspace:
        split_bytes = max_split * native_cuda_core.SPLIT_ITEM_BYTES
        tile_bytes = max_tiles * native_cuda_core.TILE_ITEM_BYTES
        num_bytes = split_bytes + tile_bytes + native_cuda_core.COUNTS_BYTES
        return cls(
            torch.empty(num_bytes, dtype=torch.uint8, device=device),
            torch.empty(max_sequences, dtype=torch.int32, device=device),
            torch.empty(floats, dtype=torch.float32, device=device),
            max_split,
            max_tiles,
        )

    def holds(self, limits: AttentionLimits, num_sequences: int, floats: int) -> bool:
        return (
            self.max_split >= limits.max_split
            and self.max_tiles >= limits.max_tiles
            and len(self.first_split) >= num_sequences
            and len(self.partials) >= floats
        )

    def pointers(self) -> AttentionWorkPointers:
        split = self.lists.data_ptr()
        tiles = split + self.max_split * native_cuda_core.SPLIT_ITEM_BYTES
        return AttentionWorkPointers(
            split,
            tiles,
            tiles + self.max_tiles * native_cuda_core.TILE_ITEM_BYTES,
            self.first_split.data_ptr(),
            self.partials.data_ptr(),
        )


def counts_of(batch: StepBatch) -> StepCounts:
    """What the host knows of a step; asks the device if nobody said."""
    if batch.counts is not None:
        return batch.counts
    starts = batch.query_starts.tolist()
    lens = batch.context_lens.tolist()
    return StepCounts(
        num_rows=starts[-1],
        most_rows=max((b - a for a, b in pairwise(starts)), default=0),
        num_chunks=sum(-(-length // ATTENTION_CHUNK) for length in lens),
    )


class PagedCudaAttention(FusedAttention):
    """The native kernels. A row's bits depend on its own sequence up to itself, nothing else.

    Lists of a step's work are made by its first layer and serve all. Dtypes and head sizes that the
    tensor cores' kernels do not have go by a general one, with the CPU's bits. ``num_stages`` and
    ``num_warps`` are for measuring.
    """

    def __init__(self, num_stages: int = 0, num_warps: int = 0) -> None:
        self._shape = (num_stages, num_warps)
        self._batch: StepBatch | None = None  # the one whose lists are made
        self._limits = AttentionLimits(0, 0, 0)
        self._num_rows = 0
        self._work: Workspace | None = None

    def forget(self) -> None:
        """The next layer makes the lists anew, as the first of a step."""
        self._batch = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        if {query.dtype, key.dtype, value.dtype} != {cache.keys.dtype}:
            raise ConfigError(
                f"paged attention got query {query.dtype}, key {key.dtype}, value {value.dtype} and "
                f"a cache of {cache.keys.dtype}; it takes one dtype"
            )
        write_kv(layer, key, value, batch, cache)
        is_dense = query.stride(2) == 1 and query.stride(1) == query.shape[2]
        return self._attend(layer, query if is_dense else query.contiguous(), batch, cache)

    def attend_fused(
        self, layer: int, heads: FusedHeads, batch: StepBatch, cache: KvCache
    ) -> Tensor:
        states = heads.states
        layer_bytes = layer * cache.keys.stride(0) * cache.keys.element_size()
        num_kv_heads, head_dim = cache.keys.shape[3:]
        num_heads = states.shape[1] - 2 * num_kv_heads
        native_cuda_core.place_heads(
            word_of(states.dtype),
            heads.eps,
            HeadSizes(states.shape[0], num_heads, num_kv_heads, head_dim, states.stride(0)),
            HeadPointers(
                states.data_ptr(),
                0 if heads.q_norm is None else heads.q_norm.data_ptr(),
                0 if heads.k_norm is None else heads.k_norm.data_ptr(),
                heads.cos.data_ptr(),
                heads.sin.data_ptr(),
                batch.positions.data_ptr(),
                batch.slot_mapping.data_ptr(),
                cache.keys.data_ptr() + layer_bytes,
                cache.values.data_ptr() + layer_bytes,
            ),
            launch_on(states.device),
        )
        return self._attend(layer, states[:, :num_heads], batch, cache)

    # --- parts ----------------------------------------------------------------------------------------

    def _attend(self, layer: int, query: Tensor, batch: StepBatch, cache: KvCache) -> Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = cache.keys.shape[3]
        output = query.new_empty((num_rows, num_heads * head_dim))
        layer_bytes = layer * cache.keys.stride(0) * cache.keys.element_size()
        sizes = CudaAttentionSizes(
            num_rows,
            batch.num_sequences,
            num_heads,
            num_kv_heads,
            head_dim,
            cache.num_pages,
            cache.page_size,
            batch.block_tables.shape[1],
            query.stride(0),
        )
        pointers = CudaAttentionPointers(
            query.data_ptr(),
            output.data_ptr(),
            cache.keys.data_ptr() + layer_bytes,
            cache.values.data_ptr() + layer_bytes,
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.block_tables.data_ptr(),
        )
        word, launch = word_of(query.dtype), launch_on(query.device)
        scale = head_dim**-0.5
        if native_cuda_core.no_tensor_cores_reason(word, num_heads, num_kv_heads, head_dim):
            native_cuda_core.attend_general(word, scale, sizes, pointers, launch)
            return output
        if batch is not self._batch:
            self._prepare(sizes, batch, query.device)
            native_cuda_core.plan_attention(
                sizes, pointers, self._limits, self._workspace.pointers(), launch
            )
            self._batch = batch
        native_cuda_core.attend(
            word, scale, sizes, pointers, self._limits, self._workspace.pointers(), launch
        )
        if self._num_rows < num_rows:
            output[self._num_rows :].zero_()
        return output

    @property
    def _workspace(self) -> Workspace:
        if self._work is None:
            raise RuntimeError("attention before its workspace was made")
        return self._work

    def _prepare(self, sizes: CudaAttentionSizes, batch: StepBatch, device: torch.device) -> None:
        """Limits of a step, and room for it."""
        counts = counts_of(batch)
        group = sizes.num_heads // sizes.num_kv_heads
        entries = counts.most_rows * group
        has_tiles = entries > WARP_ENTRIES
        max_tiles = counts.num_rows * group // TILE_ENTRIES + sizes.num_sequences
        partial_entries = WARP_ENTRIES if has_tiles else entries
        self._limits = AttentionLimits(
            counts.num_chunks, max_tiles if has_tiles else 0, partial_entries, *self._shape
        )
        self._num_rows = counts.num_rows
        floats_an_item = sizes.num_kv_heads * partial_entries * (sizes.head_dim + 2)
        floats = counts.num_chunks * floats_an_item
        if self._work is None or not self._work.holds(self._limits, sizes.num_sequences, floats):
            self._work = Workspace.make(
                int(counts.num_chunks * _SPARE) + 1,
                int(max_tiles * _SPARE) + 1,
                int(sizes.num_sequences * _SPARE) + 1,
                int(floats * _SPARE),
                device,
            )
