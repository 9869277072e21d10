"""What a user can get wrong: a clear error, and nobody else loses a request."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from core_engines import alone, params, prompts, same, small_engine, small_model
from core_models import torch

from engine_adapter.core import __main__ as command
from engine_adapter.core.engine import Engine
from engine_adapter.core.engine_config import EngineConfig
from engine_adapter.core.request import FinishReason
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.errors import CapacityError, ConfigError, RequestFailedError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are characters, from the space on; token 0 begins a text."""
    made = small_model(tmp_path_factory.mktemp("model"))
    (made / "vocab.json").write_text(json.dumps({chr(32 + i): i for i in range(131)}))
    return made


@pytest.fixture
def engine(directory: Path) -> Engine:
    return small_engine(directory, max_waiting=3)


def running(engine: Engine) -> Any:
    """A request in the middle of its life."""
    submission = engine.submit(prompts(20), params())
    for _ in range(4):
        engine.step()
    return submission


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "words"),
    [
        ("", {}, ConfigError, "prompt 0 is empty"),
        ([[]], {}, ConfigError, "prompt 0 is empty"),
        ([[1, 2], []], {}, ConfigError, "prompt 1 is empty"),
        ([[1, 131]], {}, ConfigError, r"prompt 0: 131 is no token id; the model has 0 to 130"),
        ([[-1]], {}, ConfigError, "-1 is no token id"),
        ([[1.5]], {}, ConfigError, "1.5 is no token id"),
        ([[True]], {}, ConfigError, "True is no token id"),
        ("tab\t", {}, ConfigError, r"no \['\\t'\]"),
        ([[1] * 500], {}, ConfigError, r"500 prompt and up to 20 .* context holds 512"),
        ([[1] * 300], {}, CapacityError, r"are 320, the KV cache holds 304 .*kv_cache_tokens"),
        ([[1]] * 4, {}, CapacityError, r"'r5'.*3 requests wait already.*max_waiting is 3"),
        ([[1]], {"n": 4}, CapacityError, "max_waiting"),
        ([[1]], {"stop_token_ids": 131}, ConfigError, "stop_token_ids: 131"),
    ],
)
def test_a_request_that_cannot_be_is_refused_and_others_go_on(
    directory: Path, prompt: Any, fields: Any, error: Any, words: str
) -> None:
    engine = small_engine(directory, max_waiting=3, kv_cache_tokens=300)
    other = running(engine)
    with pytest.raises(error, match=words):
        engine.generate(prompt, params(max_tokens=20, **fields))
    assert same(engine.wait(other)[0], alone(directory, prompts(20)[0]))
    assert not engine.scheduler.waiting


def test_a_context_may_be_as_long_as_the_cache(directory: Path) -> None:
    engine = small_engine(directory, kv_cache_tokens=96)
    (output,) = engine.generate([[1] * 90], params(max_tokens=6))
    assert output.finish_reason is FinishReason.LENGTH
    (rest,) = engine.generate([[1] * 90], params(max_tokens=None))
    assert len(rest.token_ids) == 6
    with pytest.raises(CapacityError, match="are 97"):
        engine.generate([[1] * 96], params(max_tokens=None))


def test_parameters_must_match_prompts(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="2 prompts and 1 sampling parameters"):
        engine.generate([[1], [2]], [params()])
    with pytest.raises(ConfigError, match="top_p"):
        engine.generate([[1]], SamplingParams(top_p=math.nan))


def test_scores_need_something_to_predict(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="sequence 0 has one token"):
        engine.score([[1]])


def test_text_needs_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    bare = Engine(small_engine(directory).model, EngineConfig(kv_cache_tokens=512))
    with pytest.raises(ConfigError, match=r"prompt 0 is text and .* no tokenizer"):
        bare.generate("abc")
    with pytest.raises(ConfigError, match=r"no tokenizer.*use stop_token_ids"):
        bare.generate([[1]], params(stop="x"))
    assert bare.generate([[1]], params())[0].text is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention": "flash"}, r"attention='flash'; known: auto, paged, reference"),
        ({"prefix_reuse": "always"}, "known: never, same_version, any_version"),
        ({"kv_cache_token": 5}, r"'kv_cache_token'; did you mean 'kv_cache_tokens'"),
        ({"page_size": 0}, "page_size=0: expected an integer, at least 1"),
        ({"kv_cache_tokens": 1e6}, "kv_cache_tokens=1000000.0"),
        ({"max_running": 1000}, "max_logit_rows=512 is below max_running=1000"),
        ({"max_context": 5000}, "512"),
    ],
)
def test_bad_settings_are_named(directory: Path, settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine.from_pretrained(directory, **settings)


def test_too_little_memory_says_how_much_and_which_knob(directory: Path) -> None:
    with pytest.raises(
        CapacityError, match=r"KV cache of 10\d+ tokens .* \d+ bytes .*lower kv_cache_tokens"
    ):
        Engine.from_pretrained(directory, kv_cache_tokens=10**12)


def test_a_lora_directory_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="LoRA adapter"):
        Engine.from_pretrained(tmp_path)


def test_damaged_kv_fails_its_request_and_its_pages_are_not_shared(directory: Path) -> None:
    engine = small_engine(directory)
    submission = engine.submit(prompts(40), params())
    engine.step()
    (request,) = engine.scheduler.running
    engine.cache.values[0, request.pages[0]] = torch.nan
    with pytest.raises(RequestFailedError, match=r"'r1': the logits for its token 41 .*damaged"):
        engine.wait(submission)
    again = engine.generate(prompts(40), params())
    assert again[0].num_cached_tokens == 0
    assert same(again[0], alone(directory, prompts(40)[0]))


# --- text through the engine, and the command ----------------------------------------------------------


def test_stop_strings_cut_text_and_not_tokens(directory: Path) -> None:
    engine = small_engine(directory)
    (free,) = engine.generate(["hello"], params())
    assert free.text is not None
    assert len(free.text) == len(free.token_ids) == 12
    stop = free.text[5:7]
    (cut,) = engine.generate(["hello"], params(stop=stop))
    assert (cut.finish_reason, cut.stopped_by) == (FinishReason.STOP_STRING, stop)
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.token_ids == free.token_ids[: free.text.index(stop) + 2]
    chunks = list(engine.stream("hello", params(stop=stop)))
    assert "".join(chunk.text for chunk in chunks) == cut.text
    (held,) = engine.generate(["hello"], params(stop=free.text[0], min_tokens=4))
    assert len(held.token_ids) >= 4


def test_a_stop_token_is_not_in_the_text(directory: Path) -> None:
    engine = small_engine(directory)
    (free,) = engine.generate(["hello"], params())
    token = free.token_ids[3]
    (cut,) = engine.generate(["hello"], params(stop_token_ids=[token]))
    assert cut.token_ids[-1] == token
    assert free.text is not None
    assert cut.text == free.text[: len(cut.token_ids) - 1]
    chunks = list(engine.stream("hello", params(stop_token_ids=[token])))
    assert "".join(chunk.text for chunk in chunks) == cut.text


def test_the_command_writes_text(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [
        "--model",
        str(directory),
        "--kv-cache-tokens",
        "512",
        "--max-tokens",
        "6",
        "--ignore-eos",
    ]
    assert command.main([*base, "--prompt", "hello"]) == 0
    found = capsys.readouterr()
    (expected,) = small_engine(directory).generate("hello", params(temperature=0.0, max_tokens=6))
    assert found.out == f"{expected.text}\n"
    assert "6 tokens in" in found.err
    assert command.main([*base, "--prompt", "a", "--prompt", "b", "--n", "2", "--log-probs"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if ": " in line] == [
        "r1.0", "r1.1", "r2.0", "r2.1",
    ]  # fmt: skip


def test_the_command_says_what_is_wrong_in_one_line(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--model", "/nowhere", "--prompt", "x"]) == 1
    assert command.main(["--model", str(directory), "--prompt", "x", "--top-p", "3"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "config.json" in lines[0]
    assert "top_p=3.0" in lines[1]
