"""A world for the scheduler: a model that is a hash, and a cache that remembers what was written.

Every step checks that each request reads, through its pages, the KV of its own tokens, computed
under the versions that it claims; and that pages, holders and limits add up.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_adapter.core.pages import PrefixReuse, WeightVersion
from engine_adapter.core.plan import SchedulerLimits, StepPlan
from engine_adapter.core.request import FinishReason, Request, RequestKind, TokenLogProbs
from engine_adapter.core.sampling_params import SamplingParams
from engine_adapter.core.scheduler import Scheduler

VOCAB = 7


def digest(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens))


def next_token(tokens: Sequence[int]) -> int:
    return digest(tokens) % VOCAB


def age(version: WeightVersion) -> int:
    return -1 if version is None else version.number


def limits(**changes: int) -> SchedulerLimits:
    small = {
        "num_pages": 12, "page_size": 4, "max_context": 40, "max_running": 5, "max_waiting": 50,
        "max_step_tokens": 9, "max_logit_rows": 6,
    }  # fmt: skip
    return SchedulerLimits(**{**small, **changes})


def request(name: str, prompt: Sequence[int], max_tokens: int = 5, **fields: Any) -> Request:
    return Request(name, list(prompt), SamplingParams(), max_tokens, **fields)


@dataclass
class World:
    """Runs a scheduler's steps; ``cache`` maps a slot to (digest of all tokens so far, version)."""

    scheduler: Scheduler
    cache: dict[int, tuple[int, WeightVersion]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    num_steps: int = 0

    @classmethod
    def make(cls, reuse: PrefixReuse = PrefixReuse.SAME_VERSION, **changes: int) -> World:
        return cls(Scheduler(limits(**changes), prefix_reuse=reuse))

    def add(self, new: Request) -> Request:
        self.scheduler.add(new)
        self.requests.append(new)
        return new

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        self.check_pages()
        if plan is None:
            return None
        self.num_steps += 1
        self._check_limits(plan)
        for chunk in plan.chunks:
            self._write(chunk.request, chunk.first, chunk.count, plan.version)
        for chunk in plan.chunks:
            self._read(chunk.request, chunk.first, plan.version, chunk.count)
        wanted = [
            (chunk.request, chunk.first + r) for chunk in plan.chunks for r in chunk.wanted_rows
        ]
        self.scheduler.complete(plan)
        for request, position in wanted:
            self._answer(request, position, plan.version)
        self.check_pages()
        return plan

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if self.step() is None:
                return
        raise AssertionError(f"still busy after {max_steps} steps")

    def _slot(self, request: Request, position: int) -> int:
        size = self.scheduler.limits.page_size
        return request.pages[position // size] * size + position % size

    def _write(self, request: Request, first: int, count: int, version: WeightVersion) -> None:
        assert first == request.num_computed
        tokens = request.tokens(0, first + count)
        for position in range(first, first + count):
            page = request.pages[position // self.scheduler.limits.page_size]
            assert self.scheduler.pool.num_holders(page) == 1, "a shared page is written"
            self.cache[self._slot(request, position)] = (digest(tokens[: position + 1]), version)

    def _read(self, request: Request, first: int, version: WeightVersion, count: int) -> None:
        tokens = request.tokens(0, first + count)
        claimed = [s.version for s in request.kv_spans for _ in range(s.first, s.end)]
        assert len(claimed) == first
        for position in range(first + count):
            found, made_by = self.cache[self._slot(request, position)]
            assert found == digest(tokens[: position + 1])
            claim = [*claimed, *[version] * count][position]
            if self.scheduler.prefix_reuse is PrefixReuse.ANY_VERSION:
                assert age(claim) <= age(made_by), "a page is as old as its oldest token"
            else:
                assert claim == made_by

    def _answer(self, request: Request, position: int, version: WeightVersion) -> None:
        tokens = request.tokens(0, position + 1)
        if request.kind is RequestKind.SCORE:
            assert position == len(request.results)
            request.add_result(TokenLogProbs(request.prompt_ids[position + 1], 0.0, 0.0), version)
            if len(request.results) == len(request.prompt_ids) - 1:
                self.scheduler.finish(request, FinishReason.SCORED)
            return
        assert position == request.num_tokens - 1
        request.add_result(TokenLogProbs(next_token(tokens), 0.0, 0.0), version)
        if len(request.output_ids) == request.max_tokens:
            self.scheduler.finish(request, FinishReason.LENGTH)

    def _check_limits(self, plan: StepPlan) -> None:
        bounds = self.scheduler.limits
        assert 0 < plan.num_tokens <= bounds.max_step_tokens
        assert sum(len(chunk.wanted_rows) for chunk in plan.chunks) <= bounds.max_logit_rows
        assert all(chunk.count > 0 for chunk in plan.chunks)
        assert len({id(chunk.request) for chunk in plan.chunks}) == len(plan.chunks)

    def check_pages(self) -> None:
        pool, running = self.scheduler.pool, self.scheduler.running
        assert len(running) <= self.scheduler.limits.max_running
        holders = Counter(page for request in running for page in request.pages)
        for page in range(pool.num_pages):
            assert pool.num_holders(page) == holders[page]
        assert pool.num_available == pool.num_pages - len(holders)
        for request in [*self.scheduler.waiting, *[r for r in self.requests if r.is_finished]]:
            assert not request.pages
            assert request.num_computed == 0

    def check_outputs(self) -> None:
        """Whatever happened, outputs are what each prompt alone leads to."""
        for request in self.requests:
            tokens = list(request.prompt_ids)
            for token in request.output_ids:
                assert token == next_token(tokens)
                tokens.append(token)
            spans = list(request.spans)
            assert [s.first for s in spans] == [0, *[s.end for s in spans]][: len(spans)]
            assert sum(s.end - s.first for s in spans) == len(request.results)


def random_prompt(picks: random.Random, longest: int = 20) -> list[int]:
    """Often with a prefix that others have too."""
    common = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    own = [picks.randrange(VOCAB) for _ in range(picks.randrange(0, longest - len(common)))]
    return common[: picks.randrange(0, len(common) + 1)] + own or [1]
