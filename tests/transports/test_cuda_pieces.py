"""Pieces of device memory as file descriptors: closed at once, claimed once, never kept too long."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from processes import open_fds

from transports.wire import LIMIT_S, deadline
from weightsync import native
from weightsync.errors import (
    PeerLostError,
    ProtocolError,
    TransportError,
    UnavailableError,
)
from weightsync.transports.channel import Channel, Listener, connect
from weightsync.transports.cuda_allocations import Allocation
from weightsync.transports.cuda_pieces import PIECES_KIND, PieceBoard, send_pieces
from weightsync.transports.frames import MAX_FDS
from weightsync.transports.ipc_cuda import CudaPath
from weightsync.types import RegionAddress

UUID = "ab" * 16


class FakePieces:
    """A CUDA whose pieces are pipes; knows which handles live and what is mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handles: set[int] = set()
        self.mapped: dict[int, tuple[list[int], list[int]]] = {}
        self.refuses: str | None = None
        self.shown = 1  # the device that pieces are imported for
        self._next = 2**40
        monkeypatch.setattr(native, "has_cuda", lambda: True)
        uuids = {0: bytes(16), 1: bytes.fromhex(UUID)}
        for name, function in {
            "cuda_num_devices": lambda: 2,
            "cuda_device_uuid": uuids.__getitem__,
            "cuda_export_fd": lambda base, device: os.memfd_create("piece"),
            "cuda_import_fd": self._import,
            "cuda_release_handle": self._release,
            "cuda_map_handles": self._map,
            "cuda_unmap_handles": self._unmap,
        }.items():
            monkeypatch.setattr(native.extension, name, function)

    def _import(self, fd: int, device: int) -> int:
        assert device == self.shown
        assert os.fstat(fd)
        self._fail()
        self._next += 1
        self.handles.add(self._next)
        return self._next

    def _release(self, handle: int, device: int) -> None:
        self.handles.remove(handle)

    def _map(self, handles: list[int], num_bytes: list[int], device: int) -> int:
        self._fail()
        assert set(handles) <= self.handles
        self._next += 2**30
        self.mapped[self._next] = (handles, num_bytes)
        return self._next

    def _unmap(self, base: int, num_bytes: list[int], device: int) -> None:
        assert self.mapped.pop(base)[1] == num_bytes

    def _fail(self) -> None:
        if self.refuses:
            error = native.CudaError(self.refuses)
            error.error_name = self.refuses
            raise error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakePieces:
    return FakePieces(monkeypatch)


def frame(epoch: int, *ids: str) -> tuple[dict[str, Any], list[int]]:
    message = {"kind": PIECES_KIND, "epoch": epoch, "uuid": UUID, "ids": list(ids)}
    return message, [os.memfd_create("piece") for _ in ids]


def test_what_is_claimed_is_the_claimer_s(cuda: FakePieces) -> None:
    before, board = open_fds(), PieceBoard()
    board.take(*frame(1, "a", "b"))
    board.take(*frame(1, "c", "a"))  # the same piece again is one handle
    assert open_fds() == before
    assert len(cuda.handles) == 3
    claimed = board.claim(["c", "a"])
    assert len(set(claimed)) == 2
    with pytest.raises(TransportError, match=r"1 of 2 pieces .* not here \(first: a\)"):
        board.claim(["b", "a"])
    board.close()
    assert cuda.handles == set(claimed)
    board.take(*frame(2, "d"))
    assert cuda.handles == set(claimed)
    assert open_fds() == before


def test_a_later_epoch_and_a_withdrawal_drop_what_nobody_claimed(cuda: FakePieces) -> None:
    board = PieceBoard()
    board.take(*frame(1, "a", "b"))
    board.take(*frame(2, "b", "c"))
    assert len(cuda.handles) == 2
    with pytest.raises(TransportError, match="first: a"):
        board.claim(["a"])
    board.drop(epoch=1)  # of somebody who is late
    assert len(cuda.handles) == 2
    board.take(*frame(2))
    assert not cuda.handles
    board.take(*frame(3, "d"))
    board.drop(epoch=3)
    assert not cuda.handles


@pytest.mark.parametrize(
    "change", [{"ids": ["a", "b"]}, {"ids": [1]}, {"epoch": "1"}, {"surplus": 1}]
)
def test_a_malformed_frame_keeps_no_descriptor(cuda: FakePieces, change: dict[str, Any]) -> None:
    before = open_fds()
    message, fds = frame(1, "a")
    with pytest.raises(ProtocolError):
        PieceBoard().take({**message, **change}, fds)
    assert open_fds() == before


def test_what_cuda_refuses_is_told_to_whoever_maps(cuda: FakePieces) -> None:
    board = PieceBoard()
    cuda.refuses = "cudaErrorNotPermitted"
    board.take(*frame(1, "a"))
    board.take(*frame(1, "b"))
    with pytest.raises(UnavailableError, match="cannot be opened: cudaErrorNotPermitted"):
        board.claim(["a"])
    cuda.refuses = None
    board.take(*frame(2, "a"))
    assert len(board.claim(["a"])) == 1


def test_a_gpu_that_is_not_shown_here(cuda: FakePieces) -> None:
    board = PieceBoard()
    cuda.shown = 0
    message, fds = frame(1, "a")
    board.take({**message, "uuid": "cd" * 16}, fds)
    assert len(board.claim(["a"])) == 1


# --- over a channel -------------------------------------------------------------------------------


@pytest.fixture
def ends(cuda: FakePieces) -> Iterator[tuple[Channel, Channel, PieceBoard]]:
    listener, board = Listener("unix"), PieceBoard()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, deadline())
        engine = connect(listener.address(), deadline(), {PIECES_KIND: board.take})
        trainer = accepted.result(LIMIT_S)
    listener.close()
    yield trainer, engine, board
    trainer.close()
    engine.close()
    board.close()
    assert not cuda.handles


def test_more_pieces_than_a_frame_can_carry(
    cuda: FakePieces, ends: tuple[Channel, Channel, PieceBoard]
) -> None:
    trainer, engine, board = ends
    before = open_fds()
    count = 5 * MAX_FDS + 3
    send_pieces(trainer, 1, UUID, [(i, f"{i:x}") for i in range(count)], 1)
    trainer.send({"kind": "after"})
    assert engine.receive(deadline())[0]["kind"] == "after"  # nothing else reached the queue
    assert len(cuda.handles) == count
    assert len(board.claim([f"{i:x}" for i in range(count)])) == count
    assert open_fds() == before
    cuda.handles.clear()


def test_a_malformed_frame_ends_the_channel(
    ends: tuple[Channel, Channel, PieceBoard],
) -> None:
    trainer, engine, _ = ends
    trainer.send({"kind": PIECES_KIND, "epoch": -1})
    with pytest.raises(PeerLostError, match="the channel broke"):
        engine.receive(deadline())


def test_a_frame_whose_descriptors_crowd_the_wire_is_sent_later(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[Channel, Channel, PieceBoard], cuda: FakePieces
) -> None:
    import errno
    import socket

    real, refused = socket.send_fds, threading.Event()

    def crowded(*arguments: Any) -> int:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.ETOOMANYREFS, "too many references")
        return int(real(*arguments))

    monkeypatch.setattr(socket, "send_fds", crowded)
    trainer, engine, _ = ends
    send_pieces(trainer, 1, UUID, [(1, "1")], 1)
    trainer.send({"kind": "after"})
    engine.receive(deadline())
    assert refused.is_set()
    assert len(cuda.handles) == 1


# --- mapped ---------------------------------------------------------------------------------------

LOCAL = [RegionAddress(0, 64, 64, "cuda:1")]


def described(*runs: Allocation) -> dict[str, Any]:
    return {"uuid": UUID, "allocations": [run.to_json() for run in runs]}


def test_pieces_are_mapped_side_by_side_and_no_handle_is_kept(cuda: FakePieces) -> None:
    board = PieceBoard()
    path = CudaPath(is_own_process=False, pieces=board)
    run = Allocation(10_000, 300, pieces=(("a", 100), ("b", 200)))
    board.take(*frame(1, "a", "b"))
    first = path.map_device(described(run), {0: (10_050, 250)}, LOCAL, 1)
    (base,) = cuda.mapped
    assert first == {0: base + 50}
    assert cuda.mapped[base][1] == [100, 200]
    assert not cuda.handles
    # The same run in a new epoch stays mapped, and what came with it is let go.
    board.take(*frame(2, "a", "b"))
    assert path.map_device(described(run), {0: (10_000, 1)}, LOCAL, 2) == {0: base}
    assert not cuda.handles
    # One piece is another: all of the run is mapped anew.
    changed = Allocation(10_000, 300, pieces=(("a", 100), ("c", 200)))
    board.take(*frame(3, "a", "c"))
    second = path.map_device(described(changed), {0: (10_000, 1)}, LOCAL, 3)
    assert second[0] != base
    assert list(cuda.mapped) == [second[0]]
    path.close()
    assert not cuda.mapped
    assert not cuda.handles


def test_a_mapping_that_fails_keeps_nothing(cuda: FakePieces) -> None:
    board = PieceBoard()
    path = CudaPath(is_own_process=False, pieces=board)
    run = Allocation(10_000, 100, pieces=(("a", 100),))
    board.take(*frame(1, "a", "b"))
    cuda.refuses = "cudaErrorNotSupported"
    with pytest.raises(UnavailableError, match="CUDA IPC is refused here"):
        path.map_device(described(run), {0: (10_000, 1)}, LOCAL, 1)
    cuda.refuses = None
    assert not cuda.handles
    with pytest.raises(TransportError, match="an earlier attempt to map them failed"):
        path.map_device(described(run), {0: (10_000, 1)}, LOCAL, 1)
    board.take(*frame(2, "a"))
    path.map_device(described(run), {0: (10_000, 1)}, LOCAL, 2)
    path.release()
    assert not cuda.mapped
