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
from transports.test_ipc_cuda import FakeCuda, assert_holds, engine, far_trainer, fill, make_module
from weightsync import native
from weightsync.errors import ProtocolError, SlowPathError, UnavailableError
from weightsync.sender import Sender
from weightsync.transports import p2p_cuda
from weightsync.transports.base import Transport
from weightsync.transports.nixl_binding import NIXL_MODULES, Span
from weightsync.transports.p2p import P2pTransport
from weightsync.transports.p2p_cuda import Allocation, allocations_of, are_current, check_exportable
from weightsync.transports.p2p_cuda_probe import cuda_pattern, judge
from weightsync.types import RegionAddress

needs_nixl = pytest.mark.skipif(
    all(importlib.util.find_spec(name.partition(".")[0]) is None for name in NIXL_MODULES),
    reason="NIXL is not installed: pip install 'weightsync[p2p]'",
)


@pytest.mark.gpu
@needs_nixl
class TestContract(OnCuda, FullContract):
    """Both ends in one process, where UCX does not take cuda_ipc: right, and not fast."""

    def make_transport(self) -> Transport:
        return P2pTransport()


@pytest.mark.gpu
@needs_nixl
class TestDirectUpdates(CudaUpdates):
    transport = "p2p"
    contract = "direct"
    kept_bytes = 256 * 2**20


@pytest.mark.gpu
@needs_nixl
class TestStreamUpdates(CudaGenerators):
    transport = "p2p"
    kept_bytes = 256 * 2**20


SLOW = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}


@pytest.mark.gpu
@needs_nixl
class TestSlowPath:
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
        assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY is n, it must be y" in said

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


def look_up(identity: dict[int, int], is_exportable: bool = True) -> Any:
    def ask(ptr: int, device: int) -> tuple[int, int, int, bool]:
        base = ptr // 1000 * 1000
        return base, 1000, identity.get(base, base), is_exportable

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


def test_what_is_kept_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    kept = p2p_cuda.KeptMappings("cuda:1")
    one, two, three = (f"{n:02x}" * 64 for n in range(3))
    kept.replace([one, two])
    where = {handle.hex(): ptr for ptr, handle in cuda.mapped.items()}
    kept.replace([two, three])
    assert {handle.hex() for handle in cuda.mapped.values()} == {two, three}
    assert where[two] in cuda.mapped
    kept.replace([])
    assert not cuda.mapped
    kept.replace([one])
    kept.close()
    kept.close()
    kept.replace([one])
    assert not cuda.mapped


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
    monkeypatch.setenv("UCX_TLS", "sm,tcp,self")
    assert "UCX_TLS=sm,tcp,self lacks 'cuda_ipc'" in judge(0.5e9, is_one_host=True).remedy


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
