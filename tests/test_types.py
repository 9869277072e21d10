"""Boxes, sizes and dtypes: tables and properties."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ConfigError, LayoutError, WeightSyncError
from weightsync.types import (
    BUCKET_ALIGNMENT_BYTES,
    ITEM_BYTES,
    Availability,
    Box,
    Capabilities,
    Contract,
    CostConstants,
    TensorMeta,
    format_bytes,
    item_bytes,
    parse_bytes,
    range_boxes,
)

SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    pairs = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(SHAPES)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.start, box.stop)))


@given(two_boxes())
def test_intersection_is_the_common_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    _, a, b = case
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert a.intersect(b) == b.intersect(a)
    if common is not None:
        assert common.num_elements > 0


@given(two_boxes())
def test_subtract_and_intersect_partition_a_box(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    rest = a.subtract(b)
    assert len(rest) <= max(1, 2 * len(shape))
    parts = [elements(r) for r in rest]
    assert all(parts), "no empty boxes"
    covered = [e for part in parts for e in part]
    assert len(covered) == len(set(covered)), "disjoint"
    assert set(covered) == elements(a) - elements(b)


@given(SHAPES.filter(lambda s: 0 not in s), st.data())
def test_range_boxes_cover_a_range_once_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    found = list(range_boxes(shape, start, stop))
    order = (
        [np.ravel_multi_index(e, shape) for b in found for e in sorted(elements(b))]
        if shape
        else ([0] * len(found))
    )
    assert order == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (3, 2)])
def test_an_empty_range_has_no_boxes(shape: tuple[int, ...]) -> None:
    assert list(range_boxes(shape, 0, 0)) == []


def test_a_box_that_cannot_be_is_refused() -> None:
    for start, stop in (((0,), (1, 2)), ((-1,), (1,)), ((2,), (1,))):
        with pytest.raises(LayoutError, match="box"):
            Box(start, stop)


def test_boxes_of_different_dimensions_are_not_compared() -> None:
    with pytest.raises(LayoutError, match="dimensions"):
        Box((0, 0), (4, 4)).intersect(Box((0,), (2,)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        (2**60 + 1, 2**60 + 1),
        ("1", 1),
        ("17 B", 17),
        ("1GB", 10**9),
        ("1 gb", 10**9),
        ("1GiB", 2**30),
        ("512MiB", 512 * 2**20),
        ("0.5GB", 500_000_000),
        ("1_000 kB", 1_000_000),
        ("1e3", 1000),
        ("  64KiB ", 65_536),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-1",
        "0",
        0,
        -5,
        "1TB",
        "1 0",
        "nan",
        "inf",
        "1e999",
        "0.1",
        "1GB1",
        None,
        1.5,
        True,
    ],
)
def test_sizes_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (2 * 10**9, "2.00 GB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_every_torch_dtype_is_known_by_its_size_or_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    dtypes = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    assert len(dtypes) > 20
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        if name in ITEM_BYTES:
            assert item_bytes(name) == dtype.itemsize, name
        else:
            with pytest.raises(LayoutError, match=name):
                item_bytes(name)
            assert name.startswith(("q", "bits", "int", "uint")), f"{name} should be known"


def test_every_element_size_divides_the_alignment() -> None:
    assert all(BUCKET_ALIGNMENT_BYTES % n == 0 for n in ITEM_BYTES.values())


def test_a_tensor_meta_checks_itself() -> None:
    assert TensorMeta("a", "bfloat16", (3, 4)).num_bytes == 24
    assert TensorMeta("a", "int64", ()).num_bytes == 8
    with pytest.raises(LayoutError, match="float7"):
        TensorMeta("a", "float7", (1,))
    with pytest.raises(LayoutError, match="'a': negative"):
        TensorMeta("a", "int8", (-1,))


def test_costs_and_capabilities() -> None:
    assert CostConstants(0.5, 100.0).seconds(4, 200) == pytest.approx(4.0)
    no = Availability(False, "why", "do")
    have = Capabilities("x", {Contract.STREAM: no, Contract.DIRECT: Availability(True)}, {})
    assert have.is_usable
    assert not Capabilities("x", {Contract.STREAM: no}, {}).is_usable


def test_records_have_no_dict_and_do_not_change() -> None:
    box = Box.whole((2, 3))
    with pytest.raises(AttributeError):
        box.start = (1, 1)  # type: ignore[misc]
    assert not hasattr(box, "__dict__")
    assert issubclass(LayoutError, WeightSyncError)
