"""Presets against published totals, and against what transformers saves."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from weightsync import presets
from weightsync.checkpoints import read_index
from weightsync.errors import ConfigError
from weightsync.presets import PRESETS, get_preset


@pytest.mark.parametrize(
    ("name", "num_tensors", "billion_parameters", "gigabytes"),
    [
        ("qwen3-0.6b", 310, 0.596, 1.19),
        ("qwen3-1.7b", 310, 1.72, 3.44),
        ("qwen3-4b", 398, 4.02, 8.04),
        ("qwen3-8b", 399, 8.19, 16.38),
        ("qwen3-14b", 443, 14.77, 29.54),
        ("qwen3-32b", 707, 32.76, 65.52),
        ("qwen3-30b-a3b", 18_867, 30.53, 61.06),
        ("qwen3-235b-a22b", 36_945, 235.09, 470.19),
        ("llama-3.1-8b", 291, 8.03, 16.06),
    ],
)
def test_totals_are_the_published_ones(
    name: str, num_tensors: int, billion_parameters: float, gigabytes: float
) -> None:
    preset = get_preset(name)
    assert len(list(preset.tensors())) == num_tensors
    assert preset.total_parameters / 1e9 == pytest.approx(billion_parameters, abs=0.005)
    assert preset.total_bytes / 1e9 == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_tiny_presets_are_tiny(name: str) -> None:
    assert 1e6 <= get_preset(name).total_parameters <= 4e6


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    preset = get_preset(name)
    config = transformers.AutoConfig.for_model(**preset.config())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    saved = [entry[:3] for entry in read_index(tmp_path)]
    assert list(preset.tensors()) == saved


def test_llama_tensors_are_those_that_transformers_has(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # The real widths on the meta device cost nothing, and two layers show every kind of tensor.
    preset = dataclasses.replace(get_preset("llama-3.1-8b"), num_layers=2)
    config = transformers.AutoConfig.for_model(**preset.config())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sorted((name, tuple(p.shape)) for name, p in model.named_parameters())
    assert [(name, shape) for name, _, shape in preset.tensors()] == expected
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["rope_theta"] == 500_000.0


@pytest.mark.parametrize("name", list(PRESETS))
def test_config_is_understood_by_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    preset = get_preset(name)
    config = transformers.AutoConfig.for_model(**preset.config())
    assert config.model_type == preset.family
    assert config.tie_word_embeddings == preset.is_tied
    assert config.rope_parameters["rope_theta"] == preset.rope_theta
    assert config.num_hidden_layers == preset.num_layers
    assert config.vocab_size == preset.vocab_size


@pytest.mark.parametrize("name", list(PRESETS))
def test_tensors_have_unique_sorted_names(name: str) -> None:
    names = [tensor for tensor, _, _ in get_preset(name).tensors()]
    assert names == sorted(set(names))
    assert ("lm_head.weight" in names) != get_preset(name).is_tied


def test_config_is_json_and_new_on_each_call() -> None:
    preset = get_preset("llama-3.1-8b")
    first = preset.config()
    assert json.loads(json.dumps(first)) == first
    first["rope_scaling"]["factor"] = 1.0
    assert preset.config()["rope_scaling"]["factor"] == 8.0


def test_unknown_preset_lists_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"unknown model preset 'qwen4'; known: tiny, tiny-moe"):
        get_preset("qwen4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"num_experts": 4}, "only 'qwen3_moe' has experts"),
        ({"experts_per_token": 1}, "1 active experts out of 0"),
    ],
)
def test_contradicting_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    values = {
        f.name: getattr(get_preset("tiny"), f.name) for f in dataclasses.fields(PRESETS["tiny"])
    }
    with pytest.raises(ConfigError, match=message):
        presets.ModelPreset(**(values | changes))


def test_module_is_pure() -> None:
    tree = ast.parse(Path(presets.__file__).read_text())
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not imported & {"torch", "numpy", "transformers"}
