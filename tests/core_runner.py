"""Forward steps of the core without an engine: sequences, pages and batches by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engine_adapter.core.attention import ReferenceAttention  # noqa: E402
from engine_adapter.core.batch import NO_SLOT, StepBatch, padded_rows  # noqa: E402
from engine_adapter.core.kv_cache import KvCache, KvShape  # noqa: E402
from engine_adapter.core.model import DecoderModel  # noqa: E402


class Runner:
    """Forward steps over sequences that share one cache; pages are handed out in odd order."""

    def __init__(
        self, model: DecoderModel, attention: Any = None, num_pages: int = 64, page_size: int = 16
    ) -> None:
        config = model.config
        shape = KvShape(
            config.num_layers, model.num_kv_heads, config.head_dim, model.dtype, page_size
        )
        self.model, self.cache = model, KvCache(shape, num_pages)
        self.attention = ReferenceAttention() if attention is None else attention
        self._free = list(range(0, num_pages, 2)) + list(range(1, num_pages, 2))
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, rows: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Append tokens to sequences; logits [tokens, vocabulary] of each."""
        batch = self.batch(rows)
        with torch.no_grad():
            logits = self.model.forward(batch, self.cache, self.attention)
        found, start = {}, 0
        for name, tokens in rows.items():
            found[name] = logits[start : start + len(tokens)]
            start += len(tokens)
        return found

    def batch(self, rows: Mapping[str, Sequence[int]]) -> StepBatch:
        size = self.cache.page_size
        tokens, positions, slots, starts, contexts = [], [], [], [0], []
        for name, new in rows.items():
            done = self.lengths.get(name, 0)
            pages = self.pages.setdefault(name, [])
            while len(pages) * size < done + len(new):
                pages.append(self._free.pop(0))
            for i, token in enumerate(new, start=done):
                tokens.append(token)
                positions.append(i)
                slots.append(pages[i // size] * size + i % size)
            self.lengths[name] = done + len(new)
            starts.append(len(tokens))
            contexts.append(done + len(new))
        num_rows = len(tokens)
        missing = padded_rows(num_rows) - num_rows
        most = max(len(self.pages[name]) for name in rows)
        tables = [self.pages[n] + [-1] * (most - len(self.pages[n])) for n in rows]
        return StepBatch(
            torch.tensor(tokens + [0] * missing),
            torch.tensor(positions + [0] * missing),
            torch.tensor(slots + [NO_SLOT] * missing),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            torch.arange(num_rows),
        )


def prompt_log_probs(logits: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probability (nats, fp32) of each token but the first, after those before it."""
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return [float(log_probs[i, token]) for i, token in enumerate(list(tokens)[1:])]
