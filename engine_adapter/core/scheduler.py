"""Which tokens the next step computes, and what events do to requests. Pure: no tensor, no clock.

The engine's loop is: ``plan``, run the model, ``complete``, then ``finish`` whoever is done. Events
(``add``, ``abort``, ``pause``, ...) come between steps.

A request waits without pages, then runs: each step computes the next tokens of its prompt and
output that are not in the cache. A decode is the case of one such token. Taking all pages back
(*retracting*) is therefore always possible: the tokens remain, and their KV is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine_adapter.core.pages import (
    CachedPage,
    PagePool,
    PrefixReuse,
    WeightVersion,
    page_key,
    root_key,
)
from engine_adapter.core.plan import SchedulerLimits, StepDraft, StepPlan
from engine_adapter.core.request import (
    FinishReason,
    Request,
    RequestKind,
    RequestState,
    extend_spans,
)
from weightsync.errors import BusyError, CapacityError, ConfigError
from weightsync.types import PauseMode


class Scheduler:
    """The requests of an engine and the pages of its cache.

    ``version`` labels what is computed from now on. Older requests go first everywhere; when pages
    run out the youngest running request is retracted, so the oldest always gets on.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        prefix_reuse: PrefixReuse = PrefixReuse.SAME_VERSION,
        version: WeightVersion = None,
    ) -> None:
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.prefix_reuse = prefix_reuse
        self.version = version
        self.waiting: deque[Request] = deque()  # in the order in which they will be admitted
        self.running: list[Request] = []  # in the order in which they were
        self.is_paused = False

    # --- events between steps -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A new request waits. Raises :class:`ConfigError` or :class:`CapacityError` if it never can
        run, or if too many wait."""
        self.add_all([request])

    def add_all(self, requests: Sequence[Request]) -> None:
        """As :meth:`add`, all of them or none."""
        for place, request in enumerate(requests):
            self._check(request, len(self.waiting) + place)
        self.waiting.extend(requests)

    def _check(self, request: Request, num_waiting: int) -> None:
        limits, name = self.limits, f"request {request.request_id!r}"
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            raise ConfigError(f"{name}: the prompt is empty; give it at least one token")
        if num_waiting >= limits.max_waiting:
            raise CapacityError(
                f"{name}: {num_waiting} requests wait already, the limit max_waiting is "
                f"{limits.max_waiting}; send fewer at a time or raise it"
            )
        needed = num_prompt + request.max_tokens
        parts = f"{num_prompt} prompt and up to {request.max_tokens} new tokens"
        if needed > limits.max_context:
            raise ConfigError(
                f"{name}: {parts} are {needed}, the model's context holds {limits.max_context}; "
                "shorten the prompt or lower max_tokens"
            )
        if needed > limits.cache_tokens:
            raise CapacityError(
                f"{name}: {parts} are {needed}, the KV cache holds {limits.cache_tokens} tokens "
                f"({limits.num_pages} pages of {limits.page_size}); lower max_tokens or raise "
                "kv_cache_tokens"
            )

    def abort(self, request: Request) -> None:
        """End it, wherever it is; ending one that is finished is harmless."""
        self.finish(request, FinishReason.ABORTED)

    def pause(self, mode: PauseMode) -> list[Request]:
        """No step is planned until :meth:`resume`. Returns the requests that this ended."""
        self.is_paused = True
        if mode is PauseMode.ABORT:
            ended = [*self.running, *self.waiting]
            for request in ended:
                self.abort(request)
            return ended
        if mode is PauseMode.RETRACT:
            for request in reversed(self.running[:]):
                self.retract(request)
        return []

    def resume(self) -> None:
        self.is_paused = False

    def flush_cache(self) -> int:
        """Forget every cached prefix; returns the pages forgotten.

        Raises :class:`BusyError` while requests hold KV, as they do in a pause ``in_place``.
        """
        if self.running:
            raise BusyError(
                f"flush_cache: {len(self.running)} requests hold KV (the first: "
                f"{self.running[0].request_id!r}); pause with abort or retract to flush"
            )
        return self.pool.forget_all()

    def set_version(self, version: WeightVersion) -> None:
        """Label what comes from now on. Ends and retracts nobody; older prefixes fit no more."""
        if version != self.version and self.prefix_reuse is not PrefixReuse.ANY_VERSION:
            self.pool.forget_all()
        self.version = version

    # --- a step -----------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do or the engine is paused."""
        if self.is_paused:
            return None
        step = StepDraft(self.limits.max_step_tokens, self.limits.max_logit_rows)
        was_full = False
        # Decodes first, so that a long prompt does not hold them up.
        others: list[Request] = []
        for request in self.running[:]:
            if request.num_uncomputed != 1:
                others.append(request)
            elif request.state is RequestState.RUNNING:  # not retracted just now
                was_full |= not self._extend(request, step)
        for request in others:
            if request.state is RequestState.RUNNING:
                was_full |= not self._extend(request, step)
        if not was_full:
            self._admit(step)
        if not step.chunks:
            return None
        chunks = step.chunks
        if others:  # else they stand in the order of the running already
            order = {id(request): place for place, request in enumerate(self.running)}
            chunks = sorted(chunks, key=lambda chunk: order[id(chunk.request)])
        return StepPlan(tuple(chunks), self.version)

    def complete(self, plan: StepPlan) -> None:
        """The step ran: the KV of its tokens is in the cache."""
        for chunk in plan.chunks:
            if not chunk.request.is_finished:
                chunk.request.add_kv(chunk.count, plan.version)
                self._remember(chunk.request, plan.version)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stopped_by: str | int | None = None,
        error: str | None = None,
    ) -> None:
        """End a request and give its pages back; those of a failed one are never shared again."""
        if request.is_finished:
            return
        if request.state is RequestState.RUNNING:
            if reason is FinishReason.FAILED:
                self.pool.forget(request.pages)
            self.pool.release(request.pages)
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.drop_kv()
        request.state = RequestState.FINISHED
        request.finish_reason, request.stopped_by, request.error = reason, stopped_by, error

    def retract(self, request: Request) -> None:
        """Take a running request's pages; it waits, before all others, to compute its KV again."""
        self.pool.release(request.pages)
        self.running.remove(request)
        request.drop_kv()
        request.state = RequestState.WAITING
        request.num_retracted += 1
        self.waiting.appendleft(request)

    # --- parts of plan ------------------------------------------------------------------------------------

    def _extend(self, request: Request, step: StepDraft) -> bool:
        """Plan the next tokens of a running request; False if pages were short."""
        count = step.room_for(request)
        if count == 0:
            return True
        was_enough = True
        while not self._grow(request, count):
            was_enough = False
            victim = self.running[-1]
            step.withdraw(victim)
            self.retract(victim)
            if victim is request:
                return False
            count = step.room_for(request)  # what the victim's chunk gave back
        step.put(request, count)
        return was_enough

    def give_pages(self, request: Request, count: int) -> bool:
        """More pages than its next token needs; False, and nothing changed, if there are not as many.
        They count as those that it would have been given later."""
        pages = self.pool.allocate(count)
        if pages is None:
            return False
        request.pages.extend(pages)
        return True

    def _grow(self, request: Request, count: int) -> bool:
        """Give it pages for ``count`` more tokens."""
        wanted = -(-(request.num_computed + count) // self.limits.page_size)
        if wanted <= len(request.pages):
            return True
        pages = self.pool.allocate(wanted - len(request.pages))
        if pages is None:
            return False
        request.pages.extend(pages)
        return True

    def _admit(self, step: StepDraft) -> None:
        held_back: list[Request] = []
        while self.waiting and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            if self._waits_for_leader(request):
                held_back.append(self.waiting.popleft())
                continue
            if step.is_full or not self._admit_one(request, step):
                break
        self.waiting.extendleft(reversed(held_back))

    def _waits_for_leader(self, request: Request) -> bool:
        """Whether another sample of the same prompt is about to fill pages that it can share."""
        leader = request.leader
        return (
            leader is not None
            and not leader.is_finished
            and leader.num_computed < len(leader.prompt_ids)
            and len(request.prompt_ids) > self.limits.page_size
            and self.prefix_reuse is not PrefixReuse.NEVER
        )

    def _admit_one(self, request: Request, step: StepDraft) -> bool:
        keys, shared = self._find_prefix(request)
        # Room for all its tokens, so that one that was retracted does not come back too soon.
        num_pages = -(-request.num_tokens // self.limits.page_size) - len(shared)
        num_kept = sum(self.pool.num_holders(page) == 0 for page in shared)
        if num_pages > self.pool.num_available - num_kept:
            return False
        self.pool.share(shared)
        request.pages, request.chain = shared, keys
        for page in shared:
            entry = self.pool.cached(page)
            version = self.version if entry is None else entry.version
            extend_spans(request.kv_spans, self.limits.page_size, version)
        request.num_computed = len(shared) * self.limits.page_size
        if not request.was_admitted:
            request.was_admitted = True
            request.version_at_admission = self.version
            request.num_cached_tokens = request.num_computed
        self.waiting.popleft()
        request.state = RequestState.RUNNING
        self.running.append(request)
        count = step.room_for(request)
        if not self._grow(request, count):
            raise RuntimeError("pages that were counted as available are not")
        step.put(request, count)
        return True

    # --- prefixes -----------------------------------------------------------------------------------------

    def _find_prefix(self, request: Request) -> tuple[list[bytes], list[int]]:
        """Keys and pages of the longest cached prefix that leaves a token to compute."""
        keys: list[bytes] = []
        pages: list[int] = []
        if self.prefix_reuse is PrefixReuse.NEVER:
            return keys, pages
        size = self.limits.page_size
        usable = request.num_tokens - 1
        if request.kind is RequestKind.SCORE:  # rows that are still wanted must be computed
            usable = min(usable, len(request.results))
        key = root_key(self.version, self.prefix_reuse)
        for first in range(0, usable - size + 1, size):
            key = page_key(key, request.tokens(first, first + size))
            page = self.pool.find(key)
            if page is None:
                break
            keys.append(key)
            pages.append(page)
        return keys, pages

    def _remember(self, request: Request, version: WeightVersion) -> None:
        """Let others share its full pages, if all before them is of one version."""
        if self.prefix_reuse is PrefixReuse.NEVER:
            return
        if self.prefix_reuse is PrefixReuse.SAME_VERSION and any(
            span.version != version for span in request.kv_spans
        ):
            return
        size = self.limits.page_size
        root = root_key(version, self.prefix_reuse)
        for index in range(len(request.chain), request.num_computed // size):
            parent = request.chain[-1] if request.chain else root
            key = page_key(parent, request.tokens(index * size, (index + 1) * size))
            request.chain.append(key)
            # Of its oldest token: a page that spans a change of version is as stale as that.
            oldest = next(s.version for s in request.kv_spans if index * size < s.end)
            self.pool.remember(request.pages[index], CachedPage(key, oldest))
