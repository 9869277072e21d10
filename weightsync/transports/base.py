"""The contracts of a transport.

A trainer rank opens a :class:`SourceEndpoint`, hands its ``descriptor()`` (plain JSON) to an engine
rank over the control channel, and the engine opens a :class:`TargetEndpoint` from it. A pair then
moves bytes by one of two contracts. In both the *engine pulls*: no peer ever writes into memory that
the engine registered or mapped, so a late peer can harm nothing.

- *Stream*: a ring of slots in the source's memory. The source fills a slot and submits it; the target
  receives it, empties it and releases it. Back-pressure is the ring.
- *Direct*: the source publishes regions; the target reads any segments of them.

A third contract has no pair: a *store* keeps versions where both sides reach them.

Threads: an endpoint and what it made are used by one thread at a time, except ``lost()``, ``close()``
and cancelling through the deadline's token, which any thread may do at any time. Waits raise
:class:`DeadlineError`, :class:`CancelledError` or :class:`PeerLostError`; when a wait raised, no copy of
the endpoint is running any more: memory of this process is quiet.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, ProtocolError, UnavailableError
from weightsync.tables import DigestRows
from weightsync.types import Availability, Capabilities, CostConstants, RegionAddress

__all__ = [
    "Availability",
    "Capabilities",
    "CostConstants",
    "Descriptor",
    "DirectSource",
    "DirectTarget",
    "Endpoint",
    "GroupSource",
    "PreparedRead",
    "RingOptions",
    "Slot",
    "SlotHeader",
    "SourceEndpoint",
    "StoreSource",
    "StoreTarget",
    "StreamSource",
    "StreamTarget",
    "Table",
    "TargetEndpoint",
    "Transport",
]

#: A native segment table, int64[n, SEGMENT_COLUMNS] (see :mod:`weightsync.native`).
Table = npt.NDArray[np.int64]
Descriptor = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What travels beside a filled slot.

    Bytes ``[0, data_bytes)`` of the slot are tensor bytes, and ``metadata_bytes`` bytes from
    ``metadata_offset_bytes`` on say what they are: a slot describes itself.
    """

    session_id: str
    move_id: int
    sequence: int
    data_bytes: int
    metadata_offset_bytes: int
    metadata_bytes: int
    is_last: bool = False  # the last slot of its move

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, slot_bytes: int) -> SlotHeader:
        """Checked against the size of the slot: nothing in it may point outside."""
        try:
            header = cls(**value)
            sizes = (header.data_bytes, header.metadata_offset_bytes, header.metadata_bytes)
            end = header.metadata_offset_bytes + header.metadata_bytes
            sane = all(isinstance(n, int) and 0 <= n <= slot_bytes for n in (*sizes, end))
            sane = sane and isinstance(header.session_id, str) and isinstance(header.is_last, bool)
            sane = sane and all(isinstance(n, int) for n in (header.move_id, header.sequence))
        except TypeError as error:
            raise ProtocolError(f"slot header {json.dumps(value)[:200]}: {error}") from error
        if not sane:
            raise ProtocolError(f"slot header points outside its slot of {slot_bytes} B: {header}")
        return header


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of a ring: an address of this process and its size in bytes.

    The address is one of the ring's device.
    """

    index: int
    ptr: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RingOptions:
    """The ring a source makes: ``num_slots`` slots of ``slot_bytes`` bytes each.

    ``device``: where its slots lie in the source's process, ``cpu`` or ``cuda:<index>``.
    """

    num_slots: int
    slot_bytes: int
    device: str = "cpu"


class StreamSource(ABC):
    """The filling end of a ring."""

    #: How many blocks of a device a copy into a slot may take, beside what moves meanwhile; 0 for all.
    max_copy_blocks: int = 0

    @abstractmethod
    def begin_move(self, session_id: str, deadline: Deadline) -> None:
        """Make every slot free: what an unclean end left behind is dropped on both sides."""

    @abstractmethod
    def acquire(self, deadline: Deadline) -> Slot:
        """Wait for a free slot; its memory is the caller's until ``submit``."""

    @abstractmethod
    def submit(self, slot: Slot, header: SlotHeader) -> None:
        """Hand a filled slot to the target. Does not wait."""

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Wait until the target has released every submitted slot."""


class GroupSource(ABC):
    """The filling end of a ring that several targets empty: each slot is sent once to all of them.

    The targets share fate: an error that one of them causes ends the move of all.
    """

    #: How many blocks of a device a copy into a slot may take, beside what moves meanwhile; 0 for all.
    max_copy_blocks: int = 0

    @abstractmethod
    def begin_move(self, session_ids: Sequence[str], deadline: Deadline) -> None:
        """As of a :class:`StreamSource`; a session for each target, in the order of the ends."""

    @abstractmethod
    def acquire(self, deadline: Deadline) -> Slot:
        """Wait for a slot that every target has released."""

    @abstractmethod
    def submit(self, slot: Slot, headers: Sequence[SlotHeader]) -> None:
        """Hand a filled slot to all targets, with a header for each. Does not wait."""

    @abstractmethod
    def flush(self, deadline: Deadline) -> None:
        """Wait until every target has released every submitted slot."""


class StreamTarget(ABC):
    """The emptying end of a ring."""

    #: How many blocks of a device a copy out of a slot may take, beside what moves meanwhile; 0 for all.
    max_copy_blocks: int = 0

    @abstractmethod
    def begin_move(self, session_id: str) -> None:
        """From here on only slots of ``session_id`` are received; others are released unseen."""

    @abstractmethod
    def receive(self, deadline: Deadline) -> tuple[SlotHeader, Slot]:
        """Wait for the next filled slot; its bytes are readable here until ``release``."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Give a slot back to the source."""


class DirectSource(ABC):
    """The published end of direct reads."""

    @abstractmethod
    def publish(self, regions: Sequence[RegionAddress]) -> Descriptor:
        """Make regions readable by the target; the descriptor is JSON and names an epoch.

        The memory must stay valid until ``withdraw``. Publishing the same regions again is cheap and
        yields the same epoch; other regions replace the old ones under a new epoch.
        """

    @abstractmethod
    def withdraw(self) -> None:
        """Make nothing readable any more. The target must have finished reading."""


@dataclass(slots=True)
class PreparedRead:
    """A list of segments made ready to be read again and again."""

    table: Table
    num_bytes: int
    state: Any = field(default=None, repr=False)  # of the transport
    #: Of the last read, uint64 [num_owners]; None: it takes none.
    digests: npt.NDArray[np.uint64] | None = None
    device_s: float | None = None  # of the last read, by a device's own clock where one copied
    #: Of a target that ``digests_reads``: called within a read, while the device is at work. All of the
    #: read is on lane 0 of the device by then, so that what this enqueues there finds the bytes landed.
    meanwhile: Callable[[], None] | None = field(default=None, repr=False)


class DirectTarget(ABC):
    """The reading end."""

    @abstractmethod
    def open(
        self, descriptor: Descriptor, local: Sequence[RegionAddress], deadline: Deadline
    ) -> Mapping[int, int]:
        """Map what the source published; ``local`` is where reads will land.

        Returns for each published region the address by which read tables name it. Opening the same
        epoch and the same local regions again is cheap.
        """

    @property
    def digests_reads(self) -> bool:
        """Whether a read of what is open can also digest what it reads, at no cost worth naming."""
        return False

    @abstractmethod
    def prepare(self, table: Table, digests: DigestRows | None = None) -> PreparedRead:
        """Make a segment table (source addresses as ``open`` returned them) ready to be read.

        ``digests`` is a wish: if it can be had, each read leaves ``PreparedRead.digests``.
        """

    @abstractmethod
    def read(self, prepared: PreparedRead, deadline: Deadline) -> None:
        """Read everything. On return the bytes have landed; after an error nothing lands any more."""


class Endpoint(ABC):
    """One process's end of a pair. A context manager; ``close`` is idempotent."""

    @abstractmethod
    def lost(self) -> str | None:
        """Why the peer is known to be gone, or None. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, wake every waiter (with :class:`PeerLostError`) on both sides."""

    @property
    @abstractmethod
    def path(self) -> str:
        """How the bytes really travel, for people: ``process_vm_readv``, ``ucx cma`` ..."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SourceEndpoint(Endpoint):
    """The trainer's end."""

    @abstractmethod
    def descriptor(self) -> Descriptor:
        """What the target needs to reach this endpoint; JSON, with a secret of its own."""

    @abstractmethod
    def accept(self, deadline: Deadline) -> None:
        """Wait until the target has attached."""

    @abstractmethod
    def stream(self, options: RingOptions, deadline: Deadline) -> StreamSource:
        """The ring of this pair; made on the first call, later calls must ask for the same."""

    @abstractmethod
    def direct(self) -> DirectSource:
        """The direct contract of this pair."""


class TargetEndpoint(Endpoint):
    """The engine's end."""

    @abstractmethod
    def stream(self, deadline: Deadline, device: str = "cpu") -> StreamTarget:
        """The ring that the source made; waits until the source has made it.

        ``device`` is where its slots are readable here; that must fit where the source has them.
        """

    @abstractmethod
    def direct(self) -> DirectTarget:
        """The direct contract of this pair."""

    @abstractmethod
    def probe_direct(self, deadline: Deadline) -> Availability:
        """Whether direct reads of this very peer work, found out by reading a known word."""


class StoreSource(ABC):
    """The publishing end of a store: versions in a place that both sides reach, with no live peer.

    A version is visible whole or not at all, and what was published is never changed. ``payload`` and
    what becomes of it are the transport's own.
    """

    @abstractmethod
    def encode(self, version: int, payload: Any) -> Any:
        """Everything that has to read ``payload``, which may change afterwards. Nothing is visible."""

    @abstractmethod
    def commit(self, pending: Any) -> Any:
        """Make an encoded version visible. After an error it is not, and the next one is made on the
        last that is."""

    def publish(self, version: int, payload: Any) -> Any:
        """Both at once."""
        return self.commit(self.encode(version, payload))


class StoreTarget(ABC):
    """The reading end of a store. It opens sessions of its own at its engine."""

    @abstractmethod
    def latest(self) -> int | None:
        """The newest version that is visible, None if there is none."""

    @abstractmethod
    def fetch(self, version: int, have: Any = None, without: Collection[str] = ()) -> Any:
        """The cheapest way from what one has (None: nothing) to a version: what to take, in order.

        ``without`` names what turned out to be damaged. Raises :class:`UnavailableError` if there is
        no way.
        """


class Transport(ABC):
    """A way to move bytes; one instance a process, without state of its own."""

    name: str

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What works on this machine, and why not. Cheap enough to call at every connect."""

    @abstractmethod
    def open_source(self, device: str = "cpu") -> SourceEndpoint:
        """``device`` is where tensors are expected: what connects is measured there, if at all.

        Raises :class:`UnavailableError` or :class:`MissingDependencyError`.
        """

    @abstractmethod
    def open_target(
        self, descriptor: Descriptor, deadline: Deadline, device: str = "cpu"
    ) -> TargetEndpoint:
        """Attach to the source that wrote ``descriptor``; ``device`` as for ``open_source``."""

    def open_store_source(self, location: str, run_id: str, **options: Any) -> StoreSource:
        """Publish to a store. Raises :class:`UnavailableError` where there are live peers instead."""
        raise UnavailableError(f"{self.name} moves bytes between live peers; it keeps no versions")

    def open_store_target(self, location: str, run_id: str | None = None) -> StoreTarget:
        """Read a store; None: the run that was published to last."""
        raise UnavailableError(f"{self.name} moves bytes between live peers; it keeps no versions")

    def open_group(
        self, ends: Sequence[SourceEndpoint], options: RingOptions, deadline: Deadline
    ) -> GroupSource:
        """One ring for several accepted ends of this process, where ``Capabilities.streams_to_many``.

        Made on the first call for these ends; it replaces whatever ring they had, which must be idle.
        Their targets notice by themselves.
        """
        raise ConfigError(f"transport {self.name!r} has no streams to several targets")
