"""The table that applies a delta on a device: its twin on the CPU everywhere, a GPU where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightsync import native
from weightsync.device_patch import DevicePatch, DeviceWrite, Work
from weightsync.device_tables import CPU, DeviceMemory, bytes_at, write_bytes
from weightsync.errors import IntegrityError

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class Block:
    """Memory of a device with known contents."""

    def __init__(self, values: Any, device: str) -> None:
        self._device, self._like = device, values
        if device == CPU:
            self._memory = values.copy()
            self.ptr = self._memory.ctypes.data
        else:
            self._memory = DeviceMemory(values.nbytes, device)
            self.ptr = self._memory.ptr
            write_bytes(self.ptr, values.tobytes(), device)

    def read(self) -> Any:
        if self._device == CPU:
            return self._memory.copy()
        return bytes_at(self.ptr, self._like.nbytes, self._device).view(self._like.dtype)

    def flip(self, index: int) -> None:
        data = self.read()
        data[index] ^= 1
        if self._device == CPU:
            self._memory[:] = data
        else:
            write_bytes(self.ptr, data.tobytes(), self._device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["u1", "u2", "u4"])
def test_it_writes_keeps_checks_and_takes_back(device: str, dtype: str) -> None:
    random = np.random.default_rng(3)
    blocks, writes, expected = [], [], []
    for size, count in ((70_000, 5_000), (4_096, 4_096), (9, 1), (40, 0), (100_000, 2_049)):
        before = random.integers(0, 200, size).astype(dtype)
        positions = np.sort(random.choice(size, count, replace=False)).astype(np.uint32)
        values = random.integers(0, 200, count).astype(dtype)
        block = Block(before, device)
        after = before.copy()
        after[positions] = values
        blocks.append((block, before))
        expected.append(after)
        writes.append(DeviceWrite(block.ptr, positions, values))
    patch = DevicePatch(writes, device)
    assert patch.num_changed == 5_000 + 4_096 + 1 + 2_049
    patch.put()
    for (block, _), after in zip(blocks, expected, strict=True):
        assert (block.read() == after).all()
    blocks[1][0].flip(77)
    assert patch.run(Work.COMPARE)[0] == 1
    patch.take_back()
    for block, before in blocks:
        assert (block.read() == before).all()
    assert patch.run(Work.COMPARE_FORMER) == (0, 0)
    patch.close()
    patch.close()


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device: str) -> None:
    patch = DevicePatch([], device)
    patch.put()
    patch.take_back()
    patch.close()


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_hold_its_new_value_is_noticed(device: str) -> None:
    """A position that is written twice: one of its values is not there afterwards."""
    before = np.arange(5_000, dtype=np.uint16)
    block = Block(before, device)
    positions = np.array([7, 7, 9], dtype=np.uint32)
    patch = DevicePatch([DeviceWrite(block.ptr, positions, before[:3])], device)
    with pytest.raises(IntegrityError, match="1 of 3 elements are not what was written"):
        patch.put()
    patch.close()


def test_bad_rows_are_refused() -> None:
    row = np.array([[8, 8, 8, 8, 1, 3, 0, 0, 1]], dtype=np.uint64)
    with pytest.raises(ValueError, match="elements of 3 bytes"):
        native.extension.run_patch(row.ctypes.data, 1, [0])
    for column in range(4):
        row = np.array([[8, 8, 8, 8, 1, 2, 0, 0, 1]], dtype=np.uint64)
        row[0, column] = 0 if column else 9
        with pytest.raises(ValueError, match="null or unaligned"):
            native.extension.run_patch(row.ctypes.data, 1, [0])
    row = np.array([[8, 8, 8, 8, 1, 2, 0, 0, 3]], dtype=np.uint64)
    with pytest.raises(ValueError, match=r"words of 2\^3"):
        native.extension.run_patch(row.ctypes.data, 1, [0])
    with pytest.raises(ValueError, match="work 4"):
        native.extension.run_patch(row.ctypes.data, 0, [0, 4])
