"""What a store may forget, and the leases of those who still read.

Nothing here asks the time of day: ages are differences of times that the shared file system itself
gave to files, so a clock that jumps or differs between hosts shortens no lease.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import dataclass
from typing import Final

from weightsync.errors import ConfigError, UnavailableError
from weightsync.faults import reach
from weightsync.store.directory import LEASES, WITHDRAWN, Store
from weightsync.store.durable import (
    PARTIAL,
    remove_tree,
    replace_file,
    sync_directory,
    withdraw_file,
)
from weightsync.store.object_path import AnyPath
from weightsync.store.version import VersionKind, VersionManifest

DEFAULT_GRACE_S: Final = 3600.0
DEFAULT_LEASE_S: Final = 3600.0


class Lease:
    """Keeps versions from ``version`` on, and the full one below it, while it is renewed."""

    def __init__(self, store: Store, version: int) -> None:
        folder = store.path / LEASES
        folder.mkdir(exist_ok=True)
        self._path = folder / f"{uuid.uuid4().hex}.json"
        self.version = version
        self.renew()

    def renew(self) -> None:
        """Say once more that it is held; well within the collector's ``lease_s``."""
        replace_file(self._path, json.dumps({"version": self.version}).encode())

    def release(self) -> None:
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True)
class Collected:
    """What a collection did, by plain names: manifests withdrawn, folders and files removed."""

    withdrawn: tuple[str, ...]
    removed: tuple[str, ...]


def collect(
    store: Store,
    *,
    keep: int = 1,
    grace_s: float = DEFAULT_GRACE_S,
    lease_s: float = DEFAULT_LEASE_S,
) -> Collected:
    """Forget what nobody needs: all before the newest full version that the last ``keep`` versions and
    every living lease can start from.

    A manifest is withdrawn first; its payload, and payload that no manifest names, goes once the
    withdrawal (or the folder) is older than ``grace_s``, which must be longer than the slowest pull.
    """
    if keep < 1 or grace_s < 0 or lease_s <= 0:
        raise ConfigError(f"keep {keep}, grace {grace_s} s, lease {lease_s} s cannot be")
    versions = store.versions()
    if not versions:
        return Collected((), ())
    now_s = _now(store.path)
    oldest = min([versions[-keep:][0], *_leased(store, now_s, lease_s)])
    manifests = _readable(store)
    anchors = [m.version for m in manifests.values() if m.is_full]
    floor = max((v for v in anchors if v <= oldest), default=versions[0])
    withdrawn = []
    for name, manifest in manifests.items():
        start = manifest.version if manifest.base is None else manifest.base.version
        # The delta to a version that only an anchor stands for keeps that version's name alive.
        is_name_of_floor = manifest.kind is VersionKind.DELTA and manifest.version == floor
        if start < floor and not is_name_of_floor:
            path = store.path / name
            withdraw_file(path, f"{WITHDRAWN}{name}")
            withdrawn.append(name)
    sync_directory(store.path)
    reach("store.collected")
    kept = {m.directory for n, m in manifests.items() if n not in withdrawn}
    return Collected(tuple(withdrawn), tuple(_remove(store, kept, _now(store.path), grace_s)))


def _readable(store: Store) -> dict[str, VersionManifest]:
    found = {}
    for name in store.manifest_names():
        with contextlib.suppress(UnavailableError):  # collected by somebody else meanwhile
            found[name] = store.read_manifest(name)
    return found


def _remove(store: Store, kept: set[str], now_s: float, grace_s: float) -> list[str]:
    """Payload of old withdrawals, then folders that no manifest names and files of ended writers.

    The newest withdrawal stays, so that its number is never given again.
    """
    removed, newest = [], f"v{store.last_number():012}"
    for entry in sorted(store.path.glob(f"{WITHDRAWN}*")):
        directory = VersionManifest.from_bytes(entry.read_bytes(), str(entry)).directory
        if _age(entry, now_s) < grace_s:
            kept = kept | {directory}
            continue
        remove_tree(store.path / directory)
        removed.append(directory)
        if not entry.name.startswith(f"{WITHDRAWN}{newest}"):
            entry.unlink(missing_ok=True)
    for entry in sorted(store.path.iterdir()):
        if entry.name in kept or entry.name == LEASES or _age(entry, now_s) < grace_s:
            continue
        if entry.is_dir():
            remove_tree(entry)
        elif entry.name.startswith(PARTIAL):
            entry.unlink(missing_ok=True)
        else:
            continue
        removed.append(entry.name)
    return removed


def _leased(store: Store, now_s: float, lease_s: float) -> list[int]:
    folder, found = store.path / LEASES, []
    if not folder.is_dir():
        return []
    for entry in folder.iterdir():
        if _age(entry, now_s) > lease_s:
            entry.unlink(missing_ok=True)
        elif entry.suffix == ".json":
            with contextlib.suppress(OSError):
                found.append(int(json.loads(entry.read_bytes())["version"]))
    return found


def _age(path: AnyPath, now_s: float) -> float:
    try:
        return now_s - path.stat().st_mtime
    except OSError:  # gone meanwhile
        return -1.0


def _now(folder: AnyPath) -> float:
    """The file system's own idea of now."""
    probe = folder / f"{PARTIAL}{uuid.uuid4().hex}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
