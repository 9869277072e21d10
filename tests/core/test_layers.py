"""A row's bits depend on that row alone, in every dtype; ranks add up in order."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from core_models import torch

from engine_adapter.core.gate import choose_gate, gated, native_gated
from engine_adapter.core.heads import HeadShape, place_heads
from engine_adapter.core.layers import Compute, DenseMlp
from engine_adapter.core.moe import ExpertsMlp, GroupedExpertsMlp, route
from engine_adapter.core.norm import choose_norm, native_norm, rms_norm
from engine_adapter.core.parallel import ALONE, Group
from engine_adapter.core.products import (
    Products,
    choose_product,
    native_product,
    parse_products,
    torch_product,
)
from engine_adapter.core.rope import RopeConfig, RopeKind, fill_tables, inverse_frequencies, rotate
from weightsync.errors import ConfigError

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: (in, out): tiny, odd, and as deep as real models are.
SHAPES = [(64, 96), (72, 131), (128, 512), (100, 33), (1024, 256), (3072, 64)]


def assert_rows_are_their_own(act: Any, states: Any) -> None:
    """``act`` of any number of rows, in any company and place, gives each row the same bits."""
    wanted = act(states)
    for count in (1, 2, 3, 5, 15, 16, 17, 31, 48):
        assert torch.equal(act(states[:count]), wanted[:count]), count
        assert torch.equal(act(states[-count:]), wanted[-count:]), count
    order = torch.randperm(len(states))
    assert torch.equal(act(states[order]), wanted[order])


#: Who can compute which dtype.
COMPUTED = [(torch_product, dtype) for dtype in DTYPES] + [
    (native_product, torch.bfloat16),
    (native_product, torch.float16),
]
computed = pytest.mark.parametrize(
    ("product", "dtype"), COMPUTED, ids=lambda v: getattr(v, "__name__", str(v))
)


@computed
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_products_are_row_invariant(width: int, out: int, product: Any, dtype: Any) -> None:
    torch.manual_seed(0)
    states = torch.randn(160, width).to(dtype)
    weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    assert_rows_are_their_own(lambda x: product(x, weight), states)
    assert_rows_are_their_own(lambda x: product(x, weight, bias), states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "out"), [*SHAPES, (1, 1), (7, 2), (9, 47), (8, 49)])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 65, 130])
def test_native_products_are_rounded_once(num_rows: int, width: int, out: int, dtype: Any) -> None:
    torch.manual_seed(0)
    states = torch.randn(num_rows, width + 3).to(dtype)[:, :width]  # rows that lie apart
    weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    for given in (None, bias):
        exact = states.double() @ weight.double().T + (0 if given is None else given.double())
        found = native_product(states, weight, given)
        assert found.shape == (num_rows, out)
        # Half a unit of the last place, and what fp32 sums lose against the largest term.
        unit = torch.finfo(dtype).eps / 2
        lost = 1e-6 * width**0.5 * (states.double().abs() @ weight.double().abs().T)
        assert ((found.double() - exact).abs() <= exact.abs() * unit * 1.01 + lost + 1e-7).all()


def test_native_products_do_not_depend_on_threads() -> None:
    states, weight = torch.randn(80, 640).bfloat16(), torch.randn(1000, 640).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = native_product(states, weight)
        torch.set_num_threads(5)
        assert torch.equal(native_product(states, weight), one)
    finally:
        torch.set_num_threads(before)


def test_native_products_keep_what_is_no_number() -> None:
    states, weight = torch.ones(2, 9).bfloat16(), torch.ones(3, 9).bfloat16()
    states[0, 8], weight[1, 0] = float("nan"), float("inf")
    found = native_product(states, weight)
    assert found[0].isnan().all()
    assert found[1].tolist() == [9, float("inf"), 9]


def test_who_computes_is_decided_once_and_can_be_asked_for() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert choose_product(Products.TORCH, torch.bfloat16, cpu) is torch_product
    assert choose_product(Products.NATIVE, torch.bfloat16, cpu) is native_product
    assert choose_product(Products.AUTO, torch.float32, cpu) is torch_product
    assert choose_product(Products.AUTO, torch.bfloat16, gpu) is torch_product
    assert choose_product(Products.AUTO, torch.float16, cpu) is native_product
    for dtype, device in ((torch.float32, cpu), (torch.bfloat16, gpu)):
        with pytest.raises(ConfigError, match="products='native' computes bfloat16, float16 on"):
            choose_product(Products.NATIVE, dtype, device)
    with pytest.raises(ConfigError, match="products 'fast' is not known: auto, torch, native"):
        parse_products("fast")


@dtypes
def test_norms_rotations_and_gates_are_row_invariant(dtype: Any) -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(160, 100).to(dtype), torch.randn(100).to(dtype)
    assert_rows_are_their_own(lambda x: rms_norm(x, weight, 1e-6), states)
    assert_rows_are_their_own(gated, states)
    heads = torch.randn(160, 3, 24).to(dtype)
    cos, sin = torch.empty(64, 12, dtype=dtype), torch.empty(64, 12, dtype=dtype)
    fill_tables(RopeConfig(RopeKind.DEFAULT, 1e4), cos, sin, 24)
    assert_rows_are_their_own(lambda x: rotate(x, cos[7], sin[7]), heads)


@dtypes
@pytest.mark.parametrize("width", [1000, 4096])
def test_wide_norms_are_row_invariant_on_several_threads(width: int, dtype: Any) -> None:
    """So wide that torch spreads the reduction over threads."""
    torch.manual_seed(0)
    states, weight = torch.randn(160, width).to(dtype), torch.randn(width).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert_rows_are_their_own(lambda x: rms_norm(x, weight, 1e-6), states)
    finally:
        torch.set_num_threads(before)


def experts_mlp(
    dtype: Any, first: int = 0, last: int = 8, product: Any = torch_product
) -> ExpertsMlp:
    torch.manual_seed(1)
    router, gate_up = torch.randn(8, 64).to(dtype), torch.randn(8, 48, 64).to(dtype) / 8
    down = torch.randn(8, 64, 24).to(dtype) / 8
    compute = Compute(product, ALONE)
    return ExpertsMlp(router, gate_up[first:last], down[first:last], first, 3, True, compute)


@computed
def test_experts_are_row_invariant(product: Any, dtype: Any) -> None:
    states = torch.randn(160, 64).to(dtype)
    assert_rows_are_their_own(experts_mlp(dtype, product=product).forward, states)


def test_parts_of_the_experts_add_up_to_all_of_them() -> None:
    states = torch.randn(32, 64)
    whole = experts_mlp(torch.float32).forward(states)
    parts = [experts_mlp(torch.float32, *r).forward(states) for r in ((0, 3), (3, 3), (3, 8))]
    assert torch.allclose(sum(parts), whole, atol=1e-5)
    assert not parts[1].any()


def test_grouped_experts_say_the_same() -> None:
    """In one product over all experts, whichever of them are here."""
    states = torch.randn(48, 64).bfloat16()
    for first, last in ((0, 8), (0, 3), (3, 8), (5, 6)):
        loop = experts_mlp(torch.bfloat16, first, last)
        grouped = GroupedExpertsMlp(*(getattr(loop, f.name) for f in fields(loop)))
        expected, found = loop.forward(states), grouped.forward(states)
        assert torch.allclose(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert_rows_are_their_own(grouped.forward, states[:32])


def test_routing_weights() -> None:
    states, router = torch.randn(16, 64), torch.randn(8, 64)
    weights, experts = route(states, router, 3, is_normalised=True, product=torch_product)
    plain, same = route(states, router, 3, is_normalised=False, product=torch_product)
    assert torch.equal(experts, same)
    assert torch.allclose(weights.sum(-1), torch.ones(16))
    assert torch.allclose(plain, torch.softmax(states @ router.T, -1).gather(1, experts))


def test_rope_against_its_formula_in_double_precision() -> None:
    torch.manual_seed(0)
    cos, sin = torch.empty(32, 4), torch.empty(32, 4)
    fill_tables(RopeConfig(RopeKind.DEFAULT, 100.0), cos, sin, 8)
    state = torch.randn(1, 1, 8)
    angle = 5 * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    pair = torch.complex(state[0, 0, :4].double(), state[0, 0, 4:].double())
    turned = pair * torch.polar(torch.ones(4).double(), angle)
    found = rotate(state, cos[5], sin[5])[0, 0].double()
    assert torch.allclose(found, torch.cat((turned.real, turned.imag)), atol=1e-6)


def test_scaling_keeps_what_turns_fast_and_stretches_what_turns_slowly() -> None:
    plain, _ = inverse_frequencies(RopeConfig(RopeKind.DEFAULT, 1e4), 64)
    for kind in (RopeKind.LLAMA3, RopeKind.YARN):
        rope = RopeConfig(kind, 1e4, factor=8.0, original_max_positions=256)
        scaled, factor = inverse_frequencies(rope, 64)
        assert scaled[0] == plain[0]
        assert torch.isclose(scaled[-1], plain[-1] / 8)
        assert (factor > 1) == (kind is RopeKind.YARN)
    fixed = RopeConfig(RopeKind.YARN, 1e4, 8.0, 256, attention_factor=0.5)
    assert inverse_frequencies(fixed, 64)[1] == 0.5
    both = RopeConfig(RopeKind.YARN, 1e4, 8.0, 256, mscale=0.7, mscale_all_dim=0.7)
    assert inverse_frequencies(both, 64)[1] == 1.0


def test_one_rank_needs_no_group_and_several_do() -> None:
    states = torch.randn(4, 6)
    assert ALONE.sum_in_order(states) is states
    assert ALONE.join_columns(states, [6]) is states
    assert ALONE.broadcast(states) is states
    with pytest.raises(ConfigError, match="2 ranks need a torch"):
        Group(None, 0, 2)


def test_a_bias_of_a_row_parallel_product_is_added_once() -> None:
    torch.manual_seed(0)
    states, gate_up, down = torch.randn(16, 8), torch.randn(12, 8), torch.randn(8, 6)
    bias = torch.randn(8)
    mlp = DenseMlp(gate_up, down, None, bias, Compute(torch_product, ALONE))
    assert torch.allclose(mlp.forward(states), gated(states @ gate_up.T) @ down.T + bias, atol=1e-5)


@dtypes
def test_native_gates_are_close_and_each_element_is_its_own(dtype: Any) -> None:
    torch.manual_seed(0)
    states = (torch.randn(160, 2 * 1111) * 4).to(dtype)
    torch.set_num_threads(5)  # shares that end in the middle of a row
    try:
        wanted = native_gated(states)
        assert_rows_are_their_own(native_gated, states)
    finally:
        torch.set_num_threads(1)
    for start in (1, 3, 700):
        narrow = torch.cat([states[:, start:1111], states[:, 1111 + start :]], dim=1)
        assert torch.equal(native_gated(narrow), wanted[:, start:])
    ulp = wanted.float().abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    assert ((gated(states).float() - wanted.float()).abs() <= 4 * ulp).all()


def test_gates_of_extreme_numbers() -> None:
    ends = [0.0, -0.0, 1e30, -1e30, 88.0, -88.0, 200.0, torch.inf, torch.nan, -torch.inf]
    gate = torch.tensor([ends])
    found = native_gated(torch.cat([gate, torch.ones_like(gate)], dim=1))[0].tolist()
    assert found[:2] == [0.0, 0.0]
    assert found[2] == float(torch.tensor(1e30))
    assert found[3] == 0.0
    assert found[4:8:2] == [88.0, 200.0]
    assert abs(found[5]) < 1e-36
    assert found[7] == torch.inf
    assert all(number != number for number in found[8:])  # NaN, as torch says of both


def test_who_computes_gates() -> None:
    cpu = torch.device("cpu")
    assert choose_gate(Products.TORCH, torch.bfloat16, cpu) is gated
    assert choose_gate(Products.AUTO, torch.float32, cpu) is native_gated
    assert choose_gate(Products.AUTO, torch.float32, torch.device("cuda")) is gated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 15, 16, 32, 128, 1000])
def test_native_norms_are_close_and_rows_are_their_own(dtype: Any, width: int) -> None:
    torch.manual_seed(width)
    fused = (3 * torch.randn(64, 5, width)).to(dtype)
    weight = torch.randn(width).to(dtype)
    for states in (fused[:, :3], fused[:, 3:], fused[:, 0], fused.transpose(0, 1)[1:]):
        found = native_norm(states, weight, 1e-6)
        wanted = rms_norm(states.double(), weight.double(), 1e-6)
        assert found.shape == states.shape
        assert found.is_contiguous()
        tolerance = 1e-6 if dtype is torch.float32 else 3 * torch.finfo(dtype).eps
        assert torch.allclose(found.double(), wanted, rtol=tolerance, atol=tolerance)
    assert_rows_are_their_own(lambda x: native_norm(x, weight, 1e-6), fused[:, 0])
    alone = torch.cat([native_norm(fused[i : i + 1, 1:4], weight, 1e-6) for i in range(64)])
    assert torch.equal(alone, native_norm(fused[:, 1:4], weight, 1e-6))


def test_native_norms_keep_what_is_no_number() -> None:
    states = torch.ones(3, 32)
    states[1, 5] = torch.nan
    found = native_norm(states, torch.ones(32), 1e-6)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert native_norm(torch.zeros(2, 32), torch.ones(32), 1e-6).eq(0).all()
    assert native_norm(torch.zeros(0, 32), torch.ones(32), 1e-6).shape == (0, 32)


def test_who_computes_norms() -> None:
    cpu = torch.device("cpu")
    assert choose_norm(Products.AUTO, torch.bfloat16, cpu) is native_norm
    assert choose_norm(Products.TORCH, torch.bfloat16, cpu) is rms_norm
    assert choose_norm(Products.AUTO, torch.float64, cpu) is rms_norm


@dtypes
@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
@pytest.mark.parametrize("head_dim", [2, 10, 32, 128])
def test_the_core_rotates_heads_to_the_bits_of_norm_and_rotate(
    head_dim: int, has_norms: bool, dtype: Any
) -> None:
    torch.manual_seed(head_dim)
    shape = HeadShape(num_heads=4, num_kv_heads=2, eps=1e-6)
    fused = (3 * torch.randn(48, 8, head_dim)).to(dtype)
    norms = [torch.randn(head_dim).to(dtype) if has_norms else None for _ in range(2)]
    cos, sin = (torch.randn(64, head_dim // 2).to(dtype) for _ in range(2))
    positions = torch.randint(0, 64, (48,))

    def place(norm: Any, rows: Any) -> Any:
        of = place_heads(shape, norm, cos, sin, positions[rows])
        return of(fused[rows].clone(), *norms)

    def by_two_steps(states: Any, weight: Any, eps: float) -> Any:
        return native_norm(states, weight, eps)

    everything = torch.arange(48)
    found, wanted = place(native_norm, everything), place(by_two_steps, everything)
    assert [part.shape[1] for part in found] == [4, 2, 2]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    for rows in (everything[:1], everything[5:22], everything.flip(0)):
        for one, other in zip(place(native_norm, rows), found, strict=True):
            assert torch.equal(one, other[rows])


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_beyond_the_tables_is_named_and_nothing_is_written(position: int) -> None:
    fused = torch.ones(3, 3, 4)
    table = torch.full((8, 2), 0.5)
    of = place_heads(
        HeadShape(1, 1, 1e-6), native_norm, table, table, torch.tensor([0, 7, position])
    )
    with pytest.raises(ValueError, match=f"row 2: position {position} of 8"):
        of(fused, None, None)
    assert fused.eq(1).all()
