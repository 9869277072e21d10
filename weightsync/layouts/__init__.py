"""Layouts of trainers and engines: from real tensors, from name rules, from a description.

Importing this package costs nothing: every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.layouts.check import check_layout
    from weightsync.layouts.describe import engine_layout, preset_metas, trainer_layout
    from weightsync.layouts.files import checkpoint_layout
    from weightsync.layouts.megatron import (
        MegatronModel,
        MegatronPlace,
        MegatronRules,
        megatron_named,
    )
    from weightsync.layouts.megatron_names import Cut, MegatronName
    from weightsync.layouts.quantised import fp8_metas
    from weightsync.layouts.rules import BoxRule, InTurn, LocalPart, Renumber, ShardRule
    from weightsync.layouts.sharded import Piece, Sharded

_HOMES = {
    "weightsync.layouts.check": ("check_layout",),
    "weightsync.layouts.describe": ("engine_layout", "preset_metas", "trainer_layout"),
    "weightsync.layouts.files": ("checkpoint_layout",),
    "weightsync.layouts.megatron": (
        "MegatronModel",
        "MegatronPlace",
        "MegatronRules",
        "megatron_named",
    ),
    "weightsync.layouts.megatron_names": ("Cut", "MegatronName"),
    "weightsync.layouts.quantised": ("fp8_metas",),
    "weightsync.layouts.rules": ("BoxRule", "InTurn", "LocalPart", "Renumber", "ShardRule"),
    "weightsync.layouts.sharded": ("Piece", "Sharded"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'weightsync.layouts' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])


__all__ = [
    "BoxRule",
    "Cut",
    "InTurn",
    "LocalPart",
    "MegatronModel",
    "MegatronName",
    "MegatronPlace",
    "MegatronRules",
    "Piece",
    "Renumber",
    "ShardRule",
    "Sharded",
    "check_layout",
    "checkpoint_layout",
    "engine_layout",
    "fp8_metas",
    "megatron_named",
    "preset_metas",
    "trainer_layout",
]
