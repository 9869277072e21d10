"""Logits to tokens and log-probs. Every row is worked out on its own: no bit depends on the batch.

The order: log-softmax of the logits in fp32 (what is reported), temperature, tokens that may not
end the request yet, top-k, top-p, min-p, noise, largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine_adapter.core.cuda_launch import WORDS
from engine_adapter.core.cuda_sampling import SampleInputs, sample_on_cuda
from engine_adapter.core.products import has_kernels
from engine_adapter.core.request import TokenLogProbs
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.native_sampling import sample_tokens

#: Logits that are not worth torch's threads: what torch itself takes for the least work of one.
_FEW_LOGITS: Final = 32_768
_MASK32: Final = 0xFFFFFFFF
_MASK64: Final = 0xFFFFFFFFFFFFFFFF
_GOLDEN: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How a row of logits becomes a token.

    ``position`` is that of the new token in its sequence; ``banned`` tokens cannot be drawn;
    ``given``, if set, is the token to report instead of drawing one.
    """

    params: SamplingParams
    seed: int
    position: int
    banned: tuple[int, ...] = ()
    given: int | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[TokenLogProbs | None]:
    """A token and its log-probs for each row of ``logits`` [rows, vocabulary], any float dtype.

    None stands for a row that cannot be: it holds NaN, or an infinity that leaves no distribution.
    """
    if not rows:
        return []
    if has_kernels(logits.device) and logits.dtype in WORDS:
        return _sample_by_kernel(logits, rows)
    logits = logits.float()
    log_probs = log_softmax_rows(logits)
    temperatures = torch.tensor(
        [row.params.temperature or 1.0 for row in rows], dtype=torch.float32, device=logits.device
    )
    is_tempered = any(row.params.temperature not in (0.0, 1.0) for row in rows)
    scores = logits / temperatures[:, None] if is_tempered else logits
    tempered = log_softmax_rows(scores) if is_tempered else log_probs
    tokens = _choose(scores, rows)
    picked = tokens.clamp(min=0)[:, None]
    chosen = torch.cat([log_probs.gather(1, picked), tempered.gather(1, picked)], dim=1)
    tops = _top_log_probs(log_probs, rows)
    return [
        TokenLogProbs(token, raw, after, top) if token >= 0 and _is_number(raw) else None
        for token, (raw, after), top in zip(tokens.tolist(), chosen.tolist(), tops, strict=True)
    ]


def log_softmax_rows(logits: Tensor) -> Tensor:
    """Log-softmax of each row of fp32 [rows, vocabulary], with torch's bits.

    Torch wakes its threads for two rows however short they are, and those spin for milliseconds
    afterwards on cores that others need; for one row it wakes none.
    """
    if logits.device.type != "cpu" or logits.numel() > _FEW_LOGITS:
        return torch.log_softmax(logits, dim=-1)
    return torch.cat([torch.log_softmax(row, dim=-1) for row in torch.split(logits, 1)])


def _sample_by_kernel(logits: Tensor, rows: Sequence[SampleRow]) -> list[TokenLogProbs | None]:
    """As :func:`sample`, by the CUDA kernel."""
    device = logits.device
    temperatures = [row.params.temperature or 1.0 for row in rows]
    seeds = np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)
    scales = [0.0 if row.params.is_greedy else 1.0 for row in rows]
    inputs = SampleInputs(
        seeds=torch.from_numpy(seeds).to(device),
        positions=torch.tensor([row.position for row in rows], device=device),
        noise_scales=torch.tensor(scales, dtype=torch.float32, device=device),
        temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
        given=torch.tensor([-1 if r.given is None else r.given for r in rows], device=device),
    )
    drawn_from = None
    if any(row.banned or (row.params.has_filter and row.given is None) for row in rows):
        drawn_from = _ruled_out(logits.float() / inputs.temperatures[:, None], rows)
    found = sample_on_cuda(logits, inputs, drawn_from)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
    if any(row.params.top_log_probs for row in rows):
        tops = _top_log_probs(found.log_probs_of(logits), rows)
    numbers = found.numbers.tolist()
    return [
        TokenLogProbs(token, raw, after, top) if token >= 0 and _is_number(raw) else None
        for token, (raw, after, *_), top in zip(found.tokens.tolist(), numbers, tops, strict=True)
    ]


def _is_number(value: float) -> bool:
    """A log-prob that can be: NaN marks a row without a distribution; -inf is a token ruled out."""
    return value <= 0.0


def _top_log_probs(
    log_probs: Tensor, rows: Sequence[SampleRow]
) -> list[tuple[tuple[int, float], ...]]:
    wanted = max(row.params.top_log_probs for row in rows)
    if wanted == 0:
        return [()] * len(rows)
    # A stable sort, so that equal ones come in the order of their ids.
    ordered = torch.sort(log_probs, dim=-1, descending=True, stable=True)
    values = ordered.values[:, :wanted].tolist()
    tokens = ordered.indices[:, :wanted].tolist()
    return [
        tuple(zip(ids[: row.params.top_log_probs], logs[: row.params.top_log_probs], strict=True))
        for row, ids, logs in zip(rows, tokens, values, strict=True)
    ]


def _choose(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """A token of each row, int64 [rows]; -1 where there is none."""
    if all(row.given is not None for row in rows):
        given = [row.given for row in rows]
        return torch.tensor(given, dtype=torch.int64, device=scores.device)
    scores = _ruled_out(scores, rows)
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    positions = np.array([row.position for row in rows], dtype=np.int64)
    scales = np.array([0.0 if row.params.is_greedy else 1.0 for row in rows], dtype=np.float32)
    if scores.device.type == "cpu":
        scores = scores.contiguous()
        drawn = torch.from_numpy(
            sample_tokens(
                scores.data_ptr(),
                scores.shape[1],
                scores.stride(0),
                seeds,
                positions,
                scales,
                num_threads=torch.get_num_threads(),
            )
        )
    else:
        drawn = draw_with_torch(scores, seeds.tolist(), positions.tolist(), scales.tolist())
    for index, row in enumerate(rows):
        if row.given is not None:
            drawn[index] = row.given
    return drawn


def _ruled_out(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Scores with -infinity where a token may not be drawn."""
    filtered = [i for i, row in enumerate(rows) if row.params.has_filter and row.given is None]
    banned = [(i, token) for i, row in enumerate(rows) for token in row.banned]
    if not filtered and not banned:
        return scores
    scores = scores.clone()
    if banned:
        index = torch.tensor(banned, device=scores.device)
        scores[index[:, 0], index[:, 1]] = -torch.inf
    if filtered:
        chosen = torch.tensor(filtered, device=scores.device)
        scores[chosen] = apply_filters(scores[chosen], [rows[i].params for i in filtered])
    return scores


def apply_filters(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Top-k, top-p and min-p: fp32 [rows, vocabulary], with -infinity for what is ruled out.

    Of equal scores the lower token ranks first; the likeliest token always stays. Top-p keeps the
    shortest list of tokens whose probabilities, among those that top-k kept, reach ``top_p``.
    """
    device, vocab = scores.device, scores.shape[1]
    ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=device)
    top_k = torch.tensor([p.top_k or vocab for p in params], device=device)
    kept = ranks[None, :] < top_k[:, None]
    probs = torch.softmax(ordered.values.masked_fill(~kept, -torch.inf), dim=-1)
    before = probs.cumsum(-1) - probs  # of all that rank higher
    top_p = torch.tensor([p.top_p for p in params], device=device)[:, None]
    kept &= (before < top_p) | (top_p >= 1.0)
    min_p = torch.tensor([p.min_p for p in params], device=device)[:, None]
    kept &= probs >= min_p * probs[:, :1]
    kept[:, 0] = True
    is_kept = torch.zeros_like(kept).scatter(1, ordered.indices, kept)
    return scores.masked_fill(~is_kept, -torch.inf)


# --- the same noise in torch, for devices without a native kernel -----------------------------------


def draw_with_torch(
    scores: Tensor, seeds: Sequence[int], positions: Sequence[int], scales: Sequence[float]
) -> Tensor:
    """What ``sample_tokens`` does, on any device: int64 [rows], -1 for a row without a number."""
    drawn = []
    for row, seed, position, scale in zip(scores, seeds, positions, scales, strict=True):
        values = row + gumbel_noise_torch(seed, position, len(row), row.device) if scale else row
        values = values.nan_to_num(nan=-torch.inf)
        best = values.max()
        first = (values == best).int().argmax()
        drawn.append(torch.where(best > -torch.inf, first, -1))
    return torch.stack(drawn)


def gumbel_noise_torch(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """The native core's noise in torch, equal to it within rounding: fp32 [vocab_size]."""
    key = _mix64((_mix64((seed + _GOLDEN) & _MASK64) + position * _GOLDEN) & _MASK64)
    x = torch.arange(vocab_size, device=device, dtype=torch.int64)
    x = (x * 0x9E3779B9 + (key & _MASK32)) & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    x = ((x ^ (x >> 16)) + (key >> 32)) & _MASK32
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & _MASK32
    x = ((x ^ (x >> 12)) * 0x297A2D39) & _MASK32
    x = x ^ (x >> 15)
    v = ((x >> 16).float() * 2**-16 + ((x & 0xFFFF).float() + 0.5) * 2**-32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-v))


def _mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
