"""The core's CUDA kernels against the CPU's, and against themselves in other company."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from attention_contract import AttentionContract, run_whole
from torch import Tensor

from engine_adapter.core.attention import Attention, FusedHeads, PagedAttention, write_kv
from engine_adapter.core.batch import StepBatch, StepCounts
from engine_adapter.core.cuda_attention import PagedCudaAttention
from engine_adapter.core.cuda_products import (
    ANCHOR_ROWS,
    CudaProduct,
    cancelling_operands,
)
from engine_adapter.core.cuda_rows import cuda_add_norm, cuda_gated, cuda_norm
from engine_adapter.core.cuda_sampling import Sampled, SampleInputs, sample_on_cuda
from engine_adapter.core.gate import native_gated
from engine_adapter.core.kv_cache import KvCache, KvShape
from engine_adapter.core.norm import native_norm
from engine_adapter.core.rope import rotate
from engine_adapter.core.sampling import SampleRow, sample
from engine_adapter.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ON = "cuda:0"


class TestPagedCudaAttention(AttentionContract):
    device = ON

    def attention(self) -> Attention:
        return PagedCudaAttention()

    @pytest.mark.parametrize("dim", [20, 32, 80])
    def test_the_general_kernel_has_the_bits_of_the_cpu(self, dim: int) -> None:
        for dtype in (torch.float32, torch.bfloat16 if dim != 32 else torch.float32):
            here, there = self.make(dim=dim, dtype=dtype), self.make(dim=dim, dtype=dtype)
            there.attention, there.device = PagedAttention(), "cpu"
            there.cache = KvCache(there.cache.shape, there.cache.num_pages)
            expected = run_whole(there, there.sequence(300))
            assert torch.equal(run_whole(here, here.sequence(300)), expected)

    @pytest.mark.parametrize("dim", [32, 64, 128])
    @pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 16])
    def test_split_and_tiles_agree_at_every_size(self, dim: int, group: int) -> None:
        num_tokens, page_size = 600, 3 if group == 5 else 16
        bench = self.make(dim=dim, heads=2 * group, kv_heads=2, page_size=page_size, num_pages=256)
        sequence = bench.sequence(num_tokens)
        expected = run_whole(bench, sequence).clone()
        for at in (0, 1, 31, 32, 255, 256, 300, 511, 512, 599):
            sequence.num_computed = at
            assert torch.equal(bench.step([(sequence, 1)])[0], expected[at : at + 1]), at
            sequence.num_computed = at

    @pytest.mark.parametrize(("stages", "warps"), [(2, 1), (2, 4), (3, 2), (4, 1)])
    def test_how_it_is_launched_changes_nothing(self, stages: int, warps: int) -> None:
        bench = self.make(dim=128, heads=8, kv_heads=2)
        sequences = [bench.sequence(n) for n in (700, 3, 257)]
        for sequence in sequences:
            run_whole(bench, sequence)

        def last(attention: Attention) -> list[Tensor]:
            bench.attention = attention
            for sequence in sequences:
                sequence.num_computed -= 1
            return bench.step([(s, 1) for s in sequences])

        expected = last(PagedCudaAttention())
        for got, want in zip(last(PagedCudaAttention(stages, warps)), expected, strict=True):
            assert torch.equal(got, want)

    @pytest.mark.parametrize("dim", [32, 64, 128])
    @pytest.mark.parametrize("warps", [2, 4])
    def test_blocks_of_fewer_warps_change_nothing(self, dim: int, warps: int) -> None:
        """As on devices with less shared memory."""
        found = []
        for attention in (PagedCudaAttention(), PagedCudaAttention(0, warps)):
            bench = self.make(attention, dim=dim, heads=12, kv_heads=2)
            found.append(run_whole(bench, bench.sequence(430)))
        assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 100, 128, 1024, 4096, 5120])
def test_norms(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    states, delta = torch.randn(2, 33, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    on = [t.to(ON) for t in (states, delta, weight)]
    expected = native_norm(states, weight, 1e-6)
    got = cuda_norm(on[0], on[2], 1e-6)
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.cpu(), expected, rtol=rtol, atol=1e-5)
    total, normed = cuda_add_norm(on[0].clone(), on[1], on[2], 1e-6)
    assert torch.equal(total.cpu(), states + delta)
    assert torch.equal(normed, cuda_norm(total, on[2], 1e-6))
    assert torch.equal(cuda_norm(on[0][7:8], on[2], 1e-6), got[7:8])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3, 96, 1000, 12288])
def test_gates_have_the_bits_of_the_cpu(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    gate_up = (torch.randn(9, 2 * width) * 4).to(dtype)
    assert torch.equal(cuda_gated(gate_up.to(ON)).cpu(), native_gated(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 24, 32, 128])
@pytest.mark.parametrize("has_norms", [True, False])
def test_heads_are_normed_rotated_and_placed(dtype: torch.dtype, dim: int, has_norms: bool) -> None:
    torch.manual_seed(dim)
    heads, kv_heads, num_rows, page_size = 6, 2, 16, 4
    fused = torch.randn(num_rows, heads + 2 * kv_heads, dim).to(dtype)
    norms = torch.randn(2, dim).to(dtype)
    angles = torch.rand(50, dim // 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions = torch.arange(num_rows) * 3
    slots = torch.randperm(40)[:num_rows]
    slots[-3:] = -1
    query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    if has_norms:
        query, key = (
            cuda_norm(t.to(ON), w.to(ON), 1e-6).cpu()
            for t, w in ((query, norms[0]), (key, norms[1]))
        )
    table = cos[positions][:, None], sin[positions][:, None]
    query, key = rotate(query, *table), rotate(key, *table)
    batch = _batch_of(positions, slots)
    expected = KvCache(KvShape(1, kv_heads, dim, dtype, page_size), 10)
    write_kv(0, key, value, batch, expected)
    cache = KvCache(KvShape(1, kv_heads, dim, dtype, page_size), 10, ON)
    q_norm, k_norm = (norms[0].to(ON), norms[1].to(ON)) if has_norms else (None, None)
    states = fused.to(ON)
    seen: list[Tensor] = []

    class Placing(PagedCudaAttention):
        def _attend(self, layer, query, batch, cache):  # type: ignore[no-untyped-def]
            seen.append(query.clone())
            return query

    fields = [getattr(batch, name).to(ON) for name in ("token_ids", "positions", "slot_mapping",
              "query_starts", "context_lens", "block_tables", "logit_rows")]  # fmt: skip
    Placing().attend_fused(
        0,
        FusedHeads(states, q_norm, k_norm, cos.to(ON), sin.to(ON), 1e-6),
        StepBatch(*fields),
        cache,
    )
    # Squares of a head are added in another order than a row's: a rounding apart, where normed.
    atol = 2e-2 if has_norms and dtype != torch.float32 else 1e-5 if has_norms else 0.0
    torch.testing.assert_close(seen[0].cpu(), query, rtol=0.0, atol=atol * 4)
    torch.testing.assert_close(cache.keys.cpu(), expected.keys, rtol=0.0, atol=atol * 4)
    assert torch.equal(cache.values.cpu(), expected.values)


def _batch_of(positions: Tensor, slots: Tensor) -> StepBatch:
    none = torch.zeros(0, dtype=torch.int64)
    count = torch.tensor([len(positions)], dtype=torch.int32)
    starts = torch.tensor([0, len(positions)], dtype=torch.int32)
    tables = torch.zeros(1, 10, dtype=torch.int32)
    return StepBatch(torch.zeros_like(positions), positions, slots, starts, count, tables, none)


def _sampled(logits: Tensor, rows: list[SampleRow], drawn_from: Tensor | None = None) -> Sampled:
    def on(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=ON)

    inputs = SampleInputs(
        on([r.seed for r in rows], torch.int64),
        on([r.position for r in rows], torch.int64),
        on([0.0 if r.params.is_greedy else 1.0 for r in rows], torch.float32),
        on([r.params.temperature or 1.0 for r in rows], torch.float32),
        on([-1 if r.given is None else r.given for r in rows], torch.int64),
    )
    return sample_on_cuda(logits.to(ON), inputs, drawn_from)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [5, 131, 4096, 4097, 151_936])
def test_sampled_tokens_are_those_of_the_cpu(dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(vocab)
    temperatures = (0.0, 1.0, 0.7, 1.3)
    logits = (torch.randn(24, vocab) * 2).to(dtype)
    rows = [
        SampleRow(
            SamplingParams(temperature=temperatures[i % 4]), seed=i * 77, position=i,
            given=2 if i % 6 == 5 else None,
        )
        for i in range(24)
    ]  # fmt: skip
    expected = sample(logits, rows)
    got = sample(logits.to(ON), rows)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.token == theirs.token
        assert mine.log_prob == pytest.approx(theirs.log_prob, abs=2e-5)
    alone = _sampled(logits[13:14], rows[13:14])
    whole = _sampled(logits, rows)
    assert torch.equal(alone.numbers[0], whole.numbers[13])
    full = whole.log_probs_of(logits.to(ON)).gather(1, whole.tokens[:, None])[:, 0]
    assert torch.equal(full, whole.numbers[:, 0])


@pytest.mark.parametrize("scale", [0.0, 0.3, 20.0])
@pytest.mark.parametrize("top_k", [0, 50])
def test_tokens_of_flat_and_of_steep_rows_are_those_of_the_cpu(scale: float, top_k: int) -> None:
    """The device leaves out whose noise cannot win; ties of equal scores go to the lower token."""
    torch.manual_seed(1)
    logits = (torch.randn(64, 20_000) * scale).bfloat16()
    rows = [
        SampleRow(SamplingParams(temperature=0.8, top_k=top_k), seed=i, position=9)
        for i in range(64)
    ]
    expected = [found.token for found in sample(logits, rows) if found is not None]
    assert [found.token for found in sample(logits.to(ON), rows) if found is not None] == expected
    assert len(expected) == 64


def test_among_equal_scores_the_same_token_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(8, 20_000) * 2).round().bfloat16()
    logits[6:] *= 1000
    rows = [
        SampleRow(SamplingParams(temperature=(0.0, 0.01, 3.0)[i % 3]), seed=i, position=9)
        for i in range(8)
    ]
    for mine, theirs in zip(sample(logits.to(ON), rows), sample(logits, rows), strict=True):
        assert mine is not None
        assert theirs is not None
        assert mine.token == theirs.token
        assert mine.log_prob == pytest.approx(theirs.log_prob, abs=2e-5)


def test_rows_without_a_distribution_and_tokens_that_are_ruled_out() -> None:
    logits = torch.zeros(5, 9000)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 100] = torch.inf
    logits[3, :8999] = -torch.inf
    params = SamplingParams(temperature=1.0)
    rows = [SampleRow(params, seed=i, position=3) for i in range(5)]
    rows[4] = SampleRow(SamplingParams(temperature=0.0, top_log_probs=3), 0, 3, banned=(0, 1))
    got = sample(logits.to(ON), rows)
    assert got[:3] == [None, None, None]
    assert got[3] is not None
    assert (got[3].token, got[3].log_prob) == (8999, 0.0)
    assert got[4] is not None
    assert got[4].token == 2
    assert [token for token, _ in got[4].top] == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(131, 64), (64, 128), (1024, 3072), (4096, 4096), (128, 2048)])
def test_products_have_rows_of_their_own(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    product = CudaProduct()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        proven = product.prove([shape], dtype, torch.device(ON))[shape]
    assert proven.least <= ANCHOR_ROWS <= proven.most
    states, weight = cancelling_operands(3000, shape, dtype, torch.device(ON))
    whole = product(states, weight)
    for first, count in ((0, 1), (70, 1), (5, 2), (9, 7), (11, 30), (100, 256), (301, 999)):
        part = product(states[first : first + count], weight)
        assert torch.equal(part, whole[first : first + count]), (count, proven)
    states = torch.randn(300, shape[1], dtype=dtype, device=ON)
    torch.testing.assert_close(
        product(states, weight), F.linear(states, weight), rtol=2e-2, atol=2e-2
    )


def test_a_large_decode_step_equals_its_sequences_alone() -> None:
    """256 sequences of 1,024 tokens, 32 query heads on 8: shapes of a large model."""
    torch.manual_seed(3)
    num_sequences, pages, page_size, heads, kv_heads, dim = 256, 16, 64, 32, 8, 128
    cache = KvCache(KvShape(1, kv_heads, dim, torch.bfloat16, page_size), pages * num_sequences, ON)
    cache.keys.normal_()
    cache.values.normal_()
    tables = torch.randperm(pages * num_sequences, device=ON).int().view(num_sequences, pages)
    query = torch.randn(num_sequences, heads, dim, dtype=torch.bfloat16, device=ON)
    lens = torch.full((num_sequences,), pages * page_size, dtype=torch.int32, device=ON)

    def attend(chosen: slice) -> Tensor:
        rows = len(lens[chosen])
        starts = torch.arange(rows + 1, dtype=torch.int32, device=ON)
        nowhere = torch.full((rows,), -1, dtype=torch.int64, device=ON)
        batch = StepBatch(
            nowhere, nowhere, nowhere, starts, lens[chosen], tables[chosen].contiguous(), nowhere,
            StepCounts(rows, 1, rows * 4),
        )  # fmt: skip
        return PagedCudaAttention()._attend(0, query[chosen].contiguous(), batch, cache)

    whole = attend(slice(0, num_sequences))
    torch.cuda.synchronize()
    assert torch.isfinite(whole).all()
    for place in (0, 1, 100, 255):
        assert torch.equal(attend(slice(place, place + 1))[0], whole[place])
