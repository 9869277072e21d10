"""A CUDA device made of host memory: every table, handle and mapping works, and nothing is fast.

What runs on it is the code of the transports, not CUDA's: pointers are of this process, kernels are the
CPU's segment copy, and a handle is mapped as a read-only view at another address. It counts what is
allocated and mapped, so that a test sees what is left behind.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from weightsync import native
from weightsync.memory import MemfdMemory
from weightsync.transports.cuda_allocations import Sharing

UUID = b"fake device here"
Rows = npt.NDArray[np.int64]


class FakeTable:
    """A segment table that is copied when it is launched."""

    def __init__(self, rows: Rows, device: int) -> None:
        self._rows: Rows | None = rows.copy()
        self.num_bytes = int(np.prod(rows[:, [2, 4, 7, 10]], axis=1).sum())

    def launch(
        self, stream: int = 0, source_base: int = 0, target_base: int = 0, max_blocks: int = 0
    ) -> None:
        if self._rows is None:
            raise ValueError("this SegmentTableCuda is closed")
        rows = self._rows.copy()
        rows[:, 0] += source_base
        rows[:, 1] += target_base
        native.copy_segments(rows)

    def close(self) -> None:
        self._rows = None


class FakeDigestingTable(FakeTable):
    """One that digests what it reads."""

    def __init__(
        self, rows: Rows, digest_rows: Rows, device: int, *, owners: Rows, num_owners: int
    ) -> None:
        super().__init__(rows, device)
        self._digest_rows, self._owners = digest_rows, owners
        self._sums = np.zeros(num_owners, dtype=np.uint64)

    def launch(
        self, stream: int = 0, source_base: int = 0, target_base: int = 0, max_blocks: int = 0
    ) -> None:
        super().launch(stream, source_base, target_base, max_blocks)
        self._sums[:] = 0
        np.add.at(self._sums, self._owners, native.digest_segments(self._digest_rows))

    def result(self) -> npt.NDArray[np.uint64]:
        return self._sums.copy()


class FakeDevice:
    """``cuda:0`` of this process while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated: dict[int, tuple[MemfdMemory, int]] = {}
        self.mapped: dict[int, MemfdMemory] = {}  # each a view at an address of its own
        self._ids = itertools.count(1)
        monkeypatch.setattr(native, "has_cuda", lambda: True)
        monkeypatch.setattr(native, "SegmentTableCuda", FakeTable, raising=False)
        monkeypatch.setattr(native, "CopyDigestTableCuda", FakeDigestingTable, raising=False)
        nothing: Any = lambda *_: None  # noqa: E731
        for name, function in {
            "cuda_malloc": self._malloc,
            "cuda_free": self._free,
            "cuda_allocation": self._allocation,
            "cuda_export": lambda base, device: base.to_bytes(8, "little") * 8,
            "cuda_map": self._map,
            "cuda_unmap": self._unmap,
            "cuda_copy": lambda target, source, n, device: native.memcpy_bytes(target, source, n),
            "cuda_current_device": lambda: 0,
            "cuda_device_uuid": lambda device: UUID,
            "cuda_free_bytes": lambda device: 2**40,
            "cuda_create_stream": lambda device, priority: 1,
            "cuda_create_event": lambda device: 1,
            "cuda_elapsed_s": lambda *_: 1e-6,
            "cuda_wait_stream": nothing,
            "cuda_wait_event": nothing,
            "cuda_destroy_event": nothing,
            "cuda_record_event": nothing,
            "cuda_synchronize": nothing,
        }.items():
            monkeypatch.setattr(native.extension, name, function)

    def _malloc(self, num_bytes: int, device: int) -> int:
        memory = MemfdMemory.create(num_bytes, "fake-device")
        self.allocated[memory.ptr] = (memory, next(self._ids))
        return memory.ptr

    def _free(self, ptr: int, device: int) -> None:
        memory, _ = self.allocated.pop(ptr, (None, 0))  # None: garbage of an earlier test
        if memory is not None:
            memory.close()

    def _allocation(self, ptr: int, device: int) -> tuple[int, int, int, int]:
        held = [(m, number) for m, number in self.allocated.values()]
        held += [(m, 0) for m in self.mapped.values()]
        for memory, number in held:
            if memory.ptr <= ptr < memory.ptr + memory.num_bytes:
                return memory.ptr, memory.num_bytes, number, Sharing.HANDLE
        raise native.CudaError("not memory of this device")

    def _map(self, handle: bytes, device: int) -> int:
        memory, _ = self.allocated[int.from_bytes(handle[:8], "little")]
        view = MemfdMemory.map(os.dup(memory.fd), memory.num_bytes)
        self.mapped[view.ptr] = view
        return view.ptr

    def _unmap(self, base: int, device: int) -> None:
        self.mapped.pop(base).close()
