"""Which box of the source meets which box of the target.

Thousands of tensors are cut alike, so each *pattern* (the boxes of both sides, without ranks) is
worked out once and laid over all tensors that share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from weightsync.planning.columns import LayoutColumns
from weightsync.types import Box

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Drafted:
    """Transfers whose source is not chosen yet. Row i brings one box to one target placement.

    ``choice[i]`` names a list of source placements (within their tensor) that hold the box:
    ``candidates[choice_first[c]:choice_first[c + 1]]``.
    """

    tensor: Int64  # [n] index of the pair
    target_placed: Int64  # [n]
    target_rank: Int64  # [n]
    start: Int64  # [n, dims]
    stop: Int64  # [n, dims]
    choice: Int64  # [n]
    choice_first: Int64  # [choices + 1]
    candidates: Int64

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, eq=False)
class _Pattern:
    placed: Int64  # [pieces] target placement of each piece, ascending
    start: Int64  # [pieces, dims]
    stop: Int64
    choice: Int64  # [pieces] index into ``choices``
    choices: list[list[int]]


Missing = Callable[[int, int, Box], Exception]


def draft(source: LayoutColumns, target: LayoutColumns, pairs: Int64, missing: Missing) -> Drafted:
    """Cover every target box of ``pairs`` (int64 [n, 2]: source tensor, target tensor) by boxes of
    the source, each element once.

    A part that no source holds raises ``missing(pair, target placement, part)``.
    """
    dims = max(source.num_dims, target.num_dims)
    source, target = source.widened(dims), target.widened(dims)
    patterns: list[_Pattern] = []
    groups: list[list[int]] = []
    seen: dict[tuple[bytes, bytes], int] = {}
    spans = np.concatenate(
        [source.first[pairs[:, 0], None], source.first[pairs[:, 0] + 1, None],
         target.first[pairs[:, 1], None], target.first[pairs[:, 1] + 1, None]], axis=1
    ).tolist()  # fmt: skip
    for i, (a, b, c, d) in enumerate(spans):
        held, wanted = source.boxes[a:b], target.boxes[c:d]
        key = (held.tobytes(), wanted.tobytes())
        known = seen.get(key)
        if known is None:
            known = seen[key] = len(patterns)
            patterns.append(_pattern(held, wanted, partial(missing, i)))
            groups.append([])
        groups[known].append(i)
    return _lay_out(patterns, groups, target, pairs[:, 1], dims)


def _lay_out(
    patterns: list[_Pattern], groups: list[list[int]], target: LayoutColumns, tensors: Int64,
    dims: int,
) -> Drafted:  # fmt: skip
    """The pieces of each pattern for each of its tensors, in the order of tensors."""
    columns: list[tuple[Int64, ...]] = []
    choices: list[list[int]] = []
    for pattern, group in zip(patterns, groups, strict=True):
        members, times = np.array(group, dtype=np.int64), len(group)
        tensor = np.repeat(members, len(pattern.placed))
        placed = np.tile(pattern.placed, times)
        rank = target.rank[target.first[tensors[tensor]] + placed]
        columns.append(
            (tensor, placed, rank, np.tile(pattern.start, (times, 1)),
             np.tile(pattern.stop, (times, 1)), np.tile(pattern.choice + len(choices), times))
        )  # fmt: skip
        choices += pattern.choices
    if not columns:
        none, boxes = np.zeros(0, dtype=np.int64), np.zeros((0, dims), dtype=np.int64)
        columns = [(none, none, none, boxes, boxes, none)]
    joined = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    first = np.zeros(len(choices) + 1, dtype=np.int64)
    np.cumsum([len(c) for c in choices], out=first[1:])
    flat = np.array([j for c in choices for j in c], dtype=np.int64)
    tensor, placed, rank, start, stop, choice = (column[order] for column in joined)
    return Drafted(tensor, placed, rank, start, stop, choice, first, flat)


def _pattern(held: Int64, wanted: Int64, missing: Callable[[int, Box], Exception]) -> _Pattern:
    """The cover of one tensor: ``held`` [s, 2 * dims] by its source, ``wanted`` by its target."""
    dims = held.shape[1] // 2
    boxes, holders = _holders(held)
    goals, goal_of = _distinct(wanted)
    pieces = _Pieces(dims)
    cover = pieces.regular if _are_disjoint(boxes) else pieces.greedy
    made: list[list[int]] = []
    for goal, volume in zip(goals, _volumes(goals).tolist(), strict=True):
        if not volume:  # travels as a name without bytes, so that coverage sees it
            made.append([pieces.add(goal.tolist(), 0, [0])] if len(held) else [])
            continue
        made.append(cover(goal, boxes, holders, len(made)))
        if sum(pieces.volume[k] for k in made[-1]) != volume:
            raise missing(goal_of.index(len(made) - 1), _first_missing(goal, boxes))
    rows = [(j, k) for j, goal in enumerate(goal_of) for k in made[goal]]
    index = np.array([k for _, k in rows], dtype=np.int64)
    box = np.array(pieces.boxes, dtype=np.int64).reshape(-1, 2 * dims)[index]
    placed = np.array([j for j, _ in rows], dtype=np.int64)
    choice = np.array(pieces.choice, dtype=np.int64)[index]
    return _Pattern(placed, box[:, :dims], box[:, dims:], choice, pieces.choices)


class _Pieces:
    """Boxes that travel whole, and which source placements hold each of them."""

    def __init__(self, dims: int) -> None:
        self._dims = dims
        self.boxes: list[list[int]] = []
        self.volume: list[int] = []
        self.choice: list[int] = []
        self.choices: list[list[int]] = []
        self._numbers: dict[tuple[int, ...], int] = {}

    def add(self, box: list[int], volume: int, holders: list[int]) -> int:
        """One more piece; returns its number."""
        number = self._numbers.setdefault(tuple(holders), len(self.choices))
        if number == len(self.choices):
            self.choices.append(holders)
        self.boxes.append(box)
        self.volume.append(volume)
        self.choice.append(number)
        return len(self.boxes) - 1

    def regular(self, goal: Int64, boxes: Int64, holders: list[list[int]], shift: int) -> list[int]:
        """The source's boxes share nothing: each gives what it has in common with the goal."""
        del shift
        d = self._dims
        start = np.maximum(boxes[:, :d], goal[:d])
        common = np.concatenate([start, np.minimum(boxes[:, d:], goal[d:])], axis=1)
        volumes = _volumes(common)
        hits = np.flatnonzero(volumes).tolist()
        return [self.add(common[k].tolist(), int(volumes[k]), holders[k]) for k in hits]

    def greedy(self, goal: Int64, boxes: Int64, holders: list[list[int]], shift: int) -> list[int]:
        """Replicas are cut differently: take what each box has, beginning at another one for each
        goal."""
        held = [_box(b) for b in boxes]
        rest, found = [_box(goal)], []
        for k in (*range(shift % len(held), len(held)), *range(shift % len(held))):
            left: list[Box] = []
            for box in rest:
                common = held[k].intersect(box)
                if common is None:
                    left.append(box)
                    continue
                whole = [i for i, other in enumerate(held) if other.intersect(common) == common]
                who = sorted(j for i in whole for j in holders[i])
                found.append(self.add([*common.start, *common.stop], common.num_elements, who))
                left += box.subtract(common)
            rest = left
        return found


def _distinct(boxes: Int64) -> tuple[Int64, list[int]]:
    """Boxes without repetition, in order of first appearance, and which of them each one is."""
    numbers: dict[bytes, int] = {}
    which = [numbers.setdefault(box.tobytes(), len(numbers)) for box in boxes]
    firsts = [which.index(n) for n in range(len(numbers))]
    return boxes[firsts], which


def _holders(held: Int64) -> tuple[Int64, list[list[int]]]:
    """Distinct boxes that hold anything, and the placements that hold each."""
    full = np.flatnonzero(_volumes(held))
    boxes, which = _distinct(held[full])
    holders: list[list[int]] = [[] for _ in boxes]
    for j, n in zip(full.tolist(), which, strict=True):
        holders[n].append(j)
    return boxes, holders


def _volumes(boxes: Int64) -> Int64:
    """[n] elements of boxes [n, 2 * dims]; none where a stop lies before its start."""
    d = boxes.shape[1] // 2
    found: Int64 = np.prod(np.maximum(boxes[:, d:] - boxes[:, :d], 0), axis=1)
    return found


def _are_disjoint(boxes: Int64) -> bool:
    d = boxes.shape[1] // 2
    for i in range(len(boxes) - 1):
        rest = boxes[i + 1 :]
        if (
            (np.minimum(rest[:, d:], boxes[i, d:]) > np.maximum(rest[:, :d], boxes[i, :d]))
            .all(1)
            .any()
        ):
            return False
    return True


def _box(row: Int64) -> Box:
    d = len(row) // 2
    return Box(tuple(row[:d].tolist()), tuple(row[d:].tolist()))


def _first_missing(goal: Int64, boxes: Int64) -> Box:
    rest = [_box(goal)]
    for row in boxes:
        rest = [piece for box in rest for piece in box.subtract(_box(row))]
    return rest[0]
