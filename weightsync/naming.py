"""Declared rules between the names a module uses and checkpoint names.

Nothing is silent: a name that no rule touches keeps its name, a dropped one is listed with its rule.
Rules apply in order; the first that matches a name decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from weightsync.errors import ConfigError, LayoutError
from weightsync.layouts.dtensor import Trainer, is_dtensor
from weightsync.layouts.refused import check_module, check_name, check_source
from weightsync.layouts.sharded import Sharded

NamedTensor = tuple[str, Any]


def check_pattern(pattern: str) -> None:
    """Raise :class:`ConfigError` if it is no regular expression."""
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
        check_pattern(self.pattern)

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        new, count = re.subn(self.pattern, self.replacement, name)
        return [(new, tensor)] if count else None


@dataclass(frozen=True, slots=True)
class Drop:
    """Names that match (the whole name) are left out, for a stated reason."""

    pattern: str
    reason: str

    def __post_init__(self) -> None:
        check_pattern(self.pattern)

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        return [] if re.fullmatch(self.pattern, name) else None


@dataclass(frozen=True, slots=True)
class Include:
    """Buffers whose name matches (the whole name) take part; without a rule buffers do not."""

    pattern: str

    def __post_init__(self) -> None:
        check_pattern(self.pattern)

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        return [(name, tensor)] if re.fullmatch(self.pattern, name) else None


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Experts that are fused in memory and separate in files.

    ``<prefix>.experts.gate_up_proj`` [experts, 2 x width, hidden] holds gate above up, and
    ``<prefix>.experts.down_proj`` [experts, hidden, width]; files have
    ``<prefix>.experts.E.{gate,up,down}_proj.weight``. With ``is_transposed`` the last two dimensions
    of the fused tensors are swapped. The views share memory with the fused tensors. Under expert
    parallel a rank has some of the experts only: ``first_expert`` is the number of its first one.
    """

    is_transposed: bool = False
    first_expert: int = 0

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
        for i in range(tensor.shape[0]):
            e = i + self.first_expert
            expert = tensor[i].T if self.is_transposed else tensor[i]
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


class Rule(Protocol):
    """What every rule can do."""

    def apply(self, name: str, tensor: Any) -> list[NamedTensor] | None:
        """What a named tensor becomes (nothing: it is dropped); None if the name does not match.

        ``tensor`` is one that this rank holds whole or a :class:`weightsync.layouts.Sharded`; both can
        be sliced.
        """
        ...


@dataclass(frozen=True)
class RuledTensors:
    """Named tensors after the rules, and what the rules left out."""

    named: list[NamedTensor]
    dropped: dict[str, str] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # which rules matched a name, by index


def apply_rules(
    named: Iterable[NamedTensor], rules: Sequence[Rule], trainer: Trainer | None = None
) -> RuledTensors:
    """Every name through the first rule that matches it; DTensors become this rank's boxes.

    Raises :class:`LayoutError` for what is no tensor by name: FSDP1's flat parameters, adapters,
    optimizer state.
    """
    result = RuledTensors([], {})
    sources: dict[str, str] = {}
    for name, tensor in (trainer or Trainer()).localise(named):
        check_source(name, tensor)
        for new, found in _ruled(name, tensor, rules, result):
            check_name(new)
            other = sources.setdefault(new, name)
            # Parts of one tensor may come from several, whole tensors may not.
            if other != name and not isinstance(found, Sharded):
                raise LayoutError(f"{other!r} and {name!r} both become {new!r} by the rules")
            result.named.append((new, found))
    return result


def _ruled(
    name: str, tensor: Any, rules: Sequence[Rule], result: RuledTensors
) -> list[NamedTensor]:
    for i, rule in enumerate(rules):
        found = rule.apply(name, tensor)
        if found is not None:
            result.used.add(i)
            if not found:
                result.dropped[name] = getattr(rule, "reason", f"{type(rule).__name__} drops it")
            return found
    return [(name, tensor)]


def check_used(rules: Sequence[Rule], used: Set[int]) -> None:
    """Raise :class:`ConfigError` for a rule that matched no name: it says something else than it should.

    ``used`` are the indices of those that did (``RuledTensors.used``), on any rank. A :class:`Drop` need
    not match: what is not there is left out too.
    """
    idle = [r for i, r in enumerate(rules) if i not in used and not isinstance(r, Drop)]
    if idle:
        raise ConfigError(
            f"{len(idle)} of {len(rules)} rules match no name of the module, the first is {idle[0]}; "
            "correct its pattern or leave it out"
        )


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
    includes = {i: r for i, r in enumerate(rules) if isinstance(r, Include)}
    others = {i: r for i, r in enumerate(rules) if i not in includes}
    found = [(n, b, _matching(n, b, includes)) for n, b in buffers]
    wanted = [(n, b) for n, b, matching in found if matching]
    result = apply_rules([*named, *wanted], list(others.values()), trainer)
    places = list(others)
    used = {places[i] for i in result.used}.union(*(matching for *_, matching in found))
    result = replace(result, used=used)
    kept = {n for n, _ in wanted}
    for name, _ in buffers:
        if name not in kept:
            result.dropped[name] = "a buffer that no Include rule names"
    return result


def _matching(name: str, tensor: Any, rules: Mapping[int, Rule]) -> set[int]:
    return {i for i, rule in rules.items() if rule.apply(name, tensor) is not None}


#: model_type of transformers configurations whose experts are fused in memory, gate above up, and whose
#: files name them as :class:`FusedExperts` does.
_FUSED_EXPERT_MODELS = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "olmoe", "qwen2_moe", "qwen3_moe",
        "qwen3_next",
    }
)  # fmt: skip
#: A buffer of routers that training changes and files hold.
_ROUTER_BIAS = Include(r".*\.e_score_correction_bias")


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
    has_bias = any(_ROUTER_BIAS.apply(n, b) is not None for n, b in module.named_buffers())
    return (FusedExperts(), _ROUTER_BIAS) if has_bias else (FusedExperts(),)
