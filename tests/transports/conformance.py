"""What every transport must do: inherited by the tests of each.

A subclass of :class:`FullContract` gives ``make_transport`` (and ``alloc``, if only some memory can be
published); each test gets a connected pair whose two ends live in this process, on threads of their
own where both have to act. What the death of a process does is in :class:`ProcessContract`.
"""

from __future__ import annotations

import json
import threading

import pytest
from processes import open_fds

from transports.direct_contract import DirectContract
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
    view,
)
from transports.stream_contract import StreamContract
from weightsync.deadline import CancelToken
from weightsync.errors import (
    CancelledError,
    DeadlineError,
    PeerLostError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.transports.base import (
    Transport,
)
from weightsync.types import Contract

__all__ = [
    "Bytes",
    "ConnectContract",
    "DirectContract",
    "FullContract",
    "Pair",
    "StreamContract",
    "TransportContract",
    "addresses",
    "connect",
    "deadline",
    "header",
    "random_bytes",
    "row",
    "table",
    "view",
]


class ConnectContract(TransportContract):
    """Handshake, descriptors, ends."""

    def test_capabilities_name_each_contract(self, transport: Transport) -> None:
        capabilities = transport.capabilities()
        assert capabilities.is_usable
        assert Contract.STREAM in capabilities.contracts
        for contract, availability in capabilities.contracts.items():
            assert availability.is_usable or (availability.reason and availability.remedy)
            assert capabilities.costs[contract].seconds(1, 10**9) > 0

    def test_accept_has_a_deadline(self, transport: Transport) -> None:
        with transport.open_source() as source, pytest.raises(DeadlineError, match=r"the peer"):
            source.accept(deadline(SHORT_S, "accept"))

    def test_accept_can_be_cancelled(self, transport: Transport) -> None:
        token = CancelToken()
        token.cancel("no need")
        with transport.open_source() as source, pytest.raises(CancelledError, match="no need"):
            source.accept(deadline(token=token))

    def test_garbage_descriptors_are_refused(self, transport: Transport) -> None:
        with transport.open_source() as source:
            good = json.loads(json.dumps(source.descriptor()))
            for bad in ({}, {"schema": 1}, {**good, "schema": 99}, {**good, "transport": "no"}):
                with pytest.raises(WeightSyncError):
                    transport.open_target(bad, deadline(2.0))
            for name in good:
                for value in (None, [], 10**30):
                    with pytest.raises(WeightSyncError):
                        transport.open_target({**good, name: value}, deadline(2.0))

    def test_close_is_idempotent_and_seen(self, pair: Pair) -> None:
        assert pair.source.lost() is None
        assert pair.target.lost() is None
        source, target = pair.ring(2, 100)
        target.begin_move("s1")
        waiting = pair.start(lambda: target.receive(deadline()))
        pair.source.close()
        pair.source.close()
        with pytest.raises(PeerLostError):
            waiting.result(LIMIT_S)
        assert pair.target.lost()
        with pytest.raises(PeerLostError):
            source.acquire(deadline())

    def test_a_closed_end_is_not_reached(self, transport: Transport) -> None:
        with transport.open_source() as source:
            descriptor = source.descriptor()
        with pytest.raises((UnavailableError, PeerLostError)):
            transport.open_target(descriptor, deadline(2.0))

    def test_paths_are_named(self, pair: Pair) -> None:
        assert pair.source.path
        assert pair.target.path

    def test_nothing_is_left_open(self, transport: Transport) -> None:
        assert self.left_open(transport) == []

    def left_open(self, transport: Transport) -> list[str]:
        """What of this process differs after five lives; the first one's libraries keep what they open."""
        self._one_life(transport)
        before, num_threads = set(open_fds().items()), threading.active_count()
        for _ in range(5):
            self._one_life(transport)
        found = [f"descriptor {fd}: {what}" for fd, what in before ^ set(open_fds().items())]
        more = threading.active_count() - num_threads
        return [*sorted(found), *([f"{more} threads"] if more else [])]

    def _one_life(self, transport: Transport) -> None:
        pair = connect(transport, self.alloc, self.device, self.source_device)
        with pair.source, pair.target:
            source, target = pair.ring(2, 4096)
            slot = source.acquire(deadline())
            source.submit(slot, header(8))
            target.begin_move("s1")
            target.receive(deadline())
            pair.target.probe_direct(deadline())
        pair.pool.shutdown()


class FullContract(ConnectContract, StreamContract, DirectContract):
    """All of it: what a subclass usually inherits."""
