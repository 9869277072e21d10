"""What a model is, read from ``config.json`` in either dialect of transformers (4 and 5).

One decoder serves several families; a family differs from another in the few facts of
:class:`Family`. Whatever would change a forward pass and is not understood is an error that lists
what is known: an architecture, a key, a value.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from engine_adapter.core.rope import RopeConfig, parse_rope
from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """The declared differences of a model family."""

    model_type: str
    has_qk_norm: bool = False  # RMSNorm of every query and key head before RoPE
    always_qkv_bias: bool = False  # biases on q, k, v and never on o, whatever the file says
    has_experts: bool = False
    default_head_dim: int | None = None  # None: hidden size / heads


#: By the word in ``architectures``.
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "Qwen3ForCausalLM": Family("qwen3", has_qk_norm=True, default_head_dim=128),
        "Qwen3MoeForCausalLM": Family("qwen3_moe", has_qk_norm=True, has_experts=True),
        "LlamaForCausalLM": Family("llama"),
        "Qwen2ForCausalLM": Family("qwen2", always_qkv_bias=True),
    }
)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: ``num_experts`` of width ``expert_size``, ``top_k`` of them a token.

    ``layers`` are the layers that have one; ``is_normalised``: the weights of a token's experts add
    up to one.
    """

    num_experts: int
    top_k: int
    expert_size: int
    is_normalised: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder. Sizes are element counts.

    ``dtype`` is torch's word for what the checkpoint was made in, None where it does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    is_tied: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    rope: RopeConfig
    experts: ExpertsConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` is a mixture of experts rather than a dense MLP."""
        return self.experts is not None and layer in self.experts.layers


#: Keys that say nothing about a forward pass of inference.
_IGNORED: Final = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path",
        "attention_dropout", "chunk_size_feed_forward", "id2label", "initializer_range",
        "label2id", "max_window_layers", "output_attentions", "output_hidden_states",
        "output_router_logits", "pad_token_id", "problem_type", "return_dict",
        "router_aux_loss_coef", "sliding_window", "transformers_version", "use_cache",
    }
)  # fmt: skip

#: Keys with the only values that are understood.
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "is_encoder_decoder": (False,),
        "partial_rotary_factor": (1.0, None),
        "pretraining_tp": (1,),
        "quantization_config": (None,),
        "use_mrope": (False,),
        "use_sliding_window": (False, None),
    }
)

_READ: Final = frozenset(
    {
        "architectures", "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim",
        "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings", "model_type",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype",
        "vocab_size", "mlp_bias",
    }
)  # fmt: skip

_READ_EXPERTS: Final = frozenset(
    {
        "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
        "num_experts", "num_experts_per_tok", "num_local_experts",
    }
)  # fmt: skip

_REASONS: Final = {
    "quantization_config": "quantised checkpoints are not served yet",
    "use_sliding_window": "sliding windows are not served",
}


def read_config(directory: Path) -> ModelConfig:
    """The configuration of a Hugging Face model directory.

    End tokens come from ``generation_config.json`` where it has some. Raises :class:`ConfigError`
    for a directory that is none (a LoRA adapter is refused by name) and what
    :func:`parse_config` raises.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(_no_config(directory))
    raw = _read_json(path)
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = _read_json(generation).get("eos_token_id")
        raw = raw if ends is None else raw | {"eos_token_id": ends}
    try:
        return parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _no_config(directory: Path) -> str:
    if (directory / "adapter_config.json").is_file():
        return (
            f"{directory} is a LoRA adapter (adapter_config.json), not a model: adapters are not "
            "served; merge it into its base model and save that"
        )
    if not directory.is_dir():
        return f"model {directory} is not a directory; give one with config.json and safetensors"
    return f"{directory} has no config.json; give a Hugging Face model directory"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is needed, got {type(content).__name__}")
    return content


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The content of a ``config.json``.

    Raises :class:`ConfigError` naming the architecture, key or value that is not understood, and
    what is.
    """
    architecture, family = _family_of(raw)
    _check_keys(raw, architecture, family)
    read = _Reader(raw)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    layers, positions = read.count("num_hidden_layers"), read.count("max_position_embeddings")
    head_dim = raw.get("head_dim") or family.default_head_dim
    if head_dim is None:
        head_dim = hidden // heads
    kv_heads = read.count("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"{heads} query heads of size {head_dim} over {kv_heads} key heads: the first must be "
            "a multiple of the last, and the size even"
        )
    kinds = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise ConfigError(f"layer_types {sorted(set(kinds))}: only 'full_attention' is served")
    has_bias = read.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(head_dim),
        max_positions=positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        is_tied=read.flag("tie_word_embeddings"),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.always_qkv_bias or has_bias,
        has_output_bias=has_bias and not family.always_qkv_bias,
        has_mlp_bias=read.flag("mlp_bias"),
        rope=parse_rope(raw, positions),
        experts=_experts(read, layers) if family.has_experts else None,
        bos_token_id=_token(raw.get("bos_token_id")),
        eos_token_ids=_tokens(raw.get("eos_token_id")),
        dtype=_dtype(raw),
    )


def _family_of(raw: Mapping[str, Any]) -> tuple[str, Family]:
    named = raw.get("architectures") or []
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = str(raw.get("model_type"))
    found = str(named[0]) if named else by_type.get(model_type, model_type)
    if found not in FAMILIES:
        raise ConfigError(f"unknown architecture {found!r}; known: {', '.join(sorted(FAMILIES))}")
    return found, FAMILIES[found]


def _check_keys(raw: Mapping[str, Any], architecture: str, family: Family) -> None:
    known = _IGNORED | _READ | set(_FIXED) | (_READ_EXPERTS if family.has_experts else set())
    for key, value in raw.items():
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6)
            hint = f"closest: {', '.join(near)}; " if near else ""
            raise ConfigError(
                f"unknown key {key!r} of {architecture} ({value!r}), which may change what the "
                f"model computes; {hint}known: {', '.join(sorted(known))}"
            )
        if key in _FIXED and value not in _FIXED[key]:
            reason = f" ({_REASONS[key]})" if key in _REASONS else ""
            understood = ", ".join(map(repr, _FIXED[key]))
            raise ConfigError(f"{key} is {value!r}; understood: {understood}{reason}")


def _experts(read: _Reader, num_layers: int) -> ExpertsConfig:
    raw = read.raw
    key = "num_local_experts" if "num_local_experts" in raw else "num_experts"
    num_experts, top_k = read.count(key), read.count("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"num_experts_per_tok {top_k} is above {key} {num_experts}")
    step, dense = read.count("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or [])
    layers = (i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    width, is_normalised = read.count("moe_intermediate_size"), read.flag("norm_topk_prob")
    return ExpertsConfig(num_experts, top_k, width, is_normalised, frozenset(layers))


@dataclass(frozen=True, slots=True)
class _Reader:
    raw: Mapping[str, Any]

    def count(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise ConfigError(f"{key} must be a whole number of at least 1, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and type(value) is not bool:
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        return bool(value)


def _token(value: Any) -> int | None:
    found = _tokens(value)
    return found[0] if found else None


def _tokens(value: Any) -> tuple[int, ...]:
    listed: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in listed):
        raise ConfigError(f"token ids must be whole numbers, got {value!r}")
    return tuple(listed)


def _dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype", raw.get("torch_dtype"))
    return None if value in (None, "auto") else str(value).removeprefix("torch.")
