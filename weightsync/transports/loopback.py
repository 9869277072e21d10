"""Both ends in one process: the reference that the others are held against, and a test double.

The stream is a ring in private memory, the direct contract a segment copy on plain addresses. Faults
can be put in its way, to see what is built on top notice them.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from weightsync import config
from weightsync.deadline import Deadline
from weightsync.device_tables import (
    CPU,
    CudaCopy,
    Memory,
    device_of,
    private_memory,
    read_bytes,
    synchronize,
    write_bytes,
)
from weightsync.errors import ConfigError, ProtocolError, UnavailableError
from weightsync.native import CancelFlag, copy_segments
from weightsync.tables import DigestRows
from weightsync.transports.base import (
    Availability,
    Capabilities,
    CostConstants,
    Descriptor,
    DirectSource,
    DirectTarget,
    RingOptions,
    Slot,
    SlotHeader,
    SourceEndpoint,
    StreamSource,
    StreamTarget,
    Table,
    TargetEndpoint,
    Transport,
)
from weightsync.transports.link import Inbox, Link, LocalLink, check_fields
from weightsync.transports.published import (
    DIRECT_KINDS,
    DeviceCopied,
    DevicePath,
    DeviceSource,
    DirectReader,
    EpochBoard,
    Publisher,
    ReadPath,
    Span,
)
from weightsync.transports.reads import table_bytes
from weightsync.transports.ring import (
    RING_SOURCE_KINDS,
    RING_TARGET_KINDS,
    RingSource,
    RingTarget,
    ring_bytes,
)
from weightsync.types import PROTOCOL_VERSION, Contract, RegionAddress

_DESCRIPTOR_FIELDS: Final = {"schema": int, "transport": str, "endpoint": str, "pid": int}
#: Not measured: a copy within one process, of which only the order of magnitude matters here.
_COSTS: Final = CostConstants(op_s=0.1e-6, bytes_per_s=8e9)


class Fault(Enum):
    """What goes wrong."""

    DROP = "drop"  # a slot never arrives; a read leaves its last segment unread
    CORRUPT = "corrupt"  # one bit is flipped
    LOSE_PEER = "lose_peer"  # the pair breaks before anything moves


@dataclass(frozen=True, slots=True)
class LoopbackFaults:
    """What goes wrong at the n-th submitted slot and the n-th read, counted from 1 over all pairs."""

    slots: Mapping[int, Fault] = field(default_factory=dict)
    reads: Mapping[int, Fault] = field(default_factory=dict)


class _Faults:
    def __init__(self, faults: LoopbackFaults) -> None:
        self._faults = faults
        self._num_slots = 0
        self._num_reads = 0
        self._lock = threading.Lock()

    def next_slot(self) -> Fault | None:
        with self._lock:
            self._num_slots += 1
            return self._faults.slots.get(self._num_slots)

    def next_read(self) -> Fault | None:
        with self._lock:
            self._num_reads += 1
            return self._faults.reads.get(self._num_reads)


def _flip_bit(ptr: int, device: str = CPU) -> None:
    (byte,) = read_bytes(ptr, 1, device)
    write_bytes(ptr, bytes([byte ^ 1]), device)


class _LocalPath(ReadPath):
    """Addresses are plain: both ends live in one process."""

    @property
    def name(self) -> str:
        return "copy"

    def __init__(self, link: LocalLink, faults: _Faults) -> None:
        self._link = link
        self._faults = faults

    def map(self, regions: Mapping[int, Span], board: EpochBoard) -> dict[int, int]:
        return {region: ptr for region, (ptr, _) in regions.items()}

    def copy(self, rows: Table, flag: CancelFlag) -> int:
        fault = self._faults.next_read() if len(rows) else None
        if fault is Fault.LOSE_PEER:
            self._link.close()
            return 0
        kept = rows[:-1] if fault is Fault.DROP else rows
        copied = copy_segments(kept, num_threads=config.num_threads(), cancel=flag)
        if fault is Fault.CORRUPT:
            _flip_bit(int(rows[0, 1]))
        return copied + table_bytes(rows[len(kept) :])  # a dropped segment is not confessed

    def close(self) -> None:
        """Nothing is mapped."""


class _LocalSource(DeviceSource):
    """Tells of CUDA memory of this process."""

    def __init__(self) -> None:
        self._described: dict[str, Any] = {}

    def describe(self, regions: Sequence[RegionAddress]) -> dict[str, Any]:
        device = device_of(regions, "what the trainer publishes")
        synchronize(device)
        if self._described != {"device": device}:
            self._described = {"device": device}
        return self._described

    def announce(self, link: Link, epoch: int) -> None:
        """All is described."""

    def withdraw(self, link: Link, epoch: int) -> None:
        """Nothing was sent along."""


class _LocalDevicePath(DevicePath):
    """One launch on plain addresses; faults as on the host."""

    @property
    def name(self) -> str:
        return "cuda copy"

    def __init__(self, link: LocalLink, faults: _Faults) -> None:
        self._link = link
        self._faults = faults
        self._device = CPU

    def map_device(
        self,
        device: object,
        regions: Mapping[int, Span],
        local: Sequence[RegionAddress],
        epoch: int,
    ) -> dict[int, int]:
        self._device = device_of(local, "the engine")
        if device != {"device": self._device}:
            raise UnavailableError(
                f"loopback: the trainer's tensors lie on {device}, the engine's on {self._device}; "
                "hold both on one device"
            )
        return {region: ptr for region, (ptr, _) in regions.items()}

    def prepare(self, rows: Table, digests: DigestRows | None) -> tuple[Table, CudaCopy]:
        return rows, CudaCopy(rows, self._device)

    def copy(
        self, prepared: tuple[Table, CudaCopy], meanwhile: Callable[[], None] | None = None
    ) -> DeviceCopied:
        rows, whole = prepared
        fault = self._faults.next_read() if len(rows) else None
        if fault is Fault.LOSE_PEER:
            self._link.close()
            return DeviceCopied(0.0)
        copy = CudaCopy(rows[:-1], self._device) if fault is Fault.DROP else whole
        if fault is Fault.CORRUPT:
            copy.run()
            _flip_bit(int(rows[0, 1]), self._device)
            if meanwhile is not None:  # what it enqueues is behind the fault
                meanwhile()
        else:
            copy.run(meanwhile=meanwhile)
        return DeviceCopied(copy.device_s)

    def release(self) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """Nothing is mapped."""


class _FaultyRing(RingSource):
    """A ring that loses or spoils the slots it was told to."""

    def __init__(self, inbox: Inbox, memory: Memory, options: RingOptions, faults: _Faults) -> None:
        super().__init__(inbox, memory, options)
        self._device = options.device
        self._faults = faults
        self._is_dropped = False

    def submit(self, slot: Slot, header: SlotHeader) -> None:
        fault = self._faults.next_slot()
        if fault is Fault.LOSE_PEER:
            self._inbox.link.close()
        elif fault is Fault.CORRUPT:
            _flip_bit(slot.ptr, self._device)
        self._is_dropped = fault is Fault.DROP
        super().submit(slot, header)

    def _send_slot(self, frame: dict[str, Any]) -> None:
        if not self._is_dropped:
            super()._send_slot(frame)


class LoopbackSource(SourceEndpoint):
    """The trainer's end."""

    def __init__(self, faults: _Faults) -> None:
        self._endpoint = secrets.token_hex(8)
        self._link, self._peer_link = LocalLink.pair()
        self._faults = faults
        self._inbox = Inbox(self._link, RING_SOURCE_KINDS)
        self._publisher = Publisher("loopback", self._endpoint, device_source=_LocalSource())
        self._publisher.attach(self._link)
        self._is_attached = threading.Event()
        self._is_ring_made = threading.Event()
        self._memory: Memory | None = None
        self._options: RingOptions | None = None
        self._ring: RingSource | None = None
        with _sources_lock:
            _sources[self._endpoint] = self

    def descriptor(self) -> Descriptor:
        return {
            "schema": PROTOCOL_VERSION,
            "transport": "loopback",
            "endpoint": self._endpoint,
            "pid": os.getpid(),
        }

    def accept(self, deadline: Deadline) -> None:
        _wait(self._is_attached, self._link, deadline)

    def attach(self) -> tuple[LocalLink, _Faults]:
        """The target's way in; one target only."""
        with _sources_lock:
            if self._is_attached.is_set():
                raise UnavailableError("this loopback source has a target already")
            self._is_attached.set()
        return self._peer_link, self._faults

    def stream(self, options: RingOptions, deadline: Deadline) -> StreamSource:
        self._inbox.check()
        if self._ring is None:
            self._memory = private_memory(ring_bytes(options), options.device)
            self._ring = _FaultyRing(self._inbox, self._memory, options, self._faults)
            self._options = options
            self._is_ring_made.set()
        elif options != self._options:
            raise ConfigError(f"the ring of this pair has {self._options}, not {options}")
        return self._ring

    def wait_ring(self, link: LocalLink, deadline: Deadline) -> tuple[Memory, RingOptions]:
        """The memory of the ring, for the target."""
        _wait(self._is_ring_made, link, deadline)
        if self._memory is None or self._options is None:
            raise deadline.lost(f"{deadline.peer}: the ring is gone")
        return self._memory, self._options

    def direct(self) -> DirectSource:
        return self._publisher

    def lost(self) -> str | None:
        return self._link.lost()

    @property
    def path(self) -> str:
        return "copy"

    def close(self) -> None:
        with _sources_lock:
            _sources.pop(self._endpoint, None)
        self._link.close()
        self._ring = None  # its memory goes with the last slot that somebody holds
        if self._memory is not None:
            self._memory.close()


class LoopbackTarget(TargetEndpoint):
    """The engine's end."""

    def __init__(self, source: LoopbackSource, endpoint: str) -> None:
        self._source = source
        self._link, faults = source.attach()
        self._inbox = Inbox(self._link, (*RING_TARGET_KINDS, *DIRECT_KINDS))
        self._ring: RingTarget | None = None
        path = _LocalPath(self._link, faults)
        device_path = _LocalDevicePath(self._link, faults)
        self._reader = DirectReader("loopback", endpoint, self._inbox, lambda _: path, device_path)

    def stream(self, deadline: Deadline, device: str = CPU) -> StreamTarget:
        if self._ring is None:
            memory, options = self._source.wait_ring(self._link, deadline)
            if options.device != device:
                raise UnavailableError(
                    f"loopback: the trainer streams from {options.device}, the engine's tensors "
                    f"lie on {device}; hold both on one device"
                )
            self._ring = RingTarget(self._inbox, memory, options)
        return self._ring

    def direct(self) -> DirectTarget:
        return self._reader

    def probe_direct(self, deadline: Deadline) -> Availability:
        deadline.check()
        self._inbox.check()
        return Availability(True)

    def lost(self) -> str | None:
        return self._link.lost()

    @property
    def path(self) -> str:
        return "copy"

    def close(self) -> None:
        self._link.close()
        self._reader.close()
        self._ring = None


_sources: weakref.WeakValueDictionary[str, LoopbackSource] = weakref.WeakValueDictionary()
_sources_lock = threading.Lock()


def _wait(event: threading.Event, link: LocalLink, deadline: Deadline) -> None:
    while not event.wait(deadline.slice_s()):
        deadline.check()
        if (reason := link.lost()) is not None:
            raise deadline.lost(f"{deadline.peer}: {reason}")


class LoopbackTransport(Transport):
    """See the module."""

    name = "loopback"

    def __init__(self, faults: LoopbackFaults | None = None) -> None:
        self._faults = _Faults(faults or LoopbackFaults())

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name=self.name,
            contracts={Contract.STREAM: Availability(True), Contract.DIRECT: Availability(True)},
            costs={Contract.STREAM: _COSTS, Contract.DIRECT: _COSTS},
            direct_converts=True,
            reads_cuda=True,
            streams_cuda=True,
        )

    def open_source(self, device: str = CPU) -> LoopbackSource:
        return LoopbackSource(self._faults)

    def open_target(
        self, descriptor: Descriptor, deadline: Deadline, device: str = CPU
    ) -> LoopbackTarget:
        deadline.check()
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, "loopback descriptor")
        for name, value in (("schema", PROTOCOL_VERSION), ("transport", self.name)):
            if fields[name] != value:
                raise ProtocolError(
                    f"loopback descriptor: field {name!r} is {fields[name]!r}, not {value!r}"
                )
        if fields["pid"] != os.getpid():
            raise UnavailableError(
                f"loopback works within one process: the source is in {fields['pid']}, this is "
                f"{os.getpid()}; use 'ipc' on one machine"
            )
        with _sources_lock:
            source = _sources.get(fields["endpoint"])
        if source is None:
            raise UnavailableError("the loopback source of this descriptor is closed or unknown")
        return LoopbackTarget(source, fields["endpoint"])
