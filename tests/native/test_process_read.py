"""Segment reads out of a real child process."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync import native

NUM_BYTES = 5 << 20
PLAIN_DIMS = (1, 0, 0) * 3

# Fills an array, says where it is, and lives until its input closes.
CHILD = f"""
import sys
import numpy
block = numpy.random.default_rng(5).integers(0, 256, {NUM_BYTES}, dtype=numpy.uint8)
try:
    import ctypes
    ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # let any process of ours read this one
finally:
    print(block.ctypes.data, flush=True)
sys.stdin.read()
"""


class Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.block_ptr = int(self.process.stdout.readline())
        self.expected = np.random.default_rng(5).integers(0, 256, NUM_BYTES, dtype=np.uint8)

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    try:
        table = segment_table((child.block_ptr, np.zeros(8, np.uint8).ctypes.data, 1))
        try:
            native.read_process_segments(child.process.pid, table)
        except PermissionError as error:
            pytest.skip(f"this system refuses reads of another process: {error}")
        yield child
    finally:
        child.close()


def segment_table(*rows: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Rows are (source_ptr, target_ptr, num_bytes), each one run."""
    table = np.zeros((len(rows), len(native.SEGMENT_COLUMNS)), dtype=np.int64)
    for row, columns in zip(table, rows, strict=True):
        row[:] = (*columns, native.CONVERT_NONE, *PLAIN_DIMS)
    return table


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_one_large_segment(child: Child, num_threads: int) -> None:
    target = np.zeros(NUM_BYTES, dtype=np.uint8)
    progress = native.Progress()
    table = segment_table((child.block_ptr, target.ctypes.data, NUM_BYTES))
    num_bytes = native.read_process_segments(
        child.process.pid, table, num_threads=num_threads, progress=progress
    )
    assert num_bytes == progress.num_bytes == NUM_BYTES
    np.testing.assert_array_equal(target, child.expected)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pieces=st.lists(st.tuples(st.integers(0, NUM_BYTES - 70_000), st.integers(0, 70_000))),
    num_threads=st.integers(1, 3),
)
def test_many_segments(child: Child, pieces: list[tuple[int, int]], num_threads: int) -> None:
    total = sum(length for _, length in pieces)
    target = np.zeros(total + 1, dtype=np.uint8)
    rows, expected, offset = [], [], 0
    for start, length in pieces:
        rows.append((child.block_ptr + start, target.ctypes.data + offset, length))
        expected.append(child.expected[start : start + length])
        offset += length
    table = segment_table(*rows)
    num_bytes = native.read_process_segments(child.process.pid, table, num_threads=num_threads)
    assert num_bytes == total
    np.testing.assert_array_equal(target[:total], np.concatenate([*expected, target[:0]]))


def test_more_runs_than_one_call_takes(child: Child) -> None:
    """Columns [3, 7) of 4,000 rows of 256 bytes, and every row twice by a zero stride."""
    target = np.zeros((2, 4000, 4), dtype=np.uint8)
    table = segment_table((child.block_ptr + 3, target.ctypes.data, 4))
    table[0, 4:10] = (2, 0, target.strides[0], 4000, 256, 4)
    num_bytes = native.read_process_segments(child.process.pid, table, num_threads=2)
    assert num_bytes == target.size
    expected = child.expected[: 4000 * 256].reshape(4000, 256)[:, 3:7]
    np.testing.assert_array_equal(target, np.stack([expected, expected]))


def test_raised_cancel_flag_stops_before_any_byte(child: Child) -> None:
    target = np.zeros(NUM_BYTES, dtype=np.uint8)
    cancel = native.CancelFlag()
    cancel.set()
    table = segment_table((child.block_ptr, target.ctypes.data, NUM_BYTES))
    assert native.read_process_segments(child.process.pid, table, cancel=cancel) == 0
    assert not target.any()


def test_unmapped_address_names_process_and_address(child: Child) -> None:
    target = np.zeros(4096, dtype=np.uint8)
    table = segment_table((0x1000, target.ctypes.data, 4096))
    with pytest.raises(OSError, match=rf"0x1000 in process {child.process.pid}") as caught:
        native.read_process_segments(child.process.pid, table)
    assert caught.value.errno == errno.EFAULT


def test_dead_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    target = np.zeros(8, dtype=np.uint8)
    table = segment_table((0x10000, target.ctypes.data, 8))
    with pytest.raises(ProcessLookupError, match=f"process {process.pid}"):
        native.read_process_segments(process.pid, table)


def test_process_that_dies_later() -> None:
    child = Child()
    target = np.zeros(NUM_BYTES, dtype=np.uint8)
    table = segment_table((child.block_ptr, target.ctypes.data, NUM_BYTES))
    child.close()
    with pytest.raises(ProcessLookupError):
        native.read_process_segments(child.process.pid, table)
    assert not target.any()


def test_own_process() -> None:
    source = np.arange(100, dtype=np.uint8)
    target = np.zeros(100, dtype=np.uint8)
    table = segment_table((source.ctypes.data, target.ctypes.data, 100))
    assert native.read_process_segments(os.getpid(), table) == 100
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize(
    ("pid", "column", "value", "message"),
    [
        (0, "convert", 0, "pid is 0"),
        (-1, "convert", 0, "pid is -1"),
        (1, "convert", 1, "row 0: convert is not supported"),
        (1, "num_bytes", -4, "row 0: num_bytes is -4"),
    ],
)
def test_bad_arguments_are_refused(pid: int, column: str, value: Any, message: str) -> None:
    target = np.zeros(8, dtype=np.uint8)
    table = segment_table((0x10000, target.ctypes.data, 8))
    table[0, native.SEGMENT_COLUMNS.index(column)] = value
    with pytest.raises(ValueError, match=message):
        native.read_process_segments(pid, table)
