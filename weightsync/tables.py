"""Rows of segment and digest tables from boxes and strides.

Pure integer work: a box of a tensor, seen through the strides of two sides, becomes as few native
rows as its memory allows (see :mod:`weightsync.native` for the columns).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.types import Convert


@dataclass(frozen=True, slots=True, eq=False)
class DigestRows:
    """Rows that digest memory, and which digest each of them adds to."""

    rows: npt.NDArray[np.int64]  # [n, 15]
    owners: npt.NDArray[np.int64]  # [n]
    num_owners: int


#: Outer dimensions that one native row can carry.
_MAX_OUTER = 3

Rows = list[tuple[int, ...]]
_Dim = tuple[int, int, int]  # count, stride of one side, stride of the other


def _collapse(shape: Sequence[int], left: Sequence[int], right: Sequence[int]) -> list[_Dim]:
    """Dimensions that matter, outermost first, neighbours joined where both sides are dense."""
    dims: list[_Dim] = []
    for count, a, b in zip(shape, left, right, strict=True):
        if count == 1:
            continue
        if dims:
            n, outer_a, outer_b = dims[-1]
            if outer_a == count * a and outer_b == count * b:
                dims[-1] = (n * count, a, b)
                continue
        dims.append((count, a, b))
    return dims


def _row_parts(
    shape: Sequence[int], left: Sequence[int], right: Sequence[int], unit: tuple[int, int]
) -> Iterator[tuple[int, int, int, list[_Dim]]]:
    """(offset left, offset right, inner elements, at most three outer dimensions) of each row."""
    if 0 in shape:
        return
    dims = _collapse(shape, left, right)
    inner = 1
    if dims and dims[-1][1:] == unit:
        inner = dims.pop()[0]
    looped, kept = dims[:-_MAX_OUTER], dims[-_MAX_OUTER:]
    for index in itertools.product(*(range(n) for n, _, _ in looped)):
        a = sum(i * d[1] for i, d in zip(index, looped, strict=True))
        b = sum(i * d[2] for i, d in zip(index, looped, strict=True))
        yield a, b, inner, kept


def _padded(dims: Sequence[_Dim]) -> Iterator[int]:
    for _ in range(_MAX_OUTER - len(dims)):
        yield from (1, 0, 0)
    for dim in dims:
        yield from dim


def segment_rows(
    shape: Sequence[int],
    *,
    source: tuple[int, Sequence[int], int],
    target: tuple[int, Sequence[int], int],
    convert: Convert = Convert.NONE,
) -> Rows:
    """Rows that copy a box of ``shape`` elements.

    ``source`` and ``target`` are (address of the first element, strides in bytes, element size in
    bytes).
    """
    (source_ptr, left, source_item), (target_ptr, right, target_item) = source, target
    return [
        (source_ptr + a, target_ptr + b, inner * source_item, convert.value, *_padded(dims))
        for a, b, inner, dims in _row_parts(shape, left, right, (source_item, target_item))
    ]


def dense_strides(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Row-major strides: of bytes with ``item`` = element size, of indices with 1."""
    strides = [0] * len(shape)
    step = item
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def digest_rows(
    shape: Sequence[int],
    *,
    ptr: int,
    strides_bytes: Sequence[int],
    index_strides: Sequence[int],
    start_index: int,
    item: int,
    seed: int,
    convert: Convert = Convert.NONE,
) -> Rows:
    """Rows that digest a box: ``index_strides`` and ``start_index`` count elements of the whole
    tensor, ``item`` is the stored element size in bytes."""
    words = max(1, item // 4)  # wider elements count as little-endian 32-bit words
    word_bytes = 2 if convert is Convert.FP32_TO_BF16 else min(item, 4)
    signed_seed = seed - 2**64 if seed >= 2**63 else seed
    rows: Rows = []
    for a, b, inner, dims in _row_parts(shape, strides_bytes, index_strides, (item, 1)):
        outer = [(n, s, i * words) for n, s, i in dims]
        rows.append(
            (ptr + a, word_bytes, inner * words, signed_seed, (start_index + b) * words,
             convert.value, *_padded(outer))
        )  # fmt: skip
    return rows


def table(rows: Iterable[tuple[int, ...]], columns: int) -> npt.NDArray[np.int64]:
    """Rows as the int64 array that native calls take."""
    array = np.array(list(rows), dtype=np.int64)
    return array.reshape(-1, columns)


def num_runs(segments: npt.NDArray[np.int64]) -> int:
    """Contiguous runs of a segment table: what a NIC or a read of another process pays for."""
    counts: int = (segments[:, 4] * segments[:, 7] * segments[:, 10]).sum()
    return int(counts)
