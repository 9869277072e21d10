"""Tables cut into units and run lane by lane: on the CPU everywhere, on a GPU where there is one.

The CPU runs the very code of the kernels, one lane after the other; both must equal the segment
copy and the digest of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync import native, native_cuda

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.int64]

KIB = 1 << 10
MIB = 1 << 20
NO_DIMS = (1, 0, 0) * 3
KINDS = {"bytes": (1, 0), "halves": (2, 0), "words": (4, 0), "fp32_as_bf16": (2, 1)}

core = native.extension

#: Runs a table of offsets on two blocks of memory, and returns what the target holds then.
RunSegments = Callable[[Table, Bytes, Bytes], Bytes]
#: Digests of a table of offsets into a block of memory.
RunDigests = Callable[[Table, Bytes], "npt.NDArray[np.uint64]"]


def segment_table(*rows: tuple[int, ...]) -> Table:
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(native.SEGMENT_COLUMNS))


def digest_table(*rows: tuple[int, ...]) -> Table:
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(native.DIGEST_COLUMNS))


def moved(table: Table, **bases: int) -> Table:
    """The table with bases added to its columns."""
    result = table.copy()
    columns = native.SEGMENT_COLUMNS if table.shape[1] == 13 else native.DIGEST_COLUMNS
    for name, base in bases.items():
        result[:, columns.index(name)] += base
    return result


def random_bytes(num_bytes: int, seed: int = 0) -> Bytes:
    values = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    words = values[: num_bytes // 4 * 4].view(np.uint32)
    words[::7] |= np.uint32(0x7F800000)  # infinities and NaNs, for those who convert
    return values


def torch_block(block: Bytes) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(block).cuda()


def twin_segments(table: Table, source: Bytes, target: Bytes) -> Bytes:
    result = target.copy()
    core.run_segment_units(
        table.ctypes.data, table.shape[0], source.ctypes.data, result.ctypes.data
    )
    return result


def cuda_segments(table: Table, source: Bytes, target: Bytes) -> Bytes:
    source_block, target_block = torch_block(source), torch_block(target)
    with native.SegmentTableCuda(table, 0) as segments:
        segments.launch(0, source_block.data_ptr(), target_block.data_ptr())
        result: Bytes = target_block.cpu().numpy()
    return result


def twin_digests(table: Table, memory: Bytes) -> npt.NDArray[np.uint64]:
    absolute = moved(table, ptr=memory.ctypes.data)
    digests = np.full(table.shape[0], 99, dtype=np.uint64)
    core.run_digest_units(
        absolute.ctypes.data, table.shape[0], 0, table.shape[0], digests.ctypes.data
    )
    return digests


def cuda_digests(table: Table, memory: Bytes) -> npt.NDArray[np.uint64]:
    block = torch_block(memory)
    with native.DigestTableCuda(moved(table, ptr=block.data_ptr()), 0) as digests:
        digests.launch()
        return digests.result()


ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["twin", ON_GPU], scope="module")
def run_segments(request: pytest.FixtureRequest) -> RunSegments:
    return cuda_segments if request.param == "cuda" else twin_segments


@pytest.fixture(params=["twin", ON_GPU], scope="module")
def run_digests(request: pytest.FixtureRequest) -> RunDigests:
    return cuda_digests if request.param == "cuda" else twin_digests


def check_segments(run: RunSegments, table: Table, source: Bytes, num_target_bytes: int) -> None:
    target = np.full(num_target_bytes, 0xA5, dtype=np.uint8)
    found = run(table, source, target)
    absolute = moved(table, source_ptr=source.ctypes.data, target_ptr=target.ctypes.data)
    native.copy_segments(absolute)
    np.testing.assert_array_equal(found, target)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source_shift", [0, 1, 2, 3, 4, 8, 15])
@pytest.mark.parametrize("target_shift", [0, 1, 2, 4, 6, 8, 13])
def test_runs_of_any_size_and_alignment(
    run_segments: RunSegments, source_shift: int, target_shift: int
) -> None:
    sizes = [*range(40), 63, 64, 65, 511, 4095, 4096, 4097, 5000, 32768, 32769, 40_003, 100_000]
    rows = []
    begin = 0
    for size in sizes:
        rows.append((begin + source_shift, begin + target_shift, size, 0, *NO_DIMS))
        begin += -(-size // 16) * 16
    source = random_bytes(begin + 16)
    check_segments(run_segments, segment_table(*rows), source, begin + 16)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 3, 16, 17, 100, 4096, 5000, 33_000, 70_001]), max_size=12
    ),
    seed=st.integers(0, 2**31),
)
def test_random_placement(run_segments: RunSegments, sizes: list[int], seed: int) -> None:
    """Any source offset, targets packed without gaps: each pair of alignments turns up."""
    generator = np.random.default_rng(seed)
    source = random_bytes(80_000, seed)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = [
        (int(generator.integers(0, source.size - size)), int(start), size, 0, *NO_DIMS)
        for size, start in zip(sizes, starts, strict=False)
    ]
    check_segments(run_segments, segment_table(*rows), source, int(starts[-1]) + 3)


@settings(max_examples=80, deadline=None)
@given(
    num_bytes=st.sampled_from([1, 2, 4, 6, 8, 16, 40, 48, 257, 512, 4000, 4096, 4500]),
    counts=st.permutations([1, 2, 3, 9, 65]).map(lambda c: c[:3]),
    order=st.permutations(range(3)),
    gaps=st.tuples(st.sampled_from([0, 2, 5, 16]), st.sampled_from([0, 1, 16])),
    shifts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    signs=st.tuples(*[st.sampled_from([1, 1, -1, 0])] * 3),
)
def test_strided_runs(
    run_segments: RunSegments,
    num_bytes: int,
    counts: list[int],
    order: list[int],
    gaps: tuple[int, int],
    shifts: tuple[int, int],
    signs: tuple[int, int, int],
) -> None:
    if num_bytes > 1000:
        counts = [min(c, 5) for c in counts]
    source_strides, target_strides = [0, 0, 0], [0, 0, 0]
    reach = num_bytes + gaps[0]
    for dim in (2, 1, 0):
        source_strides[dim], reach = reach * signs[dim], reach * counts[dim]
    source_bytes, reach = reach, num_bytes + gaps[1]
    for dim in order:
        target_strides[dim], reach = reach, reach * counts[dim]
    lowest = sum((c - 1) * min(s, 0) for c, s in zip(counts, source_strides, strict=True))
    dims = zip(counts, source_strides, target_strides, strict=True)
    row = (shifts[0] - lowest, shifts[1], num_bytes, 0, *(v for dim in dims for v in dim))
    check_segments(
        run_segments, segment_table(row), random_bytes(source_bytes + 16), reach + shifts[1]
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", [(64, 64), (67, 131), (1, 300)])
def test_transpose(run_segments: RunSegments, size: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    table = segment_table(
        (0, 0, size, 0, columns, size, rows * size, rows, columns * size, size, 1, 0, 0)
    )
    num_bytes = rows * columns * size
    check_segments(run_segments, table, random_bytes(num_bytes), num_bytes)


@pytest.mark.parametrize("source_shift", [0, 4, 2, 1])
@pytest.mark.parametrize("target_shift", [0, 2, 4, 1])
def test_conversion_of_any_alignment(
    run_segments: RunSegments, source_shift: int, target_shift: int
) -> None:
    rows = []
    begin = 0
    for num_elements in [0, 1, 2, 3, 4, 5, 7, 8, 33, 1000, 1024, 1025, 8192, 20_001]:
        rows.append(
            (4 * begin + source_shift, 2 * begin + target_shift, 4 * num_elements, 1, *NO_DIMS)
        )
        begin += -(-num_elements // 8) * 8
    table = segment_table(*rows)
    check_segments(run_segments, table, random_bytes(4 * begin + 16), 2 * begin + 16)


@pytest.mark.parametrize("num_elements", [1, 5, 64, 1500])
@pytest.mark.parametrize("shift", [0, 1])
def test_strided_conversion(run_segments: RunSegments, num_elements: int, shift: int) -> None:
    source_stride, target_stride = 4 * num_elements + 4, 2 * num_elements + 2
    dims = (7, source_stride, target_stride, 5, 7 * source_stride, 7 * target_stride, 1, 0, 0)
    table = segment_table((shift, shift, 4 * num_elements, 1, *dims))
    source = random_bytes(35 * source_stride + 8)
    check_segments(run_segments, table, source, 35 * target_stride + 8)


def test_mixed_table_and_empty_rows(run_segments: RunSegments) -> None:
    table = segment_table(
        (0, 0, 100, 0, *NO_DIMS),
        (0, 0, 0, 0, *NO_DIMS),
        (128, 128, 400, 1, *NO_DIMS),
        (0, 1024, 2, 0, 300, 4, 2, 1, 0, 0, 1, 0, 0),
        (0, 0, 8, 0, 0, 8, 8, 1, 0, 0, 1, 0, 0),
        (3, 4096, 50_000, 0, *NO_DIMS),
    )
    check_segments(run_segments, table, random_bytes(64 * KIB), 64 * KIB)
    check_segments(run_segments, segment_table(), random_bytes(64), 64)


def units_of(table: Table) -> tuple[int, int, int]:
    return core.count_segment_units(table.ctypes.data, table.shape[0])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((1 << 20, 1 << 20, 0, 0, *NO_DIMS), (0, 0, 0)),
        ((1 << 20, 1 << 20, 1, 0, *NO_DIMS), (0, 1, 0)),
        ((1 << 20, 1 << 20, 4096, 0, *NO_DIMS), (0, 1, 0)),
        ((1 << 20, 1 << 20, 8192, 0, *NO_DIMS), (0, 2, 0)),
        ((1 << 20, 1 << 20, 3 * MIB, 0, *NO_DIMS), (96, 0, 0)),
        ((1 << 20, 1 << 20, 3 * MIB + 1, 0, *NO_DIMS), (96, 1, 0)),
        # A head up to the target's line, whole blocks, the rest.
        ((1 << 20, (1 << 20) + 120, 32 * KIB + 9, 0, *NO_DIMS), (1, 2, 0)),
        # Rows that touch become one run.
        ((1 << 20, 1 << 20, 64, 0, 128, 64, 64, 1, 0, 0, 1, 0, 0), (0, 2, 0)),
        # Small runs share a unit, long ones are cut.
        ((1 << 20, 1 << 20, 64, 0, 128, 80, 64, 1, 0, 0, 1, 0, 0), (0, 0, 2)),
        ((1 << 20, 1 << 20, 1 << 15, 0, 3, 1 << 16, 1 << 15, 1, 0, 0, 1, 0, 0), (3, 0, 0)),
    ],
)
def test_cutting(row: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    assert units_of(segment_table(row)) == expected


# --- digests --------------------------------------------------------------------------------------


def check_digests(run: RunDigests, table: Table, memory: Bytes) -> None:
    expected = native.digest_segments(moved(table, ptr=memory.ctypes.data))
    np.testing.assert_array_equal(run(table, memory), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_digests_of_any_size_start_and_alignment(
    run_digests: RunDigests, kind: str, shift: int
) -> None:
    word_bytes, convert = KINDS[kind]
    memory_bytes = 4 if convert else word_bytes
    sizes = [*range(20), 100, 255, 256, 257, 1024, 2049, 4096, 10_000, 16_384, 70_003]
    rows = [
        (shift + 16 * i, word_bytes, size, i * 0x1234567, (i * 7) % 23, convert, *NO_DIMS)
        for i, size in enumerate(sizes)
    ]
    memory = random_bytes(70_003 * memory_bytes + 16 * len(sizes) + 16)
    check_digests(run_digests, digest_table(*rows), memory)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    num_words=st.sampled_from([1, 2, 8, 33, 64, 200, 1500]),
    counts=st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 20)),
    order=st.permutations(range(3)),
    gap_bytes=st.sampled_from([0, 1, 4, 8, 12]),
    start_index=st.sampled_from([0, 3, 8, 2**40 + 5]),
    shift=st.integers(0, 5),
)
def test_strided_digests(
    run_digests: RunDigests,
    kind: str,
    num_words: int,
    counts: tuple[int, int, int],
    order: list[int],
    gap_bytes: int,
    start_index: int,
    shift: int,
) -> None:
    word_bytes, convert = KINDS[kind]
    strides, index_strides = [0, 0, 0], [0, 0, 0]
    reach = num_words * (4 if convert else word_bytes) + gap_bytes
    for dim in (2, 1, 0):
        strides[dim], reach = reach, reach * counts[dim]
    num_bytes, reach = reach, num_words
    for dim in order:
        index_strides[dim], reach = reach, reach * counts[dim]
    dims = zip(counts, strides, index_strides, strict=True)
    row = (shift, word_bytes, num_words, -3, start_index, convert, *(v for d in dims for v in d))
    check_digests(run_digests, digest_table(row), random_bytes(num_bytes + 16))


def test_owners_gather_rows() -> None:
    memory = random_bytes(4096)
    rows = [(i * 1024, 2, 512, 5, i * 512, 0, *NO_DIMS) for i in range(4)]
    table = moved(digest_table(*rows), ptr=memory.ctypes.data)
    owners = np.array([1, 0, 1, 2], dtype=np.int64)
    parts = [int(part) for part in native.digest_segments(table)]
    digests = np.zeros(4, dtype=np.uint64)
    core.run_digest_units(table.ctypes.data, 4, owners.ctypes.data, 4, digests.ctypes.data)
    assert digests.tolist() == [parts[1], (parts[0] + parts[2]) % 2**64, parts[3], 0]


def test_owner_out_of_range_is_refused() -> None:
    table = digest_table((4096, 2, 5, 0, 0, 0, *NO_DIMS))
    owners, out = np.array([2], dtype=np.int64), np.zeros(2, dtype=np.uint64)
    with pytest.raises(ValueError, match="row 0: owner is 2, expected 0 to 1"):
        core.run_digest_units(table.ctypes.data, 1, owners.ctypes.data, 2, out.ctypes.data)


# --- both at once ---------------------------------------------------------------------------------


def fused_tables(kind: str, alignment: str) -> tuple[Table, Table, int, int]:
    """Segments and the digests of what they read: plain, strided and empty rows.

    "lines": both sides and the words' blocks begin together, so that a unit is read once.
    """
    is_apart = alignment == "apart"
    word_bytes, convert = KINDS[kind]
    memory_bytes = 4 if convert else word_bytes
    scale = 2 if convert else 1
    segments, digests = [], []
    begin = 0
    for i, num_words in enumerate([0, 1, 7, 512, 1024, 4099, 20_000, 70_001]):
        num_bytes = num_words * memory_bytes
        source, target = begin, begin // scale
        if is_apart:
            source, target = begin + 4 * (i % 3), begin // scale + 2 * (i % 5)
        segments.append((source, target, num_bytes, convert, *NO_DIMS))
        index = 3 * i if is_apart else 8 * i
        digests.append((source, word_bytes, num_words, 77, index, convert, *NO_DIMS))
        begin += -(-num_bytes // 128) * 128 + (32 if is_apart else 0)
    run = 10 * memory_bytes
    segments.append((begin, begin, run, convert, *(6, run + 4, run), *(1, 0, 0) * 2))
    digests.append((begin, word_bytes, 10, 78, 1, convert, *(6, run + 4, 10), *(1, 0, 0) * 2))
    end = begin + 6 * (run + 4)
    return segment_table(*segments), digest_table(*digests), end, end


def at_a_line(block: Bytes) -> Bytes:
    """A copy that begins at a line of 128 bytes, as memory of a device does."""
    memory = np.empty(len(block) + 128, dtype=np.uint8)
    first = -memory.ctypes.data % 128
    copy = memory[first : first + len(block)]
    copy[:] = block
    return copy


@pytest.mark.parametrize("alignment", ["lines", "apart"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["twin", ON_GPU])
def test_copy_with_digest(kind: str, device: str, alignment: str) -> None:
    segments, digests, num_source, num_target = fused_tables(kind, alignment)
    source = at_a_line(random_bytes(num_source))
    target = np.full(num_target, 0xA5, dtype=np.uint8)
    found = at_a_line(target)
    if device == "twin":
        bases = {"source_ptr": source.ctypes.data, "target_ptr": found.ctypes.data}
        a, b = moved(segments, **bases), moved(digests, ptr=source.ctypes.data)
        sums = np.zeros(len(b), dtype=np.uint64)
        core.run_copy_digest_units(
            a.ctypes.data, b.ctypes.data, len(b), 0, len(b), sums.ctypes.data
        )
    else:
        source_block, target_block = torch_block(source), torch_block(found)
        bases = {"source_ptr": source_block.data_ptr(), "target_ptr": target_block.data_ptr()}
        tables = moved(segments, **bases), moved(digests, ptr=source_block.data_ptr())
        with native.CopyDigestTableCuda(*tables, 0) as copy:
            assert copy.num_bytes > 0
            for _ in range(2):
                copy.launch()
            sums = copy.result()
        found = target_block.cpu().numpy()
    native.copy_segments(
        moved(segments, source_ptr=source.ctypes.data, target_ptr=target.ctypes.data)
    )
    np.testing.assert_array_equal(found, target)
    expected = native.digest_segments(moved(digests, ptr=source.ctypes.data))
    np.testing.assert_array_equal(sums, expected)


def test_tables_of_different_memory_are_refused() -> None:
    segments = segment_table((4096, 8192, 64, 0, *NO_DIMS), (4160, 8256, 64, 0, *NO_DIMS))
    digests = digest_table((4096, 2, 32, 0, 0, 0, *NO_DIMS), (4160, 2, 31, 0, 0, 0, *NO_DIMS))
    out = np.zeros(2, dtype=np.uint64)
    with pytest.raises(ValueError, match="row 1: the segment does not read the memory"):
        core.run_copy_digest_units(
            segments.ctypes.data, digests.ctypes.data, 2, 0, 2, out.ctypes.data
        )
    with pytest.raises(ValueError, match="has 1 rows, expected 2"):
        native.CopyDigestTableCuda(segments, digests[:1], 0)


# --- the Python door ------------------------------------------------------------------------------


def test_a_reason_is_given_where_there_is_no_cuda() -> None:
    reason = native.cuda_unavailable_reason()
    assert native.has_cuda() == (reason is None)
    assert reason != ""
    assert (core.cuda_version() == "") == (reason == "built without CUDA")


@pytest.mark.skipif(native.has_cuda(), reason="there is a CUDA device")
def test_a_table_without_cuda_says_why() -> None:
    with pytest.raises(native.CudaError) as caught:
        native.SegmentTableCuda(segment_table((4096, 8192, 64, 0, *NO_DIMS)), 0)
    assert caught.value.error_name.startswith("cudaError")
    assert caught.value.device == 0
    assert caught.value.call in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((4096, 8192, -1, 0, *NO_DIMS), "row 0: num_bytes is -1"),
        ((-1, 8192, 8, 0, *NO_DIMS), "row 0: source_ptr or target_ptr"),
    ],
)
def test_bad_tables_are_refused(row: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.SegmentTableCuda(segment_table(row), 0)
    with pytest.raises(ValueError, match="segment table"):
        native.SegmentTableCuda(np.zeros((1, 12), dtype=np.int64), 0)


def test_bad_owners_are_refused() -> None:
    table = digest_table((4096, 2, 5, 0, 0, 0, *NO_DIMS))
    for owners in (np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int32)):
        with pytest.raises(ValueError, match="owners has dtype"):
            native.DigestTableCuda(table, 0, owners=owners)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_owners is 3"):
        native.DigestTableCuda(table, 0, num_owners=3)


def test_names_of_the_door() -> None:
    assert native.SegmentTableCuda is native_cuda.SegmentTableCuda
    assert native.CudaError is native_cuda.CudaError
    with pytest.raises(AttributeError, match="has no attribute 'Segments'"):
        native.Segments  # noqa: B018


# --- only on a GPU --------------------------------------------------------------------------------


def gpu_blocks(num_bytes: int) -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch")
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    return torch, source, torch.zeros_like(source)


@pytest.mark.gpu
@pytest.mark.parametrize("max_blocks", [0, 1, 7])
@pytest.mark.parametrize("num_bytes", [0, 1, 64 * MIB, 64 * MIB + 5])
def test_large_copies_and_digests(num_bytes: int, max_blocks: int) -> None:
    _, source, target = gpu_blocks(max(num_bytes, 1))
    addresses = (source.data_ptr(), target.data_ptr())
    with native.SegmentTableCuda(segment_table((*addresses, num_bytes, 0, *NO_DIMS)), 0) as table:
        assert table.num_bytes == num_bytes
        table.launch(max_blocks=max_blocks)
    host = source.cpu().numpy()
    np.testing.assert_array_equal(target.cpu().numpy()[:num_bytes], host[:num_bytes])
    for word_bytes in (1, 2, 4):
        row = (0, word_bytes, num_bytes // word_bytes, 5, 6, 0, *NO_DIMS)
        check_digests(cuda_digests, digest_table(row), host)


@pytest.mark.gpu
def test_counts_that_need_64_bits() -> None:
    """One element spread over more than 2^31 places."""
    torch, source, _ = gpu_blocks(2)
    count = 2**31 + 7
    target = torch.zeros(count, dtype=torch.int16, device="cuda")
    row = (source.data_ptr(), target.data_ptr(), 2, 0, 1, 0, 0, count, 0, 2, 1, 0, 0)
    with native.SegmentTableCuda(segment_table(row), 0) as table:
        table.launch()
        low, high = torch.aminmax(target)
    assert low == high == source.view(torch.int16)[0]


@pytest.mark.gpu
def test_graph_replay_on_new_contents() -> None:
    torch, source, target = gpu_blocks(MIB)
    digests_of = digest_table((source.data_ptr(), 2, MIB // 2, 1, 0, 0, *NO_DIMS))
    segments = segment_table((source.data_ptr(), target.data_ptr(), MIB, 0, *NO_DIMS))
    with (
        native.SegmentTableCuda(segments, 0) as copy,
        native.DigestTableCuda(digests_of, 0) as digest,
        native.CopyDigestTableCuda(segments, digests_of, 0) as both,
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream().cuda_stream
            copy.launch(stream)
            digest.launch(stream)
            both.launch(stream)
        for _ in range(3):
            source.random_(0, 256)
            target.zero_()
            graph.replay()
            replayed_on = torch.cuda.current_stream().cuda_stream
            found = digest.result(replayed_on)
            assert torch.equal(source, target)
            host = source.cpu().numpy()
            table = moved(digests_of, ptr=host.ctypes.data - source.data_ptr())
            assert found == both.result(replayed_on) == native.digest_segments(table)
        del graph


@pytest.mark.gpu
def test_streams_keep_their_order() -> None:
    torch, source, target = gpu_blocks(16 * MIB)
    ring = torch.zeros(2 * 16 * MIB, dtype=torch.uint8, device="cuda")
    fill = segment_table((source.data_ptr(), 0, 16 * MIB, 0, *NO_DIMS))
    drain = segment_table((0, target.data_ptr(), 16 * MIB, 0, *NO_DIMS))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with native.SegmentTableCuda(fill, 0) as filling, native.SegmentTableCuda(drain, 0) as draining:
        for slot in (0, 1):
            place = ring.data_ptr() + slot * 16 * MIB
            filling.launch(streams[0].cuda_stream, target_base=place)
            streams[1].wait_stream(streams[0])
            draining.launch(streams[1].cuda_stream, source_base=place)
        torch.cuda.synchronize()
    assert torch.equal(ring[: 16 * MIB], source)
    assert torch.equal(ring[16 * MIB :], source)
    assert torch.equal(target, source)


@pytest.mark.gpu
def test_bases_must_make_addresses() -> None:
    with native.SegmentTableCuda(segment_table((0, 64, 8, 0, *NO_DIMS)), 0) as table:
        with pytest.raises(ValueError, match=r"source_base is 0, but the lowest source_ptr"):
            table.launch()
        with pytest.raises(ValueError, match=r"target_base is -64, but the lowest target_ptr"):
            table.launch(source_base=4096, target_base=-64)


@pytest.mark.gpu
def test_closed_tables_refuse() -> None:
    _, source, target = gpu_blocks(64)
    table = native.SegmentTableCuda(
        segment_table((source.data_ptr(), target.data_ptr(), 64, 0, *NO_DIMS)), 0
    )
    states = [table.is_open]
    for _ in range(2):
        table.close()
        states.append(table.is_open)
    assert states == [True, False, False]
    with pytest.raises(ValueError, match="SegmentTableCuda is closed"):
        table.launch()
    digests = native.DigestTableCuda(digest_table(), 0)
    assert digests.result().shape == (0,)
    digests.close()
    with pytest.raises(ValueError, match="DigestTableCuda is closed"):
        digests.result()


@pytest.mark.gpu
@pytest.mark.parametrize("device", [-1, 99])
def test_device_that_does_not_exist(device: int) -> None:
    with pytest.raises(native.CudaError, match=f"on device {device}") as caught:
        native.SegmentTableCuda(segment_table(), device)
    assert caught.value.error_name == "cudaErrorInvalidDevice"
    assert caught.value.device == device


@pytest.mark.gpu
def test_tables_give_their_memory_back() -> None:
    torch, source, target = gpu_blocks(4096)
    rows = np.repeat(
        segment_table((source.data_ptr(), target.data_ptr(), 64, 0, *NO_DIMS)), 200_000, axis=0
    )
    native.SegmentTableCuda(rows[:1], 0).close()
    free_bytes = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        with native.SegmentTableCuda(rows, 0):
            assert torch.cuda.mem_get_info()[0] < free_bytes
        assert torch.cuda.mem_get_info()[0] == free_bytes
