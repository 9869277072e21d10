"""A mixture of experts: routing, and the experts that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_adapter.core.cuda_experts import (
    cuda_combine,
    cuda_grouped_product,
    cuda_route,
    cuda_sort_picks,
    has_expert_kernels,
)
from engine_adapter.core.grouped_products import (
    OWN_PRODUCTS,
    Shape,
    grouped_product,
    grouped_rows_are_their_own,
)
from engine_adapter.core.layers import Compute
from engine_adapter.core.products import Product, has_kernels
from weightsync.config import ExpertProducts, expert_products


def route(
    states: Tensor, router: Tensor, top_k: int, *, is_normalised: bool, product: Product
) -> tuple[Tensor, Tensor]:
    """(weights [R, top_k] in the model's dtype, experts int64 [R, top_k]) of each row.

    Softmax in fp32 over logits of the model's dtype, rounded after normalising.
    """
    logits = product(states, router)
    weights, experts = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float), top_k, dim=-1)
    if is_normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


@dataclass(slots=True)
class ExpertsMlp:
    """Experts ``first_expert`` and following.

    ``router`` [all experts, hidden]; ``gate_up`` [experts here, 2 x width, hidden]; ``down``
    [experts here, hidden, width].
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    first_expert: int
    top_k: int
    is_normalised: bool
    compute: Compute

    def forward(self, states: Tensor) -> Tensor:
        """Each row adds up its experts in ascending order, rounding after each, wherever the other
        rows go: so does transformers, and so a row's bits depend on no other."""
        product, group = self.compute.product, self.compute.group
        weights, experts = route(
            states, self.router, self.top_k, is_normalised=self.is_normalised, product=product
        )
        picks = experts.flatten()
        order = torch.argsort(picks, stable=True)
        counts = torch.bincount(picks, minlength=self.router.shape[0]).tolist()
        flat, total, start = weights.flatten(), torch.zeros_like(states), 0
        for expert, count in enumerate(counts):
            place = expert - self.first_expert
            if count and 0 <= place < self.gate_up.shape[0]:
                chosen = order[start : start + count]
                rows = chosen // self.top_k
                inner = self.compute.gate(product(states[rows], self.gate_up[place]))
                out = product(inner, self.down[place]) * flat[chosen, None]
                total.index_add_(0, rows, out)
            start += count
        return total if group.size == 1 else group.sum_in_order(total)


class GroupedExpertsMlp(ExpertsMlp):
    """The same sums in the same order with all experts in one product, asking nothing of the device:
    which rows an expert has is known there alone. bfloat16."""

    __slots__ = ()

    def forward(self, states: Tensor) -> Tensor:
        """As :meth:`ExpertsMlp.forward`."""
        weights, experts = route(
            states, self.router, self.top_k, is_normalised=self.is_normalised,
            product=self.compute.product,
        )  # fmt: skip
        experts, places = torch.sort(experts, dim=-1)  # each row's in ascending order
        weights = weights.gather(1, places)
        num_here = self.gate_up.shape[0]
        picks = (experts - self.first_expert).flatten()
        is_here = (picks >= 0) & (picks < num_here)
        picks = torch.where(is_here, picks, num_here)  # those of other ranks come last
        ordered, order = torch.sort(picks, stable=True)
        ends = torch.arange(num_here, device=states.device)
        offsets = torch.searchsorted(ordered, ends, right=True).int()
        rows = states[order // self.top_k]
        inner = self.compute.gate(grouped_product(rows, self.gate_up, offsets))
        out = grouped_product(inner, self.down, offsets)
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        out = out[back].view(-1, self.top_k, states.shape[1]) * weights[..., None]
        out = torch.where(is_here.view(-1, self.top_k, 1), out, 0.0)
        total = out[:, 0]
        for pick in range(1, self.top_k):
            total = total + out[:, pick]
        group = self.compute.group
        return total if group.size == 1 else group.sum_in_order(total)


class CudaExpertsMlp(ExpertsMlp):
    """The same sums in the same order by our kernels on a GPU, which ask nothing of the host: of equal
    logits the first expert is picked. bfloat16."""

    __slots__ = ()

    def forward(self, states: Tensor) -> Tensor:
        """As :meth:`ExpertsMlp.forward`."""
        logits = self.compute.product(states, self.router)
        weights, experts = cuda_route(logits, self.top_k, is_normalised=self.is_normalised)
        picks = cuda_sort_picks(experts, self.first_expert, self.gate_up.shape[0])
        inner = cuda_grouped_product(
            states, self.gate_up, picks.offsets, rows=picks.rows, is_gated=True
        )
        out = cuda_grouped_product(inner, self.down, picks.offsets)
        total = cuda_combine(out, weights, picks.places)
        group = self.compute.group
        return total if group.size == 1 else group.sum_in_order(total)


def choose_experts(
    num_experts: int, top_k: int, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device
) -> type[ExpertsMlp]:
    """Who computes experts on a GPU whose weights have these ``shapes``, decided once, for all steps:
    our kernels, torch's grouped product, or products one after another where rows of neither are
    their own."""
    if dtype is not torch.bfloat16:
        return ExpertsMlp
    if (
        expert_products() is ExpertProducts.OWN
        and has_kernels(device)
        and has_expert_kernels(num_experts, top_k, shapes)
        and grouped_rows_are_their_own(shapes, dtype, device, OWN_PRODUCTS)
    ):
        return CudaExpertsMlp
    if grouped_rows_are_their_own(shapes, dtype, device):
        return GroupedExpertsMlp
    return ExpertsMlp
