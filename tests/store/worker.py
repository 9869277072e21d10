"""The processes of the store's kill tests: a publisher and a puller that do as their parent says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from faults.rank_worker import DirectoryStore
from processes import Pipe
from rank_engines import engine_ranks
from updating import LIMIT_S

from engine_adapter.fake import FakeEngine
from store.helpers import RUN, arrays, held_arrays, weights
from weightsync.errors import WeightSyncError
from weightsync.layouts import ShardRule
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.store import LocalCheckpoint, Publisher, Store
from weightsync.store.weights import weights_of


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


def publish_arrays(pipe: Pipe) -> None:
    """The same of arrays that an engine without torch can hold; one version for each word."""
    (directory,) = pipe.receive()
    publisher = Publisher(Store(directory, RUN))
    pipe.send("ready")
    for version in iter(pipe.receive, "end"):
        publisher.publish(version, weights_of(arrays(version).items()))
        pipe.send(version)


def follow(pipe: Pipe) -> None:
    """An engine that pulls at each word, and says what it serves."""
    (directory,) = pipe.receive()
    engine = FakeEngine(arrays(9))
    with Receiver(engine) as receiver:
        follower = receiver.follow(directory, RUN)
        pipe.send("ready")
        for _ in iter(pipe.receive, "end"):
            report = follower.pull()
            label, _ = engine.generate()
            pipe.send(
                [
                    label,
                    list(report.kinds),
                    label is not None and held_arrays(engine.weights) == label,
                ]
            )


def follow_endlessly(pipe: Pipe) -> None:
    """Up and down between the versions of a store, until the parent kills it."""
    directory, versions = pipe.receive()
    engine = FakeEngine(arrays(9))
    with Receiver(engine) as receiver:
        follower = receiver.follow(directory, RUN)
        pipe.send("ready")
        for version in versions:
            follower.pull(version)


def follow_as_rank(pipe: Pipe) -> None:
    """A rank of an engine of two, which hold halves of matrices: rank 0 pulls at a word, both say
    which version they serve, and whether that is what they hold."""
    directory, folder, rank = pipe.receive()
    engine = engine_ranks(arrays(9), 2)[rank]
    meeting = DirectoryStore(folder)
    with Receiver(engine, rank=rank, world_size=2, store=meeting, join_timeout_s=LIMIT_S) as made:
        follower = made.follow(directory, RUN) if rank == 0 else None
        pipe.send("ready")
        for word in iter(pipe.receive, "end"):
            kinds: list[str] = []
            if word == "pull" and follower is not None:
                kinds = list(follower.pull().kinds)
            label, _ = engine.generate()
            pipe.send([label, kinds, label is not None and engine.holds(arrays(label))])


def publish_as_rank(pipe: Pipe) -> None:
    """A rank of a trainer of two that hold halves of matrices: publishes the versions that it is told,
    and says each time how that ended."""
    directory, folder, rank = pipe.receive()
    rules = [ShardRule(r"(embed|layers|heavy).*\.weight", dim=0, index=rank, count=2)]
    sender = Sender.connect(
        [directory], transport="disk-delta", run_id=RUN, rank=rank, world_size=2,
        store=DirectoryStore(folder), rules=rules, commit_timeout_s=LIMIT_S,
    )  # fmt: skip
    pipe.send("ready")
    for version in iter(pipe.receive, "end"):
        halves = {}
        for name, array in arrays(version).items():
            is_cut = name.endswith("weight")
            halves[name] = np.array_split(array, 2)[rank] if is_cut else array
        try:
            with sender.update(version=version) as update:
                update.send(halves)
            sender.wait()
            pipe.send("visible")
        except WeightSyncError as error:
            pipe.send(type(error).__name__)
    sender.close()
