"""One rank's part of a tensor: boxes of the whole, each with the local tensor that holds it.

A :class:`Sharded` can be indexed and transposed like the whole tensor that it is a part of, so that
name rules need not know about ranks: what they slice are its boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.errors import LayoutError
from weightsync.types import Box

Index = int | slice


@dataclass(frozen=True, slots=True)
class Piece:
    """A local tensor (of any kind that can be indexed); its first element lies at ``start`` of the
    whole tensor, its dimensions are the whole's."""

    start: tuple[int, ...]
    tensor: Any

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        shape = tuple(map(int, self.tensor.shape))
        return Box(self.start, tuple(a + n for a, n in zip(self.start, shape, strict=True)))


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank's boxes of a tensor of ``shape``; none where it holds nothing of it."""

    shape: tuple[int, ...]
    dtype: str  # torch's word
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if len(piece.start) != len(self.shape) or any(
                b > n for b, n in zip(piece.box.stop, self.shape, strict=True)
            ):
                raise LayoutError(f"box {piece.box} lies outside of a tensor of {self.shape}")

    @classmethod
    def whole(cls, tensor: Any) -> Sharded:
        """A tensor that this rank holds all of."""
        if isinstance(tensor, Sharded):
            return tensor
        shape = tuple(tensor.shape)
        return cls(shape, dtype_word(tensor), (Piece((0,) * len(shape), tensor),))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, key: Index | tuple[Index, ...]) -> Sharded:
        """Whole numbers and slices of step 1, as many as there are dimensions or fewer."""
        keys = key if isinstance(key, tuple) else (key,)
        cuts = [_cut(k, n) for k, n in zip(keys, self.shape, strict=False)]
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indices for a tensor of {self.ndim} dimensions")
        shape = (*(b - a for a, b, is_kept in cuts if is_kept), *self.shape[len(cuts) :])
        pieces = [found for p in self.pieces if (found := _cut_piece(p, cuts)) is not None]
        return Sharded(shape, self.dtype, tuple(pieces))

    def transpose(self, first: int, second: int) -> Sharded:
        """With two dimensions swapped."""

        def swap(values: tuple[int, ...]) -> tuple[int, ...]:
            found = list(values)
            found[first], found[second] = found[second], found[first]
            return tuple(found)

        pieces = (Piece(swap(p.start), _swapped(p.tensor, first, second)) for p in self.pieces)
        return Sharded(swap(self.shape), self.dtype, tuple(pieces))

    @property
    def T(self) -> Sharded:
        """Of a matrix."""
        if self.ndim != 2:
            raise LayoutError(f"only a matrix has .T, this is of shape {self.shape}")
        return self.transpose(0, 1)

    def within(self, shape: Sequence[int], start: Sequence[int]) -> Sharded:
        """The same pieces as a part, from ``start`` on, of a larger tensor of ``shape``."""
        moved = (
            Piece(tuple(a + b for a, b in zip(p.start, start, strict=True)), p.tensor)
            for p in self.pieces
        )
        return Sharded(tuple(shape), self.dtype, tuple(moved))


def join_pieces(parts: Iterable[Sharded], name: str) -> Sharded:
    """One tensor that several local tensors are parts of.

    Raises :class:`LayoutError` naming ``name`` if they disagree about its shape or dtype or overlap.
    """
    first, *others = parts
    pieces = list(first.pieces)
    for part in others:
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise LayoutError(
                f"{name!r}: its parts disagree: {first.dtype} {first.shape} and {part.dtype} "
                f"{part.shape}"
            )
        for piece in part.pieces:
            for known in pieces:
                if known.box.intersect(piece.box) is not None:
                    raise LayoutError(
                        f"{name!r}: two local tensors hold {known.box} and {piece.box} of it, which "
                        "overlap; a name rule maps two tensors to one"
                    )
        pieces += part.pieces
    return Sharded(first.shape, first.dtype, tuple(pieces))


def dtype_word(tensor: Any) -> str:
    """Torch's word for the dtype of a torch tensor, NumPy array or :class:`Sharded`."""
    return str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")


def _cut(key: Index, extent: int) -> tuple[int, int, bool]:
    """Start, stop, and whether the dimension stays."""
    if isinstance(key, slice):
        start, stop, step = key.indices(extent)
        if step != 1:
            raise LayoutError(f"a part of a tensor can be cut in steps of 1, not {step}")
        return start, max(start, stop), True
    if not -extent <= key < extent:
        raise IndexError(f"index {key} of a dimension of {extent}")
    return key % extent, key % extent + 1, False


def _cut_piece(piece: Piece, cuts: Sequence[tuple[int, int, bool]]) -> Piece | None:
    local: list[Index] = []
    start: list[int] = []
    shape = tuple(piece.tensor.shape)
    for (a, b, is_kept), first, extent in zip(cuts, piece.start, shape, strict=False):
        low, high = max(a, first), min(b, first + extent)
        if low >= high:
            return None
        local.append(slice(low - first, high - first) if is_kept else low - first)
        if is_kept:
            start.append(low - a)
    return Piece((*start, *piece.start[len(cuts) :]), piece.tensor[tuple(local)])


def _swapped(tensor: Any, first: int, second: int) -> Any:
    swap = getattr(tensor, "swapaxes", None)  # torch and NumPy alike
    if swap is None:
        raise LayoutError(f"{type(tensor).__name__} cannot be transposed")
    return swap(first, second)
