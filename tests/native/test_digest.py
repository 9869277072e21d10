"""The digest against its definition, written out in numpy."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import native

Words = npt.NDArray[np.unsignedinteger[Any]]

K = np.array(
    [
        *(0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F),
        *(0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09),
    ],
    dtype=np.uint64,
)
MASK = (1 << 64) - 1
DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def block_factors(seed: int, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of seed + block * golden, forced odd; uint64 arithmetic wraps."""
    x = np.uint64(seed & MASK) + blocks * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def digest_reference(words: Words, seed: int, indices: npt.NDArray[np.integer[Any]]) -> int:
    index = indices.astype(np.uint64)
    with np.errstate(over="ignore"):
        terms = (
            block_factors(seed, index // np.uint64(8))
            * K[(index % np.uint64(8)).astype(np.int64)]
            * words.astype(np.uint64)
        )
        return int(terms.sum(dtype=np.uint64))


def digest_row(
    words: npt.NDArray[Any], seed: int, start_index: int = 0, num_words: int | None = None
) -> tuple[int, ...]:
    """A row for contiguous words."""
    signed_seed = seed - (1 << 64) if seed >> 63 else seed
    num_words = words.size if num_words is None else num_words
    dims = (1, 0, 0) * 3
    return (words.ctypes.data, words.itemsize, num_words, signed_seed, start_index, 0, *dims)


def digest_of(*rows: tuple[int, ...], num_threads: int = 1) -> list[int]:
    table = np.array(rows, dtype=np.int64)
    return [int(d) for d in native.digest_segments(table, num_threads=num_threads)]


def random_words(word_bytes: int, num_words: int, seed: int = 0) -> Words:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << (8 * word_bytes), num_words, dtype=DTYPES[word_bytes])


word_sizes = st.sampled_from([1, 2, 4])
seeds = st.integers(0, MASK)


@settings(max_examples=60, deadline=None)
@given(word_sizes, st.integers(0, 500), seeds, st.integers(0, 2**40), st.integers(1, 4))
def test_equals_the_definition(
    word_bytes: int, num_words: int, seed: int, start_index: int, num_threads: int
) -> None:
    words = random_words(word_bytes, num_words, seed)
    expected = digest_reference(words, seed, start_index + np.arange(num_words))
    assert digest_of(digest_row(words, seed, start_index), num_threads=num_threads) == [expected]


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_large_tensor_over_threads(word_bytes: int, num_threads: int) -> None:
    words = random_words(word_bytes, 1_000_003)
    expected = digest_reference(words, 7, 3 + np.arange(words.size))
    assert digest_of(digest_row(words, 7, 3), num_threads=num_threads) == [expected]


def test_extreme_words() -> None:
    for word_bytes, dtype in DTYPES.items():
        words = np.full(1000, (1 << (8 * word_bytes)) - 1, dtype=dtype)
        expected = digest_reference(words, MASK, np.arange(1000))
        assert digest_of(digest_row(words, MASK)) == [expected]


@settings(max_examples=60, deadline=None)
@given(word_sizes, seeds, st.lists(st.integers(0, 400), max_size=8), st.integers(1, 3))
def test_parts_cut_anywhere_add_up(
    word_bytes: int, seed: int, cuts: list[int], num_threads: int
) -> None:
    words = random_words(word_bytes, 400, seed)
    edges = [0, *sorted(cuts), 400]
    rows = [
        digest_row(words[begin:end], seed, begin, end - begin)
        for begin, end in itertools.pairwise(edges)
    ]
    parts = digest_of(*rows, num_threads=num_threads)
    assert sum(parts) & MASK == digest_of(digest_row(words, seed))[0]


@settings(max_examples=60, deadline=None)
@given(
    word_bytes=word_sizes,
    counts=st.tuples(st.integers(0, 5), st.integers(1, 20), st.integers(1, 40)),
    num_words=st.sampled_from([1, 1, 2, 8, 33]),
    order=st.permutations(range(3)),
    gap_bytes=st.integers(0, 5),
    num_threads=st.integers(1, 4),
)
def test_strided_words(
    word_bytes: int,
    counts: tuple[int, int, int],
    num_words: int,
    order: list[int],
    gap_bytes: int,
    num_threads: int,
) -> None:
    """Memory in one order of the dims, indices in another: a shard of a transposed tensor."""
    run_bytes = num_words * word_bytes + gap_bytes
    memory = np.random.default_rng(1).integers(
        0, 256, run_bytes * int(np.prod(counts)), dtype=np.uint8
    )
    strides, index_strides = [0, 0, 0], [0, 0, 0]
    reach = run_bytes
    for dim in (2, 1, 0):
        strides[dim], reach = reach, reach * counts[dim]
    reach = num_words
    for dim in order:
        index_strides[dim], reach = reach, reach * counts[dim]
    offset: npt.NDArray[Any] = np.zeros((), dtype=np.int64)
    index: npt.NDArray[Any] = np.full((), 5, dtype=np.int64)
    for count, stride, index_stride in zip(counts, strides, index_strides, strict=True):
        offset = offset[..., None] + np.arange(count) * stride
        index = index[..., None] + np.arange(count) * index_stride
    offset = (offset[..., None] + np.arange(num_words) * word_bytes).ravel()
    index = (index[..., None] + np.arange(num_words)).ravel()
    words = memory[offset[:, None] + np.arange(word_bytes)].view(DTYPES[word_bytes]).ravel()
    dims = zip(counts, strides, index_strides, strict=True)
    row = (
        *(memory.ctypes.data, word_bytes, num_words, 99, 5, 0),
        *(value for dim in dims for value in dim),
    )
    expected = digest_reference(words, 99, index)
    assert digest_of(row, num_threads=num_threads) == [expected]


@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("shape", [(200, 300), (3, 9001), (513, 64)])
def test_transposed_memory_equals_contiguous(word_bytes: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    words = random_words(word_bytes, rows * columns)
    turned = np.ascontiguousarray(words.reshape(rows, columns).T)
    row = (
        *(turned.ctypes.data, word_bytes, 1, 4, 0, 0),
        *(rows, word_bytes, columns),
        *(columns, rows * word_bytes, 1),
        *(1, 0, 0),
    )
    assert digest_of(row, num_threads=2) == digest_of(digest_row(words, 4))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 9))
def test_converted_words_equal_words_converted_before(
    num_words: int, seed: int, num_threads: int, start_index: int
) -> None:
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**32, num_words, dtype=np.uint32)
    bits[generator.random(num_words) < 0.2] |= np.uint32(0x7F800000)
    wide = bits.astype(np.uint64)
    halves = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    halves = np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), halves)
    row = (bits.ctypes.data, 2, num_words, seed, start_index, 1, *(1, 0, 0) * 3)
    expected = digest_of(digest_row(halves, seed, start_index))
    assert digest_of(row, num_threads=num_threads) == expected


@settings(max_examples=50, deadline=None)
@given(word_sizes, st.integers(0, 199), st.integers(0, 199))
def test_order_counts(word_bytes: int, first: int, second: int) -> None:
    words = np.arange(200, dtype=DTYPES[word_bytes])
    before = digest_of(digest_row(words, 1))
    words[[first, second]] = words[[second, first]]
    assert (digest_of(digest_row(words, 1)) == before) == (first == second)


def test_seed_counts() -> None:
    words = random_words(2, 64)
    assert digest_of(digest_row(words, 1)) != digest_of(digest_row(words, 2))


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 99), min_size=1, max_size=8))
def test_sign_flips_of_doubles_do_not_cancel(flipped: set[int]) -> None:
    """As 64-bit words any two flips would: both change D by an odd multiple of 2^63."""
    doubles = np.random.default_rng(0).standard_normal(100)
    before = digest_of(digest_row(doubles.view(np.uint32), 3))
    doubles[list(flipped)] *= -1
    assert digest_of(digest_row(doubles.view(np.uint32), 3)) != before


def test_unaligned_words() -> None:
    memory = random_words(1, 4 * 501)
    for word_bytes, dtype in DTYPES.items():
        words = memory[1 : 1 + 500 * word_bytes].copy().view(dtype)
        dims = (1, 0, 0) * 3
        row = (memory.ctypes.data + 1, word_bytes, 500, 8, 3, 0, *dims)
        assert digest_of(row) == [digest_reference(words, 8, 3 + np.arange(500))]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("word_bytes", 8, "row 1: word_bytes is 8"),
        ("num_words", -1, "row 1: num_words is -1"),
        ("start_index", -1, "row 1: the lowest word index is -1"),
        ("convert", 3, "row 1: convert is 3"),
        ("convert", 1, "row 1: word_bytes is 4, expected 2"),
        ("count0", -1, "row 1: count0 is -1"),
        ("count0", 2**62, "row 1: the table exceeds"),
        ("ptr", 0, "row 1: ptr is not an address"),
        ("start_index", 2**63 - 1, "row 1: a word index exceeds"),
    ],
)
def test_bad_table_is_refused(column: str, value: int, message: str) -> None:
    words = random_words(4, 16)
    table = np.array([digest_row(words, 0), digest_row(words, 0)], dtype=np.int64)
    table[1, native.DIGEST_COLUMNS.index(column)] = value
    with pytest.raises(ValueError, match=message):
        native.digest_segments(table)


def test_empty_table() -> None:
    table = np.zeros((0, len(native.DIGEST_COLUMNS)), dtype=np.int64)
    assert native.digest_segments(table).shape == (0,)
