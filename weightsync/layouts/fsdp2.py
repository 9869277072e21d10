"""Modules that FSDP2 (``fully_shard``) has wrapped."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def gatherers(module: Any) -> list[Any]:
    """The submodules whose parameters FSDP2 gathers for a forward pass."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else [m for m in module.modules() if isinstance(m, kind)]


def reshard(modules: Iterable[Any]) -> None:
    """Free what they have gathered; parameters are shards again. No communication."""
    for module in modules:
        module.reshard()
