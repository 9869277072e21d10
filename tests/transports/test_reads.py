"""Tables are checked as a whole before a byte moves, and cut without changing what they do."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from transports.wire import row, table
from weightsync import native
from weightsync.errors import ProtocolError
from weightsync.transports.converting import split_row
from weightsync.transports.reads import check_sources, check_targets, normalise_table, table_bytes


def test_rows_that_move_nothing_are_dropped() -> None:
    rows = table(row(1, 2, 0), row(1, 2, 8, (0, 9, 9)), row(100, 200, 8, (3, 16, 8)))
    kept = normalise_table(rows)
    assert kept.tolist() == [rows[2].tolist()]
    assert table_bytes(kept) == 24


def test_the_caller_may_reuse_its_table() -> None:
    rows = table(row(100, 200, 8))
    kept = normalise_table(rows)
    rows[:] = 0
    assert kept[0, 0] == 100


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((2, 12), dtype=np.int64),
        np.zeros(13, dtype=np.int64),
        np.zeros((1, 13), dtype=np.int32),
        table(row(1, 2, -8)),
        table(row(1, 2, 8, (-2, 8, 8))),
        table(row(1, 2, 8, (2**40, 2**40, 8))),
        table(row(1, 2, 2**40, (2**20, 0, 0), (2**20, 0, 0))),
        table([1, 2, 8, 9, 1, 0, 0, 1, 0, 0, 1, 0, 0]),
    ],
)
def test_bad_tables(bad: np.ndarray) -> None:
    with pytest.raises(ProtocolError, match="read table"):
        normalise_table(bad)


def test_nothing_is_inside_nothing() -> None:
    check_sources(table(), [])
    with pytest.raises(ProtocolError, match="row 0"):
        check_sources(table(row(100, 200, 1)), [])


def test_touching_regions_are_one() -> None:
    spans = [(100, 50), (150, 50)]
    check_sources(table(row(120, 1, 60)), spans)
    with pytest.raises(ProtocolError, match=r"row 1: source bytes 0x78\.\.0xc9"):
        check_sources(table(row(120, 1, 80), row(120, 1, 81)), spans)


def test_a_conversion_lands_in_half_the_bytes() -> None:
    rows = table(row(1, 100, 80))
    rows[0, 3] = native.CONVERT_FP32_TO_BF16
    check_targets(rows, [(100, 40)])
    with pytest.raises(ProtocolError, match="target"):
        check_targets(rows, [(100, 39)])


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(-64, 64), st.integers(-64, 64)), max_size=3),
    st.integers(1, 40),
    st.sampled_from([4, 8, 100]),
    st.booleans(),
)
def test_pieces_do_what_the_row_does(
    dims: list[tuple[int, int, int]], words: int, most: int, converts: bool
) -> None:
    def touched(rows: list[list[int]]) -> list[tuple[int, int]]:
        found = []
        for r in rows:
            for i, j, k in np.ndindex(r[4], r[7], r[10]):
                source = r[0] + i * r[5] + j * r[8] + k * r[11]
                target = r[1] + i * r[6] + j * r[9] + k * r[12]
                found += [
                    (source + n, target + (n // 2 if converts else n)) for n in range(0, r[2], 4)
                ]
        return sorted(found)

    whole = row(10_000, 20_000, 4 * words, *dims)
    whole[3] = int(converts)
    pieces = list(split_row(whole, most))
    assert touched(pieces) == touched([whole])
    assert all(p[2] * p[4] * p[7] * p[10] <= most and p[2] % 4 == 0 for p in pieces)
