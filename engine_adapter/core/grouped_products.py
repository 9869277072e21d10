"""Products of many experts in one call, and the proof that a row's bits depend on no other row."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.core.cuda_experts import cuda_grouped_product
from engine_adapter.core.cuda_products import cancelling_operands
from weightsync.native_experts import NUM_TILE_SHAPES

Shape = tuple[int, int, int]  # experts, out, in

#: Rows of an expert in the calls that all others are compared with.
_ANCHOR_ROWS: Final = 64
_MOST_ROWS: Final = 2048
_GROUP_SIZES: Final = (
    1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129,
    192, 255, 256, 257, 511, 512, 513, 1000, 1025, 2048,
)  # fmt: skip


class GroupedProduct(Protocol):
    """Rows sorted by expert times each one's expert's weight."""

    def __call__(self, states: Tensor, weights: Tensor, offsets: Tensor, /) -> Tensor:
        """As :func:`grouped_product`."""
        ...


#: Our kernel, once for each of its tile shapes: it chooses among them by the number of rows.
OWN_PRODUCTS: Final[Sequence[GroupedProduct]] = tuple(
    partial(cuda_grouped_product, tile_shape=shape) for shape in range(1, NUM_TILE_SHAPES + 1)
)

#: Verdicts of this process.
_proven: dict[tuple[Shape, torch.dtype, str, tuple[GroupedProduct, ...]], bool] = {}


def grouped_product(states: Tensor, weights: Tensor, offsets: Tensor, /) -> Tensor:
    """By torch: [R, out] of states [R, in] and weights [experts, out, in]: rows from ``offsets[e - 1]`` up to
    ``offsets[e]`` (int32, ascending) are expert e's; what is behind the last is anything."""
    return F.grouped_mm(states, weights.transpose(1, 2), offs=offsets)


def grouped_rows_are_their_own(
    shapes: Iterable[Shape],
    dtype: torch.dtype,
    device: torch.device,
    products: Sequence[GroupedProduct] = (grouped_product,),
) -> bool:
    """Whether experts' weights of all these shapes give a row the same bits in groups of any size, by
    any of ``products``.

    A warning names a shape that does not. Verdicts are kept for the process.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    for shape in sorted(set(shapes)):
        key = (shape, dtype, name, tuple(products))
        if key not in _proven:
            _proven[key] = _agree(shape, dtype, device, products)
        if not _proven[key]:
            warnings.warn(
                f"rows of grouped products with weights {list(shape)}, {dtype}, depend on how many "
                "others their expert has; experts are computed by torch, or one after another, "
                "without graphs",
                RuntimeWarning,
                stacklevel=3,
            )
            return False
    return True


def _agree(
    shape: Shape, dtype: torch.dtype, device: torch.device, products: Sequence[GroupedProduct]
) -> bool:
    """Groups of all sizes, at the first, a middle and the last expert, against groups of the anchor's
    size; on operands that show any other order of summing."""
    num_experts, out, inner = shape
    states, flat = cancelling_operands(_MOST_ROWS, (num_experts * out, inner), dtype, device)
    weights = flat.view(shape)
    verdicts = []
    for expert in sorted({0, num_experts // 2, num_experts - 1}):
        expected = torch.cat(
            [
                _by_expert(products[0], part, weights, expert)
                for part in torch.split(states, _ANCHOR_ROWS)
            ]
        )
        for index, count in enumerate(_GROUP_SIZES):
            first = index * 37 % (_MOST_ROWS - count + 1)
            rows, wanted = states[first : first + count], expected[first : first + count]
            for product in products:
                found = _by_expert(product, rows, weights, expert, num_before=index % 9)
                verdicts.append((found == wanted).all())
    return bool(torch.stack(verdicts).all())


def _by_expert(
    product: GroupedProduct, rows: Tensor, weights: Tensor, expert: int, num_before: int = 0
) -> Tensor:
    """Rows of one expert, behind ``num_before`` of the first expert where that is another."""
    num_before = 0 if expert == 0 else num_before
    sizes = torch.zeros(len(weights), dtype=torch.int32)
    sizes[0] = num_before
    sizes[expert] += len(rows)
    offsets = sizes.cumsum(0).int().to(rows.device)
    states = torch.cat([rows[:1].expand(num_before, -1), rows])
    return product(states, weights, offsets)[num_before:]
