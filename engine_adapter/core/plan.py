"""What a step computes, within which limits. Pure: no tensor, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.core.pages import WeightVersion
from engine_adapter.core.request import Request, RequestKind
from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Counts that bound memory and the work of a step."""

    num_pages: int
    page_size: int  # tokens
    max_context: int  # tokens of prompt and output together that the model allows
    max_running: int = 256  # requests with KV
    max_waiting: int = 4096
    max_step_tokens: int = 2048
    max_logit_rows: int = 512  # rows of a step whose logits are wanted

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.max_logit_rows < self.max_running:
            raise ConfigError(
                f"max_logit_rows={self.max_logit_rows} is below max_running={self.max_running}: "
                "every running request may want a row"
            )

    @property
    def cache_tokens(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``count`` tokens of a request, from ``first`` on; ``wanted_rows`` of them, counted
    from the first, are those whose logits are wanted."""

    request: Request
    first: int
    count: int
    wanted_rows: range


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: chunks in the order of its rows; ``version`` is what its tokens are labelled with."""

    chunks: tuple[Chunk, ...]
    version: WeightVersion

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class StepDraft:
    """A step in the making: its chunks, and the room that is left."""

    def __init__(self, max_tokens: int, max_logit_rows: int) -> None:
        self.chunks: list[Chunk] = []
        self._tokens_left = max_tokens
        self._rows_left = max_logit_rows

    @property
    def is_full(self) -> bool:
        return self._tokens_left == 0 or self._rows_left == 0

    def room_for(self, request: Request) -> int:
        """How many of its next tokens fit."""
        count = min(request.num_uncomputed, self._tokens_left)
        if request.kind is RequestKind.SCORE:
            already = max(0, len(request.results) - request.num_computed)
            return min(count, already + self._rows_left)
        return count if self._rows_left else 0

    def put(self, request: Request, count: int) -> None:
        if count:
            wanted = request.wanted_rows(count)
            chunk = Chunk(request, request.num_computed, count, wanted)
            self.chunks.append(chunk)
            self._tokens_left -= count
            self._rows_left -= len(chunk.wanted_rows)

    def withdraw(self, request: Request) -> None:
        """Its chunk, if it has one, is planned no more."""
        for chunk in self.chunks:
            if chunk.request is request:
                self.chunks.remove(chunk)
                self._tokens_left += chunk.count
                self._rows_left += len(chunk.wanted_rows)
                return
