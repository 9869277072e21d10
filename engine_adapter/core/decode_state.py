"""What steps of decoding keep on the device, so that the next one needs nothing from the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine_adapter.core.batch import NO_SLOT, StepBatch, StepCounts
from engine_adapter.core.cuda_launch import launch_on
from engine_adapter.core.cuda_sampling import SampleInputs
from engine_adapter.core.request import Request
from weightsync import native_cuda_core
from weightsync.native_cuda_core import DecodeRowPointers, Launch


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """A request's next step as a row: its newest token is computed, the one after it drawn."""

    token: int
    position: int  # of that token
    seed: int
    temperature: float  # 0: the largest logit
    pages: Sequence[int]

    @classmethod
    def of(cls, request: Request) -> DecodeRow:
        position = request.num_computed
        (token,) = request.tokens(position, position + 1)
        return cls(token, position, request.seed, request.params.temperature, request.pages)


class DecodeState:
    """Rows at fixed addresses. A row without a request writes nowhere and is drawn in vain.

    Between steps, ``token_ids`` and ``positions`` are those of the tokens to compute next. A table's
    entry of -1 is a page that is not there: the row then writes nowhere.
    """

    def __init__(
        self, max_rows: int, table_width: int, page_size: int, device: torch.device
    ) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.page_size, self.max_rows, self.device = page_size, max_rows, device
        self.token_ids, self.positions = zeros(max_rows), zeros(max_rows)
        self.slot_mapping = torch.full_like(self.token_ids, NO_SLOT)
        self.next_positions, self.steps = zeros(max_rows), zeros(max_rows)
        self.seeds, self.given = zeros(max_rows), torch.full_like(self.token_ids, -1)
        self.context_lens = torch.ones(max_rows, dtype=torch.int32, device=device)
        self.block_tables = zeros(max_rows, table_width, dtype=torch.int32)
        self.noise_scales = zeros(max_rows, dtype=torch.float32)
        self.temperatures = torch.ones(max_rows, dtype=torch.float32, device=device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, dtype=torch.int64, device=device)

    def batch(self, num_rows: int, max_chunks: int) -> StepBatch:
        """The first rows as a step; ``max_chunks`` bounds the chunks of their contexts."""
        return StepBatch(
            token_ids=self.token_ids[:num_rows],
            positions=self.positions[:num_rows],
            slot_mapping=self.slot_mapping[:num_rows],
            query_starts=self._starts[: num_rows + 1],
            context_lens=self.context_lens[:num_rows],
            block_tables=self.block_tables[:num_rows],
            logit_rows=self._rows[:num_rows],
            counts=StepCounts(num_rows=num_rows, most_rows=1, num_chunks=max_chunks),
        )

    def inputs(self, num_rows: int) -> SampleInputs:
        return SampleInputs(
            self.seeds[:num_rows],
            self.next_positions[:num_rows],
            self.noise_scales[:num_rows],
            self.temperatures[:num_rows],
            self.given[:num_rows],
        )

    def load(self, rows: Sequence[DecodeRow]) -> None:
        """Put requests into the first rows, and none into the others. Waits for the device."""
        longs = np.zeros((4, self.max_rows), dtype=np.int64)
        scales = np.zeros(self.max_rows, dtype=np.float32)
        temperatures = np.ones(self.max_rows, dtype=np.float32)
        for i, row in enumerate(rows):
            seed = int(np.uint64(row.seed).view(np.int64))
            longs[:, i] = row.token, row.position, 1, seed
            if row.temperature > 0.0:
                scales[i], temperatures[i] = 1.0, row.temperature
        targets = self.token_ids, self.positions, self.steps, self.seeds
        for target, source in zip(targets, torch.from_numpy(longs).to(self.device), strict=True):
            target.copy_(source)
        torch.add(self.positions, 1, out=self.next_positions)
        self.noise_scales.copy_(torch.from_numpy(scales))
        self.temperatures.copy_(torch.from_numpy(temperatures))

    def place(self, num_rows: int) -> None:
        """Before a step of the first rows: where they write, from positions and tables."""
        native_cuda_core.place_rows(self._sizes(num_rows), self._pointers(0), self._launch())

    def advance(self, tokens: Tensor) -> None:
        """After a step: int64 ``tokens`` that were drawn for the first rows come next."""
        pointers = self._pointers(tokens.data_ptr())
        native_cuda_core.advance_rows(self._sizes(len(tokens)), pointers, self._launch())

    def _launch(self) -> Launch | None:
        return launch_on(self.device) if self.device.type == "cuda" else None

    def _sizes(self, num_rows: int) -> tuple[int, int, int]:
        if num_rows > self.max_rows:
            raise RuntimeError(f"a decode step of {num_rows} rows, there are {self.max_rows}")
        return num_rows, self.block_tables.shape[1], self.page_size

    def _pointers(self, tokens_ptr: int) -> DecodeRowPointers:
        return DecodeRowPointers(
            self.steps.data_ptr(),
            self.token_ids.data_ptr(),
            self.positions.data_ptr(),
            self.next_positions.data_ptr(),
            self.slot_mapping.data_ptr(),
            self.context_lens.data_ptr(),
            self.block_tables.data_ptr(),
            tokens_ptr,
        )


class PageTables:
    """The host's copy of the block tables, from which the device's are renewed.

    Two pinned copies take turns: one may still be read by the step before.
    """

    def __init__(self, state: DecodeState) -> None:
        self._state = state
        self._tables = np.full(tuple(state.block_tables.shape), -1, dtype=np.int32)
        is_cuda = state.device.type == "cuda"
        self._staged = [
            torch.empty(self._tables.shape, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)
        ]

    def clear(self) -> None:
        self._tables.fill(-1)

    def put(self, row: int, pages: Sequence[int]) -> None:
        self._tables[row] = -1
        self._tables[row, : len(pages)] = pages

    def copy(self, num_rows: int) -> None:
        """Enqueue the copy of the first rows to the device."""
        staged = self._staged[0][:num_rows]
        self._staged.reverse()
        np.copyto(staged.numpy(), self._tables[:num_rows])
        self._state.block_tables[:num_rows].copy_(staged, non_blocking=True)


class DecodeSteps(Protocol):
    """Steps of decoding that follow each other on a device."""

    max_rows: int
    max_chunks: int  # of the contexts of all rows together

    def rows_for(self, count: int) -> int:
        """Rows of the smallest step that has ``count``."""
        ...

    def load(self, rows: Sequence[DecodeRow]) -> None:
        """Begin with these requests in these rows; nothing is in flight."""
        ...

    def set_pages(self, changed: Mapping[int, Sequence[int]]) -> None:
        """Pages of these rows, from the next launch on; none ends a row."""
        ...

    def launch(self) -> None:
        """Enqueue a step."""
        ...

    def give_up(self) -> None:
        """Forget what is in flight."""
        ...

    def take(self) -> list[tuple[int, float, float]]:
        """Wait for the oldest step in flight: (token, log-prob by logits, by scores) of each row."""
        ...
