"""What two ends say to each other beside the payload, sorted by kind.

The ring and the published regions speak through a :class:`Link`: a socket channel between
processes, a pair of queues inside one. Neither knows which.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from weightsync.deadline import Deadline
from weightsync.errors import PeerLostError, ProtocolError
from weightsync.transports.frames import Frame, close_fds

#: Far above what a ring and its resets can have outstanding.
_MAX_WAITING = 4096


class Link(Protocol):
    """A connected end; see :class:`weightsync.transports.channel.Channel`."""

    def send(
        self, message: Mapping[str, Any], fds: Sequence[int] = (), deadline: Deadline | None = None
    ) -> None: ...

    def receive(self, deadline: Deadline) -> Frame: ...

    def poll(self) -> Frame | None: ...

    def lost(self) -> str | None: ...

    def close(self) -> None: ...


class Inbox:
    """Frames of a link, taken by kind; the order within the kinds that are asked for is kept.

    Used by one thread at a time.
    """

    def __init__(self, link: Link, kinds: Iterable[str]) -> None:
        self.link = link
        self._kinds = frozenset(kinds)
        self._waiting: deque[Frame] = deque()
        self._lock = threading.Lock()  # close() comes from any thread
        self._is_closed = False

    def take(self, kinds: Sequence[str], deadline: Deadline) -> Frame:
        """Wait for the next frame of one of these kinds."""
        if (frame := self._take_waiting(kinds)) is not None:
            return frame
        while True:
            frame = self.link.receive(deadline)
            if self._admit(frame) in kinds:
                return frame
            self._keep(frame)

    def poll(self, kinds: Sequence[str]) -> Frame | None:
        """The next frame of one of these kinds, if one is here."""
        if (frame := self._take_waiting(kinds)) is not None:
            return frame
        while (frame := self.link.poll()) is not None:
            if self._admit(frame) in kinds:
                return frame
            self._keep(frame)
        return None

    def check(self) -> None:
        """Raise :class:`PeerLostError` if the link is known to be gone."""
        if (reason := self.link.lost()) is not None:
            raise PeerLostError(reason)

    def close(self) -> None:
        """Drop what waits. The link must be closed."""
        with self._lock:
            self._is_closed = True
            while self._waiting:
                close_fds(self._waiting.popleft()[1])

    def _take_waiting(self, kinds: Sequence[str]) -> Frame | None:
        with self._lock:
            for index, frame in enumerate(self._waiting):
                if frame[0]["kind"] in kinds:
                    del self._waiting[index]
                    return frame
        return None

    def _admit(self, frame: Frame) -> str:
        kind = frame[0].get("kind")
        if not isinstance(kind, str) or kind not in self._kinds:
            close_fds(frame[1])
            raise ProtocolError(
                f"a frame of kind {kind!r}; known: {', '.join(sorted(self._kinds))}"
            )
        return kind

    def _keep(self, frame: Frame) -> None:
        with self._lock:
            if not self._is_closed and len(self._waiting) < _MAX_WAITING:
                self._waiting.append(frame)
                return
        close_fds(frame[1])
        if not self._is_closed:
            raise ProtocolError(f"more than {_MAX_WAITING} frames wait here: the peer floods us")


class LocalLink:
    """One end of a link within one process: a pair of queues."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._other: LocalLink | None = None
        self._lost: str | None = None

    @classmethod
    def pair(cls) -> tuple[LocalLink, LocalLink]:
        left, right = cls(), cls()
        left._other, right._other = right, left
        return left, right

    def send(
        self, message: Mapping[str, Any], fds: Sequence[int] = (), deadline: Deadline | None = None
    ) -> None:
        if self._lost is not None or self._other is None:
            raise PeerLostError(str(self._lost))
        self._other._frames.put((json.loads(json.dumps(message)), []))

    def receive(self, deadline: Deadline) -> Frame:
        while True:
            try:
                frame = self._frames.get(timeout=max(deadline.slice_s(), 1e-4))
            except queue.Empty:
                deadline.check()
                continue
            if frame is None:
                self._frames.put(None)  # for the next caller
                raise deadline.lost(f"{deadline.peer}: {self._lost}")
            return frame

    def poll(self) -> Frame | None:
        try:
            frame = self._frames.get_nowait()
        except queue.Empty:
            return None
        if frame is None:
            self._frames.put(None)
        return frame

    def lost(self) -> str | None:
        return self._lost

    def lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._frames.put(None)

    def close(self) -> None:
        self.lose("this end was closed")
        if self._other is not None:
            self._other.lose("the peer closed its end")


def check_fields(value: object, fields: Mapping[str, type], what: str) -> Mapping[str, Any]:
    """``value`` as an object with exactly these fields and types; an error names the field."""
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{what}: expected an object, got {type(value).__name__}")
    for name, kind in fields.items():
        if name not in value:
            raise ProtocolError(f"{what}: field {name!r} is missing")
        found = value[name]
        # bool is an int to Python, and never a count to us
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            got = f"{type(found).__name__} {str(found)[:80]!r}"
            raise ProtocolError(f"{what}: field {name!r} must be {kind.__name__}, got {got}")
        if isinstance(found, int) and not 0 <= found < 2**63:
            raise ProtocolError(f"{what}: field {name!r} is {found}, expected 0 <= n < 2^63")
    for name in value:
        if name not in fields:
            raise ProtocolError(f"{what}: unknown field {str(name)[:80]!r}")
    return value
