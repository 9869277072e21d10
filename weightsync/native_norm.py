"""RMSNorm of rows by the native core, on addresses; see ``csrc/include/weightsync/norm.hpp``."""

from __future__ import annotations

from weightsync import native
from weightsync.native_attention import FLOAT_TYPES


def norm_rows(
    dtype: str,
    eps: float,
    sizes: tuple[int, int, int],
    strides: tuple[int, int],
    pointers: tuple[int, int, int],
    *,
    num_threads: int | None = None,
) -> None:
    """[rows, groups, width] (``sizes``), rows and groups ``strides`` elements apart, into contiguous
    memory; ``pointers`` are input, weight [width] and output.

    ``dtype`` is one of ``FLOAT_TYPES``, of all three. Releases the interpreter lock. Raises ValueError
    for sizes that cannot be.
    """
    threads = native.default_num_threads() if num_threads is None else num_threads
    native.extension.norm_rows(FLOAT_TYPES[dtype], eps, *sizes, *strides, *pointers, threads)
