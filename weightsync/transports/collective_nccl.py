"""An NCCL group of its own, for memory of CUDA devices."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Final

from weightsync import native
from weightsync.deadline import Deadline, poll_until
from weightsync.device_tables import cuda_errors, cuda_index, stream_of
from weightsync.errors import TransportError
from weightsync.transports import nccl_binding
from weightsync.transports.collective import Check, Collective, Pending, Seat, run_aside

#: Lanes from here on are for groups, one each: on one stream two groups would wait for each other.
_FIRST_LANE: Final = 16
_MAX_EVENTS: Final = 64
#: A copy at full speed takes the memory that a broadcast needs beside it; this keeps ahead of the links.
MAX_COPY_BLOCKS: Final = 64


_lanes: dict[int, set[int]] = {}  # taken, by device
_lanes_lock = threading.Lock()


def _take_lane(index: int) -> int:
    with _lanes_lock:
        taken = _lanes.setdefault(index, set())
        lane = next(n for n in itertools.count(_FIRST_LANE) if n not in taken)
        taken.add(lane)
        return lane


def _give_lane(index: int, lane: int) -> None:
    with _lanes_lock:
        _lanes[index].discard(lane)


class _NcclPending(Pending):
    def __init__(self, group: NcclCollective, event: int) -> None:
        self._group, self._event = group, event
        self._lock = threading.Lock()  # an end that is closed waits beside the caller

    def wait(self, limit_s: float) -> bool:
        event = self._event
        if not event:
            return True
        if not poll_until(lambda: self._group.has_passed(event), limit_s, self._group.check):
            return False
        self._group.check()  # an aborted kernel ends, too
        with self._lock:
            event, self._event = self._event, 0
        if event:
            self._group.give_back(event)
        return True


class NcclCollective(Collective):
    """See the module. Work runs on a stream of its own."""

    holds_device = True
    max_copy_blocks = MAX_COPY_BLOCKS

    def __init__(self, communicator: nccl_binding.Communicator, device: str) -> None:
        self.name = f"NCCL {nccl_binding.version_text(nccl_binding.version())}"
        self._communicator = communicator
        self._index = cuda_index(device)
        self._lane = _take_lane(self._index)
        # Before packing and unpacking, or the links would stand idle until those have ended.
        self._stream = stream_of(self._index, self._lane, priority=-1)
        self._events: list[int] = []
        self._num_events = 0
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, communicator, self._index, self._lane)
        self._end.atexit = False

    def broadcast(self, ptr: int, num_bytes: int) -> Pending:
        with self._lock, cuda_errors("NCCL"):
            event = self._events.pop() if self._events else self._new_event()
        self._communicator.broadcast(ptr, num_bytes, self._stream)
        with cuda_errors("NCCL"):
            native.extension.cuda_record_event(event, self._stream, self._index)
        return _NcclPending(self, event)

    def _new_event(self) -> int:
        if self._num_events >= _MAX_EVENTS:
            raise TransportError(f"NCCL: more than {_MAX_EVENTS} broadcasts under way")
        self._num_events += 1
        return int(native.extension.cuda_create_event(self._index))

    def has_passed(self, event: int) -> bool:
        with cuda_errors("NCCL"):
            return bool(native.extension.cuda_event_passed(event, self._index))

    def give_back(self, event: int) -> None:
        with self._lock:
            self._events.append(event)

    def check(self) -> None:
        """Raises :class:`TransportError` if the group is broken."""
        self._communicator.check()

    def abort(self) -> None:
        self._end()
        with self._lock:
            events, self._events = self._events, []
            self._num_events -= len(events)
        with cuda_errors("NCCL"):
            for event in events:
                native.extension.cuda_destroy_event(event, self._index)


def _end(communicator: nccl_binding.Communicator, index: int, lane: int) -> None:
    communicator.abort()
    _give_lane(index, lane)


def make_nccl(
    seat: Seat, name: bytes, device: str, deadline: Deadline, check: Check
) -> NcclCollective:
    """Join the group; returns when all members have.

    Raises :class:`DeadlineError`, :class:`TransportError`, or what ``check`` raises.
    """
    index = cuda_index(device)

    def begin() -> nccl_binding.Communicator:
        native.extension.cuda_use_device(index)  # of this thread, which is its own
        return nccl_binding.Communicator(name, seat.rank, seat.size)

    communicator = run_aside(begin, nccl_binding.Communicator.abort, deadline, check)
    try:
        while not communicator.check():
            check()
            deadline.check()
            time.sleep(1e-3)
        return NcclCollective(communicator, device)
    except BaseException:
        communicator.abort()
        raise
