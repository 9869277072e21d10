"""Products of few rows: how a launch is cut, and on a GPU the bits of the libraries' products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.core.cuda_products import cancelling_operands, prepare_cublas
from engine_adapter.core.cuda_rows import cuda_gated
from engine_adapter.core.few_rows import multiply_few, takes
from weightsync import native
from weightsync.config import small_products
from weightsync.errors import ConfigError
from weightsync.native_few_rows import MOST_FEW_ROWS, FewRowsSizes

SHARED_BYTES = 232_448  # of a block, on an H100
SHAPES = [(8, 32), (16, 64), (64, 96), (131 * 8, 160), (1024, 3072), (4096, 4096), (4096, 12_288)]


@given(
    rows=st.integers(1, MOST_FEW_ROWS),
    tiles=st.integers(1, 20_000),
    inner=st.integers(1, 512).map(lambda n: 32 * n),
    is_gated=st.booleans(),
    num_multiprocessors=st.integers(1, 160),
)
def test_a_launch_has_a_warp_for_every_tile_and_fits(
    rows: int, tiles: int, inner: int, is_gated: bool, num_multiprocessors: int
) -> None:
    sizes = FewRowsSizes(rows, tiles * (16 if is_gated else 8), inner, inner)
    blocks, warps, stages, shared_bytes = native.extension.few_rows_shape(
        is_gated, sizes, num_multiprocessors, SHARED_BYTES
    )
    assert 1 <= blocks <= min(tiles, num_multiprocessors)
    stage_bytes = 16 * 528 if is_gated else 8 * 1040
    states_bytes = rows * (2 * inner + 16)
    if states_bytes + 2 * stage_bytes > SHARED_BYTES:
        assert shared_bytes == 0
        return
    assert 1 <= warps <= (12 if is_gated else 8)
    assert stages in (2, 3, 4, 6, 8, 12)
    needed = states_bytes + warps * stages * stage_bytes
    # More than half: no two blocks of products on one multiprocessor, and none without.
    assert max(needed, SHARED_BYTES // 2 + 1) <= shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    ("weight_rows", "warps"), [(4096, 4), (6144, 6), (24_576, 8), (1024, 1), (151_936, 8)]
)
def test_few_warps_are_idle(weight_rows: int, warps: int) -> None:
    sizes = FewRowsSizes(1, weight_rows, 4096, 4096)
    found = native.extension.few_rows_shape(False, sizes, 132, SHARED_BYTES)
    assert found[1] == warps


def test_an_unknown_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_SMALL_PRODUCTS", "theirs")
    with pytest.raises(ConfigError, match=r"WEIGHTSYNC_SMALL_PRODUCTS='theirs'; known: own, torch"):
        small_products()


def test_it_is_not_for_a_cpu() -> None:
    states, weight = torch.zeros(1, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
    assert not takes(states, weight)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_bits_are_those_of_many_rows(self, shape: tuple[int, int]) -> None:
        """On operands that show any other order of summing, wherever the rows stand."""
        prepare_cublas()
        device = torch.device("cuda", 0)
        states, weight = cancelling_operands(64, shape, torch.bfloat16, device)
        expected = F.linear(states, weight)
        if shape[1] > 1024:
            assert expected.count_nonzero() > expected.numel() // 2  # rounding to compare
        for count in range(1, MOST_FEW_ROWS + 1):
            rows = states[count : 2 * count]
            assert takes(rows, weight)
            assert torch.equal(multiply_few(rows, weight), expected[count : 2 * count]), count

    @pytest.mark.parametrize("shape", [(16, 32), (96, 160), (24_576, 4096)], ids=str)
    @pytest.mark.parametrize("count", range(1, MOST_FEW_ROWS + 1))
    def test_a_gated_product_has_the_bits_of_its_parts(
        self, shape: tuple[int, int], count: int
    ) -> None:
        torch.manual_seed(count)
        states = torch.randn(count, shape[1], device="cuda").bfloat16()
        weight = torch.randn(shape, device="cuda").bfloat16()
        assert takes(states, weight, is_gated=True)
        apart = cuda_gated(multiply_few(states, weight))
        assert torch.equal(multiply_few(states, weight, is_gated=True), apart)

    def test_rows_of_a_wider_tensor_and_what_is_not_finite(self) -> None:
        torch.manual_seed(0)
        wide = torch.randn(3, 256, device="cuda").bfloat16()
        wide[1, 128:] = torch.inf
        weight = torch.randn(24, 128, device="cuda").bfloat16()
        found = multiply_few(wide[:, 128:], weight)
        assert not found[1].isfinite().any()
        torch.testing.assert_close(found[[0, 2]], F.linear(wide[[0, 2], 128:], weight))
        assert torch.equal(found[[0, 2]], multiply_few(wide[[0, 2], 128:], weight))

    def test_one_behind_another_in_a_graph(self) -> None:
        """Each begins to read its weight while the one before it runs; states are waited for."""
        torch.manual_seed(1)
        weights = [torch.randn(512, 512, device="cuda").bfloat16() / 22 for _ in range(24)]
        start = torch.randn(2, 512, device="cuda").bfloat16()

        def run() -> torch.Tensor:
            states = start
            for weight in weights:
                states = multiply_few(states, weight)
            return states

        expected = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for scale in (1.0, 2.0, 1.0):
            start *= scale
            expected = run()
            graph.replay()
            assert torch.equal(out, expected)

    @pytest.mark.parametrize(
        ("rows", "shape"),
        [(MOST_FEW_ROWS + 1, (64, 64)), (1, (12, 64)), (1, (64, 48)), (4, (64, 32_768))],
    )
    def test_other_sizes_are_not_taken(self, rows: int, shape: tuple[int, int]) -> None:
        states = torch.zeros(rows, shape[1], device="cuda").bfloat16()
        weight = torch.zeros(shape, device="cuda").bfloat16()
        assert not takes(states, weight)
        with pytest.raises(ValueError, match="few rows"):
            multiply_few(states, weight)
