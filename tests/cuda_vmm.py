"""Device memory by CUDA's virtual memory management, as memory savers use it: released, resumed in place."""

from __future__ import annotations

import ctypes
from typing import Any

PIECE_BYTES = 2 * 2**20


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("flags", ctypes.c_int),
    )


def _call(name: str, *arguments: Any) -> None:
    result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if result:
        raise OSError(f"{name}: CUDA error {result}")


class VmmBlock:
    """``num_pieces`` pieces of 2 MiB on device 0, side by side; a CUDA context must be current."""

    def __init__(self, num_pieces: int, is_shareable: bool = True) -> None:
        self.num_bytes = num_pieces * PIECE_BYTES
        self._handle_types = 1 if is_shareable else 0  # POSIX file descriptors, or none
        self._handles: list[ctypes.c_ulonglong] = []
        address = ctypes.c_ulonglong()
        _call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self.num_bytes),
            ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0),
        )  # fmt: skip
        self.ptr = address.value
        self.resume()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.ptr, False), "shape": (self.num_bytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip

    def resume(self) -> None:
        """Other memory at the same address."""
        size = ctypes.c_size_t(PIECE_BYTES)
        for offset in range(0, self.num_bytes, PIECE_BYTES):
            handle = ctypes.c_ulonglong()
            properties = _Properties(1, self._handle_types, 1, 0)
            _call(
                "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties),
                ctypes.c_ulonglong(0),
            )  # fmt: skip
            here = ctypes.c_ulonglong(self.ptr + offset)
            _call("cuMemMap", here, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
            self._handles.append(handle)
        access = _Access(1, 0, 3)
        _call(
            "cuMemSetAccess", ctypes.c_ulonglong(self.ptr), ctypes.c_size_t(self.num_bytes),
            ctypes.byref(access), ctypes.c_size_t(1),
        )  # fmt: skip

    def release(self) -> None:
        """Give the memory back; the address stays."""
        _call("cuCtxSynchronize")
        _call("cuMemUnmap", ctypes.c_ulonglong(self.ptr), ctypes.c_size_t(self.num_bytes))
        while self._handles:
            _call("cuMemRelease", self._handles.pop())
