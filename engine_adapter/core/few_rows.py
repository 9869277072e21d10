"""Products of a few rows by our own kernel: what a decode step of few requests waits for."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine_adapter.core.cuda_launch import launch_on
from weightsync.native_few_rows import (
    MOST_FEW_ROWS,
    FewRowsPointers,
    FewRowsSizes,
    few_rows_product,
    takes_few_rows,
)

_ALIGNMENT: Final = 16  # bytes, of states and weight


def takes(states: Tensor, weight: Tensor, *, is_gated: bool = False) -> bool:
    """Whether :func:`multiply_few` has states [R, in] and a weight [out, in] like these."""
    return (
        states.is_cuda
        and states.dtype is torch.bfloat16
        and weight.dtype is torch.bfloat16
        and 1 <= states.shape[0] <= MOST_FEW_ROWS
        and states.shape[1] == weight.shape[1]
        and states.stride(1) == 1
        and (states.shape[0] == 1 or states.stride(0) >= states.shape[1])
        and weight.is_contiguous()
        and states.data_ptr() % _ALIGNMENT == weight.data_ptr() % _ALIGNMENT == 0
        and takes_few_rows(_sizes(states, weight), _index(states), is_gated=is_gated)
    )


def multiply_few(states: Tensor, weight: Tensor, *, is_gated: bool = False) -> Tensor:
    """``states @ weight.T`` [R, out]; if gated, the weight is gate before up and the result is
    silu(gate) * up [R, out / 2], rounded at each step."""
    width = weight.shape[0] // (2 if is_gated else 1)
    output = torch.empty((states.shape[0], width), dtype=states.dtype, device=states.device)
    pointers = FewRowsPointers(states.data_ptr(), weight.data_ptr(), output.data_ptr())
    few_rows_product(_sizes(states, weight), pointers, launch_on(states.device), is_gated=is_gated)
    return output


def _sizes(states: Tensor, weight: Tensor) -> FewRowsSizes:
    num_rows, inner = states.shape
    return FewRowsSizes(num_rows, weight.shape[0], inner, max(states.stride(0), inner))


def _index(states: Tensor) -> int:
    index = states.device.index
    return torch.cuda.current_device() if index is None else index
