"""The stream contract over memory that both ends can address.

Frames: ``slot`` (source to target), ``release`` (back), and, after an unclean end, ``reset`` and
``reset_ok``. Each carries the ring's *generation*, which a reset raises: what an older generation
still says is ignored, so a slot can neither be released twice nor be received after it was dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from weightsync.deadline import Deadline
from weightsync.device_tables import Memory, Pin
from weightsync.errors import ConfigError, ProtocolError
from weightsync.faults import reach
from weightsync.memory import PAGE_BYTES
from weightsync.transports.base import RingOptions, Slot, SlotHeader, StreamSource, StreamTarget
from weightsync.transports.link import Inbox, check_fields

RING_SOURCE_KINDS = ("release", "reset_ok")
RING_TARGET_KINDS = ("slot", "reset")

_SLOT_FIELDS = {"kind": str, "generation": int, "index": int, "header": dict}
RELEASE_FIELDS = {"kind": str, "generation": int, "index": int}
RESET_FIELDS = {"kind": str, "generation": int}
_MAX_RING_BYTES = 2**46


def stride_bytes(options: RingOptions) -> int:
    """Distance between slots: whole pages, so that no two slots share one."""
    return -(-options.slot_bytes // PAGE_BYTES) * PAGE_BYTES


def ring_bytes(options: RingOptions) -> int:
    """Memory that a ring takes."""
    if options.num_slots < 1 or options.slot_bytes < 1:
        raise ConfigError(f"{options}: at least one slot of one byte")
    total = options.num_slots * stride_bytes(options)
    if total > _MAX_RING_BYTES:
        raise ConfigError(f"{options}: a ring of {total} B")
    return total


@dataclass(slots=True)
class _Held:
    """A slot in somebody's hands; the pin keeps its memory mapped even if the endpoint closes."""

    slot: Slot
    pin: Pin


class _Slots:
    """The slots of a ring as addresses of this process."""

    def __init__(self, memory: Memory, options: RingOptions) -> None:
        self._memory = memory
        self._options = options

    @property
    def num_slots(self) -> int:
        return self._options.num_slots

    @property
    def slot_bytes(self) -> int:
        return self._options.slot_bytes

    def hold(self, index: int) -> _Held:
        ptr = self._memory.ptr + index * stride_bytes(self._options)
        # A new object each time: identity tells a slot from an earlier holding of the same index.
        return _Held(Slot(index, ptr, self._options.slot_bytes), self._memory.pin())


class RingSource(StreamSource):
    """The filling end."""

    def __init__(self, inbox: Inbox, memory: Memory, options: RingOptions) -> None:
        self._inbox = inbox
        self._slots = _Slots(memory, options)
        self._generation = 0
        self._free = deque(range(options.num_slots))
        self._acquired: dict[int, _Held] = {}
        self._submitted: set[int] = set()

    def begin_move(self, session_id: str, deadline: Deadline) -> None:
        self._inbox.check()
        while self._acquired:
            index, held = self._acquired.popitem()
            held.pin.release()
            self._free.append(index)
        self._take_arrived()
        if self._submitted:
            self._reset(deadline)

    def _reset(self, deadline: Deadline) -> None:
        self._generation += 1
        frame = {"kind": "reset", "generation": self._generation}
        self._inbox.link.send(frame, deadline=deadline)
        reach("stream.reset")
        while not self._on_frame(self._inbox.take(RING_SOURCE_KINDS, deadline)[0]):
            pass

    def acquire(self, deadline: Deadline) -> Slot:
        reach("stream.acquire")
        self._take_arrived()
        while not self._free:
            self._on_frame(self._inbox.take(RING_SOURCE_KINDS, deadline)[0])
        self._inbox.check()
        deadline.check()
        index = self._free.popleft()
        self._acquired[index] = self._slots.hold(index)
        return self._acquired[index].slot

    def submit(self, slot: Slot, header: SlotHeader) -> None:
        held = self._acquired.get(slot.index)
        if held is None or held.slot is not slot:
            raise ConfigError(f"slot {slot.index} was not acquired since the last begin_move")
        frame = {
            "kind": "slot",
            "generation": self._generation,
            "index": slot.index,
            "header": SlotHeader.from_json(header.to_json(), slot.num_bytes).to_json(),
        }
        reach("stream.submit")
        del self._acquired[slot.index]
        self._submitted.add(slot.index)
        held.pin.release()
        self._send_slot(frame)
        reach("stream.submitted")

    def _send_slot(self, frame: dict[str, Any]) -> None:
        self._inbox.link.send(frame)

    def flush(self, deadline: Deadline) -> None:
        reach("stream.flush")
        self._take_arrived()
        while self._submitted:
            self._on_frame(self._inbox.take(RING_SOURCE_KINDS, deadline)[0])

    def _take_arrived(self) -> None:
        while (frame := self._inbox.poll(RING_SOURCE_KINDS)) is not None:
            self._on_frame(frame[0])

    def _on_frame(self, message: dict[str, Any]) -> bool:
        """True when it says that the target dropped everything of older generations."""
        if message["kind"] == "reset_ok":
            check_fields(message, RESET_FIELDS, "frame 'reset_ok'")
            if message["generation"] != self._generation:
                return False  # of a begin_move that was given up
            self._free.extend(sorted(self._submitted))
            self._submitted.clear()
            return True
        check_fields(message, RELEASE_FIELDS, "frame 'release'")
        index = message["index"]
        if message["generation"] == self._generation:
            if index not in self._submitted:
                raise ProtocolError(f"the engine released slot {index}, which it does not hold")
            self._submitted.remove(index)
            self._free.append(index)
        return False


class RingTarget(StreamTarget):
    """The emptying end."""

    def __init__(
        self, inbox: Inbox, memory: Memory, options: RingOptions, generation: int = 0
    ) -> None:
        self._inbox = inbox
        self._slots = _Slots(memory, options)
        self._generation = generation
        self._session_id: str | None = None
        self._held: dict[int, _Held] = {}

    def begin_move(self, session_id: str) -> None:
        # What is held of an earlier session is not given back: the source asks for a reset.
        self._session_id = session_id
        self._drop_held()

    def receive(self, deadline: Deadline) -> tuple[SlotHeader, Slot]:
        reach("stream.receive")
        deadline.check()
        while True:
            message, _ = self._inbox.take(RING_TARGET_KINDS, deadline)
            if (received := self.on_frame(message)) is not None:
                reach("stream.received")
                return received

    def on_frame(self, message: dict[str, Any]) -> tuple[SlotHeader, Slot] | None:
        """A slot for the caller, if the frame brings one."""
        if message["kind"] == "reset":
            self._on_reset(message)
            return None
        return self._on_slot(message)

    def change_memory(self, memory: Memory, options: RingOptions, generation: int) -> None:
        """Another ring, as the source made it: nothing of the former one is held or expected."""
        self._drop_held()
        self._slots = _Slots(memory, options)
        self._generation = generation

    def release(self, slot: Slot) -> None:
        reach("stream.release")
        held = self._held.get(slot.index)
        if held is None or held.slot is not slot:
            return  # dropped by a reset or a new move; the source takes it back by itself
        del self._held[slot.index]
        held.pin.release()
        self._send_release(slot.index)

    def _send_release(self, index: int) -> None:
        frame = {"kind": "release", "generation": self._generation, "index": index}
        self._inbox.link.send(frame)

    def _on_reset(self, message: dict[str, Any]) -> None:
        check_fields(message, RESET_FIELDS, "frame 'reset'")
        if message["generation"] <= self._generation:
            raise ProtocolError(
                f"reset to generation {message['generation']} after {self._generation}"
            )
        self._generation = message["generation"]
        self._drop_held()
        self._inbox.link.send({"kind": "reset_ok", "generation": self._generation})

    def _on_slot(self, message: dict[str, Any]) -> tuple[SlotHeader, Slot] | None:
        check_fields(message, _SLOT_FIELDS, "frame 'slot'")
        if message["generation"] != self._generation:
            return None
        index = message["index"]
        if index >= self._slots.num_slots or index in self._held:
            raise ProtocolError(
                f"slot {index} of a ring of {self._slots.num_slots}, or held already"
            )
        header = SlotHeader.from_json(message["header"], self._slots.slot_bytes)
        if header.session_id != self._session_id:
            self._send_release(index)
            return None
        held = self._held[index] = self._slots.hold(index)
        return header, held.slot

    def _drop_held(self) -> None:
        while self._held:
            self._held.popitem()[1].pin.release()
