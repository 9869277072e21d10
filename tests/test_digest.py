"""Digests: parts add up, order and names count, and the root covers everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import partitions

from weightsync.digest import (
    DigestPart,
    DigestTable,
    convert_of,
    digest_root,
    digest_seed,
    digest_tensors,
    root_basis,
)
from weightsync.errors import LayoutError
from weightsync.tensors import view_of
from weightsync.types import Box, Convert, TensorMeta

DTYPES = ["int8", "bool", "uint16", "float32", "float64", "complex128"]


@given(st.data())
def test_parts_of_any_strides_add_up(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    meta = TensorMeta("w", dtype, shape)
    parts, kept = [], []
    for held in data.draw(partitions(Box.whole(shape), 1)):
        order = held.order
        box = tuple(map(slice, held.box.start, held.box.stop))
        copy = np.array(whole[box]).transpose(order).copy()
        array = copy.transpose(tuple(map(order.index, range(len(order)))))
        kept.append(array)
        parts.append(DigestPart(meta, held.box, array.ctypes.data, array.strides, dtype))
    assert DigestTable(parts).compute(2) == digest_tensors([("w", whole)])


def digest(tensor: Any, name: str = "w") -> int:
    return digest_tensors([(name, tensor)])[name]


def test_name_dtype_and_shape_are_part_of_a_digest() -> None:
    zeros = np.zeros((4, 6), np.float32)
    ones = np.ones((4, 6), np.float32)
    assert digest(ones) != digest(ones, "v")
    assert digest(ones) != digest(ones.reshape(6, 4))
    assert digest(ones) != digest(ones.view(np.int32))
    assert digest(zeros) == 0, "an empty sum: names of zeros are told apart by the root alone"
    seeds = {
        digest_seed(m)
        for m in (
            TensorMeta("a", "int8", (1, 12)),
            TensorMeta("a", "int8", (11, 2)),
            TensorMeta("a1", "int8", (12,)),
        )
    }
    assert len(seeds) == 3


def test_swapped_tensors_rows_and_signs_are_seen() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 8, 8))
    both, swapped = digest_tensors([("a", a), ("b", b)]), digest_tensors([("a", b), ("b", a)])
    assert all(both[n] != swapped[n] for n in both)
    assert digest(a) != digest(a[::-1])
    assert digest(a) != digest(a[:, [1, 0, 2, 3, 4, 5, 6, 7]])
    flipped = a.copy()
    flipped[0, 0], flipped[3, 5] = -flipped[0, 0], -flipped[3, 5]
    assert digest(a) != digest(flipped)


@given(st.integers(0, 255), st.integers(0, 7), st.sampled_from(DTYPES[2:]))
def test_every_single_bit_counts(place: int, bit: int, dtype: str) -> None:
    array = np.random.default_rng(1).integers(0, 256, 256, dtype=np.uint8)
    before = digest(array.view(dtype))
    array[place] ^= 1 << bit
    assert digest(array.view(dtype)) != before


def test_strides_do_not_count_only_values_do() -> None:
    a = np.random.default_rng(0).standard_normal((5, 7))
    assert digest(a) == digest(np.asfortranarray(a)) == digest(a[::-1][::-1])


def test_a_table_reads_the_present_contents() -> None:
    a = np.arange(8.0)
    view = view_of(a)
    part = DigestPart(
        TensorMeta("w", "float64", (8,)), Box.whole((8,)), view.ptr, view.strides_bytes, "float64"
    )
    table = DigestTable([part])
    assert table.num_bytes == 64
    first = table.compute(1)
    a[3] = -1
    assert table.compute(1) != first
    assert table.compute(1)["w"] == digest(a)


def test_empty_tensors_have_a_digest() -> None:
    assert digest_tensors([("a", np.zeros((0, 4)))]) == {"a": 0}
    assert digest_tensors([]) == {}


def test_the_root_hashes_sorted_name_dtype_shape_and_digest() -> None:
    def root_of(metas: list[TensorMeta], *digests: int) -> str:
        return digest_root(root_basis(metas), np.array(digests, dtype=np.uint64))

    metas = [TensorMeta("a", "int8", (2,)), TensorMeta("b", "int8", (2,))]
    root = root_of(metas, 1, 2)
    assert root == root_of(metas[::-1], 2, 1)
    others = [
        root_of(metas, 2, 1),
        root_of(metas[:1], 1),
        root_of([metas[0], replace(metas[1], shape=(1, 2))], 1, 2),
        root_of([metas[0], replace(metas[1], dtype="uint8")], 1, 2),
        root_of([metas[0], replace(metas[1], name="c")], 1, 2),
    ]
    assert len({root, *others}) == 6


def test_conversions() -> None:
    assert convert_of("int8", "int8") is Convert.NONE
    assert convert_of("float32", "bfloat16") is Convert.FP32_TO_BF16
    for stored, wire in (("bfloat16", "float32"), ("float16", "bfloat16"), ("int32", "float32")):
        with pytest.raises(LayoutError, match=f"no conversion from {stored} to {wire}"):
            convert_of(stored, wire)
