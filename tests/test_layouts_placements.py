"""Placements of distributed tensors against torch's own cutting of an index tensor."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import LayoutError
from weightsync.layouts.placements import MeshPlace, Split, local_boxes

torch = pytest.importorskip("torch")


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Split | None, ...], tuple[int, ...]]:
    """Mesh, placements and shape; uneven, larger and smaller than the mesh."""
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    splits = st.builds(Split, st.integers(0, len(shape) - 1), st.sampled_from([1, 1, 2, 3]))
    placements = tuple(draw(st.one_of(st.none(), splits)) for _ in mesh)
    return mesh, placements, shape


def torch_placement(split: Split | None) -> Any:
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if split is None:
        return Replicate()
    return (
        Shard(split.dim)
        if split.factor == 1
        else _StridedShard(split.dim, split_factor=split.factor)
    )


def distributed(whole: Any, mesh: Any, placements: Any, coordinate: Any) -> Any:
    """What torch gives a rank of ``whole``."""
    local = whole
    for size, split, index in zip(mesh, placements, coordinate, strict=True):
        if split is not None:
            cut, _ = torch_placement(split)._split_tensor(
                local, size, with_padding=False, contiguous=True
            )
            local = cut[index]
    return local


def check(whole: Any, local: Any, boxes: Any) -> None:
    """The boxes tile the local tensor, and each shows its elements of the whole."""
    seen = torch.zeros(local.shape, dtype=torch.int32)
    for b in boxes:
        assert b.box.num_elements
        part = tuple(slice(a, a + n) for a, n in zip(b.local_start, b.box.shape, strict=True))
        there = tuple(map(slice, b.box.start, b.box.stop))
        assert torch.equal(local[part], whole[there])
        seen[part] += 1
    assert bool((seen == 1).all())


@settings(max_examples=150, deadline=None)
@given(case=meshes())
def test_boxes_are_what_torch_gives_every_rank(case: Any) -> None:
    mesh, placements, shape = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    copies = torch.zeros(shape, dtype=torch.int32)
    for coordinate in itertools.product(*map(range, mesh)):
        local = distributed(whole, mesh, placements, coordinate)
        boxes = local_boxes(MeshPlace(mesh, coordinate, placements), shape)
        check(whole, local, boxes)
        for b in boxes:
            copies[tuple(map(slice, b.box.start, b.box.stop))] += 1
    replicas = math.prod(n for n, s in zip(mesh, placements, strict=True) if s is None)
    assert bool((copies == replicas).all())


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    extent=st.integers(0, 40),
    is_row=st.booleans(),
)
def test_what_tensor_parallel_has_cut_and_fsdp_cuts_again(
    sizes: list[int], extent: int, is_row: bool
) -> None:
    """Mesh dimensions cut from the last to the first: the local shape tells."""
    shape = (extent, 3) if is_row else (2, extent)
    dim = 0 if is_row else 1
    whole = torch.arange(math.prod(shape)).reshape(shape)
    factors = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    placements = tuple(Split(dim, f) for f in factors)
    for coordinate in itertools.product(*map(range, sizes)):
        local = whole
        for size, index in zip(reversed(sizes), reversed(coordinate), strict=True):
            chunks = torch.chunk(local, size, dim)
            local = chunks[index] if index < len(chunks) else local.narrow(dim, 0, 0)
        place = MeshPlace(tuple(sizes), coordinate, placements)
        try:
            boxes = local_boxes(place, shape, tuple(local.shape))
        except LayoutError as error:
            # Both readings have this shape: refused, not guessed.
            if "cannot be told" not in str(error):
                raise
            continue
        check(whole, local, boxes)


def test_few_shapes_cannot_be_told() -> None:
    untold = 0
    for dp, tp, extent in itertools.product((1, 2, 4), (1, 2, 4), range(33)):
        for coordinate in itertools.product(range(dp), range(tp)):
            whole = torch.arange(extent)
            chunks = torch.chunk(whole, tp)
            local = chunks[coordinate[1]] if coordinate[1] < len(chunks) else whole[:0]
            chunks = torch.chunk(local, dp)
            local = chunks[coordinate[0]] if coordinate[0] < len(chunks) else whole[:0]
            place = MeshPlace((dp, tp), coordinate, (Split(0, tp), Split(0)))
            try:
                check(whole, local, local_boxes(place, (extent,), tuple(local.shape)))
            except LayoutError:
                untold += 1
    assert untold == 0


def test_a_pair_of_readings_of_one_shape_is_refused() -> None:
    place = MeshPlace((3, 4), (2, 2), (Split(0, 4), Split(0)))
    with pytest.raises(LayoutError, match="cannot be told"):
        local_boxes(place, (27,), (1,))


def test_another_order_of_cutting() -> None:
    place = MeshPlace((2, 2), (0, 1), (Split(0), Split(0)), order=(1, 0))
    assert [b.box.start for b in local_boxes(place, (8,))] == [(4,)]
    assert [
        b.box.start for b in local_boxes(MeshPlace((2, 2), (0, 1), (Split(0), Split(0))), (8,))
    ] == [(2,)]


@pytest.mark.parametrize(
    ("place", "shape", "local", "message"),
    [
        (MeshPlace((2,), (0,), (Split(0),)), (8,), (3,), "expected"),
        (MeshPlace((2,), (0,), (Split(1),)), (8,), None, "placements"),
    ],
)
def test_what_does_not_fit_is_refused(place: Any, shape: Any, local: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        local_boxes(place, shape, local)


@pytest.mark.parametrize(
    ("mesh", "coordinate", "splits"), [((2,), (2,), (None,)), ((2, 2), (0, 0), (None,))]
)
def test_a_place_outside_of_its_mesh_is_refused(mesh: Any, coordinate: Any, splits: Any) -> None:
    with pytest.raises(LayoutError, match="coordinate"):
        MeshPlace(mesh, coordinate, splits)
