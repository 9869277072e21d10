"""A connected pair of endpoints in one process, for the conformance tests."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from processes import num_maps, open_fds, resident_bytes

from transports.wire import (
    LIMIT_S,
    SHORT_S,
    Bytes,
    addresses,
    deadline,
    header,
    random_bytes,
    row,
    table,
    view,
)
from weightsync.transports.base import (
    RingOptions,
    SourceEndpoint,
    StreamSource,
    StreamTarget,
    TargetEndpoint,
    Transport,
)

__all__ = [
    "LIMIT_S",
    "SHORT_S",
    "Bytes",
    "Footprint",
    "Pair",
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

T = TypeVar("T")


@dataclass
class Pair:
    """Both ends, and the memory that is published at one and landed in at the other."""

    source: SourceEndpoint
    target: TargetEndpoint
    pool: ThreadPoolExecutor
    alloc: Callable[[int], Bytes]
    device: str = "cpu"  # the target's
    source_device: str = "cpu"
    kept: list[Any] = field(default_factory=list)

    def start(self, work: Callable[[], T]) -> Future[T]:
        return self.pool.submit(work)

    def ring(self, num_slots: int, slot_bytes: int) -> tuple[StreamSource, StreamTarget]:
        options = RingOptions(num_slots, slot_bytes, self.source_device)
        other = self.start(lambda: self.target.stream(deadline(), self.device))
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


def connect(
    transport: Transport,
    alloc: Callable[[int], Bytes],
    device: str = "cpu",
    source_device: str | None = None,
) -> Pair:
    """A connected pair, both ends here."""
    pool = ThreadPoolExecutor(4)
    source_device = source_device or device
    source = transport.open_source(source_device)
    accepted = pool.submit(source.accept, deadline(stage="accept"))
    descriptor = json.loads(json.dumps(source.descriptor()))
    target = transport.open_target(descriptor, deadline(stage="attach"), device)
    accepted.result(LIMIT_S)
    return Pair(source, target, pool, alloc, device, source_device)


@dataclass(frozen=True)
class Footprint:
    """What this process holds."""

    num_fds: int
    num_maps: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        return cls(len(open_fds()), num_maps(), resident_bytes())

    def check_flat(self, before: Footprint) -> None:
        """After hundreds of rounds: less than one mapping in ten of them, and no memory to speak of.

        The allowance is what the C library takes for its own thread arenas now and then.
        """
        assert self.num_fds == before.num_fds
        assert self.num_maps - before.num_maps <= 10
        assert self.resident_bytes - before.resident_bytes <= 16 * 2**20


class TransportContract:
    """Connecting, and what both contracts share."""

    device = "cpu"
    source_device: str | None = None  # where it is another one

    def make_transport(self) -> Transport:
        raise NotImplementedError

    def alloc(self, num_bytes: int) -> Bytes:
        """Memory that this transport can publish."""
        return self.landing(num_bytes)

    def landing(self, num_bytes: int) -> Bytes:
        """Zeroed memory to read into."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def view(self, ptr: int, num_bytes: int) -> Bytes:
        """Bytes of a slot."""
        return view(ptr, num_bytes)

    @pytest.fixture
    def transport(self) -> Transport:
        return self.make_transport()

    @pytest.fixture
    def pair(self, transport: Transport) -> Iterator[Pair]:
        pair = connect(transport, self.alloc, self.device, self.source_device)
        try:
            yield pair
        finally:
            pair.target.close()
            pair.source.close()
            pair.pool.shutdown(wait=True)
