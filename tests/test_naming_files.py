"""Rules of transformers models: names and values are those of the files that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightsync.naming import module_tensors, rules_for

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "tie_word_embeddings": False, "eos_token_id": 1, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "olmoe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4},
    "qwen3_next": {
        "num_experts": 4, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_goes_by_the_names_of_its_files(model_type: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **MODELS[model_type]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    start = 0
    for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)]:
        values = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
        tensor.data.copy_(values)
        start += tensor.numel()
    model.save_pretrained(tmp_path)
    files = safetensors.load_file(tmp_path / "model.safetensors")
    found = dict(module_tensors(model, rules_for(model)).named)
    assert sorted(found) == sorted(files)
    assert [n for n, tensor in found.items() if not torch.equal(tensor, files[n])] == []
