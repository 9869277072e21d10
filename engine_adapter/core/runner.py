"""A plan becomes tensors, a forward step, and results for its requests."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine_adapter.core.attention import Attention
from engine_adapter.core.batch import NO_SLOT, StepBatch, padded_rows
from engine_adapter.core.kv_cache import KvCache
from engine_adapter.core.request import Request, RequestKind, TokenLogProbs
from engine_adapter.core.sampling import SampleRow, sample
from engine_adapter.core.scheduler import StepPlan


class StepModel(Protocol):
    """What a step needs of a model."""

    def forward(self, batch: StepBatch, cache: KvCache, attention: Attention) -> Tensor:
        """Logits of ``batch.logit_rows``, [L, vocabulary]; writes K and V."""
        ...


def build_batch(plan: StepPlan, page_size: int, device: torch.device | str = "cpu") -> StepBatch:
    """The tensors of a step, made on the host and copied to ``device``."""
    chunks = plan.chunks
    num_rows = padded_rows(plan.num_tokens)
    token_ids = np.zeros(num_rows, dtype=np.int64)
    positions = np.zeros(num_rows, dtype=np.int64)
    slots = np.full(num_rows, NO_SLOT, dtype=np.int64)
    starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    context_lens = np.array([chunk.first + chunk.count for chunk in chunks], dtype=np.int32)
    num_pages = -(-context_lens // page_size)
    tables = np.full((len(chunks), int(num_pages.max(initial=1))), -1, dtype=np.int32)
    logit_rows: list[int] = []
    row = 0
    for index, chunk in enumerate(chunks):
        end = row + chunk.count
        token_ids[row:end] = chunk.request.tokens(chunk.first, chunk.first + chunk.count)
        place = np.arange(chunk.first, chunk.first + chunk.count)
        positions[row:end] = place
        tables[index, : num_pages[index]] = chunk.request.pages[: num_pages[index]]
        slots[row:end] = tables[index, place // page_size] * page_size + place % page_size
        logit_rows.extend(row + wanted for wanted in chunk.wanted_rows)
        row = starts[index + 1] = end
    return StepBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(context_lens).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
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
