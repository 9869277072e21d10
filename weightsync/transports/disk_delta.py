"""``disk-delta``: versions of weights in a shared directory or an object store (docs/delta.md)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import UnavailableError
from weightsync.packages import is_installed
from weightsync.transports.base import (
    Descriptor,
    SourceEndpoint,
    StoreSource,
    StoreTarget,
    TargetEndpoint,
    Transport,
)
from weightsync.types import Availability, Capabilities, Contract

_NO_PEER = (
    "disk-delta has no live peer: a trainer publishes to a store (Sender.connect of a directory), and an "
    "engine follows it (Receiver.follow)"
)


class DiskDeltaTransport(Transport):
    """The store contract alone."""

    name = "disk-delta"

    def capabilities(self) -> Capabilities:
        store = Availability(True)
        if not is_installed("xxhash"):
            store = Availability(
                False, "files are checked by xxh3-128", "pip install 'weightsync[delta]'"
            )
        return Capabilities(self.name, MappingProxyType({Contract.STORE: store}), {})

    def open_source(self, device: str = "cpu") -> SourceEndpoint:
        raise UnavailableError(_NO_PEER)

    def open_target(
        self, descriptor: Descriptor, deadline: Deadline, device: str = "cpu"
    ) -> TargetEndpoint:
        raise UnavailableError(_NO_PEER)

    def open_store_source(self, location: str, run_id: str, **options: Any) -> StoreSource:
        """``options`` are those of :class:`weightsync.store.Publisher`."""
        from weightsync.store import Publisher, Store

        return Publisher(Store(location, run_id), **options)

    def open_store_target(self, location: str, run_id: str | None = None) -> StoreTarget:
        from weightsync.store import Store

        found = Store.newest_run(location) if run_id is None else run_id
        if found is None:
            raise UnavailableError(f"{location} holds no run with a version")
        return Store(location, found)
