"""Declarations that a rank's own tensors are boxes of larger ones.

For what no framework tells: hand-written tensor parallel, experts that are numbered from 0 on every rank,
pipeline stages that number their layers so, padded vocabularies, fused or interleaved projections. They
are rules beside those of :mod:`weightsync.naming`, and the first that matches decides there too;
:class:`InTurn` applies several to one name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.errors import ConfigError, LayoutError
from weightsync.layouts.sharded import Index, Sharded, join_pieces
from weightsync.naming import NamedTensor, Rule, check_pattern


@dataclass(frozen=True, slots=True)
class ShardRule:
    """Names that match ``pattern`` (the whole name) are part ``index`` of ``count`` along ``dim``.

    Parts are equally long and lie one after another. ``extent`` is the length of the whole dimension
    without padding; None: there is none. Elements beyond it are padding and are not sent. ``name`` is
    the name of the whole tensor, with ``\\1`` or ``\\g<group>`` of the pattern; None: unchanged.

    ``ShardRule(r".*\\.up_proj\\.weight", dim=0, index=tp_rank, count=tp_size)``
    """

    pattern: str
    dim: int
    index: int
    count: int
    extent: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if not 0 <= self.index < self.count:
            raise ConfigError(f"rule {self.pattern!r}: part {self.index} of {self.count}")

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        local = Sharded.whole(tensor)
        if not -local.ndim <= self.dim < local.ndim:
            raise LayoutError(f"{name!r} of shape {local.shape} has no dimension {self.dim}")
        new = name if self.name is None else match.expand(self.name)
        return [(new, part_along(local, self.dim, self.index, self.count, self.extent, name))]


def part_along(
    local: Sharded,
    dim: int,
    index: int,
    count: int,
    extent: int | None = None,
    name: str = "tensor",
) -> Sharded:
    """``local`` as part ``index`` of ``count`` equal parts along ``dim``, without what lies past ``extent``.

    Raises :class:`LayoutError` naming ``name`` if all parts together are shorter than ``extent``.
    """
    dim %= local.ndim
    size = local.shape[dim]
    padded = size * count
    stop = padded if extent is None else extent
    if stop > padded:
        raise LayoutError(
            f"{name!r}: {count} parts of {size} along dimension {dim} are {padded}, fewer than the {stop} "
            "that the whole has"
        )
    keys: list[Index] = [slice(None)] * local.ndim
    keys[dim] = slice(0, max(0, min(size, stop - index * size)))
    shape, start = list(local.shape), [0] * local.ndim
    shape[dim], start[dim] = stop, min(index * size, stop)
    return local[tuple(keys)].within(shape, start)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """``part`` (whole numbers and slices) of a local tensor is the box at ``start`` of the tensor
    ``name`` of ``shape``. With ``is_transposed`` its last two dimensions are swapped first."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    part: tuple[Index, ...] = ()
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class BoxRule:
    """Names that match ``pattern`` (the whole name) are whatever boxes ``boxes`` says.

    ``boxes(match, shape)`` gets the match and the local shape and yields :class:`LocalPart`; several may
    be of one tensor. What it does not name is not sent. A rule for every case that no other one covers.
    """

    pattern: str
    boxes: Callable[[re.Match[str], tuple[int, ...]], Iterable[LocalPart]]

    def __post_init__(self) -> None:
        check_pattern(self.pattern)

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        local = Sharded.whole(tensor)
        found: dict[str, list[Sharded]] = {}
        for box in self.boxes(match, local.shape):
            piece = local[box.part] if box.part else local
            if box.is_transposed:
                piece = piece.transpose(-2, -1)
            if piece.ndim != len(box.shape) or len(box.start) != len(box.shape):
                raise LayoutError(f"{name!r}: a part of shape {piece.shape} is no box of {box}")
            found.setdefault(box.name, []).append(piece.within(box.shape, box.start))
        return [(new, join_pieces(parts, new)) for new, parts in found.items()]


@dataclass(frozen=True, slots=True)
class Renumber:
    """The number that ``pattern`` (searched; its first group) finds in a name becomes the whole model's.

    ``offset`` is added, or is a list: local number ``i`` becomes ``offset[i]``.

    ``Renumber(r"\\.layers\\.(\\d+)\\.", first_layer_of_this_stage)``
    """

    pattern: str
    offset: int | Sequence[int]

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if re.compile(self.pattern).groups < 1:
            raise ConfigError(f"pattern {self.pattern!r} has no group that is the number")

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        match = re.search(self.pattern, name)
        if match is None:
            return None
        number = int(match[1])
        if isinstance(self.offset, int):
            new = number + self.offset
        elif number < len(self.offset):
            new = self.offset[number]
        else:
            raise LayoutError(f"{name!r}: {len(self.offset)} numbers are listed, this is {number}")
        return [(f"{name[: match.start(1)]}{new}{name[match.end(1) :]}", tensor)]


class InTurn:
    """Stages of rules that each name goes through, one after another.

    Within a stage the first rule that matches decides; a stage without one leaves a name as it is.

    ``InTurn([Renumber(...)], [ShardRule(...), ShardRule(...)])``
    """

    def __init__(self, *stages: Sequence[Rule]) -> None:
        self.stages = tuple(tuple(stage) for stage in stages)
        self.reason = "a rule of a stage left nothing of it"

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        named, is_matched = [(name, tensor)], False
        for stage in self.stages:
            found: list[NamedTensor] = []
            for item in named:
                done = next((f for r in stage if (f := r.apply(*item)) is not None), None)
                is_matched |= done is not None
                found += [item] if done is None else done
            named = found
        return named if is_matched else None
