"""The engine's end of ``broadcast``: it takes part in whatever the trainer announces.

:class:`Landing` stands between the channel and the ring, as a thread: at the frame of a slot it begins
the broadcast into the landing slot of the same number, whoever waits for it or not, for a member that
stays away would keep all others waiting. The frame then goes on to the ring with its broadcast, and is
handed out when that is done. A landing slot is free whenever its slot is filled again: the trainer
refills only what was released, or what both sides dropped in a reset.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from weightsync.deadline import CancelToken, Deadline
from weightsync.device_tables import Memory, Pin
from weightsync.errors import (
    CancelledError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransportError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.transports.base import RingOptions, Slot, SlotHeader
from weightsync.transports.broadcast_ring import filled_bytes
from weightsync.transports.channel import Channel
from weightsync.transports.collective import Collective, Pending, lost_of
from weightsync.transports.frames import Frame, close_fds
from weightsync.transports.link import Inbox
from weightsync.transports.ring import RING_TARGET_KINDS, RingTarget, stride_bytes

GROUP_KIND: Final = "group"
_LISTEN_S: Final = 0.5
_SETTLE_S: Final = 0.5
#: The longest that a trainer may stand still between announcing a broadcast and ending it.
_STALL_S: Final = 60.0

#: Memory that a group wrote into when it was given up, of broadcasts that would not end.
_parked: list[Pin] = []


@dataclass(frozen=True)
class JoinedGroup:
    """A group that this process is a member of, and where its slots land."""

    number: int
    options: RingOptions
    memory: Memory
    collective: Collective


@dataclass(slots=True)
class _Arrived:
    message: dict[str, Any]
    pending: Pending | None = None
    pin: Pin | None = None
    group: JoinedGroup | None = None
    is_over: bool = False
    since_s: float = field(default_factory=time.monotonic)


#: Joins the group that a frame describes.
Join = Callable[[Mapping[str, Any]], JoinedGroup]


class Landing:
    """A link whose ``slot`` frames arrive when their bytes have landed."""

    def __init__(self, channel: Channel, join: Join) -> None:
        self._channel, self._join = channel, join
        self._arrived: queue.SimpleQueue[_Arrived | WeightSyncError] = queue.SimpleQueue()
        self._head: _Arrived | None = None  # taken off, its broadcast not yet done
        self._group: JoinedGroup | None = None
        self._under_way: list[_Arrived] = []
        self._lock = threading.Lock()
        self._stop = CancelToken()
        self.taken: JoinedGroup | None = None  # by the frame that was taken last
        self._thread = threading.Thread(target=self._run, name="weightsync-landing", daemon=True)
        self._thread.start()

    # -- the link -------------------------------------------------------------------------------

    def send(
        self, message: Mapping[str, Any], fds: Sequence[int] = (), deadline: Deadline | None = None
    ) -> None:
        self._channel.send(message, fds, deadline)

    def receive(self, deadline: Deadline) -> Frame:
        try:
            with deadline.naming_stage():
                while self._head is None:
                    try:
                        item = self._arrived.get(timeout=max(deadline.slice_s(), 1e-4))
                    except queue.Empty:
                        deadline.check()
                        continue
                    if isinstance(item, WeightSyncError):
                        self._arrived.put(item)  # for the next caller
                        raise copy.copy(item)
                    self._head = item
                return self._finish(self._head, deadline)
        except (DeadlineError, CancelledError):
            self._stop_what_holds_a_device()
            raise

    def _stop_what_holds_a_device(self) -> None:
        """The caller gave up: a kernel would wait for the trainer, and others for the device."""
        group, head = self._group, self._head
        if group is None or head is None or head.pending is None:
            return
        if group.collective.holds_device and not _is_over(head.pending):
            self._give_up()

    def _finish(self, item: _Arrived, deadline: Deadline) -> Frame:
        """Wait for the broadcast behind a frame; a caller that gives up finds it here again."""
        if item.pending is not None:
            try:
                item.pending.settle(deadline, self._check)
            except TransportError as error:
                raise self._broken(error) from error
            item.is_over = True
            if item.pin is not None:
                item.pin.release()
        self._head = None
        self.taken = item.group or self.taken
        return item.message, []

    def _broken(self, error: TransportError) -> WeightSyncError:
        """The group is of no use any more, for anybody: the channel's end tells the trainer."""
        reason = lost_of(self._channel.lost)
        self._give_up()
        return error if reason is None else PeerLostError(reason)

    def _check(self) -> None:
        if (reason := self._channel.lost()) is not None:
            raise PeerLostError(reason)

    def poll(self) -> Frame | None:
        """Nobody asks an engine's end without waiting."""
        return None

    def lost(self) -> str | None:
        return self._channel.lost()

    def close(self) -> None:
        """Leave the group. Any thread."""
        self._stop.cancel("this end was closed")
        self._channel.close()
        self._end_group()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)
        self._end_group()  # the thread may have joined one meanwhile

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self._listen()
        except CancelledError:
            self._arrived.put(PeerLostError(self.lost() or "this end was closed"))
        except PeerLostError as error:
            self._arrived.put(PeerLostError(self.lost() or str(error)))
            self._abort()
        except WeightSyncError as error:
            self._arrived.put(error)
            self._give_up()
        except Exception as error:  # a bug, but the caller must not wait for ever
            self._arrived.put(ProtocolError(f"the landing thread failed: {error!r}"))
            self._give_up()

    def _give_up(self) -> None:
        self._channel.close()
        self._abort()

    def _abort(self) -> None:
        with self._lock:
            group = self._group
        if group is not None:
            group.collective.abort()

    def _listen(self) -> None:
        deadline = Deadline(_LISTEN_S, peer="channel", stage="listen", token=self._stop)
        self._check_stall()
        with contextlib.suppress(DeadlineError):
            while True:
                message, fds = self._channel.receive(deadline)
                close_fds(fds)
                match message.get("kind"):
                    case "slot":
                        self._arrived.put(self._land(message))
                    case "group":
                        self._change(message)
                    case _:
                        self._arrived.put(_Arrived(message))

    def _check_stall(self) -> None:
        """One that never ends holds a device, and whoever waits for that."""
        late_s = time.monotonic() - _STALL_S
        for item in self._under_way:
            is_late = item.since_s < late_s and not item.is_over and item.pending is not None
            if is_late and item.pending is not None and not _is_over(item.pending):
                raise TransportError(
                    f"a broadcast that was announced did not end within {_STALL_S:.0f} s"
                )

    def _land(self, message: dict[str, Any]) -> _Arrived:
        group = self._group
        if group is None:
            raise ProtocolError("a slot was announced before any group")
        options, index = group.options, message.get("index")
        header = SlotHeader.from_json(message.get("header"), options.slot_bytes)
        if not isinstance(index, int) or not 0 <= index < options.num_slots:
            raise ProtocolError(f"slot {index!r} of a ring of {options.num_slots}")
        num_bytes = filled_bytes(header)
        if not num_bytes:
            return _Arrived(message)
        pin = group.memory.pin()
        reach("stream.landing")
        ptr = group.memory.ptr + index * stride_bytes(options)
        try:
            pending = group.collective.broadcast(ptr, num_bytes)
        except TransportError as error:
            raise self._broken(error) from error
        arrived = _Arrived(message, pending, pin)
        self._under_way = [*(item for item in self._under_way if not item.is_over), arrived]
        return arrived

    def _change(self, message: Mapping[str, Any]) -> None:
        """Another group takes the place of the one before, whose broadcasts are over."""
        self._end_group()
        group = self._join(message)
        with self._lock:
            self._group = group
        self._arrived.put(_Arrived({"kind": GROUP_KIND}, group=group))

    def _end_group(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        group.collective.abort()
        under_way, self._under_way = self._under_way, []
        for item in under_way:
            if item.pending is not None and not _is_over(item.pending) and item.pin is not None:
                _parked.append(item.pin)
        group.memory.close()


def _is_over(pending: Pending) -> bool:
    try:
        return pending.wait(_SETTLE_S)
    except WeightSyncError:
        return True


class GroupTarget(RingTarget):
    """The emptying end: a ring whose group, and with it memory and size, may change between moves."""

    def __init__(self, inbox: Inbox, landing: Landing, group: JoinedGroup) -> None:
        super().__init__(inbox, group.memory, group.options, group.number)
        self._landing = landing
        self.max_copy_blocks = group.collective.max_copy_blocks

    def receive(self, deadline: Deadline) -> tuple[SlotHeader, Slot]:
        reach("stream.receive")
        deadline.check()
        while True:
            message, _ = self._inbox.take((GROUP_KIND, *RING_TARGET_KINDS), deadline)
            if message["kind"] == GROUP_KIND:
                if (group := self._landing.taken) is not None:
                    self.change_memory(group.memory, group.options, group.number)
            elif (received := self.on_frame(message)) is not None:
                reach("stream.received")
                return received
