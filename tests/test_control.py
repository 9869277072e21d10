"""The control channel: what a client meets, and what a server refuses."""

from __future__ import annotations

import errno
import http.client
import json
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from weightsync import control
from weightsync.control import PATH_PREFIX, ControlServer, HttpClient, LocalClient, wait_for
from weightsync.errors import (
    AuthError,
    BusyError,
    ConfigError,
    DeadlineError,
    LayoutError,
    PeerLostError,
    ProtocolError,
    SessionError,
    TooLargeError,
    WeightSyncError,
)
from weightsync.messages import (
    CommitRequest,
    HeartbeatRequest,
    PlanRequest,
    Request,
    StatusRequest,
    encode,
)

STATUS = StatusRequest(None)
LIMIT_S = 20.0


class Handler:
    """Counts requests and answers as it was told."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Any] = lambda request: {"ok": True}

    def __call__(self, request: Request) -> Any:
        self.requests.append(request)
        return self.answer(request)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@contextmanager
def serve(
    handler: Any, token: str | None = None, listen: str = "127.0.0.1:0"
) -> Iterator[ControlServer]:
    server = ControlServer(listen, handler, token)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def client_of(url: str, token: str | None = None) -> Iterator[HttpClient]:
    client = HttpClient(url, token)
    try:
        yield client
    finally:
        client.close()


def post(
    server: ControlServer,
    verb: str,
    body: bytes,
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> tuple[int, Any]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
    try:
        connection.request(method, PATH_PREFIX + verb, body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def raw(server: ControlServer, text: bytes) -> bytes:
    """Send bytes as they are; everything that comes back until the server closes."""
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while piece := connection.recv(65_536):
            found += piece
        return found


# --- good ways --------------------------------------------------------------------------------------


def test_a_request_and_its_answer(handler: Handler) -> None:
    with serve(handler) as server, client_of(server.url) as client:
        for _ in range(3):
            assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}
    assert handler.requests == [STATUS] * 3


def test_the_answer_of_an_interrupted_request_is_nobody_s() -> None:
    """Ctrl-C while an answer is awaited: what comes after must not take that answer for its own."""
    may_answer = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def handle(request: Request) -> dict[str, Any]:
        if isinstance(request, CommitRequest):
            signal.pthread_kill(main, signal.SIGINT)
            may_answer.wait(LIMIT_S)
            return {"of": "commit"}
        return {"of": "status"}

    with serve(handle) as server, client_of(server.url) as client:
        with pytest.raises(KeyboardInterrupt):
            client.call(CommitRequest(session_id="s", wait_s=LIMIT_S), limit_s=LIMIT_S)
        timer = threading.Timer(0.2, may_answer.set)
        timer.start()
        assert client.call(STATUS, limit_s=LIMIT_S) == {"of": "status"}
        timer.join()


def test_an_address_needs_no_scheme(handler: Handler) -> None:
    with serve(handler) as server, client_of(server.url.removeprefix("http://")) as client:
        assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}


def test_ipv6_loopback_is_loopback(handler: Handler) -> None:
    try:
        server = ControlServer("[::1]:0", handler, None)
    except ConfigError as error:
        pytest.skip(str(error))
    with client_of(server.url) as client:
        assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}
    server.close()


def test_several_threads_have_connections_of_their_own(handler: Handler) -> None:
    barrier = threading.Barrier(4, timeout=LIMIT_S)

    def answer(request: Request) -> dict[str, Any]:
        barrier.wait()  # all four are here at once
        return {"run": getattr(request, "run_id", "")}

    handler.answer = answer
    found: list[Any] = []
    with serve(handler) as server, client_of(server.url) as client:

        def ask(name: str) -> None:
            found.append((name, client.call(HeartbeatRequest(name), limit_s=LIMIT_S)["run"]))

        threads = [threading.Thread(target=ask, args=(f"r{i}",)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(LIMIT_S)
    assert sorted(found) == [(f"r{i}", f"r{i}") for i in range(4)]


@pytest.mark.parametrize(
    "kind", [BusyError, SessionError, LayoutError, WeightSyncError, DeadlineError]
)
def test_errors_of_the_engine_are_raised_here(
    handler: Handler, kind: type[WeightSyncError]
) -> None:
    def fail(request: Request) -> Any:
        raise kind("the holder is run 'a'")

    handler.answer = fail
    for make in (lambda s: HttpClient(s.url, None), lambda s: LocalClient(handler)):
        with serve(handler) as server:
            client = make(server)
            with pytest.raises(kind, match="the holder is run 'a'") as caught:
                client.call(STATUS, limit_s=LIMIT_S)
            assert type(caught.value) is kind
            client.close()


def test_a_fault_of_the_engine_is_told_and_does_not_end_the_connection(handler: Handler) -> None:
    handler.answer = lambda request: 1 / 0
    with serve(handler) as server, client_of(server.url) as client:
        with pytest.raises(WeightSyncError, match="ZeroDivisionError"):
            client.call(STATUS, limit_s=LIMIT_S)
        handler.answer = lambda request: {}
        assert client.call(STATUS, limit_s=LIMIT_S) == {}


def test_status_can_be_had_with_get(handler: Handler) -> None:
    with serve(handler) as server:
        assert post(server, "status", b"", method="GET") == (200, {"ok": True})
        assert post(server, "status", b'{"protocol": 9}', method="GET") == (200, {"ok": True})
        assert post(server, "commit", b"", method="GET")[0] == 404
    assert handler.requests == [STATUS] * 2


# --- limits and losses ------------------------------------------------------------------------------


@contextmanager
def silent() -> Iterator[str]:
    """A server that accepts (in the kernel) and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers_runs_into_the_limit() -> None:
    with silent() as url, client_of(url) as client:
        with pytest.raises(DeadlineError) as caught:
            client.call(CommitRequest("s", 1.0), limit_s=0.2)
        for words in (url.removeprefix("http://"), "'commit'", "0.2 s"):
            assert words in str(caught.value)


def test_a_server_that_answers_byte_by_byte_runs_into_the_limit() -> None:
    stop = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not stop.wait(0.05):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        url = f"127.0.0.1:{server.getsockname()[1]}"
        words = r"'status' after 0\.[3-9]"
        with client_of(url) as client, pytest.raises(DeadlineError, match=words):
            client.call(STATUS, limit_s=0.3)
        stop.set()
        thread.join(LIMIT_S)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = rf"127.0.0.1:{port}: lost in stage 'status'.*refused"
    with client_of(f"http://127.0.0.1:{port}") as client, pytest.raises(PeerLostError, match=words):
        client.call(STATUS, limit_s=LIMIT_S)


def test_a_connection_to_ourselves_is_nobody() -> None:
    """The kernel may give a client the very port it asks for; whoever wants to listen must get it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    original = socket.create_connection

    def same_port(address: Any, timeout: float) -> socket.socket:
        return original(address, timeout=timeout, source_address=("127.0.0.1", port))

    with client_of(f"127.0.0.1:{port}") as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", same_port)
        with pytest.raises(PeerLostError, match="nothing listens"):
            client.call(STATUS, limit_s=LIMIT_S)


def test_a_server_that_goes_while_it_is_connected_leaves_nothing_open(handler: Handler) -> None:
    """Between the connection and the question who is at the other end."""
    made: list[socket.socket] = []

    class Going(socket.socket):
        def getpeername(self) -> Any:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    def connect(address: Any, timeout: float) -> socket.socket:
        sock = Going(socket.AF_INET, socket.SOCK_STREAM)
        made.append(sock)
        sock.settimeout(timeout)
        sock.connect(address)
        return sock

    with (
        serve(handler) as server,
        client_of(server.url) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(socket, "create_connection", connect)
        with pytest.raises(PeerLostError, match="not connected"):
            client.call(STATUS, limit_s=LIMIT_S)
        assert [sock.fileno() for sock in made] == [-1]


def test_a_server_that_is_closed_in_between_is_lost_and_found_again(handler: Handler) -> None:
    with serve(handler) as server:
        port = server.url.rsplit(":", 1)[1]
        client = HttpClient(server.url, None)
        client.call(STATUS, limit_s=LIMIT_S)
    with pytest.raises(PeerLostError):
        client.call(STATUS, limit_s=LIMIT_S)
    with serve(handler, listen=f"127.0.0.1:{port}"):
        assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}
    client.close()


def test_a_connection_that_idled_too_long_is_made_anew(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's step may take longer than a server keeps a silent connection."""
    monkeypatch.setattr(control, "_IDLE_LIMIT_S", 0.2)
    closed = threading.Semaphore(0)
    base = control._handler_class

    def watched(*args: Any) -> Any:
        kind = base(*args)

        class Watched(kind):  # type: ignore[misc, valid-type]
            def finish(self) -> None:
                super().finish()
                closed.release()

        return Watched

    monkeypatch.setattr(control, "_handler_class", watched)
    with serve(handler) as server, client_of(server.url) as client:
        for _ in range(3):
            assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}
            assert closed.acquire(timeout=LIMIT_S)
            with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))):
                pass  # a round trip through the kernel: the end of the former one is known by now
            assert closed.acquire(timeout=LIMIT_S)


def test_something_else_listens_there() -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        url = f"127.0.0.1:{server.getsockname()[1]}"
        words = "something else listening"
        with client_of(url) as client, pytest.raises(ProtocolError, match=words):
            client.call(STATUS, limit_s=LIMIT_S)
        thread.join(LIMIT_S)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "http://host",
        "https://host:1",
        "http://host:x",
        "http://host:70000",
        "host",
        "tcp://a:1",
    ],
)
def test_an_address_that_cannot_be(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected http://HOST:PORT"):
        HttpClient(url, None)


class Clock:
    """Answers pending a few times."""

    peer = "engine e"
    is_remote = True

    def __init__(self, pending: int) -> None:
        self.left = pending
        self.limits: list[float] = []

    def call(self, request: Request, *, limit_s: float) -> dict[str, Any]:
        self.limits.append(limit_s)
        self.left -= 1
        return {"pending": True} if self.left >= 0 else {"done": 1}

    def close(self) -> None: ...


def test_a_long_stage_is_asked_for_until_it_is_over() -> None:
    client = Clock(3)
    waits: list[float] = []

    def make(wait_s: float) -> Request:
        waits.append(wait_s)
        return CommitRequest("s", wait_s)

    assert wait_for(client, make, limit_s=60.0, stage="commit") == {"done": 1}
    assert waits == [control.POLL_S] * 4
    assert max(client.limits) <= control.POLL_S + 5.0


def test_a_stage_has_a_limit_over_all_its_requests() -> None:
    with pytest.raises(DeadlineError, match=r"engine e: .*'commit'.*limit 0\.1"):
        wait_for(Clock(10**9), lambda w: CommitRequest("s", w), limit_s=0.1, stage="commit")


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:0", "example.org:0"])
def test_beyond_loopback_a_token_is_needed(listen: str, handler: Handler) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        ControlServer(listen, handler, None)


@pytest.mark.parametrize(
    "listen",
    ["", "127.0.0.1", ":80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:²"],
)
def test_a_listen_address_that_cannot_be(listen: str, handler: Handler) -> None:
    with pytest.raises(ConfigError, match="listen"):
        ControlServer(listen, handler, None)


def test_an_empty_token_is_no_token(handler: Handler) -> None:
    with pytest.raises(ConfigError, match="token"):
        ControlServer("0.0.0.0:0", handler, "")


def test_the_wildcard_with_a_token(handler: Handler) -> None:
    with serve(handler, "t", "0.0.0.0:0") as server:
        port = server.url.rsplit(":", 1)[1]
        with client_of(f"127.0.0.1:{port}", "t") as client:
            assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}


def test_a_port_in_use_is_said(handler: Handler) -> None:
    with serve(handler) as server:
        address = server.url.removeprefix("http://")
        with pytest.raises(ConfigError, match=rf"cannot listen on {address}.*another port, or 0"):
            ControlServer(address, handler, None)
        with client_of(server.url) as client:
            assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}


@pytest.mark.parametrize("shown", [None, "wrong", "secret ", "", "sécret"])
def test_a_wrong_token_is_refused_before_the_body_is_read(
    handler: Handler, shown: str | None
) -> None:
    headers = (
        {}
        if shown is None
        else {"Authorization": f"Bearer {shown}".encode("latin-1").decode("latin-1")}
    )
    with serve(handler, "secret") as server:
        status, answer = post(server, "status", b"this is not JSON", headers)
        assert (status, answer["error"]) == (401, "AuthError")
        given = shown if shown and shown.isascii() else None
        with client_of(server.url, given) as client, pytest.raises(AuthError, match="give token"):
            client.call(STATUS, limit_s=LIMIT_S)
        assert post(server, "status", b"", {"Authorization": "Bearer secret"}) == (
            200,
            {"ok": True},
        )
    assert handler.requests == [STATUS]


BODIES = {
    "no JSON": b"hello",
    "raw bytes": bytes(range(256)),
    "doubly encoded": json.dumps(json.dumps(encode(STATUS))).encode(),
    "a list": b"[]",
    "empty": b"",
    "no protocol": b'{"session_id": null}',
    "another field": json.dumps({**encode(STATUS), "x": 1}).encode(),
    "deep": b"[" * 100_000,
    "not a number": b'{"protocol": 1, "run_id": "r", "lease_s": NaN}',
    "a huge number": b'{"protocol": 1, "session_id": ' + b"9" * 10_000 + b"}",
    "utf-16": json.dumps(encode(STATUS)).encode("utf-16-le")[:-1],
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("verb", ["heartbeat", "connect"])
def test_a_body_in_a_wrong_form_is_a_400(kind: str, verb: str, handler: Handler) -> None:
    with serve(handler) as server:
        status, answer = post(server, verb, BODIES[kind])
        assert (status, answer["error"]) == (400, "ProtocolError"), answer
    assert handler.requests == []


@pytest.mark.parametrize(
    "verb", ["", "Commit", "commit/", "../status", "release_memory", "status?x=1"]
)
def test_an_unknown_endpoint_lists_those_there_are(verb: str, handler: Handler) -> None:
    with serve(handler) as server:
        status, answer = post(server, verb, b"{}")
        assert status in (400, 404)
        assert "heartbeat" in answer["message"]
    assert handler.requests == []


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH"])
def test_another_method_is_not_implemented(method: str, handler: Handler) -> None:
    with serve(handler) as server:
        answer = raw(server, f"{method} {PATH_PREFIX}status HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        assert b" 501 " in answer.split(b"\r\n")[0]
    assert handler.requests == []


class Bomb:
    """Unpickling one writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_a_pickled_body_does_nothing(handler: Handler, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    body = pickle.dumps(Bomb(marker))
    pickle.loads(body)
    assert marker.exists()
    marker.unlink()
    with serve(handler) as server:
        for verb in ("plan", "move", "status", "nothing"):
            assert post(server, verb, body)[0] == 400
    assert not marker.exists()
    assert handler.requests == []


@pytest.mark.parametrize("length", ["100", "1000000000000", "9" * 5000])
def test_a_body_above_the_limit_is_not_read(
    length: str, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_BODY_BYTES", 99)
    with serve(handler) as server:
        head = f"POST {PATH_PREFIX}plan HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n"
        answer = raw(server, head.encode())
        assert b" 413 " in answer.split(b"\r\n")[0]
        assert b"limit of 99 B" in answer
        assert length[:20].encode() in answer
    assert handler.requests == []


@pytest.mark.parametrize("length", ["-1", "x", "", "1.5", "\u00b2", "0x10"])
def test_a_length_that_cannot_be_is_a_400(length: str, handler: Handler) -> None:
    with serve(handler) as server:
        head = f"POST {PATH_PREFIX}status HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n"
        assert b" 400 " in raw(server, head.encode("latin-1")).split(b"\r\n")[0]


def test_our_own_client_does_not_send_what_is_too_large(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_BODY_BYTES", 2000)
    with serve(handler) as server, client_of(server.url) as client:
        with pytest.raises(TooLargeError, match=r"30\d\d B .*limit of 2000 B"):
            client.call(PlanRequest("r", {"x": "y" * 2950}, {}), limit_s=LIMIT_S)
        assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}


@pytest.mark.parametrize(
    "noise",
    [b"\x00" * 100, bytes(range(256)) * 10, b"GET\r\n\r\n", b"\x80\x04\x95 pickle", b"A" * 70_000],
)
def test_noise_does_not_reach_the_handler(noise: bytes, handler: Handler) -> None:
    with serve(handler) as server:
        with suppress(ConnectionError):  # closed on us while we sent: as good
            raw(server, noise)
        with client_of(server.url) as client:
            assert client.call(STATUS, limit_s=LIMIT_S) == {"ok": True}
    assert handler.requests == [STATUS]


def test_a_body_that_ends_early_is_refused(handler: Handler) -> None:
    body = json.dumps(encode(STATUS)).encode()
    with serve(handler) as server:
        head = f"POST {PATH_PREFIX}status HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body) + 9}\r\n\r\n"
        assert b" 400 " in raw(server, head.encode() + body).split(b"\r\n")[0]
    assert handler.requests == []


def test_a_closed_server_answers_no_connection_that_is_still_open(handler: Handler) -> None:
    with serve(handler) as server:
        client = HttpClient(server.url, None)
        client.call(STATUS, limit_s=LIMIT_S)
    with pytest.raises(PeerLostError):
        client.call(STATUS, limit_s=LIMIT_S)
    client.close()
    assert len(handler.requests) == 1


def test_a_closed_client_opens_nothing(handler: Handler) -> None:
    with serve(handler) as server:
        client = HttpClient(server.url, None)
        client.close()
        client.close()
        with pytest.raises(PeerLostError, match="closed"):
            client.call(STATUS, limit_s=LIMIT_S)
    assert handler.requests == []
