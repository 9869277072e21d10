"""Ranks of trainers and engines as processes, for tests in which one of several ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from processes import Pipe
from rank_engines import FakeRank, engine_ranks

from faults.worker import commands_of, report_json, serve
from weightsync.errors import TaintedError
from weightsync.receiver import Receiver
from weightsync.sender import Sender

BUCKET_BYTES = 2048
NAMES = ("wide", "tall", "norm", "last")


def weights(version: int) -> dict[str, Any]:
    """Of one version, as a pure function of its number."""
    rng = np.random.default_rng([11, version])
    return {
        "wide": rng.standard_normal((48, 40), dtype=np.float32),
        "tall": rng.integers(-99, 99, (90, 12)).astype(np.int8),
        "norm": rng.standard_normal(65, dtype=np.float32),
        "last": rng.standard_normal((24, 16), dtype=np.float32),
    }


def part(version: int, rank: int, size: int) -> dict[str, Any]:
    """What a trainer rank sends: some tensors, and all ranks have one."""
    whole = weights(version)
    return {"norm": whole["norm"], **{n: whole[n] for n in NAMES[rank::size]}}


class DirectoryStore:
    """A store that processes share."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")

    def set(self, key: str, value: str) -> None:
        new = self._file(key).with_suffix(f".{os.getpid()}")
        new.write_text(value)
        new.rename(self._file(key))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def get(self, key: str) -> str:
        return self._file(key).read_text()


class EngineRank:
    """What a parent may ask a rank of an engine."""

    def __init__(self, fake: FakeRank, receiver: Receiver) -> None:
        self._fake, self._receiver = fake, receiver

    def url(self) -> str:
        return self._receiver.url

    def now(self, *versions: int) -> Any:
        """The label, and which of these versions the weights are; or the words with which it refuses."""
        try:
            with self._fake.step(limit_s=60.0):
                label = None if self._fake.version is None else self._fake.version.number
                held = next((v for v in versions if self._fake.holds(weights(v))), "a mix")
                return [label, held]
        except TaintedError as error:
            return str(error)

    def status(self) -> Any:
        return self._receiver._status(None)

    def close(self) -> None:
        self._receiver.close()


def engine(pipe: Pipe) -> None:
    """A rank of an engine with the weights of version 0."""
    rank, size, folder = pipe.receive()
    fake = engine_ranks(weights(0), size)[rank]
    store = DirectoryStore(folder)
    receiver = Receiver(fake, rank=rank, world_size=size, store=store, join_timeout_s=30).start()
    pipe.send("joined")
    serve(pipe, commands_of(EngineRank(fake, receiver)))


class TrainerRank:
    """What a parent may ask a rank of a trainer."""

    def __init__(self) -> None:
        self._sender: Any = None
        self._rank, self._size = 0, 1

    def connect(self, url: str, rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
        self._rank, self._size = rank, size
        several: Any = {"store": DirectoryStore(folder)} if size > 1 else {}
        self._sender = Sender.connect(
            [url], rank=rank, world_size=size, bucket=BUCKET_BYTES, **several, **options
        )

    def update(self, version: int) -> dict[str, Any]:
        source = part(version, self._rank, self._size)
        update = self._sender.update(version=version)
        with update:
            update.send(source)
        return report_json(update.report)

    def close(self) -> None:
        self._sender.close()


def trainer(pipe: Pipe) -> None:
    """A rank of a trainer that does what its parent says."""
    serve(pipe, commands_of(TrainerRank()))
