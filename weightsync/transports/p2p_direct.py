"""The direct contract over NIXL: published spans, and segment tables as prepared reads."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, ProtocolError, TransportError, UnavailableError
from weightsync.faults import reach
from weightsync.memory import PAGE_BYTES, merge_spans
from weightsync.tables import DigestRows
from weightsync.transports.base import Descriptor, DirectSource, DirectTarget, PreparedRead, Table
from weightsync.transports.link import Inbox, Link, check_fields
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import Span, Transfer
from weightsync.transports.nixl_reads import Reads, reads_of
from weightsync.transports.published import EpochBoard
from weightsync.transports.reads import (
    check_sources,
    check_targets,
    normalise_table,
    table_bytes,
)
from weightsync.types import PROTOCOL_VERSION, RegionAddress, format_bytes

_DESCRIPTOR_FIELDS: Final = {
    "schema": int, "transport": str, "endpoint": str, "epoch": int, "devices": list,
    "regions": str, "spans": str, "agent": str,
}  # fmt: skip


def pack(rows: Sequence[Sequence[int]]) -> str:
    """Rows of integers in 32 characters or so each: little-endian int64, base64."""
    return base64.b64encode(np.array(rows, dtype="<i8").tobytes()).decode()


def unpack(text: str, columns: int, what: str) -> list[list[int]]:
    """What :func:`pack` made, checked for shape and sign."""
    raw = unpack_bytes(text, what)
    if len(raw) % (8 * columns):
        raise ProtocolError(f"{what}: {len(raw)} B are no rows of {columns} integers")
    rows = np.frombuffer(raw, dtype="<i8").reshape(-1, columns)
    if (rows < 0).any() or (rows.astype(np.float64).sum(axis=1) >= 2.0**62).any():
        raise ProtocolError(f"{what}: a number is out of range")
    return [[int(n) for n in row] for row in rows]


def unpack_bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"{what}: not base64: {error}") from error


def spans_of(regions: Sequence[RegionAddress]) -> list[Span]:
    """The fewest spans that hold these regions: neighbours on shared or touching pages are joined.

    The ends are not rounded to pages. Two lists of regions that merely share a page would overlap,
    and what overlaps cannot be published one after the other over one connection.
    """
    spans: list[Span] = []
    for device in sorted({region.device for region in regions}):
        ranges = [(r.ptr, r.num_bytes) for r in regions if r.device == device]
        merged, index = merge_spans(ranges, PAGE_BYTES if device == "cpu" else 1)
        start = [ptr + num_bytes for ptr, num_bytes in merged]
        stop = [ptr for ptr, _ in merged]
        for (ptr, num_bytes), i in zip(ranges, index, strict=True):
            if i >= 0:
                start[i], stop[i] = min(start[i], ptr), max(stop[i], ptr + num_bytes)
        spans += [Span(a, b - a, device) for a, b in zip(start, stop, strict=True)]
    return spans


def _check_regions(regions: Sequence[RegionAddress]) -> None:
    for region in regions:
        if region.ptr < 0 or region.num_bytes < 0 or (region.num_bytes and not region.ptr):
            raise ConfigError(f"{region}: not a range of memory")
    if len({region.region for region in regions}) != len(regions):
        raise ConfigError("two published regions have one number")


class Registrations:
    """What an end has registered for direct reads, replaced as a whole."""

    def __init__(self, agent: Agent, max_bytes: int | None) -> None:
        self._agent = agent
        self._max_bytes = max_bytes
        self._handles: list[Any] = []
        self.spans: list[Span] = []

    def replace(self, regions: Sequence[RegionAddress]) -> bool:
        """Register these regions instead of the last ones; False if that changes nothing."""
        spans = spans_of(regions)
        if spans == self.spans:
            return False
        total = sum(span.num_bytes for span in spans)
        if self._max_bytes is not None and total > self._max_bytes:
            raise UnavailableError(
                f"{len(regions)} regions need {format_bytes(total)} registered, above the limit of "
                f"{format_bytes(self._max_bytes)} that was set; move through a ring (stream)"
            )
        self.clear()
        self._handles = self._agent.register(spans) if spans else []
        self.spans = spans
        return True

    def clear(self) -> None:
        self._agent.deregister(self._handles)
        self._handles, self.spans = [], []


class P2pDirectSource(DirectSource):
    """The published end."""

    def __init__(self, agent: Agent, endpoint: str, max_bytes: int | None) -> None:
        self._agent = agent
        self._endpoint = endpoint
        self._registered = Registrations(agent, max_bytes)
        self._link: Link | None = None
        self._regions: tuple[RegionAddress, ...] | None = None
        self._descriptor: Descriptor = {}
        self._epoch = 0

    def attach(self, link: Link) -> None:
        """Tell a target that came later what is published."""
        self._link = link
        if self._regions is not None:
            self._announce(link)

    def publish(self, regions: Sequence[RegionAddress]) -> Descriptor:
        reach("direct.publish")
        wanted = tuple(regions)
        if wanted != self._regions:
            _check_regions(wanted)
            self._regions = None
            self._registered.replace(wanted)
            self._epoch += 1
            self._descriptor = self._describe(wanted)
            self._regions = wanted
            if self._link is not None:
                self._announce(self._link)
        reach("direct.published")
        return dict(self._descriptor)

    def withdraw(self) -> None:
        reach("direct.withdraw")
        if self._regions is None:
            return
        self._regions = None
        if self._link is not None:
            self._link.send({"kind": "withdrawn", "epoch": self._epoch})
        self._registered.clear()

    def _announce(self, link: Link) -> None:
        link.send({"kind": "published", "epoch": self._epoch, "arenas": []})

    def _describe(self, regions: Sequence[RegionAddress]) -> Descriptor:
        devices = sorted({region.device for region in regions})
        code = {device: index for index, device in enumerate(devices)}
        spans = self._registered.spans
        return {
            "schema": PROTOCOL_VERSION,
            "transport": "p2p",
            "endpoint": self._endpoint,
            "epoch": self._epoch,
            "devices": devices,
            "regions": pack([(r.region, r.ptr, r.num_bytes, code[r.device]) for r in regions]),
            "spans": pack([(s.ptr, s.num_bytes, code[s.device]) for s in spans]),
            "agent": base64.b64encode(self._agent.metadata()).decode(),
        }


@dataclass(frozen=True, slots=True)
class _Published:
    """A parsed descriptor."""

    epoch: int
    regions: tuple[RegionAddress, ...]
    spans: tuple[Span, ...]
    metadata: bytes

    @classmethod
    def parse(cls, descriptor: Descriptor, endpoint: str) -> _Published:
        what = "direct descriptor"
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, what)
        expected = {"schema": PROTOCOL_VERSION, "transport": "p2p", "endpoint": endpoint}
        for name, value in expected.items():
            if fields[name] != value:
                raise ProtocolError(f"{what}: field {name!r} is {fields[name]!r}, not {value!r}")
        devices = [str(device) for device in fields["devices"]]
        regions = unpack(fields["regions"], 4, f"{what}, 'regions'")
        spans = unpack(fields["spans"], 3, f"{what}, 'spans'")
        if any(row[-1] >= len(devices) for row in (*regions, *spans)):
            raise ProtocolError(f"{what}: a device beyond the {len(devices)} that are listed")
        if len({row[0] for row in regions}) != len(regions):
            raise ProtocolError(f"{what}: a region is listed twice")
        return cls(
            fields["epoch"],
            tuple(RegionAddress(r, ptr, size, devices[d]) for r, ptr, size, d in regions),
            tuple(Span(ptr, size, devices[d]) for ptr, size, d in spans),
            unpack_bytes(fields["agent"], f"{what}, 'agent'"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    published: _Published
    local: tuple[RegionAddress, ...]


@dataclass(frozen=True, slots=True)
class _State:
    opened: _Opened
    transfers: list[Transfer]


class P2pDirectTarget(DirectTarget):
    """The reading end."""

    def __init__(
        self,
        agent: Agent,
        endpoint: str,
        inbox: Inbox,
        lost: Callable[[], str | None],
        max_bytes: int | None,
    ) -> None:
        self._agent = agent
        self._endpoint = endpoint
        self._inbox = inbox
        self._lost = lost
        self._board = EpochBoard(inbox)
        self._registered = Registrations(agent, max_bytes)
        self._opened: _Opened | None = None

    def open(
        self, descriptor: Descriptor, local: Sequence[RegionAddress], deadline: Deadline
    ) -> dict[int, int]:
        reach("direct.open")
        published = _Published.parse(descriptor, self._endpoint)
        where = tuple(local)
        self._inbox.check()
        self._board.wait_for(published.epoch, deadline)
        old = self._opened
        if old is None or (old.published, old.local) != (published, where):
            _check_regions(where)
            self._opened = None
            if old is None or old.published != published:
                self._agent.load_peer(published.metadata, published.spans)
            self._registered.replace(where)
            self._opened = _Opened(published, where)
        return {region.region: region.ptr for region in published.regions}

    def prepare(self, table: Table, digests: DigestRows | None = None) -> PreparedRead:
        opened = self._opened
        if opened is None:
            raise ConfigError("nothing was opened to read from")
        rows = normalise_table(table)
        sources, targets = opened.published.regions, opened.local
        check_sources(rows, [(r.ptr, r.num_bytes) for r in sources])
        check_targets(rows, [(r.ptr, r.num_bytes) for r in targets])
        reads = reads_of(rows)
        groups = _by_devices(reads, opened.published.spans, self._registered.spans)
        transfers = [self._agent.prepare(part, *devices) for devices, part in groups.items()]
        return PreparedRead(rows, table_bytes(rows), _State(opened, transfers))

    def read(self, prepared: PreparedRead, deadline: Deadline) -> None:
        reach("direct.read")
        self._inbox.check()
        state = prepared.state
        if not isinstance(state, _State) or state.opened is not self._opened:
            raise TransportError("this read was prepared for regions that are no longer open")
        epoch = state.opened.published.epoch
        self._board.refresh()
        self._board.check(epoch)
        deadline.check()
        for transfer in state.transfers:
            self._agent.read(transfer, deadline, self._lost)
        self._board.refresh()
        self._board.check(epoch)  # withdrawn meanwhile: what was read may be torn
        self._inbox.check()  # the number of a process that ended may belong to another by now
        reach("direct.read_done")


def _by_devices(
    reads: Reads, source_spans: Sequence[Span], target_spans: Sequence[Span]
) -> Mapping[tuple[str, str], Reads]:
    """The reads of each pair of devices: one NIXL list holds one kind of memory."""
    if not len(reads):
        return {}
    source = _device_index(reads.source_ptr, source_spans)
    target = _device_index(reads.target_ptr, target_spans)
    source_names = sorted({span.device for span in source_spans})
    target_names = sorted({span.device for span in target_spans})
    groups: dict[tuple[str, str], Reads] = {}
    for a, source_device in enumerate(source_names):
        for b, target_device in enumerate(target_names):
            chosen = np.flatnonzero((source == a) & (target == b))
            if len(chosen):
                groups[source_device, target_device] = reads.take(chosen)
    return groups


def _device_index(ptrs: np.ndarray[Any, np.dtype[np.int64]], spans: Sequence[Span]) -> Any:
    """For each address the position of its device among the sorted names."""
    names = sorted({span.device for span in spans})
    ordered = sorted(spans, key=lambda span: span.ptr)
    starts = np.array([span.ptr for span in ordered], dtype=np.int64)
    codes = np.array([names.index(span.device) for span in ordered])
    return codes[np.searchsorted(starts, ptrs, side="right") - 1]
