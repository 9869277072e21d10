"""Strangers at the door of a real engine: nothing runs, nothing changes, nothing is kept busy."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from updating import LIMIT_S, OPTIONS, connected, digests, engine_of, refit, weights

from weightsync import control
from weightsync.control import PATH_PREFIX, HttpClient
from weightsync.errors import (
    AuthError,
    BusyError,
    ConfigError,
    ProtocolError,
    SessionError,
    WeightSyncError,
)
from weightsync.messages import (
    VERBS,
    AbortRequest,
    BeginRequest,
    CloseRequest,
    CommitRequest,
    ConnectRequest,
    MoveRequest,
    PlanRequest,
    PrepareRequest,
    StatusRequest,
)
from weightsync.receiver import Receiver
from weightsync.sender import Sender


def post(url: str, verb: str, body: bytes, token: str | None = None) -> tuple[int, Any]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request("POST", PATH_PREFIX + verb, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def listening() -> set[str]:
    """Local addresses of this process's listening TCP sockets, as the kernel lists them."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(columns[1].split(":")[0])
    return found


def test_by_default_only_loopback_listens() -> None:
    before = listening()
    with connected(engine_of()) as (sender, _):
        refit(sender, 1, weights(1))
        assert listening() - before <= {"0100007F"}
        assert listening()


def test_elsewhere_a_token_is_needed_and_the_environment_may_give_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        Receiver(engine_of(), listen="0.0.0.0:0").start()
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "from the environment")
    with Receiver(engine_of(), listen="0.0.0.0:0") as receiver:
        url = f"http://127.0.0.1:{receiver.url.rsplit(':', 1)[1]}"
        with Sender.connect([url], **OPTIONS) as sender:
            refit(sender, 1, weights(1))
        with pytest.raises(AuthError):
            Sender.connect([url], token="another", **OPTIONS)


def test_without_the_token_no_verb_does_anything() -> None:
    engine = engine_of(0)
    with Receiver(engine, token="secret") as receiver:
        for verb in VERBS:
            for token in (None, "", "Secret", "secret0"):
                assert post(receiver.url, verb, b"{}", token)[0] == 401
        with Sender.connect([receiver.url], token="secret", **OPTIONS) as sender:
            refit(sender, 1, weights(1))
            for verb in VERBS:
                assert post(receiver.url, verb, b"{}")[0] == 401
            refit(sender, 2, weights(2))
        assert engine.generate() == (2, digests(weights(2)))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_pickles_and_noise_leave_no_trace(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bodies = [pickle.dumps(Bomb(marker), protocol=p) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
    bodies += [b"", b"\x00" * 1000, os.urandom(5000), b"null", b'"text"']
    engine = engine_of(0)
    with connected(engine) as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        for body in bodies:
            for verb in VERBS:
                if verb == "status" and not body:
                    continue
                status, answer = post(receiver.url, verb, body)
                assert (status, answer["error"]) == (400, "ProtocolError")
        address = ("127.0.0.1", int(receiver.url.rsplit(":", 1)[1]))
        for body in bodies:
            with socket.create_connection(address, timeout=LIMIT_S) as connection:
                connection.sendall(body)
        assert not marker.exists()
        assert engine.generate() == (1, digests(weights(1)))
        refit(sender, 2, weights(2))


def test_a_huge_request_is_refused_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_BODY_BYTES", 20_000)
    with connected(engine_of()) as (sender, (receiver,)):
        status, answer = post(receiver.url, "plan", b"x" * 20_001)
        assert (status, answer["error"]) == (413, "TooLargeError")
        for number in ("20001", "20000"):
            assert number in answer["message"]
        refit(sender, 1, weights(1))


def begin_request(run_id: str, epoch: str, **changes: Any) -> BeginRequest:
    fields: dict[str, Any] = {
        "run_id": run_id, "epoch": epoch, "session_id": "stranger", "version": 5, "scope": None,
        "placement": "staged", "verify": "read_back", "pause_mode": "retract", "deadline_s": 5.0,
        "commit_timeout_s": 5.0, "wait_s": 5.0,
    }  # fmt: skip
    return BeginRequest(**{**fields, **changes})


def test_requests_out_of_turn_are_refused_one_by_one() -> None:
    engine = engine_of(0)
    with connected(engine, run_id="mine") as (sender, (receiver,)):
        refit(sender, 1, weights(1))
        client = HttpClient(receiver.url, None)

        def call(request: Any) -> Any:
            return client.call(request, limit_s=LIMIT_S)

        epoch = call(StatusRequest(None))["epoch"]
        refused: list[tuple[Any, type]] = [
            (MoveRequest("none", 0, "d", [[0, 0, "e", None]], 1.0), SessionError),
            (MoveRequest("none", 0, "d", [[0, 1, "e", None]], 1.0), ProtocolError),
            (MoveRequest("none", 0, "d", ["x"], 1.0), ProtocolError),
            (PrepareRequest("none", [{}], 1.0), SessionError),
            (PrepareRequest("none", [{}, {}], 1.0), ProtocolError),
            (CommitRequest("none", 1.0), SessionError),
            (AbortRequest("none", "why", 1.0), SessionError),
            (ConnectRequest("stranger", 5.0), BusyError),
            (PlanRequest("stranger", {}, {}), BusyError),
            (begin_request("stranger", epoch), BusyError),
            (begin_request("mine", "another life"), SessionError),
            (begin_request("mine", epoch, version=1), SessionError),
            (begin_request("mine", epoch, placement="sideways"), WeightSyncError),
            (begin_request("mine", epoch, deadline_s=-1.0), WeightSyncError),
            (PlanRequest("mine", {}, {}), WeightSyncError),
            (PlanRequest("mine", {"tensors": 3}, {"world_size": 10**9}), WeightSyncError),
        ]
        for request, kind in refused:
            with pytest.raises(kind):
                call(request)
        assert call(CloseRequest("stranger", 1.0)) == {"closed": "stranger"}
        client.close()
        assert engine.generate() == (1, digests(weights(1)))
        refit(sender, 2, weights(2))


def test_steps_of_a_session_in_a_wrong_order_are_refused() -> None:
    engine = engine_of(0)
    with connected(engine, run_id="mine") as (sender, (receiver,)):
        client = HttpClient(receiver.url, None)

        def call(request: Any) -> Any:
            return client.call(request, limit_s=LIMIT_S)

        epoch = call(StatusRequest(None))["epoch"]
        begin = begin_request("mine", epoch)
        assert call(begin) == {"phase": "open"}
        assert call(begin) == {"phase": "open"}, "asked again, it is the same session"
        with pytest.raises(SessionError, match="cannot commit while session 'stranger' is 'open'"):
            call(CommitRequest("stranger", 1.0))
        with pytest.raises(BusyError, match="session 'stranger' of version 5 is open"):
            call(begin_request("mine", epoch, session_id="second"))
        with pytest.raises(WeightSyncError, match="never handed over"):
            call(MoveRequest("stranger", 0, "no such plan", [], 5.0))
        with pytest.raises(SessionError, match="ended: aborted"):
            call(CommitRequest("stranger", 1.0))
        client.close()
        assert engine.generate() == (None, digests(weights(0)))
        refit(sender, 1, weights(1))


@pytest.mark.parametrize(
    "manifest",
    [{}, {"plans": [], "digests": "", "root": "0"}, {"plans": None}, {"plans": [], "digests": 5}],
)
def test_a_manifest_that_does_not_fit_ends_the_session_only(manifest: Any) -> None:
    engine = engine_of(0)
    with connected(engine, run_id="mine") as (sender, (receiver,)):
        client = HttpClient(receiver.url, None)
        epoch = client.call(StatusRequest(None), limit_s=LIMIT_S)["epoch"]
        client.call(begin_request("mine", epoch), limit_s=LIMIT_S)
        with pytest.raises(WeightSyncError):
            client.call(PrepareRequest("stranger", [manifest], 5.0), limit_s=LIMIT_S)
        client.close()
        refit(sender, 1, weights(1))


@pytest.mark.parametrize("wait_s", [1e300, 1e9, -5.0])
def test_a_wait_of_any_length_is_bounded(wait_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.receiver.MAX_WAIT_S", 0.05)
    gate = threading.Event()
    engine = engine_of(0)
    pause = engine.pause

    def slow(*args: Any) -> None:
        assert gate.wait(LIMIT_S)
        pause(*args)

    engine.pause = slow  # type: ignore[method-assign]
    with connected(engine, run_id="mine") as (_, (receiver,)):
        client = HttpClient(receiver.url, None)
        epoch = client.call(StatusRequest(None), limit_s=LIMIT_S)["epoch"]
        begin = begin_request("mine", epoch, placement="in_place", wait_s=wait_s)
        assert client.call(begin, limit_s=LIMIT_S)["pending"] is True
        until_s = time.monotonic() + LIMIT_S
        while client.call(StatusRequest(None), limit_s=LIMIT_S)["phase"] != "opening":
            assert time.monotonic() < until_s, "status needs no lock"  # a wait of 0 answers first
        answer = client.call(AbortRequest("stranger", "enough", 0.05), limit_s=LIMIT_S)
        gate.set()
        while answer.get("pending"):
            answer = client.call(AbortRequest("stranger", "enough", 0.05), limit_s=LIMIT_S)
        assert answer["outcome"] == "aborted"
        client.close()
        assert engine.generate() == (None, digests(weights(0)))


def test_a_run_id_of_anything_is_only_a_name() -> None:
    for run_id in ("", "../../etc", "a\nb", "x" * 10_000, "\u0000"):
        with connected(engine_of(), run_id=run_id) as (sender, _):
            refit(sender, 1, weights(1))


@pytest.mark.parametrize("token", ["a\nb", "s\u00e9cret", "\u0000"])
def test_a_token_that_cannot_travel_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        Sender.connect(["http://127.0.0.1:1"], token=token, **OPTIONS)
