"""How a publisher cuts tensors into pieces, so that ranks which hold parts of them can follow."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from weightsync.errors import ConfigError, LayoutError
from weightsync.layout import Layout
from weightsync.naming import check_pattern
from weightsync.store.pieces import MAX_PIECES, Piece
from weightsync.types import Box, TensorMeta


@dataclass(frozen=True, slots=True)
class Cut:
    """Names that match ``pattern`` (the whole name) are cut along ``dim`` into ``parts`` of equal length;
    where it does not divide the dimension, the last ones are shorter or missing, as ``torch.chunk``
    does it.

    ``Cut(r".*\\.(o|down)_proj\\.weight", dim=1, parts=8)``
    """

    pattern: str
    dim: int
    parts: int

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if type(self.parts) is not int or not 1 <= self.parts <= MAX_PIECES:
            raise ConfigError(
                f"cut {self.pattern!r}: {self.parts!r} parts, allowed are 1 to {MAX_PIECES}"
            )

    def cuts(self, shape: Sequence[int]) -> list[int] | None:
        """Where the dimension is cut, both ends included; None if the tensor has no such dimension."""
        if not -len(shape) <= self.dim < len(shape):
            return None
        extent = shape[self.dim]
        length = max(1, -(-extent // self.parts))
        return [*range(0, extent, length), extent]


Cuts = Sequence[Cut] | Layout


class Cutter:
    """Which pieces a tensor is coded in. ``cuts``: rules, of which the first that matches counts, or the
    layout of an engine, whose ranks then hold whole pieces; what neither speaks of stays whole."""

    _NO_CUTS: Final = ()

    def __init__(self, cuts: Cuts | None = None) -> None:
        self._rules: Sequence[Cut] = self._NO_CUTS
        self._layout: Layout | None = None
        if isinstance(cuts, Layout):
            self._layout = cuts
        elif cuts is not None:
            self._rules = tuple(cuts)
            wrong = [rule for rule in self._rules if not isinstance(rule, Cut)]
            if wrong:
                raise ConfigError(f"cut: {wrong[0]!r} is no weightsync.store.Cut, nor a layout")
        self._known: dict[TensorMeta, tuple[Piece, ...]] = {}

    def pieces(self, meta: TensorMeta, held: Box | None = None) -> tuple[Piece, ...]:
        """The pieces of a tensor, or of the box that is ``held`` of it, in row-major order of places.

        Raises :class:`ConfigError` for a rule that does not fit a tensor which it names, and for a
        tensor that would have more than ``MAX_PIECES``.
        """
        if meta not in self._known:
            self._known[meta] = tuple(self._made(meta))
        if held is None or held == Box.whole(meta.shape):
            return self._known[meta]
        common = (piece.box.intersect(held) for piece in self._known[meta])
        return tuple(Piece(meta, box) for box in common if box is not None)

    def _made(self, meta: TensorMeta) -> list[Piece]:
        ends = self._ends(meta) if meta.num_elements else None
        if ends is None:
            return [Piece(meta, Box.whole(meta.shape))]
        count = 1
        for one in ends:
            count *= len(one) - 1
        if count > MAX_PIECES:
            raise ConfigError(
                f"{meta.name!r} of shape {meta.shape} would be cut into {count} pieces, allowed are "
                f"{MAX_PIECES}: give coarser cuts, or none for it"
            )
        cells = itertools.product(*(list(itertools.pairwise(one)) for one in ends))
        return [
            Piece(meta, Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))) for cell in cells
        ]

    def _ends(self, meta: TensorMeta) -> list[list[int]] | None:
        """By dimension, where it is cut, both ends included."""
        if self._layout is not None:
            return _ends_in(self._layout, meta)
        for rule in self._rules:
            if re.fullmatch(rule.pattern, meta.name):
                found = rule.cuts(meta.shape)
                if found is None:
                    raise ConfigError(
                        f"cut {rule.pattern!r}: {meta.name!r} of shape {meta.shape} has no dimension "
                        f"{rule.dim}"
                    )
                ends = [[0, extent] for extent in meta.shape]
                ends[rule.dim] = found
                return ends
        return None


def _ends_in(layout: Layout, meta: TensorMeta) -> list[list[int]] | None:
    """Every place where a box of some rank begins or ends: each box is then a union of cells."""
    name = layout.canonical(meta.name)
    if name is None:
        return None
    tensor = layout.tensors[layout.index[name]]
    if tensor.shape != meta.shape:
        raise ConfigError(
            f"cut: {meta.name!r} has shape {meta.shape}, in the layout to cut by {tensor.shape}"
        )
    boxes = [placed.box for placed in tensor.placed if placed.box.num_elements]
    return [
        sorted({0, extent, *(b.start[d] for b in boxes), *(b.stop[d] for b in boxes)})
        for d, extent in enumerate(meta.shape)
    ]


def owned(layout: Layout, cutter: Cutter) -> list[list[Piece]]:
    """By rank of a trainer, the pieces that it publishes: each element once, of the lowest rank that
    has it, further cut by the cutter. Raises :class:`LayoutError` for a tensor that the ranks do not
    hold whole."""
    found: list[list[Piece]] = [[] for _ in range(layout.world_size)]
    for tensor in layout.tensors:
        meta = tensor.wire_forms[-1]  # the cast one, where there is one
        placed = sorted(tensor.placed, key=lambda p: p.rank)
        if not meta.num_elements and placed:
            found[placed[0].rank] += cutter.pieces(meta)
            continue
        left = [Box.whole(meta.shape)]
        for one in placed:
            mine = [common for box in left if (common := box.intersect(one.box)) is not None]
            found[one.rank] += [piece for box in mine for piece in cutter.pieces(meta, box)]
            left = [rest for box in left for rest in box.subtract(one.box)]
        if left:
            raise LayoutError(
                f"{tensor.name!r} of shape {meta.shape}: no rank of the trainer sends {left[0]}"
            )
    return found


__all__ = ["Cut", "Cuts", "Cutter", "owned"]
