"""Rotary position embedding: frequencies as the families scale them, and tables of cos and sin.

Formulas: RoPE (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071);
``llama3`` is the smoothed scaling published with Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from weightsync.errors import ConfigError

if TYPE_CHECKING:
    import torch

_DEFAULT_THETA: Final = 10_000.0
_CHUNK_POSITIONS: Final = 8192


class RopeKind(StrEnum):
    """How frequencies are stretched beyond the trained context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary parameters; which of the optional ones count depends on ``kind``."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


_COMMON: Final = {"rope_type", "type", "rope_theta"}
#: Name in the file -> field, for each kind; the first of a kind must be there.
_FIELDS: Final[Mapping[RopeKind, Mapping[str, str]]] = MappingProxyType(
    {
        RopeKind.DEFAULT: {},
        RopeKind.LINEAR: {"factor": "factor"},
        RopeKind.LLAMA3: {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_positions",
        },
        RopeKind.YARN: {
            "factor": "factor",
            "original_max_position_embeddings": "original_max_positions",
            "attention_factor": "attention_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
            "truncate": "truncate",
        },
    }
)


def parse_rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """From a ``config.json``: ``rope_parameters`` (transformers 5), or ``rope_theta`` and
    ``rope_scaling`` (4). Raises :class:`ConfigError` for a kind or key that is not known."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"RoPE parameters must be an object, got {given!r}")
    word = given.get("rope_type", given.get("type", "default"))
    try:
        kind = RopeKind(word)
    except ValueError:
        known = ", ".join(RopeKind)
        raise ConfigError(f"unknown rope_type {word!r}; known: {known}") from None
    fields = _FIELDS[kind]
    unknown = sorted(set(given) - _COMMON - set(fields))
    if unknown:
        known = ", ".join(sorted(_COMMON | set(fields)))
        raise ConfigError(
            f"unknown RoPE parameters {unknown} of kind {kind.value!r}; known: {known}"
        )
    if fields and given.get("factor") is None:
        raise ConfigError(f"RoPE of kind {kind.value!r} needs a factor")
    found = {fields[k]: v for k, v in given.items() if k in fields and v is not None}
    if "original_max_position_embeddings" in fields:
        found.setdefault("original_max_positions", max_positions)
    theta = given.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_THETA
    for name, value in {"rope_theta": theta, **found}.items():
        if not isinstance(value, bool) and not (isinstance(value, int | float) and value > 0):
            raise ConfigError(f"RoPE parameter {name} must be a positive number, got {value!r}")
    return RopeConfig(kind, float(theta), **found)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """(fp32 [head_dim / 2], factor that cos and sin are multiplied by)."""
    import torch

    base = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    if rope.kind is RopeKind.YARN:
        return _yarn(rope, base, head_dim)
    plain = 1.0 / base
    if rope.kind is RopeKind.LINEAR:
        return plain / rope.factor, 1.0
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, plain), 1.0
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    import torch

    length, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > length / low, plain / rope.factor, plain)
    blend = (length / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    is_between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: RopeConfig, base: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often are kept, those that turn rarely interpolated, a ramp between."""
    import torch

    def dimension(num_turns: float) -> float:
        turns = math.log(rope.original_max_positions / (num_turns * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float) - low) / span, 0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (rope.factor * base) * (1 - kept) + 1.0 / base * kept
    return frequencies, _yarn_attention(rope)


def _yarn_attention(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def fill_tables(rope: RopeConfig, cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> None:
    """Fill tables [positions, head_dim / 2] of the model's dtype: computed in fp32, rounded once."""
    import torch

    frequencies, factor = inverse_frequencies(rope, head_dim)
    frequencies = frequencies.to(cos.device)
    for start in range(0, len(cos), _CHUNK_POSITIONS):
        stop = min(len(cos), start + _CHUNK_POSITIONS)
        positions = torch.arange(start, stop, device=cos.device)
        angles = positions[:, None].float() * frequencies
        cos[start:stop] = (angles.cos() * factor).to(cos.dtype)
        sin[start:stop] = (angles.sin() * factor).to(sin.dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads: states [R, heads, D], cos and sin [R, 1, D / 2], all of the model's dtype.

    Each product is rounded, then the sum: the order of transformers.
    """
    import torch

    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
