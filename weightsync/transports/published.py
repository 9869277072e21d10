"""The direct contract over addresses: what a source publishes, and how a target reads it.

The descriptor (JSON, on the control channel) names regions and an epoch. The link beside it says in
order which epoch holds, so that a target notices a withdrawal before it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    TransportError,
    UnavailableError,
)
from weightsync.faults import reach
from weightsync.memory import SharedArena, find_arena
from weightsync.native import CancelFlag
from weightsync.tables import DigestRows
from weightsync.transports.base import (
    Descriptor,
    DirectSource,
    DirectTarget,
    PreparedRead,
    Table,
)
from weightsync.transports.frames import MAX_FDS, close_fds
from weightsync.transports.link import Inbox, Link, check_fields
from weightsync.transports.reads import (
    check_sources,
    check_targets,
    normalise_table,
    run_stoppable,
    table_bytes,
)
from weightsync.types import PROTOCOL_VERSION, RegionAddress

DIRECT_KINDS: Final = ("published", "withdrawn")

_DESCRIPTOR_FIELDS: Final = {
    "schema": int, "transport": str, "endpoint": str, "epoch": int, "regions": list,
}  # fmt: skip
_REGION_FIELDS: Final = {"region": int, "ptr": int, "num_bytes": int}
_PUBLISHED_FIELDS: Final = {"kind": str, "epoch": int, "arenas": list}
_WITHDRAWN_FIELDS: Final = {"kind": str, "epoch": int}
_ARENA_FIELDS: Final = {"ptr": int, "num_bytes": int}

Span = tuple[int, int]  # ptr, num_bytes


class DeviceSource(ABC):
    """What a transport that reads device memory adds to a descriptor."""

    @abstractmethod
    def describe(self, regions: Sequence[RegionAddress]) -> dict[str, Any]:
        """JSON that changes when any memory behind the regions did; their contents are there."""

    @abstractmethod
    def announce(self, link: Link, epoch: int) -> None:
        """Send along what cannot be described: before the target hears of the epoch."""

    @abstractmethod
    def withdraw(self, link: Link, epoch: int) -> None:
        """What was sent along for this epoch is worth nothing any more."""


class Publisher(DirectSource):
    """The published end; speaks as soon as a link is attached.

    ``shares_arenas``: the memory of arenas travels along, so that no address of ours need be read.
    """

    def __init__(
        self,
        transport: str,
        endpoint: str,
        shares_arenas: bool = False,
        device_source: DeviceSource | None = None,
    ) -> None:
        self._shares_arenas = shares_arenas
        self._device_source = device_source
        self._device: dict[str, Any] | None = None
        self._transport = transport
        self._endpoint = endpoint
        self._link: Link | None = None
        self._epoch = 0
        self._regions: tuple[RegionAddress, ...] | None = None
        self._descriptor: Descriptor = {}

    def attach(self, link: Link) -> None:
        """Tell a target that came later what is published."""
        self._link = link
        if self._regions is not None:
            self._announce(link, self._regions, self._device)

    def publish(self, regions: Sequence[RegionAddress]) -> Descriptor:
        """The same object while nothing changes."""
        reach("direct.publish")
        wanted = tuple(regions)
        device = None
        is_same = wanted == self._regions
        if self._device_source is not None and (
            self._device is not None if is_same else any(r.device != "cpu" for r in wanted)
        ):
            device = self._device_source.describe(wanted)
        if not is_same or device is not self._device:
            _check_regions(wanted, is_host=device is None)
            self._epoch += 1
            self._regions, self._device = None, None  # should it not be announced
            if self._link is not None:
                self._announce(self._link, wanted, device)
            self._regions, self._device = wanted, device
            self._descriptor = self._describe()
        reach("direct.published")
        return self._descriptor

    def _describe(self) -> Descriptor:
        about_device = {} if self._device is None else {"device": self._device}
        return {
            **about_device,
            "schema": PROTOCOL_VERSION,
            "transport": self._transport,
            "endpoint": self._endpoint,
            "epoch": self._epoch,
            "regions": [
                {"region": r.region, "ptr": r.ptr, "num_bytes": r.num_bytes}
                for r in self._regions or ()
            ],
        }

    def withdraw(self) -> None:
        reach("direct.withdraw")
        if self._regions is None:
            return
        self._regions = None
        if self._link is not None:
            self._link.send({"kind": "withdrawn", "epoch": self._epoch})
            if self._device is not None and self._device_source is not None:
                self._device_source.withdraw(self._link, self._epoch)

    def _announce(
        self, link: Link, regions: Sequence[RegionAddress], device: dict[str, Any] | None
    ) -> None:
        if device is not None and self._device_source is not None:
            self._device_source.announce(link, self._epoch)
        arenas = _arenas_of(regions) if self._shares_arenas and device is None else []
        fds = [arena.read_only_fd() for arena in arenas]
        try:
            spans = [{"ptr": a.ptr, "num_bytes": a.num_bytes} for a in arenas]
            link.send({"kind": "published", "epoch": self._epoch, "arenas": spans}, fds)
        finally:
            close_fds(fds)


def _check_regions(regions: Sequence[RegionAddress], *, is_host: bool) -> None:
    for region in regions:
        if is_host and region.device != "cpu":
            raise UnavailableError(
                f"region {region.region} is on {region.device!r}: this path reads host memory only"
            )
        if region.ptr < 0 or region.num_bytes < 0 or (region.num_bytes and not region.ptr):
            raise ConfigError(f"{region}: not a range of memory")
    if len({region.region for region in regions}) != len(regions):
        raise ConfigError("two published regions have one number")


def _arenas_of(regions: Sequence[RegionAddress]) -> list[SharedArena]:
    """The arenas that hold these regions; none unless they hold all of them."""
    found: dict[int, SharedArena] = {}
    for region in regions:
        if not region.num_bytes:
            continue
        arena = find_arena(region.ptr, region.num_bytes)
        if arena is None:
            return []
        found[arena.ptr] = arena
    return list(found.values()) if len(found) <= MAX_FDS else []


class EpochBoard:
    """What the source last said about its regions, with the memory that came along."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.epoch = 0
        self.is_published = False
        self.arenas: list[Span] = []
        self._fds: list[int] = []

    def refresh(self) -> None:
        """Take what has arrived. Never blocks."""
        while (frame := self._inbox.poll(DIRECT_KINDS)) is not None:
            self._on_frame(*frame)

    def wait_for(self, epoch: int, deadline: Deadline) -> None:
        """Wait until ``epoch`` is known; :class:`TransportError` if it is over already."""
        self.refresh()
        while self.epoch < epoch:
            self._on_frame(*self._inbox.take(DIRECT_KINDS, deadline))
        self.check(epoch)

    def check(self, epoch: int) -> None:
        if self.epoch != epoch or not self.is_published:
            now = (
                f"epoch {self.epoch} is published" if self.is_published else "nothing is published"
            )
            raise TransportError(f"epoch {epoch} of the trainer's regions is stale: now {now}")

    def take_fds(self) -> list[int]:
        """The memory of this epoch's arenas; the caller's from here on."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        close_fds(self.take_fds())

    def _on_frame(self, message: dict[str, Any], fds: list[int]) -> None:
        self.close()
        self._fds = fds
        if message["kind"] == "withdrawn":
            check_fields(message, _WITHDRAWN_FIELDS, "frame 'withdrawn'")
            self.is_published, self.arenas = False, []
            return
        check_fields(message, _PUBLISHED_FIELDS, "frame 'published'")
        arenas = [check_fields(a, _ARENA_FIELDS, "an arena") for a in message["arenas"]]
        if len(arenas) != len(fds):
            raise ProtocolError(f"{len(arenas)} arenas came with {len(fds)} descriptors")
        self.arenas = [(a["ptr"], a["num_bytes"]) for a in arenas]
        self.epoch, self.is_published = message["epoch"], True


class ReadPath(ABC):
    """How the bytes of published regions are reached."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    @abstractmethod
    def map(self, regions: Mapping[int, Span], board: EpochBoard) -> dict[int, int]:
        """Make the regions readable; for each the address by which read tables name it."""

    def prepare(self, rows: Table) -> Any:
        """What ``copy`` needs of a checked table, worked out once."""
        return rows

    @abstractmethod
    def copy(self, prepared: Any, flag: CancelFlag) -> int:
        """Copy and return the source bytes copied; stops when the flag is set."""

    @abstractmethod
    def close(self) -> None:
        """Unmap everything; a copy that runs keeps what it reads."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCopied:
    """What a copy on a device leaves."""

    device_s: float  # the device's own seconds
    digests: npt.NDArray[np.uint64] | None = None  # of what was read, if they were wanted


class DevicePath(ABC):
    """A way to the memory of a device."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    @abstractmethod
    def map_device(
        self,
        device: object,
        regions: Mapping[int, Span],
        local: Sequence[RegionAddress],
        epoch: int,
    ) -> dict[int, int]:
        """Like ``ReadPath.map``, from what the source's end said of its device in this epoch."""

    @abstractmethod
    def prepare(self, rows: Table, digests: DigestRows | None) -> Any:
        """What ``copy`` needs of a checked table, worked out once."""

    @abstractmethod
    def copy(self, prepared: Any, meanwhile: Callable[[], None] | None = None) -> DeviceCopied:
        """Copy everything; cannot be stopped, and need not: it is short. ``meanwhile`` is called while
        the device is at work."""

    @abstractmethod
    def release(self) -> None:
        """Unmap everything; it can be mapped again."""

    @abstractmethod
    def close(self) -> None:
        """Unmap everything, after a copy that runs."""


@dataclass(slots=True, eq=False)
class _Opened:
    epoch: int
    regions: dict[int, Span]
    local: tuple[RegionAddress, ...]
    addresses: dict[int, int]
    path: ReadPath | DevicePath


class DirectReader(DirectTarget):
    """The reading end."""

    def __init__(
        self,
        transport: str,
        endpoint: str,
        inbox: Inbox,
        find_path: Callable[[Deadline], ReadPath],
        device_path: DevicePath | None = None,
    ) -> None:
        self._device_path = device_path
        self._transport = transport
        self._endpoint = endpoint
        self._inbox = inbox
        self._find_path = find_path
        self._path: ReadPath | None = None
        self._board = EpochBoard(inbox)
        self._opened: _Opened | None = None
        # The last descriptor, by identity: nobody changes one.
        self._parsed: tuple[Descriptor, tuple[int, dict[int, Span], object]] | None = None

    @property
    def path_name(self) -> str | None:
        """How bytes are reached, once something was opened."""
        if self._opened is not None:
            return self._opened.path.name
        return None if self._path is None else self._path.name

    def close(self) -> None:
        """Let go of everything mapped. Any thread may call it while a read runs."""
        self._board.close()
        if self._path is not None:
            self._path.close()
        if self._device_path is not None:
            self._device_path.close()

    def open(
        self, descriptor: Descriptor, local: Sequence[RegionAddress], deadline: Deadline
    ) -> Mapping[int, int]:
        reach("direct.open")
        if self._parsed is None or self._parsed[0] is not descriptor:
            self._parsed = (descriptor, self._parse(descriptor))
        epoch, regions, device = self._parsed[1]
        where = tuple(local)
        self._inbox.check()
        try:
            self._board.wait_for(epoch, deadline)
        except TransportError:
            self._let_go()
            raise
        old = self._opened
        if old is not None and (old.epoch, old.regions, old.local) == (epoch, regions, where):
            return old.addresses
        if old is not None and (old.epoch, old.regions) == (epoch, regions):
            addresses, path = old.addresses, old.path
        else:
            self._opened = None
            addresses, path = self._map(regions, device, where, epoch, deadline)
        self._opened = _Opened(epoch, regions, where, addresses, path)
        return addresses

    def _map(
        self,
        regions: dict[int, Span],
        device: object,
        local: Sequence[RegionAddress],
        epoch: int,
        deadline: Deadline,
    ) -> tuple[dict[int, int], ReadPath | DevicePath]:
        if device is not None and self._device_path is not None:
            mapped = self._device_path.map_device(device, regions, local, epoch)
            return mapped, self._device_path
        self._let_go()
        for region in local:
            if region.device != "cpu" and region.num_bytes:
                raise UnavailableError(
                    f"the engine's tensors lie on {region.device}, the trainer's on the host: "
                    "hold both on one device"
                )
        if self._path is None:
            self._path = self._find_path(deadline)
        return self._path.map(regions, self._board), self._path

    def _check_current(self, epoch: int) -> None:
        """Raise, and keep nothing mapped, if what was published has been withdrawn."""
        self._board.refresh()
        try:
            self._board.check(epoch)
        except TransportError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """What a device path has mapped is no longer published."""
        if self._device_path is not None:
            self._device_path.release()

    def _parse(self, descriptor: Descriptor) -> tuple[int, dict[int, Span], object]:
        what, device = "direct descriptor", None
        if self._device_path is not None and isinstance(descriptor, Mapping):
            device = descriptor.get("device")
            descriptor = {k: v for k, v in descriptor.items() if k != "device"}
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, what)
        expected = {
            "schema": PROTOCOL_VERSION, "transport": self._transport, "endpoint": self._endpoint,
        }  # fmt: skip
        for name, value in expected.items():
            if fields[name] != value:
                raise ProtocolError(f"{what}: field {name!r} is {fields[name]!r}, not {value!r}")
        regions: dict[int, Span] = {}
        for entry in fields["regions"]:
            region = check_fields(entry, _REGION_FIELDS, f"{what}, 'regions'")
            if region["region"] in regions:
                raise ProtocolError(f"{what}: region {region['region']} is listed twice")
            if region["ptr"] + region["num_bytes"] >= 2**63:
                raise ProtocolError(f"{what}: field 'num_bytes' of {dict(region)} is out of range")
            regions[region["region"]] = (region["ptr"], region["num_bytes"])
        return fields["epoch"], regions, device

    @property
    def digests_reads(self) -> bool:
        return self._opened is not None and isinstance(self._opened.path, DevicePath)

    def prepare(self, table: Table, digests: DigestRows | None = None) -> PreparedRead:
        opened = self._opened
        if opened is None:
            raise ConfigError("nothing was opened to read from")
        rows = normalise_table(table)
        sizes = {region: size for region, (_, size) in opened.regions.items()}
        check_sources(rows, [(ptr, sizes[region]) for region, ptr in opened.addresses.items()])
        check_targets(rows, [(r.ptr, r.num_bytes) for r in opened.local])
        if isinstance(opened.path, DevicePath):
            work = opened.path.prepare(rows, digests)
        else:
            work = opened.path.prepare(rows)
        return PreparedRead(rows, table_bytes(rows), (opened, work))

    def read(self, prepared: PreparedRead, deadline: Deadline) -> None:
        reach("direct.read")
        self._inbox.check()
        opened, work = prepared.state
        if not isinstance(opened, _Opened) or opened is not self._opened:
            raise TransportError("this read was prepared for regions that are no longer open")
        self._check_current(opened.epoch)
        if isinstance(opened.path, DevicePath):
            deadline.check()
            copied = opened.path.copy(work, prepared.meanwhile)
            prepared.device_s, prepared.digests = copied.device_s, copied.digests
        else:
            path = opened.path
            run_stoppable(
                lambda flag: path.copy(work, flag),
                prepared.num_bytes,
                deadline,
                self._inbox.link.lost,
            )
        self._check_current(opened.epoch)  # withdrawn meanwhile: what was read may be torn
        if (reason := self._inbox.link.lost()) is not None:
            # The number of a process that ended may belong to another one by now.
            raise deadline.lost(reason)
        reach("direct.read_done")
