"""Buckets by broadcast, over a group of its own that lasts: gloo for host memory, NCCL for CUDA memory.

Each trainer rank is the root of the groups that it feeds; an engine rank that lacks what it has is a
member. A group has one target (the stream of a pair) or several (:meth:`BroadcastTransport.open_group`),
which then get each bucket in one broadcast. Frames on a TCP channel beside it go ahead of every
broadcast, so that nobody waits in one for bytes that another thinks of otherwise; a channel's end is how
the death of a member is noticed, and ends the group everywhere at once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weightsync.deadline import Deadline
from weightsync.device_tables import CPU, Memory, Pin, private_memory
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransportError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.packages import is_installed
from weightsync.transports.base import (
    Availability,
    Capabilities,
    CostConstants,
    Descriptor,
    DirectSource,
    DirectTarget,
    GroupSource,
    RingOptions,
    SourceEndpoint,
    StreamSource,
    StreamTarget,
    TargetEndpoint,
    Transport,
)
from weightsync.transports.broadcast_group import (
    ANSWER_KINDS,
    Backend,
    Member,
    backend_of,
    join_group,
    make_group,
    no_nccl,
)
from weightsync.transports.broadcast_landing import GROUP_KIND, GroupTarget, JoinedGroup, Landing
from weightsync.transports.broadcast_ring import GroupRing, PairStream
from weightsync.transports.channel import Channel, Listener, connect
from weightsync.transports.collective import Collective
from weightsync.transports.link import Inbox, check_fields
from weightsync.transports.ring import RING_SOURCE_KINDS, RING_TARGET_KINDS, ring_bytes
from weightsync.types import PROTOCOL_VERSION, Contract

_DESCRIPTOR_FIELDS: Final = {
    "schema": int, "transport": str, "endpoint": str, "channel": dict, "backend": dict,
}  # fmt: skip
_NO_DIRECT: Final = "broadcast has no direct reads: a broadcast is the trainer's to begin"
# A broadcast over loopback on two busy cores makes 1.4 GB/s, beside packing and unpacking.
_COSTS: Final = CostConstants(op_s=1.5e-3, bytes_per_s=0.7e9)
#: Two H200 joined by NVLink; a bucket costs its frames.
_CUDA_COSTS: Final = CostConstants(op_s=300e-6, bytes_per_s=0.35e12)


#: Memory of broadcasts that did not end with their group.
_parked: list[Pin] = []


@dataclass(eq=False)
class _Group:
    """What the ends of one group share in the trainer's process."""

    ends: tuple[BroadcastSource, ...]
    options: RingOptions
    memory: Memory
    collective: Collective
    ring: GroupRing

    def end(self) -> None:
        """Its members find out by the channels, or by the group that takes its place."""
        self.collective.abort()
        _parked.extend(self.ring.park())
        self.memory.close()


class BroadcastSource(SourceEndpoint):
    """The trainer's end of one target."""

    def __init__(self, host: str, device: str) -> None:
        self._endpoint = secrets.token_hex(8)
        self._device = device
        self._backend = backend_of(device)
        self.host = host
        self._listener = Listener("tcp", host)
        self._channel: Channel | None = None
        self.inbox: Inbox | None = None
        self.group: _Group | None = None
        self._stream: PairStream | None = None
        self._failed: str | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def descriptor(self) -> Descriptor:
        return {
            "schema": PROTOCOL_VERSION,
            "transport": "broadcast",
            "endpoint": self._endpoint,
            "channel": self._listener.address(),
            "backend": self._backend.to_json(),
        }

    def accept(self, deadline: Deadline) -> None:
        if self.inbox is not None:
            return
        channel = self._listener.accept(deadline)
        with self._lock:
            if self._is_closed:
                channel.close()
                raise TransportError(f"{deadline.peer}: this end was closed")
            self._channel = channel
        self._listener.close()
        self.inbox = Inbox(channel, (*RING_SOURCE_KINDS, *ANSWER_KINDS))

    def stream(self, options: RingOptions, deadline: Deadline) -> StreamSource:
        group, stream = self.group, self._stream
        if stream is not None and group is not None and group.ends == (self,):
            if options != group.options:
                raise ConfigError(f"the ring of this pair has {group.options}, not {options}")
            self.check()
            return stream
        self._stream = PairStream(open_group([self], options, deadline).ring)
        return self._stream

    def direct(self) -> DirectSource:
        raise UnavailableError(_NO_DIRECT)

    def member(self, rank: int) -> Member:
        """This end's target as a member of a group. Raises where there is none (any more)."""
        self.check()
        if self.inbox is None:
            raise ConfigError("accept() comes before stream()")
        return Member(rank, self.inbox)

    @property
    def backend(self) -> Backend:
        return self._backend

    def check(self) -> None:
        """Raise :class:`PeerLostError` if this end is of no use any more."""
        if (reason := self.lost()) is not None:
            raise PeerLostError(reason)

    def fail(self, reason: str) -> None:
        """The group broke: its target is told by the end of the channel."""
        self._failed = self._failed or reason
        if self._channel is not None:
            self._channel.close()

    def lost(self) -> str | None:
        if self._failed is not None:
            return self._failed
        return None if self._channel is None else self._channel.lost()

    @property
    def path(self) -> str:
        return f"{self._backend.library} broadcast"

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._listener.close()
        if self._channel is not None:
            self._channel.close()
        if self.inbox is not None:
            self.inbox.close()
        if (group := self.group) is not None:
            for other in group.ends:
                if other is not self:
                    other.fail("another end of the group was closed")
            end_group(group)


_groups_lock = threading.Lock()


def end_group(group: _Group) -> None:
    """Once, whichever of its ends asks."""
    with _groups_lock:
        is_first = any(end.group is group for end in group.ends)
        for end in group.ends:
            if end.group is group:
                end.group = None
    if is_first:
        group.end()


def open_group(ends: Sequence[BroadcastSource], options: RingOptions, deadline: Deadline) -> _Group:
    """The group of exactly these ends, made or made anew."""
    group = ends[0].group
    if group is not None and group.ends == tuple(ends):
        if options != group.options:
            raise ConfigError(f"the ring of this group has {group.options}, not {options}")
        group.ring.check()
        return group
    members = [end.member(rank) for rank, end in enumerate(ends, start=1)]
    num_bytes = ring_bytes(options)
    for end in ends:
        if (former := end.group) is not None:
            end_group(former)

    def abort(reason: str) -> None:
        for end in ends:
            end.fail(reason)

    memory, number = private_memory(num_bytes, options.device), secrets.randbits(48)
    try:
        collective = make_group(
            members, number, options, memory, ends[0].host, ends[0].backend, deadline
        )
    except WeightSyncError as error:
        memory.close()
        abort(f"no group could be made: {error}")
        raise
    ring = GroupRing([m.inbox for m in members], memory, options, collective, number, abort)
    made = _Group(tuple(ends), options, memory, collective, ring)
    for end in ends:
        end.group = made
    return made


class BroadcastTarget(TargetEndpoint):
    """The engine's end."""

    def __init__(self, channel: Channel, backend: Backend, device: str) -> None:
        self._channel, self._backend, self._device = channel, backend, device
        self._landing = Landing(channel, self._join)
        self._inbox = Inbox(self._landing, (GROUP_KIND, *RING_TARGET_KINDS))
        self._ring: GroupTarget | None = None
        self._is_closed = False

    def _join(self, message: Mapping[str, Any]) -> JoinedGroup:
        return join_group(message, self._channel, self._backend, self._device)

    def stream(self, deadline: Deadline, device: str = CPU) -> StreamTarget:
        if self._ring is None:
            if device != self._device:
                raise UnavailableError(
                    f"broadcast: this end was opened for {self._device}, and now is to receive on "
                    f"{device}: connect again"
                )
            self._inbox.take((GROUP_KIND,), deadline)
            group = self._landing.taken
            if group is None:
                raise ProtocolError("no group came with its frame")
            self._ring = GroupTarget(self._inbox, self._landing, group)
        return self._ring

    def direct(self) -> DirectTarget:
        raise UnavailableError(_NO_DIRECT)

    def probe_direct(self, deadline: Deadline) -> Availability:
        return Availability(False, _NO_DIRECT, "use the stream, or transport 'ipc' or 'p2p'")

    def lost(self) -> str | None:
        return self._channel.lost()

    @property
    def path(self) -> str:
        return f"{self._backend.library} broadcast"

    def close(self) -> None:
        self._landing.close()
        self._inbox.close()
        self._ring = None


class BroadcastTransport(Transport):
    """See the module.

    ``host``: the address of this machine that engines reach; loopback serves this machine only.
    """

    name = "broadcast"

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host

    def capabilities(self) -> Capabilities:
        usable = Availability(True)
        if not is_installed("torch"):
            usable = Availability(
                False, "torch is not installed, whose gloo moves host memory",
                "pip install 'weightsync[hf]'",
            )  # fmt: skip
        return Capabilities(
            self.name,
            {Contract.STREAM: usable},
            {Contract.STREAM: _COSTS},
            streams_cuda=no_nccl() is None,
            streams_to_many=True,
            cuda_costs={Contract.STREAM: _CUDA_COSTS},
        )

    def open_source(self, device: str = CPU) -> BroadcastSource:
        return BroadcastSource(self._host, device)

    def open_target(
        self, descriptor: Descriptor, deadline: Deadline, device: str = CPU
    ) -> BroadcastTarget:
        what = "broadcast descriptor"
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, what)
        for name, value in (("schema", PROTOCOL_VERSION), ("transport", self.name)):
            if fields[name] != value:
                raise ProtocolError(f"{what}: field {name!r} is {fields[name]!r}, not {value!r}")
        backend = backend_of(device)
        backend.check_peer(fields["backend"])
        return BroadcastTarget(connect(fields["channel"], deadline), backend, device)

    def open_group(
        self, ends: Sequence[SourceEndpoint], options: RingOptions, deadline: Deadline
    ) -> GroupSource:
        own = [end for end in ends if isinstance(end, BroadcastSource)]
        if not own or len(own) != len(ends) or len(set(map(id, own))) != len(own):
            raise ConfigError("a broadcast group has distinct ends of this transport, one at least")
        return open_group(own, options, deadline).ring


__all__ = ["BroadcastTransport", "DeadlineError"]
