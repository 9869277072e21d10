"""Boxes that tile a tensor, each coded as a tensor of its own: what a rank needs that holds only some.

A record numbers changed elements among those of a whole block, so who has but a part of a block cannot
decode it. A piece has spans and blocks of its own, row-major within the piece, under a digest seeded with
where it lies; its *share* is the part that its elements have in the digest of the whole tensor, so shares
add up to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from weightsync.codec import Changes
from weightsync.codec.spans import Bytes, spans_of
from weightsync.digest import DigestPart, DigestTable
from weightsync.native_delta import SPAN_ELEMENTS
from weightsync.tables import dense_strides
from weightsync.types import Box, TensorMeta, item_bytes

MAX_PIECES: Final = 4096  # of one tensor


@dataclass(frozen=True)
class Piece:
    """A box of a tensor; the whole of it, too, is one."""

    tensor: TensorMeta
    box: Box

    @cached_property
    def meta(self) -> TensorMeta:
        """What it is coded as: the tensor itself, or one of its own that is named by place."""
        return piece_meta(self.tensor, self.box)

    @cached_property
    def is_whole(self) -> bool:
        return self.box == Box.whole(self.tensor.shape)


@lru_cache(maxsize=200_000)
def piece_meta(tensor: TensorMeta, box: Box) -> TensorMeta:
    """See :attr:`Piece.meta`."""
    if box == Box.whole(tensor.shape):
        return tensor
    place = ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
    return TensorMeta(f"{tensor.name}[{place}]", tensor.dtype, box.shape)


def check_tiling(tensor: TensorMeta, boxes: Sequence[Box]) -> None:
    """Raises :class:`ValueError` naming the tensor unless the boxes hold each element of it once."""
    if not 1 <= len(boxes) <= MAX_PIECES:
        raise ValueError(f"{tensor.name!r} has {len(boxes)} pieces, allowed are 1 to {MAX_PIECES}")
    for box in boxes:
        fits = len(box.start) == len(tensor.shape) and box.num_elements > 0
        if not fits or any(b > n for b, n in zip(box.stop, tensor.shape, strict=True)):
            raise ValueError(f"{tensor.name!r} of shape {tensor.shape} has no piece {_text(box)}")
    starts, stops = np.array([b.start for b in boxes]), np.array([b.stop for b in boxes])
    for i in range(len(boxes) - 1):
        above = np.maximum(starts[i + 1 :], starts[i]) < np.minimum(stops[i + 1 :], stops[i])
        again = np.flatnonzero(above.all(axis=1))
        if again.size:
            other = boxes[i + 1 + int(again[0])]
            raise ValueError(
                f"{tensor.name!r}: its pieces {_text(boxes[i])} and {_text(other)} overlap"
            )
    held = sum(box.num_elements for box in boxes)
    if held != tensor.num_elements:
        raise ValueError(
            f"{tensor.name!r}: its pieces hold {held} of {tensor.num_elements} elements"
        )


def _text(box: Box) -> str:
    return f"{list(box.start)}:{list(box.stop)}"


# --- bytes --------------------------------------------------------------------------------------------


def first_byte(tensor: TensorMeta, box: Box) -> int | None:
    """Where a box begins in the dense tensor if it is one run of bytes there, else None."""
    partial = [d for d, n in enumerate(tensor.shape) if box.shape[d] != n]
    if partial and any(extent != 1 for extent in box.shape[: partial[-1]]):
        return None
    strides = dense_strides(tensor.shape, item_bytes(tensor.dtype))
    return sum(a * s for a, s in zip(box.start, strides, strict=True))


def take(tensor: TensorMeta, box: Box, data: Bytes) -> Bytes:
    """The bytes of a box, row-major, from a tensor's, uint8 [tensor.num_bytes]; no copy of what is one
    run of bytes there."""
    start = first_byte(tensor, box)
    if start is not None:
        return data[start : start + box.num_elements * item_bytes(tensor.dtype)]
    return np.ascontiguousarray(_window(tensor, box, data)).reshape(-1)


def put(tensor: TensorMeta, box: Box, data: Bytes, piece: Bytes) -> None:
    """The inverse: into a tensor's bytes."""
    window = _window(tensor, box, data)
    window[:] = piece.reshape(window.shape)


def _window(tensor: TensorMeta, box: Box, data: Bytes) -> Bytes:
    whole = data.reshape(*tensor.shape, item_bytes(tensor.dtype))
    found: Bytes = whole[tuple(map(slice, box.start, box.stop))]
    return found


def share_of(tensor: TensorMeta, box: Box, piece: Bytes) -> int:
    """The part of the tensor's digest that a box with these bytes makes up."""
    strides = dense_strides(box.shape, item_bytes(tensor.dtype))
    part = DigestPart(tensor, box, piece.ctypes.data, strides, tensor.dtype)
    return DigestTable([part]).compute(1)[tensor.name]


# --- changes ------------------------------------------------------------------------------------------


def in_whole(piece: Piece, changes: Changes) -> Iterator[Changes]:
    """Changes of a span of a piece as changes of spans of the whole tensor, in order."""
    if piece.is_whole:
        yield changes
        return
    if not changes.count:
        return
    width, item = changes.place.kind.element_bytes, item_bytes(piece.tensor.dtype)
    at = (changes.positions.astype(np.int64) + changes.place.start_element) * width
    index = np.unravel_index(at // item, piece.box.shape)
    moved = [axis + a for axis, a in zip(index, piece.box.start, strict=True)]
    there: npt.NDArray[np.int64] = np.ravel_multi_index(moved, piece.tensor.shape).astype(np.int64)
    elements = (there * item + at % item) // width
    values = changes.values.reshape(-1, width)
    places = {place.start_element: place for place in spans_of(piece.tensor)}
    for number in np.unique(elements // SPAN_ELEMENTS).tolist():
        first = number * SPAN_ELEMENTS
        low, high = np.searchsorted(elements, (first, first + SPAN_ELEMENTS))
        positions = (elements[low:high] - first).astype(np.uint32)
        yield Changes(places[first], positions, values[low:high].reshape(-1))


__all__ = [
    "MAX_PIECES",
    "Piece",
    "check_tiling",
    "first_byte",
    "in_whole",
    "piece_meta",
    "put",
    "share_of",
    "take",
]
