"""A plan becomes tensors, a forward step, and results for its requests."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine_adapter.core.attention import Attention
from engine_adapter.core.batch import NO_SLOT, StepBatch, StepCounts, padded_rows
from engine_adapter.core.kv_cache import KvCache
from engine_adapter.core.plan import StepPlan
from engine_adapter.core.request import Request, RequestKind, TokenLogProbs
from engine_adapter.core.sampling import SampleRow, sample
from weightsync.native_attention import ATTENTION_CHUNK


class StepModel(Protocol):
    """What a step needs of a model."""

    def forward(self, batch: StepBatch, cache: KvCache, attention: Attention) -> Tensor:
        """Logits of ``batch.logit_rows``, [L, vocabulary]; writes K and V."""
        ...


def build_batch(plan: StepPlan, page_size: int, device: torch.device | str = "cpu") -> StepBatch:
    """The tensors of a step, made on the host and copied to ``device``."""
    chunks = plan.chunks
    missing = padded_rows(plan.num_tokens) - plan.num_tokens
    firsts = np.array([chunk.first for chunk in chunks], dtype=np.int64)
    counts = np.array([chunk.count for chunk in chunks], dtype=np.int64)
    context_lens = firsts + counts
    num_pages = (-(-context_lens // page_size)).tolist()
    tables = np.full((len(chunks), max(num_pages, default=1)), -1, dtype=np.int32)
    token_ids: list[int] = []
    logit_rows: list[int] = []
    for chunk, table, held in zip(chunks, tables, num_pages, strict=True):
        logit_rows += [len(token_ids) + wanted for wanted in chunk.wanted_rows]
        token_ids += chunk.request.tokens(chunk.first, chunk.first + chunk.count)
        table[:held] = chunk.request.pages[:held]
    starts = np.concatenate(([0], np.cumsum(counts)))
    owners = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(plan.num_tokens) + (firsts - starts[:-1])[owners]
    slots = tables[owners, positions // page_size] * np.int64(page_size) + positions % page_size
    padding = np.zeros(missing, dtype=np.int64)

    def on_device(values: Any, dtype: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device)

    return StepBatch(
        token_ids=on_device(np.append(token_ids, padding), np.int64),
        positions=on_device(np.append(positions, padding), np.int64),
        slot_mapping=on_device(np.append(slots, np.full(missing, NO_SLOT)), np.int64),
        query_starts=on_device(starts, np.int32),
        context_lens=on_device(context_lens, np.int32),
        block_tables=on_device(tables, np.int32),
        logit_rows=on_device(logit_rows, np.int64),
        counts=StepCounts(
            num_rows=plan.num_tokens,
            most_rows=int(counts.max(initial=0)),
            num_chunks=int((-(-context_lens // ATTENTION_CHUNK)).sum()),
        ),
    )


def sample_rows(plan: StepPlan) -> list[tuple[Request, SampleRow]]:
    """How each wanted row becomes a token, in the order of the batch's logit rows."""
    rows = []
    for chunk in plan.chunks:
        request = chunk.request
        for wanted in chunk.wanted_rows:
            position = chunk.first + wanted + 1  # of the token that this row predicts
            is_score = request.kind is RequestKind.SCORE
            row = SampleRow(
                request.params,
                request.seed,
                position,
                banned=() if is_score else request.banned_tokens,
                given=request.prompt_ids[position] if is_score else None,
            )
            rows.append((request, row))
    return rows


class ModelRunner:
    """Runs plans on one rank."""

    def __init__(
        self,
        model: StepModel,
        cache: KvCache,
        attention: Attention,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.cache, self.attention, self.device = model, cache, attention, device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[tuple[Request, TokenLogProbs | None]]:
        """Results in row order; None where the logits hold no distribution."""
        batch = build_batch(plan, self.cache.page_size, self.device)
        logits = self.model.forward(batch, self.cache, self.attention)
        rows = sample_rows(plan)
        found = sample(logits, [row for _, row in rows])
        return [(request, result) for (request, _), result in zip(rows, found, strict=True)]
