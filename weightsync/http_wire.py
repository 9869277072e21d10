"""As much of HTTP/1.1 as the control channel speaks: a head, a body of known length, nothing else.

The library's own parsers build an email message of every head, which costs more than everything
else in a request; an update of a small model is four requests and must take about a millisecond.
"""

from __future__ import annotations

import http.client
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedIOBase
from typing import Any, Final

_MAX_LINE_BYTES: Final = 65_536
_MAX_HEADERS: Final = 100
_MAX_HEAD_BYTES: Final = 65_536
_CHUNK_BYTES: Final = 262_144
#: How long a wait for an answer, or for the next request, stays awake.
AWAKE_S = 1e-3
#: So long before an answer is expected whoever waits for it is awake again.
_EARLY_S: Final = 1e-3
#: What takes longer comes when it comes: to be awake for it gains nothing worth naming.
_MAX_EXPECTED_S: Final = 0.25


class Headers(dict[str, str]):
    """Header fields by lower-case name."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())


def read_headers(stream: BufferedIOBase) -> Headers:
    """The fields up to the empty line. Raises ``http.client.HTTPException`` for what is none."""
    found = Headers()
    for _ in range(_MAX_HEADERS + 1):
        line = stream.readline(_MAX_LINE_BYTES + 1)
        if len(line) > _MAX_LINE_BYTES:
            raise http.client.LineTooLong("header line")
        if line in (b"\r\n", b"\n", b""):
            return found
        _add_field(found, line)
    raise http.client.HTTPException(f"more than {_MAX_HEADERS} headers")


def _add_field(headers: Headers, line: bytes) -> None:
    name, colon, value = line.decode("latin-1").partition(":")
    if not colon or not name or name != name.strip():
        raise http.client.HTTPException(f"not a header field: {line[:80]!r}")
    key = name.lower()
    if key == "content-length" and dict.__contains__(headers, key):
        raise http.client.HTTPException("two lengths of one body")
    headers[key] = value.lstrip(" \t").rstrip("\r\n")


def request_bytes(host: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """One POST, head and body in one piece."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def response_bytes(status: int, phrase: str, body: bytes, *, is_last: bool) -> bytes:
    """One answer, head and body in one piece."""
    head = (
        f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    closing = "Connection: close\r\n\r\n" if is_last else "\r\n"
    return (head + closing).encode("latin-1") + body


def wait_expected(sock: socket.socket, usual_s: float) -> None:
    """The same, and once more around the moment at which an answer that takes ``usual_s`` is due. In
    between this sleeps."""
    due_s = time.monotonic() + usual_s
    if wait_awake(sock) or not AWAKE_S < usual_s <= _MAX_EXPECTED_S:
        return
    asleep_s = due_s - _EARLY_S - time.monotonic()
    if asleep_s > 0:
        poller = select.poll()
        try:
            poller.register(sock, select.POLLIN)
        except ValueError:  # closed in this moment by another thread: reading says so
            return
        if poller.poll(int(asleep_s * 1e3)):
            return
    wait_awake(sock, max(0.0, due_s - time.monotonic()) + AWAKE_S)


def wait_awake(sock: socket.socket, for_s: float = AWAKE_S) -> bool:
    """Wait a moment for something to read without going to sleep, or not, if it takes longer.

    To be woken takes tens of microseconds, on a virtual machine a good part of a millisecond: as long
    as a whole stage of a small update. Every attempt lets other threads run. Returns whether it came.
    """
    until_s, limit_s = time.monotonic() + for_s, sock.gettimeout()
    sock.settimeout(0.0)  # one with a limit sleeps in every call, also in one that must not wait
    try:
        while time.monotonic() < until_s:
            with suppress(BlockingIOError):
                sock.recv(1, socket.MSG_PEEK)
                return True
    finally:
        sock.settimeout(limit_s)
    return False


def read_response(
    sock: socket.socket, until_s: float, max_bytes: int, usual_s: float = 0.0
) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection ends; ``until_s`` is a moment of the monotonic clock,
    ``usual_s`` how long such an answer took before.

    Raises ``TimeoutError``, ``OSError`` or ``http.client.HTTPException``.
    """
    got = bytearray()
    wait_expected(sock, min(usual_s, until_s - time.monotonic()))
    while (end := got.find(b"\r\n\r\n")) < 0:
        if len(got) > _MAX_HEAD_BYTES:
            raise http.client.LineTooLong("head")
        got += _receive(sock, until_s)
    first, *lines = bytes(got[:end]).split(b"\r\n")
    status, headers = _status_of(first), Headers()
    for line in lines:
        _add_field(headers, line)
    length = headers.get("content-length", "")
    if not length.isdecimal() or int(length) > max_bytes:
        raise http.client.HTTPException(f"an answer of length {length[:24]!r}")
    del got[: end + 4]
    while len(got) < int(length):
        got += _receive(sock, until_s)
    is_last = headers.get("connection", "").lower() == "close" or len(got) > int(length)
    return status, bytes(got[: int(length)]), is_last


def _receive(sock: socket.socket, until_s: float) -> bytes:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    wait_awake(sock)
    sock.settimeout(left_s if left_s < float("inf") else None)
    piece = sock.recv(_CHUNK_BYTES)
    if not piece:
        raise http.client.RemoteDisconnected("the other end closed the connection")
    return piece


def _status_of(line: bytes) -> int:
    words = line.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise http.client.BadStatusLine(line[:80].decode("latin-1"))
    return int(words[1])
