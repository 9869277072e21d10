"""``disk-delta`` keeps the store contract."""

from __future__ import annotations

from typing import Any

from store.helpers import contents, weights

from transports.store_contract import (
    StoreContract,
    test_transports_between_peers_keep_no_versions,
)
from weightsync.store.chain import chain_source, open_chain
from weightsync.transports.base import StoreTarget

__all__ = ["test_transports_between_peers_keep_no_versions"]


class TestDiskDelta(StoreContract):
    transport = "disk-delta"

    def payload(self, version: int) -> Any:
        return weights(version)

    def read(self, target: StoreTarget, way: Any) -> dict[str, bytes]:
        store: Any = target
        tensors = open_chain(chain_source(store, way)).tensors()
        return {t.meta.name: t.read().tobytes() for t in tensors}

    def expected(self, version: int) -> dict[str, bytes]:
        return contents(version)
