"""The control channel: HTTP and JSON between processes, or direct calls within one.

Only rank 0 of an engine listens: on the loopback interface, or elsewhere with a token. Bodies are
bounded, everything is JSON, nothing is ever unpickled, and every call has a limit whose error names
peer, stage and elapsed time.
"""

from __future__ import annotations

import hmac
import http.client
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

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
    from_wire,
    to_wire,
)
from weightsync.http_wire import (
    read_headers,
    read_response,
    request_bytes,
    response_bytes,
    wait_awake,
)
from weightsync.messages import (
    VERBS,
    Request,
    Stage,
    StagesRequest,
    StatusRequest,
    decode,
    encode,
    encode_stage,
    name_of,
    request_json,
    to_json,
    verb_of,
)

PATH_PREFIX = "/weightsync/v1/"
MAX_BODY_BYTES = 256 * 2**20
#: The longest that one HTTP exchange waits for a stage; longer stages are asked for again.
POLL_S = 5.0
#: What an exchange may take beyond the wait it asked for.
_GRACE_S = 5.0
_IDLE_LIMIT_S = 120.0

#: Called by server threads with a decoded request; returns JSON or raises.
Handler = Callable[[Request], Mapping[str, Any]]


class ControlClient(Protocol):
    """One engine's control end, as a trainer sees it."""

    @property
    def peer(self) -> str:
        """The engine's name in errors."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether a call goes to another process, so that two at once are quicker than one by one."""
        ...

    def call(
        self, request: Request, *, limit_s: float, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Send and wait for the answer. Raises the engine's error, :class:`DeadlineError` or
        :class:`PeerLostError`. ``{"pending": true}`` in an answer: ask again. ``meanwhile`` is called once
        the request was sent; what it raises is raised."""
        ...

    def aside(self) -> ControlClient:
        """For calls while one of this thread is under way; closed with this one."""
        ...

    def close(self) -> None: ...


class LocalClient:
    """Direct calls to a receiver of this process."""

    is_remote = False

    def __init__(self, handler: Handler, peer: str = "engine in this process") -> None:
        self._handler = handler
        self.peer = peer

    def call(
        self, request: Request, *, limit_s: float, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        if meanwhile is not None:
            meanwhile()
        return dict(self._handler(request))

    def aside(self) -> LocalClient:
        return self

    def close(self) -> None:
        return None


class HttpClient:
    """A keep-alive HTTP connection to an engine. One thread at a time uses a connection; calls from
    several threads each get their own."""

    is_remote = True

    def __init__(self, url: str, token: str | None) -> None:
        self._url, (self._host, self._port) = url, _host_and_port(url)
        self.peer = f"engine {self._host}:{self._port}"
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ConfigError("a token is printable ASCII: it travels in a header")
        self._token = token
        self._local = threading.local()
        self._all: set[socket.socket] = set()
        self._took_s: dict[str, float] = {}  # the last exchange of each kind
        self._lock = threading.Lock()  # close() comes from another thread than a heartbeat
        self._is_closed = False
        self._aside: HttpClient | None = None

    def aside(self) -> HttpClient:
        with self._lock:
            if self._is_closed:
                raise PeerLostError(self.peer, "this client is closed")
            if self._aside is None:
                self._aside = HttpClient(self._url, self._token)
            return self._aside

    def call(
        self, request: Request, *, limit_s: float, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        verb = verb_of(request)
        body = request_json(request).encode()
        if len(body) > MAX_BODY_BYTES:
            raise TooLargeError(f"{self.peer}: {name_of(request)}: {_too_large(len(body))}")
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        start_s, name = time.monotonic(), name_of(request)
        try:
            usual_s = self._took_s.get(name, 0.0)
            exchange = (verb, body, headers, max(limit_s, 1e-3), usual_s)
            status, answer = self._exchange(*exchange, meanwhile)
            self._took_s[name] = time.monotonic() - start_s
        except TimeoutError as error:
            self._drop()
            elapsed_s = time.monotonic() - start_s
            raise DeadlineError(self.peer, name_of(request), limit_s, elapsed_s) from error
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            elapsed_s = time.monotonic() - start_s
            raise PeerLostError(
                f"{self.peer}: lost in stage {name_of(request)!r} after {elapsed_s:.1f} s "
                f"({type(error).__name__}: {error}); is the engine running and listening there?"
            ) from error
        except BaseException:  # interrupted: the answer that is still to come is nobody's
            self._drop()
            raise
        return _parse_answer(status, answer, self.peer)

    def _exchange(
        self,
        verb: str,
        body: bytes,
        headers: Mapping[str, str],
        limit_s: float,
        usual_s: float,
        meanwhile: Callable[[], None] | None,
    ) -> tuple[int, bytes]:
        until_s = time.monotonic() + limit_s
        sock: socket.socket | None = getattr(self._local, "sock", None)
        if sock is not None and not _is_alive(sock):
            self._drop()  # the server ends a connection that was silent for long
            sock = None
        if sock is None:
            sock = self._connect(limit_s)
        sock.settimeout(limit_s)
        sock.sendall(request_bytes(self._host, PATH_PREFIX + verb, headers, body))
        if meanwhile is not None:
            sent_s = time.monotonic()
            meanwhile()
            usual_s -= time.monotonic() - sent_s
        status, answer, is_last = read_response(sock, until_s, MAX_BODY_BYTES, usual_s)
        if is_last:
            self._drop()
        return status, answer

    def _connect(self, limit_s: float) -> socket.socket:
        sock = socket.create_connection((self._host, self._port), timeout=limit_s)
        try:
            if sock.getsockname() == sock.getpeername():
                # Nobody listens on that port yet, and the kernel gave it to us as our own end.
                raise ConnectionRefusedError(f"nothing listens on port {self._port}")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._is_closed:
                    raise ConnectionError("this client is closed")
                self._all.add(sock)
        except BaseException:  # also where the other end went in this moment: it has no name then
            sock.close()
            raise
        self._local.sock = sock
        return sock

    def _drop(self) -> None:
        sock = getattr(self._local, "sock", None)
        if sock is not None:
            sock.close()
            with self._lock:
                self._all.discard(sock)
            self._local.sock = None

    def close(self) -> None:
        """End every connection, also those that another thread waits on. Idempotent."""
        with self._lock:
            self._is_closed = True
            sockets, self._all = self._all, set()
            aside, self._aside = self._aside, None
        if aside is not None:
            aside.close()
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _is_alive(sock: socket.socket) -> bool:
    """Whether the other end of an idle connection has neither closed it nor said anything."""
    try:
        sock.settimeout(0)
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _host_and_port(url: str) -> tuple[str, int]:
    with suppress(ValueError):  # a port that is no number, or too large
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme == "http" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise ConfigError(f"engine address {url!r}: expected http://HOST:PORT")


def _too_large(num_bytes: int | str) -> str:
    return (
        f"a body of {num_bytes} B is above the limit of {MAX_BODY_BYTES} B; control messages carry "
        "metadata only"
    )


def _parse_answer(status: int, body: bytes, peer: str) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise ProtocolError(
            f"{peer}: answered status {status} without JSON; is something else listening there?"
        ) from error
    if status != HTTPStatus.OK:
        raise from_wire(answer)
    if not isinstance(answer, dict):
        raise ProtocolError(f"{peer}: an answer must be an object, got {type(answer).__name__}")
    return answer


def wait_for(
    client: ControlClient,
    make_request: Callable[[float], Request],
    *,
    limit_s: float,
    stage: str,
) -> dict[str, Any]:
    """Ask for a stage until it is over. ``make_request`` takes the seconds that the engine may wait.

    The same request may be sent any number of times: the engine attaches it to the running stage. So
    an exchange that runs out is made again, until ``limit_s``.
    """
    answer: dict[str, Any] = {}

    def take(found: dict[str, Any]) -> bool:
        answer.clear()
        answer.update(found)
        return bool(found.get("pending"))

    _ask_until(client, make_request, take, limit_s, stage)
    return answer


def _ask_until(
    client: ControlClient,
    make_request: Callable[[float], Request],
    take: Callable[[dict[str, Any]], bool],
    limit_s: float,
    stage: str,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Ask while ``take`` says of the answer that something is pending. ``meanwhile``: see
    :meth:`ControlClient.call`; the first time only."""
    start_s = time.monotonic()
    first: dict[str, Any] = {} if meanwhile is None else {"meanwhile": meanwhile}
    while True:
        left_s = limit_s - (time.monotonic() - start_s)
        if left_s <= 0:
            raise DeadlineError(client.peer, stage, limit_s, time.monotonic() - start_s)
        wait_s = min(POLL_S, left_s)
        try:
            request, call_s = make_request(wait_s), min(left_s + 0.5, wait_s + _GRACE_S)
            once, first = first, {}
            answer = client.call(request, limit_s=call_s, **once)
        except DeadlineError as error:
            if error.__cause__ is None:
                raise  # not the exchange ran out, but something at the engine, which says so
            continue
        if not take(answer):
            return


def wait_for_stages(
    client: ControlClient,
    makers: Sequence[Callable[[float], Stage]],
    *,
    limit_s: float,
    stage: str,
    meanwhile: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """The same for several stages that are asked for together: the answer of each."""
    answers: list[dict[str, Any]] = []

    def ask(wait_s: float) -> StagesRequest:
        left = makers[len(answers) :]
        return StagesRequest([encode_stage(make(wait_s)) for make in left], wait_s)

    def take(answer: dict[str, Any]) -> bool:
        found = answer.get("answers")
        is_pending = bool(answer.get("pending"))
        if not isinstance(found, list) or not all(isinstance(a, dict) for a in found):
            raise ProtocolError(f"{client.peer}: malformed answer to {stage!r}")
        answers.extend(found)
        if len(answers) > len(makers) or (len(answers) < len(makers)) is not is_pending:
            raise ProtocolError(
                f"{client.peer}: {len(answers)} of {len(makers)} stages were answered to {stage!r}"
            )
        return is_pending

    _ask_until(client, ask, take, limit_s, stage, meanwhile)
    return answers


# --- server ---------------------------------------------------------------------------------------

_STATUS: tuple[tuple[type[WeightSyncError], HTTPStatus], ...] = (
    (AuthError, HTTPStatus.UNAUTHORIZED),
    (TooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (ProtocolError, HTTPStatus.BAD_REQUEST),
    (LayoutError, HTTPStatus.BAD_REQUEST),
    (ConfigError, HTTPStatus.BAD_REQUEST),
    (BusyError, HTTPStatus.CONFLICT),
    (SessionError, HTTPStatus.CONFLICT),
)


class ControlServer:
    """Serves one handler over HTTP; each connection has its own thread.

    Raises :class:`ConfigError` for an address that is not loopback without a token, and for a port
    that is in use.
    """

    def __init__(self, listen: str, handler: Handler, token: str | None) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise ConfigError(
                f"listen address {listen!r}: expected HOST:PORT (port 0: any free one)"
            )
        token = token or None  # an empty one keeps nobody out
        if token is None and not _is_loopback(host):
            raise ConfigError(
                f"listening on {host!r}, which others can reach, needs a token (token=... on both "
                "sides, or WEIGHTSYNC_TOKEN)"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET

        connections = self._connections = _Connections()

        class Server(ThreadingHTTPServer):
            address_family = family
            daemon_threads = True
            # A restarted engine takes its port again at once; two live ones never share it.
            allow_reuse_address = True

            def process_request(self, request: Any, client_address: Any) -> None:
                connections.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                connections.discard(request)
                super().shutdown_request(request)

            def handle_error(self, request: Any, client_address: Any) -> None:
                return None  # a peer that went away; its request was answered or is void

        try:
            self._server = Server((host, int(port)), _handler_class(handler, token))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen}: {error}; choose another port, or 0 for any free one"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True,
            name="weightsync-control",
        )  # fmt: skip
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        name = str(host)
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._connections.close()
        self._thread.join(timeout=5.0)


class _Connections:
    """The open connections of a server, to be ended with it."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)

    def discard(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)

    def close(self) -> None:
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # its thread sees the end and closes it
                    connection.shutdown(socket.SHUT_RDWR)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _handler_class(handler: Handler, token: str | None) -> type[BaseHTTPRequestHandler]:
    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_LIMIT_S
        disable_nagle_algorithm = True
        wbufsize = -1  # one segment an answer

        raw_requestline: bytes

        def handle_one_request(self) -> None:
            with suppress(OSError):  # what is wrong with the connection, reading it will say
                wait_awake(self.connection)
            super().handle_one_request()

        def parse_request(self) -> bool:
            words = self.raw_requestline.split()
            if len(words) != 3 or words[2] != b"HTTP/1.1":
                return super().parse_request()  # which knows what to say
            self.requestline = self.raw_requestline.decode("latin-1").rstrip("\r\n")
            self.command, self.path, self.request_version = self.requestline.split()
            try:
                headers = read_headers(self.rfile)
            except http.client.HTTPException as error:
                self.close_connection = True
                self.send_error(HTTPStatus.BAD_REQUEST, str(error))
                return False
            self.headers: Any = headers
            self.close_connection = headers.get("connection", "").lower() == "close"
            if headers.get("expect", "").lower() == "100-continue":
                return self.handle_expect_100()
            return True

        def do_POST(self) -> None:
            self._reply(self._request)

        def do_GET(self) -> None:
            if self.path != PATH_PREFIX + "status":
                self.close_connection = True
                self._send(HTTPStatus.NOT_FOUND, to_wire(_unknown_verb(self.path)))
                return
            self.close_connection |= "Content-Length" in self.headers  # a body that is not read
            self._reply(self._status_request)

        def _reply(self, make_request: Callable[[], Request]) -> None:
            try:
                answer = dict(handler(make_request()))
                status = HTTPStatus.OK
            except WeightSyncError as error:
                answer, status = to_wire(error), _status_of(error)
            except Exception as error:  # the border: a fault of ours must reach the caller as JSON
                answer, status = to_wire(error), HTTPStatus.INTERNAL_SERVER_ERROR
            self._send(status, answer)

        def _status_request(self) -> Request:
            self._check_token()
            return StatusRequest(None)

        def _check_token(self) -> None:
            if token is not None:
                shown = self.headers.get("Authorization", "")
                if not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
                    self.close_connection = True  # its body is not read
                    raise AuthError("no token or a wrong one; give token=... on both sides")

        def _request(self) -> Request:
            self._check_token()
            verb = self.path.removeprefix(PATH_PREFIX)
            if not self.path.startswith(PATH_PREFIX) or verb not in VERBS:
                self.close_connection = True
                raise _unknown_verb(self.path)
            return decode(VERBS[verb], self._body(verb))

        def _body(self, verb: str) -> Any:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                self.close_connection = True
                raise ProtocolError("a request needs a Content-Length")
            if len(length) > 20 or int(length) > MAX_BODY_BYTES:
                self.close_connection = True
                raise TooLargeError(_too_large(length[:24]))
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                self.close_connection = True
                raise ProtocolError(f"the body ended after {len(body)} of {length} B")
            if verb == "status" and not body:
                return encode(StatusRequest(None))
            try:
                return _from_json(body.decode())
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"the body is not JSON: {error}") from error

        def _send(self, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
            body = to_json(answer).encode()
            is_last = self.close_connection
            self.wfile.write(response_bytes(status.value, status.phrase, body, is_last=is_last))

        def finish(self) -> None:
            with suppress(OSError):  # an answer for a peer that went away
                super().finish()
            self.rfile.close()  # else the connection's descriptor stays

        def log_message(self, format: str, *args: Any) -> None:
            return None

    return Exchange


def _status_of(error: WeightSyncError) -> HTTPStatus:
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


_from_json: Final = json.JSONDecoder(parse_constant=_no_constant).decode


def _unknown_verb(path: str) -> ProtocolError:
    return ProtocolError(f"no such endpoint {path!r}; known: {PATH_PREFIX}{{{','.join(VERBS)}}}")
