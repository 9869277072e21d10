"""The landing side of a ring over NIXL.

The ring protocol is the common one of :mod:`weightsync.transports.ring`, which needs memory that both
ends can address. :class:`Landing` makes that true: it stands between the channel and the ring, and
lets a ``slot`` frame through only when the slot's bytes have been read into a landing slot of the
same number. A thread does it, so that the next slot is being read while the caller still works on
the last one (a read over shared memory is a copy by the thread that posts it).

A landing slot is free whenever its slot is filled again: the source refills only what was released,
or what both sides dropped in a reset.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from weightsync.deadline import CancelToken, Deadline
from weightsync.device_tables import CPU, DeviceMemory, Memory
from weightsync.errors import (
    CancelledError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.memory import HostMemory
from weightsync.transports.base import RingOptions, SlotHeader
from weightsync.transports.channel import Channel
from weightsync.transports.cuda_mapping import MappedMemory
from weightsync.transports.frames import Frame, close_fds
from weightsync.transports.link import check_fields
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import Span, Transfer
from weightsync.transports.nixl_reads import Reads
from weightsync.transports.p2p_cuda import Key, PeerMemory, export_at, parse_handles
from weightsync.transports.p2p_published import unpack_bytes
from weightsync.transports.ring import ring_bytes, stride_bytes

RING_KIND: Final = "ring"
_RING_FIELDS: Final = {
    "kind": str, "num_slots": int, "slot_bytes": int, "ptr": int, "device": str, "handle": str,
    "agent": str,
}  # fmt: skip
#: A read belongs to no caller's wait, so only close, a lost peer or a caller that gave up end it.
_READ_LIMIT_S: Final = 24 * 3600.0
_LISTEN_S: Final = 0.5
_RETRY_S: Final = 0.005  # a slot waits for its ring, or for a caller to come back
#: Prepared part-filled reads that are kept: the last slot of a move has one size at every refit.
_MAX_KEPT: Final = 128
_MAX_GAP_BYTES: Final = 16 * 1024


def ring_frame(options: RingOptions, memory: Memory, agent: Agent) -> dict[str, Any]:
    """How a source announces its ring."""
    return {
        "kind": RING_KIND,
        "num_slots": options.num_slots,
        "slot_bytes": options.slot_bytes,
        "ptr": memory.ptr,
        "device": options.device,
        "handle": "" if options.device == CPU else export_at(memory.ptr, options.device),
        "agent": base64.b64encode(agent.metadata()).decode(),
    }


class Ring(Protocol):
    """The slots of a remote ring, readable here."""

    options: RingOptions

    def transfer(self, index: int, header: SlotHeader) -> Transfer | None:
        """What must be read before a slot is readable, if anything."""


def ring_handle(fields: Mapping[str, Any]) -> str:
    """Of a ring on a CUDA device. Raises :class:`ProtocolError`."""
    return parse_handles([fields.get("handle")], "frame 'ring', 'handle'")[0]


class MappedRing:
    """A remote ring on a CUDA device of this machine, mapped: slots are readable where they are."""

    def __init__(self, message: Mapping[str, Any], device: str) -> None:
        """Raises :class:`TransportError` where it cannot be mapped."""
        fields = check_fields(message, _RING_FIELDS, "frame 'ring'")
        self.options = RingOptions(fields["num_slots"], fields["slot_bytes"], device)
        handle = bytes.fromhex(ring_handle(fields))
        self.memory = MappedMemory(handle, ring_bytes(self.options), device)

    def transfer(self, index: int, header: SlotHeader) -> Transfer | None:
        return None

    def close(self) -> None:
        """Unmapped with the last slot that somebody holds."""
        self.memory.close()


class LandingRing:
    """A remote ring and the local slots of the same shape, on a device of the same kind."""

    def __init__(
        self,
        agent: Agent,
        message: Mapping[str, Any],
        device: str,
        kept: PeerMemory | None = None,
    ) -> None:
        """``kept`` is for a trainer of this machine whose CUDA memory can be mapped."""
        fields = check_fields(message, _RING_FIELDS, "frame 'ring'")
        self.options = RingOptions(fields["num_slots"], fields["slot_bytes"], device)
        num_bytes = ring_bytes(self.options)
        self._agent = agent
        self._source_ptr: int = fields["ptr"]
        self._source_device: str = fields["device"]
        if (self._source_device == CPU) != (device == CPU):
            raise UnavailableError(
                f"the trainer streams from {self._source_device}, the engine's tensors lie on "
                f"{device}: p2p reads from host to host or from CUDA device to CUDA device"
            )
        self.memory: Memory = (
            HostMemory.anonymous(num_bytes) if device == CPU else DeviceMemory(num_bytes, device)
        )
        self._pin = self.memory.pin()  # reads land here until the agent is quiet
        self._kept = kept
        try:
            if kept is not None and device != CPU:
                kept.replace([Key(0, ring_handle(fields))])
            agent.register([Span(self.memory.ptr, num_bytes, device)])
            agent.load_peer(
                unpack_bytes(fields["agent"], "frame 'ring', 'agent'"),
                [Span(self._source_ptr, num_bytes, self._source_device)],
            )
        except BaseException:
            self.close()
            raise
        self._prepared: dict[tuple[Any, ...], Transfer] = {}

    def transfer(self, index: int, header: SlotHeader) -> Transfer | None:
        """The read of what is filled of a slot, prepared on first use; None if nothing is."""
        runs = _filled(header)
        if not runs:
            return None
        key = (index, *runs)
        if key not in self._prepared:
            if len(self._prepared) >= _MAX_KEPT:
                del self._prepared[next(iter(self._prepared))]
            start = index * stride_bytes(self.options)
            rows = np.array(runs, dtype=np.int64)
            at = start + rows[:, 0]
            reads = Reads(self._source_ptr + at, self.memory.ptr + at, rows[:, 1])
            self._prepared[key] = self._agent.prepare(
                reads, self._source_device, self.options.device
            )
        return self._prepared[key]

    def close(self) -> None:
        """After the agent: nothing may land any more."""
        self._pin.release()
        self.memory.close()
        if self._kept is not None:
            self._kept.close()


def _filled(header: SlotHeader) -> tuple[tuple[int, int], ...]:
    """Runs (offset, size) of a slot that hold something; a small gap is cheaper read than skipped."""
    data = (0, header.data_bytes)
    words = (header.metadata_offset_bytes, header.metadata_bytes)
    if all(size for _, size in (data, words)) and words[0] <= header.data_bytes + _MAX_GAP_BYTES:
        return ((0, max(header.data_bytes, sum(words))),)
    return tuple(run for run in (data, words) if run[1])


class Landing:
    """A link whose ``slot`` frames arrive when their bytes have landed."""

    def __init__(self, agent: Agent, channel: Channel, lost: Callable[[], str | None]) -> None:
        self._agent = agent
        self._channel = channel
        self._lost = lost
        self._arrived: queue.SimpleQueue[Frame | WeightSyncError] = queue.SimpleQueue()
        self._pending: deque[dict[str, Any]] = deque()
        self._ring: Ring | None = None
        self._stop = CancelToken()
        self._pause = CancelToken()
        self._is_quiet = threading.Event()
        self._is_wanted = threading.Event()
        self._is_wanted.set()
        self._is_quiet.set()
        self._thread = threading.Thread(target=self._run, name="weightsync-landing", daemon=True)
        self._thread.start()

    # -- the link -------------------------------------------------------------------------------

    def send(
        self, message: Mapping[str, Any], fds: Sequence[int] = (), deadline: Deadline | None = None
    ) -> None:
        self._channel.send(message, fds, deadline)

    def receive(self, deadline: Deadline) -> Frame:
        self._go_on()
        try:
            with deadline.naming_stage():
                while True:
                    try:
                        return self._take(self._arrived.get(timeout=max(deadline.slice_s(), 1e-4)))
                    except queue.Empty:
                        deadline.check()
        except (DeadlineError, CancelledError):
            self._hold()
            raise

    def poll(self) -> Frame | None:
        """The next frame if it is here. An error waits for :meth:`receive`."""
        try:
            item = self._arrived.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, WeightSyncError):
            self._arrived.put(item)
            return None
        return item

    def lost(self) -> str | None:
        return self._lost() or self._agent.lost()

    def close(self) -> None:
        """Stop reading. Any thread."""
        self._stop.cancel("this end was closed")
        self._pause.cancel("this end was closed")
        self._is_wanted.set()
        self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)
        while (frame := self.poll()) is not None:
            close_fds(frame[1])

    # -- the ring -------------------------------------------------------------------------------

    def land_in(self, ring: Ring) -> None:
        """From here on slots are read into this ring."""
        self._ring = ring

    def _take(self, item: Frame | WeightSyncError) -> Frame:
        if isinstance(item, WeightSyncError):
            self._arrived.put(item)  # for the next caller
            raise copy.copy(item)  # whose traceback would hold the ring of every caller before
        return item

    def _hold(self) -> None:
        """Stop a read under way and wait until it is quiet; its slot is read again later."""
        self._is_wanted.clear()
        self._pause.cancel("the caller gave up")
        self._is_quiet.wait()

    def _go_on(self) -> None:
        if not self._is_wanted.is_set():
            self._pause = CancelToken()
            self._is_wanted.set()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                ring = self._ring
                if self._pending and ring is not None and self._is_wanted.is_set():
                    self._land(ring)
                    self._listen(1e-4)
                else:
                    self._listen(_RETRY_S if self._pending else _LISTEN_S)
        except CancelledError:
            self._arrived.put(PeerLostError(self.lost() or "this end was closed"))
        except PeerLostError as error:
            self._arrived.put(PeerLostError(self.lost() or str(error)))
        except WeightSyncError as error:
            self._arrived.put(error)
        except Exception as error:  # a bug, but the caller must not wait for ever
            self._arrived.put(ProtocolError(f"the landing thread failed: {error!r}"))

    def _listen(self, limit_s: float) -> None:
        """Sort what arrives within ``limit_s``."""
        deadline = Deadline(limit_s, peer="channel", stage="listen", token=self._stop)
        with contextlib.suppress(DeadlineError):
            while True:
                message, fds = self._channel.receive(deadline)
                if message.get("kind") == "slot":
                    close_fds(fds)
                    self._pending.append(message)
                    return
                if message.get("kind") == "reset":
                    self._pending.clear()  # all of an older generation: nobody will look at them
                self._arrived.put((message, fds))

    def _land(self, ring: Ring) -> None:
        message = self._pending[0]
        self._is_quiet.clear()
        try:
            header = SlotHeader.from_json(message.get("header"), ring.options.slot_bytes)
            index = message.get("index")
            if not isinstance(index, int) or not 0 <= index < ring.options.num_slots:
                raise ProtocolError(f"slot {index!r} of a ring of {ring.options.num_slots}")
            deadline = Deadline(_READ_LIMIT_S, peer="trainer", stage="receive", token=self._pause)
            if (transfer := ring.transfer(index, header)) is not None:
                self._agent.read(transfer, deadline, self._lost)
        except CancelledError:
            return  # the caller gave up: the slot stays pending, and is read again
        finally:
            self._is_quiet.set()
        self._pending.popleft()
        self._arrived.put((message, []))
