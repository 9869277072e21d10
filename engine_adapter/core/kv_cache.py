"""Memory of the paged KV cache, and how much of it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine_adapter.core.arena import Arena, MemoryKind, MemoryTag
from weightsync.errors import ConfigError

DEFAULT_PAGE_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one rank stores for a token, and how tokens are grouped."""

    num_layers: int
    num_kv_heads: int  # of this rank
    head_dim: int
    dtype: torch.dtype
    page_size: int = DEFAULT_PAGE_SIZE  # tokens

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"KV cache: {name}={getattr(self, name)}, expected at least 1")

    @property
    def page_bytes(self) -> int:
        """K and V of one page over all layers."""
        elements = self.num_layers * self.page_size * self.num_kv_heads * self.head_dim
        return 2 * elements * self.dtype.itemsize


class KvCache:
    """K and V of ``num_pages`` pages at fixed addresses; allocated once, never moved.

    Raises :class:`CapacityError` with the bytes needed and free if the device has not that much.
    """

    keys: Tensor  # [layers, pages, page_size, kv_heads, head_dim], model dtype
    values: Tensor  # same

    def __init__(
        self,
        shape: KvShape,
        num_pages: int,
        device: torch.device | str = "cpu",
        memory: MemoryKind = MemoryKind.PLAIN,
    ) -> None:
        if num_pages < 1:
            raise ConfigError(f"KV cache of {num_pages} pages: it needs at least one page")
        self.shape = shape
        self.num_pages = num_pages
        size = (shape.num_layers, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.arena = arena = Arena(
            MemoryTag.KV_CACHE,
            [(size, shape.dtype)] * 2,
            str(device),
            remedy="lower kv_cache_tokens",
            purpose=f"a KV cache of {num_pages * shape.page_size} tokens would",
            kind=memory,
        )
        # Touched, so that pages of memory are there before the first step.
        self.keys, self.values = (tensor.zero_() for tensor in arena.tensors())

    @property
    def page_size(self) -> int:
        return self.shape.page_size

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.shape.page_bytes
