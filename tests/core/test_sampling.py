"""Choosing tokens: the noise, the filters, the log-probs, and that rows are alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.core.sampling import (
    SampleRow,
    apply_filters,
    draw_with_torch,
    gumbel_noise_torch,
    log_softmax_rows,
    sample,
)
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.errors import ConfigError
from weightsync.native_sampling import gumbel_noise, gumbel_of_bits, sample_tokens

GREEDY = SamplingParams(temperature=0.0)


def row(seed: int = 1, position: int = 0, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, position)


def draws(logits: list[float], count: int, **params: Any) -> np.ndarray[Any, Any]:
    """Tokens of ``count`` seeds, one row each."""
    rows = [row(seed, 3, **params) for seed in range(count)]
    found = sample(torch.tensor(logits).expand(count, -1), rows)
    return np.array([f.token for f in found if f is not None])


# --- noise -------------------------------------------------------------------------------------------


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(seed=7, position=11, vocab_size=200_000).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772156649, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
    uniform = np.sort(np.exp(-np.exp(-noise)))
    assert np.abs(uniform - (np.arange(200_000) + 0.5) / 200_000).max() < 0.005


@pytest.mark.parametrize("other", [(8, 11), (7, 12), (7 + 2**40, 11)])
def test_noise_of_another_seed_or_position_is_unrelated(other: tuple[int, int]) -> None:
    first = gumbel_noise(7, 11, 50_000)
    second = gumbel_noise(*other, 50_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < 0.02


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31))
def test_noise_in_torch_is_the_same(seed: int, position: int) -> None:
    native = torch.from_numpy(gumbel_noise(seed, position, 300))
    again = gumbel_noise_torch(seed, position, 300, torch.device("cpu"))
    assert torch.allclose(native, again, atol=2e-6, rtol=2e-6)
    assert torch.isfinite(native).all()


def test_noise_lies_between_its_bounds() -> None:
    """Whoever relies on them never misses the largest: at every power of two, and all over."""
    edges = [(1 << k) + d for k in range(32) for d in (-1, 0, 1)] + [(1 << 32) - 1]
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 21, dtype=np.uint64)
    few = drawn >> (drawn % 32)  # as many with many zeros
    bits = np.concatenate([np.array(edges, dtype=np.uint64), drawn, few]).astype(np.uint32)
    noise, low, high = gumbel_of_bits(bits)
    assert (low <= noise).all()
    assert (noise <= high).all()
    assert (high - low)[bits < 1 << 31].max() < 1.03
    assert noise.max() == pytest.approx(22.87, abs=0.01)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    assert np.array_equal(gumbel_noise(5, 6, 1000)[:77], gumbel_noise(5, 6, 77))


def test_draws_follow_the_distribution() -> None:
    logits = [2.0, 1.0, 0.0, -1.0, -30.0]
    expected = torch.tensor(logits).softmax(0).numpy()
    counts = np.bincount(draws(logits, 20_000), minlength=5)
    for count, probability in zip(counts, expected, strict=True):
        spread = math.sqrt(20_000 * probability * (1 - probability)) + 1
        assert abs(count - 20_000 * probability) < 4.5 * spread


def test_draws_of_one_seed_over_positions_follow_it_too() -> None:
    rows = [row(5, position) for position in range(10_000)]
    found = sample(torch.tensor([0.0, 0.0, math.log(2)]).expand(10_000, -1), rows)
    counts = np.bincount([f.token for f in found if f], minlength=3)
    assert counts / 10_000 == pytest.approx([0.25, 0.25, 0.5], abs=0.02)


# --- choice ------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    found = sample(logits, [SampleRow(GREEDY, seed, 0) for seed in (1, 2)])
    assert [f.token for f in found if f] == [1, 0]


def test_log_probs_before_and_after_temperature() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    (found,) = sample(logits, [row(temperature=0.5, top_k=1)])
    assert found is not None
    assert found.token == 1
    assert found.log_prob == float(logits.log_softmax(-1)[0, 1])
    assert found.tempered == float((logits / 0.5).log_softmax(-1)[0, 1])
    (greedy,) = sample(logits, [SampleRow(GREEDY, 0, 0)])
    assert greedy is not None
    assert greedy.tempered == greedy.log_prob == found.log_prob


def test_top_log_probs_come_in_order() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    (found,) = sample(logits, [row(top_log_probs=3)])
    assert found is not None
    assert [token for token, _ in found.top] == [1, 3, 2]
    expected = logits.log_softmax(-1)[0]
    assert [value for _, value in found.top] == [float(expected[t]) for t, _ in found.top]
    (all_of_them,) = sample(logits, [row(top_log_probs=50)])
    assert all_of_them is not None
    assert len(all_of_them.top) == 4


def kept(logits: list[float], **params: Any) -> list[int]:
    filtered = apply_filters(torch.tensor([logits]), [SamplingParams(**params)])
    return (filtered[0] > -torch.inf).nonzero().flatten().tolist()


def test_filters() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits, top_k=2) == [1, 3]
    assert kept(logits, top_k=1) == [1]
    assert kept(logits, top_k=9) == [0, 1, 2, 3]
    assert kept(logits, top_p=0.69) == [1, 3]
    assert kept(logits, top_p=0.71) == [1, 2, 3]
    assert kept(logits, top_p=1e-9) == [1]
    assert kept(logits, min_p=0.6) == [1, 3]
    assert kept(logits, min_p=1.0) == [1]
    # top-p counts among what top-k kept: of 0.4 and 0.3 the first alone is 0.57.
    assert kept(logits, top_k=2, top_p=0.57) == [1]
    assert kept(logits, top_k=3, top_p=0.57) == [1, 3]


def test_filters_break_ties_by_id() -> None:
    assert kept([1.0, 1.0, 1.0, 1.0], top_k=2) == [0, 1]
    assert kept([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]


def test_filtered_draws_stay_within() -> None:
    found = draws([2.0, 1.9, 1.8, 0.0], 500, top_k=2, temperature=3.0)
    assert set(found) == {0, 1}


def test_banned_tokens_are_not_drawn_and_log_probs_do_not_know() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    (found,) = sample(logits, [SampleRow(GREEDY, 0, 0, banned=(1,))])
    assert found is not None
    assert found.token == 2
    assert found.log_prob == float(logits.log_softmax(-1)[0, 2])


def test_given_tokens_are_only_reported() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, 9.0, 1.0]])
    rows = [SampleRow(GREEDY, 0, 0, given=0), SampleRow(GREEDY, 0, 0)]
    found = sample(logits, rows)
    assert [f.token for f in found if f] == [0, 1]
    assert [f.token for f in sample(logits[:1], rows[:1]) if f] == [0]


@pytest.mark.parametrize("bad", [[math.nan, 0.0, 0.0], [0.0, math.inf, 0.0], [-math.inf] * 3])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.5}])
def test_a_row_without_a_distribution_is_none_and_others_stay(bad: Any, params: Any) -> None:
    good = [0.0, 2.0, 1.0]
    alone = sample(torch.tensor([good]), [row(**params)])[0]
    found = sample(torch.tensor([good, bad, good]), [row(**params)] * 3)
    assert found == [alone, None, alone]


def test_a_token_ruled_out_by_the_model_is_no_error() -> None:
    (found,) = sample(torch.tensor([[0.0, -math.inf]]), [row()])
    assert found is not None
    assert found.token == 0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_batch(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([5, 16, 131, 1000, 4097]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    count = data.draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = (torch.randn(count, vocab, generator=generator) * 3).to(dtype)
    choices = ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8, "top_log_probs": 3},
               {"top_k": 3, "min_p": 0.01, "temperature": 1.3})  # fmt: skip
    rows = [row(i, i * 3, **data.draw(st.sampled_from(choices))) for i in range(count)]
    together = sample(logits, rows)
    for index in range(0, count, 7):
        assert sample(logits[index : index + 1].clone(), [rows[index]])[0] == together[index]


def test_torch_draws_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 500, generator=generator)
    scores[3], scores[4, :499] = math.nan, -math.inf
    seeds, positions = list(range(64)), list(range(100, 164))
    scales = [float(i % 3 > 0) for i in range(64)]
    native = sample_tokens(
        scores.data_ptr(), 500, 500, np.array(seeds, np.uint64), np.array(positions),
        np.array(scales, np.float32), num_threads=3,
    )  # fmt: skip
    assert native.tolist() == draw_with_torch(scores, seeds, positions, scales).tolist()
    assert native[3] == -1
    assert native[4] == 499


# --- parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", "1"), ("temperature", True), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1),
        ("top_k", 1.5), ("min_p", 2), ("n", 0), ("max_tokens", 0), ("min_tokens", 200),
        ("seed", -1), ("seed", 2**63), ("stop", ""), ("stop", [1]), ("stop_token_ids", [-2]),
        ("ignore_eos", 1), ("top_log_probs", 101),
    ],
)  # fmt: skip
def test_bad_values_name_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*expected"):
        SamplingParams(**{name: value})


def test_an_unknown_parameter_lists_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"'temprature'; did you mean 'temperature'.*top_log_probs"
    ):
        SamplingParams.parse({"temprature": 1.0})
    parsed = SamplingParams.parse({"temperature": 0.5, "stop": "\n", "stop_token_ids": 3})
    assert parsed.stop_strings == ("\n",)
    assert parsed.stop_tokens == (3,)


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 33, 512, 1000])
def test_log_softmax_of_few_logits_has_the_bits_of_many(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    many = torch.randn(40_000 // vocab_size + 1, vocab_size)
    wanted = torch.log_softmax(many, dim=-1)
    assert torch.equal(log_softmax_rows(many), wanted)
    for rows in (many[:1], many[:3], many[5:37]):
        assert torch.equal(log_softmax_rows(rows), torch.log_softmax(rows, dim=-1))
    assert torch.equal(log_softmax_rows(many[5:37]), wanted[5:37])
