"""``ipc`` keeps the contract on each of its paths."""

from __future__ import annotations

from transports.conformance import Bytes, FullContract
from weightsync.memory import SharedArena
from weightsync.transports.base import Transport
from weightsync.transports.ipc import DirectPath, IpcTransport


class TestAuto(FullContract):
    def make_transport(self) -> Transport:
        return IpcTransport()


class TestProcessRead(FullContract):
    def make_transport(self) -> Transport:
        return IpcTransport(DirectPath.PROCESS_READ)


class TestMemfd(FullContract):
    """Where the kernel refuses to let one process read another."""

    def setup_method(self) -> None:
        self._arena = SharedArena(256 * 2**20)

    def teardown_method(self) -> None:
        self._arena.close()

    def make_transport(self) -> Transport:
        return IpcTransport(DirectPath.MEMFD)

    def alloc(self, num_bytes: int) -> Bytes:
        return self._arena.empty((num_bytes,), "uint8")
