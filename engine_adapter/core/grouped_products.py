"""Products of many experts in one call, and the proof that a row's bits depend on no other row."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.core.cuda_products import cancelling_operands

Shape = tuple[int, int, int]  # experts, out, in

#: Rows of an expert in the calls that all others are compared with.
_ANCHOR_ROWS: Final = 64
_MOST_ROWS: Final = 2048
_GROUP_SIZES: Final = (
    1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129,
    192, 255, 256, 257, 511, 512, 513, 1000, 1025, 2048,
)  # fmt: skip

#: Verdicts of this process.
_proven: dict[tuple[Shape, torch.dtype, str], bool] = {}


def grouped_product(states: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """[R, out] of states [R, in] and weights [experts, out, in]: rows from ``offsets[e - 1]`` up to
    ``offsets[e]`` (int32, ascending) are expert e's; what is behind the last is anything."""
    return F.grouped_mm(states, weights.transpose(1, 2), offs=offsets)


def grouped_rows_are_their_own(
    shapes: Iterable[Shape], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether experts' weights of all these shapes give a row the same bits in groups of any size.

    A warning names a shape that does not. Verdicts are kept for the process.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    for shape in sorted(set(shapes)):
        key = (shape, dtype, name)
        if key not in _proven:
            _proven[key] = _agree(shape, dtype, device)
        if not _proven[key]:
            warnings.warn(
                f"rows of grouped products with weights {list(shape)}, {dtype}, depend on how many "
                "others their expert has; experts are computed one after another, without graphs",
                RuntimeWarning,
                stacklevel=3,
            )
            return False
    return True


def _agree(shape: Shape, dtype: torch.dtype, device: torch.device) -> bool:
    """Groups of all sizes, at the first, a middle and the last expert, against groups of the anchor's
    size; on operands that show any other order of summing."""
    num_experts, out, inner = shape
    states, flat = cancelling_operands(_MOST_ROWS, (num_experts * out, inner), dtype, device)
    weights = flat.view(shape)
    verdicts = []
    for expert in sorted({0, num_experts // 2, num_experts - 1}):
        expected = torch.cat(
            [_by_expert(p, weights, expert) for p in torch.split(states, _ANCHOR_ROWS)]
        )
        for index, count in enumerate(_GROUP_SIZES):
            first = index * 37 % (_MOST_ROWS - count + 1)
            found = _by_expert(states[first : first + count], weights, expert, num_before=index % 9)
            verdicts.append((found == expected[first : first + count]).all())
    return bool(torch.stack(verdicts).all())


def _by_expert(rows: Tensor, weights: Tensor, expert: int, num_before: int = 0) -> Tensor:
    """Rows of one expert, behind ``num_before`` of the first expert where that is another."""
    num_before = 0 if expert == 0 else num_before
    sizes = torch.zeros(len(weights), dtype=torch.int32)
    sizes[0] = num_before
    sizes[expert] += len(rows)
    offsets = sizes.cumsum(0).int().to(rows.device)
    return grouped_product(torch.cat([rows[:1].expand(num_before, -1), rows]), weights, offsets)[
        num_before:
    ]
