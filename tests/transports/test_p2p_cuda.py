"""``p2p`` between CUDA devices, with the real NIXL."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import numpy as np
import pytest

from transports.conformance import FullContract
from transports.cuda_memory import OnCuda
from transports.cuda_updates import CudaGenerators, CudaUpdates
from transports.test_ipc_cuda import FakeCuda as CountingCuda
from transports.test_ipc_cuda import assert_holds, engine, far_trainer, fill, make_module
from weightsync import native
from weightsync.errors import PeerLostError, ProtocolError, SlowPathError, UnavailableError
from weightsync.sender import Sender
from weightsync.transports import p2p_cuda, p2p_cuda_probe
from weightsync.transports.base import Transport
from weightsync.transports.cuda_allocations import Sharing
from weightsync.transports.nixl_binding import NIXL_MODULES, Span
from weightsync.transports.p2p import P2pTransport
from weightsync.transports.p2p_cuda import (
    Allocation,
    DeviceWay,
    Key,
    PeerMemory,
    allocations_of,
    are_current,
    check_exportable,
)
from weightsync.transports.p2p_cuda_probe import cuda_pattern, judge
from weightsync.types import RegionAddress

needs_nixl = pytest.mark.skipif(
    all(importlib.util.find_spec(name.partition(".")[0]) is None for name in NIXL_MODULES),
    reason="NIXL is not installed: pip install 'weightsync[p2p]'",
)


#: What UCX, its kernels and ours take on the device when they are first used.
KEPT_BYTES = 256 * 2**20


@pytest.mark.gpu
@needs_nixl
class TestContract(OnCuda, FullContract):
    """Both ends in one process, where UCX does not take cuda_ipc: right, and not fast.

    Each test connects, which measures a rate through the host there; here a shorter look will do.
    """

    @pytest.fixture(autouse=True)
    def _short_probe(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(p2p_cuda_probe, "PROBE_BYTES", 16 * 2**20)
        monkeypatch.setattr(p2p_cuda_probe, "_ROUNDS", 1)

    def make_transport(self) -> Transport:
        return P2pTransport()


@pytest.mark.gpu
@needs_nixl
class TestDirectUpdates(CudaUpdates):
    """Mapped."""

    transport = "p2p"
    contract = "direct"
    kept_bytes = KEPT_BYTES


@pytest.mark.gpu
@needs_nixl
class TestStreamUpdates(CudaGenerators):
    """Out of the mapped ring."""

    transport = "p2p"
    kept_bytes = KEPT_BYTES


class _ByNixl:
    """As between machines; the engine, which lives here, decides."""

    @pytest.fixture(autouse=True)
    def _way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTSYNC_P2P_DEVICE_WAY", DeviceWay.NIXL.value)


@pytest.mark.gpu
@needs_nixl
class TestNixlDirectUpdates(_ByNixl, CudaUpdates):
    transport = "p2p"
    contract = "direct"
    kept_bytes = KEPT_BYTES


@pytest.mark.gpu
@needs_nixl
class TestNixlStreamUpdates(_ByNixl, CudaGenerators):
    transport = "p2p"
    kept_bytes = KEPT_BYTES


SLOW = {"UCX_TLS": "tcp,sm,self,cuda_copy"}


@pytest.mark.gpu
@needs_nixl
class TestSlowPath(_ByNixl):
    """A setting of the user's that makes UCX copy through the host."""

    @pytest.fixture(autouse=True)
    def _slow_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in SLOW.items():
            monkeypatch.setenv(name, value)

    def test_it_is_an_error_under_strict(self) -> None:
        with engine() as (_, receiver), far_trainer(SLOW) as far:
            far("make", 1)
            said = far.failure("connect", receiver.url, {"transport": "p2p", "strict": True})
        assert said.startswith(SlowPathError.__name__)
        assert "UCX_TLS=tcp,sm,self,cuda_copy lacks 'cuda_ipc'" in said

    def test_it_is_a_warning_and_works(self, caplog: pytest.LogCaptureFixture) -> None:
        source = make_module(1)
        with engine() as (module, receiver), caplog.at_level(logging.WARNING):
            with Sender.connect([receiver.url], transport="p2p") as sender:
                fill(source, 3)
                with sender.update(version=1) as update:
                    update.send(source)
            assert_holds(module, 3)
        assert "through the host" in caplog.text


@pytest.mark.gpu
@needs_nixl
def test_expandable_memory_is_streamed_or_refused() -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with engine() as (module, receiver), far_trainer(setting) as far:
        far("make", 1)
        far("connect", receiver.url, {"transport": "p2p", "contract": "direct"})
        assert "contract='stream'" in far.failure("refit", 1, 1)
        far("close")
        far("connect", receiver.url, {"transport": "p2p", "contract": "stream"})
        assert far("refit", 2, 2)["outcome"] == "committed"
        assert_holds(module, 2)


# --- pure parts: they run everywhere --------------------------------------------------------------


def look_up(identity: dict[int, int]) -> Any:
    def ask(ptr: int, device: int) -> tuple[int, int, int, int]:
        base = ptr // 1000 * 1000
        return base, 1000, identity.get(base, base), Sharing.HANDLE

    return ask


def on_cuda(*spans: tuple[int, int]) -> list[RegionAddress]:
    return [RegionAddress(i, *span, "cuda:3") for i, span in enumerate(spans)]


def test_what_is_registered_is_whole_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {3000: 7}
    monkeypatch.setattr(native, "has_cuda", lambda: True)
    monkeypatch.setattr(native.extension, "cuda_allocation", look_up(identity))
    found = allocations_of(on_cuda((3500, 500), (1000, 10), (1500, 500), (0, 0)), "cuda:3")
    assert [a.span for a in found] == [Span(1000, 1000, "cuda:3"), Span(3000, 1000, "cuda:3")]
    assert are_current(found)
    identity[3000] = 8
    assert not are_current(found)
    with pytest.raises(UnavailableError, match="reaches over the end"):
        allocations_of(on_cuda((1500, 501)), "cuda:3")


def test_memory_that_ucx_cannot_export() -> None:
    check_exportable([Allocation(Span(4096, 10, "cuda:0"), 1, True)])
    with pytest.raises(UnavailableError, match=r"expandable_segments.*contract='stream'"):
        p2p_cuda.check_exportable([Allocation(Span(4096, 10, "cuda:0"), 1, False)])


def test_what_a_peer_has_is_mapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CountingCuda(monkeypatch)
    peer = PeerMemory("cuda:1")
    one, two, three = (Key(n, f"{n:02x}" * 64) for n in range(3))
    assert peer.replace([one, two])
    kept = peer.address_of(two)
    assert peer.replace([two, three])
    assert {handle.hex() for handle in cuda.mapped.values()} == {two.handle, three.handle}
    assert peer.address_of(two) == kept
    # Allocated anew at the same address: perhaps the same handle, never the same memory.
    again = Key(7, two.handle)
    assert peer.replace([again])
    assert list(cuda.mapped) == [peer.address_of(again)]
    assert peer.address_of(again) != kept
    peer.close()
    peer.close()
    assert not cuda.mapped
    with pytest.raises(PeerLostError):
        peer.replace([one])


def test_memory_that_cannot_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CountingCuda(monkeypatch)

    def refuse(handle: bytes, device: int) -> int:
        raise native.CudaError("not here")

    peer = PeerMemory("cuda:1")
    assert peer.replace([Key(1, "0c" * 64)])
    monkeypatch.setattr(native.extension, "cuda_map", refuse)
    assert not peer.replace([Key(2, "0d" * 64)])
    assert not cuda.mapped
    peer.close()


def test_what_a_rate_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert judge(1e12, is_one_host=True).is_slow is False
    assert judge(0.5e9, is_one_host=False).is_slow is False
    slow = judge(0.5e9, is_one_host=True)
    assert slow.is_usable
    assert slow.is_slow
    assert "0.50 GB/s" in slow.reason
    for word in ("ENABLE_GET_ZCOPY=y", "UCX_TLS", "UCX_MODULE_DIR", "tcp"):
        assert word in slow.remedy
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "n")
    assert "ENABLE_GET_ZCOPY is n, it must be y" in judge(0.5e9, is_one_host=True).remedy


@pytest.mark.parametrize(
    ("tls", "lacks"),
    [
        ("sm,tcp,self", "'cuda_copy', 'cuda_ipc'"),
        ("tcp,sm,self,cuda_copy", "'cuda_ipc'"),
        ("cuda_ipc,tcp", "'cuda_copy'"),
        ("^cuda_ipc,rc", "'cuda_ipc'"),
        ("^cuda", "'cuda_copy', 'cuda_ipc'"),
        ("^tcp", ""),
        ("all", ""),
        ("tcp,cuda", ""),
    ],
)
def test_what_a_choice_of_transports_lacks(
    tls: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
    monkeypatch.setenv("UCX_TLS", tls)
    remedy = judge(0.5e9, is_one_host=True).remedy
    assert (f"UCX_TLS={tls} lacks {lacks} (" in remedy) is bool(lacks)
    assert ("In this process" in remedy) is bool(lacks)


def test_patterns_differ() -> None:
    assert not np.array_equal(cuda_pattern("ab"), cuda_pattern("ac"))


def test_a_descriptor_without_known_bytes_of_a_device() -> None:
    from weightsync.transports.p2p_cuda_probe import CudaProbe

    good = {"ptr": 4096, "device": "cuda:0", "handle": "0c" * 64}
    changes: list[dict[str, Any]] = [
        {"ptr": -1}, {"device": "cpu"}, {"handle": "0c" * 63}, {"surplus": 1},
    ]  # fmt: skip
    for bad in ({**good, **change} for change in changes):
        with pytest.raises(ProtocolError, match="'cuda'"):
            CudaProbe(None, "ab", bad, "cuda:0", one_host=True)  # type: ignore[arg-type]
