"""What of an update has arrived on a rank: every element of every transfer exactly once.

Slots are numbered and counted in arrays, for a model of many small tensors must not cost a loop over
them in every stage.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightsync.errors import MissingNameError, ProtocolError
from weightsync.layout import Layout
from weightsync.manifest import name_some
from weightsync.plan import RefitPlan
from weightsync.types import SlotKind, TensorMeta, item_bytes

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Columns of entries of a slot, int64 [n, 4].
ITEM, START, BYTES, OFFSET = range(4)


class SlotIndex:
    """The placements of one rank of a layout, numbered in the layout's order."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        #: (tensor, placed) of each number.
        self.keys = [
            (i, j)
            for i, tensor in enumerate(layout.tensors)
            for j, placed in enumerate(tensor.placed)
            if placed.rank == rank
        ]
        self.number = {key: n for n, key in enumerate(self.keys)}
        placed = [layout.tensors[i].placed[j] for i, j in self.keys]
        sizes = [p.box.num_elements * item_bytes(p.dtype) for p in placed]
        self.num_bytes: Int64Array = np.array(sizes, dtype=np.int64)
        opaque = [layout.tensors[i].kind is SlotKind.OPAQUE for i, _ in self.keys]
        self.is_opaque: BoolArray = np.array(opaque, dtype=bool)
        self.has_opaque = any(opaque)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def held(self) -> frozenset[str]:
        """Names of the tensors that this rank holds anything of."""
        return frozenset(self.layout.tensors[i].name for i, _ in self.keys)

    def names(self, numbers: Int64Array) -> list[str]:
        """Tensor names of some numbers."""
        return [self.layout.tensors[self.keys[n][0]].name for n in numbers.tolist()]

    def mask(self, names: Collection[str] | None) -> BoolArray:
        """Which slots belong to these (canonical) names; all of them for None."""
        if names is None:
            return np.ones(len(self), dtype=bool)
        tensors = self.layout.tensors
        return np.array([tensors[i].name in names for i, _ in self.keys], dtype=bool)


@dataclass(frozen=True, eq=False)
class PlanShare:
    """What one rank gets of a plan: the slot and the bytes of each of its transfers."""

    plan: RefitPlan
    index: SlotIndex
    transfers: Int64Array  # [m] places in plan.transfers
    slots: Int64Array  # [m] slot numbers
    num_bytes: Int64Array  # [m] in wire form

    @cached_property
    def row_of(self) -> Int64Array:
        """Place in ``transfers`` of each transfer of the plan; -1: of another rank."""
        rows = np.full(len(self.plan.transfers), -1, dtype=np.int64)
        rows[self.transfers] = np.arange(len(self.transfers))
        return rows

    @cached_property
    def tensors(self) -> Int64Array:
        """Places in ``plan.tensors``, rising, of what this rank gets anything of."""
        return np.unique(self.plan.transfers.tensor[self.transfers])

    @cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        """Their wire forms: the rank's part of a manifest speaks of these."""
        return tuple(self.plan.metas[i] for i in self.tensors.tolist())

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The trainer ranks that this rank gets something from, rising."""
        return tuple(np.unique(self.plan.transfers.source_rank[self.transfers]).tolist())

    @cached_property
    def slot_bytes(self) -> Int64Array:
        """[slots of the rank] bytes that the plan brings to each."""
        sums: Int64Array = np.zeros(len(self.index), dtype=np.int64)
        np.add.at(sums, self.slots, self.num_bytes)
        return sums

    @cached_property
    def brought(self) -> BoolArray:
        """[slots of the rank] whether the plan brings anything (be it nothing) to each."""
        found = np.zeros(len(self.index), dtype=bool)
        found[self.slots] = True
        return found

    @cached_property
    def fault(self) -> str | None:
        """Why the plan does not bring whole slots, or None."""
        wrong = np.flatnonzero(self.brought & (self.slot_bytes != self.index.num_bytes))
        if not len(wrong):
            return None
        (name,) = self.index.names(wrong[:1])
        got, whole = self.slot_bytes[wrong[0]], self.index.num_bytes[wrong[0]]
        return f"plan: {name!r} brings {got} of {whole} B"


def plan_share(plan: RefitPlan, index: SlotIndex) -> PlanShare:
    """The share of ``index.rank``, worked out once a plan."""
    transfers = plan.transfers
    mine = np.flatnonzero(transfers.target_rank == index.rank).astype(np.int64, copy=False)
    at = zip(transfers.tensor[mine].tolist(), transfers.target_placed[mine].tolist(), strict=True)
    slots = [index.number[plan.tensors[i].target, j] for i, j in at]
    return PlanShare(
        plan, index, mine, np.array(slots, dtype=np.int64), transfers.num_bytes[mine]
    )  # fmt: skip


@dataclass(eq=False)
class _Move:
    share: PlanShare
    seen: BoolArray  # [transfers of the share] that arrived in one piece
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of the others


class Coverage:
    """Counts what arrives in one session."""

    def __init__(self, index: SlotIndex) -> None:
        self._index = index
        self._is_expected = np.zeros(len(index), dtype=bool)
        self._is_complete = np.zeros(len(index), dtype=bool)
        self._missing_bytes: Int64Array = np.zeros(len(index), dtype=np.int64)
        self._moves: dict[int, _Move] = {}
        self._scope: tuple[Collection[str] | None, BoolArray] | None = None  # names last asked for

    def expect(self, move: int, share: PlanShare) -> None:
        """A plan is about to be moved. Raises if it brings a slot that was brought before."""
        again = share.brought & (self._is_expected | self._is_complete)
        if again.any():
            names = self._index.names(np.flatnonzero(again))
            raise ProtocolError(f"sent twice in one update: {name_some(names)}")
        if share.fault is not None:
            raise ProtocolError(share.fault)
        self._is_expected |= share.brought
        self._missing_bytes += share.slot_bytes
        self._moves[move] = _Move(share, np.zeros(len(share.transfers), dtype=bool))

    def arrived(self, move: int, entries: Int64Array) -> None:
        """Entries of a slot landed, int64 [n, 4]: transfer, first byte, bytes, (offset).

        They were checked against the plan. Raises :class:`ProtocolError` when bytes arrive twice.
        """
        moving = self._moves[move]
        share = moving.share
        rows = share.row_of[entries[:, ITEM]]
        if (rows < 0).any():
            raise ProtocolError("a slot brought what is meant for another rank")
        sizes = share.num_bytes[rows]
        is_whole = (entries[:, START] == 0) & (entries[:, BYTES] == sizes)
        whole = rows[is_whole]
        counts = np.bincount(whole, minlength=len(moving.seen))
        again = (counts > 1) | ((counts > 0) & moving.seen)
        for row in moving.ranges:
            again[row] |= counts[row] > 0
        if again.any():
            row = int(np.flatnonzero(again)[0])
            self._refuse(share, row, 0, int(share.num_bytes[row]))
        moving.seen |= counts > 0
        np.subtract.at(self._missing_bytes, share.slots[whole], share.num_bytes[whole])
        for i in np.flatnonzero(~is_whole).tolist():
            start, size = int(entries[i, START]), int(entries[i, BYTES])
            self._piece_arrived(moving, int(rows[i]), start, start + size)

    def _piece_arrived(self, moving: _Move, row: int, start: int, stop: int) -> None:
        ranges = moving.ranges.setdefault(row, [])
        if moving.seen[row] or any(a < stop and start < b for a, b in ranges):
            self._refuse(moving.share, row, start, stop)
        ranges.append((start, stop))
        self._missing_bytes[moving.share.slots[row]] -= stop - start

    def _refuse(self, share: PlanShare, row: int, start: int, stop: int) -> None:
        (name,) = self._index.names(share.slots[row : row + 1])
        raise ProtocolError(f"{name!r}: bytes {start}:{stop} arrived twice")

    def all_arrived(self, move: int) -> None:
        """A direct read finished: every transfer of the plan landed whole."""
        moving = self._moves[move]
        if moving.seen.any() or moving.ranges:
            raise ProtocolError("a read brought what had arrived before")
        moving.seen[:] = True
        self._missing_bytes -= moving.share.slot_bytes

    def brought_whole(self) -> None:
        """Every slot landed, of a source that was checked to hold all of them."""
        if self._moves or self._is_complete.any():
            raise ProtocolError("a full version is the whole of an update")
        self._is_complete[:] = True

    def settle(self) -> None:
        """At the end of a move nothing of it may be missing."""
        short = np.flatnonzero(self._missing_bytes)
        if len(short):
            names = self._index.names(short)
            raise MissingNameError(f"{len(names)} tensors did not arrive whole: {name_some(names)}")
        self._is_complete |= self._is_expected
        self._is_expected[:] = False

    def is_whole_with_expected(self, names: Collection[str] | None) -> bool:
        """Whether nothing of the scope is missing once the moves under way have ended."""
        return bool((self._is_complete | self._is_expected | ~self._wanted(names)).all())

    def _wanted(self, names: Collection[str] | None) -> BoolArray:
        if self._scope is None or self._scope[0] != names:
            self._scope = (names, self._index.mask(names))
        return self._scope[1]

    def check_scope(self, names: Collection[str] | None) -> None:
        """Exactly the scope arrived. Raises :class:`MissingNameError` or :class:`ProtocolError`."""
        wanted = self._wanted(names)
        missing = sorted(set(self._index.names(np.flatnonzero(wanted & ~self._is_complete))))
        if missing:
            scope = "the whole engine" if names is None else "the declared scope"
            raise MissingNameError(
                f"{len(missing)} tensors of {scope} were not sent: {name_some(missing)}"
            )
        extra = sorted(set(self._index.names(np.flatnonzero(self._is_complete & ~wanted))))
        if extra:
            raise ProtocolError(f"sent but not in the declared scope: {name_some(extra)}")

    @property
    def complete(self) -> Int64Array:
        """Numbers of the slots that arrived whole."""
        return np.flatnonzero(self._is_complete).astype(np.int64, copy=False)
