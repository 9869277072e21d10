"""A delta on weights in device memory: uploaded while the engine generates, applied and read back by two
launches that are waited for once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightsync import native
from weightsync.bucket import align
from weightsync.device_tables import (
    CPU,
    DeviceMemory,
    cuda_errors,
    cuda_index,
    stream_of,
    write_bytes,
)
from weightsync.errors import IntegrityError
from weightsync.native_delta import Place

#: Target, positions, values, former, count, bytes of an element; where the target begins in its tensor,
#: that one's seed, the shift of its words' bytes.
_COLUMNS: Final = 9


class Work(Enum):
    """What a run of a table does; the value is the native code."""

    EXCHANGE = 0
    TAKE_BACK = 1
    COMPARE = 2
    COMPARE_FORMER = 3


class Turn(Enum):
    """When a patch runs beside other work of its device; the value is the priority of its stream."""

    FIRST = -2  # somebody is paused for it: before the samples of an encoder, too
    EQUAL = 0


#: Streams of a device on which nobody else waits.
LANES: Final = {Turn.FIRST: 10, Turn.EQUAL: 11}


@dataclass(frozen=True, eq=False)
class DeviceWrite:
    """Elements of a span at ``target_ptr`` on a device that get new values, both still on the host.
    ``place``: where the span stands; None: what it adds to a digest means nothing."""

    target_ptr: int
    positions: npt.NDArray[np.uint32]
    values: npt.NDArray[Any]
    place: Place | None = None

    @property
    def count(self) -> int:
        return int(self.positions.size)

    @property
    def item_bytes(self) -> int:
        return int(self.values.itemsize)


@dataclass(slots=True, eq=False)
class DecodedWrite:
    """The same with positions (uint32) and values that lie on the device, in memory of somebody else's."""

    target_ptr: int
    positions_ptr: int
    values_ptr: int
    count: int
    item_bytes: int
    place: Place | None = None


class DevicePatch:
    """The writes of a delta on ``device``: positions, values and what they overwrite lie there, 8 bytes a
    changed element of 2 bytes. On the CPU the same code runs over memory of this process, for tests."""

    def __init__(
        self,
        writes: Sequence[DeviceWrite | DecodedWrite],
        device: str,
        turn: Turn = Turn.FIRST,
    ) -> None:
        self._device = device
        offsets, used = [], 0
        for write in writes:
            sizes = _sizes(write)
            starts = []
            for size in sizes:
                starts.append(used)
                used = align(used + size)
            offsets.append(starts)
        self._memory: Any = np.zeros(max(used, 1), dtype=np.uint8) if device == CPU else None
        if device != CPU:
            self._memory = DeviceMemory(max(used, 1), device)
        base = self._memory.ctypes.data if device == CPU else self._memory.ptr
        found = []
        for write, starts in zip(writes, offsets, strict=True):
            if isinstance(write, DecodedWrite):
                at = [write.positions_ptr, write.values_ptr, base + starts[0]]
            else:
                write_bytes(base + starts[0], write.positions.tobytes(), device)
                write_bytes(base + starts[1], write.values.tobytes(), device)
                at = [base + start for start in starts]
            found.append((write.target_ptr, *at, write.count, write.item_bytes, *_stand(write)))
        rows = np.array(found, dtype=np.uint64).reshape(-1, _COLUMNS)
        self.num_changed = sum(write.count for write in writes)
        self._rows = rows
        self._table: Any = None
        if device != CPU:
            index = cuda_index(device)
            with cuda_errors(device):
                self._stream = stream_of(index, LANES[turn], turn.value)
                self._table = native.extension.CudaPatchTable(rows.ctypes.data, len(rows), index)

    def run(self, *works: Work) -> tuple[int, int]:
        """Do them in turn, wait once. How many elements comparisons found to differ, and what all of
        them add to the digests of their tensors, compared with their new values."""
        codes = [work.value for work in works]
        if self._table is None:
            return native.extension.run_patch(self._rows.ctypes.data, len(self._rows), codes)
        with cuda_errors(self._device):
            found: tuple[int, int] = self._table.run(self._stream, codes)
            return found

    def put(self) -> int:
        """Write everything, keeping what was there, and read it back; what that adds to the digests of
        the tensors, of what was overwritten and what is there now. Raises :class:`IntegrityError` unless
        every element holds its new value."""
        return self._run(Work.EXCHANGE, Work.COMPARE, "written")

    def take_back(self) -> None:
        """Undo :meth:`put`. Raises :class:`IntegrityError` if that cannot be seen."""
        self._run(Work.TAKE_BACK, Work.COMPARE_FORMER, "taken back")

    def _run(self, work: Work, comparison: Work, what: str) -> int:
        wrong, growth = self.run(work, comparison)
        if wrong:
            raise IntegrityError(f"{wrong} of {self.num_changed} elements are not what was {what}")
        return growth

    def close(self) -> None:
        """Free what lies on the device. Idempotent."""
        if self._table is not None:
            with cuda_errors(self._device):
                self._table.close()
            self._table = None
            self._memory.close()


def _stand(write: DeviceWrite | DecodedWrite) -> tuple[int, int, int]:
    """First byte, seed and shift of the words."""
    place = write.place
    if place is None:
        return 0, 0, write.item_bytes // 2
    return place.start_element * write.item_bytes, place.seed, place.word_bytes // 2


def _sizes(write: DeviceWrite | DecodedWrite) -> tuple[int, ...]:
    """Bytes of what a patch keeps of a write; what it overwrites comes last."""
    former = write.count * write.item_bytes
    if isinstance(write, DecodedWrite):
        return (former,)
    return (write.positions.nbytes, write.values.nbytes, former)
