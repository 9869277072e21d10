"""Settings of an engine, checked when they are made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import torch

from engine_adapter.core.arena import MemoryKind
from engine_adapter.core.attention import Attention, PagedAttention, ReferenceAttention
from engine_adapter.core.cuda_attention import PagedCudaAttention
from engine_adapter.core.kv_cache import DEFAULT_PAGE_SIZE
from engine_adapter.core.pages import PrefixReuse
from engine_adapter.core.plan import SchedulerLimits
from engine_adapter.core.products import has_kernels
from weightsync import native
from weightsync.errors import ConfigError

DEFAULT_KV_CACHE_TOKENS = 32_768


class AttentionKind(StrEnum):
    """Which attention; ``auto`` is the native kernel where there is one, else the reference."""

    AUTO = "auto"
    PAGED = "paged"  # native, batch-invariant in every dtype
    REFERENCE = "reference"  # plain torch, transformers' order of operations


class DecodeKind(StrEnum):
    """How steps run in which every request makes a token."""

    AUTO = "auto"  # graphs where they can be
    GRAPHS = "graphs"  # CUDA graphs, one step ahead of the host
    EAGER = "eager"  # as any other step


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What bounds an engine's memory and steps. Raises :class:`ConfigError` naming the setting."""

    attention: AttentionKind = AttentionKind.AUTO
    decode: DecodeKind = DecodeKind.AUTO
    memory: MemoryKind = MemoryKind.PLAIN  # of a GPU; releasable: release_memory gives it back
    page_size: int = DEFAULT_PAGE_SIZE  # tokens
    kv_cache_tokens: int = DEFAULT_KV_CACHE_TOKENS  # rounded up to whole pages
    max_context: int | None = None  # tokens of prompt and output; None: what the model allows
    max_running: int = 256  # requests that hold KV at a time
    max_waiting: int = 4096  # requests in the queue
    max_step_tokens: int = 2048
    max_logit_rows: int = 512
    prefix_reuse: PrefixReuse = PrefixReuse.SAME_VERSION
    seed: int = 0  # seeds of requests that bring none are drawn from it

    def __post_init__(self) -> None:
        kinds = {
            "attention": AttentionKind, "decode": DecodeKind, "memory": MemoryKind,
            "prefix_reuse": PrefixReuse,
        }  # fmt: skip
        for name, kind in kinds.items():
            object.__setattr__(self, name, _member(kind, name, getattr(self, name)))
        for name in ("page_size", "kv_cache_tokens", "max_running", "max_waiting"):
            _check_count(name, getattr(self, name))
        for name in ("max_step_tokens", "max_logit_rows"):
            _check_count(name, getattr(self, name))
        if self.max_context is not None:
            _check_count("max_context", self.max_context)

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """From keywords; an unknown one is an error that lists those that are known."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"unknown engine setting {name!r}{hint} Known: {', '.join(known)}"
                )
        return cls(**settings)

    def limits(self, max_positions: int) -> SchedulerLimits:
        """For a model that allows ``max_positions`` tokens of context."""
        context = max_positions if self.max_context is None else self.max_context
        return SchedulerLimits(
            num_pages=-(-self.kv_cache_tokens // self.page_size),
            page_size=self.page_size,
            max_context=min(context, max_positions),
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_step_tokens=self.max_step_tokens,
            max_logit_rows=self.max_logit_rows,
        )


def build_attention(kind: AttentionKind, device: torch.device) -> Attention:
    """The attention that was asked for. Raises :class:`ConfigError` if the device has none."""
    if kind is AttentionKind.REFERENCE:
        return ReferenceAttention()
    if device.type == "cpu":
        return PagedAttention()
    if has_kernels(device):
        return PagedCudaAttention()
    if kind is AttentionKind.AUTO:
        return ReferenceAttention()
    reason = native.extension.cuda_unavailable_reason() or f"no kernels for {device.type}"
    raise ConfigError(f"attention='paged' on {device}: {reason}; use 'reference'")


def _member(kind: type[StrEnum], name: str, value: object) -> StrEnum:
    if value not in list(kind):
        raise ConfigError(f"engine setting {name}={value!r}; known: {', '.join(kind)}")
    return kind(str(value))


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"engine setting {name}={value!r}: expected an integer, at least 1")
