"""The bundled core follows a store while it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core_models import make_model, torch

from engine_adapter.bundled import BundledAdapter
from engine_adapter.core.config import parse_config
from engine_adapter.core.engine import Engine
from engine_adapter.core.engine_config import EngineConfig
from engine_adapter.core.model import DecoderModel
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.receiver import Receiver
from weightsync.store_sender import StoreOptions, StoreSender


def random_model(variant: str, seed: int) -> DecoderModel:
    config = parse_config(make_model(variant, torch.bfloat16).config.to_diff_dict())
    model = DecoderModel(config, torch.bfloat16)
    torch.manual_seed(seed)
    for slot in model.slots.slots.values():
        slot.write(torch.randn(slot.shape) * 0.1)
    return model


def tensors_of(model: DecoderModel) -> dict[str, Any]:
    return {name: slot.read_whole().clone() for name, slot in model.slots.slots.items()}


def moved(weights: dict[str, Any], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in weights.items():
        mask = torch.rand(tensor.shape, generator=generator) < 0.02
        found[name] = torch.where(mask, tensor * 1.25, tensor).to(tensor.dtype)
    return found


def say(engine: Engine) -> tuple[Any, ...]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    (output,) = engine.generate([[5, 9, 11, 2]], params)
    return (*output.token_ids, *(result.log_prob for result in output.log_probs))


@pytest.mark.parametrize("variant", ["dense", "moe-mixed", "tied"])
def test_outputs_after_a_delta_are_those_of_a_fresh_engine(tmp_path: Path, variant: str) -> None:
    config = EngineConfig(page_size=16, kv_cache_tokens=512)
    engine = Engine(random_model(variant, 1), config)
    weights = tensors_of(random_model(variant, 0))
    with (
        StoreSender(tmp_path, "run", StoreOptions()) as sender,
        Receiver(BundledAdapter(engine)) as receiver,
    ):
        follower = receiver.follow(tmp_path)
        outputs = []
        for version in range(3):
            with sender.update(version=version) as update:
                update.send(weights)
            assert update.report is not None
            assert follower.pull().kinds == (("delta",) if version else ("full",))
            live = tensors_of(engine.model)
            assert all(torch.equal(live[n], weights[n]) for n in weights)
            fresh = random_model(variant, 2)
            for name, tensor in weights.items():
                fresh.slots.slots[name].write(tensor)
            fresh.slots.refresh(None)
            outputs.append(say(engine))
            assert outputs[-1] == say(Engine(fresh, config))
            assert engine.version is not None
            assert engine.version.number == version
            weights = moved(weights, version)
        assert len(set(outputs)) == 3
