"""Segment copies and digests on a CUDA device.

The tables are those of :mod:`weightsync.native`; their addresses are device addresses. A table is
checked, cut into units of work and uploaded once, when it is made; `launch` then only enqueues
kernels on a stream: it allocates nothing, waits for nothing, and may be captured in a CUDA graph,
which must not outlive its table. Streams are `cudaStream_t` as integers, 0 being the legacy default
stream. Every call releases the interpreter lock and raises :class:`CudaError` if CUDA refuses; an
error that a running kernel causes shows up at a later call. Tables are not thread-safe.

Making and closing a table allocates, frees and waits: not while a graph is being captured.
"""

from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from weightsync import native
from weightsync.native import DIGEST_COLUMNS, SEGMENT_COLUMNS, Int64Array, check_table

__all__ = ["CopyDigestTableCuda", "CudaError", "DigestTableCuda", "SegmentTableCuda"]

_core: Final = native.extension

CudaError = _core.CudaError
"""A CUDA call failed: `error_name` (such as cudaErrorInvalidDevice), `call`, `device`."""


class _Table:
    """A handle of the extension, and the end of its life."""

    def __init__(self, handle: Any, device: int) -> None:
        self._handle = handle
        self.device = device
        self.num_bytes: int = handle.num_bytes

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def close(self) -> None:
        """Frees the table's device memory, after work in flight. Closing again does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def _opened(self) -> Any:
        if self._handle is None:
            raise ValueError(f"this {type(self).__name__} is closed")
        return self._handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SegmentTableCuda(_Table):
    """`table` (int64 [num_segments, 13]) on `device`, ready to be copied again and again.

    Pointers may be offsets: `launch` adds its bases to them. `num_bytes` counts source bytes.
    Raises ValueError for a bad table.
    """

    def __init__(self, table: Int64Array, device: int) -> None:
        check_table(table, SEGMENT_COLUMNS, "segment")
        handle = _core.CudaSegmentTable(table.ctypes.data, table.shape[0], device)
        super().__init__(handle, device)

    def launch(
        self, stream: int = 0, source_base: int = 0, target_base: int = 0, max_blocks: int = 0
    ) -> None:
        """Enqueues the copy. A graph that captures this keeps the bases it was captured with.

        With `max_blocks` above 0, dense pieces are copied by at most so many blocks: slower, and easy on
        whatever else the device does meanwhile.
        """
        self._opened().launch(stream, source_base, target_base, max_blocks)


class _DigestingTable(_Table):
    """A table whose launches leave digests."""

    def __init__(self, handle: Any, device: int) -> None:
        super().__init__(handle, device)
        self.num_owners: int = handle.num_owners
        self._stream = 0

    def launch(self, stream: int = 0) -> None:
        """Enqueues the work; the digests of the launch before are lost."""
        self._opened().launch(stream)
        self._stream = stream

    def result(self, stream: int | None = None) -> npt.NDArray[np.uint64]:
        """Waits for `stream` and returns the digest of each owner, uint64 [num_owners].

        `stream` is that of the last launch if not given; give it after replaying a graph.
        """
        digests = np.zeros(self.num_owners, dtype=np.uint64)
        waited = self._stream if stream is None else stream
        self._opened().read(waited, digests.ctypes.data)
        return digests


class DigestTableCuda(_DigestingTable):
    """`table` (int64 [num_rows, 15]) on `device`, ready to be digested again and again.

    `owners` (int64 [num_rows]) says to which of `num_owners` digests a row adds; without it each
    row has its own. Raises ValueError for a bad table.
    """

    def __init__(
        self,
        table: Int64Array,
        device: int,
        *,
        owners: Int64Array | None = None,
        num_owners: int | None = None,
    ) -> None:
        check_table(table, DIGEST_COLUMNS, "digest")
        owners_ptr, num_owners = _owners(owners, num_owners, table.shape[0])
        handle = _core.CudaDigestTable(
            table.ctypes.data, table.shape[0], owners_ptr, num_owners, device
        )
        super().__init__(handle, device)


class CopyDigestTableCuda(_DigestingTable):
    """A segment table that digests what it reads while it copies, in one pass over memory.

    Row i of `digest_table` must be the memory that row i of `segment_table` reads, run by run:
    same pointer, bytes, counts, strides and conversion. Raises ValueError if it is not.
    """

    def __init__(
        self,
        segment_table: Int64Array,
        digest_table: Int64Array,
        device: int,
        *,
        owners: Int64Array | None = None,
        num_owners: int | None = None,
    ) -> None:
        check_table(segment_table, SEGMENT_COLUMNS, "segment")
        check_table(digest_table, DIGEST_COLUMNS, "digest")
        num_rows = segment_table.shape[0]
        if digest_table.shape[0] != num_rows:
            raise ValueError(
                f"the digest table has {digest_table.shape[0]} rows, expected {num_rows} "
                "like the segment table"
            )
        owners_ptr, num_owners = _owners(owners, num_owners, num_rows)
        handle = _core.CudaCopyDigestTable(
            segment_table.ctypes.data,
            digest_table.ctypes.data,
            num_rows,
            owners_ptr,
            num_owners,
            device,
        )
        super().__init__(handle, device)


def _owners(owners: Int64Array | None, num_owners: int | None, num_rows: int) -> tuple[int, int]:
    """Address of `owners` or 0, and how many digests there are."""
    if owners is None:
        if num_owners not in (None, num_rows):
            raise ValueError(f"num_owners is {num_owners}, expected {num_rows} without owners")
        return 0, num_rows
    if owners.dtype != np.int64 or owners.shape != (num_rows,) or not owners.flags.c_contiguous:
        raise ValueError(
            f"owners has dtype {owners.dtype} and shape {owners.shape}, "
            f"expected contiguous int64 [{num_rows}]"
        )
    if num_owners is None:
        num_owners = int(owners.max(initial=-1)) + 1
    return owners.ctypes.data, num_owners
