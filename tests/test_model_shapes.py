"""Shapes of large models against published totals."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigError
from weightsync.model_shapes import LARGE_MODELS, model_metas, model_names
from weightsync.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_expert_tensors", "billion_parameters"),
    [
        ("glm-4.5-air", 17_925, 45 * 128 * 3, 106.85),
        ("deepseek-v3", 45_395, 58 * 256 * 3, 671.03),
        ("kimi-k2", 69_975, 60 * 384 * 3, 1026.41),
    ],
)
def test_totals_are_the_published_ones(
    name: str, num_tensors: int, num_expert_tensors: int, billion_parameters: float
) -> None:
    metas = model_metas(name)
    assert len({m.name for m in metas}) == len(metas) == num_tensors
    assert sum(".experts." in m.name for m in metas) == num_expert_tensors
    assert sum(m.num_elements for m in metas) / 1e9 == pytest.approx(billion_parameters, abs=0.005)


def test_latent_attention_is_that_of_deepseek() -> None:
    shapes = {m.name: m.shape for m in model_metas("deepseek-v3")}
    at = "model.layers.60.self_attn."
    assert shapes[at + "q_a_proj.weight"] == (1536, 7168)
    assert shapes[at + "q_b_proj.weight"] == (128 * 192, 1536)
    assert shapes[at + "kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes[at + "kv_b_proj.weight"] == (128 * 256, 512)
    assert shapes[at + "o_proj.weight"] == (7168, 128 * 128)
    assert "model.layers.2.mlp.gate_proj.weight" in shapes
    assert "model.layers.3.mlp.shared_experts.gate_proj.weight" in shapes


def test_presets_are_models_too_and_an_unknown_one_is_told_the_closest() -> None:
    assert {*PRESETS, *LARGE_MODELS} == set(model_names())
    assert [(m.name, m.dtype, m.shape) for m in model_metas("tiny")] == list(
        PRESETS["tiny"].tensors()
    )
    with pytest.raises(ConfigError, match="unknown model 'Kimi2'; closest: kimi-k2"):
        model_metas("Kimi2")
