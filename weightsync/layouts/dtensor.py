"""DTensors as the boxes that this rank holds: no gathering, no collective."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from weightsync.errors import LayoutError
from weightsync.layouts.placements import MeshPlace, Split, local_boxes
from weightsync.layouts.sharded import Piece, Sharded, dtype_word


def dtensor_class() -> type | None:
    """``torch.distributed.tensor.DTensor`` if it has been imported; nobody has one before."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a ``DTensor``."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Any) -> Any:
    """The local tensor of a DTensor, the very object, outside of autograd."""
    return tensor._local_tensor  # to_local() makes a new tensor object where gradients are on


@dataclass
class Trainer:
    """This rank's place among the trainer's ranks; turns DTensors into :class:`Sharded`.

    ``rank`` is the rank in ``torch.distributed``'s default group, whose ranks meshes speak of.
    """

    rank: int = 0
    world_size: int = 1
    _places: dict[int, tuple[Any, tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LayoutError(f"rank {self.rank} of a trainer of {self.world_size} ranks")

    def localise(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Every DTensor as its :class:`Sharded`, all else as it is."""
        kind = dtensor_class()
        for name, tensor in named:
            is_distributed = kind is not None and isinstance(tensor, kind)
            yield name, self.sharded(name, tensor) if is_distributed else tensor

    def sharded(self, name: str, tensor: Any) -> Sharded:
        """The boxes of a DTensor that this rank holds.

        Raises :class:`LayoutError` naming ``name`` for pending sums (``Partial``), for a mesh that does
        not have this rank or has ranks that the trainer has not, and for a local tensor that is not
        what mesh and placements say.
        """
        spec = tensor._spec
        shape = tuple(map(int, tensor.shape))
        mesh_shape, coordinate = self._place(name, spec.mesh)
        splits = tuple(_split(name, p, len(shape)) for p in spec.placements)
        place = MeshPlace(mesh_shape, coordinate, splits, _order(spec))
        local = local_part(tensor)
        try:
            boxes = local_boxes(place, shape, tuple(local.shape))
        except LayoutError as error:
            raise LayoutError(f"{name!r}: {error}") from None
        pieces = tuple(Piece(b.box.start, _cut(local, b.local_start, b.box.shape)) for b in boxes)
        return Sharded(shape, dtype_word(local), pieces)

    def _place(self, name: str, mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of a mesh and this rank's coordinate in it."""
        known = self._places.get(id(mesh))
        if known is None:
            known = self._places[id(mesh)] = (mesh, *self._find(name, mesh))
        return known[1:]

    def _find(self, name: str, mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ranks = mesh.mesh
        shape = tuple(ranks.shape)
        highest = int(ranks.max())
        if highest >= self.world_size:
            raise LayoutError(
                f"{name!r}: its mesh {shape} has rank {highest}, the trainer was declared with "
                f"world_size={self.world_size}; give rank= and world_size= of the whole trainer"
            )
        found = (ranks == self.rank).nonzero().tolist()
        mine = mesh.get_coordinate()
        if len(found) != 1 or (mine is not None and list(mine) != found[0]):
            raise LayoutError(
                f"{name!r}: rank {self.rank} is at {found[0] if found else 'no place'} of its mesh "
                f"{shape}, this process at "
                f"{None if mine is None else list(mine)}; rank= must be the rank in torch.distributed's "
                "default group"
            )
        return shape, tuple(found[0])


def _split(name: str, placement: Any, ndim: int) -> Split | None:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    kind = type(placement).__name__
    if dim is None or kind not in ("Shard", "_StridedShard") or placement.is_partial():
        raise LayoutError(
            f"{name!r}: placement {placement} is not understood: known are Shard and Replicate. What is "
            "partial is no value yet: redistribute() it to one of these first"
        )
    return Split(dim % max(ndim, 1), int(getattr(placement, "split_factor", 1)))


def _order(spec: Any) -> tuple[int, ...] | None:
    """The order in which mesh dimensions cut, where it is not that of the mesh."""
    order = getattr(spec, "shard_order", None)
    if not order or any(type(p).__name__ == "_StridedShard" for p in spec.placements):
        return None
    return tuple(mesh_dim for entry in order for mesh_dim in entry.mesh_dims)


def _cut(local: Any, start: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    if tuple(local.shape) == shape:
        return local
    return local[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
