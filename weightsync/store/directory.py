"""A store: a directory with one folder a run; in it manifests, and a folder of payload for each.

Readers follow manifests and list nothing else; a version exists from the instant at which its manifest
does. Payload folders have names of their writer's own, so that writers never meet in one.
"""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from io import FileIO
from typing import Any, Final

import numpy as np

from weightsync.codec.packed import unpack_records
from weightsync.codec.record import HEADER_BYTES, record_at, record_bytes
from weightsync.codec.spans import Bytes, spans_of
from weightsync.errors import ConfigError, IntegrityError, UnavailableError
from weightsync.native_delta import Place
from weightsync.store.durable import hash_file, read_file
from weightsync.store.object_path import AnyPath, ObjectPath, place_of
from weightsync.store.version import (
    MAX_MANIFEST_BYTES,
    Identity,
    TensorEntry,
    VersionManifest,
    manifest_name,
    plain_name,
)
from weightsync.transports.base import StoreTarget
from weightsync.types import TensorMeta

#: Asked for in one call.
_MAX_READ_BYTES: Final = 64 << 20
LEASES: Final = "leases"
WITHDRAWN: Final = "withdrawn-"
_MANIFEST: Final = re.compile(r"v(\d{12})(-from-\d{12}|-full)?\.json")


def records_in(path: AnyPath, meta: TensorMeta, data: Bytes) -> list[tuple[Place, Bytes]]:
    """The records that follow each other in ``data``, which is all of a tensor's of a file, unpacked.

    Raises :class:`IntegrityError` naming one that is out of place.
    """
    places = {place.start_element: place for place in spans_of(meta)}
    found, at, last = [], 0, -1
    while at < data.size:
        num_bytes, start = record_at(data, at)
        if num_bytes > data.size - at or start not in places or start <= last:
            raise IntegrityError(f"{path}: {meta.name!r} has a record out of place")
        found.append((places[start], data[at : at + num_bytes]))
        at, last = at + num_bytes, start
    return found


def _packed_records(path: AnyPath, entry: TensorEntry) -> list[tuple[Place, Bytes]]:
    packed: Bytes = np.empty(entry.num_bytes, dtype=np.uint8)
    read_exactly(path, entry.offset_bytes, packed)
    records: Bytes = np.empty(entry.record_bytes, dtype=np.uint8)
    unpack_records(entry.meta, entry.digest, packed, records)
    return records_in(path, entry.meta, records)


def read_exactly(path: AnyPath, offset_bytes: int, *targets: Bytes) -> None:
    """All of the targets, one after the other, from a file. By reads, never mapped: an error of a network
    file system must be an error, not a signal. Raises :class:`IntegrityError` if it ends early."""
    with open_payload(path) as file:
        file.seek(offset_bytes)
        for data in targets:
            view, done = data.data, 0
            while done < data.size:
                count = file.readinto(view[done : done + _MAX_READ_BYTES])
                if not count:
                    raise IntegrityError(f"{path} ends early, at {offset_bytes + done} bytes")
                done += count
            offset_bytes += data.size


def open_payload(path: AnyPath) -> Any:
    """A file of payload, to ``seek`` and ``readinto``. Raises :class:`UnavailableError` if it is not
    there."""
    try:
        return path.open("rb") if isinstance(path, ObjectPath) else FileIO(path)
    except FileNotFoundError:
        raise UnavailableError(f"{path} is not there") from None


@lru_cache(maxsize=4)
def _parsed(data: bytes, where: str) -> VersionManifest:
    """Who follows a store looks at one manifest to find its way, and again to go it."""
    return VersionManifest.from_bytes(data, where)


class Store(StoreTarget):
    """One run in a store directory. Reads only; see :class:`weightsync.store.Publisher`."""

    def __init__(self, directory: AnyPath | str, run_id: str) -> None:
        try:
            self.run_id = plain_name(run_id)
        except ValueError as error:
            raise ConfigError(f"run id: {error}") from error
        self.directory = place_of(directory)
        self.path = self.directory / run_id

    @staticmethod
    def runs(directory: AnyPath | str) -> list[str]:
        """The runs in a store directory, by name."""
        path = place_of(directory)
        if not path.is_dir():
            raise UnavailableError(f"{path} is not a directory")
        found = []
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and any(_MANIFEST.fullmatch(p.name) for p in entry.iterdir()):
                found.append(entry.name)
        return found

    def manifest_names(self) -> list[str]:
        """Plain names of all manifests, oldest version first."""
        if not self.path.is_dir():
            return []
        return sorted(p.name for p in self.path.iterdir() if _MANIFEST.fullmatch(p.name))

    def versions(self) -> list[int]:
        """All versions, rising; those with a manifest of their own, not only a fold or an anchor."""
        found = (_MANIFEST.fullmatch(name) for name in self.manifest_names())
        return [int(m[1]) for m in found if m is not None and m[2] is None]

    def latest(self) -> int | None:
        """The newest version; None if there is none."""
        return max(self.versions(), default=None)

    def last_number(self) -> int:
        """The highest number ever given in this run that can still be seen; -1 if none."""
        if not self.path.is_dir():
            return -1
        names = (p.name.removeprefix(WITHDRAWN) for p in self.path.iterdir())
        matches = (_MANIFEST.fullmatch(name) for name in names)
        return max((int(m[1]) for m in matches if m is not None), default=-1)

    @staticmethod
    def newest_run(directory: AnyPath | str) -> str | None:
        """The run that was published to last, by the file system's own times; None if there is none."""
        path, found = place_of(directory), list[tuple[float, str]]()
        for run in Store.runs(path) if path.is_dir() else []:
            for entry in (path / run).iterdir():
                if _MANIFEST.fullmatch(entry.name):
                    with contextlib.suppress(OSError):  # collected meanwhile
                        found.append((entry.stat().st_mtime_ns, run))
        return max(found)[1] if found else None

    def manifest(self, version: int) -> VersionManifest:
        """Raises :class:`UnavailableError` if there is no such version, :class:`IntegrityError`."""
        return self.read_manifest(manifest_name(version))

    def read_manifest(self, name: str) -> VersionManifest:
        """The same by the manifest's plain name."""
        path = self.path / name
        manifest = _parsed(read_file(path, MAX_MANIFEST_BYTES), str(path))
        if manifest.run_id != self.run_id or manifest.file_name != name:
            raise IntegrityError(
                f"{path}: is of run {manifest.run_id!r} and should be {manifest.file_name}"
            )
        return manifest

    def payload_path(self, manifest: VersionManifest) -> Any:
        """The folder of a version's payload; of a full one: a Hugging Face checkpoint directory."""
        return self.path / manifest.directory

    def check_files(self, manifest: VersionManifest) -> None:
        """Read every file of a version's payload and compare length and hash.

        Raises :class:`UnavailableError` naming a missing file, :class:`IntegrityError` naming a
        torn or changed one.
        """
        for file in manifest.files:
            path = self.payload_path(manifest) / file.name
            num_bytes, found = hash_file(path)
            if (num_bytes, found) != (file.num_bytes, file.hash):
                raise IntegrityError(
                    f"{path}: got {num_bytes} bytes with hash {found}, expected {file.num_bytes} "
                    f"with {file.hash}; it is torn or was changed"
                )

    def records(
        self, manifest: VersionManifest, entry: TensorEntry
    ) -> Iterator[tuple[Place, Bytes]]:
        """The records of one tensor, or of one piece of it (see :meth:`TensorEntry.parts`), one in
        memory at a time. Raises :class:`IntegrityError`."""
        if entry.pieces:
            raise ConfigError(f"{entry.meta.name!r} is in pieces: its records are read by piece")
        if not entry.has_records:
            return
        path = self.payload_path(manifest) / manifest.files[entry.file].name
        if entry.is_packed:
            yield from _packed_records(path, entry)
            return
        places = {place.start_element: place for place in spans_of(entry.meta)}
        left, last = entry.num_bytes, -1
        with open_payload(path) as file:
            file.seek(entry.offset_bytes)
            while left > 0:
                header = file.read(HEADER_BYTES)
                num_bytes, start = record_bytes(header)
                if num_bytes > left or start not in places or start <= last:
                    raise IntegrityError(f"{path}: {entry.meta.name!r} has a record out of place")
                record = np.empty(num_bytes, dtype=np.uint8)
                record[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
                if file.readinto(record[HEADER_BYTES:].data) != num_bytes - HEADER_BYTES:
                    raise IntegrityError(f"{path} ends early")
                yield places[start], record
                left, last = left - num_bytes, start

    def fetch(
        self, version: int, have: Identity | None = None, without: Collection[str] = ()
    ) -> list[VersionManifest]:
        """See :meth:`route`."""
        return self.route(have, version, without)

    def route(
        self, have: Identity | None, version: int, without: Collection[str] = ()
    ) -> list[VersionManifest]:
        """The cheapest way, in bytes, from what one has to ``version``: manifests to take in order.

        A full version first means: start anew. What is ``have`` counts only where a delta names that
        very version with that very root as its base. Searched from the target backwards, so that
        a follower one version behind reads one manifest. Manifests named in ``without`` are not
        used. Raises :class:`UnavailableError` if no way exists.
        """
        target = self.manifest(version).target
        names = [name for name in self.manifest_names() if name not in without]
        queue: list[tuple[int, int, Identity | None, list[VersionManifest]]] = [(0, 0, target, [])]
        seen: set[Identity] = set()
        count = 1
        while queue:
            cost, _, at, way = heapq.heappop(queue)
            if at is None or at == have:
                return way
            if at in seen:
                continue
            seen.add(at)
            for manifest in self._leading_to(at, names):
                step = (cost + manifest.num_bytes, count, manifest.base, [manifest, *way])
                heapq.heappush(queue, step)
                count += 1
        raise UnavailableError(
            f"{self.path}: no full version and deltas lead to version {version}; "
            "the publisher must write a full one"
        )

    def _leading_to(self, target: Identity, names: list[str]) -> Iterator[VersionManifest]:
        """Manifests among ``names`` whose payload ends in ``target``; damaged ones are left out."""
        stem = f"v{target.version:012}"
        for name in names:
            if name.startswith(stem):
                # Collected since it was listed, or damaged: as if it were not there.
                with contextlib.suppress(UnavailableError, IntegrityError):
                    manifest = self.read_manifest(name)
                    if manifest.target == target:
                        yield manifest
