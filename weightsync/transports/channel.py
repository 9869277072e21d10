"""A small framed message channel beside the payload: slot headers, releases, descriptors.

A frame is JSON, and over a Unix socket it may carry file descriptors. What comes first must be the
listener's secret, and it is compared before anything is parsed. A closed socket is how the death of
a peer is noticed at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import (
    CancelledError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
)
from weightsync.transports.frames import (
    Frame,
    Stranger,
    close_fds,
    encode_frame,
    is_readable,
    open_pidfd,
    peer_pid,
    read_frame,
    wait_ready,
)

__all__ = ["Channel", "Frame", "Listener", "close_fds", "connect"]

_HELLO_LIMIT_S = 5.0
_MAX_STRANGERS = 64
#: A send without a deadline of its own: small frames only wait when the peer stands still.
_SEND_LIMIT_S = 10.0
_CROWDED_S = 0.002

#: Takes one frame and its descriptors over; may raise :class:`ProtocolError`, and must not wait.
Taker = Callable[[dict[str, Any], list[int]], None]


class Channel:
    """One connected end. ``send`` from any thread; frames arrive on ``receive`` in order.

    A reader thread takes frames off the socket, so that a peer never blocks on a busy process. On
    one machine it also watches the peer's process: a child that the peer forked keeps the socket
    open after the peer's death, and would hide it. Frames of a kind in ``takers`` it hands over itself,
    at once: for descriptors that must not pile up.
    """

    def __init__(
        self, sock: socket.socket, peer: str, takers: Mapping[str, Taker] | None = None
    ) -> None:
        self._sock = sock
        self._peer = peer
        self._takers = {} if takers is None else dict(takers)
        self._send_lock = threading.Lock()
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._lost: str | None = None
        self._closed = False
        self._close_lock = threading.Lock()
        self.peer_pid = peer_pid(sock)
        self._pidfd = open_pidfd(self.peer_pid)
        self._reader = threading.Thread(
            target=self._read_loop,
            name="weightsync-channel",
            daemon=True,
        )
        self._reader.start()

    @property
    def socket(self) -> socket.socket:
        return self._sock

    def lost(self) -> str | None:
        """Why the peer is gone, or None. Asks the kernel, so it is right at once."""
        with self._close_lock:
            if self._lost is None and self._pidfd is not None and is_readable(self._pidfd):
                self._mark_lost(f"{self._peer}: its process {self.peer_pid} ended")
        return self._lost

    def send(
        self, message: Mapping[str, Any], fds: Sequence[int] = (), deadline: Deadline | None = None
    ) -> None:
        """Send one frame. Raises :class:`PeerLostError` when the peer is gone.

        Waits only while the peer takes nothing off the wire: until ``deadline``, else for 10 s.
        """
        self.send_encoded(encode_frame(message), fds, deadline)

    def send_encoded(
        self, data: memoryview, fds: Sequence[int] = (), deadline: Deadline | None = None
    ) -> None:
        """Likewise for what :func:`encode_frame` made."""
        limit = deadline or Deadline(_SEND_LIMIT_S, peer=self._peer, stage="send a frame")
        sent = 0
        try:
            with self._send_lock:
                while sent < len(data):
                    sent += self._send_part(data[sent:], () if sent else fds, limit)
        except (OSError, ValueError) as error:  # ValueError: closed here meanwhile
            if sent == 0 and isinstance(error, DeadlineError):
                raise
            self._mark_lost(f"{self._peer}: the channel broke while sending: {error}")
            self._shutdown()
            raise PeerLostError(str(self._lost)) from error
        except CancelledError:
            if sent:  # half a frame: nothing that follows could be understood
                self._mark_lost(f"{self._peer}: a frame was given up half sent")
                self._shutdown()
            raise

    def _send_part(self, data: memoryview, fds: Sequence[int], limit: Deadline) -> int:
        while True:
            try:
                if fds:
                    return socket.send_fds(self._sock, [data], list(fds), socket.MSG_DONTWAIT)
                return self._sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                limit.check()
                wait_ready([self._sock.fileno()], select.POLLOUT, limit.slice_s())
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
                limit.check()  # the peer has not taken the descriptors before these yet
                time.sleep(_CROWDED_S)

    def receive(self, deadline: Deadline) -> Frame:
        """The next frame; its descriptors belong to the caller."""
        while True:
            try:
                frame = self._frames.get(timeout=max(deadline.slice_s(), 1e-4))
            except queue.Empty:
                deadline.check()
                continue
            if frame is None:
                self._frames.put(None)  # for the next caller
                raise deadline.lost(self._lost or self._peer)
            return frame

    def poll(self) -> Frame | None:
        """The next frame if one is here already. Never blocks, never raises."""
        try:
            frame = self._frames.get_nowait()
        except queue.Empty:
            return None
        if frame is None:
            self._frames.put(None)
        return frame

    def receive_kind(self, kind: str, deadline: Deadline) -> Frame:
        """The next frame, which must be of this kind."""
        message, fds = self.receive(deadline)
        if message.get("kind") != kind:
            close_fds(fds)
            found = message.get("kind")
            raise ProtocolError(f"{self._peer}: expected a frame {kind!r}, got {found!r}")
        return message, fds

    def close(self) -> None:
        """Close the socket; the peer sees the end. Idempotent, from any thread."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._shutdown()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5.0)
        self._sock.close()
        with self._close_lock:
            pidfd, self._pidfd = self._pidfd, None
            if pidfd is not None:
                os.close(pidfd)
        while (frame := self.poll()) is not None:
            close_fds(frame[1])

    def _shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _mark_lost(self, reason: str) -> None:
        if self._lost is None:
            self._lost = "this end was closed" if self._closed else reason

    def _read_loop(self) -> None:
        try:
            while (frame := read_frame(self._sock, self._pidfd)) is not None:
                kind = frame[0].get("kind")
                if isinstance(kind, str) and kind in self._takers:
                    self._takers[kind](*frame)
                else:
                    self._frames.put(frame)
            self._mark_lost(f"{self._peer}: the process closed its channel or ended")
        except (OSError, ProtocolError, ValueError, RecursionError, MemoryError) as error:
            self._mark_lost(f"{self._peer}: the channel broke: {error}")
        self._shutdown()  # after a broken frame nothing more can be said, and the peer should know
        self._frames.put(None)


class Listener:
    """Waits for the one peer that knows the secret.

    ``family``: ``unix`` listens on an abstract address (nothing is left in a file system, whatever
    happens to this process); ``tcp`` on ``host`` and a free port.
    """

    def __init__(self, family: str, host: str = "127.0.0.1") -> None:
        self._secret = secrets.token_hex(16)
        self._family = family
        if family == "unix":
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.bind(f"\0weightsync-{secrets.token_hex(12)}")
            self._address: list[Any] = [self._sock.getsockname()[1:].decode()]
        else:
            version = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._sock = socket.create_server((host, 0), family=version)
            self._address = list(self._sock.getsockname()[:2])
        self._sock.listen(8)
        self._sock.setblocking(False)
        self._is_closed = False

    def address(self) -> dict[str, Any]:
        """JSON for :func:`connect`; holds the secret, so it travels on the control channel only."""
        return {"family": self._family, "address": self._address, "secret": self._secret}

    def accept(self, deadline: Deadline) -> Channel:
        """The channel of the first peer that shows the secret; others are dropped.

        Strangers are heard side by side, so that a silent one keeps nobody waiting.
        """
        strangers: dict[socket.socket, Stranger] = {}
        try:
            while True:
                deadline.check()
                if self._is_closed:
                    raise deadline.lost(f"{deadline.peer}: this end was closed")
                if (sock := self._hear(strangers, deadline.slice_s())) is not None:
                    del strangers[sock]
                    sock.setblocking(True)
                    _tune(sock)
                    return Channel(sock, deadline.peer)
        finally:
            for sock in strangers:
                sock.close()

    def _hear(
        self, strangers: dict[socket.socket, Stranger], wait_s: float
    ) -> socket.socket | None:
        try:
            fds = [sock.fileno() for sock in (self._sock, *strangers)]
            ready = wait_ready(fds, select.POLLIN, wait_s)
            if fds[0] in ready:
                sock, _ = self._sock.accept()
                sock.setblocking(False)
                strangers[sock] = Stranger(self._secret.encode())
        except (OSError, ValueError):  # the connection is gone again, or this end was closed
            return None
        for sock in [s for s in strangers if s.fileno() in ready]:
            verdict = strangers[sock].hear(sock)
            if verdict is True:
                return sock
            if verdict is False:
                del strangers[sock]
                sock.close()
        self._drop_slow(strangers)
        return None

    @staticmethod
    def _drop_slow(strangers: dict[socket.socket, Stranger]) -> None:
        now_s = time.monotonic()
        for number, (sock, stranger) in enumerate(list(strangers.items())):
            is_crowd = number < len(strangers) - _MAX_STRANGERS
            if is_crowd or now_s - stranger.since_s > _HELLO_LIMIT_S:
                del strangers[sock]
                sock.close()

    def close(self) -> None:
        self._is_closed = True
        self._sock.close()


def connect(
    address: Mapping[str, Any], deadline: Deadline, takers: Mapping[str, Taker] | None = None
) -> Channel:
    """Connect to a :class:`Listener` of another process; ``takers`` as :class:`Channel` has them."""
    deadline.check()
    family, target, secret = _parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(max(deadline.remaining_s(), 1e-3))
    try:
        sock.connect(target)
        sock.sendall(secret.encode())
    except TimeoutError as error:
        sock.close()
        raise deadline.error() from error
    except (OSError, ValueError) as error:
        sock.close()
        raise UnavailableError(
            f"{deadline.peer}: cannot reach its channel at {target!r}: {error} ('ipc' needs both "
            "processes on one host and in one network namespace; 'p2p' needs a routable address)"
        ) from error
    sock.settimeout(None)
    _tune(sock)
    return Channel(sock, deadline.peer, takers)


def _parse_address(address: object) -> tuple[socket.AddressFamily, Any, str]:
    try:
        if not isinstance(address, Mapping):
            raise TypeError("not an object")
        family, place, secret = address["family"], address["address"], address["secret"]
        if not isinstance(secret, str):
            raise TypeError("secret is not a string")
        if family == "unix" and isinstance(place[0], str):
            return socket.AF_UNIX, "\0" + place[0], secret
        if family != "tcp":
            raise ValueError(f"family {family!r} is neither unix nor tcp")
        host, port = str(place[0]), int(place[1])
        if not 0 < port < 2**16 or "\0" in host:
            raise ValueError(f"host {host[:80]!r}, port {port}")
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port), secret
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"channel address is malformed: {error!r}") from error


def _tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that lost power says nothing: ask after 10 s, give up on it after 15 more.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
