"""The core on a GPU with its own kernels: the CPU's tokens, and one set of bits for one token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from core_engines import log_probs, params, prompts, same, small_engine, small_model
from core_models import make_model, save_model, torch, trained_tiny

from engine_adapter.core.cuda_attention import PagedCudaAttention
from engine_adapter.core.decode_graphs import DecodeGraphs
from engine_adapter.core.engine import Engine
from engine_adapter.core.loader import load_weights
from engine_adapter.core.request import RequestOutput
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.errors import ConfigError
from weightsync.types import PauseMode

pytestmark = [
    pytest.mark.gpu,
    # Of tiny models, whose products depend on the number of rows: they are padded.
    pytest.mark.filterwarnings("ignore:rows of products"),
]

PROBLEMS = [f"{left:02}+{right:02}=" for left in range(3, 100, 13) for right in range(1, 100, 19)]
LENGTHS = (12, 16, 33, 1, 70, 17)
ON_CUDA = {"device": "cuda:0", "attention": "paged", "kv_cache_tokens": 8192}
SAMPLED = params(temperature=0.8)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp(request.param), request.param)


def generated(directory: Path, prompt: list[int]) -> RequestOutput:
    return _generated(directory, tuple(prompt))


@cache
def _engine_of_one(directory: Path) -> Engine:
    """Without graphs or prefixes, and for one request at a time."""
    return small_engine(directory, **ON_CUDA, decode="eager", prefix_reuse="never", max_running=1)


@cache
def _generated(directory: Path, prompt: tuple[int, ...]) -> RequestOutput:
    (output,) = _engine_of_one(directory).generate([list(prompt)], SAMPLED)
    return output


def test_the_kernels_are_used(directory: Path) -> None:
    engine = small_engine(directory, device="cuda:0")
    assert isinstance(engine.runner.attention, PagedCudaAttention)


def test_greedy_text_equals_that_of_the_cpu() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    on_cpu, on_cuda = (
        Engine.from_pretrained(trained_tiny(), kv_cache_tokens=4096, device=device).generate(
            PROBLEMS, greedy
        )
        for device in ("cpu", "cuda:0")
    )
    for mine, theirs in zip(on_cuda, on_cpu, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert log_probs(mine) == pytest.approx(log_probs(theirs), abs=2e-2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_step_tokens": 16},
        {"max_step_tokens": 7, "page_size": 64},
        {"kv_cache_tokens": 112},
        {"max_running": 2},
        {"prefix_reuse": "never", "max_running": 32},
    ],
    ids=str,
)
def test_outputs_are_those_of_each_prompt_alone(directory: Path, settings: dict[str, Any]) -> None:
    expected = [generated(directory, prompt) for prompt in prompts(*LENGTHS)]
    engine = small_engine(directory, **{**ON_CUDA, "max_running": 8, **settings})
    for output, wanted in zip(engine.generate(prompts(*LENGTHS), SAMPLED), expected, strict=True):
        assert same(output, wanted)
    sequences = [[*p, *o.token_ids] for p, o in zip(prompts(*LENGTHS), expected, strict=True)]
    scored = engine.score(sequences, SamplingParams(temperature=0.8))
    for output, score in zip(expected, scored, strict=True):
        found = [(r.token, r.log_prob) for r in score.log_probs][-len(output.token_ids) :]
        assert found == [(r.token, r.log_prob) for r in output.log_probs]


def test_alone_and_among_256_others(tmp_path: Path) -> None:
    directory = small_model(tmp_path)
    (prompt,) = prompts(37)
    expected = generated(directory, prompt)
    company = [prompt, *prompts(*(1 + i % 90 for i in range(255)))]
    settings = {**ON_CUDA, "max_running": 256, "kv_cache_tokens": 65_536, "max_step_tokens": 512}
    engine = small_engine(directory, **settings)
    assert same(engine.generate(company, SAMPLED)[0], expected)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_pause_changes_no_bit(directory: Path, mode: PauseMode) -> None:
    expected = [generated(directory, prompt) for prompt in prompts(*LENGTHS)]
    engine = small_engine(directory, **ON_CUDA)
    submission = engine.submit(prompts(*LENGTHS), SAMPLED)
    for _ in range(6):
        engine.step()
    engine.pause(mode)
    assert not engine.step()
    engine.resume()
    for output, wanted in zip(engine.wait(submission), expected, strict=True):
        assert same(output, wanted)


@pytest.mark.parametrize("variant", ["dense", "moe", "biased", "llama", "odd", "mqa", "tied"])
def test_log_probs_are_near_those_of_the_cpu(variant: str, tmp_path: Path) -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        directory = save_model(make_model(variant, dtype), tmp_path / str(dtype))
        tokens = prompts(5, 16, 40)
        on_cpu, on_cuda = (
            small_engine(directory, **settings).score(tokens)
            for settings in ({}, {**ON_CUDA, "kv_cache_tokens": 1024, "max_running": 4})
        )
        for mine, theirs in zip(on_cuda, on_cpu, strict=True):
            assert log_probs(mine) == pytest.approx(log_probs(theirs), abs=tolerance)


def test_experts_among_others(tmp_path: Path) -> None:
    directory = small_model(tmp_path, variant="moe")
    expected = [generated(directory, prompt) for prompt in prompts(*LENGTHS)]
    engine = small_engine(directory, **ON_CUDA, max_step_tokens=23)
    for output, wanted in zip(engine.generate(prompts(*LENGTHS), SAMPLED), expected, strict=True):
        assert same(output, wanted)


def test_graphs_and_eager_steps_give_the_same_bits(tmp_path: Path) -> None:
    directory = small_model(tmp_path)
    asked = (
        prompts(*(1 + i * 7 % 90 for i in range(40))),
        [params(temperature=0.8 * (i % 3), max_tokens=5 + i, seed=i) for i in range(40)],
    )
    settings = {**ON_CUDA, "max_running": 40}
    expected = small_engine(directory, **settings, decode="eager").generate(*asked)
    engine = small_engine(directory, **settings, decode="graphs")
    graphs = engine.decode_steps
    assert isinstance(graphs, DecodeGraphs)
    captured = graphs.num_captures
    for _ in range(2):
        for output, wanted in zip(engine.generate(*asked), expected, strict=True):
            assert same(output, wanted)
    assert graphs.num_captures == captured == len(graphs.sizes)


def test_graphs_see_new_weights_at_their_old_addresses(tmp_path: Path) -> None:
    directories = [
        save_model(make_model("dense", torch.bfloat16, seed), tmp_path / str(seed))
        for seed in (0, 1)
    ]
    wanted = [[generated(d, prompt) for prompt in prompts(*LENGTHS)] for d in directories]
    engine = small_engine(directories[0], **ON_CUDA, decode="graphs", max_running=8)
    pointers = engine.model.slots.fingerprint() if engine.model.slots.is_sealed else None
    for seed in (0, 1, 0):
        engine.pause(PauseMode.RETRACT)
        load_weights(directories[seed], engine.model.slots, engine.model.config)
        engine.flush_cache()
        engine.resume()
        outputs = engine.generate(prompts(*LENGTHS), SAMPLED)
        for output, expected in zip(outputs, wanted[seed], strict=True):
            assert same(output, expected)
    if pointers is not None:
        assert engine.model.slots.fingerprint() == pointers


def test_graphs_where_they_cannot_be(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode='graphs'.*ReferenceAttention"):
        small_engine(directory, device="cuda:0", attention="reference", decode="graphs")
