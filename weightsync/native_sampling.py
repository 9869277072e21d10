"""Sampling of the native core, on addresses; see ``csrc/include/weightsync/sampling.hpp``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightsync import native


def sample_tokens(
    scores_ptr: int,
    vocab_size: int,
    row_stride: int,
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    noise_scales: npt.NDArray[np.float32],
    *,
    num_threads: int | None = None,
) -> npt.NDArray[np.int64]:
    """A token for each row of scores, fp32 [rows, vocab_size]: the largest of score plus noise.

    Noise is a function of (seed, position, token); a row whose noise scale is 0 gets none. -1 stands
    where no score of a row is a number above -infinity. Releases the interpreter lock.
    """
    num_rows = len(seeds)
    if not num_rows == len(positions) == len(noise_scales):
        raise ValueError(
            f"sampling: {num_rows} seeds, {len(positions)} positions, {len(noise_scales)} scales"
        )
    tokens = np.empty(num_rows, dtype=np.int64)
    native.extension.sample_tokens(
        scores_ptr,
        num_rows,
        vocab_size,
        row_stride,
        np.ascontiguousarray(seeds, dtype=np.uint64).ctypes.data,
        np.ascontiguousarray(positions, dtype=np.int64).ctypes.data,
        np.ascontiguousarray(noise_scales, dtype=np.float32).ctypes.data,
        tokens.ctypes.data,
        native.default_num_threads() if num_threads is None else num_threads,
    )
    return tokens


def gumbel_noise(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """The noise of every token at ``position`` of a request, fp32 [vocab_size]."""
    noise = np.empty(vocab_size, dtype=np.float32)
    native.extension.fill_gumbel_noise(seed, position, vocab_size, noise.ctypes.data)
    return noise


def gumbel_of_bits(
    bits: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Of each of these random bits the noise that they make, and the numbers below and above it that
    the device compares first."""
    bits = np.ascontiguousarray(bits)
    noise, low, high = (np.empty(bits.size, dtype=np.float32) for _ in range(3))
    pointers = (noise.ctypes.data, low.ctypes.data, high.ctypes.data)
    native.extension.gumbel_of_each(bits.ctypes.data, bits.size, *pointers)
    return noise, low, high
