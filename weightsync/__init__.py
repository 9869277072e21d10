"""weightsync: moves weights from trainers to inference engines.

Importing this package costs nothing: every public name is loaded when it is first used, and torch
never by us.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.bucket import BucketMetadata, FlattenedTensorBucket, unpack_all
    from weightsync.errors import (
        TaintedError,
        UpdateFailedError,
        WeightSyncError,
    )
    from weightsync.naming import Drop, FusedExperts, Include, Rename, rules_for
    from weightsync.receiver import Receiver, ReceiverHooks
    from weightsync.report import EngineReport, UpdateReport
    from weightsync.sender import Sender
    from weightsync.types import (
        CastPolicy,
        ContractChoice,
        Outcome,
        PauseMode,
        Placement,
        VerifyMode,
    )

__version__ = "0.1.0"

_HOMES = {
    "weightsync.bucket": ("BucketMetadata", "FlattenedTensorBucket", "unpack_all"),
    "weightsync.errors": ("TaintedError", "UpdateFailedError", "WeightSyncError"),
    "weightsync.naming": ("Drop", "FusedExperts", "Include", "Rename", "rules_for"),
    "weightsync.receiver": ("Receiver", "ReceiverHooks"),
    "weightsync.report": ("EngineReport", "UpdateReport"),
    "weightsync.sender": ("Sender",),
    "weightsync.types": (
        "CastPolicy",
        "ContractChoice",
        "Outcome",
        "PauseMode",
        "Placement",
        "VerifyMode",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])


__all__ = [
    "BucketMetadata",
    "CastPolicy",
    "ContractChoice",
    "Drop",
    "EngineReport",
    "FlattenedTensorBucket",
    "FusedExperts",
    "Include",
    "Outcome",
    "PauseMode",
    "Placement",
    "Receiver",
    "ReceiverHooks",
    "Rename",
    "Sender",
    "TaintedError",
    "UpdateFailedError",
    "UpdateReport",
    "VerifyMode",
    "WeightSyncError",
    "__version__",
    "rules_for",
    "unpack_all",
]
