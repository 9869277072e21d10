"""Paged attention of the native core, on addresses.

Sizes and addresses travel as tuples in the order of ``AttentionStep`` in
``csrc/include/weightsync/attention.hpp``; they must stay alive and unmoved until the call returns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from weightsync import native

#: Code of each dtype, by torch's name without the prefix.
FLOAT_TYPES: Final = {"float32": 0, "bfloat16": 1, "float16": 2}

#: Tokens of one chunk of a row's context; chunks are merged in index order.
ATTENTION_CHUNK: Final[int] = native.extension.ATTENTION_CHUNK


class AttentionSizes(NamedTuple):
    """Counts, and strides of rows in elements."""

    num_rows: int
    num_sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    table_width: int
    query_stride: int
    key_stride: int
    value_stride: int


class AttentionPointers(NamedTuple):
    """Addresses; query, key and value are read by row stride, everything else is contiguous."""

    query: int
    key: int
    value: int
    output: int
    cache_keys: int
    cache_values: int
    slot_mapping: int  # int64
    query_starts: int  # int32, as the two that follow
    context_lens: int
    block_tables: int


def attend_paged(
    dtype: str,
    scale: float,
    sizes: AttentionSizes,
    pointers: AttentionPointers,
    *,
    num_threads: int | None = None,
) -> None:
    """Write K and V of a step into the cache, then attend causally; see the header.

    Releases the interpreter lock. Raises ValueError, before anything is written, for an index out
    of range.
    """
    threads = native.default_num_threads() if num_threads is None else num_threads
    native.extension.attend_paged(FLOAT_TYPES[dtype], scale, sizes, pointers, threads)
