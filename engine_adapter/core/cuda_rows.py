"""Norms and gates by the native kernels on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_adapter.core.cuda_launch import launch_on, word_of
from weightsync import native_cuda_core


def cuda_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of states [R, width] or [R, groups, width]; squares are added in an order that depends
    on the width alone."""
    if states.stride(-1) != 1:
        states = states.contiguous()
    output = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    is_grouped = states.dim() == 3
    sizes = (
        states.shape[0],
        states.shape[1] if is_grouped else 1,
        states.shape[-1],
        states.stride(0),
        states.stride(1) if is_grouped else 0,
    )
    pointers = (states.data_ptr(), weight.data_ptr(), output.data_ptr())
    launch = launch_on(states.device)
    native_cuda_core.norm_rows(word_of(states.dtype), eps, sizes, pointers, launch)
    return output


def cuda_add_norm(
    states: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``states`` [R, width] contiguous is added to in place; (states, their norm)."""
    delta = delta.contiguous()
    output = torch.empty_like(states)
    native_cuda_core.add_norm_rows(
        word_of(states.dtype),
        eps,
        (states.shape[0], states.shape[1]),
        (states.data_ptr(), delta.data_ptr(), weight.data_ptr(), output.data_ptr()),
        launch_on(states.device),
    )
    return states, output


def cuda_gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [R, 2 x width], with the CPU kernel's bits."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    native_cuda_core.gate_rows(
        word_of(gate_up.dtype),
        (num_rows, width, max(gate_up.stride(0), 2 * width)),
        (gate_up.data_ptr(), output.data_ptr()),
        launch_on(gate_up.device),
    )
    return output
