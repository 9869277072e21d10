"""Memory of the paged KV cache, and how much of it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from weightsync.errors import CapacityError, ConfigError
from weightsync.types import format_bytes

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

    Raises :class:`CapacityError` if the device has not that much memory free.
    """

    def __init__(self, shape: KvShape, num_pages: int, device: torch.device | str = "cpu") -> None:
        if num_pages < 1:
            raise ConfigError(f"KV cache of {num_pages} pages: it needs at least one page")
        self.shape = shape
        self.num_pages = num_pages
        size = (shape.num_layers, num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        # Zeroed, and touched, so that too little memory shows now and not in the middle of a step.
        try:
            self.keys = torch.zeros(size, dtype=shape.dtype, device=device)
            self.values = torch.zeros(size, dtype=shape.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"no memory for a KV cache of {num_pages} pages "
                f"({format_bytes(num_pages * shape.page_bytes)}): {error}; lower kv_cache_tokens"
            ) from error

    keys: Tensor  # [layers, pages, page_size, kv_heads, head_dim], model dtype
    values: Tensor  # same

    @property
    def page_size(self) -> int:
        return self.shape.page_size

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.shape.page_bytes
