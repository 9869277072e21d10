"""What an engine rank checks of a plan it was sent, before it trusts a single offset in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightsync.errors import ProtocolError
from weightsync.layout import Layout
from weightsync.planning.columns import LayoutColumns, columns_of, widened
from weightsync.planning.transfers import PlannedTensor, Transfer, Transfers
from weightsync.types import BUCKET_ALIGNMENT_BYTES, Box, SlotKind, item_bytes

if TYPE_CHECKING:
    from weightsync.plan import RefitPlan

Int64 = npt.NDArray[np.int64]

_MAX_BUCKET_BYTES = 2**48


def check_plan(plan: RefitPlan, source: Layout, target: Layout) -> None:
    """Raises :class:`ProtocolError` or :class:`LayoutError` naming the tensor."""
    if plan.target_digest != target.digest:
        raise ProtocolError(
            "the plan was made for another layout than this engine's; connect again"
        )
    if plan.source_digest != source.digest:
        raise ProtocolError(
            "the plan was made for another layout than the trainer's; connect again"
        )
    if not BUCKET_ALIGNMENT_BYTES <= plan.bucket_bytes < _MAX_BUCKET_BYTES:
        raise ProtocolError(f"plan: a bucket of {plan.bucket_bytes} B cannot be")
    if len({p.target for p in plan.tensors}) != len(plan.tensors):
        raise ProtocolError("plan: a tensor is listed twice")
    for planned in plan.tensors:
        _check_tensor(planned, source, target)
    _check_transfers(plan.tensors, plan.transfers, source, target)


def _check_tensor(planned: PlannedTensor, source: Layout, target: Layout) -> None:
    sides = ((planned.source, source), (planned.target, target))
    if not all(0 <= index < len(layout.tensors) for index, layout in sides):
        raise ProtocolError(f"plan: tensor {planned.meta.name!r} points outside the layout")
    theirs, mine = source.tensors[planned.source], target.tensors[planned.target]
    if planned.meta not in mine.wire_forms:
        raise ProtocolError(f"plan: {planned.meta} is not a wire form of {mine.name!r}")
    if mine.kind is SlotKind.AFFINE and any(p.dtype != planned.meta.dtype for p in mine.placed):
        raise ProtocolError(f"plan: {planned.meta} is not how the slot {mine.name!r} is stored")
    offered = [w.dtype for w in theirs.wire_forms]
    if planned.meta.dtype not in offered or theirs.shape != planned.meta.shape:
        raise ProtocolError(f"plan: the trainer's {theirs.name!r} does not offer {planned.meta}")


def _check_transfers(
    tensors: Sequence[PlannedTensor], transfers: Transfers, source: Layout, target: Layout
) -> None:
    """All at once in columns; one by one only to say what is wrong, or where a slot is brought in
    several parts."""
    rows = _doubtful(tensors, transfers, source, target)
    for t in transfers.take(rows):
        _check_transfer(t, tensors[t.tensor], source, target)
    if len(rows):
        raise ProtocolError(f"plan: transfer {int(rows[0])} does not fit the layouts")
    _check_covered(tensors, transfers, target, None)


def check_slots(
    tensors: Sequence[PlannedTensor], transfers: Transfers, target: Layout, *, rank: int
) -> None:
    """Every slot that ``rank`` has of ``tensors`` is brought exactly once, within its bounds.

    Raises :class:`ProtocolError` naming the tensor.
    """
    columns = columns_of(target)
    for planned in tensors:
        if not 0 <= planned.target < len(target.tensors):
            raise ProtocolError(f"plan: tensor {planned.meta.name!r} points outside the layout")
        mine = target.tensors[planned.target]
        if planned.meta not in mine.wire_forms:
            raise ProtocolError(f"plan: {planned.meta} is not a wire form of {mine.name!r}")
    places = [t.target for t in tensors]
    fits = _fits(transfers, columns, places, transfers.target_placed, transfers.target_rank)
    if not fits.all():
        t = transfers[int(np.argmin(fits))]
        raise ProtocolError(f"plan: a transfer of {tensors[t.tensor].meta.name!r} leaves its slot")
    _check_covered(tensors, transfers, target, rank)


def _check_covered(
    tensors: Sequence[PlannedTensor], transfers: Transfers, target: Layout, rank: int | None
) -> None:
    brought: dict[tuple[int, int], list[Box]] = {}
    for t in transfers.take(_in_parts(tensors, transfers, target, rank)):
        brought.setdefault((t.tensor, t.target_placed), []).append(t.box)
    for (i, j), parts in brought.items():
        planned = tensors[i]
        whole = target.tensors[planned.target].placed[j].box
        if not _is_exact_cover(whole, parts):
            raise _not_once(planned, whole)


def _not_once(planned: PlannedTensor, box: Box) -> ProtocolError:
    return ProtocolError(f"plan: {box} of {planned.meta.name!r} is not brought exactly once")


def _in_parts(
    tensors: Sequence[PlannedTensor], transfers: Transfers, target: Layout, rank: int | None
) -> Int64:
    """Rows of slots that several transfers bring, or that are empty. Raises for a slot that gets more
    or less than it holds."""
    columns = columns_of(target)
    at = np.array([t.target for t in tensors], dtype=np.int64)
    if not len(at):
        return at
    rows = columns.first[at[transfers.tensor]] + transfers.target_placed
    counts = np.bincount(rows, minlength=len(columns.rank))
    wanted = np.zeros(len(columns.rank), dtype=bool)
    for i in at.tolist():
        wanted[columns.first[i] : columns.first[i + 1]] = True
    if rank is not None:
        wanted &= columns.rank == rank
    sums = np.zeros(len(columns.rank), dtype=np.int64)
    np.add.at(sums, rows, np.prod(transfers.extent, axis=1))
    volumes = np.prod(columns.stop - columns.start, axis=1)
    wrong = np.flatnonzero(wanted & (sums != volumes))
    if len(wrong):
        row = int(wrong[0])
        tensor = int(np.searchsorted(columns.first, row, side="right")) - 1
        planned = next(t for t in tensors if t.target == tensor)
        raise _not_once(planned, target.tensors[tensor].placed[row - columns.first[tensor]].box)
    found = np.flatnonzero((counts[rows] > 1) | (volumes[rows] == 0))
    return found.astype(np.int64, copy=False)


def _doubtful(
    tensors: Sequence[PlannedTensor], transfers: Transfers, source: Layout, target: Layout
) -> Int64:
    """Rows that do not fit both layouts."""
    in_range = (transfers.heads >= 0).all(axis=1) & (transfers.tensor < len(tensors))
    if not in_range.all() or not len(tensors):
        return np.flatnonzero(~in_range).astype(np.int64, copy=False)
    dims = np.array([len(t.meta.shape) for t in tensors], dtype=np.int64)
    items = np.array([item_bytes(t.meta.dtype) for t in tensors], dtype=np.int64)
    fits = transfers.num_dims == dims[transfers.tensor]
    volume = np.prod(transfers.extent, axis=1)
    fits &= transfers.num_bytes == volume * items[transfers.tensor]
    heads = (
        (source, [t.source for t in tensors], transfers.source_placed, transfers.source_rank),
        (target, [t.target for t in tensors], transfers.target_placed, transfers.target_rank),
    )
    for layout, places, placed, ranks in heads:
        fits &= _fits(transfers, columns_of(layout), places, placed, ranks)
    return np.flatnonzero(~fits).astype(np.int64, copy=False)


def _fits(
    transfers: Transfers, columns: LayoutColumns, places: list[int], placed: Int64, ranks: Int64
) -> npt.NDArray[np.bool_]:
    """[transfers] whether each lies within the placement that it names, on the rank it names."""
    if not len(columns.rank) or not len(transfers):
        return np.zeros(len(transfers), dtype=bool)
    most = max(transfers.start.shape[1], columns.num_dims)
    start, stop = widened(transfers.start, transfers.stop, most)
    columns = columns.widened(most)
    at = np.array(places, dtype=np.int64)[transfers.tensor]
    is_there = placed < columns.first[at + 1] - columns.first[at]
    rows = np.where(is_there, columns.first[at] + placed, 0)
    inside = ((columns.start[rows] <= start) & (stop <= columns.stop[rows])).all(axis=1)
    is_empty = np.prod(transfers.extent, axis=1) == 0
    found: npt.NDArray[np.bool_] = is_there & (inside | is_empty) & (columns.rank[rows] == ranks)
    return found


def _check_transfer(t: Transfer, planned: PlannedTensor, source: Layout, target: Layout) -> None:
    name, num_dims = planned.meta.name, len(planned.meta.shape)
    theirs, mine = source.tensors[planned.source].placed, target.tensors[planned.target].placed
    if len(t.box.start) != num_dims:
        raise ProtocolError(f"plan: {t.box} is not a box of {name!r}, which has {num_dims} dims")
    if t.source_placed >= len(theirs) or not _holds(theirs[t.source_placed].box, t.box):
        raise ProtocolError(f"plan: a transfer of {name!r} leaves its source")
    if t.target_placed >= len(mine) or not _holds(mine[t.target_placed].box, t.box):
        raise ProtocolError(f"plan: a transfer of {name!r} leaves its slot")
    ranks = (theirs[t.source_placed].rank, mine[t.target_placed].rank)
    if ranks != (t.source_rank, t.target_rank):
        raise ProtocolError(
            f"plan: a transfer of {name!r} from rank {t.source_rank} to {t.target_rank}, whose "
            f"memory is on ranks {ranks}"
        )


def _is_exact_cover(whole: Box, parts: Sequence[Box]) -> bool:
    """Whether the parts, all within ``whole``, hold each of its elements exactly once."""
    if not whole.num_elements:
        return all(part == whole for part in parts)
    if sum(part.num_elements for part in parts) != whole.num_elements:
        return False
    if len(parts) == 1 or not whole.shape:
        return len(parts) == 1
    active: list[Box] = []
    for part in sorted(parts, key=lambda box: box.start):
        active = [box for box in active if box.stop[0] > part.start[0]]
        if not part.num_elements or any(box.intersect(part) for box in active):
            return False
        active.append(part)
    return True


def _holds(outer: Box, inner: Box) -> bool:
    return not inner.num_elements or outer.intersect(inner) == inner
