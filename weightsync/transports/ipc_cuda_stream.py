"""A ring in memory of a CUDA device that both ends of ``ipc`` can address.

The trainer allocates it with cudaMalloc, outside every framework's cache, and exports it once by a
legacy IPC handle; the engine maps it and unpacks straight out of it. What the trainer frees while an
engine still maps it is free when the engine lets go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any, Final

from weightsync import native
from weightsync.device_tables import CPU, DeviceMemory, Memory, Pin, cuda_errors, cuda_index
from weightsync.errors import ProtocolError, UnavailableError
from weightsync.transports.base import RingOptions
from weightsync.transports.cuda_mapping import MappedMemory
from weightsync.transports.ipc_cuda import uuid_of
from weightsync.transports.link import check_fields
from weightsync.transports.ring import ring_bytes

CUDA_RING_KIND: Final = "cuda_ring"
_RING_FIELDS: Final = {
    "kind": str, "num_slots": int, "slot_bytes": int, "uuid": str, "handle": str, "ptr": int,
}  # fmt: skip
_HANDLE_BYTES: Final = 64

#: Rings of this process by address, for a target in the same process, which must not map them.
_own: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()
_own_lock = threading.Lock()


def make_ring(options: RingOptions) -> tuple[DeviceMemory, dict[str, Any]]:
    """The trainer's memory, and the frame that tells of it. Raises :class:`CapacityError`."""
    index = cuda_index(options.device)
    memory = DeviceMemory(ring_bytes(options), options.device)
    try:
        with cuda_errors(f"the ring on {options.device}"):
            handle = native.extension.cuda_export(memory.ptr, index)
        frame = {
            "kind": CUDA_RING_KIND,
            "num_slots": options.num_slots,
            "slot_bytes": options.slot_bytes,
            "uuid": uuid_of(index),
            "handle": handle.hex(),
            "ptr": memory.ptr,
        }
    except BaseException:
        memory.close()
        raise
    with _own_lock:
        _own[memory.ptr] = memory
    return memory, frame


def open_ring(
    message: Mapping[str, Any], device: str, *, is_own_process: bool
) -> tuple[Memory, RingOptions]:
    """The engine's view of the trainer's ring.

    A ring on another GPU is mapped into ``device``. Raises :class:`ProtocolError` for a frame that
    cannot be, :class:`UnavailableError` where it cannot be mapped.
    """
    fields = check_fields(message, _RING_FIELDS, "frame 'cuda_ring'")
    if device == CPU:
        raise UnavailableError(
            "the trainer streams from a CUDA device, the engine's tensors lie on the host: hold "
            "both on one device"
        )
    index = cuda_index(device)
    if is_own_process and (own := uuid_of(index)) != fields["uuid"]:
        raise UnavailableError(
            f"ipc: the trainer's ring lies on the GPU with UUID {fields['uuid']}, the engine's "
            f"tensors on {device} with UUID {own}; between two GPUs ipc needs two processes"
        )
    options = RingOptions(fields["num_slots"], fields["slot_bytes"], device)
    num_bytes = ring_bytes(options)
    if is_own_process:
        with _own_lock:
            memory = _own.get(fields["ptr"])
        if memory is None or memory.num_bytes != num_bytes:
            raise ProtocolError("frame 'cuda_ring': this process has no such ring")
        return BorrowedMemory(memory), options
    return MappedMemory(_handle(fields["handle"]), num_bytes, device), options


def _handle(text: str) -> bytes:
    try:
        handle = bytes.fromhex(text)
    except ValueError:
        handle = b""
    if len(handle) != _HANDLE_BYTES:
        raise ProtocolError(
            f"frame 'cuda_ring': field 'handle' must be {_HANDLE_BYTES} bytes in hexadecimal"
        )
    return handle


class BorrowedMemory:
    """Memory that somebody else in this process closes."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.ptr, self.num_bytes = memory.ptr, memory.num_bytes

    def pin(self) -> Pin:
        return self._memory.pin()

    def close(self) -> None:
        """Its owner does."""
