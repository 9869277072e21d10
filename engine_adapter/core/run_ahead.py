"""Decoding one step ahead: the device makes a step while the host books the one before it.

A *run* is a set of requests that decode together. Its steps follow each other on the device; a request
that ended is only known to have ended a step later, and what was made for it since is dropped. That
step wrote K and V behind the request's last token, in a page that it held, before anything that is
enqueued later: nobody reads it. Before anything else happens to the engine, the run is drained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from engine_adapter.core.decode_state import DecodeRow, DecodeSteps
from engine_adapter.core.ledger import Ledger
from engine_adapter.core.plan import Chunk, StepPlan
from engine_adapter.core.request import Request, RequestKind, TokenLogProbs
from engine_adapter.core.scheduler import Scheduler
from weightsync.native_attention import ATTENTION_CHUNK

#: When one row needs a page, all rows get room for this many tokens: fewer copies to the device.
_ROOM_TOKENS: Final = 32
#: Steps after which a run that could be joined by waiting requests lets the scheduler look.
_PATIENCE_STEPS: Final = 16


def can_run(request: Request) -> bool:
    """Whether the device can draw its tokens by itself."""
    params = request.params
    return (
        request.kind is RequestKind.GENERATE
        and not params.has_filter
        and not params.top_log_probs
        and not request.banned_tokens
    )


class DecodeRun:
    """The run of an engine, if there is one. Used between steps and by their driver only."""

    def __init__(self, steps: DecodeSteps, scheduler: Scheduler, ledger: Ledger) -> None:
        self._steps, self._scheduler, self._ledger = steps, scheduler, ledger
        self._requests: list[Request] = []
        self._places: dict[Request, int] = {}
        self._ended: list[Request] = []  # that the device does not know of yet
        self._in_flight: deque[StepPlan] = deque()
        self._num_steps = 0

    @property
    def is_on(self) -> bool:
        return bool(self._in_flight)

    def suits(self, plan: StepPlan) -> bool:
        """Whether a plan's requests can begin a run."""
        if not 0 < len(plan.chunks) <= self._steps.max_rows:
            return False
        requests = [chunk.request for chunk in plan.chunks]
        is_decode = all(len(c.wanted_rows) == 1 and c.count == 1 for c in plan.chunks)
        return is_decode and all(map(can_run, requests)) and self._has_chunks_for(requests)

    def begin(self, plan: StepPlan) -> None:
        """Launch a plan that :meth:`suits`; its results come with the steps that follow."""
        self._requests = [chunk.request for chunk in plan.chunks]
        self._places = {request: place for place, request in enumerate(self._requests)}
        self._ended.clear()
        self._num_steps = 0
        self._steps.load([DecodeRow.of(request) for request in self._requests])
        self._launch(plan)

    def go_on(self) -> bool:
        """Launch a step and book the one before it; False if the run had better end (see
        :meth:`drain`)."""
        live = self.requests
        if not self._may_go_on(live) or not self._give_room(live):
            return False
        ahead = len(self._in_flight)
        chunks = tuple(Chunk(r, r.num_computed + ahead, 1, range(1)) for r in live)
        self._launch(StepPlan(chunks, self._scheduler.version))
        self._book()
        return True

    def drain(self) -> int:
        """Book all that is in flight and end the run; returns how many steps that were."""
        count = len(self._in_flight)
        while self._in_flight:
            self._book()
        self._requests = []
        return count

    def give_up(self) -> None:
        """Drop what is in flight: a step failed, and its requests with it."""
        self._in_flight.clear()
        self._requests = []
        self._steps.give_up()

    @property
    def requests(self) -> list[Request]:
        """Those of the run that have not ended."""
        return [request for request in self._requests if not request.is_finished]

    # --- parts ----------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> None:
        self._steps.launch()
        self._in_flight.append(plan)
        self._num_steps += 1

    def _book(self) -> None:
        plan = self._in_flight.popleft()
        found = self._steps.take()
        self._scheduler.complete(plan)
        results: list[tuple[Request, TokenLogProbs | None]] = []
        for chunk in plan.chunks:
            token, raw, after = found[self._places[chunk.request]]
            is_drawn = token >= 0 and raw <= 0.0  # not NaN
            result = TokenLogProbs(token, raw, after) if is_drawn else None
            results.append((chunk.request, result))
        self._ledger.take(plan, results)
        # Before its pages are given to others: a row that goes on would write into them.
        self._ended += [chunk.request for chunk in plan.chunks if chunk.request.is_finished]

    def _may_go_on(self, live: Sequence[Request]) -> bool:
        ahead = len(self._in_flight)
        # At least one whose next token will be wanted, as far as can be known.
        if all(len(r.output_ids) + ahead >= r.max_tokens for r in live):
            return False
        if self._scheduler.waiting:
            has_left = len(live) < len(self._requests)
            if has_left or self._num_steps % _PATIENCE_STEPS == 0:
                return False
        return self._steps.rows_for(len(live)) == self._steps.rows_for(len(self._requests))

    def _has_chunks_for(self, requests: Sequence[Request]) -> bool:
        """Whether the device has room for the work of their contexts, as far as their pages go."""
        size = self._scheduler.limits.page_size
        chunks = sum(-(-len(r.pages) * size // ATTENTION_CHUNK) for r in requests)
        return chunks <= self._steps.max_chunks

    def _give_room(self, live: Sequence[Request]) -> bool:
        """Tell the device who ended, and which pages there are for the next token of every request
        that goes on; False if there are too few."""
        size = self._scheduler.limits.page_size
        ahead = len(self._in_flight)

        def room(request: Request) -> int:
            return len(request.pages) * size - request.num_computed - ahead

        going = [r for r in live if len(r.output_ids) + ahead < r.max_tokens]
        changed = {}
        if any(room(request) <= 0 for request in going):
            for request in going:
                wanted = -(-max(0, _ROOM_TOKENS - room(request)) // size)
                if wanted and self._scheduler.give_pages(request, wanted):
                    changed[self._places[request]] = request.pages
                elif room(request) <= 0:
                    return False
            if not self._has_chunks_for(live):
                return False
        for request in self._ended:
            changed[self._places[request]] = []
        self._ended.clear()
        if changed:
            self._steps.set_pages(changed)
        return True
