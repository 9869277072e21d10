"""Versions that several ranks publish: each codes and writes the pieces that it owns, one commits.

Whoever coordinates the ranks makes one folder, lets all of them write into it, and makes the manifest of
what they said (:func:`together`). A full version is laid out first (:func:`lay_out`): files of their
final size, whose headers say where the bytes of each tensor go; each rank writes its own there. In object
storage, where no file can be written in parts, see :mod:`weightsync.store.lending`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.checkpoints import INDEX_FILE, read_tensors
from weightsync.codec import tensor_digest
from weightsync.errors import IntegrityError, LayoutError, ProtocolError, VersionError
from weightsync.faults import reach
from weightsync.store.durable import hash_file, named_errors, sync_directory, write_durable
from weightsync.store.lending import FileShare, lend, write_files
from weightsync.store.object_path import AnyPath, ObjectPath
from weightsync.store.payload import RecordWriter, header_of, index_of, shards_of
from weightsync.store.pieces import Piece
from weightsync.store.publish import DENSE_SHARE, Publisher
from weightsync.store.snapshot import Encoded, base_of, share_in
from weightsync.store.version import (
    FileEntry,
    Identity,
    TensorEntry,
    VersionKind,
    VersionManifest,
    joined_entry,
    root_of,
)
from weightsync.store.weights import AnyWeights, DeviceWeight, Weight
from weightsync.tables import dense_strides
from weightsync.types import Box, TensorMeta, item_bytes


@dataclass(frozen=True)
class WrittenPart:
    """What one rank has written of a version: its files, and by piece where its records lie in them."""

    files: tuple[FileEntry, ...]
    pieces: tuple[tuple[Piece, TensorEntry, int], ...]  # entry as a tensor of its own, share
    num_changed: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "files": [[f.name, f.num_bytes, f.hash] for f in self.files],
            "num_changed": self.num_changed,
            "pieces": [
                [
                    p.tensor.name, p.tensor.dtype, list(p.tensor.shape), list(p.box.start),
                    list(p.box.stop), f"{e.digest:016x}", f"{share:016x}", e.file, e.offset_bytes,
                    e.num_bytes, e.unpacked_bytes,
                ]
                for p, e, share in self.pieces
            ],
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> WrittenPart:
        """Raises :class:`ProtocolError`; what it says is checked when the manifest is made."""
        try:
            files = tuple(FileEntry(str(n), int(b), str(h)) for n, b, h in value["files"])
            pieces = []
            for name, dtype, shape, start, stop, digest, share, *where in value["pieces"]:
                file, offset, size, unpacked = where
                piece = Piece(TensorMeta(name, dtype, tuple(shape)), Box(tuple(start), tuple(stop)))
                entry = TensorEntry(
                    piece.meta, int(digest, 16), file, offset, size, unpacked_bytes=unpacked
                )
                pieces.append((piece, entry, int(share, 16)))
            return cls(files, tuple(pieces), int(value["num_changed"]))
        except (KeyError, TypeError, ValueError, LayoutError) as error:
            raise ProtocolError(f"malformed part of a version: {error!r}") from error


class PartPublisher(Publisher):
    """One rank's share in versions: ``encode`` takes the pieces that this rank owns, and keeps a copy of
    those alone. Whether a version is full is for all ranks to decide together."""

    @property
    def identity(self) -> Identity | None:
        """The version that the snapshot is; None: the next one must be full."""
        return None if self._snapshot is None else self._snapshot.identity

    def _check_weights(self, weights: AnyWeights) -> None:
        """Other ranks have the other pieces."""

    def _limit_bytes(self, weights: AnyWeights) -> float:
        return math.inf

    def lend(self, encoded: Encoded, folder: ObjectPath, rank: int, share: FileShare) -> None:
        """What other ranks need of this one for their files of a full version."""
        lend(folder, rank, base_of(self._snapshot, encoded).weights, share)

    def write(
        self, encoded: Encoded, folder: AnyPath, rank: int, share: FileShare | None = None
    ) -> WrittenPart:
        """This rank's files of a delta, or its bytes in the files of a full version that was laid out, or,
        with a ``share``, files of it.

        Nothing is visible, and the snapshot stays. Raises :class:`VersionError`,
        :class:`CapacityError`.
        """
        snapshot = base_of(self._snapshot, encoded)
        weights = snapshot.weights
        files: tuple[FileEntry, ...] = ()
        num_changed = 0
        if encoded.records is None:
            if isinstance(folder, Path):
                write_boxes(folder, list(weights.values()))
            elif share is not None:
                files = write_files(folder, rank, weights, share, self._threads)
            else:
                raise ProtocolError(f"{folder}: nobody said which files rank {rank} writes")
            entries = [
                TensorEntry(w.meta, tensor_digest(encoded.digests[name]))
                for name, w in weights.items()
            ]
        else:
            stem = f"delta-{rank:05}"
            with RecordWriter(folder, self._file_bytes, stem, self._threads) as writer:
                entries = [
                    writer.add(w.meta, (r for _, r in encoded.records[name]), encoded.digests[name])
                    for name, w in weights.items()
                ]
                files, num_changed = writer.finish(), writer.num_changed
        sync_directory(folder)
        held: list[Weight | DeviceWeight] = [*weights.values()]
        pieces = tuple(
            (w.piece, entry, share_in(encoded, w)) for w, entry in zip(held, entries, strict=True)
        )
        return WrittenPart(files, pieces, num_changed)

    def whole(self) -> Encoded:
        """The last version once more, to be written in full. Raises :class:`VersionError`."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.identity is None:
            raise VersionError("no version of this publisher to write")
        version = snapshot.identity.version
        return Encoded(version, None, None, snapshot.digests, snapshot.shares)


def is_dense(num_bytes: Sequence[int], total_bytes: Sequence[int]) -> bool:
    """Whether a delta of so many bytes by rank would not pay, of weights of so many."""
    return sum(num_bytes) > DENSE_SHARE * sum(total_bytes)


# --- a full version -----------------------------------------------------------------------------------


def lay_out(
    folder: Path, metas: Sequence[TensorMeta], file_bytes: int, extra: Mapping[str, bytes]
) -> list[str]:
    """Files of a Hugging Face directory with nothing in them but headers; their names."""
    shards = shards_of(metas, file_bytes)
    for name, held in shards.items():
        header = header_of(held)
        with named_errors("writing", folder / name), (folder / name).open("xb") as file:
            file.write(header)
            file.truncate(len(header) + sum(meta.num_bytes for meta in held))
            file.flush()
            os.fsync(file.fileno())
    for name, data in {**extra, INDEX_FILE: index_of(shards)}.items():
        write_durable(folder / name, [data])
    return [*shards, *extra, INDEX_FILE]


def write_boxes(folder: Path, weights: Sequence[Weight | DeviceWeight]) -> None:
    """Each piece to its place in files that were laid out, durably."""
    places = {tensor.meta: tensor for tensor in read_tensors(folder)}
    by_file: dict[str, list[Weight | DeviceWeight]] = {}
    for weight in weights:
        place = places.get(weight.piece.tensor)
        if place is None:
            raise IntegrityError(f"{folder} has no place for {weight.piece.tensor}")
        by_file.setdefault(place.file, []).append(weight)
    for name, held in by_file.items():
        with named_errors("writing", folder / name):
            fd = os.open(folder / name, os.O_WRONLY)
            try:
                for weight in held:
                    start = places[weight.piece.tensor].offset_bytes
                    for offset, run in _runs(weight):
                        _write_at(fd, run, start + offset)
                os.fsync(fd)
            finally:
                os.close(fd)
        reach("store.payload")


def _runs(weight: Weight | DeviceWeight) -> Iterator[tuple[int, memoryview]]:
    """Where each run of bytes of a piece lies in its tensor."""
    tensor, box, data = weight.piece.tensor, weight.piece.box, weight.data
    if not data.size:
        return
    strides = dense_strides(tensor.shape, item_bytes(tensor.dtype))
    partial = [d for d, n in enumerate(tensor.shape) if box.shape[d] != n]
    outer = partial[-1] if partial else 0
    starts = np.array([sum(a * s for a, s in zip(box.start, strides, strict=True))], dtype=np.int64)
    for extent, stride in zip(box.shape[:outer], strides[:outer], strict=True):
        starts = (starts[:, None] + np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    size = data.size // starts.size
    for i, start in enumerate(starts.tolist()):
        yield start, data.data[i * size : (i + 1) * size]


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def hashed(folder: Path, names: Sequence[str]) -> tuple[FileEntry, ...]:
    """What lies in files that several ranks wrote, as their readers will find it."""
    return tuple(FileEntry(name, *hash_file(folder / name)) for name in names)


# --- the manifest -------------------------------------------------------------------------------------


def together(
    draft: VersionManifest, order: Sequence[str], parts: Sequence[WrittenPart]
) -> VersionManifest:
    """The manifest of what all ranks wrote: ``draft`` with files, tensors (in ``order``) and root.

    Raises :class:`LayoutError` naming a tensor whose pieces do not make it up.
    """
    files = list(draft.files)
    found: dict[str, list[tuple[Piece, TensorEntry, int]]] = {name: [] for name in order}
    for part in parts:
        first = len(files)
        files += part.files
        for piece, entry, share in part.pieces:
            moved = replace(entry, file=entry.file + first) if entry.has_records else entry
            found.setdefault(piece.tensor.name, []).append((piece, moved, share))
    tensors = []
    for name, held in found.items():
        held.sort(key=lambda item: item[0].box.start)
        if not held or len({piece.tensor for piece, _, _ in held}) != 1:
            raise LayoutError(f"{name!r}: its ranks have {len(held)} pieces of different tensors")
        entry = joined_entry([(piece, e) for piece, e, _ in held], [s for _, _, s in held])
        tensors.append(entry)
    changed = sum(part.num_changed for part in parts)
    made = replace(draft, files=tuple(files), tensors=tuple(tensors), num_changed=changed)
    made = replace(made, target=Identity(draft.version, root_of(tensors)))
    _check(replace(made, kind=VersionKind.DELTA, base=Identity(-1, "")) if made.is_full else made)
    if made.is_full:
        plain = tuple(TensorEntry(entry.meta, entry.digest) for entry in tensors)
        made = replace(made, tensors=plain)
        _check(made)
    return made


def _check(manifest: VersionManifest) -> None:
    try:
        manifest.check()
    except ValueError as error:
        raise LayoutError(f"version {manifest.version} of several ranks: {error}") from error


__all__ = [
    "PartPublisher",
    "WrittenPart",
    "hashed",
    "is_dense",
    "lay_out",
    "together",
    "write_boxes",
]
