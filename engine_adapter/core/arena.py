"""One allocation a purpose: tensors of an arena never move while it lives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from weightsync.errors import CapacityError
from weightsync.memory import available_bytes
from weightsync.types import format_bytes, item_bytes

if TYPE_CHECKING:
    import torch

#: Of every tensor: a cache-line pair, and what bulk copies and tensor cores want.
ALIGNMENT_BYTES = 256


class Arena:
    """Memory for tensors of one ``tag`` (``weights``, ``kv_cache``, ``static``) on one device.

    ``remedy`` says what to change if there is too little. Raises :class:`CapacityError` with the
    bytes needed and available.
    """

    def __init__(self, tag: str, num_bytes: int, device: str = "cpu", *, remedy: str) -> None:
        import torch

        self.tag, self.num_bytes = tag, num_bytes
        needed = num_bytes + ALIGNMENT_BYTES
        have = _available(device)
        if needed > have:
            raise _too_little(tag, needed, have, device, remedy)
        try:
            memory = torch.empty(needed, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError) as error:
            raise _too_little(tag, needed, have, device, remedy) from error
        self._memory = memory[-memory.data_ptr() % ALIGNMENT_BYTES :][:num_bytes]
        self._used_bytes = 0

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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _available(device: str) -> int:
    if device == "cpu":
        return available_bytes()
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def _too_little(tag: str, needed: int, have: int, device: str, remedy: str) -> CapacityError:
    return CapacityError(
        f"{tag} need {needed} bytes ({format_bytes(needed)}) on {device}, where {have} bytes "
        f"({format_bytes(have)}) are free; {remedy}"
    )
