"""Decoding a step ahead of the host says what decoding step by step says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_decode import EagerSteps
from core_engines import params, prompts, same, small_engine, small_model
from core_models import torch

from engine_adapter.core import engine as engine_module
from engine_adapter.core.decode_state import DecodeState
from engine_adapter.core.engine import Engine
from engine_adapter.core.request import FinishReason
from weightsync.errors import RequestFailedError
from weightsync.session import Version
from weightsync.types import PauseMode

LENGTHS = (12, 16, 33, 1, 70, 17, 5)
Made = Callable[..., tuple[Engine, EagerSteps]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("bf16"))


@pytest.fixture
def make(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    def made(**settings: Any) -> tuple[Engine, EagerSteps]:
        steps: list[EagerSteps] = []

        def build(config: Any, model: Any, cache: Any, attention: Any, group: Any) -> EagerSteps:
            steps.append(EagerSteps(model, cache, attention, config.max_running))
            return steps[-1]

        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "build_decode_steps", build)
            engine = small_engine(directory, **settings)
        return engine, steps[0]

    return made


def mixed() -> list[Any]:
    """Requests that end at different times, greedy and drawn, some by a stop token."""
    return [
        params(
            max_tokens=3 + 9 * i, temperature=0.8 * (i % 3 != 0), seed=i,
            stop_token_ids=range(0, 131, 11) if i % 4 == 3 else (),
        )
        for i in range(len(LENGTHS))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 1},
        {"page_size": 64},
        {"max_running": 3},  # the others join when there is room
        {"kv_cache_tokens": 160},  # too little for all: some are retracted
        {"max_step_tokens": 16},
    ],
    ids=str,
)
def test_outputs_are_those_of_step_by_step(
    make: Made, directory: Path, settings: dict[str, Any]
) -> None:
    expected = small_engine(directory, **settings).generate(prompts(*LENGTHS), mixed())
    engine, steps = make(**settings)
    for output, wanted in zip(engine.generate(prompts(*LENGTHS), mixed()), expected, strict=True):
        assert same(output, wanted)
        assert output.finish_reason is wanted.finish_reason
    assert steps.num_launches > steps.num_loads > 0
    engine.at_boundary(lambda: None)
    assert engine.scheduler.pool.num_held == 0


def test_a_long_run_is_loaded_once_and_its_tables_copied_seldom(make: Made) -> None:
    engine, steps = make(page_size=64)
    engine.generate(prompts(3, 5, 9), params(max_tokens=60, temperature=0.0))
    assert steps.num_loads == 1
    assert steps.num_launches >= 59
    assert steps.num_copies <= 3


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_pause_finds_nothing_in_flight(make: Made, directory: Path, mode: PauseMode) -> None:
    asked = prompts(*LENGTHS), params(max_tokens=20, temperature=0.8)
    expected = small_engine(directory).generate(*asked)
    engine, _ = make()
    submission = engine.submit(*asked)
    while not any(s.request.output_ids[5:] for s in submission.samples):
        engine.step()
    before = [len(s.request.output_ids) for s in submission.samples]
    engine.pause(mode)
    after = [len(s.request.output_ids) for s in submission.samples]
    assert sum(after) > sum(before), "the step in flight counts"
    assert not engine.step()
    assert [len(s.request.output_ids) for s in submission.samples] == after
    engine.set_version(Version("run", 1))
    engine.resume()
    for output, wanted, count in zip(engine.wait(submission), expected, after, strict=True):
        assert same(output, wanted)
        ends = [(span.version, span.end) for span in output.version_spans]
        assert ends == [(None, count)] * bool(count) + [(Version("run", 1), 20)]


def test_an_abort_ends_one_and_leaves_the_others(make: Made, directory: Path) -> None:
    asked = prompts(*LENGTHS), params(max_tokens=30, temperature=0.8)
    expected = small_engine(directory).generate(*asked)
    engine, _ = make()
    others = engine.submit(asked[0][1:], asked[1])
    one = engine.submit(asked[0][:1], params(max_tokens=30, temperature=0.8))
    for _ in range(12):
        engine.step()
    engine.abort(one)
    (aborted,) = one.outputs()
    assert aborted.finish_reason is FinishReason.ABORTED
    for output, wanted in zip(engine.wait(others), expected[1:], strict=True):
        assert same(output, wanted)


def test_what_cannot_be_drawn_there_goes_step_by_step(make: Made, directory: Path) -> None:
    filtered = params(temperature=1.0, top_k=5)
    expected = small_engine(directory).generate(prompts(4, 8), filtered)
    engine, steps = make()
    for output, wanted in zip(engine.generate(prompts(4, 8), filtered), expected, strict=True):
        assert same(output, wanted)
    assert steps.num_launches == 0


def test_no_distribution_fails_its_request_alone(make: Made) -> None:
    engine, _ = make()
    submission = engine.submit(prompts(3, 20), params(max_tokens=30, temperature=0.0))
    bad, good = (sample.request for sample in submission.samples)
    while len(bad.output_ids) < 6:
        engine.step()
    engine.cache.keys[:, bad.pages[0], 0] = torch.nan
    with pytest.raises(RequestFailedError, match="no distribution") as failure:
        engine.wait(submission)
    reasons = [output.finish_reason for output in failure.value.outputs]
    assert reasons == [FinishReason.FAILED, FinishReason.LENGTH]
    assert len(good.output_ids) == 30


def test_a_step_that_raises_fails_its_requests(make: Made) -> None:
    engine, steps = make()
    submission = engine.submit(prompts(3, 20), params(max_tokens=30))
    for _ in range(5):
        engine.step()

    def fail() -> None:
        raise RuntimeError("the device is gone")

    launch, steps.launch = steps.launch, fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert all("the device is gone" in str(o.error) for o in submission.outputs())
    steps.launch = launch  # type: ignore[method-assign]
    assert len(engine.generate(prompts(3), params(max_tokens=4))[0].token_ids) == 4


def test_rows_without_a_page_write_nowhere() -> None:
    state = DecodeState(3, 2, 4, torch.device("cpu"))
    state.steps.copy_(torch.tensor([1, 1, 0]))
    state.positions.copy_(torch.tensor([5, 4, 3]))
    state.block_tables.copy_(torch.tensor([[7, 9], [3, -1], [-1, -1]]))
    state.place(3)
    assert state.slot_mapping.tolist() == [9 * 4 + 1, -1, -1]
    assert state.context_lens.tolist() == [6, 1, 1]
    assert state.positions.tolist() == [5, 0, 0]
    assert state.steps.tolist() == [1, 0, 0]
    assert state.block_tables[:, 0].tolist() == [7, 0, 0]
    state.positions[0] = 7
    state.advance(torch.tensor([11, -1, 2]))
    assert state.token_ids.tolist() == [11, 0, 2]
    assert state.positions.tolist() == [8, 0, 0]
    state.place(3)  # beyond its table
    assert state.slot_mapping.tolist() == [-1, -1, -1]
