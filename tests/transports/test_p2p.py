"""``p2p`` keeps the contract, with the real NIXL over loopback."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from processes import Child

from transports.conformance import FullContract
from transports.pairs import (
    LIMIT_S,
    SHORT_S,
    Bytes,
    Pair,
    TransportContract,
    addresses,
    connect,
    deadline,
    header,
    random_bytes,
    row,
    table,
)
from transports.process_contract import ProcessContract
from weightsync.deadline import CancelToken
from weightsync.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    MissingDependencyError,
    PeerLostError,
    TransportError,
    UnavailableError,
)
from weightsync.memory import HostMemory
from weightsync.transports.base import RingOptions, Transport
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import NIXL_MODULES
from weightsync.transports.nixl_reads import MAX_READS, Reads, cut, merge, pieces, reads_of
from weightsync.transports.p2p import P2pTransport
from weightsync.transports.p2p_registrations import spans_of
from weightsync.types import Contract, RegionAddress

# Not imported here: NIXL takes its log level when it is loaded, and the transport sets the default.
pytestmark = pytest.mark.skipif(
    all(importlib.util.find_spec(name.partition(".")[0]) is None for name in NIXL_MODULES),
    reason="NIXL is not installed: pip install 'weightsync[p2p]'",
)

FACTORY = "weightsync.transports.p2p:P2pTransport"


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


class _P2p(TransportContract):
    factory = FACTORY

    def make_transport(self) -> Transport:
        return P2pTransport()

    def slow_table(self, source: int, target: int) -> npt.NDArray[np.int64]:
        return table(row(source, target, 4096, (500, 0, 0), (1000, 0, 0)))


class TestContract(_P2p, FullContract):
    pass


class TestProcesses(_P2p, ProcessContract):
    pass


class TestMissing:
    """Without NIXL."""

    @pytest.fixture(autouse=True)
    def _no_nixl(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in NIXL_MODULES:
            monkeypatch.setitem(sys.modules, module, None)
            monkeypatch.setitem(sys.modules, module.partition(".")[0], None)

    def test_the_error_says_what_was_tried_and_what_to_do(self) -> None:
        with pytest.raises(MissingDependencyError) as caught:
            P2pTransport().open_source()
        for word in (*NIXL_MODULES, "pip install 'weightsync[p2p]'"):
            assert word in str(caught.value)

    def test_capabilities_say_so(self) -> None:
        capabilities = P2pTransport().capabilities()
        assert not capabilities.is_usable
        assert "nixl_cu13" in capabilities.contracts[Contract.DIRECT].reason
        assert "pip install" in capabilities.contracts[Contract.DIRECT].remedy


class TestReads:
    """Tables as lists of reads."""

    @staticmethod
    def _run(reads: Reads, source: Bytes, num_bytes: int) -> Bytes:
        target = np.zeros(num_bytes, dtype=np.uint8)
        columns = (reads.source_ptr, reads.target_ptr, reads.num_bytes)
        for a, b, n in zip(*(c.tolist() for c in columns), strict=True):
            target[b : b + n] = source[a : a + n]
        return target

    @pytest.mark.parametrize(
        ("rows", "count"),
        [
            ([row(0, 0, 10), row(10, 10, 20)], 1),  # neighbours on both sides
            ([row(10, 10, 20), row(0, 0, 10)], 1),  # in any order
            ([row(0, 0, 10), row(10, 11, 20)], 2),  # a gap on one side
            ([row(0, 0, 8, (4, 8, 8))], 1),  # dense
            ([row(0, 0, 8, (2, 64, 64), (2, 32, 32), (4, 8, 8))], 1),
            ([row(0, 0, 8, (2, 100, 32), (4, 8, 8))], 2),  # dense inside only
            ([row(0, 0, 8, (4, 16, 8))], 4),
            ([row(64, 0, 8, (4, -8, 8))], 4),
            ([row(0, 0, 0), row(0, 0, 8, (0, 8, 8))], 0),
            ([row(0, 0, 8, (3, 8, 8), (1, 7, 9), (2, 4, 4))], 6),  # overlapping: not dense
        ],
    )
    def test_counts(self, rows: list[list[int]], count: int) -> None:
        assert len(reads_of(table(*rows))) == count

    def test_same_bytes_as_the_table(self) -> None:
        random = np.random.default_rng(5)
        source = random_bytes(5000)
        for _ in range(200):
            counts, run = random.integers(1, 4, 3), int(random.integers(1, 9))
            inner = [run, run * counts[2], run * counts[2] * counts[1]]
            strides = [int(s + random.choice([0, 0, 5])) for s in inner]
            dims = [(int(c), strides[2 - i], int(inner[2 - i])) for i, c in enumerate(counts)]
            shape = (*(int(c) for c in counts), run)
            steps = (*(d[1] for d in dims), 1)
            expected = np.lib.stride_tricks.as_strided(source[7:], shape, steps).ravel()
            reads = reads_of(table(row(7, 0, run, *dims)))
            for form in (reads, cut(reads, 3), merge(cut(reads, 3))):
                assert form.total_bytes == len(expected)
                assert np.array_equal(self._run(form, source, len(expected)), expected)

    def test_pieces_cover_everything_once(self) -> None:
        sizes = np.random.default_rng(3).integers(1, 100, 777)
        ranges = pieces(sizes, 500, 16)
        assert [i for a, b in ranges for i in range(a, b)] == list(range(777))
        assert max(b - a for a, b in ranges) <= 16
        assert max(int(sizes[a:b].sum()) for a, b in ranges) < 600
        assert pieces(sizes[:0], 500, 16) == []

    def test_too_many_are_refused_with_their_number(self) -> None:
        with pytest.raises(TransportError, match=f"{MAX_READS + 1000}.*stream"):
            reads_of(table(row(0, 0, 1, (1001, 2, 2000), (1000, 4, 2))))

    def test_conversion_is_refused(self) -> None:
        converting = table(row(0, 0, 8))
        converting[0, 3] = 1
        with pytest.raises(TransportError, match="convert"):
            reads_of(converting)


class TestSpans:
    def test_neighbours_are_joined_and_ends_kept(self) -> None:
        page = 4096
        at = [(10, 100), (200, 50), (3 * page + 5, 7), (9 * page, 0), (4 * page, 8)]
        regions = [RegionAddress(i, ptr, size) for i, (ptr, size) in enumerate(at)]
        assert [span[:2] for span in spans_of(regions)] == [(10, 240), (3 * page + 5, page + 3)]

    def test_one_device_at_a_time(self) -> None:
        regions = [RegionAddress(0, 100, 50, "cuda:0"), RegionAddress(1, 100, 50)]
        with P2pTransport().open_source() as source, pytest.raises(ConfigError, match="several"):
            source.direct().publish(regions)


class TestRegistration(_P2p):
    @pytest.fixture
    def registered(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The number of spans of each registration."""
        calls: list[int] = []
        register = Agent.register

        def count(agent: Agent, spans: Any) -> Any:
            calls.append(len(spans))
            return register(agent, spans)

        monkeypatch.setattr(Agent, "register", count)
        return calls

    def test_once_for_the_same_regions(self, registered: list[int], pair: Pair) -> None:
        remote, local = pair.published(100_000), np.zeros(100_000, dtype=np.uint8)
        registered.clear()
        for n in range(5):
            remote[:] = random_bytes(100_000, n)
            ptr = pair.open([remote[:50_000], remote[50_000:]], [local])[0]
            pair.read(row(ptr, local.ctypes.data, 100_000))
            assert np.array_equal(local, remote)
        assert registered == [1, 1]  # one span at each end, once

    def test_a_limit_is_kept(self) -> None:
        pair = connect(P2pTransport(max_registered_bytes=10_000), self.alloc)
        with pair.source, pair.target:
            with pytest.raises(UnavailableError, match=r"20.*kB.*10.*kB.*stream"):
                pair.open([self.alloc(20_000)], [])
            remote, local = pair.published(8000), self.alloc(8000)
            pair.read(row(pair.open([remote], [local])[0], local.ctypes.data, 8000))
            assert np.array_equal(local, remote)

    def test_overlapping_epochs_are_learned_anew(self, pair: Pair) -> None:
        whole, local = pair.published(50_000), np.zeros(50_000, dtype=np.uint8)
        for a, b in ((0, 30_000), (10_000, 50_000), (0, 50_000), (20_000, 20_100)):
            ptr = pair.open([whole[a:b]], [local])[0]
            local[:] = 0
            pair.read(row(ptr, local.ctypes.data, b - a))
            assert np.array_equal(local[: b - a], whole[a:b])

    def test_a_ring_survives_new_epochs(self, pair: Pair) -> None:
        source, target = pair.ring(2, 1000)
        target.begin_move("s1")
        whole, local = pair.published(5000), np.zeros(5000, dtype=np.uint8)
        for n in range(6):
            source.submit(source.acquire(deadline()), header(1000, n))
            target.release(target.receive(deadline())[1])
            ptr = pair.open([whole[n * 100 :]], [local])[0]  # overlaps: a new connection
            pair.read(row(ptr, local.ctypes.data, 100))
            assert np.array_equal(local[:100], whole[n * 100 :][:100])

    def test_descriptors_are_compact(self, pair: Pair) -> None:
        memory = pair.published(2**20)
        pieces_of_it = [memory[at : at + 300] for at in range(0, 2**20, 512)]
        descriptor = pair.source.direct().publish(addresses(pieces_of_it))
        assert len(json.dumps(descriptor)) < 60 * len(pieces_of_it)


class TestIdle(_P2p):
    def test_waiting_costs_no_core(self, pair: Pair) -> None:
        pair.ring(2, 1000)
        time.sleep(0.1)
        start_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - start_s < 0.1

    def test_nothing_is_printed(self, capfd: pytest.CaptureFixture[str]) -> None:
        pair = connect(P2pTransport(), self.alloc)
        with pair.source, pair.target:
            pair.target.probe_direct(deadline())
        assert capfd.readouterr() == ("", "")

    def test_loopback_unless_told(self) -> None:
        with P2pTransport().open_source() as source:
            assert source.descriptor()["channel"]["address"][0] == "127.0.0.1"


class TestByMessages(_P2p):
    """Where UCX may not read the trainer's memory, it has it sent: slow, and said so."""

    @pytest.fixture(autouse=True, params=["^cma", "tcp"])
    def _no_cma(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", request.param)

    @pytest.fixture
    def far(self) -> Iterator[tuple[Child, Any]]:
        with Child("transports.peers:source") as child:
            child.send(FACTORY)
            with P2pTransport().open_target(child.receive(), deadline()) as endpoint:
                yield child, endpoint

    def _prepared(self, far: tuple[Child, Any], num_bytes: int) -> tuple[Any, Any, Bytes]:
        child, endpoint = far
        child.send(["publish", num_bytes, 1])
        local = np.zeros(num_bytes, dtype=np.uint8)
        direct = endpoint.direct()
        ptr = direct.open(child.receive()["result"], addresses([local]), deadline())[0]
        return direct, direct.prepare(table(row(ptr, local.ctypes.data, num_bytes))), local

    def test_both_contracts_work(self, pair: Pair) -> None:
        remote, local = pair.published(20_000_000), np.zeros(20_000_000, dtype=np.uint8)
        pair.read(row(pair.open([remote], [local])[0], local.ctypes.data, remote.nbytes))
        assert np.array_equal(local, remote)
        source, target = pair.ring(2, 10_000)
        target.begin_move("s1")
        for n in range(5):
            source.submit(source.acquire(deadline()), header(10_000, n))
            target.release(target.receive(deadline())[1])

    def test_slowness_has_a_reason_and_a_remedy(self, pair: Pair) -> None:
        availability = pair.target.probe_direct(deadline())
        assert availability.is_usable
        if availability.is_slow:  # over tcp a fast machine may pass the floor
            assert "GB/s" in availability.reason
            assert "UCX_TLS" in availability.remedy
            assert "messages" in pair.target.path

    def test_a_read_that_cannot_end_loses_the_endpoint(self, far: tuple[Child, Any]) -> None:
        """Its bytes would land whenever the trainer comes back, so the connection goes first."""
        child, endpoint = far
        direct, prepared, local = self._prepared(far, 30_000_000)
        child.stop()
        with pytest.raises(DeadlineError, match="read"):
            direct.read(prepared, deadline(SHORT_S, "read"))
        assert "connect again" in str(endpoint.lost())
        landed = local.copy()
        child.resume()
        with pytest.raises(PeerLostError):
            direct.read(prepared, deadline())
        assert np.array_equal(local, landed)

    def test_a_killed_trainer_is_known_at_once(self, far: tuple[Child, Any]) -> None:
        child, _ = far
        direct, prepared, _ = self._prepared(far, 30_000_000)
        direct.read(prepared, deadline())
        child.stop()
        killer = threading.Timer(SHORT_S, child.kill)
        killer.start()
        start_s = time.monotonic()
        with pytest.raises(PeerLostError):
            direct.read(prepared, deadline(60.0))
        assert time.monotonic() - start_s < LIMIT_S / 2
        killer.join()


class TestLostReads(_P2p):
    def test_memory_that_is_gone_loses_the_endpoint(self, pair: Pair) -> None:
        """NIXL cannot recover from a failed transfer; a new endpoint works."""
        with HostMemory.anonymous(2**20) as memory:
            local = np.zeros(2**20, dtype=np.uint8)
            published = pair.source.direct().publish([RegionAddress(0, memory.ptr, 2**20)])
            ptr = pair.open_descriptor(dict(published), [local])[0]
            direct = pair.target.direct()
            prepared = direct.prepare(table(row(ptr, local.ctypes.data, 2**20)))
        with pytest.raises(TransportError, match=r"NIXL.*new one"):
            direct.read(prepared, deadline())
        assert "connect again" in str(pair.target.lost())
        other = connect(P2pTransport(), self.alloc)
        with other.source, other.target:
            assert other.target.probe_direct(deadline()).is_usable

    def test_a_stream_goes_on_after_a_wait_that_was_given_up(self, pair: Pair) -> None:
        source, target = pair.ring(2, 2**20)
        target.begin_move("s1")
        for n in range(10):
            token = CancelToken()
            waiting = pair.start(partial(target.receive, deadline(token=token)))
            token.cancel("enough")
            with pytest.raises(CancelledError):
                waiting.result(LIMIT_S)
            source.submit(source.acquire(deadline()), header(2**20, n))
            head, slot = target.receive(deadline())
            assert head.sequence == n
            target.release(slot)

    def test_slots_before_the_ring_is_known(self, pair: Pair) -> None:
        """The trainer may fill before the engine has asked for its end."""
        source = pair.source.stream(RingOptions(2, 64), deadline())
        for n in range(2):
            source.submit(source.acquire(deadline()), header(64, n))
        target = pair.target.stream(deadline())
        target.begin_move("s1")
        assert [target.receive(deadline())[0].sequence for _ in range(2)] == [0, 1]
