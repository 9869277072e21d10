"""RMSNorm, and who computes it."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from engine_adapter.core.cuda_rows import cuda_add_norm, cuda_norm
from engine_adapter.core.products import Products, has_kernels
from weightsync.native_attention import FLOAT_TYPES
from weightsync.native_norm import norm_rows

_WORDS: Final = {getattr(torch, word): word for word in FLOAT_TYPES}


class Norm(Protocol):
    """RMSNorm (arXiv 1910.07467) over the last dimension: fp32, rounded, then scaled."""

    def __call__(self, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[R, ..., width] and [width] -> [R, ..., width]."""
        ...


class AddNorm(Protocol):
    """A residual sum and its norm."""

    def __call__(
        self, states: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """[R, width] each -> (states + delta, its norm); may overwrite ``states``."""
        ...


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """By torch, in transformers' order of operations."""
    wide = states.float()
    variance = (wide * wide).mean(-1, keepdim=True)  # the bits of pow(2), a good deal sooner
    return weight * (wide * torch.rsqrt(variance + eps)).to(states.dtype)


def native_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """By the native core (CPU), in one pass: states [R, width] or [R, groups, width]."""
    if states.stride(-1) != 1:
        states = states.contiguous()
    output = torch.empty(states.shape, dtype=states.dtype)
    if output.numel():
        num_groups = states.shape[1] if states.dim() == 3 else 1
        norm_rows(
            _WORDS[states.dtype],
            eps,
            (states.shape[0], num_groups, states.shape[-1]),
            (states.stride(0), states.stride(1) if states.dim() == 3 else 0),
            (states.data_ptr(), weight.data_ptr(), output.data_ptr()),
            num_threads=torch.get_num_threads(),
        )
    return output


def choose_norm(products: Products, dtype: torch.dtype, device: torch.device) -> Norm:
    """Torch's where its bits are asked for (``products='torch'``) or nothing else is there."""
    if products is Products.TORCH or dtype not in _WORDS:
        return rms_norm
    if device.type == "cpu":
        return native_norm
    return cuda_norm if has_kernels(device) else rms_norm


def choose_add_norm(norm: Norm) -> AddNorm:
    """In one pass where the norm's device has that."""
    if norm is cuda_norm:
        return cuda_add_norm

    def add_norm(
        states: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        states = states + delta
        return states, norm(states, weight, eps)

    return add_norm
