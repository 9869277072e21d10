"""Matrix products on a CUDA device whose rows have bits of their own, and the proof that they do.

Libraries choose kernels by the number of rows, and some split the inner dimension among blocks, so
that a row's bits depend on its company. Without a workspace cuBLASLt cannot split; that is asked for
through the environment before cuBLAS starts. Whether it holds for a model's shapes on this device and
with these libraries is tried at start-up; a shape that fails is computed in calls of a fixed number of
rows instead, which is slower and is said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from weightsync.config import set_default_env

#: To be set before the process first uses cuBLAS.
ENVIRONMENT: Final = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
#: Rows of a call where rows would otherwise depend on each other.
FIXED_ROWS: Final = 64

_MOST_ROWS: Final = 513
_ROW_COUNTS: Final = (*range(1, 18), 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 192,
                      255, 256, 257, 384, 511, 512)  # fmt: skip
_SEED: Final = 7

#: Verdicts of this process: (out, in, dtype, device's name) -> whether rows are their own.
_proven: dict[tuple[int, int, torch.dtype, str], bool] = {}


def prepare_cublas() -> None:
    """Ask for products without split sums; harmless to call again.

    A process that has used cuBLAS before keeps what it had, which the proof then shows.
    """
    for name, value in ENVIRONMENT.items():
        set_default_env(name, value)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


class CudaProduct:
    """``states @ weight.T + bias`` by torch; see :class:`Product`."""

    def __init__(self) -> None:
        prepare_cublas()
        self._fixed: set[tuple[int, int]] = set()  # shapes of weights whose rows are not their own

    def __call__(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._fixed and tuple(weight.shape) in self._fixed:
            return fixed_rows_product(states, weight, bias)
        return F.linear(states, weight, bias)

    def prove(
        self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device
    ) -> list[tuple[int, int]]:
        """Try weights of these shapes [out, in]; returns, and remembers, those that need fixed rows."""
        for shape in sorted(set(shapes)):
            key = (*shape, dtype, torch.cuda.get_device_name(device))
            if key not in _proven:
                _proven[key] = rows_are_their_own(shape, dtype, device)
            if not _proven[key]:
                self._fixed.add(shape)
        torch.cuda.empty_cache()
        if self._fixed:
            named = ", ".join(f"[{out}, {inner}]" for out, inner in sorted(self._fixed))
            setting = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
            warnings.warn(
                f"rows of products with weights {named} ({dtype}) depend on the number of rows; they "
                f"are computed {FIXED_ROWS} rows at a time, which is slower. If this process used "
                f"cuBLAS before the model was made, start it with {setting}",
                RuntimeWarning,
                stacklevel=2,
            )
        return sorted(self._fixed)


def fixed_rows_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Every call has :data:`FIXED_ROWS` rows, zeros after the last."""
    num_rows = states.shape[0]
    padded = F.pad(states, (0, 0, 0, -num_rows % FIXED_ROWS))
    parts = [F.linear(part, weight, bias) for part in torch.split(padded, FIXED_ROWS)]
    return torch.cat(parts)[:num_rows]


def rows_are_their_own(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows of ``F.linear`` have the same bits in calls of many numbers of rows, wherever they
    stand in them."""
    generator = torch.Generator(device).manual_seed(_SEED)

    def draw(rows: int, scale: float) -> Tensor:
        values = torch.empty((rows, shape[1]), dtype=dtype, device=device)
        return values.normal_(0.0, scale, generator=generator)

    weight, states = draw(shape[0], shape[1] ** -0.5), draw(_MOST_ROWS, 1.0)
    expected = F.linear(states, weight)
    is_same = torch.ones((), dtype=torch.bool, device=device)
    for index, count in enumerate(_ROW_COUNTS):
        first = index * 37 % (_MOST_ROWS - count + 1)
        found = F.linear(states[first : first + count], weight)
        is_same &= (found == expected[first : first + count]).all()
    return bool(is_same)
