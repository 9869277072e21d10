"""Whether a layout says something that can be: every element somewhere, no element twice on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from weightsync.errors import LayoutError, MissingNameError
from weightsync.layout import Layout, PlacedBox, TensorLayout
from weightsync.types import Box


def check_layout(layout: Layout, side: str = "trainer") -> None:
    """Check a layout of all ranks, as :func:`weightsync.layout.join_layouts` makes it.

    Raises :class:`MissingNameError` naming tensor and box for elements that no rank holds, and
    :class:`LayoutError` for elements that one rank holds twice and for replicas of different dtypes: which
    of them is the tensor could not be told. Replicas on several ranks are welcome, overlapping in any way.
    """
    for tensor in layout.tensors:
        if 0 in tensor.shape:
            continue
        _check_cover(tensor, side)
        _check_ranks(tensor, side)
        _check_dtypes(tensor, side)


def _check_cover(tensor: TensorLayout, side: str) -> None:
    boxes = {p.box for p in tensor.placed}
    missing = missing_boxes(tensor.shape, tuple(sorted(boxes, key=lambda b: (b.start, b.stop))))
    if missing:
        count = sum(box.num_elements for box in missing)
        ranks = sorted({p.rank for p in tensor.placed})
        raise MissingNameError(
            f"{tensor.name!r} of shape {tensor.shape}: {count} elements, the first in box "
            f"{missing[0].start}:{missing[0].stop}, are on no rank of the {side} (it is on ranks "
            f"{_shortened(ranks)}); did every rank declare its part, with the right sizes?"
        )


@lru_cache(maxsize=4096)
def missing_boxes(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """What ``boxes`` leave of a tensor. Fast where they are sorted and cut few dimensions."""
    rest = [Box.whole(shape)]
    for box in boxes:
        rest = [piece for r in rest for piece in r.subtract(box)]
        if not rest:
            break
    return tuple(rest)


def _check_ranks(tensor: TensorLayout, side: str) -> None:
    by_rank: dict[int, list[Box]] = {}
    for p in tensor.placed:
        by_rank.setdefault(p.rank, []).append(p.box)
    for rank, boxes in by_rank.items():
        pair = _overlap(tuple(boxes)) if len(boxes) > 1 else None
        if pair is not None:
            raise LayoutError(
                f"{tensor.name!r}: rank {rank} of the {side} holds boxes {pair[0]} and {pair[1]}, which "
                "overlap; two of its tensors claim to be the same elements"
            )


@lru_cache(maxsize=4096)
def _overlap(boxes: tuple[Box, ...]) -> tuple[Box, Box] | None:
    listed = sorted((b for b in boxes if b.num_elements), key=lambda b: b.start)
    for i, box in enumerate(listed):
        for other in listed[i + 1 :]:
            if box.start and other.start[0] >= box.stop[0]:
                break  # sorted: nothing further begins within this one
            if box.intersect(other) is not None:
                return box, other
    return None


def _check_dtypes(tensor: TensorLayout, side: str) -> None:
    dtypes = {p.dtype for p in tensor.placed}
    if len(dtypes) < 2:
        return
    for first, second in _pairs(tensor.placed):
        if first.dtype != second.dtype and first.box.intersect(second.box) is not None:
            raise LayoutError(
                f"{tensor.name!r}: rank {first.rank} of the {side} keeps {first.box} as {first.dtype}, rank "
                f"{second.rank} keeps {second.box} as {second.dtype}: replicas must be of one dtype"
            )


def _pairs(placed: Sequence[PlacedBox]) -> Iterable[tuple[PlacedBox, PlacedBox]]:
    return ((a, b) for i, a in enumerate(placed) for b in placed[i + 1 :])


def _shortened(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:8]))}, ... ({len(ranks)} of them)"
    return ", ".join(map(str, ranks)) or "none"
