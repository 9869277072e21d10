"""QK-norm and rotary embedding by the native core, on addresses.

Sizes and addresses travel as tuples in the order of ``RotatedRows`` in
``csrc/include/weightsync/heads.hpp``; they must stay alive and unmoved until the call returns.
"""

from __future__ import annotations

from typing import NamedTuple

from weightsync import native
from weightsync.native_attention import FLOAT_TYPES


class HeadSizes(NamedTuple):
    """Counts, and the distance of rows in elements."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_stride: int
    num_positions: int  # of the tables


class HeadPointers(NamedTuple):
    """Addresses. Norms are [head_dim] or 0: none; tables [positions, head_dim / 2]."""

    heads: int  # [rows, heads + 2 kv_heads, head_dim]
    query_norm: int
    key_norm: int
    cos: int
    sin: int
    positions: int  # int64


def rotate_rows(
    dtype: str,
    eps: float,
    sizes: HeadSizes,
    pointers: HeadPointers,
    *,
    num_threads: int | None = None,
) -> None:
    """Norm and rotate query and key heads in place; values stay.

    ``dtype`` is one of ``FLOAT_TYPES``, of everything but positions. Releases the interpreter lock.
    Raises ValueError, before anything is written, for sizes or positions that cannot be.
    """
    threads = native.default_num_threads() if num_threads is None else num_threads
    native.extension.rotate_rows(FLOAT_TYPES[dtype], eps, sizes, pointers, threads)
