"""Tokens and log-probs of rows of logits by the native kernel on a CUDA device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine_adapter.core.cuda_launch import launch_on, word_of
from weightsync import native_cuda_core
from weightsync.native_cuda_core import SAMPLE_NUMBERS, SamplePointers


class SampleInputs(NamedTuple):
    """One element a row, on the device of the logits."""

    seeds: Tensor  # int64, the bits of an unsigned one
    positions: Tensor  # int64
    noise_scales: Tensor  # fp32; 0 for the largest score, 1 for a draw
    temperatures: Tensor  # fp32, above 0
    given: Tensor  # int64; -1: to be drawn


class Sampled(NamedTuple):
    """``tokens`` int64 [rows]; ``numbers`` fp32 [rows, 4]: log-prob by logits, by scores, the
    largest logit, and the logarithm of the sum of exp(logit - largest)."""

    tokens: Tensor
    numbers: Tensor

    def log_probs_of(self, logits: Tensor) -> Tensor:
        """Of all tokens of every row, with the bits that ``numbers`` has of one: fp32."""
        return (logits.float() - self.numbers[:, 2:3]) - self.numbers[:, 3:4]


def sample_on_cuda(logits: Tensor, inputs: SampleInputs, drawn_from: Tensor | None) -> Sampled:
    """``logits`` [rows, vocabulary], elements contiguous; ``drawn_from`` are fp32 scores of the same
    shape to draw from instead of logits / temperature."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    device = logits.device
    scratch_bytes = native_cuda_core.sample_scratch_bytes(num_rows, vocab_size)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
    found = Sampled(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty((num_rows, SAMPLE_NUMBERS), dtype=torch.float32, device=device),
    )
    if drawn_from is not None:
        drawn_from = drawn_from.contiguous()
    pointers = SamplePointers(
        logits.data_ptr(),
        0 if drawn_from is None else drawn_from.data_ptr(),
        inputs.seeds.data_ptr(),
        inputs.positions.data_ptr(),
        inputs.noise_scales.data_ptr(),
        inputs.temperatures.data_ptr(),
        inputs.given.data_ptr(),
        found.tokens.data_ptr(),
        found.numbers.data_ptr(),
        scratch.data_ptr(),
    )
    sizes = (num_rows, vocab_size, max(logits.stride(0), vocab_size))
    native_cuda_core.sample_rows(word_of(logits.dtype), sizes, pointers, launch_on(device))
    return found
