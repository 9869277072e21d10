"""The core on a GPU in plain torch: right tokens, the same bits in any company, new weights by ``ipc``."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_engines import log_probs, params, prompts, small_engine
from core_models import make_model, save_model, torch, trained_tiny
from core_traffic import LENGTHS, LIMIT_S, Traffic, spans_of
from processes import Child

from engine_adapter.bundled import BundledAdapter
from engine_adapter.core.engine import Engine
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.receiver import Receiver

pytestmark = pytest.mark.gpu

ON_CUDA = {"device": "cuda:0", "attention": "reference"}
PROBLEMS = [f"{left:02}+{right:02}=" for left in range(3, 100, 13) for right in range(1, 100, 19)]
GREEDY = params(max_tokens=24, temperature=0.0)
SEEDS = (0, 1)


def test_greedy_text_equals_that_of_the_cpu() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    found = [
        Engine.from_pretrained(trained_tiny(), kv_cache_tokens=4096, **settings).generate(
            PROBLEMS, greedy
        )
        for settings in ({}, ON_CUDA)
    ]
    for on_cpu, on_cuda in zip(*found, strict=True):
        assert on_cuda.token_ids == on_cpu.token_ids
        assert log_probs(on_cuda) == pytest.approx(log_probs(on_cpu), abs=2e-2)


@pytest.mark.parametrize("variant", ["dense", "moe", "biased"])
def test_log_probs_are_near_those_of_the_cpu(variant: str, tmp_path: Path) -> None:
    directory = save_model(make_model(variant, torch.float32), tmp_path)
    tokens = prompts(5, 16, 40)
    found = [small_engine(directory, **settings).score(tokens) for settings in ({}, ON_CUDA)]
    for on_cpu, on_cuda in zip(*found, strict=True):
        assert log_probs(on_cuda) == pytest.approx(log_probs(on_cpu), abs=1e-4)


def test_new_weights_under_traffic(tmp_path: Path) -> None:
    directories = [
        save_model(make_model("dense", torch.float32, seed), tmp_path / str(seed)) for seed in SEEDS
    ]
    fresh = [small_engine(d, **ON_CUDA).generate(prompts(*LENGTHS), GREEDY) for d in directories]
    engine = small_engine(directories[0], **ON_CUDA)
    with (
        engine,
        Receiver(BundledAdapter(engine)) as receiver,
        Child("core_cuda_trainer:serve") as child,
    ):
        child.send(receiver.url)
        assert child.receive(LIMIT_S) == "connected"
        pointers = engine.model.slots.fingerprint()
        for version, seed in enumerate((0, 0, 1, 0), start=1):
            with Traffic(engine) as traffic:
                traffic.wait_for(4)
                child.send((version, seed))
                assert child.receive(LIMIT_S) == version
                traffic.wait_for(4)
            assert not traffic.errors
            after = engine.generate(prompts(*LENGTHS), GREEDY)
            for output, expected in zip(after, fresh[seed], strict=True):
                assert output.token_ids == expected.token_ids
                assert log_probs(output) == pytest.approx(log_probs(expected), abs=1e-3)
                assert spans_of(output) == [(version, 0, len(output.token_ids))]
            assert engine.model.slots.fingerprint() == pointers
        child.send(None)
