"""Memory under an arena: it can be given back to the system and taken again at the same addresses."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from weightsync import native, native_cuda
from weightsync.device_tables import cuda_index
from weightsync.errors import CapacityError, UnavailableError
from weightsync.memory import available_bytes
from weightsync.types import format_bytes

#: Device memory is taken in pieces of this size: larger ones gain nothing, far smaller ones cost time.
PIECE_BYTES: Final = 256 << 20
#: What devices map at a time, or a multiple of it.
UNIT_BYTES: Final = 2 << 20
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Backing(ABC):
    """``memory`` is uint8 [num_bytes] at an address that stays; bytes are measured, not computed."""

    memory: Tensor

    @abstractmethod
    def release(self) -> int:
        """Give the memory back; returns bytes that this freed. What was there is gone."""

    @abstractmethod
    def resume(self) -> int:
        """Take memory again; returns bytes. Contents are anything. Raises :class:`CapacityError`, with
        nothing taken, if there is too little."""


class HostBacking(Backing):
    """Private memory of the process; whole pages of it go back to the system."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._ptr, self._num_bytes = _whole_pages(memory)

    def release(self) -> int:
        before = self._resident_bytes()
        self._advise(mmap.MADV_DONTNEED)
        return before - self._resident_bytes()

    def resume(self) -> int:
        before = self._resident_bytes()
        check_room(self._num_bytes - before, available_bytes(), "the host")
        try:
            self._advise(_POPULATE_WRITE)
        except OSError:  # an older kernel: pages come with the first touch
            return self._num_bytes - before
        return self._resident_bytes() - before

    def _advise(self, advice: int) -> None:
        if self._num_bytes and _libc().madvise(self._ptr, self._num_bytes, advice):
            raise OSError(ctypes.get_errno(), f"madvise of {self._num_bytes} B, advice {advice}")

    def _resident_bytes(self) -> int:
        pages = bytearray(self._num_bytes // mmap.PAGESIZE)
        if not pages:
            return 0
        room = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
        if _libc().mincore(self._ptr, self._num_bytes, room):
            raise OSError(ctypes.get_errno(), f"mincore of {self._num_bytes} B")
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


class CudaBacking(Backing):
    """Virtual memory management on one CUDA device, in pieces that end there (multiples of
    ``UNIT_BYTES``). Its tensors may not be shared by torch's own means; ``ipc`` of this library shares
    them."""

    def __init__(self, piece_ends: Sequence[int], device: str) -> None:
        self._device = cuda_index(device)
        self._piece_ends = list(piece_ends)
        num_bytes = piece_ends[-1]
        self._base, _ = native.extension.cuda_arena_reserve(num_bytes, self._device)
        try:
            self._take()
        except BaseException:
            _free(self._base, self._device)
            raise
        window = _Window(self._base, num_bytes)
        # At the end of the process the driver takes it back by itself.
        weakref.finalize(window, _free, self._base, self._device).atexit = False
        self.memory = torch.as_tensor(window, device=f"cuda:{self._device}")

    def release(self) -> int:
        torch.cuda.synchronize(self._device)
        return _freed_by(
            lambda: native.extension.cuda_arena_unmap(self._base, self._device), self._device
        )

    def resume(self) -> int:
        return -_freed_by(self._take, self._device)

    def _take(self) -> None:
        map_range(self._base, self._piece_ends, self._device)


class PlainBacking(Backing):
    """Device memory of torch's allocator, which stays where it is."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def release(self) -> int:
        raise UnavailableError(
            f"memory on {self.memory.device} is torch's and cannot be given back in place; make the "
            "engine with memory='releasable'"
        )

    def resume(self) -> int:
        raise UnavailableError(f"memory on {self.memory.device} was never given back")


def equal_pieces(num_bytes: int) -> list[int]:
    """Where pieces end that hold nothing in particular."""
    return [*range(PIECE_BYTES, num_bytes, PIECE_BYTES), num_bytes]


def map_range(base: int, piece_ends: Sequence[int], device: int) -> None:
    """Memory for a range of addresses, in pieces. Raises :class:`CapacityError`."""
    num_bytes = piece_ends[-1]
    try:
        native.extension.cuda_arena_map(base, piece_ends, device)
    except native_cuda.CudaError as error:
        if getattr(error, "error_name", "") != "cudaErrorMemoryAllocation":
            raise
        free_bytes = native.extension.cuda_free_bytes(device)
        raise no_room(num_bytes, free_bytes, f"cuda:{device}") from error


def check_room(needed: int, free_bytes: int, device: str) -> None:
    if needed > free_bytes:
        raise no_room(needed, free_bytes, device)


def no_room(needed: int, free_bytes: int, device: str) -> CapacityError:
    return CapacityError(
        f"{needed} bytes ({format_bytes(needed)}) of memory on {device}, where {free_bytes} are free: "
        f"{max(0, needed - free_bytes)} are missing"
    )


class _Window:
    """What a tensor on an arena stands on: the arena lives as long."""

    def __init__(self, ptr: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (ptr, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


def _free(base: int, device: int) -> None:
    native.extension.cuda_arena_free(base, device)


def _freed_by(act: Any, device: int) -> int:
    before = native.extension.cuda_free_bytes(device)
    act()
    return int(native.extension.cuda_free_bytes(device) - before)


def _whole_pages(memory: Tensor) -> tuple[int, int]:
    page, ptr = mmap.PAGESIZE, memory.data_ptr()
    start, stop = -(-ptr // page) * page, (ptr + memory.numel()) // page * page
    return start, max(0, stop - start)


def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    for call in (library.madvise, library.mincore):
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return library
