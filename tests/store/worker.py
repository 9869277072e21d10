"""The processes of the store's kill tests: a publisher and a puller that do as their parent says."""

from __future__ import annotations

from pathlib import Path

from processes import Pipe

from store.helpers import RUN, weights
from weightsync.store import LocalCheckpoint, Publisher, Store


def publish(pipe: Pipe) -> None:
    """Full version 0, then deltas on it, up to the version that the parent names."""
    directory, last = pipe.receive()
    publisher = Publisher(Store(directory, RUN))
    every = [weights(version) for version in range(last + 1)]
    pipe.send("ready")
    for version, found in enumerate(every):
        publisher.publish(version, found)
    pipe.send("done")


def pull(pipe: Pipe) -> None:
    """Pull the versions that the parent names, in turn."""
    directory, local, versions = pipe.receive()
    store = Store(directory, RUN)
    pipe.send("ready")
    with LocalCheckpoint(Path(local)) as checkpoint:
        for version in versions:
            checkpoint.pull(store, version)
    pipe.send("done")
