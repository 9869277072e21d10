"""Rows of segment and digest tables, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import native
from weightsync.tables import dense_strides, num_runs, segment_rows, table


@given(st.data())
def test_a_box_moves_between_any_two_orders_of_dimensions(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=6)))
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(2)]
    arrays = []
    for order in orders:
        inverse = np.argsort(order) if order else ()
        arrays.append(
            np.zeros([shape[d] for d in order], np.uint16).transpose(tuple(map(int, inverse)))
        )
    source, target = arrays
    source[...] = np.arange(source.size, dtype=np.uint16).reshape(shape)
    rows = segment_rows(
        shape,
        source=(source.ctypes.data, source.strides, 2),
        target=(target.ctypes.data, target.strides, 2),
    )
    native.copy_segments(table(rows, 13))
    assert (target == source).all()


def test_dense_neighbours_become_one_row() -> None:
    strides = dense_strides((4, 5, 6), 4)
    assert strides == (120, 24, 4)
    (row,) = segment_rows((4, 5, 6), source=(0, strides, 4), target=(1000, strides, 4))
    assert row == (0, 1000, 480, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0)


def test_more_than_three_strided_dimensions_become_several_rows() -> None:
    shape = (2, 3, 4, 5, 6)
    loose = tuple(2 * s for s in dense_strides(shape, 1))
    rows = segment_rows(shape, source=(0, loose, 1), target=(0, dense_strides(shape, 1), 1))
    found = table(rows, 13)
    assert num_runs(found) == 2 * 3 * 4 * 5 * 6
    assert len(rows) == 1 or all(len(r) == 13 for r in rows)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0)])
def test_nothing_makes_no_rows(shape: tuple[int, ...]) -> None:
    assert segment_rows(shape, source=(0, shape, 1), target=(0, shape, 1)) == []
    assert table([], 13).shape == (0, 13)


def test_a_scalar_is_one_run() -> None:
    (row,) = segment_rows((), source=(8, (), 4), target=(16, (), 4))
    assert row[:4] == (8, 16, 4, 0)
