"""The trainer's end of ``broadcast``: one ring whose slots go to several engine ranks at once.

The frames are those of :mod:`weightsync.transports.ring`, on one link for each target. A slot's frame
travels before its broadcast, so that a target knows how many bytes of what are coming before it takes
part; a slot is free when every target has released it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weightsync.deadline import Deadline
from weightsync.device_tables import Memory, Pin
from weightsync.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransportError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.transports.base import GroupSource, RingOptions, Slot, SlotHeader, StreamSource
from weightsync.transports.collective import Collective, Pending, lost_of
from weightsync.transports.link import Inbox, check_fields
from weightsync.transports.ring import RELEASE_FIELDS, RESET_FIELDS, RING_SOURCE_KINDS, stride_bytes


def filled_bytes(header: SlotHeader) -> int:
    """How much of a slot is sent: from its beginning to the end of what is filled."""
    words_end = header.metadata_offset_bytes + header.metadata_bytes if header.metadata_bytes else 0
    return max(header.data_bytes, words_end)


@dataclass(eq=False)
class _Member:
    """One target: what it has not released yet.

    Generations begin at the number of the group: a frame of a former ring may still be on its way.
    """

    inbox: Inbox
    generation: int
    submitted: set[int] = field(default_factory=set)

    def send(self, frame: dict[str, Any], deadline: Deadline | None = None) -> None:
        self.inbox.link.send({**frame, "generation": self.generation}, deadline=deadline)


@dataclass(slots=True)
class _Sent:
    """A broadcast of a slot, whose memory stays until it is done."""

    pending: Pending
    pin: Pin


class GroupRing(GroupSource):
    """See the module. ``abort`` ends the group for all its members, giving a reason."""

    def __init__(
        self,
        inboxes: Sequence[Inbox],
        memory: Memory,
        options: RingOptions,
        collective: Collective,
        number: int,
        abort: Callable[[str], None],
    ) -> None:
        self._members = [_Member(inbox, number) for inbox in inboxes]
        self._memory, self._options = memory, options
        self._collective, self._abort = collective, abort
        self.max_copy_blocks = collective.max_copy_blocks
        self._free = deque(range(options.num_slots))
        self._acquired: dict[int, tuple[Slot, Pin]] = {}
        self._sent: dict[int, _Sent] = {}
        self._sessions: list[str] = []

    def begin_move(self, session_ids: Sequence[str], deadline: Deadline) -> None:
        with self._stopped_if_given_up():
            self._begin_move(session_ids, deadline)

    def _begin_move(self, session_ids: Sequence[str], deadline: Deadline) -> None:
        self.check()
        if len(session_ids) != len(self._members):
            raise ConfigError(f"{len(session_ids)} sessions for {len(self._members)} targets")
        while self._acquired:
            index, (_, pin) = self._acquired.popitem()
            pin.release()
            self._free.append(index)
        self._take_arrived()
        stale = [m for m in self._members if m.submitted]
        for member in stale:
            member.generation += 1
            member.send({"kind": "reset"}, deadline)
        if stale:
            reach("stream.reset")
        for member in stale:
            while member.submitted:
                self._take(member, deadline)
        for index in list(self._sent):
            self._finish(index, deadline)

    def acquire(self, deadline: Deadline) -> Slot:
        reach("stream.acquire")
        with self._stopped_if_given_up():
            self._take_arrived()
            while not self._free:
                busy = next(m for m in self._members if m.submitted)
                self._take(busy, deadline)
            self.check()
            deadline.check()
            index = self._free[0]
            self._finish(index, deadline)
        self._free.popleft()
        ptr = self._memory.ptr + index * stride_bytes(self._options)
        slot = Slot(index, ptr, self._options.slot_bytes)
        self._acquired[index] = (slot, self._memory.pin())
        return slot

    def submit(self, slot: Slot, headers: Sequence[SlotHeader]) -> None:
        held = self._acquired.get(slot.index)
        if held is None or held[0] is not slot:
            raise ConfigError(f"slot {slot.index} was not acquired since the last begin_move")
        frames = [
            {
                "kind": "slot",
                "index": slot.index,
                "header": SlotHeader.from_json(header.to_json(), slot.num_bytes).to_json(),
            }
            for header in headers
        ]
        sizes = {filled_bytes(header) for header in headers}
        if len(sizes) != 1 or len(headers) != len(self._members):
            raise ConfigError("one slot has one size, and a header for each target")
        reach("stream.submit")
        del self._acquired[slot.index]
        for member in self._members:
            member.submitted.add(slot.index)
        try:
            for member, frame in zip(self._members, frames, strict=True):
                member.send(frame)
            reach("stream.announced")
            (num_bytes,) = sizes
            if num_bytes:
                pending = self._collective.broadcast(slot.ptr, num_bytes)
                self._sent[slot.index] = _Sent(pending, held[1])
        except WeightSyncError as error:  # some may wait for what will not come
            raise self._broken(error) from error
        reach("stream.submitted")

    def flush(self, deadline: Deadline) -> None:
        reach("stream.flush")
        with self._stopped_if_given_up():
            self._take_arrived()
            for member in self._members:
                while member.submitted:
                    self._take(member, deadline)
            for index in list(self._sent):
                self._finish(index, deadline)

    @contextmanager
    def _stopped_if_given_up(self) -> Iterator[None]:
        """On a device no broadcast goes on behind a caller that gave up: its kernel would wait for the
        others for ever, and whoever waits for the device with it."""
        try:
            yield
        except (DeadlineError, CancelledError) as error:
            if self._collective.holds_device and self.park():
                self._end(f"given up in the middle of a broadcast: {error}")
            raise

    def check(self) -> None:
        """Raise :class:`PeerLostError` if one of the targets is known to be gone: they share fate."""
        for member in self._members:
            member.inbox.check()

    def park(self) -> list[Pin]:
        """Memory of broadcasts that do not end now."""
        return [sent.pin for sent in self._sent.values() if not _has_ended(sent.pending)]

    def _finish(self, index: int, deadline: Deadline) -> None:
        """The broadcast of a slot that everybody has released is over here, too."""
        sent = self._sent.get(index)
        if sent is None:
            return
        try:
            sent.pending.settle(deadline, self.check)
        except TransportError as error:
            raise self._broken(error) from error
        del self._sent[index]
        sent.pin.release()

    def _broken(self, error: WeightSyncError) -> WeightSyncError:
        """End the group for everybody; the loss of a member explains more than what followed from it."""
        if isinstance(error, TransportError):
            reason = lost_of(self._lost)
            error = error if reason is None else PeerLostError(reason)
        self._end(f"{type(error).__name__}: {error}")
        return error

    def _end(self, reason: str) -> None:
        self._collective.abort()
        self._abort(reason)

    def _lost(self) -> str | None:
        found = (member.inbox.link.lost() for member in self._members)
        return next((reason for reason in found if reason is not None), None)

    def _take(self, member: _Member, deadline: Deadline) -> None:
        """One more frame of this member; another one that is lost ends the wait."""
        if len(self._members) == 1:
            self._on_frame(member, member.inbox.take(RING_SOURCE_KINDS, deadline)[0])
            return
        while True:
            self._check_others(member, deadline)
            part = Deadline(
                max(deadline.slice_s(), 1e-4), peer=deadline.peer, stage=deadline.stage,
                token=deadline.token,
            )  # fmt: skip
            try:
                self._on_frame(member, member.inbox.take(RING_SOURCE_KINDS, part)[0])
                return
            except DeadlineError:
                deadline.check()

    def _check_others(self, member: _Member, deadline: Deadline) -> None:
        for other in self._members:
            if other is not member and (reason := other.inbox.link.lost()) is not None:
                self._end(f"another engine of the group is gone: {reason}")
                raise deadline.lost(f"{reason} (it shares a group)")

    def _take_arrived(self) -> None:
        for member in self._members:
            while (frame := member.inbox.poll(RING_SOURCE_KINDS)) is not None:
                self._on_frame(member, frame[0])

    def _on_frame(self, member: _Member, message: dict[str, Any]) -> None:
        if message["kind"] == "reset_ok":
            check_fields(message, RESET_FIELDS, "frame 'reset_ok'")
            if message["generation"] == member.generation:
                for index in sorted(member.submitted):
                    self._give_back(member, index)
            return
        check_fields(message, RELEASE_FIELDS, "frame 'release'")
        index = message["index"]
        if message["generation"] != member.generation:
            return
        if index not in member.submitted:
            raise ProtocolError(f"the engine released slot {index}, which it does not hold")
        self._give_back(member, index)

    def _give_back(self, member: _Member, index: int) -> None:
        member.submitted.remove(index)
        if not any(index in m.submitted for m in self._members):
            self._free.append(index)


def _has_ended(pending: Pending) -> bool:
    try:
        return pending.wait(0.5)
    except WeightSyncError:
        return True


class PairStream(StreamSource):
    """A group with one target, as the stream of a pair."""

    def __init__(self, group: GroupRing) -> None:
        self._group = group
        self.max_copy_blocks = group.max_copy_blocks

    def begin_move(self, session_id: str, deadline: Deadline) -> None:
        self._group.begin_move([session_id], deadline)

    def acquire(self, deadline: Deadline) -> Slot:
        return self._group.acquire(deadline)

    def submit(self, slot: Slot, header: SlotHeader) -> None:
        self._group.submit(slot, [header])

    def flush(self, deadline: Deadline) -> None:
        self._group.flush(deadline)
