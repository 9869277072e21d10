"""The p2p transport keeps the contract with the real NIXL over loopback."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from transports.conformance import FullContract, row, table
from weightsync.transports.base import Transport
from weightsync.transports.p2p import P2pTransport

pytest.importorskip("nixl_cu13", reason="NIXL is not installed: pip install 'weightsync[p2p]'")


class TestP2p(FullContract):
    def make_transport(self) -> Transport:
        return P2pTransport()

    def slow_table(self, source: int, target: int) -> npt.NDArray[np.int64]:
        return table(row(source, target, 4096, (500, 0, 0), (1000, 0, 0)))
