"""``broadcast`` keeps the contract over gloo, between two ends and more."""

from __future__ import annotations

from nursery import fork_with_torch

from transports.conformance import ConnectContract, StreamContract
from transports.process_contract import StreamProcessContract
from weightsync.transports.base import Transport
from weightsync.transports.broadcast import BroadcastTransport


class TestPair(ConnectContract, StreamContract, StreamProcessContract):
    factory = "weightsync.transports.broadcast:BroadcastTransport"
    start = staticmethod(fork_with_torch)

    def make_transport(self) -> Transport:
        return BroadcastTransport()
