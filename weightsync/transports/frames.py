"""Frames on a socket: what :mod:`weightsync.transports.channel` sends and hears.

One frame is a little-endian length (4 bytes) and that many bytes of JSON; over a Unix socket a frame
may carry file descriptors.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weightsync.errors import ProtocolError, TooLargeError

MAX_FRAME_BYTES = 64 * 2**20
MAX_FDS = 64
_HEAD = struct.Struct("<I")
_FD = struct.Struct("i")
_PEER_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid

Frame = tuple[dict[str, Any], list[int]]  # the message and the file descriptors it carried


def encode_frame(message: Mapping[str, Any]) -> memoryview:
    """The bytes of one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise TooLargeError(f"frame of {len(body)} B above the limit of {MAX_FRAME_BYTES} B")
    return memoryview(_HEAD.pack(len(body)) + body)


def wait_ready(fds: Iterable[int], event: int, limit_s: float | None) -> list[int]:
    """Which of ``fds`` are ready (or broken). Unlike ``select`` it takes any descriptor number."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, event)
    return [fd for fd, _ in poll.poll(None if limit_s is None else max(1.0, limit_s * 1e3))]


def is_readable(fd: int) -> bool:
    """Whether ``fd`` is readable now; a pidfd is once its process has ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def peer_pid(sock: socket.socket) -> int:
    """The peer's process in this pid namespace; 0 if it has no number here, or over TCP."""
    if sock.family != socket.AF_UNIX:
        return 0
    size = _PEER_CREDENTIALS.size
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid: int = _PEER_CREDENTIALS.unpack(packed)[0]
    return pid


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if there can be none."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, or the peer is gone: then the socket says so
        return None


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that nobody takes."""
    for fd in fds:
        os.close(fd)


def read_frame(sock: socket.socket, pidfd: int | None = None) -> Frame | None:
    """One frame from a blocking socket; None at a clean end, or when ``pidfd`` says it is over."""
    fds: list[int] = []
    try:
        head = _read_exactly(sock, _HEAD.size, fds, pidfd)
        if head is None:
            return None
        (num_bytes,) = _HEAD.unpack(head)
        if num_bytes > MAX_FRAME_BYTES:
            raise TooLargeError(f"a frame of {num_bytes} B above the limit of {MAX_FRAME_BYTES} B")
        body = _read_exactly(sock, num_bytes, fds, pidfd)
        if body is None:
            raise ProtocolError("the channel ended in the middle of a frame")
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ProtocolError(f"a frame must be an object, got {type(message).__name__}")
    except BaseException:
        close_fds(fds)
        raise
    return message, fds


def _read_exactly(
    sock: socket.socket, num_bytes: int, fds: list[int], pidfd: int | None
) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        want = min(num_bytes - len(data), 2**20)
        if not _wait_readable(sock, pidfd):
            part = b""
        elif sock.family == socket.AF_UNIX:
            part = _recv_with_fds(sock, want, fds)
        else:
            part = sock.recv(want)
        if not part:
            if data:
                raise ProtocolError("the channel ended in the middle of a frame")
            return None
        data += part
    return bytes(data)


def _recv_with_fds(sock: socket.socket, num_bytes: int, fds: list[int]) -> bytes:
    """Like ``socket.recv_fds``, which drops the flag that keeps descriptors from our children."""
    room = socket.CMSG_SPACE(MAX_FDS * _FD.size)
    part, notes, _, _ = sock.recvmsg(num_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, packed in notes:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(packed) // _FD.size * _FD.size
            fds.extend(fd for (fd,) in _FD.iter_unpack(packed[:whole]))
    return part


def _wait_readable(sock: socket.socket, pidfd: int | None) -> bool:
    """False when the peer's process ended and nothing of it is left to read."""
    if pidfd is None:
        return True
    return wait_ready([sock.fileno(), pidfd], select.POLLIN, None) != [pidfd]


class Stranger:
    """A connection that has not shown the whole secret yet."""

    def __init__(self, secret: bytes) -> None:
        self.since_s = time.monotonic()
        self._want = secret
        self._got = b""

    def hear(self, sock: socket.socket) -> bool | None:
        """True: it knows the secret; False: it does not; None: not all of it is here.

        Reads not one byte more than the secret: what follows belongs to the first frame.
        """
        try:
            part = sock.recv(len(self._want) - len(self._got))
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._got += part
        if part and len(self._got) < len(self._want):
            return None
        return hmac.compare_digest(self._got, self._want)
