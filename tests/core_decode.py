"""Decode steps on the CPU, one after the other: stands in for graphs where there is no GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from core_models import torch

from engine_adapter.core.attention import Attention
from engine_adapter.core.decode_state import DecodeRow, DecodeState, PageTables
from engine_adapter.core.kv_cache import KvCache
from engine_adapter.core.model import DecoderModel
from engine_adapter.core.sampling import SampleRow, sample
from engine_adapter.core.sampling_params import SamplingParams


class EagerSteps:
    """A step runs when it is launched, and its results wait until they are taken."""

    def __init__(
        self, model: DecoderModel, cache: KvCache, attention: Attention, max_rows: int
    ) -> None:
        self.max_rows, self.max_chunks = max_rows, 1000
        self._model, self._cache, self._attention = model, cache, attention
        width = -(-model.max_positions // cache.page_size)
        self.state = DecodeState(max_rows, width, cache.page_size, torch.device("cpu"))
        self._tables = PageTables(self.state)
        self._found: deque[list[tuple[int, float, float]]] = deque()
        self._size = 0
        self.num_loads, self.num_launches, self.num_copies = 0, 0, 0

    def rows_for(self, count: int) -> int:
        """A multiple of four, or all there are."""
        return min(-(-count // 4) * 4, self.max_rows)

    def load(self, rows: Sequence[DecodeRow]) -> None:
        assert not self._found
        self.num_loads += 1
        self._size = self.rows_for(len(rows))
        self.state.load(rows)
        self._tables.clear()
        for place, row in enumerate(rows):
            self._tables.put(place, row.pages)
        self._tables.copy(self._size)

    def set_pages(self, changed: Mapping[int, Sequence[int]]) -> None:
        self.num_copies += 1
        for row, pages in changed.items():
            self._tables.put(row, pages)
        self._tables.copy(self._size)

    def give_up(self) -> None:
        self._found.clear()

    def launch(self) -> None:
        self.num_launches += 1
        with torch.inference_mode():
            self._step()

    def _step(self) -> None:
        state, size = self.state, self._size
        state.place(size)
        logits = self._model.forward(
            state.batch(size, self.max_chunks), self._cache, self._attention
        )
        inputs = state.inputs(size)
        rows = [
            SampleRow(
                SamplingParams(temperature=temperature if scale else 0.0), seed, position
            )
            for seed, position, scale, temperature in zip(
                inputs.seeds.tolist(), inputs.positions.tolist(), inputs.noise_scales.tolist(),
                inputs.temperatures.tolist(), strict=True,
            )
        ]  # fmt: skip
        found = sample(logits, rows)
        self._found.append(
            [
                (-1, float("nan"), float("nan"))
                if result is None
                else (result.token, result.log_prob, result.tempered)
                for result in found
            ]
        )
        state.advance(torch.tensor([token for token, _, _ in self._found[-1]]))

    def take(self) -> list[tuple[int, float, float]]:
        return self._found.popleft()
