"""A way through a store, tensor by tensor: a full version and the deltas on it, or deltas alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from weightsync import native_delta
from weightsync.checkpoints import FileTensor, read_tensors
from weightsync.codec import (
    Changes,
    apply_changes,
    block_digests,
    decode_record,
    decode_tensor,
    tensor_digest,
)
from weightsync.codec.spans import Bytes, Digests, span_bytes, span_digests, spans_of
from weightsync.errors import ConfigError, IntegrityError, ProtocolError, UnavailableError
from weightsync.native_delta import Place
from weightsync.store.bulk import Step
from weightsync.store.directory import Store, read_exactly
from weightsync.store.object_path import AnyPath
from weightsync.store.pieces import piece_meta, put, take
from weightsync.store.version import TensorEntry, VersionManifest
from weightsync.types import Box, TensorMeta


@dataclass(frozen=True, eq=False)
class ChainTensor:
    """One tensor of the target: ``full`` is where its bytes lie (None: one must have the base),
    ``steps`` the deltas that change it, in order; ``digest`` is that of the target, None if nobody
    said."""

    meta: TensorMeta
    digest: int | None
    full: tuple[AnyPath, FileTensor] | None
    steps: tuple[Step, ...]

    boxes: tuple[Box, ...] = ()  # that the target is in pieces of; none: it is whole
    shares: tuple[int, ...] = ()  # by box, of the digest
    digests: tuple[int, ...] = ()  # by box, as a tensor of its own

    @property
    def num_bytes(self) -> int:
        """Of its records."""
        return sum(entry.num_bytes for _, _, entry in self.steps)

    def parts(self) -> list[tuple[Box, ChainTensor]]:
        """By piece, the deltas that change it.

        Raises :class:`ConfigError` if the deltas are cut each in another way: what changes a piece of
        one of them is no piece of another.
        """
        whole = Box.whole(self.meta.shape)
        if any(entry.boxes != (self.boxes or (whole,)) for _, _, entry in self.steps):
            raise ConfigError(
                f"{self.meta.name!r} is not cut alike in the deltas to take; take a full version"
            )
        if not self.boxes:
            return [(whole, self)]
        by_step = [(store, manifest, entry.parts()) for store, manifest, entry in self.steps]
        found = []
        for i, box in enumerate(self.boxes):
            steps = tuple(
                (store, manifest, parts[i][1])
                for store, manifest, parts in by_step
                if parts[i][1].has_records
            )
            meta = piece_meta(self.meta, box)
            found.append((box, ChainTensor(meta, self.digests[i], None, steps)))
        return found

    def read(self, target: Bytes | None = None) -> Bytes:
        """The target's bytes, from the full version and the deltas on it; into ``target`` if given.

        Raises :class:`IntegrityError` if they are not what the manifest says.
        """
        if self.full is None:
            raise ConfigError(f"{self.meta.name!r}: these are deltas alone")
        folder, tensor = self.full
        data: Bytes = np.empty(self.meta.num_bytes, dtype=np.uint8) if target is None else target
        read_exactly(folder / tensor.file, tensor.offset_bytes, data)
        digests = block_digests(self.meta, data)
        for store, manifest, entry in self.steps:
            digests = advance(store, manifest, entry, data, digests)
        found_digest = tensor_digest(digests)
        if self.digest is not None and found_digest != self.digest:
            raise IntegrityError(
                f"{folder / tensor.file}: {self.meta.name!r} digests to {found_digest:016x}, expected "
                f"{self.digest:016x}; it is torn or was changed"
            )
        return data

    def changes(self, old: Bytes, digests: Digests) -> Iterator[Changes]:
        """What the deltas together change in ``old`` (which stays), folded span by span; block
        digests of ``old`` become those of the target as this is taken."""
        if len(self.steps) == 1:
            for place, record in self._records(0):
                part = span_bytes(old, place)
                yield decode_record(
                    place, record, part, span_digests(digests, place), are_digests_known=True
                )
            return
        streams = [self._records(i) for i in range(len(self.steps))]
        heads = [next(stream, None) for stream in streams]
        for place in spans_of(self.meta):
            now: Bytes | None = None
            for i, stream in enumerate(streams):
                head = heads[i]
                if head is None or head[0] != place:
                    continue
                now = span_bytes(old, place).copy() if now is None else now
                _step(place, head[1], now, span_digests(digests, place))
                heads[i] = next(stream, None)
            if now is not None:
                yield _difference(place, span_bytes(old, place), now)

    def _records(self, step: int) -> Iterator[tuple[Place, Bytes]]:
        store, manifest, entry = self.steps[step]
        return store.records(manifest, entry)


@dataclass(frozen=True, eq=False)
class Chain:
    """All tensors of the target, in order."""

    where: str
    _tensors: tuple[ChainTensor, ...]

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(tensor.meta for tensor in self._tensors)

    def tensors(self) -> tuple[ChainTensor, ...]:
        return self._tensors


def chain_source(store: Store, way: list[VersionManifest]) -> dict[str, Any]:
    """Plain JSON that :func:`open_chain` opens, on any host that reaches the store."""
    return {
        "directory": str(store.directory),
        "run_id": store.run_id,
        "manifests": [manifest.file_name for manifest in way],
    }


def checkpoint_source(directory: Path) -> dict[str, Any]:
    """The same for any Hugging Face directory of safetensors; nobody said its digests."""
    return {"checkpoint": str(directory)}


def open_chain(source: Mapping[str, Any]) -> Chain:
    """Read the manifests and headers of a way.

    Raises :class:`UnavailableError`, :class:`IntegrityError`, and :class:`ProtocolError` if the
    manifests do not follow each other.
    """
    try:
        if "checkpoint" in source:
            return _of_checkpoint(Path(str(source["checkpoint"])))
        store = Store(str(source["directory"]), str(source["run_id"]))
        way = [store.read_manifest(str(name)) for name in source["manifests"]]
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"malformed way through a store: {error!r}") from error
    for before, after in pairwise(way):
        if after.base != before.target:
            raise ProtocolError(f"{after.file_name} stands on {after.base}, not {before.target}")
    if not way:
        raise ProtocolError("an empty way through a store")
    return _of_way(store, way)


def _of_checkpoint(folder: Path) -> Chain:
    tensors = [ChainTensor(t.meta, None, (folder, t), ()) for t in read_tensors(folder)]
    return Chain(str(folder), tuple(tensors))


def _of_way(store: Store, way: list[VersionManifest]) -> Chain:
    files: dict[str, FileTensor] = {}
    folder = store.payload_path(way[0])
    if way[0].is_full:
        files = _checked_files(store, way[0])
    deltas = [m for m in way if not m.is_full]
    by_name = [{e.meta: e for e in m.tensors} for m in deltas]
    tensors = []
    for entry in way[-1].tensors:
        steps = []
        for manifest, entries in zip(deltas, by_name, strict=True):
            if entry.meta not in entries:
                raise IntegrityError(f"{manifest.file_name} does not hold {entry.meta}")
            if entries[entry.meta].has_records:
                steps.append((store, manifest, entries[entry.meta]))
        full = (folder, files[entry.meta.name]) if files else None
        boxes = tuple(p.box for p in entry.pieces)
        shares = tuple(p.share for p in entry.pieces)
        digests = tuple(p.digest for p in entry.pieces)
        tensors.append(
            ChainTensor(entry.meta, entry.digest, full, tuple(steps), boxes, shares, digests)
        )
    return Chain(str(store.path / way[-1].file_name), tuple(tensors))


def _checked_files(store: Store, manifest: VersionManifest) -> dict[str, FileTensor]:
    folder = store.payload_path(manifest)
    if not folder.is_dir():
        raise UnavailableError(f"{folder} is not there")
    files = {t.meta.name: t for t in read_tensors(folder)}
    if {t.meta for t in files.values()} != set(manifest.metas):
        raise IntegrityError(f"{folder}: its tensors are not those of {manifest.file_name}")
    return files


def advance(
    store: Store, manifest: VersionManifest, entry: TensorEntry, data: Bytes, digests: Digests
) -> Digests:
    """Take a tensor's bytes from a delta's base to the delta, in place; the new block digests.

    Raises :class:`IntegrityError` for records that are damaged or of another base, and for pieces
    that do not become what the manifest says.
    """
    if not entry.pieces:
        _apply(store, manifest, entry, data, digests)
        return digests
    for piece, part in entry.parts():
        if part.has_records:
            held = take(entry.meta, piece.box, data).copy()
            own = block_digests(part.meta, held)
            _apply(store, manifest, part, held, own)
            if tensor_digest(own) != part.digest:
                raise IntegrityError(
                    f"{manifest.file_name}: {part.meta.name!r} would digest to "
                    f"{tensor_digest(own):016x}, expected {part.digest:016x}"
                )
            put(entry.meta, piece.box, data, held)
    return block_digests(entry.meta, data)


def _apply(
    store: Store, manifest: VersionManifest, entry: TensorEntry, data: Bytes, digests: Digests
) -> None:
    records = store.records(manifest, entry)
    found = list(decode_tensor(entry.meta, records, data, digests))
    for changes in found:
        apply_changes(data, changes)


def _step(place: Place, record: Bytes, now: Bytes, digests: Digests) -> None:
    changes = decode_record(place, record, now, digests, are_digests_known=True)
    native_delta.scatter(
        place.kind,
        (now.ctypes.data, place.num_elements),
        changes.positions.ctypes.data,
        changes.values.ctypes.data,
        changes.count,
    )


def _difference(place: Place, old: Bytes, new: Bytes) -> Changes:
    width = place.kind.element_bytes
    before, after = old.view(f"u{width}"), new.view(f"u{width}")
    positions = np.flatnonzero(before != after).astype(np.uint32)
    return Changes(place, positions, after[positions].view(np.uint8))
