"""The little HTTP that the control channel speaks."""

from __future__ import annotations

import http.client
import io
import socket
import threading
import time

import pytest

from weightsync.http_wire import (
    read_headers,
    read_response,
    request_bytes,
    response_bytes,
    wait_awake,
    wait_expected,
)

LIMIT_BYTES = 10_000


def headers_of(text: bytes) -> dict[str, str]:
    return read_headers(io.BytesIO(text))


def respond(*pieces: bytes, limit_s: float = 5.0) -> tuple[int, bytes, bool]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for piece in pieces:
            theirs.sendall(piece)
        theirs.shutdown(socket.SHUT_WR)
        return read_response(ours, time.monotonic() + limit_s, LIMIT_BYTES)


def test_fields_are_found_by_any_case() -> None:
    found = headers_of(b"Content-Length: 5\r\nX-A:  b \r\n\r\nbody")
    assert found.get("content-LENGTH") == "5"
    assert found.get("x-a") == "b "  # what follows a value is part of it: a token is compared whole
    assert "CONTENT-length" in found
    assert "y" not in found
    assert found.get("y", "none") == "none"


@pytest.mark.parametrize(
    "text",
    [
        b"no colon\r\n\r\n",
        b": empty name\r\n\r\n",
        b"Content-Length : 5\r\n\r\n",
        b" folded: line\r\n\r\n",
        b"Content-Length: 5\r\ncontent-length: 6\r\n\r\n",
        b"a: " + b"x" * 70_000 + b"\r\n\r\n",
        b"".join(b"h%d: 1\r\n" % i for i in range(101)) + b"\r\n",
    ],
)
def test_what_is_no_head_is_refused(text: bytes) -> None:
    with pytest.raises(http.client.HTTPException):
        headers_of(text)


@pytest.mark.parametrize("is_last", [False, True])
def test_an_answer_in_pieces(is_last: bool) -> None:
    answer = response_bytes(409, "Conflict", b'{"a": 1}', is_last=is_last)
    assert respond(answer) == (409, b'{"a": 1}', is_last)
    assert respond(*(answer[i : i + 1] for i in range(len(answer)))) == (409, b'{"a": 1}', is_last)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 OK\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9\r\n\r\n\r\n",
        b"x" * 70_000,
    ],
)
def test_what_is_no_answer_is_refused(text: bytes) -> None:
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        respond(text)


def test_a_limit_that_is_over() -> None:
    with pytest.raises(TimeoutError):
        respond(b"HTTP/1.1 200 OK\r\n", limit_s=-1.0)


def test_a_request_is_one_piece() -> None:
    found = request_bytes("h", "/p", {"A": "b"}, b"body")
    assert found == b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nA: b\r\n\r\nbody"


# --- waiting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit_s", [None, 5.0])
def test_a_wait_stays_awake_whatever_limit_the_socket_has(limit_s: float | None) -> None:
    """A socket with a limit sleeps in each call that could wait, also in one that must not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(limit_s)
        start_s, start_cpu_s = time.monotonic(), time.thread_time()
        assert not wait_awake(ours, 0.05)
        assert 0.05 <= time.monotonic() - start_s < 1.0
        assert time.thread_time() > start_cpu_s + 0.002
        assert ours.gettimeout() == limit_s
        theirs.sendall(b"x")
        assert wait_awake(ours, 0.05)
        assert ours.recv(1) == b"x", "it was only looked at"


def test_what_is_expected_later_is_slept_for() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start_s, start_cpu_s = time.monotonic(), time.thread_time()
        wait_expected(ours, 0.2)
        assert 0.2 <= time.monotonic() - start_s < 1.0
        assert time.thread_time() < start_cpu_s + 0.05
        timer = threading.Timer(0.05, theirs.sendall, [b"x"])
        timer.start()
        start_s = time.monotonic()
        wait_expected(ours, 0.2)
        assert time.monotonic() - start_s < 0.19, "what comes before it is due wakes"
        timer.join()


def test_what_takes_long_is_not_waited_for_awake() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start_s = time.monotonic()
        wait_expected(ours, 10.0)
        assert time.monotonic() - start_s < 1.0
