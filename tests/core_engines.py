"""Small engines for tests. Importing it needs no transformers: ranks in processes do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_adapter.core.engine import Engine
from engine_adapter.core.request import RequestOutput
from engine_adapter.core.sampling_params import SamplingParams

SMALL = {"page_size": 16, "kv_cache_tokens": 1024, "max_running": 32, "max_step_tokens": 64}


def small_model(directory: Path, dtype: str = "bfloat16", variant: str = "dense") -> Path:
    """A random model of two layers, as transformers saves it."""
    from core_models import make_model, save_model, torch

    return save_model(make_model(variant, getattr(torch, dtype)), directory)


def small_engine(directory: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(directory, **{**SMALL, **settings})


def params(**fields: Any) -> SamplingParams:
    """Twelve tokens that nothing ends."""
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 7, **fields})


def prompts(*lengths: int) -> list[list[int]]:
    return [random.Random(i).choices(range(131), k=length) for i, length in enumerate(lengths)]


def log_probs(output: RequestOutput) -> list[float]:
    return [result.log_prob for result in output.log_probs]


def alone(directory: Path, prompt: Sequence[int], **fields: Any) -> RequestOutput:
    """What a fresh engine says of one prompt."""
    engine = small_engine(directory)
    (output,) = engine.generate([list(prompt)], params(**fields))
    return output


def same(output: RequestOutput, other: RequestOutput) -> bool:
    """Equal tokens and bits, by whatever way they came about."""
    return (output.token_ids, output.log_probs) == (other.token_ids, other.log_probs)
