"""Small transformers models as oracles of the core."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_adapter.core.batch import padded_rows  # noqa: E402
from weightsync.config import cache_dir  # noqa: E402

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}
_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
_MOE = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}

#: Name -> (model type, configuration beyond the small one).
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "mha": ("qwen3", {"num_key_value_heads": 8}),
    "mqa": ("qwen3", {"num_key_value_heads": 1}),
    "biased": ("qwen3", {"attention_bias": True}),
    "odd": ("qwen3", {"hidden_size": 72, "intermediate_size": 100, "head_dim": 24}),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": _LLAMA3}),
    "yarn": ("qwen3", {"rope_parameters": _YARN}),
    "linear-rope": ("qwen3", {"rope_parameters": _LINEAR}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "moe": ("qwen3_moe", _MOE),
    "moe-unnormalised": ("qwen3_moe", {**_MOE, "norm_topk_prob": False, "num_experts_per_tok": 1}),
    "moe-mixed": ("qwen3_moe", {**_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
}
_CLASSES = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama", "qwen2": "Qwen2"}


def make_model(variant: str, dtype: Any, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights, biases and norms included, in eval mode."""
    model_type, extra = VARIANTS[variant]
    fields = deepcopy({**_SMALL, **extra, **changes})
    config = getattr(transformers, f"{_CLASSES[model_type]}Config")(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.copy_(1 + 0.1 * torch.randn(parameter.shape))
        elif name.endswith("bias"):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def save_model(model: Any, directory: Path, **options: Any) -> Path:
    """As transformers saves it; its name for the dtype follows the weights."""
    model.save_pretrained(directory, **options)
    return directory


@contextmanager
def padded_linear() -> Iterator[None]:
    """``F.linear`` with rows padded as the core pads them, for everything within."""
    plain = torch.nn.functional.linear

    def padded(states: Any, weight: Any, bias: Any = None) -> Any:
        rows = states.reshape(-1, states.shape[-1])
        missing = padded_rows(len(rows)) - len(rows)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
        found = plain(rows, weight, bias)[: len(rows) - missing]
        return found.reshape(*states.shape[:-1], found.shape[-1])

    torch.nn.functional.linear = padded
    try:
        yield
    finally:
        torch.nn.functional.linear = plain


def oracle_logits(model: Any, tokens: Sequence[int]) -> Any:
    """[tokens, vocabulary] of transformers with padded rows."""
    with torch.no_grad(), padded_linear():
        return model(torch.tensor([list(tokens)])).logits[0]


def random_tokens(count: int, seed: int = 0, vocab: int = 131) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()


def trained_tiny() -> Path:
    """The trained tiny model, made once in the user's cache by the example's script."""
    path = Path(__file__).parents[1] / "examples" / "train_tiny.py"
    if "train_tiny" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_tiny", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["train_tiny"] = module
        spec.loader.exec_module(module)
    found: Path = sys.modules["train_tiny"].trained_tiny_model(cache_dir())
    return found


def trained_moe(directory: Path, num_experts: int = 4) -> Path:
    """The trained tiny model with experts: each begins as the trained layer, and a little noise of
    its own tells them apart. Two answer for a token, so that the answers stay right."""
    dense: Any = transformers.AutoModelForCausalLM.from_pretrained(trained_tiny(), dtype="auto")
    fields = dense.config.to_dict()
    width = fields["intermediate_size"]
    for name in ("architectures", "model_type", "transformers_version"):
        fields.pop(name, None)
    config = transformers.Qwen3MoeConfig(
        **fields,
        moe_intermediate_size=width,
        num_experts=num_experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    generator = torch.Generator().manual_seed(0)

    def noisy(weight: Any) -> Any:
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
        return (weight.float() + 0.02 * noise).to(weight.dtype)

    sparse = transformers.AutoModelForCausalLM.from_config(config, dtype=dense.dtype)
    wanted = sparse.state_dict()
    state = {name: tensor for name, tensor in dense.state_dict().items() if name in wanted}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}.mlp"
        up = [dense.get_parameter(f"{at}.{part}_proj.weight") for part in ("gate", "up")]
        down = dense.get_parameter(f"{at}.down_proj.weight")
        state[f"{at}.experts.gate_up_proj"] = torch.stack(
            [noisy(torch.cat(up)) for _ in range(num_experts)]
        )
        state[f"{at}.experts.down_proj"] = torch.stack([noisy(down) for _ in range(num_experts)])
        router = wanted[f"{at}.gate.weight"]
        state[f"{at}.gate.weight"] = torch.randn(router.shape, generator=generator).to(router.dtype)
    sparse.load_state_dict(state)
    return save_model(sparse, directory)
