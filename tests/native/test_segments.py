"""The batched segment copy against numpy."""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import native

Bytes = npt.NDArray[np.uint8]

PLAIN_DIMS = (1, 0, 0) * 3
MIB = 1 << 20


def segment_table(*rows: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(native.SEGMENT_COLUMNS))


def plain_row(source: Bytes, target: Bytes, num_bytes: int) -> tuple[int, ...]:
    return (source.ctypes.data, target.ctypes.data, num_bytes, native.CONVERT_NONE, *PLAIN_DIMS)


def random_bytes(num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def bf16_reference(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """fp32 bits to bf16 bits, nearest even, every NaN to 0x7FC0."""
    bits = values.astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    is_nan = (values & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, np.uint16(0x7FC0), rounded)


SPECIAL_FP32 = np.array(
    [
        *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000),  # zeros, infinities
        *(0x7FC00000, 0xFFC12345, 0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF),  # NaNs
        *(0x00000001, 0x00008000, 0x00008001, 0x007FFFFF, 0x80018000),  # subnormals
        *(0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001),  # ties, and next to them
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF),  # overflow to infinity or not
    ],
    dtype=np.uint32,
)


@st.composite
def strided_copies(draw: st.DrawFn) -> dict[str, Any]:
    """Any run, counts, source strides and alignment; the target's dims are dense and permuted."""
    num_bytes = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 40, 257]))
    counts = [draw(st.sampled_from([0, 1, 2, 3, 7, 9, 65, 130])) for _ in range(2)]
    counts.append(draw(st.sampled_from([1, 2, 5])))
    draw(st.randoms(use_true_random=False)).shuffle(counts)
    source_strides = [draw(st.integers(-600, 600)) for _ in range(3)]
    order = draw(st.permutations(range(3)))
    gap = draw(st.sampled_from([0, 0, 1, 5]))
    target_strides = [0, 0, 0]
    reach = num_bytes + gap
    for dim in order:
        target_strides[dim] = reach
        reach *= max(counts[dim], 1)
    return {
        "num_bytes": num_bytes,
        "counts": counts,
        "source_strides": source_strides,
        "target_strides": target_strides,
        "target_bytes": reach,
        "misaligned": (draw(st.integers(0, 9)), draw(st.integers(0, 9))),
        "num_threads": draw(st.integers(1, 4)),
    }


def byte_indices(base: int, counts: list[int], strides: list[int], num_bytes: int) -> Any:
    index = np.array(base, dtype=np.int64)
    for count, stride in zip(counts, strides, strict=True):
        index = index[..., None] + np.arange(count) * stride
    return index[..., None] + np.arange(num_bytes)


@settings(max_examples=80, deadline=None)
@given(strided_copies())
def test_strided_copy_equals_numpy(case: dict[str, Any]) -> None:
    counts, num_bytes = case["counts"], case["num_bytes"]
    lowest = sum(
        min(0, (max(c, 1) - 1) * s) for c, s in zip(counts, case["source_strides"], strict=True)
    )
    highest = sum(
        max(0, (max(c, 1) - 1) * s) for c, s in zip(counts, case["source_strides"], strict=True)
    )
    source_start = case["misaligned"][0] - lowest
    source = random_bytes(source_start + highest + num_bytes)
    target = np.zeros(case["target_bytes"] + case["misaligned"][1], dtype=np.uint8)
    expected = target.copy()
    expected[byte_indices(case["misaligned"][1], counts, case["target_strides"], num_bytes)] = (
        source[byte_indices(source_start, counts, case["source_strides"], num_bytes)]
    )
    dims = zip(counts, case["source_strides"], case["target_strides"], strict=True)
    row = (
        source.ctypes.data + source_start,
        target.ctypes.data + case["misaligned"][1],
        num_bytes,
        native.CONVERT_NONE,
        *(value for dim in dims for value in dim),
    )
    copied = native.copy_segments(segment_table(row), num_threads=case["num_threads"])
    assert copied == num_bytes * int(np.prod(counts))
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(1, 300), (64, 64), (67, 131), (700, 513)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_transpose(size: int, shape: tuple[int, int], num_threads: int) -> None:
    rows, columns = shape
    source = random_bytes(rows * columns * size).reshape(rows, columns, size)
    target = np.zeros((columns, rows, size), dtype=np.uint8)
    row = (
        source.ctypes.data,
        target.ctypes.data,
        size,
        native.CONVERT_NONE,
        *(columns, size, rows * size),
        *(rows, columns * size, size),
        *(1, 0, 0),
    )
    progress = native.Progress()
    table = segment_table(row)
    copied = native.copy_segments(table, num_threads=num_threads, progress=progress)
    assert copied == progress.num_bytes == source.size
    np.testing.assert_array_equal(target, source.transpose(1, 0, 2))


@pytest.mark.parametrize("misaligned", [0, 6])
def test_transpose_larger_than_the_cache(misaligned: int) -> None:
    rows, columns = 3000, 6001
    source = np.random.default_rng(2).integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
    memory = np.zeros(rows * columns * 2 + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + misaligned
    target = memory[start : start + source.nbytes].view(np.uint16).reshape(columns, rows)
    row = (source.ctypes.data, target.ctypes.data, 2, native.CONVERT_NONE)
    table = segment_table((*row, columns, 2, rows * 2, rows, columns * 2, 2, 1, 0, 0))
    assert native.copy_segments(table, num_threads=2) == source.nbytes
    np.testing.assert_array_equal(target, source.T)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 63, 64, 65, 500, 4097, 300_000]), max_size=40),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_many_runs_of_any_alignment(lengths: list[int], num_threads: int, seed: int) -> None:
    source = random_bytes(sum(lengths) + 64, seed)
    target = np.zeros_like(source)
    expected = np.zeros_like(source)
    table = np.zeros((len(lengths), len(native.SEGMENT_COLUMNS)), dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for i, length in enumerate(lengths):
        begin = starts[i]
        table[i] = plain_row(source[begin:], target[begin + seed % 64 :], length)
        expected[begin + seed % 64 :][:length] = source[begin:][:length]
    assert native.copy_segments(table, num_threads=num_threads) == sum(lengths)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_copy_larger_than_the_cache(num_threads: int) -> None:
    """Enough bytes that stores are streamed, in pieces that leave ragged ends everywhere."""
    num_segments, num_bytes = 33, MIB + 77
    source = random_bytes(num_segments * num_bytes)
    target = np.zeros_like(source)
    order = np.random.default_rng(1).permutation(num_segments)
    rows = [
        plain_row(source[s * num_bytes :], target[t * num_bytes :], num_bytes)
        for t, s in enumerate(order)
    ]
    table = segment_table(*rows)
    assert native.copy_segments(table, num_threads=num_threads) == source.size
    expected = source.reshape(num_segments, num_bytes)[order]
    np.testing.assert_array_equal(target.reshape(num_segments, num_bytes), expected)


def test_strided_runs_larger_than_the_cache() -> None:
    rows, width, kept = 24_000, 4096, 1500
    source = random_bytes(rows * width).reshape(rows, width)
    target = np.zeros((rows, kept), dtype=np.uint8)
    row = (source.ctypes.data + 7, target.ctypes.data, kept, native.CONVERT_NONE)
    table = segment_table((*row, rows, width, kept, *(1, 0, 0) * 2))
    assert native.copy_segments(table, num_threads=2) == rows * kept
    np.testing.assert_array_equal(target, source[:, 7 : 7 + kept])


@settings(max_examples=60, deadline=None)
@given(
    counts=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    is_transposed=st.booleans(),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_convert_rounds_to_nearest_even(
    counts: tuple[int, int], is_transposed: bool, num_threads: int, seed: int
) -> None:
    rows, columns = counts
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 2**32, rows * columns, dtype=np.uint32)
    picks = generator.integers(0, SPECIAL_FP32.size, rows * columns)
    values = np.where(generator.random(values.size) < 0.5, SPECIAL_FP32[picks], values)
    source = values.reshape(rows, columns)
    shape = (columns, rows) if is_transposed else (rows, columns)
    target = np.zeros(shape, dtype=np.uint16)
    if is_transposed:
        run, dims = 4, (rows, columns * 4, 2, columns, 4, rows * 2)
    else:
        run, dims = columns * 4, (rows, columns * 4, columns * 2, 1, 0, 0)
    addresses = (source.ctypes.data, target.ctypes.data)
    table = segment_table((*addresses, run, native.CONVERT_FP32_TO_BF16, *dims, 1, 0, 0))
    assert native.copy_segments(table, num_threads=num_threads) == source.nbytes
    expected = bf16_reference(source.T if is_transposed else source)
    np.testing.assert_array_equal(target, expected)


def test_convert_larger_than_the_cache() -> None:
    source = np.random.default_rng(0).integers(0, 2**32, 9 * MIB, dtype=np.uint32)
    target = np.zeros(source.size, dtype=np.uint16)
    addresses = (source.ctypes.data, target.ctypes.data)
    table = segment_table((*addresses, source.nbytes, native.CONVERT_FP32_TO_BF16, *PLAIN_DIMS))
    assert native.copy_segments(table, num_threads=3) == source.nbytes
    np.testing.assert_array_equal(target, bf16_reference(source))


def test_convert_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    random_bits = np.random.default_rng(3).integers(0, 2**32, 100_000, dtype=np.uint32)
    source = np.concatenate([SPECIAL_FP32, random_bits])
    target = np.zeros(source.size, dtype=np.uint16)
    addresses = (source.ctypes.data, target.ctypes.data)
    table = segment_table((*addresses, source.nbytes, native.CONVERT_FP32_TO_BF16, *PLAIN_DIMS))
    native.copy_segments(table)
    values = torch.from_numpy(source.view(np.int32)).view(torch.float32)
    cast = values.to(torch.bfloat16)
    is_nan = torch.isnan(values).numpy()
    expected = cast.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(target[~is_nan], expected[~is_nan])
    # torch's vector cast gives NaNs other bits than its scalar cast does; the scalar one is ours.
    scalar = values[int(np.argmax(is_nan))].to(torch.bfloat16).view(torch.int16).item()
    assert set(target[is_nan].tolist()) == {scalar & 0xFFFF}


def test_empty_table() -> None:
    table = np.zeros((0, len(native.SEGMENT_COLUMNS)), dtype=np.int64)
    assert native.copy_segments(table) == 0


def test_raised_cancel_flag_stops_before_any_byte() -> None:
    source, target = random_bytes(MIB), np.zeros(MIB, dtype=np.uint8)
    cancel, progress = native.CancelFlag(), native.Progress()
    cancel.set()
    table = segment_table(plain_row(source, target, MIB))
    assert native.copy_segments(table, cancel=cancel, progress=progress) == 0
    assert progress.num_bytes == 0
    assert not target.any()
    cancel.clear()
    assert native.copy_segments(table, cancel=cancel, progress=progress) == MIB
    assert progress.num_bytes == MIB


def test_cancel_stops_a_running_copy() -> None:
    """Repeated reads of one block make a copy that would run for minutes."""
    source, target = random_bytes(MIB), np.zeros(MIB, dtype=np.uint8)
    row = (source.ctypes.data, target.ctypes.data, MIB, native.CONVERT_NONE)
    table = segment_table((*row, 1 << 20, 0, 0, *(1, 0, 0) * 2))
    cancel, progress = native.CancelFlag(), native.Progress()
    copied: list[int] = []
    copier = threading.Thread(
        target=lambda: copied.append(
            native.copy_segments(table, num_threads=2, cancel=cancel, progress=progress)
        )
    )
    copier.start()
    while progress.num_bytes == 0:
        pass
    cancel.set()
    copier.join()
    assert copied == [progress.num_bytes]
    assert 0 < progress.num_bytes < MIB * MIB


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("num_bytes", -1, "row 1: num_bytes is -1"),
        ("convert", 2, "row 1: convert is 2"),
        ("count1", -3, "row 1: count1 is -3"),
        ("count2", 2**62, "row 1: num_bytes times counts"),
        ("source_ptr", 0, "row 1: source_ptr or target_ptr"),
        ("target_ptr", -8, "row 1: source_ptr or target_ptr"),
    ],
)
def test_bad_table_is_refused_before_any_byte(column: str, value: int, message: str) -> None:
    source, target = random_bytes(64), np.zeros(64, dtype=np.uint8)
    table = segment_table(plain_row(source, target, 64), plain_row(source, target, 64))
    table[1, native.SEGMENT_COLUMNS.index(column)] = value
    with pytest.raises(ValueError, match=message):
        native.copy_segments(table)
    assert not target.any()


def test_conversion_of_half_an_element_is_refused() -> None:
    source, target = random_bytes(64), np.zeros(64, dtype=np.uint8)
    table = segment_table(plain_row(source, target, 6))
    table[0, native.SEGMENT_COLUMNS.index("convert")] = native.CONVERT_FP32_TO_BF16
    with pytest.raises(ValueError, match="multiple of 4"):
        native.copy_segments(table)


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((2, 13), dtype=np.int32),
        np.zeros((2, 12), dtype=np.int64),
        np.zeros(13, dtype=np.int64),
        np.zeros((13, 2), dtype=np.int64).T,
    ],
)
def test_table_of_wrong_form_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match="segment table"):
        native.copy_segments(table)


def test_zero_threads_are_refused() -> None:
    table = np.zeros((0, len(native.SEGMENT_COLUMNS)), dtype=np.int64)
    with pytest.raises(ValueError, match="num_threads is 0"):
        native.copy_segments(table, num_threads=0)


def test_memcpy_and_prefault() -> None:
    source, target = random_bytes(3 * MIB + 5), np.zeros(3 * MIB + 5, dtype=np.uint8)
    target[:3] = 9
    native.prefault(target.ctypes.data, target.size)
    assert target[:4].tolist() == [9, 9, 9, 0]
    native.memcpy_bytes(target.ctypes.data, source.ctypes.data, source.size, num_threads=3)
    np.testing.assert_array_equal(target, source)
    with pytest.raises(OSError, match="prefault"):
        native.prefault(1 << 20, 4096)


def test_build_info_names_its_kernels() -> None:
    info = native.build_info()
    assert info["compiler"]
    assert info["copy_kernel"]
    assert info["digest_kernel"]
    assert (info["cuda"] is not None) == native.has_cuda()
