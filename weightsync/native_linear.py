"""Products of rows with a matrix of 16-bit floats by the native core, on addresses.

See ``csrc/include/weightsync/linear.hpp`` for what decides an element's bits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from weightsync import native

#: Code of each dtype, by torch's name without the prefix.
LINEAR_TYPES: Final = {"bfloat16": 1, "float16": 2}


class LinearSizes(NamedTuple):
    """Counts, and the distance of rows of the states in elements."""

    num_rows: int
    num_inputs: int
    num_outputs: int
    states_stride: int


class LinearPointers(NamedTuple):
    """Addresses; they must stay alive and unmoved until the call returns. ``bias`` 0: none."""

    states: int
    weight: int
    bias: int
    output: int


def multiply_rows(
    dtype: str, sizes: LinearSizes, pointers: LinearPointers, *, num_threads: int | None = None
) -> None:
    """``output = states @ weight.T + bias``: [rows, inputs], [outputs, inputs] -> [rows, outputs].

    Rows of the states lie ``states_stride`` apart, everything else is contiguous. Releases the
    interpreter lock. Raises ValueError for sizes that cannot be.
    """
    threads = native.default_num_threads() if num_threads is None else num_threads
    native.extension.multiply_rows(LINEAR_TYPES[dtype], sizes, pointers, threads)
