"""Matrix products on a CUDA device whose rows have bits of their own, and the proof that they do.

Libraries choose kernels by the number of rows, and some split the inner dimension among blocks, so
that a row's bits depend on its company. Without a workspace cuBLASLt cannot split; that is asked for
through the environment before cuBLAS starts. For which numbers of rows it holds is tried at start-up,
on the model's shapes, this device and these libraries. Other numbers are brought into that range:
fewer rows by padding, more by several calls. Few rows are multiplied by our own kernel where it was
seen to have the libraries' bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.core.few_rows import multiply_few, takes
from weightsync.config import SmallProducts, set_default_env, small_products
from weightsync.native_few_rows import MOST_FEW_ROWS

#: To be set before the process first uses cuBLAS.
ENVIRONMENT: Final = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
#: Rows of the calls that all others are compared with.
ANCHOR_ROWS: Final = 64

_MOST_RESULT_ELEMENTS: Final = 1 << 28  # of a call that is tried
_ROW_COUNTS: Final[tuple[int, ...]] = (
    *range(1, 65), 65, 80, 95, 96, 97, 127, 128, 129, 160, 191, 192, 193, 224, 255, 256, 257, 288, 320,
    352, 383, 384, 385, 416, 448, 480, 511, 512, 513, 640, 768, 1000, 1024, 1025, 1536, 2047, 2048,
    3000, 4096, 6144, 8192,
)  # fmt: skip
_SEED: Final = 7


@dataclass(frozen=True, slots=True)
class RowRange:
    """Numbers of rows, both ends included, in calls of which a row has the same bits."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of a shape: where rows of the libraries' products are their own, and whether our
    kernel for few rows has their bits."""

    rows: RowRange
    has_few: bool


#: Verdicts of this process, by (out, in, dtype, device's name).
_proven: dict[tuple[int, int, torch.dtype, str], Verdict] = {}


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
    """``states @ weight.T + bias`` by torch; see :class:`Product`. Shapes that were not proven are
    computed as they come."""

    def __init__(self) -> None:
        prepare_cublas()
        self._ranges: dict[tuple[int, ...], RowRange] = {}
        self._few: set[tuple[int, ...]] = set()

    def __call__(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None and self._is_few(states, weight, is_gated=False):
            return multiply_few(states, weight)
        proven = self._ranges.get(tuple(weight.shape))
        if proven is None or proven.least <= states.shape[0] <= proven.most:
            return F.linear(states, weight, bias)
        return product_within(proven, states, weight, bias)

    def gated(self, states: Tensor, gate_up: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
        """``gate`` of the product, in one call where that has the same bits; ``gate`` is the CUDA
        kernel's."""
        if self._is_few(states, gate_up, is_gated=True):
            return multiply_few(states, gate_up, is_gated=True)
        return gate(self(states, gate_up))

    def _is_few(self, states: Tensor, weight: Tensor, *, is_gated: bool) -> bool:
        return (
            states.shape[0] <= MOST_FEW_ROWS
            and tuple(weight.shape) in self._few
            and takes(states, weight, is_gated=is_gated)
        )

    @property
    def least_rows(self) -> int:
        """The fewest rows that no shape has to pad."""
        padded = (r.least for shape, r in self._ranges.items() if shape not in self._few)
        return max(padded, default=1)

    def prove(
        self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device
    ) -> dict[tuple[int, ...], RowRange]:
        """Try weights of these shapes [out, in]; returns, and remembers, where rows are their own."""
        for shape in sorted(set(shapes)):
            key = (*shape, dtype, torch.cuda.get_device_name(device))
            if key not in _proven:
                _proven[key] = prove_shape(shape, dtype, device)
            self._ranges[shape] = _proven[key].rows
            if _proven[key].has_few and small_products() is SmallProducts.OWN:
                self._few.add(shape)
        torch.cuda.empty_cache()
        self._warn(dtype)
        return dict(self._ranges)

    def _warn(self, dtype: torch.dtype) -> None:
        """Of shapes that pad, or split calls of a decode step."""
        slow = {
            s: r
            for s, r in self._ranges.items()
            if (r.least > 1 and s not in self._few) or r.most < tried_rows(s[0])
        }
        if not slow:
            return
        named = ", ".join(f"{list(s)} ({r.least} to {r.most} rows)" for s, r in slow.items())
        setting = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
        warnings.warn(
            f"rows of products with weights {named}, {dtype}, depend on the number of rows beyond "
            "what is named; calls are padded or split, which may be slower. If this process used "
            f"cuBLAS before the model was made, start it with {setting}",
            RuntimeWarning,
            stacklevel=3,
        )


def product_within(
    proven: RowRange, states: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The product in calls of numbers of rows in a range; zeros pad the last."""
    num_rows = states.shape[0]
    parts = []
    for part in torch.split(states, proven.most):
        missing = proven.least - part.shape[0]
        if missing > 0:
            part = F.pad(part, (0, 0, 0, missing))
        parts.append(F.linear(part, weight, bias))
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[:num_rows]


def tried_rows(out: int) -> int:
    """The largest number of rows that is tried with a weight of ``out`` rows."""
    most = max(ANCHOR_ROWS, _MOST_RESULT_ELEMENTS // out)
    return [count for count in _ROW_COUNTS if count <= most][-1]


def prove_shape(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Verdict:
    """Try a weight of a shape [out, in]: where rows of ``F.linear`` have the bits that they have in calls
    of :data:`ANCHOR_ROWS`, wherever they stand, and whether our kernel gives few rows the same."""
    counts = [count for count in _ROW_COUNTS if count <= tried_rows(shape[0])]
    states, weight = cancelling_operands(counts[-1], shape, dtype, device)
    expected = torch.cat([F.linear(part, weight) for part in torch.split(states, ANCHOR_ROWS)])

    def agrees(product: Callable[[Tensor, Tensor], Tensor], count: int, first: int) -> Tensor:
        found = product(states[first : first + count], weight)
        return (found == expected[first : first + count]).all()

    verdicts = []
    for index, count in enumerate(counts):
        verdicts.append(agrees(F.linear, count, index * 37 % (len(states) - count + 1)))
    few = [count for count in range(1, MOST_FEW_ROWS + 1) if takes(states[:count], weight)]
    own = [agrees(multiply_few, count, count * 3) for count in few]
    has_few = bool(own) and bool(torch.stack(own).all())
    return Verdict(_range_around_anchor(counts, torch.stack(verdicts).tolist()), has_few)


def cancelling_operands(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """States and weight whose exact product is zero, so that what comes out is nothing but rounding.

    Two ways to sum agree in most elements of ordinary data once those are rounded to 16 bits; here
    they differ in nearly all. Each term has its opposite at another place of the inner dimension.
    """
    generator = torch.Generator(device).manual_seed(_SEED)
    half, inner = shape[1] // 2, shape[1]

    def draw(rows: int, scale: float) -> Tensor:
        values = torch.empty((rows, half), dtype=dtype, device=device)
        return values.normal_(0.0, scale, generator=generator)

    order = torch.randperm(inner, generator=generator, device=device)
    states = torch.zeros((num_rows, inner), dtype=dtype, device=device)
    weight = torch.zeros(shape, dtype=dtype, device=device)
    # Terms of many magnitudes: even a short sum then has to round.
    powers = torch.randint(0, 9, (half,), generator=generator, device=device)
    values = draw(num_rows, 1.0) * torch.exp2(powers.float()).to(dtype)
    columns = draw(shape[0], max(half, 1) ** -0.5)
    states[:, order[:half]], states[:, order[half : 2 * half]] = values, -values
    weight[:, order[:half]], weight[:, order[half : 2 * half]] = columns, columns
    return states, weight


def _range_around_anchor(counts: list[int], verdicts: list[bool]) -> RowRange:
    anchor = counts.index(ANCHOR_ROWS)
    low, high = anchor, anchor
    while low > 0 and verdicts[low - 1]:
        low -= 1
    while high + 1 < len(counts) and verdicts[high + 1]:
        high += 1
    return RowRange(counts[low], counts[high])
