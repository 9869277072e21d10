"""What an end of a p2p pair has registered for direct reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsync.device_tables import CPU
from weightsync.errors import ConfigError, UnavailableError
from weightsync.memory import PAGE_BYTES, merge_spans
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import Span
from weightsync.transports.p2p_cuda import (
    Allocation,
    allocations_of,
    are_current,
    check_exportable,
    export,
)
from weightsync.types import RegionAddress, format_bytes


def spans_of(regions: Sequence[RegionAddress]) -> list[Span]:
    """The fewest spans that hold these host regions: neighbours on shared or touching pages are
    joined.

    The ends are not rounded to pages. Two lists of regions that merely share a page would overlap,
    and what overlaps cannot be published one after the other over one connection.
    """
    ranges = [(r.ptr, r.num_bytes) for r in regions]
    merged, index = merge_spans(ranges, PAGE_BYTES)
    start = [ptr + num_bytes for ptr, num_bytes in merged]
    stop = [ptr for ptr, _ in merged]
    for (ptr, num_bytes), i in zip(ranges, index, strict=True):
        if i >= 0:
            start[i], stop[i] = min(start[i], ptr), max(stop[i], ptr + num_bytes)
    return [Span(a, b - a, CPU) for a, b in zip(start, stop, strict=True)]


def check_regions(regions: Sequence[RegionAddress]) -> None:
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
        self._registered: list[Any] = []
        self._allocations: list[Allocation] = []
        self.spans: list[Span] = []

    @property
    def ids(self) -> list[int]:
        """Identities of the allocations, one a span; none on the host."""
        return [allocation.id for allocation in self._allocations]

    @property
    def handles(self) -> list[str]:
        """By which another process of this machine maps the allocations."""
        return export(self._allocations)

    def replace(self, regions: Sequence[RegionAddress], device: str = CPU) -> bool:
        """Register these regions of a device instead of the last ones; False if nothing changes."""
        allocations = [] if device == CPU else allocations_of(regions, device)
        check_exportable(allocations)
        spans = [a.span for a in allocations] if allocations else spans_of(regions)
        if spans == self.spans and allocations == self._allocations:
            return False
        total = sum(span.num_bytes for span in spans)
        if self._max_bytes is not None and total > self._max_bytes:
            raise UnavailableError(
                f"{len(regions)} regions need {format_bytes(total)} registered, above the limit of "
                f"{format_bytes(self._max_bytes)} that was set; move through a ring (stream)"
            )
        self.clear()
        self._registered = self._agent.register(spans) if spans else []
        self.spans, self._allocations = spans, allocations
        return True

    def has_room(self, allocations: Sequence[Allocation]) -> bool:
        """Whether these may be registered at once."""
        total = sum(a.span.num_bytes for a in allocations)
        return self._max_bytes is None or total <= self._max_bytes

    def is_current(self) -> bool:
        """Whether no device memory was freed and allocated anew since."""
        return are_current(self._allocations)

    def clear(self) -> None:
        self._agent.deregister(self._registered)
        self._registered, self.spans, self._allocations = [], [], []
