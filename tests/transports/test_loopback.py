"""The reference keeps the contract, and fails when it is told to."""

from __future__ import annotations

import numpy as np
import pytest

from transports.conformance import (
    FullContract,
    Pair,
    connect,
    deadline,
    header,
    row,
    table,
    view,
)
from weightsync.errors import DeadlineError, PeerLostError, UnavailableError
from weightsync.transports.base import Transport
from weightsync.transports.loopback import Fault, LoopbackFaults, LoopbackTransport


class TestLoopback(FullContract):
    def make_transport(self) -> Transport:
        return LoopbackTransport()

    def test_another_process_is_refused(self, transport: Transport) -> None:
        with transport.open_source() as source:
            foreign = {**source.descriptor(), "pid": 1}
            with pytest.raises(UnavailableError, match="ipc"):
                transport.open_target(foreign, deadline())

    def test_one_target_only(self, pair: Pair, transport: Transport) -> None:
        with pytest.raises(UnavailableError, match="already"):
            transport.open_target(pair.source.descriptor(), deadline())


def _pair(faults: LoopbackFaults) -> Pair:
    return connect(LoopbackTransport(faults), lambda n: np.zeros(n, np.uint8))


class TestFaults:
    def _submit(self, pair: Pair, count: int) -> list[int]:
        """Values that the target finds in its slots (each filled with its number)."""
        source, target = pair.ring(count, 16)
        target.begin_move("s1")
        for n in range(count):
            slot = source.acquire(deadline())
            view(slot.ptr, 16)[:] = 2 * n
            source.submit(slot, header(16, n))
        found = []
        while True:
            try:
                _, slot = target.receive(deadline(0.1))
            except DeadlineError:
                return found
            found.append(int(view(slot.ptr, 16)[0]))
            target.release(slot)

    def test_a_slot_is_dropped(self) -> None:
        pair = _pair(LoopbackFaults(slots={2: Fault.DROP}))
        with pair.source, pair.target:
            assert self._submit(pair, 3) == [0, 4]

    def test_a_slot_is_corrupted(self) -> None:
        pair = _pair(LoopbackFaults(slots={3: Fault.CORRUPT}))
        with pair.source, pair.target:
            assert self._submit(pair, 3) == [0, 2, 5]

    def test_the_peer_is_lost_at_a_slot(self) -> None:
        pair = _pair(LoopbackFaults(slots={2: Fault.LOSE_PEER}))
        with pair.source, pair.target, pytest.raises(PeerLostError):
            self._submit(pair, 3)

    @pytest.mark.parametrize(
        ("fault", "expected"), [(Fault.DROP, [1] * 4 + [0] * 4), (Fault.CORRUPT, [0] + [1] * 7)]
    )
    def test_a_read_goes_wrong_once(self, fault: Fault, expected: list[int]) -> None:
        pair = _pair(LoopbackFaults(reads={2: fault}))
        with pair.source, pair.target:
            remote, local = np.ones(8, np.uint8), np.zeros(8, np.uint8)
            ptr, at = pair.open([remote], [local])[0], int(local.ctypes.data)
            direct = pair.target.direct()
            prepared = direct.prepare(table(row(ptr, at, 4), row(ptr + 4, at + 4, 4)))
            for values in ([1] * 8, expected, [1] * 8):
                local[:] = 0
                direct.read(prepared, deadline())
                assert local.tolist() == values

    def test_the_peer_is_lost_at_a_read(self) -> None:
        pair = _pair(LoopbackFaults(reads={1: Fault.LOSE_PEER}))
        with pair.source, pair.target:
            remote, local = np.ones(8, np.uint8), np.zeros(8, np.uint8)
            ptr = pair.open([remote], [local])[0]
            with pytest.raises(PeerLostError):
                pair.read(row(ptr, int(local.ctypes.data), 8))
            assert not local.any()
