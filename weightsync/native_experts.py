"""Experts on a CUDA device: routing, sorting by expert, grouped products, sums. On that device's addresses.

bfloat16 throughout. Sizes and addresses travel as tuples in the order of the structs in
``csrc/include/weightsync/grouped_product.hpp`` and ``expert_rows.hpp``. Every call enqueues on a stream,
waits for nothing, may be captured in a graph, and raises :class:`CudaError` if CUDA refuses and
``ValueError`` for sizes that the kernels do not have. Indices are not checked.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from weightsync import native
from weightsync.native_cuda_core import Launch

_core: Final = native.extension

MAX_EXPERTS: Final = _core.MAX_EXPERTS
#: Experts that a row goes to.
MAX_PICKS: Final = _core.MAX_PICKS
#: Tile shapes of a grouped product, 1 to this.
NUM_TILE_SHAPES: Final = _core.NUM_TILE_SHAPES


class GroupedSizes(NamedTuple):
    """``weight_rows`` are those of one expert; ``tile_shape`` 0 is chosen by the number of rows."""

    num_rows: int
    num_experts: int
    weight_rows: int
    inner: int
    row_stride: int  # of states, elements
    tile_shape: int = 0


class GroupedPointers(NamedTuple):
    states: int
    state_rows: int  # int32 [rows]; 0: row r is states[r]
    weights: int
    offsets: int
    output: int


def grouped_product(
    sizes: GroupedSizes, pointers: GroupedPointers, launch: Launch, *, is_gated: bool
) -> None:
    """Rows sorted by expert times each one's expert's weight; if gated, silu(gate) * up of that."""
    _core.cuda_grouped_product(is_gated, sizes, pointers, *launch)


def route_rows(
    sizes: tuple[int, int, int],
    pointers: tuple[int, int, int],
    launch: Launch,
    *,
    is_normalised: bool,
) -> None:
    """``sizes``: rows, experts, picks of a row; ``pointers``: logits, experts (int32), weights."""
    _core.cuda_route_rows(is_normalised, sizes, pointers, *launch)


class PickSizes(NamedTuple):
    num_rows: int
    num_picks: int
    first_expert: int
    num_here: int


class PickPointers(NamedTuple):
    """All int32; ``places`` is -1 for a pick of an expert that is not here."""

    experts: int
    offsets: int
    rows: int
    places: int


def sort_picks(sizes: PickSizes, pointers: PickPointers, launch: Launch) -> None:
    """Where picks lie sorted by expert."""
    _core.cuda_sort_picks(sizes, pointers, *launch)


def combine_rows(
    sizes: tuple[int, int, int], pointers: tuple[int, int, int, int], launch: Launch
) -> None:
    """``sizes``: rows, picks of a row, width; ``pointers``: states, weights, places, output."""
    _core.cuda_combine_rows(sizes, pointers, *launch)
