"""A small run of several versions, in memory and in a store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from weightsync import workloads
from weightsync.checkpoints import read_tensors
from weightsync.store import Cut, Publisher, Store
from weightsync.store.cutting import Cutter
from weightsync.store.publish import Weight, Weights
from weightsync.store.weights import pieces_of
from weightsync.types import TensorMeta

RUN = "run-1"
CONFIG = b'{"model_type": "none"}'
SIZE = 48


@cache
def contents(version: int) -> dict[str, bytes]:
    """The bytes of every tensor of a version."""
    model = workloads.small_model(size=SIZE)
    options = workloads.AdamOptions(learning_rate=1e-5)
    steps = workloads.versions(model, options)
    found = model if version == 0 else next(islice(steps, version - 1, None))
    return {name: bits.tobytes() for name, bits in found.items()}


@cache
def metas() -> dict[str, TensorMeta]:
    model = workloads.small_model(size=SIZE)
    return {name: TensorMeta(name, "bfloat16", bits.shape) for name, bits in model.items()}


def weights(version: int) -> Weights:
    return {
        name: Weight(metas()[name], np.frombuffer(data, dtype=np.uint8).copy())
        for name, data in contents(version).items()
    }


CUTS = [Cut(r".*proj.*", dim=1, parts=3), Cut(r"embed.*", dim=0, parts=2)]


def in_pieces(version: int, cuts: list[Cut] | None = None) -> Weights:
    cutter = Cutter(CUTS if cuts is None else cuts)
    return {p.meta.name: p for w in weights(version).values() for p in pieces_of(w, cutter)}


def published_in_pieces(directory: Path, last: int, **options: Any) -> tuple[Store, Publisher]:
    directory.mkdir(exist_ok=True)
    store = Store(directory, RUN)
    publisher = Publisher(store, **options)
    for version in range(last + 1):
        publisher.publish(version, in_pieces(version))
    return store, publisher


def published(
    directory: Path, last: int, run: str = RUN, first: int = 0
) -> tuple[Store, Publisher]:
    """A store with versions up to ``last``; the first one full."""
    directory.mkdir(exist_ok=True)
    store = Store(directory, run)
    publisher = Publisher(store, extra_files={"config.json": CONFIG})
    for version in range(first, last + 1):
        publisher.publish(version, weights(version))
    return store, publisher


def arrays(version: int) -> dict[str, Any]:
    """A version as arrays of their own (fp16 by name: NumPy knows no bf16)."""
    return {
        name: np.frombuffer(data, dtype=np.float16).reshape(metas()[name].shape).copy()
        for name, data in contents(version).items()
    }


def held_arrays(live: Mapping[str, Any], last: int = 9) -> int | None:
    """The version that these arrays are, bit for bit; None if they are none."""
    found = {name: array.tobytes() for name, array in live.items()}
    return next((v for v in range(last + 1) if contents(v) == found), None)


def held(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint folder."""
    found = {}
    for tensor in read_tensors(folder):
        data = (folder / tensor.file).read_bytes()
        start = tensor.offset_bytes
        found[tensor.meta.name] = data[start : start + tensor.meta.num_bytes]
    return found
