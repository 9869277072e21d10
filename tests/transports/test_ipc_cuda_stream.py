"""Streams over ``ipc`` (and all of ``loopback``) on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest

from transports.conformance import FullContract
from transports.cuda_memory import OnCuda
from transports.cuda_updates import CudaGenerators
from transports.stream_contract import StreamContract
from transports.test_ipc_cuda import UUID, FakeCuda
from weightsync import native
from weightsync.errors import CapacityError, ProtocolError, UnavailableError
from weightsync.transports.base import RingOptions, Transport
from weightsync.transports.ipc import IpcTransport
from weightsync.transports.ipc_cuda_stream import CUDA_RING_KIND, make_ring, open_ring
from weightsync.transports.loopback import LoopbackTransport


@pytest.mark.gpu
class TestRing(OnCuda, StreamContract):
    def make_transport(self) -> Transport:
        return IpcTransport()


@pytest.mark.gpu
class TestLoopback(OnCuda, FullContract):
    def make_transport(self) -> Transport:
        return LoopbackTransport()


@pytest.mark.gpu
class TestUpdates(CudaGenerators):
    transport = "ipc"


# --- both ends over a CUDA that only counts -------------------------------------------------------

FRAME = {
    "kind": CUDA_RING_KIND, "num_slots": 2, "slot_bytes": 4096, "uuid": UUID, "handle": "0c" * 64,
    "ptr": 4096,
}  # fmt: skip


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(monkeypatch)
    monkeypatch.setattr(native.extension, "cuda_allocation", lambda ptr, device: (ptr, 8192, 1, 0))
    return fake


def test_a_ring_is_mapped_once_and_unmapped_with_its_last_pin(cuda: FakeCuda) -> None:
    memory, options = open_ring(FRAME, "cuda:1", is_own_process=False)
    assert options == RingOptions(2, 4096, "cuda:1")
    assert memory.num_bytes == 8192
    assert list(cuda.mapped) == [memory.ptr]
    pin = memory.pin()
    memory.close()
    memory.close()
    assert cuda.mapped
    pin.release()
    assert not cuda.mapped
    with pytest.raises(ValueError, match="unmapped"):
        memory.pin()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"handle": "0c" * 63}, "'handle' must be 64 bytes"),
        ({"handle": "zz" * 64}, "'handle' must be 64 bytes"),
        ({"ptr": None}, "'ptr' must be int"),
        ({"surplus": 1}, "surplus"),
        ({"slot_bytes": 8192}, "a ring of 16384 B in an allocation of 8192 B"),
    ],
)
def test_a_ring_that_cannot_be(cuda: FakeCuda, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        open_ring({**FRAME, **changes}, "cuda:1", is_own_process=False)
    assert not cuda.mapped


def test_another_gpu_or_the_host(cuda: FakeCuda) -> None:
    other = {**FRAME, "uuid": "cd" * 16}
    with pytest.raises(UnavailableError, match=r"UUID cdcd.*needs two processes"):
        open_ring(other, "cuda:1", is_own_process=True)
    with pytest.raises(UnavailableError, match="the engine's tensors lie on the host"):
        open_ring(FRAME, "cpu", is_own_process=False)
    assert not cuda.mapped
    memory, _ = open_ring(other, "cuda:1", is_own_process=False)
    assert len(cuda.mapped) == 1
    memory.close()


def test_the_own_process_is_not_mapped(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(native.extension, "cuda_malloc", lambda num_bytes, device: 2**30)
    monkeypatch.setattr(native.extension, "cuda_free", lambda ptr, device: freed.append(ptr))
    monkeypatch.setattr(native.extension, "cuda_export", lambda ptr, device: bytes(64))
    memory, frame = make_ring(RingOptions(2, 4096, "cuda:1"))
    view, _ = open_ring(frame, "cuda:1", is_own_process=True)
    assert (view.ptr, cuda.mapped) == (2**30, {})
    pin = view.pin()
    view.close()  # which is not the owner
    memory.close()
    assert freed == []
    pin.release()
    assert freed == [2**30]
    del memory
    with pytest.raises(ProtocolError, match="no such ring"):
        open_ring({**frame, "ptr": 64}, "cuda:1", is_own_process=True)


@pytest.mark.gpu
def test_a_ring_that_does_not_fit() -> None:
    with pytest.raises(CapacityError, match="are free there"):
        make_ring(RingOptions(2, 2**40, "cuda:0"))
