"""Small transformers models as oracles of the core, and batches for its forward step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_adapter.core.attention import ReferenceAttention  # noqa: E402
from engine_adapter.core.batch import NO_SLOT, StepBatch, padded_rows  # noqa: E402
from engine_adapter.core.kv_cache import KvCache, KvShape  # noqa: E402
from engine_adapter.core.model import DecoderModel  # noqa: E402

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


class Runner:
    """Forward steps over sequences that share one cache; pages are handed out in odd order."""

    def __init__(
        self, model: DecoderModel, attention: Any = None, num_pages: int = 64, page_size: int = 16
    ) -> None:
        config = model.config
        shape = KvShape(
            config.num_layers, model.num_kv_heads, config.head_dim, model.dtype, page_size
        )
        self.model, self.cache = model, KvCache(shape, num_pages)
        self.attention = ReferenceAttention() if attention is None else attention
        self._free = list(range(0, num_pages, 2)) + list(range(1, num_pages, 2))
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, rows: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Append tokens to sequences; logits [tokens, vocabulary] of each."""
        batch = self.batch(rows)
        with torch.no_grad():
            logits = self.model.forward(batch, self.cache, self.attention)
        found, start = {}, 0
        for name, tokens in rows.items():
            found[name] = logits[start : start + len(tokens)]
            start += len(tokens)
        return found

    def batch(self, rows: Mapping[str, Sequence[int]]) -> StepBatch:
        size = self.cache.page_size
        tokens, positions, slots, starts, contexts = [], [], [], [0], []
        for name, new in rows.items():
            done = self.lengths.get(name, 0)
            pages = self.pages.setdefault(name, [])
            while len(pages) * size < done + len(new):
                pages.append(self._free.pop(0))
            for i, token in enumerate(new, start=done):
                tokens.append(token)
                positions.append(i)
                slots.append(pages[i // size] * size + i % size)
            self.lengths[name] = done + len(new)
            starts.append(len(tokens))
            contexts.append(done + len(new))
        num_rows = len(tokens)
        missing = padded_rows(num_rows) - num_rows
        most = max(len(self.pages[name]) for name in rows)
        tables = [self.pages[n] + [-1] * (most - len(self.pages[n])) for n in rows]
        return StepBatch(
            torch.tensor(tokens + [0] * missing),
            torch.tensor(positions + [0] * missing),
            torch.tensor(slots + [NO_SLOT] * missing),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(contexts, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            torch.arange(num_rows),
        )


def random_tokens(count: int, seed: int = 0, vocab: int = 131) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=generator).tolist()
