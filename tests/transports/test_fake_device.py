"""The device paths of every transport on a device made of host memory, so that any machine runs them.

NIXL is the real one; it is told that the device's memory is the host's.
"""

from __future__ import annotations

import gc
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from transports.conformance import FullContract
from transports.cuda_memory import DEVICE, OnCuda
from transports.fake_device import FakeDevice
from transports.pairs import Pair, connect, deadline, random_bytes, row, table
from transports.stream_contract import StreamContract
from weightsync.errors import TransportError, UnavailableError
from weightsync.native import CONVERT_FP32_TO_BF16, copy_segments, digest_segments
from weightsync.tables import DigestRows, digest_rows
from weightsync.transports import nixl_agent, p2p_cuda_probe
from weightsync.transports.base import Transport
from weightsync.transports.ipc import IpcTransport
from weightsync.transports.loopback import LoopbackTransport
from weightsync.transports.nixl_binding import NIXL_MODULES
from weightsync.transports.p2p import P2pSource, P2pTransport
from weightsync.transports.p2p_cuda import DeviceWay, PeerMemory
from weightsync.transports.published import DeviceCopied, EpochBoard

needs_nixl = pytest.mark.skipif(
    all(importlib.util.find_spec(name.partition(".")[0]) is None for name in NIXL_MODULES),
    reason="NIXL is not installed: pip install 'weightsync[p2p]'",
)


class _OnFake(OnCuda):
    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
        device = FakeDevice(monkeypatch)
        yield device
        if device.mapped:  # held by a cycle, or left behind
            gc.collect()
        assert not device.mapped


class TestIpcRing(_OnFake, StreamContract):
    def make_transport(self) -> Transport:
        return IpcTransport()


class TestLoopback(_OnFake, FullContract):
    def make_transport(self) -> Transport:
        return LoopbackTransport()


class _P2p(_OnFake):
    way: DeviceWay

    @pytest.fixture(autouse=True)
    def _host_for_nixl(self, monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> None:
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        monkeypatch.setattr(nixl_agent, "memory_type", lambda bind, device: (bind.DRAM_SEG, 0))
        monkeypatch.setattr(p2p_cuda_probe, "_FLOOR_BYTES_PER_S", 1.0)
        monkeypatch.setattr(p2p_cuda_probe, "PROBE_BYTES", 2 * 2**20)
        monkeypatch.setattr(p2p_cuda_probe, "_PART_BYTES", 2**20)

    def make_transport(self) -> Transport:
        return P2pTransport(device_way=self.way)


@needs_nixl
class TestNixl(_P2p, FullContract):
    way = DeviceWay.NIXL

    def test_windows_and_straight_reads_at_once(self, pair: Pair) -> None:
        """Of many allocations, in another order, some of it converted."""
        rng = np.random.default_rng(0)
        sizes = [*[2**19] * 12, *rng.integers(1, 5000, 200).tolist()]
        remote = [pair.published(4 * n, n) for n in sizes]
        local = self.landing(5 * sum(sizes))
        at = pair.open(remote, [local])
        rows: list[list[int]] = []
        reference: list[list[int]] = []
        start = 0
        here = [np.asarray(r) for r in remote]
        expected = np.zeros(local.nbytes, dtype=np.uint8)
        for i in rng.permutation(len(sizes)).tolist():
            num_bytes, converts = 4 * sizes[i], i % 5 == 4
            for made, source, base in (
                (rows, at[i], int(local.ctypes.data)),
                (reference, int(here[i].ctypes.data), int(expected.ctypes.data)),
            ):
                made.append(row(source, base + start, num_bytes))
                made[-1][3] = CONVERT_FP32_TO_BF16 if converts else 0
            start += num_bytes // 2 if converts else num_bytes
        copy_segments(table(*reference))
        direct = pair.target.direct()
        prepared = direct.prepare(table(*rows))
        for _ in range(3):
            local[:] = 0
            direct.read(prepared, deadline())
            assert np.array_equal(np.asarray(local), expected)

    def test_memory_of_the_engine_that_cannot_be_registered(
        self, pair: Pair, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Everything goes through windows, which are ours."""
        from weightsync import native

        look_up = native.extension.cuda_allocation
        remote, local = pair.published(40_000_000), self.landing(40_000_000)
        ptr = pair.open([remote], [local])[0]
        monkeypatch.setattr(
            native.extension, "cuda_allocation", lambda p, d: (*look_up(p, d)[:3], 0)
        )
        pair.read(row(ptr, local.ctypes.data, 40_000_000))
        assert np.array_equal(np.asarray(local), np.asarray(remote))


@needs_nixl
class TestMapped(_P2p, FullContract):
    """The trainer is another process, as far as the engine's end can tell."""

    way = DeviceWay.AUTO

    @pytest.fixture(autouse=True)
    def _another_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        describe = P2pSource.descriptor
        monkeypatch.setattr(P2pSource, "descriptor", lambda self: {**describe(self), "pid": 1})

    def test_what_is_read_is_mapped_and_let_go(self, pair: Pair, fake: FakeDevice) -> None:
        assert "mapped" in pair.target.path
        assert not fake.mapped  # the probe is over
        remote, local = pair.published(100_000), self.landing(100_000)
        ptr = pair.open([remote], [local])[0]
        assert len(fake.mapped) == 1
        pair.read(row(ptr, local.ctypes.data, 100_000))
        assert np.array_equal(np.asarray(local), np.asarray(remote))
        pair.source.direct().withdraw()
        self._until_refused(lambda: pair.read(row(ptr, local.ctypes.data, 100_000)))
        assert not fake.mapped

    def test_what_is_withdrawn_under_a_read_is_let_go(
        self, pair: Pair, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whichever look at the trainer's word it is that finds it gone."""
        remote, local = pair.published(100_000), self.landing(100_000)
        ptr = pair.open([remote], [local])[0]
        copy, refresh, withdrawn = PeerMemory.run, EpochBoard.refresh, threading.Event()

        def withdrawn_meanwhile(memory: PeerMemory, *work: Any) -> DeviceCopied:
            found = copy(memory, *work)
            pair.source.direct().withdraw()
            withdrawn.set()
            return found

        def until_told(board: EpochBoard) -> None:
            refresh(board)
            end = deadline(5.0)
            while withdrawn.is_set() and board.is_published:
                end.check()
                refresh(board)

        monkeypatch.setattr(PeerMemory, "run", withdrawn_meanwhile)
        monkeypatch.setattr(EpochBoard, "refresh", until_told)
        with pytest.raises(TransportError, match="stale"):
            pair.read(row(ptr, local.ctypes.data, 100_000))
        assert not fake.mapped

    def test_digests_are_taken_on_the_way(self, pair: Pair) -> None:
        """Of each owner, over several allocations."""
        remote = [pair.published(n, n) for n in (4000, 8000, 400)]
        local = self.landing(12_400)
        at, target = pair.open(remote, [local]), int(local.ctypes.data)
        sizes, owners = [4000, 8000, 400], [0, 1, 1]
        rows = [row(at[i], target + 4000 * i, n) for i, n in enumerate(sizes)]
        rows[2][1] = target + 12_000

        def digests(starts: list[int]) -> npt.NDArray[np.int64]:
            made = [
                digest_rows(
                    (n // 2,), ptr=ptr, strides_bytes=(2,), index_strides=(1,), start_index=0,
                    item=2, seed=5,
                )
                for ptr, n in zip(starts, sizes, strict=True)
            ]  # fmt: skip
            return np.array([r for part in made for r in part], dtype=np.int64)

        direct = pair.target.direct()
        assert direct.digests_reads
        wanted = DigestRows(digests([at[i] for i in range(3)]), np.array(owners), 2)
        prepared = direct.prepare(table(*rows), wanted)
        direct.read(prepared, deadline())
        here = [np.asarray(r) for r in remote]
        one, two, three = digest_segments(digests([int(h.ctypes.data) for h in here])).tolist()
        assert prepared.digests is not None
        assert prepared.digests.tolist() == [one, (two + three) % 2**64]
        assert prepared.device_s == 1e-6

    def test_memory_allocated_anew_at_the_same_address(self, pair: Pair, fake: FakeDevice) -> None:
        remote, local = pair.published(5000), self.landing(5000)
        first = pair.source.direct().publish([_region(remote)])
        memory, number = fake.allocated[remote.ctypes.data]
        fake.allocated[remote.ctypes.data] = (memory, number + 1000)
        second = pair.source.direct().publish([_region(remote)])
        assert second["epoch"] == first["epoch"] + 1
        ptr = pair.open([remote], [local])[0]
        pair.read(row(ptr, local.ctypes.data, 5000))
        assert np.array_equal(np.asarray(local), np.asarray(remote))

    def test_where_nothing_can_be_mapped_nixl_reads(
        self, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from weightsync import native

        def refuse(handle: bytes, device: int) -> int:
            raise native.CudaError("not here")

        monkeypatch.setattr(native.extension, "cuda_map", refuse)
        pair = connect(self.make_transport(), self.alloc, DEVICE)
        with pair.source, pair.target:
            assert "ucx" in pair.target.path
            remote, local = pair.published(100_000), self.landing(100_000)
            ptr = pair.open([remote], [local])[0]
            pair.read(row(ptr, local.ctypes.data, 100_000))
            assert np.array_equal(np.asarray(local), np.asarray(remote))
            StreamContract.exchange(self, pair, pair.ring(2, 500), [random_bytes(500)], "s1")  # type: ignore[arg-type]
        pair.pool.shutdown()

    def test_one_side_on_the_host(self, pair: Pair) -> None:
        remote, here = pair.published(100), np.zeros(100, dtype=np.uint8)
        with pytest.raises(UnavailableError, match="move one side"):
            pair.open([remote], [here])

    def test_known_bytes_that_are_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where device memory is taken for host memory."""
        monkeypatch.setattr(p2p_cuda_probe.CudaProbe, "_is_right", lambda self: False)
        transport = self.make_transport()
        refused = pytest.raises(UnavailableError, match=r"brought others.*UCX_MODULE_DIR")
        with transport.open_source(DEVICE) as source, refused:
            transport.open_target(source.descriptor(), deadline(), DEVICE)

    def test_the_trainers_known_bytes_are_freed(self, fake: FakeDevice) -> None:
        pair = connect(self.make_transport(), self.alloc, DEVICE)
        with pair.source, pair.target:
            gc.collect()
            assert not fake.allocated
        pair.pool.shutdown()


def _region(memory: Any) -> Any:
    from weightsync.types import RegionAddress

    return RegionAddress(0, memory.ctypes.data, memory.nbytes, DEVICE)
