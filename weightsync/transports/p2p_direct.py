"""The direct contract over NIXL: published spans, and segment tables as prepared reads."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.device_tables import CPU, copy_with_digests, device_of, synchronize
from weightsync.errors import ConfigError, TransportError, UnavailableError
from weightsync.faults import reach
from weightsync.tables import DigestRows
from weightsync.transports.base import Descriptor, DirectSource, DirectTarget, PreparedRead, Table
from weightsync.transports.link import Inbox, Link
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import Span
from weightsync.transports.nixl_reads import reads_of
from weightsync.transports.p2p_cuda import DeviceWay, PeerMemory, allocations_of
from weightsync.transports.p2p_device_read import DeviceRead, LandingChunks, limits_for
from weightsync.transports.p2p_published import Published, pack
from weightsync.transports.p2p_registrations import Registrations, check_regions
from weightsync.transports.p2p_windows import ReadCosts, plan_pieces
from weightsync.transports.published import DeviceCopied, EpochBoard
from weightsync.transports.reads import (
    check_sources,
    check_targets,
    normalise_table,
    table_bytes,
)
from weightsync.types import PROTOCOL_VERSION, RegionAddress

#: One H200: a descriptor of a read within a device (with thousands of allocations), the segment copy.
_OP_S: Final = 12e-6
UNPACK_BYTES_PER_S: Final = 2.0e12


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
        device = device_of(wanted, "what the trainer publishes")
        synchronize(device)  # with whatever writes the regions
        if wanted != self._regions or not self._registered.is_current():
            check_regions(wanted)
            self._regions = None
            self._registered.replace(wanted, device)
            self._epoch += 1
            self._descriptor = self._describe(wanted)
            self._regions = wanted
            if self._link is not None:
                self._announce(self._link)
        reach("direct.published")
        return self._descriptor  # the same object while nothing changes

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
            "allocations": pack([(i,) for i in self._registered.ids]),
            "handles": self._registered.handles,
            "agent": base64.b64encode(self._agent.metadata()).decode(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    published: Published
    local: tuple[RegionAddress, ...]
    device: str  # of what is local
    is_mapped: bool  # the trainer's memory, here


@dataclass(frozen=True, slots=True)
class _State:
    opened: _Opened
    #: Of a deadline, and what to do meanwhile. None: nobody looked at the bytes on the way.
    read: Callable[[Deadline, Callable[[], None] | None], DeviceCopied | None]
    num_reads: int


class P2pDirectTarget(DirectTarget):
    """The reading end."""

    def __init__(
        self,
        agent: Agent,
        endpoint: str,
        inbox: Inbox,
        lost: Callable[[], str | None],
        max_bytes: int | None,
        kept: PeerMemory | None = None,
        way: DeviceWay = DeviceWay.AUTO,
    ) -> None:
        """``kept`` is for a trainer of this machine whose CUDA memory can be mapped."""
        self._kept = kept
        self._way = way
        self._agent = agent
        self._endpoint = endpoint
        self._inbox = inbox
        self._lost = lost
        self._board = EpochBoard(inbox)
        self._registered = Registrations(agent, max_bytes)
        self._opened: _Opened | None = None
        self._parsed: tuple[Descriptor, Published] | None = None
        self._known: dict[Span, int] = {}  # allocations that the agent has learned of
        self._chunks: dict[int, LandingChunks] = {}
        #: Of a read between devices; what a probe has measured is better than this.
        self.device_bytes_per_s = UNPACK_BYTES_PER_S

    def open(
        self, descriptor: Descriptor, local: Sequence[RegionAddress], deadline: Deadline
    ) -> dict[int, int]:
        reach("direct.open")
        published = self._parse(descriptor)
        where = tuple(local)
        self._inbox.check()
        try:
            self._board.wait_for(published.epoch, deadline)
        except TransportError:
            self._let_go()
            raise
        old = self._opened
        if old is None or (old.published, old.local) != (published, where):
            check_regions(where)
            device = device_of(where, "the engine")
            _check_pair(published, where, device)
            self._opened = None
            is_mapped = old is not None and old.is_mapped
            if old is None or old.published != published:
                is_mapped = self._reach(published)
            if device == CPU:  # on a device only what is read into straight
                self._registered.replace(where)
            self._opened = _Opened(published, where, device, is_mapped)
        return {region.region: region.ptr for region in published.regions}

    @property
    def is_mapped(self) -> bool:
        """Whether reads of what is open are copies out of mapped memory."""
        return self._opened is not None and self._opened.is_mapped

    def _reach(self, published: Published) -> bool:
        """True if all of it was mapped, False if NIXL reads it."""
        is_mapped = False
        if self._kept is not None and published.handles:
            is_mapped = self._kept.replace(published.keys)
            if is_mapped and self._way is DeviceWay.AUTO:
                return True
        self._learn(published)
        return False

    def _parse(self, descriptor: Descriptor) -> Published:
        """The same descriptor comes with every update, and may tell of ten thousands of regions."""
        if self._parsed is None or self._parsed[0] is not descriptor:
            self._parsed = (descriptor, Published.parse(descriptor, self._endpoint))
        return self._parsed[1]

    def _learn(self, published: Published) -> None:
        """Another allocation at a known address is another key: nothing of the old one is kept."""
        ids = dict(zip(published.spans, published.allocations, strict=False))
        if any(self._known.get(span, number) != number for span, number in ids.items()):
            self._agent.forget_peer()
            self._known.clear()
        self._agent.load_peer(published.metadata, published.spans)
        self._known |= ids

    @property
    def digests_reads(self) -> bool:
        return self.is_mapped

    def prepare(self, table: Table, digests: DigestRows | None = None) -> PreparedRead:
        opened = self._opened
        if opened is None:
            raise ConfigError("nothing was opened to read from")
        rows = normalise_table(table)
        sources, targets = opened.published.regions, opened.local
        check_sources(rows, [(r.ptr, r.num_bytes) for r in sources])
        check_targets(rows, [(r.ptr, r.num_bytes) for r in targets])
        num_bytes = table_bytes(rows)
        if opened.is_mapped:
            state = self._mapped_state(opened, rows, digests)
        elif opened.device != CPU:
            state = self._device_state(opened, rows, num_bytes)
        else:
            state = self._host_state(opened, rows)
        return PreparedRead(rows, num_bytes, state)

    def _host_state(self, opened: _Opened, rows: Table) -> _State:
        reads = reads_of(rows)
        if not len(reads):
            return _State(opened, lambda deadline, _: None, 0)
        transfer = self._agent.prepare(reads, CPU, CPU)

        def run(deadline: Deadline, _: Callable[[], None] | None) -> None:
            self._agent.read(transfer, deadline, self._lost)

        return _State(opened, run, len(transfer.reads))

    def _mapped_state(self, opened: _Opened, rows: Table, digests: DigestRows | None) -> _State:
        """One launch out of the trainer's memory, by our addresses of it."""
        kept, published = self._kept, opened.published
        if kept is None:
            raise ConfigError("nothing was mapped to read from")
        starts = np.array([span.ptr for span in published.spans], dtype=np.int64)
        shift = np.array([kept.address_of(key) for key in published.keys], dtype=np.int64) - starts
        order = np.argsort(starts)

        def moved(table: Table) -> Table:
            """The same rows, read where the trainer's memory is mapped."""
            table = table.copy()
            if len(table):
                at = np.searchsorted(starts[order], table[:, 0], side="right") - 1
                table[:, 0] += shift[order][at]
            return table

        if digests is not None:
            digests = replace(digests, rows=moved(digests.rows))
        copy = copy_with_digests(moved(rows), digests, opened.device)
        return _State(opened, lambda _, meanwhile: kept.run(copy, meanwhile), 1)

    def _device_state(self, opened: _Opened, rows: Table, num_bytes: int) -> _State:
        published = opened.published
        spans = np.array([s[:2] for s in published.spans], dtype=np.int64).reshape(-1, 2)
        landed = allocations_of(opened.local, opened.device)
        starts = None
        if all(a.is_exportable for a in landed) and self._registered.has_room(landed):
            starts = np.array([a.span.ptr for a in landed], dtype=np.int64)
        limits = limits_for(num_bytes)
        costs = ReadCosts(_OP_S, self.device_bytes_per_s, UNPACK_BYTES_PER_S)
        pieces = plan_pieces(
            rows, spans[np.argsort(spans[:, 0])], costs=costs, limits=limits, target_starts=starts
        )
        if not all(piece.is_chunk for piece in pieces):
            self._registered.replace(opened.local, opened.device)
        landing = None
        if any(piece.is_chunk for piece in pieces):
            landing = self._chunks_of(limits.chunk_bytes, opened.device)
        read = DeviceRead(self._agent, pieces, landing, published.device, opened.device)

        def run(deadline: Deadline, _: Callable[[], None] | None) -> None:
            read.run(deadline, self._lost)

        return _State(opened, run, read.num_reads)

    def _chunks_of(self, chunk_bytes: int, device: str) -> LandingChunks:
        if chunk_bytes not in self._chunks:
            self._chunks[chunk_bytes] = LandingChunks(self._agent, device, chunk_bytes)
        return self._chunks[chunk_bytes]

    def _check_current(self, epoch: int) -> None:
        """Raise, and keep nothing mapped, if what was published has been withdrawn."""
        self._board.refresh()
        try:
            self._board.check(epoch)
        except TransportError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """What is kept mapped is no longer published."""
        if self._kept is not None:
            self._kept.replace(())
            self._opened = None

    def close(self) -> None:
        """After the agent: nothing may land any more."""
        for chunks in self._chunks.values():
            chunks.close()
        self._chunks.clear()
        if self._kept is not None:
            self._kept.close()

    def read(self, prepared: PreparedRead, deadline: Deadline) -> None:
        reach("direct.read")
        self._inbox.check()
        state = prepared.state
        if not isinstance(state, _State) or state.opened is not self._opened:
            raise TransportError("this read was prepared for regions that are no longer open")
        epoch = state.opened.published.epoch
        self._check_current(epoch)
        deadline.check()
        copied = state.read(deadline, prepared.meanwhile)
        if copied is not None:
            prepared.device_s, prepared.digests = copied.device_s, copied.digests
        self._check_current(epoch)  # withdrawn meanwhile: what was read may be torn
        self._inbox.check()  # the number of a process that ended may belong to another by now
        reach("direct.read_done")


def _check_pair(published: Published, local: Sequence[RegionAddress], device: str) -> None:
    """Both sides on the host, or both on a CUDA device."""
    if not published.spans or not any(region.num_bytes for region in local):
        return
    if (published.device == CPU) != (device == CPU):
        raise UnavailableError(
            f"the trainer's tensors lie on {published.device}, the engine's on {device}: p2p reads "
            "from host to host or from CUDA device to CUDA device; move one side"
        )
