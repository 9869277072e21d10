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
import os
import secrets
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.errors import (
    ConfigError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.memory import HostMemory
from weightsync.native import read_process_segments
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
from weightsync.transports.nixl_agent import NIXL_MODULES, Agent, Span
from weightsync.transports.nixl_reads import Reads
from weightsync.transports.p2p_direct import P2pDirectSource, P2pDirectTarget, unpack_bytes
from weightsync.transports.p2p_stream import RING_KIND, Landing, LandingRing, ring_frame
from weightsync.transports.published import DIRECT_KINDS
from weightsync.transports.ring import (
    RING_SOURCE_KINDS,
    RING_TARGET_KINDS,
    RingSource,
    RingTarget,
    ring_bytes,
)
from weightsync.types import PROTOCOL_VERSION, Contract

_DESCRIPTOR_FIELDS: Final = {
    "schema": int, "transport": str, "endpoint": str, "channel": dict, "host": str, "pid": int,
    "agent": str, "probe_ptr": int,
}  # fmt: skip
_PROBE_BYTES: Final = 2**20
_PROBE_ROUNDS: Final = 8
#: On one machine a read is one copy by the kernel, 3 to 6 GB/s; emulated by messages, below 1.
_FLOOR_BYTES_PER_S: Final = 1.5e9
#: Measured on two Xeon cores (2.1 GHz, virtual), shared memory with CMA.
_COSTS: Final = {
    Contract.DIRECT: CostConstants(op_s=3e-6, bytes_per_s=3.5e9),
    Contract.STREAM: CostConstants(op_s=0.3e-6, bytes_per_s=2.5e9),
}


class P2pTransport(Transport):
    """NIXL over UCX.

    ``host``: the address of this machine that engines reach; loopback serves this machine only.
    ``max_registered_bytes``: the most that one endpoint registers for direct reads, where the
    network card allows less than the model needs.
    """

    name = "p2p"

    def __init__(self, host: str = "127.0.0.1", max_registered_bytes: int | None = None) -> None:
        self._host = host
        self._max_bytes = max_registered_bytes

    def capabilities(self) -> Capabilities:
        packages = [name.partition(".")[0] for name in NIXL_MODULES]
        usable = Availability(True)
        if all(importlib.util.find_spec(package) is None for package in packages):
            usable = Availability(
                False,
                f"none of {', '.join(packages)} is installed",
                "pip install 'weightsync[p2p]'",
            )
        return Capabilities(self.name, dict.fromkeys(_COSTS, usable), _COSTS)

    def open_source(self) -> SourceEndpoint:
        return P2pSource(self._host, self._max_bytes)

    def open_target(self, descriptor: Descriptor, deadline: Deadline) -> TargetEndpoint:
        return P2pTarget(descriptor, deadline, self._max_bytes)


def _ucx_settings(host: str) -> dict[str, str]:
    """A loopback endpoint must not listen on the machine's other addresses."""
    return {"NET_DEVICES": "lo"} if _is_loopback(host) else {}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_id() -> str:
    """Equal where two processes can see each other's memory: one kernel, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{socket.gethostname()}"


def _probe_pattern(endpoint: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Known bytes that differ from one endpoint to the next."""
    words = np.arange(_PROBE_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(int(endpoint, 16))).view(np.uint8)


class P2pSource(SourceEndpoint):
    """The trainer's end."""

    def __init__(self, host: str, max_bytes: int | None) -> None:
        self._endpoint = secrets.token_hex(8)
        self._channel: Channel | None = None
        self._inbox: Inbox | None = None
        self._ring: RingSource | None = None
        self._options: RingOptions | None = None
        self._closed = threading.Event()
        with ExitStack() as undo:
            self._agent = Agent(self._endpoint, serves=True, ucx=_ucx_settings(host))
            undo.callback(self._agent.close)
            self._memories = [HostMemory.anonymous(_PROBE_BYTES)]
            self._probe_ptr = self._memories[0].ptr
            self._memories[0].bytes_view()[:] = _probe_pattern(self._endpoint)
            self._agent.register([Span(self._probe_ptr, _PROBE_BYTES, "cpu")])
            self._listener = Listener("tcp", host)
            undo.pop_all()
        self._direct = P2pDirectSource(self._agent, self._endpoint, max_bytes)

    def descriptor(self) -> Descriptor:
        return {
            "schema": PROTOCOL_VERSION,
            "transport": "p2p",
            "endpoint": self._endpoint,
            "channel": self._listener.address(),
            "host": _host_id(),
            "pid": os.getpid(),
            "agent": base64.b64encode(self._agent.metadata()).decode(),
            "probe_ptr": self._probe_ptr,
        }

    def accept(self, deadline: Deadline) -> None:
        if self._inbox is not None:
            return
        if self._channel is None:
            self._channel = self._listener.accept(deadline)
            self._listener.close()
        # The engine connects, makes its agent and reads the probe before it says so.
        self._channel.receive_kind("attached", deadline)
        self._inbox = Inbox(self._channel, RING_SOURCE_KINDS)
        self._direct.attach(self._channel)

    def stream(self, options: RingOptions, deadline: Deadline) -> StreamSource:
        inbox = self._inbox
        if inbox is None:
            raise ConfigError("no engine has attached yet: accept first")
        inbox.check()
        if self._ring is None:
            num_bytes = ring_bytes(options)
            memory = HostMemory.anonymous(num_bytes)
            self._memories.append(memory)
            self._agent.register([Span(memory.ptr, num_bytes, "cpu")])
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

    def __init__(self, descriptor: Descriptor, deadline: Deadline, max_bytes: int | None) -> None:
        what = "p2p descriptor"
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, what)
        for name, value in (("schema", PROTOCOL_VERSION), ("transport", "p2p")):
            if fields[name] != value:
                raise ProtocolError(f"{what}: field {name!r} is {fields[name]!r}, not {value!r}")
        self._fields = fields
        self._endpoint: str = fields["endpoint"]
        try:
            self._pattern = _probe_pattern(self._endpoint)
        except (ValueError, OverflowError) as error:
            raise ProtocolError(f"{what}: endpoint {self._endpoint[:80]!r}") from error
        self._closed = threading.Event()
        self._ring: RingTarget | None = None
        self._landing_ring: LandingRing | None = None
        with ExitStack() as undo:
            self._channel = connect(fields["channel"], deadline)
            undo.callback(self._channel.close)
            host = str(fields["channel"]["address"][0])
            name = f"{self._endpoint}-{secrets.token_hex(4)}"
            self._agent = Agent(name, serves=False, ucx=_ucx_settings(host))
            undo.callback(self._agent.close)
            try:
                self._load_probe(fields)
            except UnavailableError as error:  # UCX looks at the process behind the metadata
                raise self._or_lost(error, deadline) from error
            self._rate_bytes_per_s = 0.0
            self._availability = self._probe(deadline)
            if not self._availability.is_usable:
                raise UnavailableError(f"{self._availability.reason}; {self._availability.remedy}")
            self._channel.send({"kind": "attached"}, deadline=deadline)
            undo.pop_all()
        self._landing = Landing(self._agent, self._channel, self._peer_lost)
        self._inbox = Inbox(self._landing, (RING_KIND, *RING_TARGET_KINDS, *DIRECT_KINDS))
        self._direct = P2pDirectTarget(
            self._agent, self._endpoint, self._inbox, self._peer_lost, max_bytes
        )

    def _or_lost(self, error: UnavailableError, deadline: Deadline) -> WeightSyncError:
        """The death of the trainer explains more than what failed because of it."""
        reason = self._channel.lost()
        return error if reason is None else PeerLostError(f"{reason} (stage {deadline.stage!r})")

    def _load_probe(self, fields: Any) -> None:
        self._scratch = HostMemory.anonymous(_PROBE_BYTES)
        source = Span(fields["probe_ptr"], _PROBE_BYTES, "cpu")
        self._agent.load_peer(unpack_bytes(fields["agent"], "p2p descriptor, 'agent'"), [source])
        self._agent.register([Span(self._scratch.ptr, _PROBE_BYTES, "cpu")])
        row = [np.array([n]) for n in (source.ptr, self._scratch.ptr, _PROBE_BYTES)]
        self._probe_read = self._agent.prepare(Reads(*row), "cpu", "cpu")

    def stream(self, deadline: Deadline) -> StreamTarget:
        if self._ring is None:
            message, _ = self._inbox.take((RING_KIND,), deadline)
            landing_ring = LandingRing(self._agent, message)
            self._landing_ring = landing_ring
            self._landing.land_in(landing_ring)
            self._ring = RingTarget(self._inbox, landing_ring.memory, landing_ring.options)
        return self._ring

    def direct(self) -> DirectTarget:
        return self._direct

    def probe_direct(self, deadline: Deadline) -> Availability:
        self._availability = self._probe(deadline)
        return self._availability

    def _probe(self, deadline: Deadline) -> Availability:
        """Read known bytes, first once to open the path, then several times for its rate."""
        landed = self._scratch.bytes_view()
        landed[:] = 0
        self._agent.read(self._probe_read, deadline, self._peer_lost)
        if not np.array_equal(landed, self._pattern):
            return Availability(
                False,
                "a read of known bytes brought others",
                "check that both ends run the same NIXL release, and UCX_TLS",
            )
        best_s = float("inf")
        for _ in range(_PROBE_ROUNDS):
            start_s = time.perf_counter()
            self._agent.read(self._probe_read, deadline, self._peer_lost)
            best_s = min(best_s, time.perf_counter() - start_s)
        self._rate_bytes_per_s = _PROBE_BYTES / best_s
        if not self._is_one_host or self._rate_bytes_per_s >= _FLOOR_BYTES_PER_S:
            return Availability(True)
        return Availability(True, *self._slow_path(), is_slow=True)

    def _slow_path(self) -> tuple[str, str]:
        rate = f"reads on one machine run at {self._rate_bytes_per_s / 1e9:.2f} GB/s"
        if not self._can_read_process:
            return (
                f"{rate}: this process may not read the trainer's memory, so UCX copies through "
                "messages",
                "give the engine ptrace rights (--cap-add SYS_PTRACE, or the trainer's user)",
            )
        return (
            f"{rate}, below {_FLOOR_BYTES_PER_S / 1e9:.1f}: UCX does not read process memory (CMA), "
            "or the machine is busy",
            "keep 'cma' and 'sm' in UCX_TLS",
        )

    @property
    def _is_one_host(self) -> bool:
        return bool(self._fields["host"] == _host_id())

    @property
    def _can_read_process(self) -> bool:
        """Whether the kernel lets us read the source's memory, which UCX needs for CMA."""
        word = np.zeros(8, dtype=np.uint8)
        row = [self._fields["probe_ptr"], int(word.ctypes.data), 8, 0, *(1, 0, 0) * 3]
        try:
            read_process_segments(self._fields["pid"], np.array([row], dtype=np.int64))
        except OSError:
            return False
        return True

    def lost(self) -> str | None:
        return self._peer_lost() or self._agent.lost()

    def _peer_lost(self) -> str | None:
        """What the channel knows; an agent that failed is another matter."""
        return "this end was closed" if self._closed.is_set() else self._channel.lost()

    @property
    def path(self) -> str:
        if not self._is_one_host:
            return "ucx (network)"
        if self._rate_bytes_per_s >= _FLOOR_BYTES_PER_S and self._can_read_process:
            return "ucx (shared memory, cma)"
        return "ucx (shared memory or tcp, by messages)"

    def close(self) -> None:
        self._closed.set()
        self._agent.close()
        self._landing.close()
        for memory in (self._landing_ring, self._scratch):
            if memory is not None:
                memory.close()
