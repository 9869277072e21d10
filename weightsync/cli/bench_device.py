"""What a worker process of ``bench`` does differently on each device."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from weightsync.cli.bench_model import ModelChoice, load
from weightsync.device_tables import CPU
from weightsync.memory import available_bytes

_CEILING_BYTES = 2**30
_CEILING_MIN_BYTES = 128 * 2**20  # four times a large last-level cache: memory, not cache


class BenchDevice(ABC):
    """A device, as one of the two processes sees it."""

    @abstractmethod
    def load(self, choice: ModelChoice, mask: int) -> Any:
        """The module, on the device; a ``mask`` above 0 makes its weights other ones."""

    @abstractmethod
    def room_bytes(self) -> int:
        """Bytes that are free for tensors."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of the device that anybody uses; 0 where processes are counted one by one."""

    @abstractmethod
    def ceiling(self, total_bytes: int) -> dict[str, Any]:
        """One plain copy in this run: ``gb_per_s`` copied, and ``what`` was measured."""

    @abstractmethod
    def drop_ceiling(self) -> None:
        """Give the ceiling's memory back before memory is watched."""

    @abstractmethod
    def num_different(self, module: Any, preset: str, mask: int) -> int | None:
        """Tensors that are not the drawn ones with ``mask`` flipped; None: nothing was drawn here."""


class HostDevice(BenchDevice):
    """Process memory."""

    def __init__(self) -> None:
        self._ceiling: tuple[Any, Any] | None = None

    def load(self, choice: ModelChoice, mask: int) -> Any:
        return load(choice, mask)

    def room_bytes(self) -> int:
        return available_bytes()

    def used_bytes(self) -> int:
        return 0

    def ceiling(self, total_bytes: int) -> dict[str, Any]:
        """memcpy over pre-faulted memory, with as many threads as we use."""
        from weightsync import config, native
        from weightsync.memory import HostMemory

        if self._ceiling is None:
            size = max(_CEILING_MIN_BYTES, min(total_bytes, _CEILING_BYTES))
            self._ceiling = (HostMemory.anonymous(size), HostMemory.anonymous(size))
            for memory in self._ceiling:
                native.prefault(memory.ptr, memory.num_bytes)
        source, target = self._ceiling
        threads = config.num_threads()
        start_s = time.perf_counter()
        native.memcpy_bytes(target.ptr, source.ptr, source.num_bytes, num_threads=threads)
        spent_s = time.perf_counter() - start_s
        rate = source.num_bytes / spent_s / 1e9
        return {"gb_per_s": rate, "what": f"memcpy, {threads} threads"}

    def drop_ceiling(self) -> None:
        for memory in self._ceiling or ():
            memory.close()
        self._ceiling = None

    def num_different(self, module: Any, preset: str, mask: int) -> int | None:
        return None


def bench_device(name: str) -> BenchDevice:
    """``cpu``, ``cuda`` (which is ``cuda:0``) or ``cuda:N``."""
    if name == CPU:
        return HostDevice()
    from weightsync.cli.bench_cuda import CudaDevice

    return CudaDevice(name)
