"""The native attention on the CPU."""

from __future__ import annotations

import pytest
import torch
from attention_contract import AttentionContract, Bench, run_whole
from torch import Tensor

from engine_adapter.core.attention import Attention, PagedAttention
from engine_adapter.core.batch import StepBatch
from engine_adapter.core.kv_cache import KvCache


class TestPagedAttention(AttentionContract):
    def attention(self) -> Attention:
        return PagedAttention(num_threads=3)


class Fused(PagedAttention):
    """Hands the kernel views of one fused tensor, as a fused projection gives them."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: StepBatch,
        cache: KvCache,
    ) -> Tensor:
        parts = [query, key, value]
        fused = torch.cat([p.flatten(1) for p in parts], dim=1)
        split = torch.split(fused, [p[0].numel() for p in parts], dim=1)
        views = [s.view(p.shape) for s, p in zip(split, parts, strict=True)]
        assert not views[0].is_contiguous()
        return super().attend(layer, views[0], views[1], views[2], batch, cache)


def test_views_of_a_fused_projection() -> None:
    plain, fused = Bench.make(PagedAttention()), Bench.make(Fused())
    expected = run_whole(plain, plain.sequence(50))
    assert torch.equal(run_whole(fused, fused.sequence(50)), expected)


def test_bad_indices_are_named_and_nothing_is_written() -> None:
    bench = Bench.make(PagedAttention(), num_pages=4)
    sequence = bench.sequence(20)
    for pages, what in (([0, 9], "page 9 of 4"), ([-1, 0], "page -1")):
        sequence.pages, sequence.num_computed = pages, 0
        with pytest.raises(ValueError, match=f"sequence 0: {what}|slot"):
            run_whole(bench, sequence)
    assert not bench.cache.keys.any()
