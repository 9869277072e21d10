"""A plan bound to addresses: the segment tables that are replayed at every refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.bucket import Cut, align
from weightsync.digest import DigestPart, convert_of, part_rows
from weightsync.errors import ProtocolError
from weightsync.layout import NO_REGION, Layout, PlacedBox
from weightsync.plan import ENTRY_BYTES, RefitPlan, Transfer
from weightsync.tables import DigestRows, dense_strides, segment_rows, table
from weightsync.types import Box, Placement, item_bytes, range_boxes

Table = npt.NDArray[np.int64]
Addresses = Mapping[int, int]  # region -> address

#: Where each of this rank's placements lands: (tensor, placed) -> (address, strides in bytes, dtype).
Landing = Mapping[tuple[int, int], "Spot"]


@dataclass(frozen=True, slots=True)
class Spot:
    """Memory of one box: address of its first element, strides, stored dtype."""

    box: Box
    ptr: int
    strides_bytes: tuple[int, ...]
    dtype: str

    def at(self, box: Box) -> int:
        """Address of the first element of a box within this one."""
        steps = zip(box.start, self.box.start, self.strides_bytes, strict=True)
        return self.ptr + sum((a - b) * s for a, b, s in steps)


def spot_of(placed: PlacedBox, addresses: Addresses) -> Spot:
    """Where a placement lies in this process."""
    base = addresses[placed.region] + placed.offset_bytes
    return Spot(placed.box, base, placed.strides_bytes, placed.dtype)


def slot_spots(layout: Layout, rank: int, addresses: Addresses) -> dict[tuple[int, int], Spot]:
    """The spots of a rank's affine slots; opaque ones have none."""
    return {
        (i, j): spot_of(placed, addresses)
        for i, tensor in enumerate(layout.tensors)
        for j, placed in enumerate(tensor.placed)
        if placed.rank == rank and placed.region != NO_REGION
    }


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """Offsets of a staging copy in wire form, one dense box after the other."""

    offsets: Mapping[tuple[int, int], int]
    num_bytes: int

    def spots(self, layout: Layout, base_ptr: int) -> dict[tuple[int, int], Spot]:
        found = {}
        for (i, j), offset in self.offsets.items():
            placed = layout.tensors[i].placed[j]
            dtype = layout.tensors[i].wire_forms[0].dtype
            strides = dense_strides(placed.box.shape, item_bytes(dtype))
            found[i, j] = Spot(placed.box, base_ptr + offset, strides, dtype)
        return found


def plan_staging(layout: Layout, rank: int, placement: Placement) -> StagingPlan:
    """What must be staged: everything, or (in place) only what has no address of its own; nothing of a
    delta, which stays decoded until it is written."""
    offsets: dict[tuple[int, int], int] = {}
    used = 0
    for i, tensor in enumerate(layout.tensors):
        for j, placed in enumerate(tensor.placed):
            if placed.rank != rank or placement is Placement.DELTA:
                continue
            if placement is Placement.IN_PLACE and placed.region != NO_REGION:
                continue
            offsets[i, j] = used
            size = placed.box.num_elements * item_bytes(tensor.wire_forms[0].dtype)
            used = align(used + size)
    return StagingPlan(offsets, used)


def _source_spot(plan: RefitPlan, layout: Layout, addresses: Addresses, t: Transfer) -> Spot:
    return spot_of(layout.tensors[plan.tensors[t.tensor].source].placed[t.source_placed], addresses)


def _target_spot(plan: RefitPlan, landing: Landing, t: Transfer) -> Spot:
    return landing[plan.tensors[t.tensor].target, t.target_placed]


def direct_table(
    plan: RefitPlan, source: Layout, source_addresses: Addresses, landing: Landing, rank: int
) -> Table:
    """Segments from the source's regions (by the addresses a target opened) to this rank's spots."""
    rows: list[tuple[int, ...]] = []
    for t in plan.transfers:
        if t.target_rank != rank:
            continue
        left = _source_spot(plan, source, source_addresses, t)
        right = _target_spot(plan, landing, t)
        wire = plan.tensors[t.tensor].meta.dtype
        rows += segment_rows(
            t.box.shape,
            source=(left.at(t.box), left.strides_bytes, item_bytes(left.dtype)),
            target=(right.at(t.box), right.strides_bytes, item_bytes(right.dtype)),
            convert=convert_of(left.dtype, wire),
        )
    return table(rows, 13)


def read_digest_rows(
    plan: RefitPlan, source: Layout, source_addresses: Addresses, rank: int
) -> DigestRows:
    """What :func:`direct_table` reads, as digests of ``plan.tensors``.

    Row by row the same memory wherever boxes are dense on both sides; where they are not, a read
    cannot digest on its way.
    """
    rows: list[tuple[int, ...]] = []
    owners: list[int] = []
    for t in plan.transfers:
        if t.target_rank != rank:
            continue
        spot, meta = _source_spot(plan, source, source_addresses, t), plan.tensors[t.tensor].meta
        part = DigestPart(meta, t.box, spot.at(t.box), spot.strides_bytes, spot.dtype)
        new = part_rows(part)
        rows += new
        owners += [t.tensor] * len(new)
    return DigestRows(table(rows, 15), np.array(owners, dtype=np.int64), len(plan.tensors))


def pack_table(plan: RefitPlan, cuts: Sequence[Cut], source: Layout, addresses: Addresses) -> Table:
    """Segments that fill one slot; target addresses are offsets of the slot."""
    rows: list[tuple[int, ...]] = []
    for cut in cuts:
        t = plan.transfers[cut.item]
        spot = _source_spot(plan, source, addresses, t)
        wire = plan.tensors[t.tensor].meta.dtype
        item, at = item_bytes(wire), cut.offset_bytes
        for box in _cut_boxes(t, cut, item):
            rows += segment_rows(
                box.shape,
                source=(spot.at(box), spot.strides_bytes, item_bytes(spot.dtype)),
                target=(at, dense_strides(box.shape, item), item),
                convert=convert_of(spot.dtype, wire),
            )
            at += box.num_elements * item
    return table(rows, 13)


def unpack_table(plan: RefitPlan, cuts: Sequence[Cut], landing: Landing) -> Table:
    """Segments that empty one slot; source addresses are offsets of the slot."""
    rows: list[tuple[int, ...]] = []
    for cut in cuts:
        t = plan.transfers[cut.item]
        spot = _target_spot(plan, landing, t)
        item, at = item_bytes(spot.dtype), cut.offset_bytes
        for box in _cut_boxes(t, cut, item):
            rows += segment_rows(
                box.shape,
                source=(at, dense_strides(box.shape, item), item),
                target=(spot.at(box), spot.strides_bytes, item),
            )
            at += box.num_elements * item
    return table(rows, 13)


def _cut_boxes(t: Transfer, cut: Cut, item: int) -> list[Box]:
    """The cut's byte range of the transfer's dense box, as boxes of the whole tensor."""
    first = cut.start_bytes // item
    stop = first + cut.num_bytes // item
    return [
        Box(
            tuple(a + o for a, o in zip(box.start, t.box.start, strict=True)),
            tuple(b + o for b, o in zip(box.stop, t.box.start, strict=True)),
        )
        for box in range_boxes(t.box.shape, first, stop)
    ]


def place_table(
    layout: Layout, keys: Sequence[tuple[int, int]], staging: Landing, slots: Landing
) -> Table:
    """Segments from the staging copy to the affine slots, for the placements ``keys``."""
    rows: list[tuple[int, ...]] = []
    for key in keys:
        left, right = staging[key], slots[key]
        item = item_bytes(left.dtype)
        rows += segment_rows(
            left.box.shape,
            source=(left.ptr, left.strides_bytes, item),
            target=(right.ptr, right.strides_bytes, item),
        )
    return table(rows, 13)


def rebased(segments: Table, *, source: int = 0, target: int = 0) -> Table:
    """A table whose offsets became addresses."""
    moved = segments.copy()
    moved[:, 0] += source
    moved[:, 1] += target
    return moved


def source_parts(plan: RefitPlan, source: Layout, addresses: Addresses) -> list[DigestPart]:
    """What the trainer digests: every box that it gives, each element of a tensor once."""
    parts: list[DigestPart] = []
    seen: dict[int, list[Box]] = {}
    for t in plan.transfers:
        rest = [t.box]
        for other in seen.setdefault(t.tensor, []):  # replicas of the engine may cut it otherwise
            rest = [piece for box in rest for piece in box.subtract(other)]
            if not rest:
                break
        spot = _source_spot(plan, source, addresses, t)
        meta = plan.tensors[t.tensor].meta
        for box in rest:
            seen[t.tensor].append(box)
            parts.append(DigestPart(meta, box, spot.at(box), spot.strides_bytes, spot.dtype))
    return parts


def landed_parts(
    plan: RefitPlan, landing: Landing, transfers: Sequence[Transfer]
) -> list[DigestPart]:
    """What a target rank digests of these transfers, wherever they landed."""
    parts = []
    for t in transfers:
        spot = _target_spot(plan, landing, t)
        meta = plan.tensors[t.tensor].meta
        parts.append(DigestPart(meta, t.box, spot.at(t.box), spot.strides_bytes, spot.dtype))
    return parts


# --- entries of a slot ----------------------------------------------------------------------------


def encode_entries(cuts: Sequence[Cut]) -> bytes:
    """A slot's own description: rows of (transfer, start, bytes, offset) as little-endian int64."""
    rows = [(c.item, c.start_bytes, c.num_bytes, c.offset_bytes) for c in cuts]
    return np.array(rows, dtype="<i8").tobytes()


def decode_entries(blob: bytes, plan: RefitPlan, data_bytes: int) -> Table:
    """The entries, int64 [n, 4], checked against plan and slot: nothing may point outside either."""
    if len(blob) % ENTRY_BYTES:
        raise ProtocolError(f"slot metadata of {len(blob)} B is not a list of {ENTRY_BYTES} B rows")
    entries = np.frombuffer(blob, dtype="<i8").reshape(-1, 4).astype(np.int64, copy=False)
    items, starts, sizes, offsets = entries.T
    known = (items >= 0) & (items < len(plan.transfers))
    if not known.all():
        item = int(items[np.argmin(known)])
        raise ProtocolError(f"slot metadata names transfer {item} of {len(plan.transfers)}")
    wholes, units = plan.transfer_bytes[items], plan.transfer_units[items]
    fits = (entries[:, 1:] >= 0).all(axis=1) & (starts <= wholes) & (sizes <= wholes)
    fits &= (offsets <= data_bytes) & (sizes <= data_bytes)  # each alone first: sums may overflow
    fits &= (starts <= wholes - sizes) & (offsets <= data_bytes - sizes)
    fits &= (starts % units == 0) & (sizes % units == 0)
    if not fits.all():
        cut = Cut(*map(int, entries[int(np.argmin(fits))]))
        raise ProtocolError(f"slot metadata: {cut} does not fit its transfer or its slot")
    return entries


def cuts_of(entries: Table) -> list[Cut]:
    """Entries as values."""
    return [Cut(*row) for row in entries.tolist()]
