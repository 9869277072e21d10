"""One allocation a purpose: tensors of an arena never move while it lives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import CapacityError
from weightsync.memory import available_bytes
from weightsync.types import format_bytes

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


class ArenaLayout(NamedTuple):
    """Bytes from the start of an arena."""

    starts: tuple[int, ...]  # of each tensor
    piece_ends: tuple[int, ...]  # memory is taken in pieces; the last one ends where the arena does

    @property
    def num_bytes(self) -> int:
        return self.piece_ends[-1]


def lay_out(
    sizes_bytes: Iterable[int], piece_bytes: int | None = None, unit_bytes: int = ALIGNMENT_BYTES
) -> ArenaLayout:
    """One tensor behind the other, none across the end of a piece, so that each can be exported by one
    handle and registered as one region.

    A piece has at most ``piece_bytes`` (None: any number), or one tensor that is larger; its end is a
    multiple of ``unit_bytes``, itself a multiple of the tensors' alignment.
    """
    starts, ends, begin, at = [], [], 0, 0
    for size in map(_aligned, sizes_bytes):
        if size and piece_bytes is not None and at > begin and at + size > begin + piece_bytes:
            begin = at = _rounded(at, unit_bytes)
            ends.append(at)
        starts.append(at)
        at += size
    return ArenaLayout(tuple(starts), (*ends, max(_rounded(at, unit_bytes), unit_bytes)))


class Arena:
    """Tensors of one tag on one device, by shape and dtype; their contents are whatever was there.

    ``purpose`` (by default the tag) and ``remedy`` say for what there is too little, and what to
    change. Raises :class:`CapacityError` with the bytes needed and available.
    """

    def __init__(
        self,
        tag: MemoryTag,
        tensors: Iterable[tuple[tuple[int, ...], torch.dtype]],
        device: str = "cpu",
        *,
        remedy: str,
        purpose: str = "",
        kind: MemoryKind = MemoryKind.PLAIN,
    ) -> None:
        wanted = list(tensors)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        layout = _layout_for(sizes, device, kind)
        self.tag, self.num_bytes = tag, layout.num_bytes
        have = _available(device)
        purpose = purpose or str(tag)
        if self.num_bytes > have:
            raise _too_little(purpose, self.num_bytes, have, device, remedy)
        try:
            self.backing = _make_backing(layout, device, kind)
        except (RuntimeError, MemoryError, CapacityError) as error:
            raise _too_little(purpose, self.num_bytes, have, device, remedy) from error
        memory = self.backing.memory
        #: uint8 [num_bytes]: all of it.
        self.memory = memory[-memory.data_ptr() % ALIGNMENT_BYTES :][: self.num_bytes]
        self._views = list(zip(layout.starts, sizes, wanted, strict=True))

    def tensors(self) -> list[torch.Tensor]:
        """In the order asked for. Not kept here: who uses them is looked at for tensors that moved."""
        return [
            self.memory[start : start + size].view(dtype).view(shape)
            for start, size, (shape, dtype) in self._views
        ]


def _layout_for(sizes: Sequence[int], device: str, kind: MemoryKind) -> ArenaLayout:
    from engine_adapter.core.backing import PIECE_BYTES, UNIT_BYTES

    if device != "cpu" and kind is MemoryKind.RELEASABLE:
        return lay_out(sizes, PIECE_BYTES, UNIT_BYTES)
    return lay_out(sizes)


def _make_backing(layout: ArenaLayout, device: str, kind: MemoryKind) -> Backing:
    import torch

    from engine_adapter.core.backing import CudaBacking, HostBacking, PlainBacking

    if device != "cpu" and kind is MemoryKind.RELEASABLE:
        on = torch.device(device)
        index = torch.cuda.current_device() if on.index is None else on.index
        return CudaBacking(layout.piece_ends, f"{on.type}:{index}")
    memory = torch.empty(layout.num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    return HostBacking(memory) if device == "cpu" else PlainBacking(memory)


def _aligned(num_bytes: int) -> int:
    return _rounded(num_bytes, ALIGNMENT_BYTES)


def _rounded(num_bytes: int, unit_bytes: int) -> int:
    return -(-num_bytes // unit_bytes) * unit_bytes


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
