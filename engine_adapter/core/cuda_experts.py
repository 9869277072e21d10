"""Experts by the native kernels on a CUDA device: picks, grouped products, sums. bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from engine_adapter.core.cuda_launch import launch_on
from weightsync import native_experts
from weightsync.native_experts import (
    MAX_EXPERTS,
    MAX_PICKS,
    GroupedPointers,
    GroupedSizes,
    PickPointers,
    PickSizes,
)


def has_expert_kernels(
    num_experts: int, top_k: int, shapes: Iterable[tuple[int, int, int]]
) -> bool:
    """Whether the kernels have these sizes; ``shapes`` are experts, out and in of each weight."""
    sizes = [size for shape in shapes for size in shape[1:]]
    return (
        num_experts <= MAX_EXPERTS and top_k <= MAX_PICKS and all(size % 16 == 0 for size in sizes)
    )


def cuda_route(logits: Tensor, top_k: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
    """(weights [R, top_k], experts int32 [R, top_k], ascending) of logits [R, experts]."""
    logits = logits.contiguous()
    num_rows, num_experts = logits.shape
    weights = torch.empty((num_rows, top_k), dtype=logits.dtype, device=logits.device)
    experts = torch.empty((num_rows, top_k), dtype=torch.int32, device=logits.device)
    native_experts.route_rows(
        (num_rows, num_experts, top_k),
        (logits.data_ptr(), experts.data_ptr(), weights.data_ptr()),
        launch_on(logits.device),
        is_normalised=is_normalised,
    )
    return weights, experts


class Picks(NamedTuple):
    """Picks of experts sorted by expert; int32."""

    offsets: Tensor  # [experts here]: where each one's end
    rows: Tensor  # [R * top_k]: whose each is
    places: Tensor  # [R, top_k]: where each is; -1: its expert is not here


def cuda_sort_picks(experts: Tensor, first_expert: int, num_here: int) -> Picks:
    """Of ``experts`` int32 [R, top_k], those from ``first_expert`` on; no row has one twice."""
    num_rows, top_k = experts.shape
    total = num_rows * top_k
    numbers = torch.empty(num_here + 2 * total, dtype=torch.int32, device=experts.device)
    offsets, rest = numbers[:num_here], numbers[num_here:]
    rows, places = rest[:total], rest[total:]
    native_experts.sort_picks(
        PickSizes(num_rows, top_k, first_expert, num_here),
        PickPointers(experts.data_ptr(), offsets.data_ptr(), rows.data_ptr(), places.data_ptr()),
        launch_on(experts.device),
    )
    return Picks(offsets, rows, places.view(num_rows, top_k))


def cuda_grouped_product(
    states: Tensor,
    weights: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    is_gated: bool = False,
    tile_shape: int = 0,
) -> Tensor:
    """[N, out] of states [N, in], or of ``states[rows]``, and weights [experts, out, in]: rows from
    ``offsets[e - 1]`` up to ``offsets[e]`` (int32, ascending) are expert e's; what is behind the last
    is anything. If gated, [N, out / 2]: silu(gate) * up, rounded as the gate kernel does.

    Sums are taken in fp32 over ``in`` from its beginning, whatever the tile shape.
    """
    if states.stride(-1) != 1:
        states = states.contiguous()
    num_rows = states.shape[0] if rows is None else rows.shape[0]
    num_experts, weight_rows, inner = weights.shape
    width = weight_rows // 2 if is_gated else weight_rows
    output = torch.empty((num_rows, width), dtype=states.dtype, device=states.device)
    native_experts.grouped_product(
        GroupedSizes(
            num_rows, num_experts, weight_rows, inner, max(states.stride(0), inner), tile_shape
        ),
        GroupedPointers(
            states.data_ptr(),
            0 if rows is None else rows.data_ptr(),
            weights.data_ptr(),
            offsets.data_ptr(),
            output.data_ptr(),
        ),
        launch_on(states.device),
        is_gated=is_gated,
    )
    return output


def cuda_combine(states: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """[R, width]: the sum of each row's picks in order, weights [R, top_k] times states [N, width] at
    ``places``, rounded after each product and each sum."""
    num_rows, top_k = places.shape
    output = torch.empty((num_rows, states.shape[1]), dtype=states.dtype, device=states.device)
    native_experts.combine_rows(
        (num_rows, top_k, states.shape[1]),
        (states.data_ptr(), weights.data_ptr(), places.data_ptr(), output.data_ptr()),
        launch_on(states.device),
    )
    return output
