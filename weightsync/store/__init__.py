"""Versions of weights in a shared directory: publish, follow, fold, collect (docs/delta.md)."""

from weightsync.store.collecting import Lease, collect
from weightsync.store.cutting import Cut
from weightsync.store.directory import Store
from weightsync.store.folding import fold
from weightsync.store.local import LocalCheckpoint
from weightsync.store.publish import Publisher
from weightsync.store.version import VersionKind, VersionManifest

__all__ = [
    "Cut",
    "Lease",
    "LocalCheckpoint",
    "Publisher",
    "Store",
    "VersionKind",
    "VersionManifest",
    "collect",
    "fold",
]
