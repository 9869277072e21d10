"""The door to the native core: the only module that imports the extension.

Tables are C-contiguous int64 arrays with one segment a row. Addresses inside them are the caller's
promise: memory that a table names must stay alive and, unless the call was cancelled, unmoved until
the call returns. Every call releases the interpreter lock.
"""

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

try:
    from weightsync import _native
except ImportError as error:
    raise ImportError(
        f"the native extension weightsync._native could not be imported ({error}); "
        "build it with: pip install ."
    ) from error

if TYPE_CHECKING:
    from weightsync._native import BuildInfo
    from weightsync.native_cuda import (
        CopyDigestTableCuda,
        CudaError,
        DigestTableCuda,
        SegmentTableCuda,
    )

__all__ = [
    "CONVERT_FP32_TO_BF16",
    "CONVERT_NONE",
    "DIGEST_COLUMNS",
    "SEGMENT_COLUMNS",
    "CancelFlag",
    "CopyDigestTableCuda",
    "CudaError",
    "DigestTableCuda",
    "Progress",
    "SegmentTableCuda",
    "build_info",
    "copy_segments",
    "cuda_unavailable_reason",
    "default_num_threads",
    "digest_segments",
    "has_cuda",
    "memcpy_bytes",
    "prefault",
    "read_process_segments",
    "same_objects",
    "tensor_state",
]

Int64Array = npt.NDArray[np.int64]

SEGMENT_COLUMNS: Final = (
    "source_ptr",
    "target_ptr",
    "num_bytes",
    "convert",
    "count0",
    "source_stride0_bytes",
    "target_stride0_bytes",
    "count1",
    "source_stride1_bytes",
    "target_stride1_bytes",
    "count2",
    "source_stride2_bytes",
    "target_stride2_bytes",
)
"""Columns of a segment table. `num_bytes` is one contiguous run in source bytes; dim 0 is outermost
and an unused dim has count 1. Source strides may be zero or negative."""

DIGEST_COLUMNS: Final = (
    "ptr",
    "word_bytes",
    "num_words",
    "seed",
    "start_index",
    "convert",
    "count0",
    "stride0_bytes",
    "index_stride0",
    "count1",
    "stride1_bytes",
    "index_stride1",
    "count2",
    "stride2_bytes",
    "index_stride2",
)
"""Columns of a digest table. `num_words` is one contiguous run, `seed` the bits of a uint64;
indices count words of the whole tensor, row-major in its wire form."""

CONVERT_NONE: Final = 0
CONVERT_FP32_TO_BF16: Final = 1
"""Values of the `convert` column; rounding is to nearest even and every NaN becomes 0x7FC0."""

MAX_DEFAULT_THREADS: Final = 8

extension: Final = _native
"""The extension itself, for :mod:`weightsync.native_cuda` alone."""

_built_columns = (_native.NUM_SEGMENT_COLUMNS, _native.NUM_DIGEST_COLUMNS)
if _built_columns != (len(SEGMENT_COLUMNS), len(DIGEST_COLUMNS)):
    raise ImportError(
        "weightsync._native was built from other sources than weightsync/native.py; "
        "rebuild it with: pip install ."
    )


def same_objects(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the very same objects in the same order; none of them is called."""
    return _native.same_objects(left, right)


def tensor_state(exchange: object, tensors: list[Any]) -> bytes:
    """Pointer, device, dtype, shape and strides of every tensor, as bytes that are equal if all are.

    ``exchange`` is the DLPack C exchange API of the framework whose tensors these are, a capsule.
    Raises ``BufferError``, or what the framework raises, for a tensor that it cannot describe.
    """
    return _native.tensor_state(exchange, tensors)


class CancelFlag:
    """Stops a running native call from another thread; may be raised at any time, and reused."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = np.zeros(1, dtype=np.int32)

    @property
    def ptr(self) -> int:
        """Address of the int32, valid while this object lives."""
        return self._value.ctypes.data

    @property
    def is_set(self) -> bool:
        return bool(self._value[0])

    def set(self) -> None:
        self._value[0] = 1

    def clear(self) -> None:
        self._value[0] = 0


class Progress:
    """Source bytes done so far by the native calls it was given to, readable while they run."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = np.zeros(1, dtype=np.int64)

    @property
    def ptr(self) -> int:
        """Address of the int64, valid while this object lives."""
        return self._value.ctypes.data

    @property
    def num_bytes(self) -> int:
        return int(self._value[0])

    def reset(self) -> None:
        self._value[0] = 0


def default_num_threads() -> int:
    """Threads a call uses if not told: the CPUs this process may run on, at most 8."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_THREADS)


def copy_segments(
    table: Int64Array,
    *,
    num_threads: int | None = None,
    cancel: CancelFlag | None = None,
    progress: Progress | None = None,
) -> int:
    """Copies every segment of `table` (int64 [num_segments, 13]) in this process.

    Returns the source bytes copied: all of them, or fewer if `cancel` was set. Targets must not
    overlap each other or a source. Raises ValueError for a bad table, before any byte moves.
    """
    check_table(table, SEGMENT_COLUMNS, "segment")
    return _native.copy_segments(
        table.ctypes.data,
        table.shape[0],
        _threads(num_threads),
        0 if cancel is None else cancel.ptr,
        0 if progress is None else progress.ptr,
    )


def read_process_segments(
    pid: int,
    table: Int64Array,
    *,
    num_threads: int | None = None,
    cancel: CancelFlag | None = None,
    progress: Progress | None = None,
) -> int:
    """Like `copy_segments`, with every `source_ptr` an address in process `pid`.

    Raises OSError with errno if the kernel refuses (ESRCH: no such process, EPERM: not allowed,
    EFAULT: an address is not mapped); what was read before stays in the targets. Raises ValueError
    for a bad table or one that converts.
    """
    check_table(table, SEGMENT_COLUMNS, "segment")
    return _native.read_process_segments(
        pid,
        table.ctypes.data,
        table.shape[0],
        _threads(num_threads),
        0 if cancel is None else cancel.ptr,
        0 if progress is None else progress.ptr,
    )


def digest_segments(table: Int64Array, *, num_threads: int | None = None) -> npt.NDArray[np.uint64]:
    """The digest of every row of `table` (int64 [num_rows, 15]) as uint64 [num_rows].

    Digests of disjoint parts of a tensor add up, modulo 2^64, to the digest of the whole; a part
    may start and end at any word. Raises ValueError for a bad table.
    """
    check_table(table, DIGEST_COLUMNS, "digest")
    digests = np.zeros(table.shape[0], dtype=np.uint64)
    _native.digest_segments(
        table.ctypes.data, table.shape[0], digests.ctypes.data, _threads(num_threads)
    )
    return digests


def memcpy_bytes(
    target_ptr: int, source_ptr: int, num_bytes: int, *, num_threads: int | None = None
) -> None:
    """One memcpy cut over threads: the ceiling that `copy_segments` is measured against."""
    _native.memcpy_bytes(target_ptr, source_ptr, num_bytes, _threads(num_threads))


def prefault(ptr: int, num_bytes: int) -> None:
    """Makes every page of a range present and writable, contents kept. Raises OSError."""
    _native.prefault(ptr, num_bytes)


def has_cuda() -> bool:
    """Whether the extension was built with CUDA and a device can be used."""
    return _native.has_cuda()


def cuda_unavailable_reason() -> str | None:
    """Why `has_cuda` is false: "built without CUDA", "no driver", "no device", or CUDA's error."""
    return _native.cuda_unavailable_reason() or None


def build_info() -> "BuildInfo":
    """Compiler, the kernels picked for this CPU, and the CUDA version, None if it cannot be used."""
    info = _native.build_info()
    info["cuda"] = _native.cuda_version() if has_cuda() else None
    return info


def __getattr__(name: str) -> Any:
    """The CUDA twins, from :mod:`weightsync.native_cuda`."""
    if name in ("CopyDigestTableCuda", "CudaError", "DigestTableCuda", "SegmentTableCuda"):
        from weightsync import native_cuda

        return getattr(native_cuda, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _threads(num_threads: int | None) -> int:
    return default_num_threads() if num_threads is None else num_threads


def check_table(table: Int64Array, columns: tuple[str, ...], kind: str) -> None:
    """Raises ValueError unless `table` has the form that native calls take."""
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != len(columns):
        raise ValueError(
            f"{kind} table has dtype {table.dtype} and shape {table.shape}, "
            f"expected int64 [rows, {len(columns)}]"
        )
    if not table.flags.c_contiguous:
        raise ValueError(f"{kind} table is not C-contiguous; use np.ascontiguousarray")
