"""Between two processes of one machine, over host memory or within one CUDA device.

A channel on an abstract Unix socket carries headers and file descriptors. The stream is a ring in a
memfd of the trainer, which the engine maps for reading only. Direct reads are ``process_vm_readv``;
if all of the trainer's regions lie in a :class:`~weightsync.memory.SharedArena`, that is mapped and
read instead, which is faster and works where the kernel refuses to let one process read another.
CUDA memory of one device is read through CUDA IPC handles, and a ring may lie there too.
Nothing has a name in a file system: a SIGKILL of either side leaves nothing behind.
"""

from __future__ import annotations

import os
import secrets
import threading
from typing import Any, Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.device_tables import CPU, Memory
from weightsync.errors import ConfigError, ProtocolError, TransportError, UnavailableError
from weightsync.memory import MemfdMemory, has_arenas
from weightsync.transports.base import (
    Availability,
    Capabilities,
    CostConstants,
    Descriptor,
    DirectSource,
    DirectTarget,
    RingOptions,
    SourceEndpoint,
    StreamSource,
    StreamTarget,
    TargetEndpoint,
    Transport,
)
from weightsync.transports.channel import Channel, Listener, close_fds, connect
from weightsync.transports.cuda_pieces import PIECES_KIND, PieceBoard
from weightsync.transports.ipc_cuda import CudaPath, CudaSource
from weightsync.transports.ipc_cuda_stream import CUDA_RING_KIND, make_ring, open_ring
from weightsync.transports.ipc_host import (
    REMEDY,
    TRACERS,
    host_identity,
    probe_word,
    process_read_here,
)
from weightsync.transports.ipc_paths import AutoPath, DirectPath, MemfdPath, ProcessReadPath
from weightsync.transports.link import Inbox, check_fields
from weightsync.transports.published import DIRECT_KINDS, DirectReader, Publisher, ReadPath
from weightsync.transports.ring import (
    RING_SOURCE_KINDS,
    RING_TARGET_KINDS,
    RingSource,
    RingTarget,
    ring_bytes,
)
from weightsync.types import PROTOCOL_VERSION, Contract

__all__ = ["DirectPath", "IpcTransport"]

_DESCRIPTOR_FIELDS: Final = {
    "schema": int, "transport": str, "endpoint": str, "host": dict, "channel": dict,
}  # fmt: skip
_HOST_FIELDS: Final = {"boot_id": str, "net_namespace": int, "pid_namespace": int}
_HELLO_FIELDS: Final = {
    "kind": str, "endpoint": str, "word_ptr": int, "word": int, "has_arenas": bool,
}  # fmt: skip
_RING_FIELDS: Final = {"kind": str, "num_slots": int, "slot_bytes": int}
_RING_KINDS: Final = ("ring", CUDA_RING_KIND)


class IpcSource(SourceEndpoint):
    """The trainer's end."""

    def __init__(self) -> None:
        self._endpoint = secrets.token_hex(8)
        self._listener = Listener("unix")
        self._publisher = Publisher(
            "ipc", self._endpoint, shares_arenas=True, device_source=CudaSource()
        )
        # What the target reads to see that it reads the right process.
        self._word = np.array([secrets.randbits(63)], dtype="<u8")
        self._channel: Channel | None = None
        self._inbox: Inbox | None = None
        self._memory: Memory | None = None
        self._options: RingOptions | None = None
        self._ring: RingSource | None = None
        self._close_lock = threading.Lock()
        self._is_closed = False

    def descriptor(self) -> Descriptor:
        return {
            "schema": PROTOCOL_VERSION,
            "transport": "ipc",
            "endpoint": self._endpoint,
            "host": host_identity(),
            "channel": self._listener.address(),
        }

    def accept(self, deadline: Deadline) -> None:
        if self._channel is not None:
            return
        channel = self._listener.accept(deadline)
        with self._close_lock:
            if self._is_closed:
                channel.close()
                raise TransportError(f"{deadline.peer}: this end was closed")
            self._channel = channel
            self._inbox = Inbox(channel, RING_SOURCE_KINDS)
            TRACERS.permit(channel.peer_pid)
        self._listener.close()
        hello = {
            "kind": "hello",
            "endpoint": self._endpoint,
            "word_ptr": int(self._word.ctypes.data),
            "word": int(self._word[0]),
            "has_arenas": has_arenas(),
        }
        channel.send(hello, deadline=deadline)
        self._publisher.attach(channel)

    def stream(self, options: RingOptions, deadline: Deadline) -> StreamSource:
        if self._inbox is None:
            raise ConfigError("accept() comes before stream()")
        self._inbox.check()
        if self._ring is None:
            make = _send_ring if options.device == CPU else _send_cuda_ring
            self._memory, self._options = make(options, self._inbox, deadline), options
            self._ring = RingSource(self._inbox, self._memory, options)
        elif options != self._options:
            raise ConfigError(f"the ring of this pair has {self._options}, not {options}")
        return self._ring

    def direct(self) -> DirectSource:
        return self._publisher

    def lost(self) -> str | None:
        return None if self._channel is None else self._channel.lost()

    @property
    def path(self) -> str:
        return "host memory"

    def close(self) -> None:
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._listener.close()
        if self._channel is not None:
            TRACERS.forbid(self._channel.peer_pid)
            self._channel.close()
        if self._inbox is not None:
            self._inbox.close()
        self._ring = None  # its memory goes with the last slot that somebody holds
        if self._memory is not None:
            self._memory.close()


def _send_ring(options: RingOptions, inbox: Inbox, deadline: Deadline) -> Memory:
    memory = MemfdMemory.create(ring_bytes(options), "weightsync-ring")
    frame = {"kind": "ring", "num_slots": options.num_slots, "slot_bytes": options.slot_bytes}
    fd = memory.read_only_fd()
    try:
        inbox.link.send(frame, [fd], deadline)
    finally:
        close_fds([fd])
    return memory


def _send_cuda_ring(options: RingOptions, inbox: Inbox, deadline: Deadline) -> Memory:
    memory, frame = make_ring(options)
    try:
        inbox.link.send(frame, deadline=deadline)
    except BaseException:
        memory.close()
        raise
    return memory


class IpcTarget(TargetEndpoint):
    """The engine's end."""

    def __init__(
        self, channel: Channel, endpoint: str, direct_path: DirectPath, pieces: PieceBoard
    ) -> None:
        self._channel = channel
        self._endpoint = endpoint
        self._direct_path = direct_path
        self._inbox = Inbox(channel, ("hello", *_RING_KINDS, *RING_TARGET_KINDS, *DIRECT_KINDS))
        self._hello: dict[str, Any] | None = None
        self._memory: Memory | None = None
        self._ring: RingTarget | None = None
        self._is_own_process = channel.peer_pid == os.getpid()
        self._reader = DirectReader(
            "ipc", endpoint, self._inbox, self._find_path, CudaPath(self._is_own_process, pieces)
        )

    def stream(self, deadline: Deadline, device: str = CPU) -> StreamTarget:
        if self._ring is None:
            message, fds = self._inbox.take(_RING_KINDS, deadline)
            if message["kind"] == CUDA_RING_KIND:
                close_fds(fds)
                own = self._is_own_process
                self._memory, options = open_ring(message, device, is_own_process=own)
            else:
                self._memory, options = _map_ring(message, fds, device)
            self._ring = RingTarget(self._inbox, self._memory, options)
        return self._ring

    def direct(self) -> DirectTarget:
        return self._reader

    def probe_direct(self, deadline: Deadline) -> Availability:
        hello = self._take_hello(deadline)
        process = self._probe_process(hello)
        if process.is_usable or self._direct_path is DirectPath.PROCESS_READ:
            return process
        if hello["has_arenas"]:
            reason = f"{process.reason}: only memory in a SharedArena can be read"
            return Availability(True, reason, process.remedy)
        return process

    def _probe_process(self, hello: dict[str, Any]) -> Availability:
        if self._direct_path is DirectPath.MEMFD:
            return Availability(False, "reading the process is switched off", REMEDY)
        return probe_word(self._channel.peer_pid, hello["word_ptr"], hello["word"])

    def _find_path(self, deadline: Deadline) -> ReadPath:
        process = self._probe_process(self._take_hello(deadline))
        if not process.is_usable and self._direct_path is DirectPath.PROCESS_READ:
            self._inbox.check()  # a peer that is gone is not a peer that refuses
            raise UnavailableError(f"direct reads: {process.reason}; {process.remedy}")
        if not process.is_usable:
            return MemfdPath(process.reason)
        path = ProcessReadPath(self._channel.peer_pid, self._channel.lost)
        if self._direct_path is DirectPath.PROCESS_READ:
            return path
        return AutoPath(path, MemfdPath("not tried"))

    def _take_hello(self, deadline: Deadline) -> dict[str, Any]:
        if self._hello is None:
            message, fds = self._inbox.take(("hello",), deadline)
            close_fds(fds)
            check_fields(message, _HELLO_FIELDS, "frame 'hello'")
            if message["endpoint"] != self._endpoint:
                raise ProtocolError("the process at this address is not the one of the descriptor")
            self._hello = message
        return self._hello

    def lost(self) -> str | None:
        return self._channel.lost()

    @property
    def path(self) -> str:
        return self._reader.path_name or "host memory"

    def close(self) -> None:
        self._channel.close()
        self._inbox.close()
        self._reader.close()
        self._ring = None  # its memory goes with the last slot that somebody holds
        if self._memory is not None:
            self._memory.close()


def _map_ring(message: dict[str, Any], fds: list[int], device: str) -> tuple[Memory, RingOptions]:
    try:
        check_fields(message, _RING_FIELDS, "frame 'ring'")
        options = RingOptions(message["num_slots"], message["slot_bytes"])
        num_bytes = ring_bytes(options)
        if len(fds) != 1:
            raise ProtocolError(f"the ring came with {len(fds)} descriptors, not one")
        if device != CPU:
            raise UnavailableError(
                f"the trainer streams from the host, the engine's tensors lie on {device}: hold "
                "both on one device"
            )
    except (ProtocolError, ConfigError, UnavailableError) as error:
        close_fds(fds)
        if isinstance(error, ConfigError):
            raise ProtocolError(str(error)) from error
        raise
    return MemfdMemory.map(fds[0], num_bytes), options


class IpcTransport(Transport):
    """See the module. ``direct_path`` is for tests: how direct reads travel."""

    name = "ipc"

    def __init__(self, direct_path: DirectPath = DirectPath.AUTO) -> None:
        self._direct_path = direct_path

    def capabilities(self) -> Capabilities:
        direct = process_read_here()
        if not direct.is_usable:
            reason = f"{direct.reason}: only memory in a SharedArena can be read"
            direct = Availability(True, reason, direct.remedy)
        return Capabilities(
            name=self.name,
            contracts={Contract.STREAM: Availability(True), Contract.DIRECT: direct},
            costs={Contract.STREAM: _STREAM_COSTS, Contract.DIRECT: _DIRECT_COSTS},
            direct_converts=True,
            reads_cuda=True,
            streams_cuda=True,
            cuda_converts=True,
            cuda_costs={Contract.STREAM: _CUDA_STREAM_COSTS, Contract.DIRECT: _CUDA_DIRECT_COSTS},
        )

    def open_source(self, device: str = CPU) -> IpcSource:
        return IpcSource()

    def open_target(
        self, descriptor: Descriptor, deadline: Deadline, device: str = CPU
    ) -> IpcTarget:
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, "ipc descriptor")
        for name, value in (("schema", PROTOCOL_VERSION), ("transport", self.name)):
            if fields[name] != value:
                raise ProtocolError(
                    f"ipc descriptor: field {name!r} is {fields[name]!r}, not {value!r}"
                )
        _check_host(fields["host"])
        pieces = PieceBoard()
        channel = connect(fields["channel"], deadline, {PIECES_KIND: pieces.take})
        return IpcTarget(channel, fields["endpoint"], self._direct_path, pieces)


def _check_host(host: object) -> None:
    """Before anything is opened: nothing of ``ipc`` reaches another kernel or network namespace."""
    theirs, ours = check_fields(host, _HOST_FIELDS, "ipc descriptor, 'host'"), host_identity()
    for name, what in (("boot_id", "machine"), ("net_namespace", "network namespace")):
        if theirs[name] != ours[name]:
            raise UnavailableError(
                f"ipc: the trainer is in another {what} ({name} {theirs[name]}, here {ours[name]}); "
                "use 'p2p' between machines, or share the network namespace between containers"
            )


# Measured on two busy cores of an AMD EPYC virtual machine, where memcpy made 3.4 GB/s. A stream copies
# twice, and a slot costs two frames; a direct read is process_vm_readv of private memory.
_STREAM_COSTS: Final = CostConstants(op_s=250e-6, bytes_per_s=1.2e9)
_DIRECT_COSTS: Final = CostConstants(op_s=1.2e-6, bytes_per_s=2.0e9)
#: One launch over mapped memory, whatever the number of tensors; a slot costs two frames and two
#: launches that are waited for. On one H200.
_CUDA_DIRECT_COSTS: Final = CostConstants(op_s=10e-9, bytes_per_s=2.05e12)
_CUDA_STREAM_COSTS: Final = CostConstants(op_s=400e-6, bytes_per_s=0.95e12)
