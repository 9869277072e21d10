"""How attention on a CUDA device is cut into work: every chunk and every row once, within its room."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import native
from weightsync.native_attention import ATTENTION_CHUNK
from weightsync.native_cuda_core import TILE_ENTRIES, WARP_ENTRIES, no_tensor_cores_reason


@dataclass
class Lists:
    """What the plan left, by name."""

    split: list[tuple[int, ...]]  # sequence, begin, count, num_chunks
    tiles: list[tuple[int, ...]]  # sequence, first entry
    first_split: list[int]


def plan(rows: list[int], contexts: list[int], group: int, max_split: int, max_tiles: int) -> Lists:
    starts = np.cumsum([0, *rows], dtype=np.int32)
    lens = np.array(contexts, dtype=np.int32)
    split = np.full((max_split + 1, 4), -7, dtype=np.int32)
    tiles = np.full((max_tiles + 1, 2), -7, dtype=np.int32)
    counts, first = np.zeros(2, dtype=np.int32), np.zeros(len(rows), dtype=np.int32)
    sizes = (int(starts[-1]), len(rows), 2 * group, 2, 64, 1, 1, 1, 1)
    pointers = (0, 0, 0, 0, starts.ctypes.data, lens.ctypes.data, 0)
    work = (*(a.ctypes.data for a in (split, tiles, counts, first)), 0)
    native.extension.plan_attention(sizes, pointers, (max_split, max_tiles, 1, 0, 0), work)
    assert (split[max_split:] == -7).all(), "beyond its room"
    assert (tiles[max_tiles:] == -7).all(), "beyond its room"
    found = [tuple(row.tolist()) for row in split[: counts[0]]]
    return Lists(found, [tuple(row.tolist()) for row in tiles[: counts[1]]], first.tolist())


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    rows = draw(st.lists(st.integers(1, 200), min_size=1, max_size=12))
    return rows, [r + draw(st.integers(0, 2000)) for r in rows], draw(st.integers(1, 16))


@given(steps())
def test_every_chunk_or_every_entry_once(step: tuple[list[int], list[int], int]) -> None:
    rows, contexts, group = step
    lists = plan(rows, contexts, group, 1000, 1000)
    expected_split: list[tuple[int, ...]] = []
    expected_tiles: list[tuple[int, ...]] = []
    for sequence, (count, context) in enumerate(zip(rows, contexts, strict=True)):
        if count * group <= WARP_ENTRIES:
            assert lists.first_split[sequence] == len(expected_split)
            num_chunks = -(-context // ATTENTION_CHUNK)
            for begin in range(0, context, ATTENTION_CHUNK):
                size = min(ATTENTION_CHUNK, context - begin)
                expected_split.append((sequence, begin, size, num_chunks))
        else:
            assert lists.first_split[sequence] == -1
            expected_tiles += [(sequence, e) for e in range(0, count * group, TILE_ENTRIES)]
    assert lists.split == expected_split
    assert lists.tiles == expected_tiles


def test_what_has_no_room_is_left_out() -> None:
    lists = plan([1, 1, 1], [600, 600, 10], 4, 4, 0)
    assert [item[0] for item in lists.split] == [0, 0, 0, 1]
    assert lists.first_split == [0, -1, -1]
    assert plan([40], [40], 2, 0, 1).tiles == [(0, 0)]


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "reason"),
    [
        ("bfloat16", 8, 128, ""),
        ("float16", 16, 64, ""),
        ("float32", 8, 128, "float32"),
        ("bfloat16", 8, 80, "head_dim 80 (32, 64 and 128 are)"),
        ("bfloat16", 34, 64, "17 query heads a KV head (up to 16 are)"),
    ],
)
def test_what_tensor_cores_do(dtype: str, heads: int, dim: int, reason: str) -> None:
    assert no_tensor_cores_reason(dtype, heads, 2, dim) == reason
