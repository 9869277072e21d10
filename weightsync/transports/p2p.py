"""One-sided reads over NIXL and UCX: between machines, and on one.

The source registers memory and then takes no part; the engine reads. No end ever registers memory for
a peer to write into: a target's landing memory is known to its own process only.

Control frames travel on a TCP channel beside it, whose end is also how the death of a peer is
noticed. Both ends listen on loopback unless told otherwise.
"""

from __future__ import annotations

import base64
import importlib.util
import ipaddress
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Final

from weightsync import config
from weightsync.deadline import Deadline
from weightsync.device_tables import CPU, DeviceMemory, Memory
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    TransportError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.memory import HostMemory
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
from weightsync.transports.channel import Channel, Listener, connect
from weightsync.transports.link import Inbox, check_fields
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import NIXL_MODULES, Span
from weightsync.transports.p2p_cuda import DeviceWay, PeerMemory
from weightsync.transports.p2p_cuda_probe import CudaProbe, CudaProbeSource
from weightsync.transports.p2p_direct import P2pDirectSource, P2pDirectTarget
from weightsync.transports.p2p_probe import PROBE_BYTES, Probe, host_id, probe_pattern
from weightsync.transports.p2p_published import unpack_bytes
from weightsync.transports.p2p_stream import (
    RING_KIND,
    Landing,
    LandingRing,
    MappedRing,
    ring_frame,
)
from weightsync.transports.published import DIRECT_KINDS
from weightsync.transports.ring import (
    RING_SOURCE_KINDS,
    RING_TARGET_KINDS,
    RingSource,
    RingTarget,
    ring_bytes,
)
from weightsync.types import PROTOCOL_VERSION, Contract

_LOG = logging.getLogger(__name__)

_DESCRIPTOR_FIELDS: Final = {
    "schema": int, "transport": str, "endpoint": str, "channel": dict, "host": str, "pid": int,
    "agent": str, "probe_ptr": int, "cuda": dict,
}  # fmt: skip
#: Measured on two virtual cores (AMD EPYC), shared memory with CMA: 3.4 to 9 us a read, 4 to 6 GB/s;
#: a ring adds its filling and emptying, and asks for few and large reads.
_COSTS: Final = {
    Contract.DIRECT: CostConstants(op_s=4e-6, bytes_per_s=4.5e9),
    Contract.STREAM: CostConstants(op_s=0.3e-6, bytes_per_s=2e9),
}
#: On one H200. A descriptor costs some 5.5 us of the CPU, but most tensors share one with others (see
#: p2p_windows.py); a ring takes three passes over memory, and two frames a slot.
_CUDA_COSTS: Final = {
    Contract.DIRECT: CostConstants(op_s=1.2e-6, bytes_per_s=2.0e12),
    Contract.STREAM: CostConstants(op_s=500e-6, bytes_per_s=0.6e12),
}


class P2pTransport(Transport):
    """NIXL over UCX.

    ``host``: the address of this machine that engines reach; loopback serves this machine only.
    ``max_registered_bytes``: the most that one endpoint registers for direct reads, where the
    network card allows less than the model needs.
    ``device_way``: how an engine reaches device memory of a trainer of its machine; without it
    ``$WEIGHTSYNC_P2P_DEVICE_WAY``, or what is best.
    """

    name = "p2p"

    def __init__(
        self,
        host: str = "127.0.0.1",
        max_registered_bytes: int | None = None,
        device_way: DeviceWay | None = None,
    ) -> None:
        self._host = host
        self._max_bytes = max_registered_bytes
        self._way = _way_here() if device_way is None else device_way

    def capabilities(self) -> Capabilities:
        packages = [name.partition(".")[0] for name in NIXL_MODULES]
        usable = Availability(True)
        if all(importlib.util.find_spec(package) is None for package in packages):
            usable = Availability(
                False,
                f"none of {', '.join(packages)} is installed",
                "pip install 'weightsync[p2p]'",
            )
        return Capabilities(
            self.name,
            dict.fromkeys(_COSTS, usable),
            _COSTS,
            reads_cuda=True,
            streams_cuda=True,
            cuda_converts=True,
            cuda_costs=_CUDA_COSTS,
        )

    def open_source(self, device: str = CPU) -> SourceEndpoint:
        return P2pSource(self._host, self._max_bytes, device)

    def open_target(
        self, descriptor: Descriptor, deadline: Deadline, device: str = CPU
    ) -> TargetEndpoint:
        return P2pTarget(descriptor, deadline, self._max_bytes, device, self._way)


def _way_here() -> DeviceWay:
    wanted = config.p2p_device_way()
    try:
        return DeviceWay.AUTO if wanted is None else DeviceWay(wanted)
    except ValueError:
        known = ", ".join(way.value for way in DeviceWay)
        raise ConfigError(f"WEIGHTSYNC_P2P_DEVICE_WAY={wanted!r}; known: {known}") from None


def _ucx_settings(host: str) -> dict[str, str]:
    """A loopback endpoint must not listen on the machine's other addresses.

    Nor does it need the second rail that NIXL asks for, which costs 2 us a descriptor. Registrations
    are ours and final: a cache of them by address would bring back what was there before.
    """
    lasting = {"RCACHE_ENABLE": "n"}
    return {**lasting, "NET_DEVICES": "lo", "MAX_RMA_RAILS": "1"} if _is_loopback(host) else lasting


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class P2pSource(SourceEndpoint):
    """The trainer's end."""

    def __init__(self, host: str, max_bytes: int | None, device: str) -> None:
        self._endpoint = secrets.token_hex(8)
        self._channel: Channel | None = None
        self._inbox: Inbox | None = None
        self._ring: RingSource | None = None
        self._options: RingOptions | None = None
        self._closed = threading.Event()
        with ExitStack() as undo:
            self._agent = Agent(self._endpoint, serves=True, ucx=_ucx_settings(host))
            undo.callback(self._agent.close)
            known = HostMemory.anonymous(PROBE_BYTES)
            self._memories: list[Memory | CudaProbeSource] = [known]
            self._probe_ptr = known.ptr
            known.bytes_view()[:] = probe_pattern(self._endpoint)
            self._agent.register([Span(self._probe_ptr, PROBE_BYTES, CPU)])
            self._on_device: CudaProbeSource | None = None
            if device != CPU:
                self._on_device = CudaProbeSource(self._agent, self._endpoint, device)
                undo.callback(self._on_device.close)
                self._memories.append(self._on_device)
            self._listener = Listener("tcp", host)
            undo.pop_all()
        self._direct = P2pDirectSource(self._agent, self._endpoint, max_bytes)

    def descriptor(self) -> Descriptor:
        return {
            "schema": PROTOCOL_VERSION,
            "transport": "p2p",
            "endpoint": self._endpoint,
            "channel": self._listener.address(),
            "host": host_id(),
            "pid": os.getpid(),
            "agent": base64.b64encode(self._agent.metadata()).decode(),
            "probe_ptr": self._probe_ptr,
            "cuda": {} if self._on_device is None else self._on_device.to_json(),
        }

    def accept(self, deadline: Deadline) -> None:
        if self._inbox is not None:
            return
        if self._channel is None:
            self._channel = self._listener.accept(deadline)
            self._listener.close()
        # The engine connects, makes its agent and reads the probe before it says so.
        self._channel.receive_kind("attached", deadline)
        if self._on_device is not None:
            self._on_device.retire()
        self._inbox = Inbox(self._channel, RING_SOURCE_KINDS)
        self._direct.attach(self._channel)

    def stream(self, options: RingOptions, deadline: Deadline) -> StreamSource:
        inbox = self._inbox
        if inbox is None:
            raise ConfigError("no engine has attached yet: accept first")
        inbox.check()
        if self._ring is None:
            num_bytes = ring_bytes(options)
            # Not prefaulted: a host ring may be larger than what is ever streamed.
            memory = (
                HostMemory.anonymous(num_bytes)
                if options.device == CPU
                else DeviceMemory(num_bytes, options.device)
            )
            self._memories.append(memory)
            self._agent.register([Span(memory.ptr, num_bytes, options.device)])
            inbox.link.send(ring_frame(options, memory, self._agent), deadline=deadline)
            self._ring, self._options = RingSource(inbox, memory, options), options
        elif options != self._options:
            raise ConfigError(f"the ring of this pair has {self._options}, not {options}")
        return self._ring

    def direct(self) -> DirectSource:
        return self._direct

    def lost(self) -> str | None:
        if self._closed.is_set():
            return "this end was closed"
        return None if self._channel is None else self._channel.lost()

    @property
    def path(self) -> str:
        return "ucx (the engine reads; its end knows the path)"

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        if self._channel is not None:
            self._channel.close()
        self._agent.close()
        for memory in self._memories:
            memory.close()


class P2pTarget(TargetEndpoint):
    """The engine's end."""

    def __init__(
        self,
        descriptor: Descriptor,
        deadline: Deadline,
        max_bytes: int | None,
        device: str,
        way: DeviceWay,
    ) -> None:
        what = "p2p descriptor"
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, what)
        for name, value in (("schema", PROTOCOL_VERSION), ("transport", "p2p")):
            if fields[name] != value:
                raise ProtocolError(f"{what}: field {name!r} is {fields[name]!r}, not {value!r}")
        self._endpoint: str = fields["endpoint"]
        self._closed = threading.Event()
        self._ring: RingTarget | None = None
        self._landing_ring: MappedRing | LandingRing | None = None
        with ExitStack() as undo:
            self._channel = connect(fields["channel"], deadline)
            undo.callback(self._channel.close)
            host = str(fields["channel"]["address"][0])
            name = f"{self._endpoint}-{secrets.token_hex(4)}"
            self._agent = Agent(name, serves=False, ucx=_ucx_settings(host))
            undo.callback(self._agent.close)
            try:
                where = (fields["probe_ptr"], fields["host"], fields["pid"])
                self._probe = Probe(self._agent, self._endpoint, *where)
                undo.callback(self._probe.close)
            except (ValueError, OverflowError) as error:
                raise ProtocolError(f"{what}: endpoint {self._endpoint[:80]!r}") from error
            try:
                self._probe.load(unpack_bytes(fields["agent"], f"{what}, 'agent'"))
            except UnavailableError as error:  # UCX looks at the process behind the metadata
                raise self._or_lost(error, deadline) from error
            found = self._probe.run(deadline, self._peer_lost)
            if not found.is_usable:
                raise UnavailableError(f"{found.reason}; {found.remedy}")
            self._cuda_probe: CudaProbe | None = None
            self._way = way
            self._is_mappable = fields["host"] == host_id() and fields["pid"] != os.getpid()
            self._device = device
            if device != CPU and fields["cuda"]:
                self._cuda_probe = self._probe_cuda(fields, deadline, undo)
            self._channel.send({"kind": "attached"}, deadline=deadline)
            undo.pop_all()
        self._landing = Landing(self._agent, self._channel, self._peer_lost)
        self._inbox = Inbox(self._landing, (RING_KIND, *RING_TARGET_KINDS, *DIRECT_KINDS))
        self._direct = P2pDirectTarget(
            self._agent, self._endpoint, self._inbox, self._peer_lost, max_bytes, self._kept(), way
        )
        if self._cuda_probe is not None:
            self._direct.device_bytes_per_s = self._cuda_probe.rate_bytes_per_s

    def _probe_cuda(
        self, fields: Mapping[str, Any], deadline: Deadline, undo: ExitStack
    ) -> CudaProbe:
        """Raises :class:`UnavailableError` where device memory cannot be read at all."""
        one_host = fields["host"] == host_id()
        about = (self._endpoint, fields["cuda"], self._device)
        probe = CudaProbe(self._agent, *about, one_host=one_host)
        undo.callback(probe.close)
        found = None
        with closing(PeerMemory(self._device)) as kept:
            if self._is_mappable and self._way is DeviceWay.AUTO:
                found = probe.run_mapped(kept)
            elif self._is_mappable:
                kept.replace([probe.key])
            if found is None:
                metadata = unpack_bytes(fields["agent"], "p2p descriptor, 'agent'")
                found = probe.run_nixl(metadata, deadline, self._peer_lost)
        if not found.is_usable:
            raise UnavailableError(f"{found.reason}. {found.remedy}")
        self._cuda_found = found
        probe.close()
        return probe

    def _kept(self) -> PeerMemory | None:
        """For memory of a trainer on this machine; its own memory no process maps."""
        return PeerMemory(self._device) if self._is_mappable and self._device != CPU else None

    def _or_lost(self, error: UnavailableError, deadline: Deadline) -> WeightSyncError:
        """The death of the trainer explains more than what failed because of it."""
        reason = self._channel.lost()
        return error if reason is None else deadline.lost(reason)

    def stream(self, deadline: Deadline, device: str = CPU) -> StreamTarget:
        if self._ring is None:
            message, _ = self._inbox.take((RING_KIND,), deadline)
            ring = self._open_ring(message, device)
            self._landing_ring = ring
            self._landing.land_in(ring)
            self._ring = RingTarget(self._inbox, ring.memory, ring.options)
        return self._ring

    def _open_ring(self, message: Mapping[str, Any], device: str) -> MappedRing | LandingRing:
        """Mapped, if it lies on a CUDA device of this machine and can be."""
        is_mappable = self._is_mappable and self._way is DeviceWay.AUTO and device != CPU
        if is_mappable and message.get("handle"):
            try:
                return MappedRing(message, device)
            except TransportError as error:
                _LOG.info("p2p: the trainer's ring cannot be mapped here: %s", error)
        return LandingRing(self._agent, message, device, self._kept())

    def direct(self) -> DirectTarget:
        return self._direct

    def probe_direct(self, deadline: Deadline) -> Availability:
        if self._cuda_probe is not None:
            return self._cuda_found
        return self._probe.run(deadline, self._peer_lost)

    def lost(self) -> str | None:
        return self._peer_lost() or self._agent.lost()

    def _peer_lost(self) -> str | None:
        """What the channel knows; an agent that failed is another matter."""
        return "this end was closed" if self._closed.is_set() else self._channel.lost()

    @property
    def path(self) -> str:
        return self._probe.path if self._cuda_probe is None else self._cuda_probe.path

    def close(self) -> None:
        self._closed.set()
        self._agent.close()
        self._landing.close()
        self._direct.close()
        self._ring = None  # a mapped one goes with the last slot that somebody holds
        for memory in (self._landing_ring, self._probe, self._cuda_probe):
            if memory is not None:
                memory.close()
