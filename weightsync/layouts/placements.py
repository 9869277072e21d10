"""Where the elements of a distributed tensor lie: pure arithmetic on mesh, placements and shape.

A dimension that shards several mesh dimensions is cut once for each. Two readings exist of what torch
calls ``_StridedShard(dim, split_factor)`` on an earlier mesh dimension:

- *strided*: cut into ``split_factor`` chunks, each of them into one chunk a rank, and take that rank's chunk
  of each. It is how torch distributes and gathers such a tensor.
- *nested*: the later mesh dimensions (``split_factor`` ranks of them) cut first, this one cuts what they
  left. It is what FSDP2 does to a tensor that tensor parallel has cut already.

They are the same where every cut is even. All chunks are ``torch.chunk``'s: of equal size, rounded up, the
last ones shorter or empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.errors import LayoutError
from weightsync.types import Box

Run = tuple[int, int]  # half-open, in indices of the whole tensor


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh dimension that cuts ``dim``; ``factor`` is torch's split factor (1: a plain ``Shard``)."""

    dim: int
    factor: int = 1


#: One entry a mesh dimension; None: replicated.
Placements = Sequence[Split | None]


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the whole tensor and where its first element lies in the local one."""

    box: Box
    local_start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """One rank's place in a mesh and what each mesh dimension does to a tensor.

    ``order`` gives the mesh dimensions in the order in which they cut; None: from the first on.
    """

    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    placements: tuple[Split | None, ...]
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes = self.mesh_shape
        if not len(sizes) == len(self.coordinate) == len(self.placements) or any(
            not 0 <= c < n for c, n in zip(self.coordinate, sizes, strict=True)
        ):
            raise LayoutError(
                f"coordinate {self.coordinate} and {len(self.placements)} placements on a mesh of "
                f"{sizes}"
            )


def local_boxes(
    place: MeshPlace, shape: Sequence[int], local_shape: Sequence[int] | None = None
) -> list[LocalBox]:
    """What a rank holds of a tensor of ``shape``, in the order of local memory; no empty boxes.

    ``local_shape`` decides between the readings where they differ; None: strided. Raises
    :class:`LayoutError` if it fits none of them, or fits both.
    """
    dims = range(len(shape))
    if any(s is not None and not 0 <= s.dim < len(shape) for s in place.placements):
        raise LayoutError(f"placements {place.placements} of a tensor of shape {tuple(shape)}")
    strided = [_strided_runs(place, d, shape[d]) for d in dims]
    if local_shape is None:
        return _boxes(strided)
    readings = [strided]
    nested = [_nested_runs(place, d, shape[d]) for d in dims]
    if None not in nested and nested != strided:
        readings.append([runs for runs in nested if runs is not None])
    fits = [r for r in readings if _extents(r) == tuple(local_shape)]
    if len(fits) != 1:
        expected = " or ".join(str(_extents(r)) for r in readings)
        raise LayoutError(
            f"a local tensor of {tuple(local_shape)} of {tuple(shape)} on a mesh of "
            f"{place.mesh_shape} at {place.coordinate} with {place.placements}: expected {expected}"
            + ("; which rows these are cannot be told" if len(fits) > 1 else "")
        )
    return _boxes(fits[0])


def _chunk(extent: int, index: int, count: int) -> Run:
    size = -(-extent // count)
    return min(index * size, extent), min((index + 1) * size, extent)


def _splits(place: MeshPlace, dim: int) -> list[tuple[int, int, int]]:
    """(coordinate, size, factor) of the mesh dimensions that cut ``dim``, in order."""
    order = range(len(place.mesh_shape)) if place.order is None else place.order
    found = []
    for i in order:
        split = place.placements[i]
        if split is not None and split.dim == dim:
            found.append((place.coordinate[i], place.mesh_shape[i], split.factor))
    return found


def _strided_runs(place: MeshPlace, dim: int, extent: int) -> list[Run]:
    runs: list[Run] = [(0, extent)]
    for coordinate, size, factor in _splits(place, dim):
        total = sum(b - a for a, b in runs)
        taken: list[Run] = []
        for f in range(factor):
            low, high = _chunk(total, f, factor)
            a, b = _chunk(high - low, coordinate, size)
            taken += _slice(runs, low + a, low + b)
        runs = _joined(taken)
    return [run for run in runs if run[1] > run[0]]


def _nested_runs(place: MeshPlace, dim: int, extent: int) -> list[Run] | None:
    """None if the factors are no products of later mesh dimensions."""
    order: list[tuple[int, int]] = []
    for coordinate, size, factor in reversed(_splits(place, dim)):
        products = [1, *itertools.accumulate((n for _, n in order), lambda x, y: x * y)]
        if factor not in products:
            return None
        order.insert(products.index(factor), (coordinate, size))
    start, stop = 0, extent
    for coordinate, size in order:
        a, b = _chunk(stop - start, coordinate, size)
        start, stop = start + a, start + b
    return [(start, stop)] if stop > start else []


def _slice(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """Elements ``start`` up to ``stop`` of what the runs list one after another."""
    found, at = [], 0
    for a, b in runs:
        low, high = max(start, at), min(stop, at + b - a)
        if low < high:
            found.append((a + low - at, a + high - at))
        at += b - a
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    found: list[Run] = []
    for a, b in runs:
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        else:
            found.append((a, b))
    return found


def _extents(runs: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    return tuple(sum(b - a for a, b in of_dim) for of_dim in runs)


def _boxes(runs: Sequence[Sequence[Run]]) -> list[LocalBox]:
    starts = []
    for of_dim in runs:
        sizes = [b - a for a, b in of_dim]
        starts.append([sum(sizes[:i]) for i in range(len(sizes))])
    found = []
    for picks in itertools.product(*(range(len(of_dim)) for of_dim in runs)):
        chosen = [runs[d][i] for d, i in enumerate(picks)]
        box = Box(tuple(a for a, _ in chosen), tuple(b for _, b in chosen))
        found.append(LocalBox(box, tuple(starts[d][i] for d, i in enumerate(picks))))
    return found
