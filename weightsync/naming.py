"""Declared rules between the names a module uses and checkpoint names.

Nothing is silent: a name that no rule touches keeps its name, a dropped one is listed with its rule.
Rules apply in order; the first that matches a name decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync.errors import ConfigError, LayoutError
from weightsync.layouts.dtensor import Trainer, is_dtensor
from weightsync.layouts.refused import check_module, check_name, check_source

NamedTensor = tuple[str, Any]


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from error


@dataclass(frozen=True, slots=True)
class Rename:
    """Names that match ``pattern`` (a regular expression, searched) are rewritten."""

    pattern: str
    replacement: str

    def __post_init__(self) -> None:
        _check_pattern(self.pattern)

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        new, count = re.subn(self.pattern, self.replacement, name)
        return [(new, tensor)] if count else None


@dataclass(frozen=True, slots=True)
class Drop:
    """Names that match (the whole name) are left out, for a stated reason."""

    pattern: str
    reason: str

    def __post_init__(self) -> None:
        _check_pattern(self.pattern)

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        return [] if re.fullmatch(self.pattern, name) else None


@dataclass(frozen=True, slots=True)
class Include:
    """Buffers whose name matches (the whole name) take part; without a rule buffers do not."""

    pattern: str

    def __post_init__(self) -> None:
        _check_pattern(self.pattern)

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        return [(name, tensor)] if re.fullmatch(self.pattern, name) else None


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Experts that are fused in memory and separate in files.

    ``<prefix>.experts.gate_up_proj`` [experts, 2 x width, hidden] holds gate above up, and
    ``<prefix>.experts.down_proj`` [experts, hidden, width]; files have
    ``<prefix>.experts.E.{gate,up,down}_proj.weight``. With ``is_transposed`` the last two dimensions
    of the fused tensors are swapped. The views share memory with the fused tensors.
    """

    is_transposed: bool = False

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        match = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name)
        if match is None:
            return None
        prefix, part = match.groups()
        if len(tensor.shape) != 3:
            raise LayoutError(
                f"{name!r}: fused experts have 3 dimensions, got {tuple(tensor.shape)}"
            )
        found: list[NamedTensor] = []
        for e in range(tensor.shape[0]):
            expert = tensor[e].T if self.is_transposed else tensor[e]
            if part == "down_proj":
                found.append((f"{prefix}.{e}.down_proj.weight", expert))
                continue
            width, rest = divmod(expert.shape[0], 2)
            if rest:
                raise LayoutError(
                    f"{name!r}: {expert.shape[0]} rows are not a gate above an up of equal size"
                )
            found.append((f"{prefix}.{e}.gate_proj.weight", expert[:width]))
            found.append((f"{prefix}.{e}.up_proj.weight", expert[width:]))
        return found


Rule = Rename | Drop | Include | FusedExperts


@dataclass(frozen=True)
class RuledTensors:
    """Named tensors after the rules, and what the rules left out."""

    named: list[NamedTensor]
    dropped: dict[str, str] = field(default_factory=dict)


def apply_rules(
    named: Iterable[NamedTensor], rules: Sequence[Rule], trainer: Trainer | None = None
) -> RuledTensors:
    """Every name through the first rule that matches it; DTensors become this rank's boxes.

    Raises :class:`LayoutError` for what is no tensor by name: FSDP1's flat parameters, adapters,
    optimizer state.
    """
    result = RuledTensors([], {})
    for name, tensor in (trainer or Trainer()).localise(named):
        check_source(name, tensor)
        for rule in rules:
            found = rule.apply(name, tensor)
            if found is None:
                continue
            if isinstance(rule, Drop):
                result.dropped[name] = rule.reason
            result.named.extend(found)
            break
        else:
            result.named.append((name, tensor))
    for name, _ in result.named:
        check_name(name)
    return result


def module_tensors(
    module: Any, rules: Sequence[Rule], trainer: Trainer | None = None
) -> RuledTensors:
    """Parameters of a ``torch.nn.Module`` (tied names included) and the buffers that rules include.

    Tensors are detached. Buffers that no :class:`Include` names are listed as dropped.
    """
    check_module(module)
    parameters = module.named_parameters(remove_duplicate=False)
    # A detached DTensor is a new one, and has the same local tensor.
    named = [(n, p if is_dtensor(p) else p.detach()) for n, p in parameters]
    buffers = list(module.named_buffers(remove_duplicate=False))
    includes = [r for r in rules if isinstance(r, Include)]
    wanted = [(n, b) for n, b in buffers if any(r.apply(n, b) is not None for r in includes)]
    others = [r for r in rules if not isinstance(r, Include)]
    result = apply_rules([*named, *wanted], others, trainer)
    kept = {n for n, _ in wanted}
    for name, _ in buffers:
        if name not in kept:
            result.dropped[name] = "a buffer that no Include rule names"
    return result


#: model_type of transformers configurations whose experts are fused in memory, gate above up.
_FUSED_EXPERT_MODELS = frozenset({"qwen2_moe", "qwen3_moe"})


def rules_for(module: Any) -> tuple[Rule, ...]:
    """The rules that bring a transformers model's names to those of its files.

    Raises :class:`ConfigError` for fused experts of a model type that is not known.
    """
    names = [n for n, p in module.named_parameters() if n.endswith(".experts.gate_up_proj")]
    if not names:
        return ()
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    if model_type not in _FUSED_EXPERT_MODELS:
        raise ConfigError(
            f"{names[0]!r}: fused experts of model type {model_type!r}; known: "
            f"{', '.join(sorted(_FUSED_EXPERT_MODELS))}. Give rules=(FusedExperts(...),) yourself"
        )
    return (FusedExperts(),)
