"""A layer of experts with random weights, and its products by our kernels and by torch's."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from engine_adapter.core.cuda_experts import Picks, cuda_grouped_product, cuda_sort_picks
from engine_adapter.core.cuda_products import CudaProduct
from engine_adapter.core.cuda_rows import cuda_gated
from engine_adapter.core.grouped_products import grouped_product
from engine_adapter.core.layers import Compute
from engine_adapter.core.moe import ExpertsMlp
from engine_adapter.core.parallel import ALONE


class Experts:
    """A layer of 128 experts as the 30B-A3B has it, and rows that go to eight of them each."""

    num_experts, top_k, hidden, width = 128, 8, 2048, 768

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(2)
        size = (self.num_experts, 2 * self.width, self.hidden)
        self.gate_up = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        size = (self.num_experts, self.hidden, self.width)
        self.down = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        router = torch.randn(self.num_experts, self.hidden, device=device).bfloat16()
        self.loop = ExpertsMlp(
            router, self.gate_up, self.down, 0, self.top_k, True,
            Compute(CudaProduct(), ALONE, cuda_gated),
        )  # fmt: skip

    def layer(self, kind: type[ExpertsMlp]) -> ExpertsMlp:
        return kind(*(getattr(self.loop, field.name) for field in fields(self.loop)))

    def picks(self, batch: int) -> Picks:
        drawn = torch.rand(batch, self.num_experts, device=self.device).argsort(dim=1)
        return cuda_sort_picks(drawn[:, : self.top_k].sort(dim=1)[0].int(), 0, self.num_experts)

    def products(
        self, batch: int, picks: Sequence[Picks]
    ) -> dict[str, tuple[Tensor, Callable[[], Any]]]:
        """Each with its weights; other experts in every call, as one layer follows another."""
        states = torch.randn(batch, self.hidden, device=self.device).bfloat16()
        inner = torch.randn(batch * self.top_k, self.width, device=self.device).bfloat16()
        ours, theirs, downs, their_downs = cycle(picks), cycle(picks), cycle(picks), cycle(picks)

        def gate_up() -> Tensor:
            now = next(ours)
            return cuda_grouped_product(
                states, self.gate_up, now.offsets, rows=now.rows, is_gated=True
            )

        def their_gate_up() -> Tensor:
            now = next(theirs)
            return cuda_gated(grouped_product(states[now.rows], self.gate_up, now.offsets))

        return {
            "gate, up: ours": (self.gate_up, gate_up),
            "gate, up: torch": (self.gate_up, their_gate_up),
            "down: ours": (
                self.down,
                lambda: cuda_grouped_product(inner, self.down, next(downs).offsets),
            ),
            "down: torch": (
                self.down,
                lambda: grouped_product(inner, self.down, next(their_downs).offsets),
            ),
        }
