"""Model shapes by name: what a checkpoint of a known model holds, without the checkpoint.

A preset answers two questions without reading a file and without torch: which configuration
describes the model (`ModelPreset.config`), and which tensors its checkpoint holds
(`ModelPreset.tensors`). Plans, benchmarks and synthetic checkpoints start from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from weightsync.errors import ConfigError

Family = Literal["qwen3", "qwen3_moe", "llama"]
TensorShape = tuple[str, str, tuple[int, ...]]

WEIGHT_DTYPE = "bfloat16"
WEIGHT_ITEM_BYTES = 2

_ARCHITECTURES: Mapping[Family, str] = MappingProxyType(
    {
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "llama": "LlamaForCausalLM",
    }
)

# Llama 3.1 stretches its rotary frequencies; a checkpoint without this table decodes wrongly.
_LLAMA_3_1_ROPE_SCALING: Mapping[str, float | int | str] = MappingProxyType(
    {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """The shape of one model; sizes are element counts, weights are bfloat16.

    `intermediate_size` is the width of a dense MLP; a mixture of experts has `num_experts`
    experts of width `expert_size` in every layer and `experts_per_token` of them active.
    `initializer_range` is the standard deviation of synthetic weights.

    Raises `ConfigError` for sizes that contradict each other.
    """

    name: str
    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    is_tied: bool
    head_size: int = 128
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    rope_theta: float = 1_000_000.0
    max_positions: int = 40_960
    norm_eps: float = 1e-6
    bos_token_id: int = 151_643
    eos_token_id: int = 151_645
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            raise ConfigError(
                f"preset {self.name!r}: {self.num_heads} heads cannot share "
                f"{self.num_kv_heads} KV heads evenly; make the first a multiple of the second"
            )
        if self.is_moe != (self.num_experts > 0):
            raise ConfigError(
                f"preset {self.name!r}: family {self.family!r} with {self.num_experts} experts; "
                "only 'qwen3_moe' has experts, and it needs at least one"
            )
        if not 0 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"preset {self.name!r}: {self.experts_per_token} active experts out of "
                f"{self.num_experts}; a token cannot use more experts than there are"
            )

    @property
    def is_moe(self) -> bool:
        """Whether every layer is a mixture of experts."""
        return self.family == "qwen3_moe"

    @property
    def total_parameters(self) -> int:
        """Elements of all tensors in the checkpoint; a tied head counts once."""
        return sum(math.prod(shape) for _, _, shape in self.tensors())

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors in the checkpoint, without file headers."""
        return self.total_parameters * WEIGHT_ITEM_BYTES

    def config(self) -> dict[str, Any]:
        """Return the content of `config.json`, as the model's publishers write it.

        A new dictionary on each call, of JSON values only. transformers 4 and 5 accept it.
        """
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.family]],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "model_type": self.family,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.is_tied,
            "torch_dtype": WEIGHT_DTYPE,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }
        return config | self._family_config()

    def tensors(self) -> Iterator[TensorShape]:
        """Yield (checkpoint name, dtype, shape) of every tensor, in file order.

        File order is the order of a published safetensors file: sorted by name, as text, so
        layer 10 comes before layer 2. Experts have one name each; a tied head has none.
        """
        for name, shape in sorted(self._shapes()):
            yield name, WEIGHT_DTYPE, shape

    def _family_config(self) -> dict[str, Any]:
        if self.family == "llama":
            return {
                "mlp_bias": False,
                "pretraining_tp": 1,
                "rope_scaling": dict(_LLAMA_3_1_ROPE_SCALING),
            }
        config: dict[str, Any] = {
            "max_window_layers": self.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
        }
        if self.is_moe:
            config |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "moe_intermediate_size": self.expert_size,
                "norm_topk_prob": True,
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token,
                "output_router_logits": False,
                "router_aux_loss_coef": 0.001,
            }
        return config

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        table = (self.vocab_size, self.hidden_size)
        yield "model.embed_tokens.weight", table
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, shape in self._layer_shapes():
                yield prefix + name, shape
        yield "model.norm.weight", (self.hidden_size,)
        if not self.is_tied:
            yield "lm_head.weight", table

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, head = self.hidden_size, self.head_size
        query_rows, kv_rows = self.num_heads * head, self.num_kv_heads * head
        yield "input_layernorm.weight", (hidden,)
        yield "self_attn.q_proj.weight", (query_rows, hidden)
        yield "self_attn.k_proj.weight", (kv_rows, hidden)
        yield "self_attn.v_proj.weight", (kv_rows, hidden)
        yield "self_attn.o_proj.weight", (hidden, query_rows)
        if self.family != "llama":
            yield "self_attn.q_norm.weight", (head,)
            yield "self_attn.k_norm.weight", (head,)
        yield "post_attention_layernorm.weight", (hidden,)
        if not self.is_moe:
            yield from self._mlp_shapes("mlp.", self.intermediate_size)
            return
        yield "mlp.gate.weight", (self.num_experts, hidden)
        for expert in range(self.num_experts):
            yield from self._mlp_shapes(f"mlp.experts.{expert}.", self.expert_size)

    def _mlp_shapes(self, prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield prefix + "gate_proj.weight", (width, self.hidden_size)
        yield prefix + "up_proj.weight", (width, self.hidden_size)
        yield prefix + "down_proj.weight", (self.hidden_size, width)


def _qwen3(
    name: str, hidden: int, mlp: int, layers: int, heads: int, *, is_tied: bool
) -> ModelPreset:
    return ModelPreset(
        name=name,
        family="qwen3",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        vocab_size=151_936,
        is_tied=is_tied,
    )


# The default deviation of 0.02 makes the logits of a narrow model nearly uniform, so that a test
# could not tell wrong weights from right ones; the tiny presets use a wider one.
_TINY_INITIALIZER_RANGE = 0.1

_ALL_PRESETS = (
    ModelPreset(
        name="tiny",
        family="qwen3",
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        vocab_size=512,
        is_tied=True,
        max_positions=2048,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=_TINY_INITIALIZER_RANGE,
    ),
    ModelPreset(
        name="tiny-moe",
        family="qwen3_moe",
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        vocab_size=512,
        is_tied=False,
        num_experts=16,
        experts_per_token=4,
        expert_size=64,
        max_positions=2048,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=_TINY_INITIALIZER_RANGE,
    ),
    _qwen3("qwen3-0.6b", 1024, 3072, 28, 16, is_tied=True),
    _qwen3("qwen3-1.7b", 2048, 6144, 28, 16, is_tied=True),
    _qwen3("qwen3-4b", 2560, 9728, 36, 32, is_tied=True),
    _qwen3("qwen3-8b", 4096, 12288, 36, 32, is_tied=False),
    _qwen3("qwen3-14b", 5120, 17408, 40, 40, is_tied=False),
    _qwen3("qwen3-32b", 5120, 25600, 64, 64, is_tied=False),
    ModelPreset(
        name="qwen3-30b-a3b",
        family="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        vocab_size=151_936,
        is_tied=False,
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
    ),
    ModelPreset(
        name="qwen3-235b-a22b",
        family="qwen3_moe",
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        vocab_size=151_936,
        is_tied=False,
        num_experts=128,
        experts_per_token=8,
        expert_size=1536,
    ),
    ModelPreset(
        name="llama-3.1-8b",
        family="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128_256,
        is_tied=False,
        rope_theta=500_000.0,
        max_positions=131_072,
        norm_eps=1e-5,
        bos_token_id=128_000,
        eos_token_id=128_001,
    ),
)

PRESETS: Mapping[str, ModelPreset] = MappingProxyType(
    {preset.name: preset for preset in _ALL_PRESETS}
)


def get_preset(name: str) -> ModelPreset:
    """Return the preset called `name`; `ConfigError` with the known names when there is none."""
    try:
        return PRESETS[name]
    except KeyError:
        known = ", ".join(PRESETS)
        raise ConfigError(f"unknown model preset {name!r}; known: {known}") from None
