"""SwiGLU's product by the native core, on addresses; see ``csrc/include/weightsync/gate.hpp``."""

from __future__ import annotations

from weightsync import native
from weightsync.native_attention import FLOAT_TYPES


def gate_rows(
    dtype: str,
    num_rows: int,
    width: int,
    row_stride: int,
    gate_up_ptr: int,
    output_ptr: int,
    *,
    num_threads: int | None = None,
) -> None:
    """[rows, 2 x width], gate before up, rows ``row_stride`` elements apart -> [rows, width].

    ``dtype`` is one of ``FLOAT_TYPES``. Releases the interpreter lock. Raises ValueError for sizes
    that cannot be.
    """
    threads = native.default_num_threads() if num_threads is None else num_threads
    native.extension.gate_rows(
        FLOAT_TYPES[dtype], num_rows, width, row_stride, gate_up_ptr, output_ptr, threads
    )
