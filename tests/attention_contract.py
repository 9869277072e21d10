"""What every paged attention must do: near fp64, near the reference, equal to itself in any batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_adapter.core.attention import Attention, ReferenceAttention
from engine_adapter.core.batch import StepBatch, padded_rows
from engine_adapter.core.kv_cache import KvCache, KvShape
from weightsync.errors import ConfigError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Sequence:
    """Random q, k, v of one sequence, and the pages it owns."""

    query: Tensor  # [tokens, heads, D]
    key: Tensor
    value: Tensor
    pages: list[int]
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.query)


@dataclass
class Bench:
    """A cache, and a way to run steps over sequences."""

    attention: Attention
    cache: KvCache
    num_heads: int
    generator: torch.Generator
    free_pages: list[int]
    device: str = "cpu"

    @classmethod
    def make(
        cls,
        attention: Attention,
        *,
        device: str = "cpu",
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 16,
        num_pages: int = 128,
        layers: int = 1,
    ) -> Bench:
        cache = KvCache(KvShape(layers, kv_heads, dim, dtype, page_size), num_pages, device)
        generator = torch.Generator().manual_seed(5)
        # Shuffled, so that neighbours in a sequence are not neighbours in memory.
        order = torch.randperm(num_pages, generator=generator).tolist()
        return cls(attention, cache, heads, generator, order, device)

    def sequence(self, num_tokens: int, scale: float = 1.0) -> Sequence:
        shape = self.cache.shape
        num_pages = -(-num_tokens // shape.page_size)
        pages = [self.free_pages.pop() for _ in range(num_pages)]

        def draw(heads: int) -> Tensor:
            values = torch.randn(num_tokens, heads, shape.head_dim, generator=self.generator)
            return (values * scale).to(shape.dtype)

        kv_heads = shape.num_kv_heads
        return Sequence(draw(self.num_heads), draw(kv_heads), draw(kv_heads), pages)

    def step(self, work: list[tuple[Sequence, int]], layer: int = 0) -> list[Tensor]:
        """The next ``count`` tokens of each sequence; returns [count, heads, D] of each."""
        rows = padded_rows(sum(count for _, count in work))
        shape = self.cache.shape
        query = torch.full((rows, self.num_heads, shape.head_dim), 3.0, dtype=shape.dtype)
        key = torch.full((rows, shape.num_kv_heads, shape.head_dim), 3.0, dtype=shape.dtype)
        value = key.clone()
        slots = torch.full((rows,), -1, dtype=torch.int64)
        starts, lens, row = [0], [], 0
        for sequence, count in work:
            for token in range(sequence.num_computed, sequence.num_computed + count):
                query[row], key[row] = sequence.query[token], sequence.key[token]
                value[row] = sequence.value[token]
                page = sequence.pages[token // shape.page_size]
                slots[row] = page * shape.page_size + token % shape.page_size
                row += 1
            sequence.num_computed += count
            starts.append(row)
            lens.append(sequence.num_computed)
        width = max(len(sequence.pages) for sequence, _ in work)
        tables = [s.pages + [-1] * (width - len(s.pages)) for s, _ in work]
        where = self.device
        batch = StepBatch(
            token_ids=torch.zeros(rows, dtype=torch.int64, device=where),
            positions=torch.zeros(rows, dtype=torch.int64, device=where),
            slot_mapping=slots.to(where),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=where),
            context_lens=torch.tensor(lens, dtype=torch.int32, device=where),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=where),
            logit_rows=torch.zeros(0, dtype=torch.int64, device=where),
        )
        parts = query.to(where), key.to(where), value.to(where)
        out = self.attention.attend(layer, *parts, batch, self.cache).cpu()
        assert not out[row:].any(), "padding rows are zero"
        out = out.view(rows, self.num_heads, shape.head_dim)
        return [out[a:b] for a, b in pairwise(starts)]


def exact(sequence: Sequence) -> Tensor:
    """Attention of every row in fp64, [tokens, heads, D]."""
    group = sequence.query.shape[1] // sequence.key.shape[1]
    query = sequence.query.double().transpose(0, 1)
    key = sequence.key.double().transpose(0, 1).repeat_interleave(group, 0)
    value = sequence.value.double().transpose(0, 1).repeat_interleave(group, 0)
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    ahead = torch.ones_like(scores[0]).triu(1).bool()
    rows: Tensor = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ value
    return rows.transpose(0, 1)


def ulps_of_row_maximum(got: Tensor, expected: Tensor) -> float:
    """The largest error of [rows, heads, D], in units of the last place of its row's maximum."""
    largest = expected.abs().amax(-1, keepdim=True).double()
    ulp = torch.exp2(torch.floor(torch.log2(largest))) * torch.finfo(got.dtype).eps
    return float(((got.double() - expected.double()).abs() / ulp).max())


def run_whole(bench: Bench, sequence: Sequence) -> Tensor:
    return bench.step([(sequence, sequence.num_tokens)])[0]


class AttentionContract:
    """Inherited by the tests of each implementation, which says how one is made and where it runs."""

    device = "cpu"

    def attention(self) -> Attention:
        raise NotImplementedError

    def make(self, attention: Attention | None = None, **settings: Any) -> Bench:
        return Bench.make(attention or self.attention(), device=self.device, **settings)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("page_size", [16, 64])
    @pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 600])
    def test_within_two_ulp_of_fp64(
        self, dtype: torch.dtype, page_size: int, num_tokens: int
    ) -> None:
        bench = self.make(dtype=dtype, page_size=page_size)
        sequence = bench.sequence(num_tokens)
        got = run_whole(bench, sequence)
        if dtype == torch.float32:  # its own rounding is what is left; the bound is absolute
            assert (got.double() - exact(sequence)).abs().max() < 1e-5
        else:
            assert ulps_of_row_maximum(got, exact(sequence).to(dtype)) <= 2

    @pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
    @pytest.mark.parametrize("dim", [16, 20, 80, 128])
    def test_every_group_and_head_size(self, group: int, dim: int) -> None:
        bench = self.make(heads=2 * group, kv_heads=2, dim=dim)
        sequence = bench.sequence(77)
        got = run_whole(bench, sequence)
        assert ulps_of_row_maximum(got, exact(sequence).bfloat16()) <= 2

    def test_within_two_ulp_of_the_reference(self) -> None:
        for num_tokens in (1, 31, 300):
            bench = self.make()
            sequence = bench.sequence(num_tokens, scale=0.5)
            got = run_whole(bench, sequence)
            reference = self.make(ReferenceAttention())
            again = reference.sequence(num_tokens, scale=0.5)
            assert torch.equal(again.query, sequence.query)
            assert ulps_of_row_maximum(got, run_whole(reference, again)) <= 2

    def test_large_scores_and_far_tokens(self) -> None:
        """One score far above the others takes all; a flat row is the mean of V."""
        bench = self.make(dtype=torch.float32, heads=2, kv_heads=1)
        sharp, flat = bench.sequence(300), bench.sequence(300)
        sharp.key[:] = 0
        sharp.query[:] = 0
        sharp.key[3, :, 0], sharp.query[-1, :, 0] = 100.0, 100.0
        flat.query[:] = 0
        out = bench.step([(sharp, 300), (flat, 300)])
        assert torch.equal(out[0][-1], sharp.value[3].expand(2, -1))
        assert torch.allclose(out[1][-1, 0], flat.value[:, 0].mean(0), atol=1e-6)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_decode_prefill_and_chunks_give_the_same_bits(self, dtype: torch.dtype) -> None:
        lengths = (1, 40, 257, 300)
        whole = self.make(dtype=dtype)
        sequences = [whole.sequence(n) for n in lengths]
        expected = [run_whole(whole, s) for s in sequences]

        cut = self.make(dtype=dtype, page_size=64)
        again = [cut.sequence(n) for n in lengths]
        got: list[list[Tensor]] = [[] for _ in lengths]
        picks = torch.Generator().manual_seed(1)
        while any(s.num_computed < s.num_tokens for s in again):
            work, members = [], []
            for index, sequence in enumerate(again):
                left = sequence.num_tokens - sequence.num_computed
                count = int(torch.randint(0, min(left, 37) + 1, (), generator=picks))
                if count:
                    work.append((sequence, count))
                    members.append(index)
            if work:
                for index, rows in zip(members, cut.step(work), strict=True):
                    got[index].append(rows.clone())
        for parts, rows in zip(got, expected, strict=True):
            assert torch.equal(torch.cat(parts), rows)

    @settings(
        max_examples=40, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(st.data())
    def test_a_row_does_not_depend_on_its_batch(self, data: st.DataObject) -> None:
        dtype = data.draw(st.sampled_from(DTYPES))
        page_size = data.draw(st.sampled_from([1, 3, 16, 64]))
        dim = data.draw(st.sampled_from([16, 32]))
        bench = self.make(dtype=dtype, page_size=page_size, num_pages=1000, dim=dim)
        sequence = bench.sequence(data.draw(st.integers(1, 300)))
        expected = run_whole(bench, sequence).clone()
        others = [bench.sequence(data.draw(st.integers(1, 60))) for _ in range(3)]
        sequence.num_computed = 0
        place = data.draw(st.integers(0, 3))
        got: list[Tensor] = []
        while sequence.num_computed < sequence.num_tokens:
            left = sequence.num_tokens - sequence.num_computed
            work = [(o, 1) for o in others if o.num_computed < o.num_tokens]
            place = min(place, len(work))
            work.insert(place, (sequence, data.draw(st.integers(1, left))))
            got.append(bench.step(work)[place].clone())
        assert torch.equal(torch.cat(got), expected)

    def test_layers_are_apart_and_strided_inputs_are_read(self) -> None:
        bench = self.make(layers=3)
        sequence = bench.sequence(20)
        expected = run_whole(bench, sequence)
        assert not bench.cache.keys[1:].any()
        sequence.num_computed = 0
        assert torch.equal(bench.step([(sequence, 20)], layer=2)[0], expected)
        assert torch.equal(bench.cache.keys[2], bench.cache.keys[0])
        assert not bench.cache.keys[1].any()

    def test_a_bad_number_stays_in_its_sequence(self) -> None:
        bench = self.make()
        good, bad = bench.sequence(30), bench.sequence(30)
        expected = run_whole(bench, good).clone()
        good.num_computed = 0
        bad.key[4] = torch.nan
        out = bench.step([(bad, 30), (good, 30)])
        assert torch.equal(out[1], expected)
        assert torch.isfinite(out[0][:4]).all()
        assert out[0][4:].isnan().all()

    def test_pages_left_dirty_are_not_read(self) -> None:
        bench = self.make()
        sequence = bench.sequence(21)
        expected = run_whole(bench, sequence).clone()
        sequence.num_computed = 0
        bench.cache.keys.fill_(torch.nan)
        bench.cache.values.fill_(torch.nan)
        assert torch.equal(run_whole(bench, sequence), expected)

    def test_dtypes_must_agree(self) -> None:
        bench = self.make()
        sequence = bench.sequence(3)
        sequence.query = sequence.query.float()
        bench.cache.keys = bench.cache.keys.float()
        with pytest.raises(ConfigError, match=r"key torch\.bfloat16"):
            run_whole(bench, sequence)
