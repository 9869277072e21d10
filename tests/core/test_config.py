"""Configurations in both dialects, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.core.config import FAMILIES, parse_config, read_config
from engine_adapter.core.rope import RopeConfig, RopeKind
from weightsync.errors import ConfigError
from weightsync.presets import PRESETS

RAW: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 100,
}
MOE: dict[str, Any] = RAW | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("name", PRESETS)
def test_published_shapes_are_understood(name: str) -> None:
    preset = PRESETS[name]
    config = parse_config(preset.config())
    assert (config.num_layers, config.hidden_size) == (preset.num_layers, preset.hidden_size)
    assert (config.head_dim, config.num_kv_heads) == (preset.head_size, preset.num_kv_heads)
    assert config.is_tied == preset.is_tied
    assert config.eos_token_ids == (preset.eos_token_id,)
    assert config.rope.theta == preset.rope_theta
    assert config.dtype == "bfloat16"
    assert (config.experts is not None) == preset.is_moe


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_both_dialects_say_the_same(scaling: dict[str, Any] | None) -> None:
    old = MOE | {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    new = {k: v for k, v in MOE.items() if k != "num_experts"} | {
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": 5e5},
        "num_local_experts": 8,
        "dtype": "bfloat16",
    }
    assert parse_config(old) == parse_config(new)


def test_an_older_word_for_the_kind_of_rope() -> None:
    config = parse_config(RAW | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert config.rope == RopeConfig(RopeKind.LINEAR, 10_000.0, factor=2)


def test_yarn_falls_back_to_the_configured_context() -> None:
    config = parse_config(RAW | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert config.rope.original_max_positions == 512


def test_the_differences_of_families() -> None:
    def of(name: str, **changes: Any) -> Any:
        return parse_config(MOE | {"architectures": [name]} | changes if "Moe" in name else
                            RAW | {"architectures": [name]} | changes)  # fmt: skip

    qwen3, llama = of("Qwen3ForCausalLM"), of("LlamaForCausalLM", mlp_bias=True)
    qwen2 = of("Qwen2ForCausalLM")
    biased = of("LlamaForCausalLM", attention_bias=True)
    assert (qwen3.has_qk_norm, qwen3.head_dim, qwen3.has_qkv_bias) == (True, 128, False)
    assert (llama.has_qk_norm, llama.head_dim, llama.has_mlp_bias) == (False, 16, True)
    assert (qwen2.has_qkv_bias, qwen2.has_output_bias) == (True, False)
    assert (biased.has_qkv_bias, biased.has_output_bias) == (True, True)
    mixed = of("Qwen3MoeForCausalLM", decoder_sparse_step=2, num_hidden_layers=4)
    assert [mixed.has_experts(i) for i in range(4)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GlmForCausalLM"]}, "unknown architecture 'GlmForCausalLM'; known: L"),
        ({"architectures": None, "model_type": "t5"}, "unknown architecture 't5'"),
        ({"rms_norm_epsi": 1e-5}, "unknown key 'rms_norm_epsi'.*closest: rms_norm_eps.*known: "),
        ({"num_experts": 4}, "unknown key 'num_experts'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; understood: 'silu'"),
        ({"use_sliding_window": True}, "sliding windows are not served"),
        ({"quantization_config": {"bits": 4}}, "quantised checkpoints are not served"),
        ({"layer_types": ["sliding_attention"]}, "only 'full_attention'"),
        ({"num_key_value_heads": 3}, "4 query heads .* over 3 key heads"),
        ({"vocab_size": "100"}, "vocab_size must be a whole number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": [1, "2"]}, "token ids must be whole numbers"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic'; known: default, lin"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "must be a positive number"),
        ({"rope_scaling": {**LLAMA3, "mscale": 1}}, r"\['mscale'\] of kind 'llama3'; known: "),
    ],
)
def test_what_is_not_understood_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(RAW | change)


def test_experts_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok 9 is above num_experts 8"):
        parse_config(MOE | {"num_experts_per_tok": 9})


def write(directory: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / name).write_text(text)


def test_a_directory(tmp_path: Path) -> None:
    write(tmp_path, "config.json", RAW | {"eos_token_id": 1})
    assert read_config(tmp_path).eos_token_ids == (1,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [3, 4]})
    assert read_config(tmp_path).eos_token_ids == (3, 4)


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        read_config(tmp_path / "none")
    write(tmp_path, "adapter_config.json", {})
    with pytest.raises(ConfigError, match=r"LoRA adapter .*adapters are not served"):
        read_config(tmp_path)
    write(tmp_path, "config.json", "{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        read_config(tmp_path)
    write(tmp_path, "config.json", [])
    with pytest.raises(ConfigError, match="a JSON object is needed, got list"):
        read_config(tmp_path)
    write(tmp_path, "config.json", RAW | {"strange": 1})
    with pytest.raises(ConfigError, match=r"config\.json: unknown key 'strange'"):
        read_config(tmp_path)
    assert len(FAMILIES) == 4
