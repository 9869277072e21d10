"""How the members of a broadcast group find each other, over channels that they have already."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weightsync import native
from weightsync.deadline import Deadline
from weightsync.device_tables import (
    CPU,
    Memory,
    cuda_index,
    private_memory,
    read_bytes,
    write_bytes,
)
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransportError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.transports.base import RingOptions
from weightsync.transports.broadcast_landing import GROUP_KIND, JoinedGroup
from weightsync.transports.channel import Channel
from weightsync.transports.collective import Collective, Seat, run_aside
from weightsync.transports.link import Inbox, check_fields
from weightsync.transports.ring import ring_bytes

#: How a member says that it is in, or that it is not and why.
ANSWER_KINDS: Final = ("group_ok", "group_error")
_GROUP_FIELDS: Final = {
    "kind": str, "number": int, "rank": int, "size": int, "num_slots": int, "slot_bytes": int,
    "gpu": str, "rendezvous": dict, "proof": str, "limit_s": float,
}  # fmt: skip
_BACKEND_FIELDS: Final = {"device": str, "library": str, "settings": dict}
_OK_FIELDS: Final = {"kind": str, "number": int}
_ERROR_FIELDS: Final = {"kind": str, "number": int, "reason": str}
_PROOF_BYTES: Final = 32
_MAX_LIMIT_S: Final = 600.0


@dataclass(frozen=True)
class Backend:
    """What moves the bytes of one process, as far as its peers must know."""

    device: str  # "cpu" or "cuda"
    library: str
    settings: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device, "library": self.library, "settings": dict(self.settings),
        }  # fmt: skip

    def check_peer(self, value: Any) -> None:
        """Before a group with a trainer that says this of itself. Raises :class:`UnavailableError`."""
        what = "broadcast descriptor, 'backend'"
        theirs = Backend(**check_fields(value, _BACKEND_FIELDS, what))
        if theirs.device != self.device:
            raise UnavailableError(
                f"broadcast: the trainer's tensors lie on {theirs.device}, the engine's on "
                f"{self.device}; hold both on the host, or both on GPUs"
            )
        if theirs.library != self.library:
            raise UnavailableError(
                f"broadcast: the trainer has {theirs.library}, the engine {self.library}: install the "
                "same version on both sides"
            )
        for name in sorted(theirs.settings.keys() | self.settings.keys()):
            ours, other = self.settings.get(name), theirs.settings.get(name)
            if ours != other:
                raise UnavailableError(
                    f"broadcast: {name} is {other!r} in the trainer's environment and {ours!r} in the "
                    "engine's: set it alike"
                )


def backend_of(device: str) -> Backend:
    """Raises :class:`MissingDependencyError` or :class:`UnavailableError` where there is none."""
    from weightsync.transports import collective_gloo, nccl_binding

    if device == CPU:
        collective_gloo.require_gloo()
        return Backend("cpu", "gloo", {})
    cuda_index(device)
    found = nccl_binding.version_text(nccl_binding.version())
    return Backend("cuda", f"NCCL {found}", nccl_binding.settings())


def _gpu(device: str) -> str:
    """The UUID of a device of this process, hexadecimal; empty for the host."""
    return "" if device == CPU else native.extension.cuda_device_uuid(cuda_index(device)).hex()


def no_nccl() -> str | None:
    """Why CUDA memory cannot be broadcast here, if so."""
    from weightsync.transports import nccl_binding

    try:
        nccl_binding.load()
    except (ConfigError, UnavailableError) as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Member:
    """A target, as the trainer's process sees it."""

    rank: int
    inbox: Inbox


def make_group(
    members: Sequence[Member],
    number: int,
    options: RingOptions,
    memory: Memory,
    host: str,
    backend: Backend,
    deadline: Deadline,
) -> Collective:
    """The trainer's part: invite all, join, and prove by a first broadcast that it works.

    ``number`` tells this group, and every frame of its ring, from those before it on the same channels.

    Raises :class:`DeadlineError`, :class:`PeerLostError` or :class:`TransportError`, naming the member.
    """
    if (options.device == CPU) != (backend.device == "cpu"):
        raise ConfigError(
            f"a ring on {options.device} of an end that was opened for {backend.device}"
        )
    size = len(members) + 1
    rendezvous, make = _root(options.device, host, number, size)
    proof = secrets.token_bytes(_PROOF_BYTES)
    answers = _Answers(members, number)
    limit_s = min(max(deadline.remaining_s(), 1e-3), _MAX_LIMIT_S)
    for member in members:
        frame = {
            "kind": GROUP_KIND, "number": number, "rank": member.rank, "size": size,
            "num_slots": options.num_slots, "slot_bytes": options.slot_bytes,
            "gpu": _gpu(options.device), "rendezvous": rendezvous, "proof": proof.hex(), "limit_s": limit_s,
        }  # fmt: skip
        member.inbox.link.send(frame, deadline=deadline)
    reach("group.invited")
    collective = make(deadline, answers.check)
    try:
        write_bytes(memory.ptr, proof, options.device)
        _first_broadcast(collective, memory.ptr, deadline, answers.check)
        answers.wait(deadline)
    except BaseException:
        collective.abort()
        raise
    return collective


Make = Callable[[Deadline, Callable[[], None]], Collective]


def _root(device: str, host: str, number: int, size: int) -> tuple[dict[str, Any], Make]:
    """Where members meet, and how the trainer's process comes there."""
    from weightsync.transports import collective_gloo, collective_nccl, nccl_binding

    seat = Seat(0, size)
    if device == CPU:
        store = collective_gloo.GlooStore(host)
        return store.to_json(), lambda deadline, check: collective_gloo.make_gloo(
            seat, store.store, f"weightsync-{number:x}", host, deadline, check
        )
    name = nccl_binding.new_id()
    return {"id": name.hex()}, lambda deadline, check: collective_nccl.make_nccl(
        seat, name, device, deadline, check
    )


def _first_broadcast(
    collective: Collective, ptr: int, deadline: Deadline, check: Callable[[], None]
) -> None:
    """It makes what connections a library leaves for the first use, and so it may wait."""

    def begin() -> None:
        collective.broadcast(ptr, _PROOF_BYTES).settle(deadline, check)

    run_aside(begin, lambda _: None, deadline, check)


class _Answers:
    """What the members say of joining."""

    def __init__(self, members: Sequence[Member], number: int) -> None:
        self._waiting = list(members)
        self._number = number

    def check(self) -> None:
        """Raise what one of them said; never waits."""
        for member in list(self._waiting):
            while (frame := member.inbox.poll(ANSWER_KINDS)) is not None:
                self._heard(member, frame[0])
            member.inbox.check()

    def wait(self, deadline: Deadline) -> None:
        """Until all are in."""
        while self._waiting:
            member = self._waiting[0]
            self._heard(member, member.inbox.take(ANSWER_KINDS, deadline)[0])

    def _heard(self, member: Member, message: dict[str, Any]) -> None:
        if message["kind"] == "group_error":
            check_fields(message, _ERROR_FIELDS, "frame 'group_error'")
            if message["number"] == self._number:
                raise TransportError(f"member {member.rank} of the group: {message['reason']}")
            return
        check_fields(message, _OK_FIELDS, "frame 'group_ok'")
        if message["number"] == self._number and member in self._waiting:
            self._waiting.remove(member)


def join_group(
    message: Mapping[str, Any], channel: Channel, backend: Backend, device: str
) -> JoinedGroup:
    """A target's part, as the trainer's frame asks for it. Says how it went, and raises if it did not."""
    fields = check_fields(message, _GROUP_FIELDS, "frame 'group'")
    number = fields["number"]
    try:
        joined = _join(fields, channel, backend, device)
    except WeightSyncError as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        channel.send({"kind": "group_error", "number": number, "reason": reason})
        raise
    channel.send({"kind": "group_ok", "number": number})
    return joined


def _join(
    fields: Mapping[str, Any], channel: Channel, backend: Backend, device: str
) -> JoinedGroup:
    limit_s = min(max(fields["limit_s"], 1e-3), _MAX_LIMIT_S)
    deadline = Deadline(limit_s, peer="the trainer's broadcast group", stage="join")
    options = RingOptions(fields["num_slots"], fields["slot_bytes"], device)
    seat = Seat(fields["rank"], fields["size"])
    if not 0 < seat.rank < seat.size:
        raise ProtocolError(f"frame 'group': rank {seat.rank} of {seat.size}")
    if fields["gpu"] and fields["gpu"] == _gpu(device):
        raise UnavailableError(
            f"the trainer's tensors and the engine's lie on one GPU (UUID {fields['gpu']}), and NCCL "
            "refuses two ranks on one: use transport='ipc' there"
        )
    try:
        num_bytes = ring_bytes(options)
    except ConfigError as error:
        raise ProtocolError(f"frame 'group': {error}") from error

    def check() -> None:
        if (reason := channel.lost()) is not None:
            raise PeerLostError(reason)

    memory = private_memory(num_bytes, device)
    collective: Collective | None = None
    try:
        reach("group.join")
        collective = _member(fields, seat, channel, backend, device)(deadline, check)
        _first_broadcast(collective, memory.ptr, deadline, check)
        if read_bytes(memory.ptr, _PROOF_BYTES, device).hex() != fields["proof"]:
            raise ProtocolError("the first broadcast brought other bytes than were announced")
    except BaseException:
        if collective is not None:
            collective.abort()
        memory.close()
        raise
    return JoinedGroup(fields["number"], options, memory, collective)


def _member(
    fields: Mapping[str, Any], seat: Seat, channel: Channel, backend: Backend, device: str
) -> Make:
    from weightsync.transports import collective_gloo, collective_nccl

    where = fields["rendezvous"]
    if backend.device != "cpu":
        try:
            name = bytes.fromhex(where["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"frame 'group', 'rendezvous': {error!r}") from error
        return lambda deadline, check: collective_nccl.make_nccl(
            seat, name, device, deadline, check
        )
    host = str(channel.socket.getsockname()[0])  # the address that reaches the trainer

    def make(deadline: Deadline, check: Callable[[], None]) -> Collective:
        def meet() -> Any:
            return collective_gloo.join_store(where, deadline.remaining_s())

        try:
            store = run_aside(meet, lambda _: None, deadline, check)
        except RuntimeError as error:
            raise _unreachable(where, deadline, error) from error
        prefix = f"weightsync-{fields['number']:x}"
        return collective_gloo.make_gloo(seat, store, prefix, host, deadline, check)

    return make


def _unreachable(where: object, deadline: Deadline, error: Exception) -> WeightSyncError:
    if deadline.remaining_s() <= 0:
        return DeadlineError(deadline.peer, deadline.stage, deadline.limit_s, deadline.elapsed_s())
    return TransportError(
        f"the group's meeting place {where} cannot be reached: {str(error)[:300]}"
    )
