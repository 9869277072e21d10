"""SwiGLU's product, and who computes it."""

from __future__ import annotations

from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.core.cuda_rows import cuda_gated
from engine_adapter.core.products import Products, has_kernels
from weightsync.native_attention import FLOAT_TYPES
from weightsync.native_gate import gate_rows

_WORDS: Final = {getattr(torch, word): word for word in FLOAT_TYPES}


class Gate(Protocol):
    """silu(gate) * up, element by element."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[R, 2 x width] with gate before up -> [R, width]."""
        ...


def gated(gate_up: Tensor) -> Tensor:
    """By torch, as transformers does. It computes the end of a thread's share by another path than
    the rest, so in fp32 an element's bits depend on the number of rows and threads."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def native_gated(gate_up: Tensor) -> Tensor:
    """By the native core (CPU): an element's bits depend on itself alone."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, width), dtype=gate_up.dtype)
    if output.numel():
        gate_rows(
            _WORDS[gate_up.dtype],
            num_rows,
            width,
            max(gate_up.stride(0), 2 * width),
            gate_up.data_ptr(),
            output.data_ptr(),
            num_threads=torch.get_num_threads(),
        )
    return output


def choose_gate(products: Products, dtype: torch.dtype, device: torch.device) -> Gate:
    """Torch's where its bits are asked for (``products='torch'``) or nothing else is there."""
    if products is Products.TORCH or dtype not in _WORDS:
        return gated
    if device.type == "cpu":
        return native_gated
    return cuda_gated if has_kernels(device) else gated
