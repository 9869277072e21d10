"""The NCCL group without a GPU: a library that does what it is told stands in for NCCL's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from transports.wire import LIMIT_S, SHORT_S, deadline
from weightsync import native
from weightsync.errors import DeadlineError, MissingDependencyError, PeerLostError, TransportError
from weightsync.transports import collective_nccl, nccl_binding
from weightsync.transports.collective import Seat
from weightsync.transports.collective_nccl import make_nccl

ID = bytes(range(128))
IN_PROGRESS, INVALID_USAGE, REMOTE = 7, 5, 6


class FakeNccl:
    """Answers of the library; ``states`` are taken one by one, and the last one stays."""

    def __init__(self) -> None:
        self.init_code = IN_PROGRESS
        self.states = [0]
        self.broadcasts: list[tuple[int, int, int]] = []
        self.aborted: list[int] = []
        self.ids: list[bytes] = []

    def ncclGetVersion(self, found: Any) -> int:
        found._obj.value = 22809
        return 0

    def ncclGetErrorString(self, code: int) -> bytes:
        return f"error {code}".encode()

    def ncclGetLastError(self, communicator: Any) -> bytes:
        return b"Duplicate GPU detected"

    def ncclCommInitRankConfig(
        self, handle: Any, size: int, name: Any, rank: int, config: Any
    ) -> int:
        handle._obj.value = 4096
        self.ids.append(bytes(name))
        wanted = config._obj
        assert (wanted.size, wanted.magic, wanted.blocking) == (48, 0xCAFEBEEF, 0)
        return self.init_code

    def ncclCommGetAsyncError(self, handle: Any, state: Any) -> int:
        state._obj.value = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return 0

    def ncclBroadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, comm: Any, stream: int
    ) -> int:
        assert (source, dtype, root) == (target, 1, 0)
        self.broadcasts.append((source, count, stream))
        return IN_PROGRESS

    def ncclCommAbort(self, handle: Any) -> int:
        self.aborted.append(handle.value)
        return 0


class FakeEvents:
    """A device whose events pass when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = False
        self.created: list[int] = []
        self.destroyed: list[int] = []
        monkeypatch.setattr(native, "has_cuda", lambda: True)
        monkeypatch.setattr(collective_nccl, "stream_of", lambda *_, **__: 77)
        for name, function in {
            "cuda_use_device": lambda device: None,
            "cuda_create_event": self._create,
            "cuda_record_event": lambda event, stream, device: None,
            "cuda_event_passed": lambda event, device: self.passed,
            "cuda_destroy_event": lambda event, device: self.destroyed.append(event),
        }.items():
            monkeypatch.setattr(native.extension, name, function)

    def _create(self, device: int) -> int:
        self.created.append(len(self.created) + 1)
        return self.created[-1]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    made = FakeNccl()
    monkeypatch.setattr(nccl_binding, "load", lambda: made)
    return made


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> FakeEvents:
    return FakeEvents(monkeypatch)


def nothing() -> None:
    """All is well elsewhere."""


def make(check: Callable[[], None] = nothing, limit_s: float = LIMIT_S) -> Any:
    return make_nccl(Seat(1, 2), ID, "cuda:1", deadline(limit_s, "join"), check)


def test_the_library_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> Any:
        raise OSError(path)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    nccl_binding.load.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"nvidia-nccl.*'ipc'.*'p2p'"):
        nccl_binding.load()
    nccl_binding.load.cache_clear()


def test_a_broadcast(nccl: FakeNccl, events: FakeEvents) -> None:
    nccl.states = [IN_PROGRESS, IN_PROGRESS, 0]
    group = make()
    assert (group.name, nccl.ids) == ("NCCL 2.28.9", [ID])
    for _ in range(3):
        events.passed = False
        nccl.states = [IN_PROGRESS, 0]
        pending = group.broadcast(1024, 256)
        assert pending.wait(SHORT_S) is False
        events.passed = True
        assert pending.wait(SHORT_S) is True
        assert pending.wait(SHORT_S) is True
    assert nccl.broadcasts == [(1024, 256, 77)] * 3
    assert events.created == [1]  # one, used again
    group.abort()
    group.abort()
    assert (nccl.aborted, events.destroyed) == ([4096], [1])
    with pytest.raises(TransportError, match="ended here"):
        group.broadcast(1024, 256)


def test_two_on_one_gpu_are_told_what_to_use(nccl: FakeNccl, events: FakeEvents) -> None:
    nccl.states = [IN_PROGRESS, INVALID_USAGE]
    with pytest.raises(TransportError, match=r"Duplicate GPU.*use transport='ipc'"):
        make()
    assert nccl.aborted == [4096]


def test_a_member_that_does_not_come(nccl: FakeNccl, events: FakeEvents) -> None:
    nccl.states = [IN_PROGRESS]
    with pytest.raises(DeadlineError, match="join"):
        make(limit_s=SHORT_S)
    assert nccl.aborted == [4096]


def test_a_member_that_is_lost_meanwhile(nccl: FakeNccl, events: FakeEvents) -> None:
    nccl.states = [IN_PROGRESS]

    def check() -> None:
        raise PeerLostError("gone")

    with pytest.raises(PeerLostError, match="gone"):
        make(check)
    assert nccl.aborted == [4096]


def test_a_member_that_dies_in_a_broadcast(nccl: FakeNccl, events: FakeEvents) -> None:
    group = make()
    pending = group.broadcast(1024, 256)
    nccl.states = [REMOTE]
    with pytest.raises(TransportError, match="error 6"):
        pending.wait(LIMIT_S)


def test_abort_ends_a_wait(nccl: FakeNccl, events: FakeEvents) -> None:
    """The kernel of an aborted group ends, and its broadcast has not been done for that."""
    group = make()
    pending = group.broadcast(1024, 256)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            pending.wait(LIMIT_S)
        except TransportError as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    group.abort()
    events.passed = True
    waiting.join(LIMIT_S)
    assert "ended here" in str(found[0])


def test_groups_have_streams_of_their_own(
    nccl: FakeNccl, events: FakeEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes: list[int] = []
    monkeypatch.setattr(
        collective_nccl, "stream_of", lambda index, lane, priority: lanes.append(lane) or lane
    )
    first, second = make(), make()
    first.abort()
    third = make()
    assert lanes[0] != lanes[1]
    assert lanes[2] == lanes[0]
    for group in (second, third):
        group.abort()
