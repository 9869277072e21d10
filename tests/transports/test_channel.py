"""The channel hears only the peer that knows the secret, and never waits without an end."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import open_fds

from transports.wire import LIMIT_S, SHORT_S, deadline
from weightsync.deadline import CancelToken
from weightsync.errors import (
    CancelledError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TooLargeError,
    UnavailableError,
)
from weightsync.transports.channel import Channel, Listener, close_fds, connect

Ends = tuple[Channel, Channel]


def join(listener: Listener) -> Ends:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, deadline())
        return connect(listener.address(), deadline()), accepted.result(LIMIT_S)


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    found = Listener(request.param)
    yield found
    found.close()


@pytest.fixture
def ends(listener: Listener) -> Iterator[Ends]:
    left, right = join(listener)
    yield left, right
    left.close()
    right.close()


def raw_socket(listener: Listener, hello: bytes = b"") -> socket.socket:
    """A stranger's connection."""
    address = listener.address()
    if address["family"] == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + address["address"][0])
    else:
        sock = socket.create_connection(tuple(address["address"]))
    sock.sendall(hello)
    return sock


def is_dropped(sock: socket.socket) -> bool:
    """Whether the other end hung up without a word."""
    sock.settimeout(LIMIT_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self._marker),))


class TestFrames:
    def test_both_ways_in_order(self, ends: Ends) -> None:
        left, right = ends
        for n in range(100):
            left.send({"kind": "a", "n": n})
            right.send({"kind": "b", "n": n})
        assert [right.receive(deadline())[0]["n"] for _ in range(100)] == list(range(100))
        assert [left.receive(deadline())[0]["n"] for _ in range(100)] == list(range(100))

    def test_a_large_frame(self, ends: Ends) -> None:
        left, right = ends
        text = "x" * 8_000_000
        left.send({"kind": "a", "text": text})
        assert right.receive_kind("a", deadline())[0]["text"] == text

    def test_too_large_a_frame_is_not_sent(self, ends: Ends) -> None:
        with pytest.raises(TooLargeError, match="limit"):
            ends[0].send({"kind": "a", "text": "x" * (65 * 2**20)})
        ends[0].send({"kind": "b"})
        assert ends[1].receive(deadline())[0] == {"kind": "b"}

    def test_another_kind_is_an_error(self, ends: Ends) -> None:
        ends[0].send({"kind": "a"})
        with pytest.raises(ProtocolError, match=r"'b'.*'a'"):
            ends[1].receive_kind("b", deadline())

    def test_poll_never_waits(self, ends: Ends) -> None:
        assert ends[1].poll() is None
        ends[0].send({"kind": "a"})
        ends[0].send({"kind": "b"})
        assert ends[1].receive(deadline())[0] == {"kind": "a"}
        ends[0].close()
        assert ends[1].receive(deadline())[0] == {"kind": "b"}
        with pytest.raises(PeerLostError):
            ends[1].receive(deadline())
        assert ends[1].poll() is None

    def test_many_senders(self, ends: Ends) -> None:
        left, right = ends
        with ThreadPoolExecutor(4) as pool:
            text = "y" * 30_000
            for k in range(4):
                pool.submit(lambda k=k: [left.send({"k": k, "t": text}) for _ in range(20)])
            found = [right.receive(deadline())[0] for _ in range(80)]
        assert sorted(m["k"] for m in found) == sorted(list(range(4)) * 20)
        assert all(m["t"] == text for m in found)


class TestDescriptors:
    @pytest.fixture
    def unix(self) -> Iterator[Ends]:
        listener = Listener("unix")
        ends = join(listener)
        yield ends
        for end in ends:
            end.close()
        listener.close()

    def test_they_travel_and_are_not_inherited(self, unix: Ends) -> None:
        read_fd, write_fd = os.pipe()
        unix[0].send({"kind": "fd"}, [write_fd])
        _, (got,) = unix[1].receive(deadline())
        assert not os.get_inheritable(got)
        os.write(got, b"x")
        assert os.read(read_fd, 1) == b"x"
        close_fds([read_fd, write_fd, got])

    def test_unread_ones_are_closed(self, unix: Ends) -> None:
        before = len(open_fds())
        fd = os.memfd_create("weightsync-test")
        for _ in range(10):
            unix[0].send({"kind": "fd"}, [fd, fd])
        unix[0].send({"kind": "last"})
        os.close(fd)
        close_fds(unix[1].receive(deadline())[1])
        unix[1].close()
        unix[0].close()
        assert len(open_fds()) <= before

    def test_those_of_a_broken_frame_are_closed(self) -> None:
        listener = Listener("unix")
        sock = raw_socket(listener, listener.address()["secret"].encode())
        channel = listener.accept(deadline())
        fd = os.memfd_create("weightsync-broken")
        socket.send_fds(sock, [struct.pack("<I", 3) + b"{ ]"], [fd])
        os.close(fd)
        with pytest.raises(PeerLostError, match="broke"):
            channel.receive(deadline())
        assert not [path for path in open_fds().values() if "weightsync-broken" in path]
        sock.close()
        channel.close()
        listener.close()


class TestWaits:
    def test_receive(self, ends: Ends) -> None:
        with pytest.raises(DeadlineError, match=r"the peer.*'hear'.*0\.\d s"):
            ends[0].receive(deadline(SHORT_S, "hear"))
        token = CancelToken()
        token.cancel("enough")
        with pytest.raises(CancelledError):
            ends[0].receive(deadline(token=token))

    def test_a_peer_that_takes_nothing(self, listener: Listener) -> None:
        sock = raw_socket(listener, listener.address()["secret"].encode())
        with_peer = listener.accept(deadline())
        # Above what the sockets buffer: half of it is sent, and nothing could follow it.
        with pytest.raises(PeerLostError, match="no answer"):
            with_peer.send({"text": "x" * 30_000_000}, deadline=deadline(SHORT_S))
        assert with_peer.lost()
        sock.close()
        with_peer.close()

    def test_connect(self, listener: Listener) -> None:
        address = listener.address()
        listener.close()
        with pytest.raises(UnavailableError, match="cannot reach"):
            connect(address, deadline())

    @pytest.mark.parametrize("closer", [0, 1])
    def test_close_wakes_every_waiter(self, ends: Ends, closer: int) -> None:
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(ends[n % 2].receive, deadline()) for n in range(4)]
            ends[closer].close()
            for future in waiting:
                with pytest.raises(PeerLostError):
                    future.result(LIMIT_S)
        assert ends[0].lost()
        assert ends[1].lost()
        with pytest.raises(PeerLostError):
            ends[closer].send({"kind": "a"})

    def test_closing_a_listener_ends_accept(self, listener: Listener) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(listener.accept, deadline())
            listener.close()
            with pytest.raises(PeerLostError):
                waiting.result(LIMIT_S)


class TestStrangers:
    def test_only_the_secret_opens(self, listener: Listener, tmp_path: Path) -> None:
        bomb = pickle.dumps(Bomb(tmp_path / "marker"))
        secret = listener.address()["secret"].encode()
        wrong = b"0" * len(secret)
        frame = struct.pack("<I", len(bomb)) + bomb
        hellos = [
            bomb + b"\0" * 64,
            wrong + frame,
            struct.pack("<I", 2**32 - 1) + b"\xff" * 100,
            os.urandom(4096),
            b'{"kind": "hello"}' * 4,
            secret[:-1] + b"!",
        ]
        strangers = [raw_socket(listener, hello) for hello in hellos]
        left, right = join(listener)
        assert all(is_dropped(sock) for sock in strangers[:4])
        left.send({"kind": "ok"})
        assert right.receive(deadline())[0] == {"kind": "ok"}
        assert not (tmp_path / "marker").exists()
        for closing in (*strangers, left, right):
            closing.close()

    def test_silent_ones_keep_nobody_waiting(self, listener: Listener) -> None:
        silent = [raw_socket(listener, b"half"[:n]) for n in range(4)]
        start_s = time.monotonic()
        left, right = join(listener)
        assert time.monotonic() - start_s < 4.0
        for closing in (*silent, left, right):
            closing.close()

    @pytest.mark.parametrize(
        "frame",
        [
            struct.pack("<I", 2**32 - 1),
            struct.pack("<I", 4) + b"null",
            struct.pack("<I", 3) + b"\xff\xfe\xfd",
            struct.pack("<I", 200_000) + b"[" * 200_000,
            struct.pack("<I", 64) + pickle.dumps([1] * 20)[:64].ljust(64, b"."),
        ],
    )
    def test_a_known_peer_that_talks_nonsense_is_lost(
        self, listener: Listener, frame: bytes
    ) -> None:
        sock = raw_socket(listener, listener.address()["secret"].encode() + frame)
        channel = listener.accept(deadline())
        with pytest.raises(PeerLostError):
            channel.receive(deadline())
        assert channel.lost()
        assert is_dropped(sock)
        sock.close()
        channel.close()

    def test_the_end_in_the_middle_of_a_frame(self, listener: Listener) -> None:
        hello = listener.address()["secret"].encode()
        sock = raw_socket(listener, hello + struct.pack("<I", 100) + b"{")
        channel = listener.accept(deadline())
        sock.close()
        with pytest.raises(PeerLostError, match="middle"):
            channel.receive(deadline())
        channel.close()

    def test_loopback_by_default(self) -> None:
        listener = Listener("tcp")
        assert listener.address()["address"][0] == "127.0.0.1"
        listener.close()

    def test_nothing_in_a_file_system(self) -> None:
        listener = Listener("unix")
        assert not os.path.exists(listener.address()["address"][0])
        assert "/" not in listener.address()["address"][0]
        listener.close()

    @pytest.mark.parametrize(
        "address",
        [
            None,
            [],
            {},
            {"family": "unix", "address": [], "secret": "x"},
            {"family": "unix", "address": [7], "secret": "x"},
            {"family": "unix", "address": ["a"], "secret": 1},
            {"family": "udp", "address": ["a", 1], "secret": "x"},
            {"family": "tcp", "address": ["127.0.0.1", 10**9], "secret": "x"},
            {"family": "tcp", "address": ["127.0.0.1", "http"], "secret": "x"},
        ],
    )
    def test_malformed_addresses(self, address: Any) -> None:
        with pytest.raises(ProtocolError, match="address"):
            connect(address, deadline())

    @pytest.mark.parametrize("host", ["a\0b", "x" * 300, "", "no such host"])
    def test_impossible_hosts(self, host: str) -> None:
        with pytest.raises((UnavailableError, ProtocolError)):
            connect({"family": "tcp", "address": [host, 9], "secret": "x"}, deadline(5.0))


def test_threads_end_with_their_channels(listener: Listener) -> None:
    before = threading.active_count()
    left, right = join(listener)
    assert threading.active_count() >= before + 2
    left.close()
    right.close()
    assert threading.active_count() == before
