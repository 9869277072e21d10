"""The trained tiny model through the whole engine, next to transformers."""

from __future__ import annotations

from typing import Any

import pytest
from core_models import torch, trained_tiny, transformers

from engine_adapter.core.engine import Engine
from engine_adapter.core.request import FinishReason
from engine_adapter.core.sampling_params import SamplingParams

PROBLEMS = [f"{left:02}+{right:02}=" for left in range(3, 100, 13) for right in range(1, 100, 19)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(trained_tiny(), kv_cache_tokens=4096)


def test_greedy_text_equals_that_of_transformers(engine: Engine) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(trained_tiny(), dtype="auto")
    assert engine.tokenizer is not None
    ids = torch.tensor([engine.tokenizer.encode(problem) for problem in PROBLEMS])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
            pad_token_id=0,
        )[:, ids.shape[1] :].tolist()  # fmt: skip
    outputs = engine.generate(PROBLEMS, GREEDY)
    for output, theirs in zip(outputs, found, strict=True):
        assert list(output.token_ids) == theirs[: len(output.token_ids)]
        assert output.finish_reason is FinishReason.STOP_TOKEN
    right = [
        output.text == f"{int(problem[:2]) + int(problem[3:5]):03}"[::-1]
        for problem, output in zip(PROBLEMS, outputs, strict=True)
    ]
    assert sum(right) > 0.9 * len(PROBLEMS)


def test_sure_answers_are_drawn_at_any_seed(engine: Engine) -> None:
    (greedy,) = engine.generate("47+85=", GREEDY)
    drawn = engine.generate("47+85=", SamplingParams(temperature=0.5, n=5, max_tokens=8))
    assert [output.text for output in drawn] == [greedy.text] * 5 == ["231"] * 5
