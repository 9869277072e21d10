"""Megatron-style coordinates: a rank's tensors as boxes of tensors in checkpoint names.

Interleaved QKV, gate and up halves under tensor parallel, padded vocabularies, and numbering of layers and
experts that starts from 0 on every rank. Nothing of Megatron is imported: names and shapes tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.errors import ConfigError, LayoutError
from weightsync.layouts.megatron_cuts import cut_tensor
from weightsync.layouts.megatron_names import (
    EMBEDDING,
    GROUPED_NAMES,
    HEAD,
    LATENT_NAMES,
    MegatronName,
)
from weightsync.layouts.sharded import Sharded

_PREFIX = re.compile(r"(?:vp(?P<chunk>\d+)\.)?(?:module\.)*(?P<rest>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """What the rules must know of a model; :meth:`from_config` reads it from a ``config.json``.

    ``vocab_divisor`` is Megatron's ``make_vocab_size_divisible_by``: padding is shorter than
    ``vocab_divisor * tp_size`` rows.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    is_tied: bool = False
    has_latent_attention: bool = False
    vocab_divisor: int = 128

    @classmethod
    def from_config(cls, config: Any, **changes: Any) -> MegatronModel:
        """From a Hugging Face configuration, as an object or a mapping. ``changes`` are fields."""

        def get(key: str) -> Any:
            return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

        heads, hidden = get("num_attention_heads"), get("hidden_size")
        if not heads or not hidden or not get("num_hidden_layers") or not get("vocab_size"):
            raise ConfigError(
                "a configuration with num_attention_heads, hidden_size, num_hidden_layers and vocab_size "
                f"is needed, got {type(config).__name__}"
            )
        experts = get("num_experts") or get("num_local_experts") or get("n_routed_experts") or 0
        found = {
            "num_layers": get("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": get("num_key_value_heads") or heads,
            "head_dim": get("head_dim") or hidden // heads,
            "vocab_size": get("vocab_size"),
            "num_experts": experts,
            "is_tied": bool(get("tie_word_embeddings")),
            "has_latent_attention": get("kv_lora_rank") is not None,
        }
        return cls(**{**found, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlace:
    """One rank's coordinates and the sizes of each kind of parallelism.

    ``vp_size`` is the number of model chunks a stage has (virtual pipeline); their names then begin with
    ``vp0.``, ``vp1.``, ... (:func:`megatron_named`). ``etp`` is tensor parallel within experts; None: as
    ``tp``. ``first_layers`` gives the first layer of each chunk of this rank where stages are not equal.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    vp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int | None = None
    etp_size: int | None = None
    first_layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if (self.etp_rank is None) != (self.etp_size is None):
            raise ConfigError("etp_rank and etp_size are given together or not at all")
        for kind, (rank, size) in self._pairs().items():
            if not 0 <= rank < size:
                raise ConfigError(f"{kind}_rank {rank} of {kind}_size {size}")
        if self.vp_size < 1:
            raise ConfigError(f"vp_size {self.vp_size} must be at least 1")

    def _pairs(self) -> dict[str, tuple[int, int]]:
        return {
            "tp": (self.tp_rank, self.tp_size), "pp": (self.pp_rank, self.pp_size),
            "ep": (self.ep_rank, self.ep_size), "etp": self.expert_tp,
        }  # fmt: skip

    @property
    def expert_tp(self) -> tuple[int, int]:
        """Rank and size of tensor parallel within experts."""
        if self.etp_rank is None or self.etp_size is None:
            return self.tp_rank, self.tp_size
        return self.etp_rank, self.etp_size


class MegatronRules:
    """A rule (see :mod:`weightsync.naming`) for every parameter of a Megatron-core decoder.

    ``names`` are lines in front of Megatron's own: to add or to replace some. A name that no line knows
    is an error, as is one that two lines of ``names`` know. ``_extra_state`` is dropped. Norms whose
    weights are stored around zero (``layernorm_zero_centered_gamma``) are not what files hold and are not
    understood.
    """

    reason = "state of Transformer Engine, not a weight"

    def __init__(
        self, model: MegatronModel, place: MegatronPlace, names: Sequence[MegatronName] = ()
    ) -> None:
        self.model, self.place = model, place
        self._own = tuple(names)
        self._table = LATENT_NAMES if model.has_latent_attention else GROUPED_NAMES
        self._first_layers = _first_layers(model, place)
        if model.num_experts % place.ep_size:
            raise ConfigError(
                f"{model.num_experts} experts over ep_size {place.ep_size}: Megatron gives every rank as "
                "many"
            )
        if not model.has_latent_attention and (
            model.num_kv_heads % place.tp_size or model.num_heads % model.num_kv_heads
        ):
            raise ConfigError(
                f"{model.num_heads} heads in {model.num_kv_heads} groups over tp_size {place.tp_size}: "
                "every rank needs whole groups"
            )

    def apply(self, name: str, tensor: Any) -> list[tuple[str, Any]] | None:
        """Boxes of tensors in checkpoint names. Raises :class:`LayoutError` for a name that is not known
        and for shapes that do not fit the model."""
        if name.endswith("_extra_state"):
            return []
        found = _PREFIX.fullmatch(name)
        if found is None:
            return None
        line, match = self._line(name, found["rest"])
        numbers = {key: int(value) for key, value in match.groupdict().items()}
        layer = self._layer(name, int(found["chunk"] or 0), numbers.get("layer"))
        expert = self.first_expert + numbers.get("expert", 0)
        targets = tuple(self._target(t, layer, expert) for t in line.targets)
        return list(cut_tensor(self, line, Sharded.whole(tensor), name, targets))

    @property
    def first_expert(self) -> int:
        """The number of this rank's first expert in the whole model."""
        return self.place.ep_rank * self.num_local_experts

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank."""
        return self.model.num_experts // self.place.ep_size

    def _target(self, template: str, layer: int | None, expert: int) -> str:
        if (
            template == HEAD and self.model.is_tied
        ):  # the last stage has its own copy of the embedding
            return EMBEDDING
        return template.replace("{layer}", str(layer)).replace("{expert}", str(expert))

    def _line(self, name: str, rest: str) -> tuple[MegatronName, re.Match[str]]:
        for table in (self._own, self._table):
            fits = [(line, m) for line in table if (m := line.pattern.fullmatch(rest)) is not None]
            if len(fits) > 1:
                lines = ", ".join(repr(line.name) for line, _ in fits)
                raise LayoutError(f"{name!r}: {len(fits)} lines know it: {lines}")
            if fits:
                return fits[0]
        raise LayoutError(
            f"{name!r} is no name of a Megatron-core decoder that is known; put a MegatronName for it in "
            "names=, or a Drop before these rules"
        )

    def _layer(self, name: str, chunk: int, number: int | None) -> int | None:
        if number is None:
            return None
        if chunk >= len(self._first_layers):
            raise LayoutError(
                f"{name!r}: a chunk {chunk}, this stage has {len(self._first_layers)}"
            )
        layer = self._first_layers[chunk] + number
        if layer >= self.model.num_layers:
            raise LayoutError(
                f"{name!r}: it would be layer {layer} of {self.model.num_layers}; are its layers numbered "
                "from 0 on every stage? (first_layers=)"
            )
        return layer


def _first_layers(model: MegatronModel, place: MegatronPlace) -> tuple[int, ...]:
    """Of every chunk of a stage. Chunk v of stage p is the (v * pp_size + p)-th of the model."""
    if place.first_layers is not None:
        if len(place.first_layers) != place.vp_size:
            raise ConfigError(
                f"first_layers {place.first_layers} for vp_size {place.vp_size}: one a chunk"
            )
        return tuple(place.first_layers)
    per_chunk, rest = divmod(model.num_layers, place.pp_size * place.vp_size)
    if rest:
        raise ConfigError(
            f"{model.num_layers} layers over pp_size {place.pp_size} and vp_size {place.vp_size} are not "
            "equal stages; give first_layers="
        )
    return tuple((v * place.pp_size + place.pp_rank) * per_chunk for v in range(place.vp_size))


def megatron_named(chunks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Parameters and buffers of the model chunks of a stage, each name with its chunk: ``vp0.``, ...

    Buffers are those that ``state_dict()`` has (a router's ``expert_bias``)."""
    for i, chunk in enumerate(chunks):
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if name.endswith("_extra_state"):  # bytes, not a tensor
                continue
            yield f"vp{i}.{name}", tensor.detach()
