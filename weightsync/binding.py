"""A plan bound to addresses: the segment tables that are replayed at every refit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.bucket import Cut, align
from weightsync.digest import DigestPart, convert_of
from weightsync.errors import MissingNameError, ProtocolError
from weightsync.layout import NO_REGION, Layout, PlacedBox
from weightsync.manifest import name_some
from weightsync.plan import ENTRY_BYTES, RefitPlan, Transfer
from weightsync.tables import dense_strides, segment_rows, table
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
    """What must be staged: everything, or (in place) only what has no address of its own."""
    offsets: dict[tuple[int, int], int] = {}
    used = 0
    for i, tensor in enumerate(layout.tensors):
        for j, placed in enumerate(tensor.placed):
            if placed.rank != rank:
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


def decode_entries(blob: bytes, plan: RefitPlan, data_bytes: int) -> list[Cut]:
    """Parse and check against plan and slot: nothing may point outside either."""
    if len(blob) % ENTRY_BYTES:
        raise ProtocolError(f"slot metadata of {len(blob)} B is not a list of {ENTRY_BYTES} B rows")
    cuts = [Cut(*map(int, row)) for row in np.frombuffer(blob, dtype="<i8").reshape(-1, 4)]
    for c in cuts:
        if not 0 <= c.item < len(plan.transfers):
            raise ProtocolError(f"slot metadata names transfer {c.item} of {len(plan.transfers)}")
        t = plan.transfers[c.item]
        item = item_bytes(plan.tensors[t.tensor].meta.dtype)
        fits = min(c.start_bytes, c.num_bytes, c.offset_bytes) >= 0
        fits = fits and c.start_bytes + c.num_bytes <= t.num_bytes
        fits = fits and c.offset_bytes + c.num_bytes <= data_bytes
        if not fits or c.start_bytes % item or c.num_bytes % item:
            raise ProtocolError(f"slot metadata: {c} does not fit its transfer or its slot")
    return cuts


class Coverage:
    """Counts what arrived: every element of every transfer of a session exactly once."""

    def __init__(self) -> None:
        self._complete: set[tuple[str, int]] = set()  # (tensor, placed) that are whole
        self._missing: dict[tuple[str, int], int] = {}
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def expect(self, move: int, plan: RefitPlan, layout: Layout, rank: int) -> None:
        """A plan is about to be moved. Raises if it brings a slot that was brought before."""
        fresh: dict[tuple[str, int], int] = {}
        for t in plan.transfers:
            if t.target_rank == rank:
                key = (plan.tensors[t.tensor].meta.name, t.target_placed)
                fresh[key] = fresh.get(key, 0) + t.num_bytes
        again = [
            name for name, j in fresh if (name, j) in self._missing or (name, j) in self._complete
        ]
        if again:
            raise ProtocolError(f"sent twice in one update: {name_some(again)}")
        for key, size in fresh.items():
            placed = layout.tensors[layout.index[key[0]]].placed[key[1]]
            whole = placed.box.num_elements * item_bytes(placed.dtype)
            if size != whole:
                raise ProtocolError(f"plan: {key[0]!r} brings {size} of {whole} B")
        self._missing |= fresh

    def arrived(self, move: int, plan: RefitPlan, cut: Cut) -> None:
        """A cut of a transfer landed. Raises when bytes arrive twice."""
        t = plan.transfers[cut.item]
        key = (plan.tensors[t.tensor].meta.name, t.target_placed)
        ranges = self._ranges.setdefault((move, cut.item), [])
        end = cut.start_bytes + cut.num_bytes
        is_repeat = any(a < end and cut.start_bytes < b for a, b in ranges)
        if is_repeat or key not in self._missing:
            raise ProtocolError(f"{key[0]!r}: bytes {cut.start_bytes}:{end} arrived twice")
        ranges.append((cut.start_bytes, end))
        self._missing[key] -= cut.num_bytes

    def all_arrived(self, move: int, plan: RefitPlan, rank: int) -> None:
        """A direct read finished: every transfer of the plan landed whole."""
        for i, t in enumerate(plan.transfers):
            if t.target_rank == rank:
                self.arrived(move, plan, Cut(i, 0, t.num_bytes, 0))

    def settle(self) -> None:
        """At the end of a move nothing of it may be missing."""
        short = [name for (name, _), size in self._missing.items() if size]
        if short:
            raise MissingNameError(f"{len(short)} tensors did not arrive whole: {name_some(short)}")
        self._complete |= self._missing.keys()
        self._missing.clear()

    def check_scope(self, layout: Layout, rank: int, names: frozenset[str] | None) -> None:
        """Exactly the scope arrived. Raises :class:`MissingNameError` or :class:`ProtocolError`."""
        wanted = {
            (t.name, j)
            for t in layout.tensors
            if names is None or t.name in names
            for j, p in enumerate(t.placed)
            if p.rank == rank
        }
        missing = sorted({name for name, _ in wanted - self._complete})
        if missing:
            scope = "the whole engine" if names is None else "the declared scope"
            raise MissingNameError(
                f"{len(missing)} tensors of {scope} were not sent: {name_some(missing)}"
            )
        extra = sorted({name for name, _ in self._complete - wanted})
        if extra:
            raise ProtocolError(f"sent but not in the declared scope: {name_some(extra)}")

    @property
    def keys(self) -> list[tuple[str, int]]:
        """(tensor, placed) that arrived whole."""
        return sorted(self._complete)
