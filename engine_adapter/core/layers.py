"""The parts of a decoder layer, in the order of operations of transformers' ``eager``.

States are [R, features] in the model's dtype, R a multiple of ``ROW_PAD``; every function's row
depends on that row alone, so that a token's bits do not depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine_adapter.core.cuda_products import CudaProduct
from engine_adapter.core.cuda_rows import cuda_gated
from engine_adapter.core.gate import Gate, gated
from engine_adapter.core.parallel import Group
from engine_adapter.core.products import Product


@dataclass(frozen=True, slots=True)
class Compute:
    """Who computes products and gates, and with whom parts of products are added."""

    product: Product
    group: Group
    gate: Gate = gated

    def gate_up(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The gate of a product with gate before up: [R, in] -> [R, out / 2]."""
        if bias is None and isinstance(self.product, CudaProduct) and self.gate is cuda_gated:
            return self.product.gated(states, weight, self.gate)
        return self.gate(self.product(states, weight, bias))

    def row_parallel(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A product whose input columns are split over the group; the bias is added once."""
        if self.group.size == 1:
            return self.product(states, weight, bias)
        total = self.group.sum_in_order(self.product(states, weight))
        return total if bias is None else total + bias


class Mlp(Protocol):
    """What follows attention in a layer."""

    def forward(self, states: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden], whole on every rank."""
        ...


@dataclass(slots=True)
class DenseMlp:
    """SwiGLU; ``gate_up`` [2 x width, hidden], ``down`` [hidden, width] of this rank's width."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    compute: Compute

    def forward(self, states: Tensor) -> Tensor:
        inner = self.compute.gate_up(states, self.gate_up, self.gate_up_bias)
        return self.compute.row_parallel(inner, self.down, self.down_bias)


@dataclass(slots=True)
class AttentionWeights:
    """``qkv`` [(heads + 2 kv_heads) x head_dim, hidden], ``o`` [hidden, heads x head_dim] of this
    rank's heads; norms [head_dim] where the family has them."""

    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None


@dataclass(slots=True)
class Layer:
    """One decoder layer of one rank."""

    input_norm: Tensor
    attention: AttentionWeights
    post_norm: Tensor
    mlp: Mlp
