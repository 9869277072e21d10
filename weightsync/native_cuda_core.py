"""The inference core's kernels on a CUDA device, on addresses of that device.

Sizes and addresses travel as tuples in the order of the structs in ``csrc/include/weightsync``
(``cuda_attention.hpp``, ``cuda_core.hpp``). Every call enqueues on ``stream`` (a ``cudaStream_t`` as
an integer), waits for nothing, may be captured in a graph, and raises :class:`CudaError` if CUDA
refuses. Indices are not checked: what they point at must be there until the work is done.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from weightsync import native
from weightsync.native_attention import FLOAT_TYPES

_core: Final = native.extension

#: Query heads of a group times rows that one warp, and one tile of rows, has.
WARP_ENTRIES, TILE_ENTRIES = _core.ATTENTION_ENTRIES

SPLIT_ITEM_BYTES: Final = 16
TILE_ITEM_BYTES: Final = 8
COUNTS_BYTES: Final = 8

#: Numbers that ``sample_rows`` leaves of a row: log-prob of its token by logits and by scores, the
#: largest logit, and the logarithm of the sum of exp(logit - largest).
SAMPLE_NUMBERS: Final = 4


class Launch(NamedTuple):
    """Where work is enqueued."""

    stream: int
    device: int


class CudaAttentionSizes(NamedTuple):
    num_rows: int
    num_sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    table_width: int
    query_stride: int  # elements


class CudaAttentionPointers(NamedTuple):
    query: int
    output: int
    cache_keys: int
    cache_values: int
    query_starts: int
    context_lens: int
    block_tables: int


class AttentionLimits(NamedTuple):
    """Room of a step's lists. ``partial_entries`` is the most entries of a sequence that is split;
    stages and warps of 0 are chosen by the kernel."""

    max_split: int
    max_tiles: int  # 0: every sequence is split
    partial_entries: int
    num_stages: int = 0
    num_warps: int = 0


class AttentionWorkPointers(NamedTuple):
    split: int
    tiles: int
    counts: int
    first_split: int
    partials: int


def no_tensor_cores_reason(dtype: str, num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    """What the tensor cores' kernels cannot do, or nothing; :func:`attend_general` can."""
    return _core.no_tensor_cores_reason(FLOAT_TYPES[dtype], num_heads, num_kv_heads, head_dim)


def plan_attention(
    sizes: CudaAttentionSizes,
    pointers: CudaAttentionPointers,
    limits: AttentionLimits,
    work: AttentionWorkPointers,
    launch: Launch,
) -> None:
    """Make the lists of a step, which serve all its layers."""
    _core.cuda_plan_attention(1, 1.0, sizes, pointers, limits, work, *launch)


def attend(
    dtype: str,
    scale: float,
    sizes: CudaAttentionSizes,
    pointers: CudaAttentionPointers,
    limits: AttentionLimits,
    work: AttentionWorkPointers,
    launch: Launch,
) -> None:
    """Attend on tensor cores; K and V of the step's rows are in the cache, the lists are made."""
    _core.cuda_attend(FLOAT_TYPES[dtype], scale, sizes, pointers, limits, work, *launch)


def attend_general(
    dtype: str,
    scale: float,
    sizes: CudaAttentionSizes,
    pointers: CudaAttentionPointers,
    launch: Launch,
) -> None:
    """Attend with the CPU's bits, whatever the dtype, head size and group; slow."""
    _core.cuda_attend_general(FLOAT_TYPES[dtype], scale, sizes, pointers, *launch)


def norm_rows(
    dtype: str,
    eps: float,
    sizes: tuple[int, int, int, int, int],
    pointers: tuple[int, int, int],
    launch: Launch,
) -> None:
    """``sizes``: rows, groups, width, row and group stride; ``pointers``: input, weight, output."""
    _core.cuda_norm_rows(FLOAT_TYPES[dtype], eps, sizes, pointers, *launch)


def add_norm_rows(
    dtype: str,
    eps: float,
    sizes: tuple[int, int],
    pointers: tuple[int, int, int, int],
    launch: Launch,
) -> None:
    """states += delta, output = norm of that. ``sizes``: rows, width; ``pointers``: states, delta,
    weight, output; all contiguous."""
    _core.cuda_add_norm_rows(FLOAT_TYPES[dtype], eps, sizes, pointers, *launch)


def gate_rows(
    dtype: str, sizes: tuple[int, int, int], pointers: tuple[int, int], launch: Launch
) -> None:
    """``sizes``: rows, width, row stride; ``pointers``: gate and up, output."""
    _core.cuda_gate_rows(FLOAT_TYPES[dtype], sizes, pointers, *launch)


MAX_PEERS: Final = _core.MAX_PEERS
MAILBOX_HEAD_BYTES: Final = _core.MAILBOX_HEAD_BYTES
mailbox_bytes: Final = _core.mailbox_bytes


class PeerSumSizes(NamedTuple):
    """``num_bytes`` of a part and ``slot_bytes`` are multiples of 16."""

    num_bytes: int
    slot_bytes: int
    limit_ns: int
    rank: int
    num_ranks: int


def peer_sum(
    dtype: str, sizes: PeerSumSizes, part: int, total: int, mailboxes: list[int], launch: Launch
) -> None:
    """The sum over ranks, in fp32 from rank 0 up, rounded once; see ``peer_sum.hpp``.

    ``mailboxes``: each rank's, as mapped here. If a rank does not come in time, this sum and all later
    ones are NaN on every rank.
    """
    _core.cuda_peer_sum(FLOAT_TYPES[dtype], sizes, (part, total), mailboxes, *launch)


class HeadSizes(NamedTuple):
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_stride: int  # elements


class HeadPointers(NamedTuple):
    """``query_norm`` and ``key_norm`` are 0 for a family without; the query stays in ``heads``."""

    heads: int
    query_norm: int
    key_norm: int
    cos: int
    sin: int
    positions: int
    slot_mapping: int
    cache_keys: int
    cache_values: int


def place_heads(
    dtype: str, eps: float, sizes: HeadSizes, pointers: HeadPointers, launch: Launch
) -> None:
    """Norm and rotate query and key, and put key and value into the cache."""
    _core.cuda_place_heads(FLOAT_TYPES[dtype], eps, sizes, pointers, *launch)


class SamplePointers(NamedTuple):
    logits: int
    drawn_from: int  # 0: the scores themselves
    seeds: int
    positions: int
    noise_scales: int
    temperatures: int
    given: int
    tokens: int
    numbers: int  # fp32 [rows, SAMPLE_NUMBERS]
    scratch: int


def sample_scratch_bytes(num_rows: int, vocab_size: int) -> int:
    return _core.sample_scratch_bytes(num_rows, vocab_size)


def sample_rows(
    dtype: str, sizes: tuple[int, int, int], pointers: SamplePointers, launch: Launch
) -> None:
    """``sizes``: rows, vocabulary, row stride. Tokens and their log-probs; see the header."""
    _core.cuda_sample_rows(FLOAT_TYPES[dtype], sizes, pointers, *launch)


def read_bytes(source_ptr: int, num_bytes: int, out_ptr: int, launch: Launch) -> None:
    """Read memory and do nothing with it, as a yardstick of bandwidth; ``out_ptr`` is of 4 bytes."""
    _core.cuda_read_bytes(source_ptr, num_bytes, out_ptr, *launch)


class DecodeRowPointers(NamedTuple):
    """int64, but for ``context_lens`` and ``block_tables`` [rows, width], which are int32."""

    steps: int
    token_ids: int
    positions: int
    next_positions: int
    slot_mapping: int
    context_lens: int
    block_tables: int
    tokens: int  # 0 before a step


def place_rows(
    sizes: tuple[int, int, int], pointers: DecodeRowPointers, launch: Launch | None
) -> None:
    """Before a decode step, where rows write and how far they see. ``sizes``: rows, width of the block
    tables, page size; without ``launch`` on the host."""
    if launch is None:
        _core.place_rows(sizes, pointers)
    else:
        _core.cuda_place_rows(sizes, pointers, *launch)


def advance_rows(
    sizes: tuple[int, int, int], pointers: DecodeRowPointers, launch: Launch | None
) -> None:
    """After a decode step: the tokens that were drawn come next."""
    if launch is None:
        _core.advance_rows(sizes, pointers)
    else:
        _core.cuda_advance_rows(sizes, pointers, *launch)
