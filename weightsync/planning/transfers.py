"""The transfers of a plan as integer columns that read like a sequence of records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from weightsync.errors import ProtocolError
from weightsync.types import Box, TensorMeta, item_bytes

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor on its way: its one wire form and its place in both layouts."""

    meta: TensorMeta  # named as the target names it
    source: int  # index in the source layout's tensors
    target: int  # index in the target layout's tensors


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a tensor that one source placement gives to one target placement."""

    tensor: int  # index in RefitPlan.tensors
    source_placed: int  # index in that tensor's placements
    target_placed: int
    source_rank: int
    target_rank: int
    box: Box
    num_bytes: int  # in wire form


#: Columns of ``Transfers.heads``.
TENSOR, SOURCE_PLACED, TARGET_PLACED, SOURCE_RANK, TARGET_RANK, NUM_DIMS, NUM_BYTES = range(7)


#: Records of so many transfers are kept once made; those of a trillion-parameter plan never all live.
_MOST_RECORDS = 2**16


class Transfers(Sequence[Transfer]):
    """``heads`` int64 [n, 7] (columns above), ``start`` and ``stop`` int64 [n, dims].

    Dimensions that a tensor does not have are the interval 0:1, so that products and intersections
    need no exception. Immutable: the arrays are made read-only.
    """

    def __init__(self, heads: Int64, start: Int64, stop: Int64) -> None:
        if heads.shape[1:] != (7,) or start.shape != stop.shape or len(start) != len(heads):
            raise ProtocolError(f"columns of {heads.shape}, {start.shape}, {stop.shape} do not fit")
        # As many dimensions as the boxes have, so that equal transfers are equal columns.
        dims = max(1, int(heads[:, NUM_DIMS].max(initial=0)))
        start, stop = start[:, :dims], stop[:, :dims]
        for array in (heads, start, stop):
            array.flags.writeable = False
        self.heads, self.start, self.stop = heads, start, stop

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> Transfers:
        """Columns of records."""
        if isinstance(transfers, Transfers):
            return transfers
        heads = [
            (t.tensor, t.source_placed, t.target_placed, t.source_rank, t.target_rank,
             len(t.box.start), t.num_bytes)
            for t in transfers
        ]  # fmt: skip
        return cls(
            np.array(heads, dtype=np.int64).reshape(-1, 7),
            *padded_boxes([t.box.start for t in transfers], [t.box.stop for t in transfers]),
        )

    def __len__(self) -> int:
        return len(self.heads)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, index: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(index, slice):
            return tuple(self.take(np.arange(len(self))[index]))
        if len(self) <= _MOST_RECORDS:
            return self._records[index]
        row = self.heads[index]  # IndexError as of any sequence
        return _record(row.tolist(), self.start[index].tolist(), self.stop[index].tolist())

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._records) if len(self) <= _MOST_RECORDS else self._made()

    @cached_property
    def _records(self) -> list[Transfer]:
        return list(self._made())

    def _made(self) -> Iterator[Transfer]:
        for i in range(0, len(self), _MOST_RECORDS):
            part = slice(i, i + _MOST_RECORDS)
            rows = self.heads[part].tolist(), self.start[part].tolist(), self.stop[part].tolist()
            yield from map(_record, *rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transfers):
            return NotImplemented
        pairs = zip(self._arrays, other._arrays, strict=True)
        return all(np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} transfers, {self.num_bytes.sum()} B>"

    @property
    def _arrays(self) -> tuple[Int64, Int64, Int64]:
        return self.heads, self.start, self.stop

    @property
    def tensor(self) -> Int64:
        return self.heads[:, TENSOR]

    @property
    def source_placed(self) -> Int64:
        return self.heads[:, SOURCE_PLACED]

    @property
    def target_placed(self) -> Int64:
        return self.heads[:, TARGET_PLACED]

    @property
    def source_rank(self) -> Int64:
        return self.heads[:, SOURCE_RANK]

    @property
    def target_rank(self) -> Int64:
        return self.heads[:, TARGET_RANK]

    @property
    def num_dims(self) -> Int64:
        return self.heads[:, NUM_DIMS]

    @property
    def num_bytes(self) -> Int64:
        return self.heads[:, NUM_BYTES]

    @cached_property
    def extent(self) -> Int64:
        """[n, dims] elements along each dimension."""
        return self.stop - self.start

    def take(self, rows: Int64 | npt.NDArray[np.bool_]) -> Transfers:
        """Some of them, in the order of ``rows``."""
        return Transfers(self.heads[rows], self.start[rows], self.stop[rows])

    def to_bytes(self) -> bytes:
        """The columns as little-endian int64, one array after the other; of the same plan the same
        bytes on every machine."""
        return b"".join(np.ascontiguousarray(a).astype("<i8").tobytes() for a in self._arrays)

    def to_json(self) -> list[list[Any]]:
        """Rows: tensor, both placements, both ranks, start, stop."""
        heads, starts, stops = (a.tolist() for a in self._arrays)
        rows = zip(heads, starts, stops, strict=True)
        return [[*h[:5], a[: h[NUM_DIMS]], b[: h[NUM_DIMS]]] for h, a, b in rows]

    @classmethod
    def from_json(cls, rows: Any, tensors: Sequence[PlannedTensor]) -> Transfers:
        """The inverse. Raises ProtocolError, LayoutError, or what a malformed value raises."""
        heads = [[*map(int, row[:5])] for row in rows]
        boxes = [Box(tuple(map(int, row[5])), tuple(map(int, row[6]))) for row in rows]
        items = [item_bytes(t.meta.dtype) for t in tensors]
        for head, box, row in zip(heads, boxes, rows, strict=True):
            if len(row) != 7 or min(head) < 0:
                raise ProtocolError(f"malformed plan: a negative index in transfer {row!r}")
            head += [len(box.start), box.num_elements * items[head[TENSOR]]]
        return cls(
            np.array(heads, dtype=np.int64).reshape(-1, 7),
            *padded_boxes([b.start for b in boxes], [b.stop for b in boxes]),
        )


def _record(head: list[int], start: list[int], stop: list[int]) -> Transfer:
    n = head[NUM_DIMS]
    tensor, held, wanted, source, target = head[:5]
    box = Box(tuple(start[:n]), tuple(stop[:n]))
    return Transfer(tensor, held, wanted, source, target, box, head[NUM_BYTES])


def padded_boxes(
    starts: Sequence[Sequence[int]], stops: Sequence[Sequence[int]]
) -> tuple[Int64, Int64]:
    """Boxes of any dimensions as two arrays [n, most dimensions], at least one."""
    return padded(starts, 0), padded(stops, 1)


def padded(values: Sequence[Sequence[int]], fill: int) -> Int64:
    """Lists of numbers as int64 [n, longest (at least 1)], filled up behind."""
    counts = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    flat = np.fromiter(chain.from_iterable(values), dtype=np.int64, count=int(counts.sum()))
    width = max(1, int(counts.max(initial=0)))
    found = np.full((len(values), width), fill, dtype=np.int64)
    found[np.arange(width) < counts[:, None]] = flat
    return found
