"""What goes straight and what through a window: the bytes are the same, and the mixture is sane."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np

from transports.wire import random_bytes, row, table
from weightsync.native import CONVERT_FP32_TO_BF16, copy_segments
from weightsync.transports.p2p_windows import (
    Piece,
    PieceLimits,
    ReadCosts,
    num_reads,
    num_unpacked_bytes,
    plan_pieces,
)
from weightsync.transports.reads import normalise_table, table_bytes

MIB = 2**20
ONE_GPU = ReadCosts(op_s=5e-6, wire_bytes_per_s=2e12, unpack_bytes_per_s=2e12)
LIMITS = PieceLimits(chunk_bytes=4 * MIB, straight_bytes=8 * MIB, straight_reads=16)


def run(pieces: list[Piece], limits: PieceLimits) -> None:
    """What NIXL and the kernels would do, on addresses of this process."""
    for piece in pieces:
        reads = piece.reads
        landing = np.full(limits.chunk_bytes, 0xEE, dtype=np.uint8)
        base = int(landing.ctypes.data) if piece.is_chunk else 0
        if piece.is_chunk:
            assert int((reads.target_ptr + reads.num_bytes).max()) <= limits.chunk_bytes
        plain = np.zeros((len(reads), 13), dtype=np.int64)
        plain[:, 0], plain[:, 1] = reads.source_ptr, reads.target_ptr + base
        plain[:, 2], plain[:, [4, 7, 10]] = reads.num_bytes, 1
        copy_segments(plain)
        if piece.unpack is not None:
            rows = piece.unpack.copy()
            rows[:, 0] += base
            copy_segments(rows)


def check(
    rows: list[list[int]],
    source: Any,
    target: Any,
    *,
    may_go_straight: bool = True,
    costs: ReadCosts = ONE_GPU,
    limits: PieceLimits = LIMITS,
    spans: Any = None,
) -> list[Piece]:
    base, at = int(source.ctypes.data), int(target.ctypes.data)
    absolute = table(*rows)
    absolute[:, 0] += base
    absolute[:, 1] += at
    expected = np.zeros_like(target)
    reference = absolute.copy()
    reference[:, 1] += int(expected.ctypes.data) - at
    copy_segments(reference)
    held = np.array([[0, source.nbytes]] if spans is None else spans, dtype=np.int64)
    held[:, 0] += base
    starts = np.array([at], dtype=np.int64) if may_go_straight else None
    pieces = plan_pieces(
        normalise_table(absolute), held, costs=costs, limits=limits, target_starts=starts
    )
    target[:] = 0
    run(pieces, limits)
    assert np.array_equal(target, expected)
    for piece in pieces:
        for a, n in zip(piece.reads.source_ptr - base, piece.reads.num_bytes, strict=True):
            assert any(p <= a and a + n <= p + size for p, size in held - [base, 0]), "over an end"
    return pieces


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Rows within a source of 200 kB, onto targets one after the other."""
    rows, at = [], 0
    for _ in range(draw(st.integers(0, 12))):
        converts = draw(st.booleans())
        run_bytes = draw(st.integers(1, 3000)) * (4 if converts else 1)
        count, stride = draw(st.integers(1, 5)), draw(st.integers(0, 3000)) * 4
        start = draw(st.integers(0, (200_000 - run_bytes - 4 * stride) // 4)) * 4
        landed = run_bytes // 2 if converts else run_bytes
        made = row(start, at, run_bytes, (count, stride, landed))
        made[3] = CONVERT_FP32_TO_BF16 if converts else 0
        rows.append(made)
        at += count * landed + draw(st.integers(0, 2)) * 64
    return rows, at


@hypothesis.given(tables(), st.booleans(), st.sampled_from([40_000, 100_000, MIB]))
def test_any_table_lands_as_a_segment_copy_would(
    made: tuple[list[list[int]], int], may_go_straight: bool, chunk_bytes: int
) -> None:
    rows, target_bytes = made
    limits = PieceLimits(chunk_bytes, straight_bytes=50_000, straight_reads=3)
    if not rows:
        rows = [row(0, 0, 0)]
    source, target = random_bytes(200_000, 1), np.zeros(target_bytes + 1, dtype=np.uint8)
    check(rows, source, target, may_go_straight=may_go_straight, limits=limits)


def scattered(num_tensors: int, tensor_bytes: int, seed: int = 0) -> list[list[int]]:
    order = np.random.default_rng(seed).permutation(num_tensors).tolist()
    return [row(i * tensor_bytes, j * tensor_bytes, tensor_bytes) for i, j in enumerate(order)]


def test_neighbours_on_both_sides_are_one_read() -> None:
    source, target = random_bytes(2 * MIB), np.zeros(2 * MIB, dtype=np.uint8)
    rows = [row(i * 1000, i * 1000, 1000) for i in range(2000)]
    (piece,) = check(rows, source, target)
    assert not piece.is_chunk
    assert len(piece.reads) == 1


def test_nothing_is_joined_over_the_end_of_an_allocation() -> None:
    """Neither a read nor a window: the network knows only allocations."""
    source, target = random_bytes(2 * MIB), np.zeros(2 * MIB, dtype=np.uint8)
    spans = [[0, MIB], [MIB, MIB]]
    for may_go_straight in (True, False):
        rows = [row(0, 0, MIB), row(MIB, MIB, MIB)]
        found = check(rows, source, target, spans=spans, may_go_straight=may_go_straight)
        assert num_reads(found) == 2
        found = check(scattered(64, 32_768), source, target, spans=spans)
        assert num_reads(found) >= 2


def test_small_tensors_go_through_windows_and_large_ones_straight() -> None:
    small = scattered(1000, 1024)
    large = [row(MIB + i * 8 * MIB, 60 * MIB - i * 20 * MIB, 7 * MIB) for i in range(3)]
    source, target = random_bytes(32 * MIB), np.zeros(80 * MIB, dtype=np.uint8)
    pieces = check(small + large, source, target)
    assert num_reads(pieces) <= 3 + 3 + 1
    assert num_unpacked_bytes(pieces) == 1000 * 1024


def test_the_mixture_keeps_cpu_and_device_equally_busy() -> None:
    """Tensors of 3 MiB cost a descriptor 5 us and a second pass 1.6 us: some of each."""
    costs, limits = ONE_GPU, PieceLimits(16 * MIB, 64 * MIB, 64)
    size, number = 3 * MIB, 400
    order = np.random.default_rng(0).permutation(number)
    rows = np.array([row(i * size, int(j) * size, size) for i, j in enumerate(order)])
    spans = np.array([[0, number * size]])
    pieces = plan_pieces(
        rows, spans, costs=costs, limits=limits, target_starts=np.zeros(1, dtype=np.int64)
    )
    cpu_s = num_reads(pieces) * costs.op_s
    device_s = number * size / 2e12 + num_unpacked_bytes(pieces) / 2e12
    straight = sum(len(p.reads) for p in pieces if not p.is_chunk)
    assert 0 < straight < number
    assert cpu_s <= device_s < 1.3 * cpu_s
    kinds = [piece.is_chunk for piece in pieces]
    assert any(kinds[: len(kinds) // 3]), "spread evenly"
    assert not all(kinds[: len(kinds) // 3])


def test_over_a_slow_wire_everything_goes_straight_or_costs_nothing_more() -> None:
    """On a network descriptors hide behind the bytes, and no byte is read that nobody wants."""
    costs = ReadCosts(op_s=5e-6, wire_bytes_per_s=40e9, unpack_bytes_per_s=2e12)
    source, target = random_bytes(32 * MIB), np.zeros(32 * MIB, dtype=np.uint8)
    pieces = check(scattered(32, MIB), source, target, costs=costs)
    assert not any(piece.is_chunk for piece in pieces)


def test_gaps_are_bridged_only_if_small() -> None:
    source, target = random_bytes(4 * MIB), np.zeros(MIB, dtype=np.uint8)
    near = [row(i * 2000, (99 - i) * 1000, 1000) for i in range(100)]
    (piece,) = check(near, source, target)
    assert len(piece.reads) == 1
    far = [row(i * MIB, (3 - i) * 1000, 1000) for i in range(4)]
    pieces = check(far, source, target)
    assert num_reads(pieces) == 4
    assert sum(int(p.reads.num_bytes.sum()) for p in pieces) == 4000


def test_a_conversion_is_done_by_the_kernel() -> None:
    source = random_bytes(8 * MIB)
    source.view("<f4")[:] = np.random.default_rng(0).normal(size=2 * MIB).astype("<f4")
    target = np.zeros(4 * MIB, dtype=np.uint8)
    converting = row(0, 0, 8 * MIB)
    converting[3] = CONVERT_FP32_TO_BF16
    pieces = check([converting], source, target)
    assert all(piece.is_chunk for piece in pieces)
    assert sum(table_bytes(p.unpack) for p in pieces if p.unpack is not None) == 8 * MIB


def test_a_wide_segment_is_cut_until_it_fits() -> None:
    source, target = random_bytes(8 * MIB), np.zeros(4096, dtype=np.uint8)
    limits = PieceLimits(64 * 1024, MIB, 4)
    wide = [row(0, 0, 4, (2, 0, 512), (3, 50_000, 16), (2, 7 * MIB, 64))]
    down = [row(7 * MIB, 2048, 1, (7, -MIB, 1))]
    pieces = check(wide + down, source, target, may_go_straight=False, limits=limits)
    assert all(int(p.reads.num_bytes.max()) <= limits.chunk_bytes for p in pieces)
