"""One allocation a purpose: tensors of an arena never move while it lives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

from weightsync.errors import CapacityError
from weightsync.memory import available_bytes
from weightsync.types import format_bytes, item_bytes

if TYPE_CHECKING:
    import torch

    from engine_adapter.core.backing import Backing

#: Of every tensor: a cache-line pair, and what bulk copies and tensor cores want.
ALIGNMENT_BYTES = 256


class MemoryTag(StrEnum):
    """What memory of an engine is for; it is given back and taken again by these."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    STATIC = "static"  # tables that nobody writes again
    CUDA_GRAPH = "cuda_graph"  # what passes between the kernels of decode graphs


class MemoryKind(StrEnum):
    """Where memory on a CUDA device comes from. On the CPU all of it can be given back."""

    PLAIN = "plain"  # torch's allocator
    RELEASABLE = "releasable"  # virtual memory management: can be given back in place


class Arena:
    """Memory for tensors of one tag on one device.

    ``purpose`` (by default the tag) and ``remedy`` say for what there is too little, and what to
    change. Raises :class:`CapacityError` with the bytes needed and available.
    """

    def __init__(
        self,
        tag: MemoryTag,
        num_bytes: int,
        device: str = "cpu",
        *,
        remedy: str,
        purpose: str = "",
        kind: MemoryKind = MemoryKind.PLAIN,
    ) -> None:
        self.tag, self.num_bytes = tag, num_bytes
        needed = num_bytes + ALIGNMENT_BYTES
        have = _available(device)
        purpose = purpose or str(tag)
        if needed > have:
            raise _too_little(purpose, needed, have, device, remedy)
        try:
            self.backing = _make_backing(needed, device, kind)
        except (RuntimeError, MemoryError, CapacityError) as error:
            raise _too_little(purpose, needed, have, device, remedy) from error
        memory = self.backing.memory
        self._memory = memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:num_bytes]
        self._used_bytes = 0

    @property
    def memory(self) -> torch.Tensor:
        """uint8 [num_bytes]: all of it."""
        return self._memory

    @staticmethod
    def bytes_for(shapes: Iterable[tuple[tuple[int, ...], str]]) -> int:
        """Bytes that an arena needs for tensors of these shapes and dtypes."""
        return sum(_aligned(math.prod(shape) * item_bytes(dtype)) for shape, dtype in shapes)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that nobody else has; its contents are whatever was there."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._used_bytes
        if start + num_bytes > self.num_bytes:
            raise CapacityError(
                f"arena {self.tag!r} of {self.num_bytes} bytes has {self.num_bytes - start} left, "
                f"{num_bytes} were asked for"
            )
        self._used_bytes = start + _aligned(num_bytes)
        return self._memory[start : start + num_bytes].view(dtype).view(shape)


def _make_backing(num_bytes: int, device: str, kind: MemoryKind) -> Backing:
    import torch

    from engine_adapter.core.backing import CudaBacking, HostBacking, PlainBacking

    if device != "cpu" and kind is MemoryKind.RELEASABLE:
        on = torch.device(device)
        index = torch.cuda.current_device() if on.index is None else on.index
        return CudaBacking(num_bytes, f"{on.type}:{index}")
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return HostBacking(memory) if device == "cpu" else PlainBacking(memory)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _available(device: str) -> int:
    if device == "cpu":
        return available_bytes()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def _too_little(purpose: str, needed: int, have: int, device: str, remedy: str) -> CapacityError:
    return CapacityError(
        f"{purpose} need {needed} bytes ({format_bytes(needed)}) on {device}, where {have} bytes "
        f"({format_bytes(have)}) are free; {remedy}"
    )
