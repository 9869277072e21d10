"""Random layouts of whole models over ranks, and real memory behind them: helpers for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from weightsync.layout import Layout, PlacedBox, Region, TensorLayout
from weightsync.tables import dense_strides
from weightsync.types import Box, RegionKind, TensorMeta, item_bytes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Held:
    """A box on a rank; ``order`` is the memory order of its dimensions, ``gap`` bytes lie before it."""

    rank: int
    box: Box
    order: tuple[int, ...]
    gap: int = 0


@dataclass
class Model:
    """A layout, and for each rank the memory of its one region."""

    layout: Layout
    memory: list[Array]

    def addresses(self, rank: int) -> dict[int, int]:
        return {0: int(self.memory[rank].ctypes.data)}

    def view(self, name: str, j: int) -> Array:
        """The live NumPy view of placement ``j`` of a tensor."""
        p = self.layout.tensors[self.layout.index[name]].placed[j]
        flat = self.memory[p.rank]
        return np.ndarray(p.box.shape, p.dtype, flat, p.offset_bytes, p.strides_bytes)


def build(
    world_size: int,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Sequence[Held]]],
    *,
    wire: Mapping[str, Sequence[str]] | None = None,
    aliases: Mapping[str, str] | None = None,
    kind: RegionKind = RegionKind.PERSISTENT,
) -> Model:
    """Every box densely in memory (in its own order of dimensions), one region a rank."""
    used = [0] * world_size
    entries = []
    for name, (dtype, shape, held) in tensors.items():
        placed = []
        for h in held:
            item = item_bytes(dtype)
            extents = [h.box.shape[d] for d in h.order]
            by_order = dense_strides(extents, item)
            strides = [0] * len(shape)
            for d, s in zip(h.order, by_order, strict=True):
                strides[d] = s
            offset = used[h.rank] + h.gap * item
            offset += -offset % item
            used[h.rank] = offset + h.box.num_elements * item
            placed.append(PlacedBox(h.rank, h.box, 0, offset, tuple(strides), dtype))
        forms = (wire or {}).get(name, [dtype])
        metas = tuple(TensorMeta(name, d, shape) for d in forms)
        entries.append(TensorLayout(name, metas, tuple(placed)))
    regions = tuple((Region(max(n, 1), kind),) for n in used)
    layout = Layout(world_size, tuple(entries), regions, dict(aliases or {}))
    return Model(layout, [np.zeros(max(n, 1), np.uint8) for n in used])


def fill(model: Model, reference: Mapping[str, Array]) -> None:
    """Write every box of the reference into the model's memory."""
    for t in model.layout.tensors:
        for j, p in enumerate(t.placed):
            part = tuple(map(slice, p.box.start, p.box.stop))
            model.view(t.name, j)[...] = reference[t.name][part]


def whole(shape: tuple[int, ...], rank: int = 0) -> Held:
    return Held(rank, Box.whole(shape), tuple(range(len(shape))))


def shards(shape: tuple[int, ...], dim: int, stops: Sequence[int]) -> list[Held]:
    """One slice of a dimension a rank, cut at ``stops``."""
    found, start = [], 0
    for rank, stop in enumerate(stops):
        low = tuple(start if d == dim else 0 for d in range(len(shape)))
        high = tuple(stop if d == dim else n for d, n in enumerate(shape))
        found.append(Held(rank, Box(low, high), tuple(range(len(shape)))))
        start = stop
    return found


@st.composite
def partitions(draw: st.DrawFn, box: Box, world_size: int, most_cuts: int = 4) -> list[Held]:
    """A box cut into random boxes, each on a random rank; some of them on several ranks."""
    pieces = [box]
    for _ in range(draw(st.integers(0, most_cuts))):
        i = draw(st.integers(0, len(pieces) - 1))
        piece = pieces[i]
        wide = [d for d, n in enumerate(piece.shape) if n > 1]
        if not wide:
            continue
        d = draw(st.sampled_from(wide))
        at = draw(st.integers(piece.start[d] + 1, piece.stop[d] - 1))
        low = Box(piece.start, (*piece.stop[:d], at, *piece.stop[d + 1 :]))
        high = Box((*piece.start[:d], at, *piece.start[d + 1 :]), piece.stop)
        pieces[i : i + 1] = [low, high]
    found = []
    for piece in pieces:
        ranks = draw(st.lists(st.integers(0, world_size - 1), min_size=1, max_size=2, unique=True))
        for rank in ranks:
            order = tuple(draw(st.permutations(range(len(box.start)))))
            found.append(Held(rank, piece, order, draw(st.integers(0, 3))))
    return draw(st.permutations(found))


@st.composite
def replicated(draw: st.DrawFn, box: Box, world_size: int) -> list[Held]:
    """One to three independent partitions of a tensor: replicas cut differently."""
    found: list[Held] = []
    for _ in range(draw(st.integers(1, 3))):
        found += draw(partitions(box, world_size))
    return found
