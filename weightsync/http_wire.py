"""As much of HTTP/1.1 as the control channel speaks: a head, a body of known length, nothing else.

The library's own parsers build an email message of every head, which costs more than everything
else in a request; an update of a small model is four requests and must take about a millisecond.
"""

from __future__ import annotations

import http.client
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


def wait_awake(sock: socket.socket) -> None:
    """Wait a moment for something to read without going to sleep, or not, if it takes longer.

    To be woken takes tens of microseconds, on a virtual machine a good part of a millisecond: as long
    as a whole stage of a small update. Every attempt lets other threads run.
    """
    until_s = time.monotonic() + AWAKE_S
    while time.monotonic() < until_s:
        with suppress(BlockingIOError):
            sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return


def read_response(sock: socket.socket, until_s: float, max_bytes: int) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection ends; ``until_s`` is a moment of the monotonic clock.

    Raises ``TimeoutError``, ``OSError`` or ``http.client.HTTPException``.
    """
    got = bytearray()
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
