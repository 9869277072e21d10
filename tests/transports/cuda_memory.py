"""Device memory that behaves like the NumPy bytes that the contracts are written with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from transports.wire import Bytes
from weightsync.device_tables import DeviceMemory, bytes_at, write_bytes
from weightsync.transports.base import Transport

DEVICE = "cuda:0"


class CudaBytes:
    """A range of device memory; slices share it. Reading it makes a copy on the host."""

    def __init__(self, ptr: int, num_bytes: int, keeper: object = None) -> None:
        self._keeper = keeper
        self.nbytes = num_bytes
        self.device = DEVICE
        self.ctypes = SimpleNamespace(data=ptr)

    @classmethod
    def zeros(cls, num_bytes: int) -> CudaBytes:
        """An allocation of its own."""
        memory = DeviceMemory(max(num_bytes, 1), DEVICE)
        made = cls(memory.ptr, num_bytes, memory)
        made[:] = 0
        return made

    def __array__(self, dtype: Any = None, copy: Any = None) -> Bytes:
        return bytes_at(self.ctypes.data, self.nbytes, DEVICE)

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> CudaBytes:
        start, stop, _ = part.indices(self.nbytes)
        return CudaBytes(self.ctypes.data + start, max(stop - start, 0), self._keeper)

    def __setitem__(self, part: slice, value: Any) -> None:
        target = self[part]
        filled = np.broadcast_to(np.asarray(value, dtype=np.uint8), (target.nbytes,))
        write_bytes(target.ctypes.data, filled.tobytes(), DEVICE)

    def __invert__(self) -> Bytes:
        return np.asarray(~np.asarray(self))

    def copy(self) -> Bytes:
        return np.asarray(self)

    def any(self) -> bool:
        return bool(np.asarray(self).any())


class OnCuda:
    """Mixed into a contract before it: its memory lies on the device."""

    device = DEVICE

    def converts(self, transport: Transport) -> bool:
        capabilities = transport.capabilities()
        return capabilities.direct_converts or capabilities.cuda_converts

    def landing(self, num_bytes: int) -> Any:
        return CudaBytes.zeros(num_bytes)

    def view(self, ptr: int, num_bytes: int) -> Any:
        return CudaBytes(ptr, num_bytes)

    # A read on a device is over before anything could stop it, and is not stopped.
    test_a_read_ends_at_its_deadline: Any = None
    test_a_read_can_be_cancelled: Any = None
    test_close_ends_a_read: Any = None
