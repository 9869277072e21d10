"""The scheduler: tables for each rule, and random histories for what must always hold."""

from __future__ import annotations

import random

import pytest
from core_scheduling import World, limits, random_prompt, request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapter.core.pages import CachedPage, PagePool, PrefixReuse, page_key, root_key
from engine_adapter.core.plan import StepDraft
from engine_adapter.core.request import FinishReason, RequestKind, RequestState, VersionSpan
from engine_adapter.core.scheduler import Scheduler
from weightsync.errors import BusyError, CapacityError, ConfigError
from weightsync.session import Version
from weightsync.types import PauseMode

V1, V2 = Version("run", 1), Version("run", 2)


def counts(world: World) -> dict[str, int]:
    plan = world.step()
    return {} if plan is None else {c.request.request_id: c.count for c in plan.chunks}


# --- continuous batching -----------------------------------------------------------------------------


def test_a_long_prompt_is_cut_and_decodes_go_on() -> None:
    world = World.make()
    world.add(request("a", [1, 2, 3]))
    assert counts(world) == {"a": 3}
    world.add(request("long", range(1, 21)))
    assert counts(world) == {"a": 1, "long": 8}
    assert counts(world) == {"a": 1, "long": 8}
    world.add(request("c", [5, 6, 7, 8]))
    assert counts(world) == {"a": 1, "long": 4, "c": 4}
    assert counts(world) == {"a": 1, "long": 1, "c": 1}
    world.run()
    world.check_outputs()
    assert all(r.finish_reason is FinishReason.LENGTH for r in world.requests)


def test_older_requests_go_first_and_limits_hold() -> None:
    world = World.make(max_running=2)
    for name in "abc":
        world.add(request(name, [1, 2]))
    assert counts(world) == {"a": 2, "b": 2}
    assert [r.request_id for r in world.scheduler.waiting] == ["c"]
    world.run()
    world.check_outputs()


def test_the_youngest_is_retracted_when_pages_run_out() -> None:
    world = World.make(num_pages=5, max_context=20)
    old, young = world.add(request("old", [1] * 7, 9)), world.add(request("young", [2] * 7, 9))
    while young.num_retracted == 0:
        assert world.step() is not None
    assert young.state is RequestState.WAITING
    kept = list(young.output_ids)
    assert kept
    while not old.is_finished:
        world.step()
        assert old.num_retracted == 0
    world.run()
    assert young.output_ids[: len(kept)] == kept
    world.check_outputs()


def test_an_older_prefill_may_take_the_pages_of_a_younger_decode() -> None:
    world = World.make(num_pages=6, max_context=24, max_step_tokens=4)
    world.add(request("old", [1] * 19, 3))
    assert counts(world) == {"old": 4}
    young = request("young", [3], 9)
    world.scheduler.limits = limits(num_pages=6, max_context=24, max_step_tokens=5)
    world.add(young)
    world.run()
    world.check_outputs()
    assert young.num_retracted > 0


def test_a_chunk_that_is_withdrawn_gives_its_room_back() -> None:
    draft, found = StepDraft(max_tokens=10, max_logit_rows=2), request("a", range(8))
    draft.put(found, 8)
    other = request("b", range(8))
    assert draft.room_for(other) == 2
    draft.withdraw(found)
    assert draft.room_for(other) == 8
    for waiting in (found, other):
        draft.put(waiting, draft.room_for(waiting))
    assert [chunk.count for chunk in draft.chunks] == [8, 2]
    assert draft.is_full


# --- prefixes ----------------------------------------------------------------------------------------


def test_full_pages_of_a_prompt_are_shared() -> None:
    world = World.make()
    world.add(request("a", range(10), 1))
    world.run()
    again = world.add(request("b", [*range(8), 6, 6], 1))
    assert counts(world) == {"b": 2}
    assert again.num_cached_tokens == 8
    exact = world.add(request("c", range(8), 1))  # the last token is always computed
    assert counts(world) == {"c": 4}
    assert exact.num_cached_tokens == 4


def test_samples_of_one_prompt_wait_for_the_first_and_share() -> None:
    world = World.make(max_step_tokens=30)
    leader = world.add(request("s0", range(10)))
    follower = world.add(request("s1", range(10), leader=leader, sample_index=1))
    other = world.add(request("x", [1, 2]))
    assert counts(world) == {"s0": 10, "x": 2}
    assert counts(world) == {"s0": 1, "x": 1, "s1": 2}
    assert follower.num_cached_tokens == 8
    assert other.num_cached_tokens == 0
    world.run()
    world.check_outputs()


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.FAILED])
def test_a_leader_that_ends_early_holds_nobody_up(reason: FinishReason) -> None:
    world = World.make()
    leader = world.add(request("s0", range(10)))
    world.add(request("s1", range(10), leader=leader))
    world.step()
    world.scheduler.finish(leader, reason)
    world.run()
    assert world.requests[1].finish_reason is FinishReason.LENGTH


def test_a_prefix_is_not_used_under_another_version() -> None:
    world = World.make()
    world.scheduler.set_version(V1)
    world.add(request("a", range(10), 1))
    world.run()
    world.scheduler.set_version(V2)
    assert world.scheduler.pool.num_kept == 0
    again = world.add(request("b", range(10), 1))
    world.run()
    assert again.num_cached_tokens == 0
    assert not again.has_stale_kv
    assert again.version_at_admission == V2


def test_keys_differ_by_version_and_by_everything_before() -> None:
    same = PrefixReuse.SAME_VERSION
    roots = [root_key(v, same) for v in (None, V1, V2, Version("other", 1))]
    assert len(set(roots)) == 4
    assert root_key(V1, same) == root_key(Version("run", 1), same)
    assert root_key(V1, PrefixReuse.ANY_VERSION) == root_key(None, PrefixReuse.ANY_VERSION)
    first, second = page_key(roots[0], [1, 2]), page_key(roots[1], [1, 2])
    assert first != second
    assert page_key(first, [3]) != page_key(second, [3])
    assert page_key(first, [3, 4]) != page_key(first, [4, 3])


def test_a_prefix_is_used_under_another_version_if_asked_and_it_says_so() -> None:
    world = World.make(PrefixReuse.ANY_VERSION)
    world.scheduler.set_version(V1)
    world.add(request("a", range(10), 1))
    world.run()
    world.scheduler.set_version(V2)
    again = world.add(request("b", range(10), 2))
    world.run()
    assert again.num_cached_tokens == 8
    assert again.has_stale_kv
    assert again.spans == [VersionSpan(V2, 0, 2)]


def test_prefixes_can_be_switched_off() -> None:
    world = World.make(PrefixReuse.NEVER)
    for name in "ab":
        world.add(request(name, range(10), 1))
        world.run()
    assert world.requests[1].num_cached_tokens == 0
    assert world.scheduler.pool.num_kept == 0


def test_pages_of_a_failed_request_are_not_shared() -> None:
    world = World.make()
    bad = world.add(request("bad", range(10), 3))
    world.step()
    world.step()
    world.scheduler.finish(bad, FinishReason.FAILED, error="NaN")
    again = world.add(request("again", range(10), 1))
    world.run()
    assert again.num_cached_tokens == 0


def test_kept_pages_are_taken_when_free_ones_run_out() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    assert pages is not None
    for index, page in enumerate(pages):
        pool.remember(page, CachedPage(bytes([index]), None))
    pool.release(pages)
    assert (pool.num_available, pool.num_kept) == (3, 2)
    assert pool.allocate(4) is None
    taken = pool.allocate(2)
    assert taken is not None
    assert pages[1] in taken  # the end of a sequence goes before its beginning
    assert pool.find(b"\0") == pages[0]
    assert pool.find(b"\1") is None
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.release([pages[0]])


# --- pause, versions, flush --------------------------------------------------------------------------


def busy_world() -> World:
    world = World.make(max_running=2)
    world.scheduler.set_version(V1)
    for name in "abc":
        world.add(request(name, [1, 2, 3, 4, 5], 6))
    world.step()
    world.step()
    assert len(world.scheduler.running) == 2
    return world


def test_pause_abort_ends_everybody() -> None:
    world = busy_world()
    assert len(world.scheduler.pause(PauseMode.ABORT)) == 3
    assert {r.finish_reason for r in world.requests} == {FinishReason.ABORTED}
    assert world.step() is None
    world.scheduler.flush_cache()
    assert world.scheduler.pool.num_available == world.scheduler.pool.num_pages


def test_pause_retract_keeps_tokens_and_order() -> None:
    world = busy_world()
    before = [list(r.output_ids) for r in world.requests]
    assert world.scheduler.pause(PauseMode.RETRACT) == []
    assert [r.request_id for r in world.scheduler.waiting] == ["a", "b", "c"]
    assert world.step() is None
    world.scheduler.flush_cache()
    world.scheduler.set_version(V2)
    assert world.step() is None
    world.scheduler.resume()
    world.run()
    world.check_outputs()
    for old, found in zip(before, world.requests, strict=True):
        assert found.output_ids[: len(old)] == old
        assert not found.has_stale_kv
    assert [s.version for s in world.requests[0].spans] == [V1, V2]
    assert [r.version_at_admission for r in world.requests] == [V1, V1, V2]


def test_pause_in_place_keeps_kv_refuses_a_flush_and_marks_it_stale() -> None:
    world = busy_world()
    world.scheduler.pause(PauseMode.IN_PLACE)
    assert world.step() is None
    with pytest.raises(BusyError, match="2 requests hold KV"):
        world.scheduler.flush_cache()
    world.scheduler.set_version(V2)
    world.scheduler.resume()
    world.run()
    world.check_outputs()
    assert [r.num_retracted for r in world.requests] == [0, 0, 0]
    assert [r.has_stale_kv for r in world.requests] == [True, True, False]


def test_mixed_pages_are_not_shared_under_the_new_version() -> None:
    world = World.make()
    world.scheduler.set_version(V1)
    world.add(request("a", range(6), 6))
    world.step()
    world.scheduler.pause(PauseMode.IN_PLACE)
    world.scheduler.set_version(V2)
    world.scheduler.resume()
    world.run()
    again = world.add(request("b", [*range(6), *world.requests[0].output_ids], 1))
    world.run()
    assert again.num_cached_tokens == 0


def test_a_version_ends_and_retracts_nobody() -> None:
    world = busy_world()
    running = list(world.scheduler.running)
    world.scheduler.set_version(V2)
    assert world.scheduler.running == running
    world.run()
    assert all(r.finish_reason is FinishReason.LENGTH for r in world.requests)


def test_an_abort_in_any_state_is_harmless_twice() -> None:
    world = busy_world()
    for found in world.requests:
        world.scheduler.abort(found)
        world.scheduler.abort(found)
    assert world.step() is None
    world.check_pages()


# --- scores ------------------------------------------------------------------------------------------


def test_a_score_wants_every_row_but_not_too_many_at_once() -> None:
    world = World.make(max_step_tokens=30)
    scored = world.add(request("s", range(15), 1, kind=RequestKind.SCORE))
    assert counts(world) == {"s": 6}
    assert counts(world) == {"s": 6}
    world.scheduler.retract(scored)
    assert counts(world) == {"s": 2}  # three full pages are found again
    assert scored.finish_reason is FinishReason.SCORED
    assert len(scored.results) == 14


def test_a_score_does_not_skip_rows_that_a_prefix_has() -> None:
    world = World.make(max_step_tokens=30, max_logit_rows=30)
    world.add(request("a", range(12), 1))
    world.run()
    scored = world.add(request("s", range(12), 1, kind=RequestKind.SCORE))
    world.run()
    assert scored.num_cached_tokens == 0
    assert len(scored.results) == 11


# --- bad input ---------------------------------------------------------------------------------------


def test_requests_that_never_fit_are_refused() -> None:
    scheduler = Scheduler(limits(num_pages=4, max_context=30, max_waiting=2))
    with pytest.raises(ConfigError, match=r"request 'r'.*prompt is empty"):
        scheduler.add(request("r", []))
    with pytest.raises(
        CapacityError, match=r"12 prompt and up to 5 new tokens are 17, .* holds 16"
    ):
        scheduler.add(request("r", range(12)))
    with pytest.raises(ConfigError, match=r"are 31, the model's context holds 30"):
        scheduler.add(request("r", range(26)))
    scheduler.add(request("r", range(11)))
    scheduler.add(request("s", [1]))
    with pytest.raises(CapacityError, match=r"2 requests wait already.*max_waiting is 2"):
        scheduler.add(request("t", [1]))
    assert [r.request_id for r in scheduler.waiting] == ["r", "s"]


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_size=0"):
        limits(page_size=0)
    with pytest.raises(ConfigError, match="max_logit_rows=2 is below max_running=5"):
        limits(max_logit_rows=2)


# --- random histories --------------------------------------------------------------------------------


class Histories(RuleBasedStateMachine):
    """Any order of events: KV is always a request's own, pages add up, outputs are as alone."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World.make(num_pages=7, max_context=28, max_waiting=8)
        self.number = 0

    @rule(seed=st.integers(0, 10**6), new=st.integers(1, 8), is_score=st.booleans())
    def add(self, seed: int, new: int, is_score: bool) -> None:
        self.number += 1
        kind = RequestKind.SCORE if is_score else RequestKind.GENERATE
        prompt = random_prompt(random.Random(seed), 18)
        if is_score and len(prompt) < 2:
            return
        try:
            self.world.add(request(f"r{self.number}", prompt, new, kind=kind))
        except CapacityError:
            assert len(self.world.scheduler.waiting) >= 8

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.requests)
    @rule(index=st.integers(0, 100), reason=st.sampled_from(["aborted", "failed"]))
    def end(self, index: int, reason: str) -> None:
        found = self.world.requests[index % len(self.world.requests)]
        self.world.scheduler.finish(found, FinishReason(reason))

    @rule(mode=st.sampled_from(PauseMode), is_flushed=st.booleans(), is_new=st.booleans())
    def update(self, mode: PauseMode, is_flushed: bool, is_new: bool) -> None:
        scheduler = self.world.scheduler
        scheduler.pause(mode)
        assert self.world.step() is None
        if is_flushed and not scheduler.running:
            scheduler.flush_cache()
        if is_new:
            self.number += 1
            scheduler.set_version(Version("run", self.number))
        scheduler.resume()

    @invariant()
    def pages_add_up(self) -> None:
        self.world.check_pages()

    def teardown(self) -> None:
        self.world.run()
        self.world.check_outputs()
        assert all(r.is_finished for r in self.world.requests)
        assert self.world.scheduler.pool.num_held == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(8))
def test_simulation(seed: int) -> None:
    """Steady traffic with updates in between: everything ends, and the oldest is never held up."""
    picks = random.Random(seed)
    reuse = picks.choice(list(PrefixReuse))
    world = World.make(reuse, num_pages=picks.randrange(8, 20), max_context=32, max_running=6)
    for number in range(300):
        if picks.random() < 0.3 and len(world.scheduler.waiting) < 40:
            world.add(request(f"r{number}", random_prompt(picks), picks.randrange(1, 12)))
        if picks.random() < 0.05:
            world.scheduler.pause(picks.choice([PauseMode.RETRACT, PauseMode.IN_PLACE]))
            world.scheduler.set_version(Version("run", number))
            world.scheduler.resume()
        oldest = world.scheduler.running[0] if world.scheduler.running else None
        world.step()
        assert oldest is None or oldest.state is not RequestState.WAITING
    world.run()
    world.check_outputs()
    assert {r.finish_reason for r in world.requests} == {FinishReason.LENGTH}
