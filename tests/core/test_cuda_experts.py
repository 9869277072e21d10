"""Experts' kernels against torch, and against themselves in other company."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine_adapter.core.cuda_experts import (
    cuda_combine,
    cuda_grouped_product,
    cuda_route,
    cuda_sort_picks,
    has_expert_kernels,
)
from engine_adapter.core.cuda_products import CudaProduct
from engine_adapter.core.cuda_rows import cuda_gated
from engine_adapter.core.layers import Compute
from engine_adapter.core.moe import (
    CudaExpertsMlp,
    ExpertsMlp,
    GroupedExpertsMlp,
    choose_experts,
    route,
)
from engine_adapter.core.parallel import ALONE
from weightsync import native
from weightsync.errors import ConfigError
from weightsync.native_experts import NUM_TILE_SHAPES

ON = "cuda:0"
TILE_SHAPES = range(1, NUM_TILE_SHAPES + 1)
#: Rows of tiles, and of their weights.
TILE_ROWS = {1: (16, 64), 2: (32, 128), 3: (64, 128), 4: (128, 128), 5: (128, 256)}
COUNTS = (
    (1,),
    (0, 0, 5),
    (16, 0, 17, 1, 33, 0),
    (300, 2, 0, 129, 64, 7, 128, 0),
    (0, 0, 0),
)  # fmt: skip


def offsets_of(counts: tuple[int, ...]) -> list[int]:
    return torch.tensor(counts).cumsum(0).tolist()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("tile_shape", TILE_SHAPES)
def test_tiles_are_each_row_and_column_once(tile_shape: int, counts: tuple[int, ...]) -> None:
    rows, weight_rows = TILE_ROWS[tile_shape]
    tiles = native.extension.grouped_tiles(offsets_of(counts), 300, tile_shape)
    columns = -(-300 // weight_rows)
    seen: Counter[tuple[int, int, int]] = Counter()
    for expert, column, first, count in tiles:
        assert 1 <= count <= rows
        assert 0 <= column < columns
        seen.update((expert, column, row) for row in range(first, first + count))
    starts = [0, *offsets_of(counts)]
    wanted = {
        (expert, column, row)
        for expert, (start, end) in enumerate(pairwise(starts))
        for row in range(start, end)
        for column in range(columns)
    }
    assert set(seen) == wanted
    assert set(seen.values()) <= {1}


@pytest.mark.parametrize("tile_shape", TILE_SHAPES)
def test_gate_and_up_of_an_element_lie_sixteen_apart(tile_shape: int) -> None:
    weight_rows = TILE_ROWS[tile_shape][1]
    plain = native.extension.tile_weights(tile_shape, False)
    assert plain == [(local, False) for local in range(weight_rows)]
    gated = native.extension.tile_weights(tile_shape, True)
    assert sorted(gated) == [(i, up) for i in range(weight_rows // 2) for up in (False, True)]
    for local, (within, is_up) in enumerate(gated):
        if not is_up:
            assert gated[local + 16] == (within, True)
        for together in (4, 8, 16, 32):  # rows that threads load at once
            base, rest = local // together * together, local % together
            assert within == gated[base][0] + gated[rest][0]
            assert is_up == (gated[base][1] or gated[rest][1])


def test_shapes_by_number_of_rows() -> None:
    found = [
        native.extension.tile_shape_for(8 * batch, 128)
        for batch in (1, 32, 64, 400, 512, 1024, 2048, 8192)
    ]
    assert found == [1, 1, 2, 2, 3, 5, 4, 4]


def test_what_the_kernels_have() -> None:
    assert has_expert_kernels(128, 8, [(128, 1536, 2048), (128, 2048, 768)])
    assert not has_expert_kernels(128, 8, [(128, 1536, 2040)])
    assert not has_expert_kernels(1024, 8, [(128, 1536, 2048)])
    assert not has_expert_kernels(128, 33, [(128, 1536, 2048)])


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_EXPERTS", "theirs")
    with pytest.raises(ConfigError, match=r"WEIGHTSYNC_EXPERTS='theirs'; known: own, torch"):
        choose_experts(8, 2, [(8, 48, 64)], torch.bfloat16, torch.device("cpu"))


def make_case(
    counts: tuple[int, ...], weight_rows: int, inner: int
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(len(counts) + inner)
    states = torch.randn(sum(counts) + 3, inner, device=ON).bfloat16()
    weights = torch.randn(len(counts), weight_rows, inner, device=ON).bfloat16() * inner**-0.5
    return states, weights, torch.tensor(offsets_of(counts), dtype=torch.int32, device=ON)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (48, 40), (144, 136), (304, 768)], ids=str)
class TestGroupedProduct:
    def test_in_every_tile_shape(self, counts: tuple[int, ...], sizes: tuple[int, int]) -> None:
        """Right, and with the same bits."""
        states, weights, offsets = make_case(counts, *sizes)
        total = sum(counts)
        expected = torch.zeros(total, sizes[0], dtype=torch.float64, device=ON)
        for expert, (start, end) in enumerate(pairwise([0, *offsets_of(counts)])):
            expected[start:end] = states[start:end].double() @ weights[expert].double().T
        first = cuda_grouped_product(states, weights, offsets, tile_shape=1)[:total]
        torch.testing.assert_close(first.double(), expected, rtol=2**-8, atol=2e-4)
        for shape in (0, *TILE_SHAPES):
            found = cuda_grouped_product(states, weights, offsets, tile_shape=shape)[:total]
            assert torch.equal(found, first), shape

    def test_rows_from_elsewhere_and_gates(
        self, counts: tuple[int, ...], sizes: tuple[int, int]
    ) -> None:
        """The bits of single steps."""
        states, weights, offsets = make_case(counts, *sizes)
        total = sum(counts)
        rows = torch.randint(len(states), (total,), dtype=torch.int32, device=ON)
        expected = cuda_gated(cuda_grouped_product(states[rows], weights, offsets))
        for shape in (0, *TILE_SHAPES):
            found = cuda_grouped_product(
                states, weights, offsets, rows=rows, is_gated=True, tile_shape=shape
            )
            assert torch.equal(found, expected[:total]), shape


@pytest.mark.gpu
def test_a_product_in_a_graph_sees_other_counts() -> None:
    counts = (300, 2, 0, 129, 64, 7, 128, 0)
    states, weights, offsets = make_case(counts, 64, 128)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = cuda_grouped_product(states, weights, offsets)
    for other in (counts, tuple(reversed(counts)), (0,) * 8, (1,) * 8, (0,) * 7 + (633,)):
        offsets.copy_(torch.tensor(offsets_of(other), dtype=torch.int32))
        graph.replay()
        expected = cuda_grouped_product(states, weights, offsets)
        assert torch.equal(found[: sum(other)], expected[: sum(other)])


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (60, 4), (512, 32), (1, 1)])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_routing(num_experts: int, top_k: int, is_normalised: bool) -> None:
    torch.manual_seed(num_experts)
    states = torch.randn(333, 64, device=ON).bfloat16()
    router = torch.randn(num_experts, 64, device=ON).bfloat16() * 0.2
    # All logits of a row differ, so that there is one answer.
    order = torch.argsort(torch.rand(333, num_experts, device=ON), dim=1)
    logits = (order + 0x3E00).to(torch.int16).view(torch.bfloat16)
    weights, experts = route(
        states, router, top_k, is_normalised=is_normalised, product=lambda *_: logits
    )
    experts, places = experts.sort(dim=1)
    found_weights, found = cuda_route(logits, top_k, is_normalised=is_normalised)
    assert torch.equal(found, experts.int())
    torch.testing.assert_close(found_weights, weights.gather(1, places), rtol=2**-7, atol=1e-6)
    again = cuda_route(logits[100:101].clone(), top_k, is_normalised=is_normalised)
    assert torch.equal(again[0], found_weights[100:101])


@pytest.mark.gpu
def test_of_equal_logits_the_first_and_nan_is_an_expert_as_others() -> None:
    logits = torch.zeros(3, 128, device=ON).bfloat16()
    logits[1, 5], logits[1, 100] = 1.0, -1.0
    logits[2] = torch.nan
    weights, experts = cuda_route(logits, 8, is_normalised=True)
    assert experts.tolist() == [[*range(8)], [*range(8)], [*range(8)]]
    assert weights[0].tolist() == [0.125] * 8
    assert weights[1].argmax() == 5
    assert weights[2].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [0, 1, 31, 256, 257, 1500])
@pytest.mark.parametrize(("first", "here"), [(0, 128), (32, 32), (100, 28), (127, 1)])
def test_picks_are_sorted(num_rows: int, first: int, here: int) -> None:
    torch.manual_seed(num_rows)
    experts = torch.rand(num_rows, 128, device=ON).argsort(dim=1)[:, :8].sort(dim=1)[0].int()
    picks = cuda_sort_picks(experts, first, here)
    flat = (experts - first).flatten()
    flat = torch.where((flat >= 0) & (flat < here), flat, here)
    ordered, order = flat.sort(stable=True)
    total = int((flat < here).sum())
    ends = torch.searchsorted(ordered, torch.arange(here, device=ON), right=True)
    assert torch.equal(picks.offsets, ends.int())
    assert torch.equal(picks.rows[:total], (order[:total] // 8).int())
    places = torch.full_like(flat, -1)
    places[order[:total]] = torch.arange(total, device=ON).int()
    assert torch.equal(picks.places.flatten(), places)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 64, 2048, 2056])
def test_sums_have_the_bits_of_single_steps(width: int) -> None:
    torch.manual_seed(width)
    states = torch.randn(400, width, device=ON).bfloat16()
    weights = torch.rand(50, 8, device=ON).bfloat16()
    places = torch.randperm(400, device=ON).int().view(50, 8)
    places[3, 2] = places[4, 0] = places[5] = -1
    parts = states[places.clamp(min=0)] * weights[..., None]
    parts = torch.where((places >= 0)[..., None], parts, 0.0)
    expected = parts[:, 0]
    for pick in range(1, 8):
        expected = expected + parts[:, pick]
    assert torch.equal(cuda_combine(states, weights, places), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "last"), [(0, 16), (4, 9)])
def test_a_layer_says_what_torch_says(first: int, last: int) -> None:
    torch.manual_seed(1)
    states = torch.randn(300, 128, device=ON).bfloat16()
    router = torch.randn(16, 128, device=ON).bfloat16()
    gate_up = torch.randn(16, 96, 128, device=ON).bfloat16() / 11
    down = torch.randn(16, 128, 48, device=ON).bfloat16() / 7
    product = CudaProduct()
    loop = ExpertsMlp(
        router, gate_up[first:last].contiguous(), down[first:last].contiguous(), first, 4, True,
        Compute(product, ALONE, cuda_gated),
    )  # fmt: skip
    parts = tuple(getattr(loop, field.name) for field in fields(loop))
    expected, ours = GroupedExpertsMlp(*parts).forward(states), CudaExpertsMlp(*parts)
    found = ours.forward(states)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=3e-2)
    for at, count in ((0, 1), (7, 1), (20, 16), (100, 200)):
        logits = product(states, router)  # the router's own rows are proven elsewhere
        ours.compute = Compute(
            lambda *_, at=at, count=count, logits=logits: logits[at : at + count], ALONE, cuda_gated
        )
        assert torch.equal(ours.forward(states[at : at + count]), found[at : at + count])
