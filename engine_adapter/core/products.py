"""Matrix products whose rows do not depend on each other, and who computes them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.core.batch import padded_rows
from engine_adapter.core.cuda_products import CudaProduct
from weightsync import native
from weightsync.errors import ConfigError
from weightsync.native_linear import LINEAR_TYPES, LinearPointers, LinearSizes, multiply_rows

_WORDS: Final = {getattr(torch, word): word for word in LINEAR_TYPES}


class Product(Protocol):
    """``states @ weight.T + bias``; a row's bits depend on that row alone."""

    def __call__(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """states [R, in], weight [out, in] contiguous, bias [out] -> [R, out]."""
        ...


class Products(StrEnum):
    """Who computes products."""

    AUTO = "auto"  # the faster of the two on this machine, for this dtype
    TORCH = "torch"  # torch's libraries, rows padded: bit-equal to transformers padded alike
    NATIVE = "native"  # our own kernel: 16-bit floats on a CPU


def parse_products(word: Products | str) -> Products:
    """Raises :class:`ConfigError` listing what is known."""
    try:
        return Products(word)
    except ValueError:
        raise ConfigError(f"products {word!r} is not known: {', '.join(Products)}") from None


def torch_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` with rows padded to a multiple of ``ROW_PAD``."""
    num_rows = states.shape[0]
    missing = padded_rows(num_rows) - num_rows
    if not missing:
        return F.linear(states, weight, bias)
    return F.linear(F.pad(states, (0, 0, 0, missing)), weight, bias)[:num_rows]


def native_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sums in fp32 in an order of its own, rounded once; threads as torch's."""
    if states.stride(1) != 1:
        states = states.contiguous()
    num_rows, num_inputs = states.shape
    output = torch.empty((num_rows, weight.shape[0]), dtype=states.dtype)
    if not output.numel():
        return output
    sizes = LinearSizes(num_rows, num_inputs, weight.shape[0], max(states.stride(0), num_inputs))
    pointers = LinearPointers(
        states.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
    )
    threads = torch.get_num_threads()
    multiply_rows(_WORDS[states.dtype], sizes, pointers, num_threads=threads)
    return output


def has_kernels(device: torch.device) -> bool:
    """Whether our CUDA kernels run on ``device``."""
    return device.type == "cuda" and not native.extension.cuda_unavailable_reason()


def choose_product(products: Products, dtype: torch.dtype, device: torch.device) -> Product:
    """Who computes for a model of ``dtype`` on ``device``; decided once, for all its steps.

    Raises :class:`ConfigError` if the native kernel is asked for what it does not compute.
    """
    is_possible = device.type == "cpu" and dtype in _WORDS
    if products is Products.NATIVE and not is_possible:
        raise ConfigError(
            f"products='native' computes {', '.join(LINEAR_TYPES)} on the CPU, not {dtype} on "
            f"{device}; use products='torch'"
        )
    if products is not Products.TORCH and has_kernels(device):
        return CudaProduct()
    if products is Products.TORCH or not is_possible:
        return torch_product
    # Without instructions for them, libraries compute 16-bit floats about ten times slower.
    is_fast = dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch_product if products is Products.AUTO and is_fast else native_product
