"""Products of a few rows with a large weight on a CUDA device, on addresses of that device. bfloat16.

Sizes and addresses travel as tuples in the order of ``csrc/include/weightsync/few_rows.hpp``. A call
enqueues on a stream, waits for nothing, may be captured in a graph, and begins to read the weight while
what was enqueued before it still runs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from weightsync import native
from weightsync.native_cuda_core import Launch

_core: Final = native.extension

#: Rows that a call may have.
MOST_FEW_ROWS: Final = _core.MOST_FEW_ROWS


class FewRowsSizes(NamedTuple):
    """``weight_rows`` are gate's and up's together if gated; ``row_stride`` is of states, in elements."""

    num_rows: int
    weight_rows: int
    inner: int
    row_stride: int


class FewRowsPointers(NamedTuple):
    states: int
    weight: int
    output: int


def takes_few_rows(sizes: FewRowsSizes, device: int, *, is_gated: bool) -> bool:
    """Whether the kernel has these sizes on this device."""
    return _core.cuda_takes_few_rows(is_gated, sizes, device)


def few_rows_product(
    sizes: FewRowsSizes, pointers: FewRowsPointers, launch: Launch, *, is_gated: bool
) -> None:
    """``states @ weight.T``, or silu(gate) * up of that. Raises ``ValueError`` for sizes that
    :func:`takes_few_rows` says no to, and :class:`CudaError` if CUDA refuses."""
    _core.cuda_few_rows_product(is_gated, sizes, pointers, *launch)
