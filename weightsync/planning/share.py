"""What one rank needs of a plan: its transfers, and where in which memory they begin.

A plan of a trillion parameters has a hundred thousand transfers, one rank a few thousand of them. A
share is small enough for a control message and is bound to addresses in milliseconds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightsync.errors import LayoutError, ProtocolError
from weightsync.layout import Layout
from weightsync.planning.check import check_slots
from weightsync.planning.columns import widened
from weightsync.planning.contract import SourceMemory
from weightsync.planning.transfers import TENSOR, PlannedTensor, Transfers
from weightsync.types import TensorMeta, item_bytes

if TYPE_CHECKING:
    from weightsync.plan import RefitPlan

Int64 = npt.NDArray[np.int64]

SHARE_VERSION = 1
_MAX_COLUMN_BYTES = 2**31


class Side(StrEnum):
    """Whose share it is."""

    SOURCE = "source"
    TARGET = "target"


@dataclass(frozen=True, eq=False)
class Strided:
    """Where the box of each transfer begins in a region, and how it lies there."""

    region: Int64  # [n]
    offset_bytes: Int64  # [n] of the box's first element
    strides_bytes: Int64  # [n, dims]
    dtype: Int64  # [n] index in RankShare.dtypes

    def take(self, rows: Int64) -> Strided:
        """Some of them."""
        return Strided(
            self.region[rows], self.offset_bytes[rows], self.strides_bytes[rows], self.dtype[rows]
        )

    def reach(self, extent: Int64, items: Int64) -> tuple[Int64, Int64]:
        """[n] first byte and end of what each box touches in its region."""
        steps = np.maximum(extent - 1, 0) * self.strides_bytes[:, : extent.shape[1]]
        low = self.offset_bytes + np.minimum(steps, 0).sum(axis=1)
        high = self.offset_bytes + np.maximum(steps, 0).sum(axis=1) + items
        return low, high


@dataclass(frozen=True, eq=False)
class RankShare:
    """The part of one rank. ``transfers.tensor`` counts within ``tensors``, which keep their places
    in both layouts; ranks and placements are those of the plan."""

    plan_digest: str
    side: Side
    rank: int
    tensors: tuple[PlannedTensor, ...]
    transfers: Transfers
    dtypes: tuple[str, ...]
    source: Strided  # how the trainer holds each box
    #: int64 [n] the rank of the engine that hands each box on, -1: read from the trainer. None:
    #: nothing is handed on.
    relay: Int64 | None = None

    @property
    def peers(self) -> Int64:
        """[n] the rank on the other side."""
        t = self.transfers
        return t.target_rank if self.side is Side.SOURCE else t.source_rank

    @property
    def num_bytes(self) -> int:
        return int(self.transfers.num_bytes.sum())

    @cached_property
    def digest(self) -> str:
        """sha256 of everything in it."""
        body = json.dumps(self._head_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(body.encode() + self._columns()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, the columns as base64 of deflated little-endian int64."""
        columns = zlib.compress(self._columns(), 6)
        body = {"columns": base64.b64encode(columns).decode(), "digest": self.digest}
        return self._head_json() | body

    def _columns(self) -> bytes:
        """Column after column, as they compress well."""
        t, held = self.transfers, self.source
        arrays = (t.heads, t.start, t.stop, held.region, held.offset_bytes, held.strides_bytes,
                  held.dtype)  # fmt: skip
        return b"".join(np.ascontiguousarray(a.T).astype("<i8").tobytes() for a in arrays)

    def _head_json(self) -> dict[str, Any]:
        metas = [p.meta for p in self.tensors]
        return {
            "share": SHARE_VERSION,
            "plan": self.plan_digest,
            "side": self.side.value,
            "rank": self.rank,
            "names": [m.name for m in metas],
            "wire": [m.dtype for m in metas],
            "shapes": [m.shape for m in metas],
            "places": [(p.source, p.target) for p in self.tensors],
            "dtypes": self.dtypes,
            "size": [len(self.transfers), self.transfers.start.shape[1]],
        } | ({} if self.relay is None else {"relay": self.relay.tolist()})

    @classmethod
    def from_json(cls, value: Any) -> RankShare:
        """The exact inverse. Raises :class:`ProtocolError` or :class:`LayoutError`."""
        try:
            if value["share"] != SHARE_VERSION:
                raise ProtocolError(
                    f"share of version {value['share']!r}, this side reads {SHARE_VERSION}; use one "
                    "version of weightsync on both sides"
                )
            metas = zip(value["names"], value["wire"], value["shapes"], strict=True)
            tensors = tuple(
                PlannedTensor(TensorMeta(str(n), str(d), tuple(map(int, s))), int(a), int(b))
                for (n, d, s), (a, b) in zip(metas, value["places"], strict=True)
            )
            num, dims = map(int, value["size"])
            dtypes = tuple(str(d) for d in value["dtypes"])
            heads, *columns = _parse_columns(str(value["columns"]), num, dims)
            start, stop, *rest = columns
            share = cls(
                str(value["plan"]), Side(value["side"]), int(value["rank"]), tensors,
                Transfers(heads, start, stop), dtypes, Strided(*rest),
                np.array(value["relay"], dtype=np.int64) if "relay" in value else None,
            )  # fmt: skip
            _check_numbers(share)
            if value["digest"] != share.digest:
                raise ProtocolError(
                    f"share of {share.side} rank {share.rank}: its digest is {value['digest']!r}, what "
                    f"arrived digests to {share.digest!r}; use one version of weightsync on both sides"
                )
        except (ProtocolError, LayoutError):
            raise
        except (
            AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, zlib.error,
        ) as error:  # fmt: skip
            raise ProtocolError(f"malformed share of a plan: {error!r}") from error
        return share

    def check(self, layout: Layout) -> None:
        """What an engine rank checks against its own layout, before anything moves: every slot of
        these tensors on this rank is brought exactly once, from where the share says.

        Raises :class:`ProtocolError` naming the tensor.
        """
        if self.side is not Side.TARGET:
            raise ProtocolError("the share of a trainer rank was given to an engine")
        wrong = np.flatnonzero(self.transfers.target_rank != self.rank)
        if len(wrong):
            raise ProtocolError(
                f"share of engine rank {self.rank}: transfer {int(wrong[0])} is for rank "
                f"{int(self.transfers.target_rank[wrong[0]])}"
            )
        check_slots(self.tensors, self.transfers, layout, rank=self.rank)


def share_of(
    plan: RefitPlan,
    source: SourceMemory,
    *,
    source_rank: int | None = None,
    target_rank: int | None = None,
) -> RankShare:
    """The share of one rank; exactly one of the two is given.

    Raises :class:`LayoutError` if both or none are.
    """
    if (source_rank is None) == (target_rank is None):
        raise LayoutError(
            f"a share is of one rank: got source_rank={source_rank}, target_rank={target_rank}"
        )
    side, rank, ranks = Side.TARGET, target_rank, plan.transfers.target_rank
    if source_rank is not None:
        side, rank, ranks = Side.SOURCE, source_rank, plan.transfers.source_rank
    mine = ranks == rank
    if side is Side.SOURCE:  # what others hand on, a trainer rank does not give
        mine = mine & plan.is_read
    places = np.flatnonzero(mine)
    transfers = plan.transfers.take(places)
    relay = None
    if plan.via is not None and side is Side.TARGET:
        via = plan.via[places]
        relay = np.where(via < 0, -1, plan.transfers.target_rank[via])
    used, local = np.unique(transfers.tensor, return_inverse=True)
    rows = source.rows(plan.tensors, transfers)
    heads = transfers.heads.copy()
    heads[:, TENSOR] = local.reshape(-1)
    tensors = tuple(plan.tensors[i] for i in used.tolist())
    return RankShare(
        plan.digest, side, int(rank or 0), tensors, Transfers(heads, transfers.start, transfers.stop),
        source.memory.dtypes, _strided(source, transfers, rows), relay,
    )  # fmt: skip


def _strided(source: SourceMemory, transfers: Transfers, rows: Int64) -> Strided:
    memory, dims = source.memory, transfers.start.shape[1]
    start, _ = widened(source.start, source.start, max(dims, source.start.shape[1]))
    strides, _ = widened(memory.strides_bytes, memory.strides_bytes, start.shape[1])
    strides = strides[rows, :dims] * (transfers.num_dims[:, None] > np.arange(dims))
    steps = (transfers.start - start[rows, :dims]) * strides
    return Strided(
        memory.region[rows], memory.offset_bytes[rows] + steps.sum(axis=1), strides,
        memory.dtype[rows],
    )  # fmt: skip


def _parse_columns(text: str, num: int, dims: int) -> list[Int64]:
    widths = [7, dims, dims, 1, 1, dims, 1]
    size = num * sum(widths) * 8
    if num < 0 or not 1 <= dims <= 64 or size > _MAX_COLUMN_BYTES:
        raise ProtocolError(f"malformed share of a plan: {num} transfers of {dims} dimensions")
    inflate = zlib.decompressobj()
    flat = inflate.decompress(base64.b64decode(text, validate=True), size + 1)
    if len(flat) != size:
        raise ProtocolError(
            f"share of a plan: {len(flat)} B of columns where {size} were announced"
        )
    array = np.frombuffer(flat, dtype="<i8").astype(np.int64)
    found, at = [], 0
    for width in widths:
        part = array[at : at + num * width].reshape(width, num).T
        found.append(np.ascontiguousarray(part))
        at += num * width
    region, offset, dtype = (found[i][:, 0] for i in (3, 4, 6))
    return [*found[:3], region, offset, found[5], dtype]


def _check_numbers(share: RankShare) -> None:
    """Nothing points outside of what came with it."""
    t = share.transfers
    dims = np.array([len(p.meta.shape) for p in share.tensors], dtype=np.int64)
    items = np.array([item_bytes(p.meta.dtype) for p in share.tensors], dtype=np.int64)
    for dtype in share.dtypes:
        item_bytes(dtype)
    ok = (t.heads >= 0).all(axis=1) & (t.tensor < len(share.tensors))
    ok &= (share.source.dtype >= 0) & (share.source.dtype < len(share.dtypes))
    ok &= ((t.start >= 0) & (t.stop >= t.start) & (t.stop < 2**47)).all(axis=1)
    if share.relay is not None:
        if share.relay.shape != (len(t),):
            raise ProtocolError(
                f"share of a plan: {len(share.relay)} relays for {len(t)} transfers"
            )
        ok &= (share.relay >= -1) & (share.relay != share.rank)
    if ok.all() and len(t):
        ok &= t.num_dims == dims[t.tensor]
        ok &= t.num_bytes == np.prod(t.extent, axis=1) * items[t.tensor]
    if not ok.all():
        raise ProtocolError(
            f"share of {share.side} rank {share.rank}: transfer {int(np.argmin(ok))} of {len(t)} "
            "points outside of it"
        )
