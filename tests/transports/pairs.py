"""A connected pair of endpoints in one process, for the conformance tests."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from weightsync.deadline import Deadline
from weightsync.transports.base import (
    RingOptions,
    SlotHeader,
    SourceEndpoint,
    StreamSource,
    StreamTarget,
    TargetEndpoint,
    Transport,
)
from weightsync.types import RegionAddress

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
LIMIT_S = 20.0
SHORT_S = 0.15


def deadline(limit_s: float = LIMIT_S, stage: str = "test", **more: Any) -> Deadline:
    return Deadline(limit_s, peer="the peer", stage=stage, **more)


def header(num_bytes: int, sequence: int = 0, session: str = "s1", **more: Any) -> SlotHeader:
    return SlotHeader(session, 1, sequence, num_bytes, num_bytes, 0, **more)


def view(ptr: int, num_bytes: int) -> Bytes:
    """Bytes at an address, which must outlive the view."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(ptr))


def row(source: int, target: int, num_bytes: int, *dims: tuple[int, int, int]) -> list[int]:
    """One row of a segment table; ``dims`` outermost first."""
    padded = [(1, 0, 0)] * (3 - len(dims)) + list(dims)
    return [source, target, num_bytes, 0, *(n for dim in padded for n in dim)]


def table(*rows: list[int]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(len(rows), 13)


def random_bytes(num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


@dataclass
class Pair:
    """Both ends, and the memory that is published at one and landed in at the other."""

    source: SourceEndpoint
    target: TargetEndpoint
    pool: ThreadPoolExecutor
    alloc: Callable[[int], Bytes]
    kept: list[Any] = field(default_factory=list)

    def start(self, work: Callable[[], T]) -> Future[T]:
        return self.pool.submit(work)

    def ring(self, num_slots: int, slot_bytes: int) -> tuple[StreamSource, StreamTarget]:
        options = RingOptions(num_slots, slot_bytes)
        other = self.start(lambda: self.target.stream(deadline()))
        return self.source.stream(options, deadline()), other.result(LIMIT_S)

    def published(self, num_bytes: int, seed: int = 1) -> Bytes:
        memory = self.alloc(max(num_bytes, 1))[:num_bytes]
        memory[:] = random_bytes(num_bytes, seed)
        self.kept.append(memory)
        return memory

    def open(self, source: Sequence[Bytes], local: Sequence[Bytes]) -> dict[int, int]:
        """Publish, carry the descriptor over as text, open."""
        descriptor = json.loads(json.dumps(self.source.direct().publish(addresses(source))))
        return self.open_descriptor(descriptor, local)

    def open_descriptor(self, descriptor: Any, local: Sequence[Bytes]) -> dict[int, int]:
        return self.target.direct().open(descriptor, addresses(local), deadline())

    def read(self, *rows: list[int]) -> None:
        direct = self.target.direct()
        direct.read(direct.prepare(table(*rows)), deadline())


def addresses(arrays: Sequence[Bytes]) -> list[RegionAddress]:
    return [RegionAddress(i, int(a.ctypes.data), a.nbytes) for i, a in enumerate(arrays)]


def connect(transport: Transport, alloc: Callable[[int], Bytes]) -> Pair:
    """A connected pair, both ends here."""
    pool = ThreadPoolExecutor(4)
    source = transport.open_source()
    accepted = pool.submit(source.accept, deadline(stage="accept"))
    descriptor = json.loads(json.dumps(source.descriptor()))
    target = transport.open_target(descriptor, deadline(stage="attach"))
    accepted.result(LIMIT_S)
    return Pair(source, target, pool, alloc)


class TransportContract:
    """Connecting, and what both contracts share."""

    def make_transport(self) -> Transport:
        raise NotImplementedError

    def alloc(self, num_bytes: int) -> Bytes:
        """Memory that this transport can publish."""
        return np.zeros(num_bytes, dtype=np.uint8)

    @pytest.fixture
    def transport(self) -> Transport:
        return self.make_transport()

    @pytest.fixture
    def pair(self, transport: Transport) -> Iterator[Pair]:
        pair = connect(transport, self.alloc)
        try:
            yield pair
        finally:
            pair.target.close()
            pair.source.close()
            pair.pool.shutdown(wait=True)
