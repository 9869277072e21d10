"""What every launch of the core's CUDA kernels says: the dtype's word, the stream, the device."""

from __future__ import annotations

from typing import Final

import torch

from weightsync.native_attention import FLOAT_TYPES
from weightsync.native_cuda_core import Launch

WORDS: Final = {getattr(torch, word): word for word in FLOAT_TYPES}


def word_of(dtype: torch.dtype) -> str:
    return WORDS[dtype]


def launch_on(device: torch.device) -> Launch:
    """The stream that torch would use there now."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return Launch(torch.cuda.current_stream(index).cuda_stream, index)
