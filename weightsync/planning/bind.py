"""A share bound to addresses: the segment tables that one rank replays at every refit.

Only this depends on where memory is. After a release and resume the regions whose epoch changed are
moved to their new addresses; everything else stays as it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightsync.binding import Landing, Spot
from weightsync.digest import convert_of
from weightsync.errors import ProtocolError
from weightsync.planning.share import RankShare, Side
from weightsync.tables import segment_rows
from weightsync.types import Box, item_bytes

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Located:
    """A region of a trainer rank, as this process sees it."""

    ptr: int
    num_bytes: int
    epoch: int = 0  # rises whenever the trainer's memory was let go and taken again


#: (trainer rank, region) -> where it is.
Sources = Mapping[tuple[int, int], Located]


@dataclass(frozen=True, eq=False)
class BoundReads:
    """Segments of all reads of one engine rank; ``rows`` int64 [n, 13] as the native core takes
    them, source addresses absolute."""

    rows: Int64
    region_of: Int64  # [n] index in ``regions``
    regions: tuple[tuple[int, int], ...]  # (trainer rank, region)
    located: tuple[Located, ...]  # of each region, as bound

    def of_rank(self, source_rank: int) -> Int64:
        """The rows that read from one trainer rank."""
        mine = [i for i, (rank, _) in enumerate(self.regions) if rank == source_rank]
        return self.rows[np.isin(self.region_of, mine)]

    def rebound(self, sources: Sources) -> BoundReads:
        """For another epoch of some regions; the same object if nothing changed.

        Raises :class:`ProtocolError` if a region is gone or has shrunk.
        """
        located = _locate(sources, self.regions)
        moved = [i for i, (a, b) in enumerate(zip(located, self.located, strict=True)) if a != b]
        if not moved:
            return self
        for i in moved:
            if located[i].num_bytes < self.located[i].num_bytes:
                raise ProtocolError(
                    f"region {self.regions[i]} of the trainer came back with "
                    f"{located[i].num_bytes} B, it had {self.located[i].num_bytes}; connect again"
                )
        shift = [a.ptr - b.ptr for a, b in zip(located, self.located, strict=True)]
        rows = self.rows.copy()
        rows[:, 0] += np.array(shift, dtype=np.int64)[self.region_of]
        return replace(self, rows=rows, located=located)


def bind_reads(share: RankShare, sources: Sources, landing: Landing) -> BoundReads:
    """Segments from the trainer's regions to this rank's spots.

    ``landing`` says where each of this rank's placements lands, (tensor of the engine's layout,
    placement) -> spot. Raises :class:`ProtocolError` for what is not there or out of bounds.
    """
    if share.side is not Side.TARGET:
        raise ProtocolError("a trainer rank reads nothing: bind the share of an engine rank")
    if share.relay is not None and (share.relay >= 0).any():
        raise ProtocolError(
            "boxes of this share are handed on by other ranks of the engine, which no transport of "
            "this version does; plan without handing_on"
        )
    full = np.flatnonzero(share.transfers.num_bytes)
    regions, region_of = _regions(share, full)
    located = _locate(sources, regions)
    _check_bounds(share, full, region_of, regions, located)
    base = np.array([place.ptr for place in located], dtype=np.int64)
    begin = base[region_of] + share.source.offset_bytes[full] if len(full) else region_of
    return BoundReads(*_rows(share, full, begin, region_of, landing), regions, located)


def _regions(share: RankShare, full: Int64) -> tuple[tuple[tuple[int, int], ...], Int64]:
    keys = np.stack([share.transfers.source_rank[full], share.source.region[full]], axis=1)
    pairs, which = np.unique(keys, axis=0, return_inverse=True)
    return tuple((a, b) for a, b in pairs.tolist()), which.reshape(-1).astype(np.int64)


def _locate(sources: Sources, regions: tuple[tuple[int, int], ...]) -> tuple[Located, ...]:
    lost = [key for key in regions if key not in sources]
    if lost:
        rank, region = lost[0]
        raise ProtocolError(
            f"region {region} of trainer rank {rank} was not published ({len(lost)} are missing)"
        )
    return tuple(sources[key] for key in regions)


def _check_bounds(
    share: RankShare, full: Int64, region_of: Int64, regions: tuple[tuple[int, int], ...],
    located: tuple[Located, ...],
) -> None:  # fmt: skip
    items = np.array([item_bytes(d) for d in share.dtypes], dtype=np.int64)
    part = share.source.take(full)
    if not len(full):
        return
    low, high = part.reach(share.transfers.extent[full], items[part.dtype])
    sizes = np.array([place.num_bytes for place in located], dtype=np.int64)[region_of]
    wrong = np.flatnonzero((low < 0) | (high > sizes))
    if len(wrong):
        i = int(wrong[0])
        name = share.tensors[share.transfers.tensor[full[i]]].meta.name
        raise ProtocolError(
            f"{name!r}: bytes {low[i]}:{high[i]} lie outside region {regions[region_of[i]]} of "
            f"{sizes[i]} B"
        )


def _spots(share: RankShare, keys: list[tuple[int, int]], landing: Landing) -> list[Spot]:
    lost = [key for key in keys if key not in landing]
    if lost:
        name = next(t.meta.name for t in share.tensors if t.target == lost[0][0])
        raise ProtocolError(
            f"placement {lost[0][1]} of {name!r} has no landing ({len(lost)} have none): opaque slots "
            "land in a staging copy first"
        )
    return [landing[key] for key in keys]


def _template(share: RankShare, kind: list[int], dtypes: list[str], spot: Spot) -> Int64:
    """Rows with both addresses 0. ``kind``: dimensions, wire and stored dtype, extents, strides."""
    dims, wire, stored, *rest = kind
    extent, strides = rest[:dims], rest[len(rest) // 2 :][:dims]
    rows = segment_rows(
        extent,
        source=(0, strides, item_bytes(share.dtypes[stored])),
        target=(0, spot.strides_bytes, item_bytes(spot.dtype)),
        convert=convert_of(share.dtypes[stored], dtypes[wire]),
    )
    return np.array(rows, dtype=np.int64).reshape(-1, 13)


def _rows(
    share: RankShare, full: Int64, begin: Int64, region_of: Int64, landing: Landing
) -> tuple[Int64, Int64]:
    """Rows of equal shape and strides differ in their two addresses only and are made once."""
    t = share.transfers
    at = [share.tensors[i].target for i in t.tensor[full].tolist()]
    spots = _spots(share, list(zip(at, t.target_placed[full].tolist(), strict=True)), landing)
    dtypes = sorted({p.meta.dtype for p in share.tensors})
    wire = np.array([dtypes.index(p.meta.dtype) for p in share.tensors], dtype=np.int64)
    numbers = (t.num_dims, wire[t.tensor], share.source.dtype, t.extent, share.source.strides_bytes)
    alike = np.column_stack([n[full] for n in numbers]).tolist()
    templates: dict[tuple[object, ...], tuple[int, Int64]] = {}
    which, landed = [], []
    for spot, start, kind in zip(spots, t.start[full].tolist(), alike, strict=True):
        begin_at = tuple(start[: kind[0]])
        landed.append(spot.ptr if begin_at == spot.box.start else spot.at(Box(begin_at, begin_at)))
        key = (*kind, spot.strides_bytes, spot.dtype)
        if key not in templates:
            templates[key] = (len(templates), _template(share, kind, dtypes, spot))
        which.append(templates[key][0])
    made = [rows for _, rows in templates.values()]
    if not made:
        return np.zeros((0, 13), dtype=np.int64), np.zeros(0, dtype=np.int64)
    counts = np.array([len(rows) for rows in made], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    kinds = np.array(which, dtype=np.int64)
    times = counts[kinds]
    owner = np.repeat(np.arange(len(kinds)), times)
    inner = np.arange(len(owner)) - np.repeat(np.cumsum(times) - times, times)
    rows = np.concatenate(made)[firsts[kinds[owner]] + inner]
    rows[:, 0] += begin[owner]
    rows[:, 1] += np.array(landed, dtype=np.int64)[owner]
    return rows, region_of[owner]
