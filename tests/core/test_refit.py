"""New weights under traffic: what is generated is what a fresh engine of those weights generates."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from core_engines import params, prompts, same, small_engine
from core_models import make_model, save_model, torch
from core_traffic import (
    LENGTHS,
    LIMIT_S,
    Traffic,
    assert_scored_alike,
    refit,
    refitted,
    spans_of,
)
from processes import num_maps, open_fds

from engine_adapter.core.engine import Engine
from engine_adapter.core.request import RequestOutput
from weightsync.digest import digest_tensors
from weightsync.errors import TaintedError, UpdateFailedError
from weightsync.receiver import Receiver, ReceiverHooks
from weightsync.session import SessionSpec
from weightsync.transports import get_transport
from weightsync.types import PauseMode
from weightsync.watch import Look

TRANSPORTS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not get_transport(name).capabilities().is_usable, reason=f"{name} cannot be used here"
        ),
    )
    for name in ("loopback", "ipc", "p2p")
]
GREEDY = params(max_tokens=24, temperature=0.0)
LONG = 120  # tokens of a request that no engine ends before it parks


class Weights:
    """Transformers models of one shape, and directories that hold them."""

    def __init__(self, root: Path, variant: str) -> None:
        self._root, self._variant = root, variant
        self._models: dict[int, Any] = {}
        self._expected: dict[int, list[RequestOutput]] = {}

    def model(self, seed: int) -> Any:
        if seed not in self._models:
            model = self._models[seed] = make_model(self._variant, torch.bfloat16, seed)
            save_model(model, self._root / str(seed))
        return self._models[seed]

    def engine(self, seed: int, **settings: Any) -> Engine:
        """A fresh engine of these weights."""
        self.model(seed)
        return small_engine(self._root / str(seed), **settings)

    def expected(self, seed: int) -> list[RequestOutput]:
        """What a fresh engine says of the traffic's prompts."""
        if seed not in self._expected:
            self._expected[seed] = self.engine(seed).generate(prompts(*LENGTHS), GREEDY)
        return self._expected[seed]


@pytest.fixture(scope="module", params=["tied", "moe"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("only-tied"), "tied")


def footprint() -> tuple[int, int]:
    gc.collect()
    return len(open_fds()), num_maps()


@pytest.mark.parametrize("placement", ["staged", "in_place"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_identity_refit_changes_nothing(
    weights: Weights, transport: str, placement: str
) -> None:
    engine, expected = weights.engine(0), weights.expected(0)
    slots = engine.model.slots
    live = {n: s.read_whole() for n, s in slots.slots.items()}
    before = digest_tensors(live.items())
    tables = engine.model.cos.clone(), engine.model.sin.clone()
    with refitted(engine, transport=transport, placement=placement) as sender:
        with Traffic(engine) as traffic:
            for version in (1, 2, 3):
                traffic.wait_for(3)
                refit(sender, version, weights.model(0))
                if version == 1:
                    pointers = slots.fingerprint()
            traffic.wait_for(4)
        assert traffic.errors == []
        grown = footprint()
        for version in (4, 5, 6):
            refit(sender, version, weights.model(0))
        assert footprint() <= grown
        assert slots.moved(Look.EVERYTHING) == []
        assert slots.fingerprint() == pointers
    assert digest_tensors(live.items()) == before
    assert torch.equal(engine.model.cos, tables[0])
    assert torch.equal(engine.model.sin, tables[1])
    for output in traffic.outputs:
        wanted = next(e for e in expected if e.prompt_token_ids == output.prompt_token_ids)
        assert same(output, wanted)
    assert {n for o in traffic.outputs for n, _, _ in spans_of(o)} >= {1, 2, 3}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_there_and_back_again_under_traffic(weights: Weights, mode: str) -> None:
    engine = weights.engine(0)
    of_version = {None: 0, 1: 1, 2: 0}
    long = params(max_tokens=LONG, temperature=0.0)
    streams: list[Any] = []
    crossing: list[Any] = []

    def begin_a_long_request(spec: SessionSpec) -> None:
        """The engine is about to park: it has LONG tokens to go."""
        stream = engine.stream(prompts(LENGTHS[0]), long, limit_s=LIMIT_S)
        next(stream)
        streams.append(stream)

    hooks = ReceiverHooks(on_commit=begin_a_long_request)
    with (
        refitted(engine, hooks, pause_mode=mode) as sender,
        Traffic(engine) as traffic,
    ):
        traffic.wait_for(3)
        for version, seed in ((1, 1), (2, 0)):
            refit(sender, version, weights.model(seed))
            crossing.append(list(streams.pop())[-1].output)
            found = engine.generate(prompts(*LENGTHS), GREEDY)
            assert all(same(a, b) for a, b in zip(found, weights.expected(seed), strict=True))
            assert all(spans_of(o) == [(version, 0, 24)] for o in found)
            traffic.wait_for(4)
    assert traffic.errors == []
    fresh = {seed: weights.engine(seed) for seed in (0, 1)}
    assert [[version for version, *_ in spans_of(o)] for o in crossing] == [[None, 1], [1, 2]]
    for output in [*traffic.outputs, *crossing]:
        spans = spans_of(output)
        assert [s[1] for s in spans[1:]] == [s[2] for s in spans[:-1]]
        assert (spans[0][1], spans[-1][2]) == (0, LONG if output in crossing else 24)
        # In place, tokens after the first span come from KV of both weights.
        for version, first, end in spans if mode == "retract" else spans[:1]:
            assert_scored_alike(output, (first, end), fresh[of_version[version]])
        assert output.has_stale_kv == (mode == "in_place" and len(spans) > 1)


def test_a_prefix_of_other_weights_is_not_used_unless_asked_for(tied: Weights) -> None:
    prompt, one = prompts(40), params(max_tokens=8, temperature=0.0)
    for reuse, num_cached in (("same_version", 0), ("any_version", 32)):
        engine = tied.engine(0, prefix_reuse=reuse)
        with refitted(engine, pause_mode="in_place") as sender:
            engine.generate(prompt, one)
            assert engine.generate(prompt, one)[0].num_cached_tokens == 32
            refit(sender, 1, tied.model(1))
            (found,) = engine.generate(prompt, one)
        assert found.num_cached_tokens == num_cached
        assert found.has_stale_kv == (num_cached > 0)
        (wanted,) = tied.engine(1).generate(prompt, one)
        assert same(found, wanted) == (num_cached == 0)


def test_aborting_ends_requests_with_a_reason_and_new_ones_are_served(tied: Weights) -> None:
    engine = tied.engine(0)
    with refitted(engine, pause_mode="abort") as sender:
        submission = engine.submit(prompts(5, 6), params(max_tokens=400, ignore_eos=True))
        refit(sender, 1, tied.model(1))
        outputs = engine.wait(submission)
        assert {o.finish_reason.value for o in outputs} == {"aborted"}
        found = engine.generate(prompts(*LENGTHS), GREEDY)
    assert all(same(a, b) for a, b in zip(found, tied.expected(1), strict=True))


def test_a_pause_of_the_users_own_outlives_an_update(tied: Weights) -> None:
    engine = tied.engine(0)
    with refitted(engine) as sender:
        engine.pause(PauseMode.RETRACT)
        submission = engine.submit(prompts(*LENGTHS), GREEDY)
        refit(sender, 1, tied.model(1))
        assert engine.is_paused
        assert not submission.is_done.is_set()
        engine.resume()
        found = engine.wait(submission)
    assert all(same(a, b) for a, b in zip(found, tied.expected(1), strict=True))


def test_resuming_in_the_middle_of_an_update_starts_no_step(tied: Weights) -> None:
    engine = tied.engine(0)
    steps: list[int] = []
    engine_set_version = engine.set_version

    def during(version: Any) -> None:  # the weights are in the slots, the label is not
        before = engine.num_steps
        submission = engine.submit(prompts(5), GREEDY)
        engine.resume()
        engine.at_boundary(lambda: None)
        engine.at_boundary(lambda: None)
        steps.append(engine.num_steps - before)
        engine.abort(submission)
        engine_set_version(version)

    engine.set_version = during  # type: ignore[method-assign]
    with refitted(engine) as sender:
        refit(sender, 1, tied.model(1))
        engine.generate(prompts(5), GREEDY)
    assert steps == [0]


def test_an_update_that_is_given_up_changes_nothing_in_a_second_copy(tied: Weights) -> None:
    engine = tied.engine(0)
    model = tied.model(1)
    with refitted(engine) as sender, Traffic(engine) as traffic:
        traffic.wait_for(2)
        with pytest.raises(UpdateFailedError), sender.update(version=1) as update:
            update.send({n: p for n, p in model.named_parameters() if "layers.1" not in n})
        traffic.wait_for(4)
    assert traffic.errors == []
    for output in traffic.outputs:
        assert spans_of(output) == [(None, 0, 24)]
        wanted = next(e for e in tied.expected(0) if e.prompt_token_ids == output.prompt_token_ids)
        assert same(output, wanted)


def test_half_an_update_in_place_taints_until_a_whole_one(tied: Weights) -> None:
    engine = tied.engine(0)
    model = tied.model(1)
    with refitted(engine, placement="in_place") as sender:
        with pytest.raises(UpdateFailedError), sender.update(version=1) as update:
            update.send({n: p for n, p in model.named_parameters() if "layers.1" not in n})
        with pytest.raises(TaintedError, match="refuses to generate"):
            engine.generate(prompts(5), GREEDY)
        refit(sender, 2, model)
        found = engine.generate(prompts(*LENGTHS), GREEDY)
    assert all(same(a, b) for a, b in zip(found, tied.expected(1), strict=True))


def test_embedded_in_a_loop_of_its_own(tied: Weights) -> None:
    """No thread but the caller's: the update's work on bytes runs in ``Receiver.poll``."""
    import threading

    from core_traffic import OPTIONS

    from engine_adapter.bundled import BundledAdapter
    from weightsync.receiver import JobsBy
    from weightsync.sender import Sender

    engine = tied.engine(0)
    receiver = Receiver(BundledAdapter(engine)).start(JobsBy.POLL)
    failures: list[BaseException] = []

    def train() -> None:
        try:
            with Sender.connect([receiver.url], **OPTIONS) as sender:
                refit(sender, 1, tied.model(1))
        except BaseException as error:
            failures.append(error)

    trainer = threading.Thread(target=train)
    submission = engine.submit(prompts(*LENGTHS), GREEDY)
    for _ in range(5):
        assert engine.step()
    trainer.start()
    while trainer.is_alive():
        receiver.poll(timeout_s=0.01)
    trainer.join(LIMIT_S)
    outputs = engine.wait(submission)
    receiver.close()
    assert failures == []
    assert [spans_of(o)[-1][0] for o in outputs] == [1] * len(LENGTHS)
    fresh = tied.engine(1)
    for output in outputs:
        _, first, end = spans_of(output)[-1]
        assert_scored_alike(output, (first, end), fresh)
