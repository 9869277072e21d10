"""A peer's allocation, mapped by its handle; unmapped when the last who reads it lets go."""

from __future__ import annotations

import logging
import weakref

from weightsync import native
from weightsync.device_tables import Pin, cuda_errors, cuda_index
from weightsync.errors import ProtocolError

_LOG = logging.getLogger(__name__)


class _Mapping:
    """What is unmapped with its last reference."""

    def __init__(self, ptr: int, index: int) -> None:
        self._unmap = weakref.finalize(self, _unmap, ptr, index)
        self._unmap.atexit = False  # the process takes it along


def _unmap(ptr: int, index: int) -> None:
    try:
        native.extension.cuda_unmap(ptr, index)
    except native.CudaError:  # of an earlier kernel: the device is of no use any more
        _LOG.exception("memory of the trainer was not unmapped")


class _MappingPin:
    def __init__(self, mapping: _Mapping) -> None:
        self._mapping: _Mapping | None = mapping

    def release(self) -> None:
        self._mapping = None


class MappedMemory:
    """Memory of another process; unmapped by ``close``, or with the last pin after it.

    Raises :class:`TransportError` where CUDA refuses, :class:`ProtocolError` where the allocation is
    smaller than ``num_bytes``.
    """

    def __init__(self, handle: bytes, num_bytes: int, device: str) -> None:
        index = cuda_index(device)
        with cuda_errors(f"the trainer's ring on {device}"):
            self.ptr = native.extension.cuda_map(handle, index)
        self.num_bytes = num_bytes
        self._mapping: _Mapping | None = _Mapping(self.ptr, index)
        with cuda_errors(f"the trainer's ring on {device}"):
            base, held_bytes, *_ = native.extension.cuda_allocation(self.ptr, index)
        if base + held_bytes < self.ptr + num_bytes:
            self.close()
            raise ProtocolError(f"a ring of {num_bytes} B in an allocation of {held_bytes} B")

    def pin(self) -> Pin:
        if self._mapping is None:
            raise ValueError("the trainer's ring was unmapped")
        return _MappingPin(self._mapping)

    def close(self) -> None:
        self._mapping = None
