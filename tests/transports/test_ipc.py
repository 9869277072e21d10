"""``ipc`` keeps the contract on each of its paths."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from processes import Child

from transports.conformance import (
    Bytes,
    FullContract,
    Pair,
    TransportContract,
    addresses,
    deadline,
    row,
    table,
)
from transports.peers import ipc_memfd
from transports.process_contract import FAST_S, Peers, ProcessContract
from weightsync.errors import PeerLostError, ProtocolError, UnavailableError
from weightsync.memory import SharedArena
from weightsync.transports.base import TargetEndpoint, Transport
from weightsync.transports.ipc import DirectPath, IpcTransport


class DeathInARead(FullContract, ProcessContract):
    """The trainer dies while its memory is being read."""

    def test_it_ends_at_once(self, far_source: tuple[Child, TargetEndpoint]) -> None:
        child, endpoint = far_source
        child.send(["publish", 4096, 3])
        local = np.zeros(4096, dtype=np.uint8)
        direct = endpoint.direct()
        ptr = direct.open(child.receive()["result"], addresses([local]), deadline())[0]
        prepared = direct.prepare(self.slow_table(ptr, int(local.ctypes.data)))
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(direct.read, prepared, deadline(60.0, "read"))
            while not local.any():  # until the first bytes are here
                assert not reading.done()
            child.kill()
            with pytest.raises(PeerLostError):
                reading.result(FAST_S)


class TestAuto(DeathInARead):
    factory = "weightsync.transports.ipc:IpcTransport"

    def make_transport(self) -> Transport:
        return IpcTransport()


class TestProcessRead(FullContract):
    def make_transport(self) -> Transport:
        return IpcTransport(DirectPath.PROCESS_READ)


class TestMemfd(DeathInARead):
    """Where the kernel refuses to let one process read another."""

    factory = "transports.peers:ipc_memfd"

    def setup_method(self) -> None:
        self._arena = SharedArena(256 * 2**20)

    def teardown_method(self) -> None:
        self._arena.close()

    def make_transport(self) -> Transport:
        return ipc_memfd()

    def alloc(self, num_bytes: int) -> Bytes:
        return self._arena.empty((num_bytes,), "uint8")

    def test_memory_outside_an_arena_is_refused(self, pair: Pair) -> None:
        remote, local = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        with pytest.raises(UnavailableError, match=r"SharedArena.*ptrace_scope.*SYS_PTRACE"):
            pair.open([remote], [local])
        inside = pair.published(64)
        ptr = pair.open([inside], [local])[0]
        pair.read(row(ptr, int(local.ctypes.data), 64))
        assert np.array_equal(local, inside)

    def test_the_engine_cannot_write(self, pair: Pair) -> None:
        remote, local = pair.published(64), np.zeros(64, np.uint8)
        ptr = pair.open([remote], [local])[0]
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, stop = (int(n, 16) for n in line.split()[0].split("-"))
            if start <= ptr < stop:
                assert line.split()[1] == "r--s"
                return
        raise AssertionError("not mapped")


class TestAutoTakesTheFastWay(TransportContract):
    def make_transport(self) -> Transport:
        return IpcTransport()

    def test_by_epoch(self, pair: Pair) -> None:
        arena = SharedArena(10_000)
        shared, private, local = (
            arena.empty((64,), "uint8"),
            np.ones(64, np.uint8),
            np.zeros(64, np.uint8),
        )
        for n, (remote, path) in enumerate([(shared, "memfd"), (private, "process_vm_readv")] * 3):
            remote[:] = n
            ptr = pair.open([remote], [local])[0]
            pair.read(row(ptr, int(local.ctypes.data), 64))
            assert (local == n).all()
            assert pair.target.path == path
        pair.open([shared, private], [local])
        assert pair.target.path == "process_vm_readv"
        arena.close()


class TestRefused(TransportContract):
    """Neither way: no arena, and no reading of the process."""

    def make_transport(self) -> Transport:
        return ipc_memfd()

    def test_probe_says_why_and_what_to_do(self, pair: Pair) -> None:
        availability = pair.target.probe_direct(deadline())
        assert not availability.is_usable
        assert availability.reason
        assert "SharedArena" in availability.remedy


class TestHost(TransportContract):
    """A trainer that this engine cannot reach is refused before anything is opened."""

    def make_transport(self) -> Transport:
        return IpcTransport()

    @pytest.mark.parametrize(("name", "value"), [("boot_id", "another"), ("net_namespace", 1)])
    def test_another_host(self, transport: Transport, name: str, value: object) -> None:
        with transport.open_source() as source:
            good = dict(source.descriptor())
            foreign = {**good, "host": {**good["host"], name: value}}
            with pytest.raises(UnavailableError, match=name):
                transport.open_target(foreign, deadline())

    @pytest.mark.parametrize("name", ["boot_id", "net_namespace"])
    def test_a_field_is_missing_or_unknown(self, transport: Transport, name: str) -> None:
        with transport.open_source() as source:
            good = dict(source.descriptor())
            host = {k: v for k, v in good["host"].items() if k != name}
            with pytest.raises(ProtocolError, match=name):
                transport.open_target({**good, "host": host}, deadline())
            with pytest.raises(ProtocolError, match="surplus"):
                transport.open_target({**good, "surplus": 1}, deadline())

    def test_a_descriptor_of_another_pair(self, pair: Pair, transport: Transport) -> None:
        memory = np.zeros(64, np.uint8)
        with transport.open_source() as other:
            foreign = other.direct().publish(addresses([memory]))
            with pytest.raises(ProtocolError, match="endpoint"):
                pair.open_descriptor(foreign, [memory])

    def test_published_before_the_engine_came(self, transport: Transport) -> None:
        remote, local = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
        with transport.open_source() as source:
            descriptor = source.direct().publish(addresses([remote]))
            with transport.open_target(source.descriptor(), deadline()) as target:
                source.accept(deadline())
                direct = target.direct()
                ptr = direct.open(descriptor, addresses([local]), deadline())[0]
                read = direct.prepare(table(row(ptr, int(local.ctypes.data), 64)))
                direct.read(read, deadline())
                assert np.array_equal(local, remote)
                assert target.path == "process_vm_readv"


class TestForkedChild:
    """A child that the victim forked holds its sockets open, and hides its death."""

    @pytest.mark.parametrize("victim", ["source", "target"])
    def test_death_is_known_at_once(self, victim: str) -> None:
        peers = Peers("weightsync.transports.ipc:IpcTransport", {}, Child)
        doomed: Child = getattr(peers, victim)
        survivor = peers.target if victim == "source" else peers.source
        try:
            peers.move("s1", 1)
            peers.source.receive()
            peers.target.receive()
            doomed.send(["fork"])
            sleeper = doomed.receive()["result"]
            move = (
                ["move", "s2", 5, 60.0] if victim == "source" else ["move", "s2", 2, 5000, 5, 60.0]
            )
            survivor.send(move)
            doomed.kill()
            answer = survivor.receive()
            os.kill(sleeper, signal.SIGKILL)
            assert answer["error"] == PeerLostError.__name__
            assert answer["seconds"] < FAST_S
        finally:
            peers.kill()
