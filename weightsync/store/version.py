"""The manifest of one version in a store: what it is, what it stands on, which bytes hold it.

JSON in one canonical form with a hash of itself, so that any changed byte shows. Names of files are
plain names, never paths.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

import numpy as np

from weightsync.codec.packed import MAX_PACKED_RECORD_BYTES
from weightsync.digest import digest_root, root_basis
from weightsync.errors import IntegrityError, LayoutError
from weightsync.store.durable import new_hasher
from weightsync.store.pieces import Piece, check_tiling
from weightsync.types import Box, TensorMeta

FORMAT: Final = "weightsync-versions-1"
#: Of a manifest with tensors in pieces, which who knows the first form alone must not read.
FORMAT_PIECES: Final = "weightsync-versions-2"
#: Of one with packed records, with tensors in pieces or without.
FORMAT_PACKED: Final = "weightsync-versions-3"
_FORMATS: Final = (FORMAT, FORMAT_PIECES, FORMAT_PACKED)
MAX_MANIFEST_BYTES: Final = 1 << 30
MAX_VERSION: Final = 10**12 - 1
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_HASH: Final = re.compile(r"[0-9a-f]{32}")
_ROOT: Final = re.compile(r"[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{16}")
_NO_FILE: Final = -1


class VersionKind(StrEnum):
    """What the payload of a version is."""

    FULL = "full"  # safetensors with a Hugging Face index; stands on nothing
    ANCHOR = "anchor"  # the same, beside the delta that leads to this version
    DELTA = "delta"  # records on the version before
    FOLD = "fold"  # records on an older version, beside the deltas they replace


@dataclass(frozen=True)
class Identity:
    """A version is never a bare number."""

    version: int
    root: str


@dataclass(frozen=True)
class FileEntry:
    """One file of the payload."""

    name: str
    num_bytes: int
    hash: str


@dataclass(frozen=True)
class PieceEntry:
    """A box of a tensor that is coded as a tensor of its own: ``digest`` is the one that it has as such,
    ``share`` its part of the whole tensor's; ``file`` and what follows as in :class:`TensorEntry`."""

    box: Box
    digest: int
    share: int
    file: int = _NO_FILE
    offset_bytes: int = 0
    num_bytes: int = 0
    unpacked_bytes: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, its digest, and where its records lie; ``file`` is -1 if it has none (it did not
    change, or the version is full). ``num_bytes`` is what they take there; packed records
    (:mod:`weightsync.codec.packed`) are ``unpacked_bytes`` long, which is 0 for those that lie there as
    they are. With ``pieces``, which tile it, the records are theirs, and ``num_bytes`` those of all."""

    meta: TensorMeta
    digest: int
    file: int = _NO_FILE
    offset_bytes: int = 0
    num_bytes: int = 0
    pieces: tuple[PieceEntry, ...] = ()
    unpacked_bytes: int = 0

    @property
    def record_bytes(self) -> int:
        """Of its records, unpacked; of a tensor in pieces, ask those (:meth:`parts`)."""
        return self.unpacked_bytes or self.num_bytes

    @property
    def is_packed(self) -> bool:
        """Whether any records of it are."""
        return self.unpacked_bytes > 0 or any(p.unpacked_bytes for p in self.pieces)

    @property
    def has_records(self) -> bool:
        return self.file != _NO_FILE or bool(self.pieces and self.num_bytes)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """What is coded as one: the pieces, or the whole."""
        return tuple(p.box for p in self.pieces) or (Box.whole(self.meta.shape),)

    def parts(self) -> tuple[tuple[Piece, TensorEntry], ...]:
        """By piece, the entry that it would have as a tensor of its own."""
        if not self.pieces:
            return ((Piece(self.meta, Box.whole(self.meta.shape)), self),)
        found = []
        for p in self.pieces:
            piece = Piece(self.meta, p.box)
            entry = TensorEntry(
                piece.meta, p.digest, p.file, p.offset_bytes, p.num_bytes,
                unpacked_bytes=p.unpacked_bytes,
            )  # fmt: skip
            found.append((piece, entry))
        return tuple(found)


def joined_entry(parts: Sequence[tuple[Piece, TensorEntry]], shares: Sequence[int]) -> TensorEntry:
    """The inverse of :meth:`TensorEntry.parts`: ``shares`` are those of the pieces, of a whole one its
    digest."""
    if len(parts) == 1 and parts[0][0].is_whole:
        return parts[0][1]
    pieces = tuple(
        PieceEntry(
            piece.box, e.digest, share, e.file, e.offset_bytes, e.num_bytes, e.unpacked_bytes
        )
        for (piece, e), share in zip(parts, shares, strict=True)
    )
    num_bytes = sum(p.num_bytes for p in pieces)
    return TensorEntry(
        parts[0][0].tensor, sum(shares) % (1 << 64), num_bytes=num_bytes, pieces=pieces
    )


@dataclass(frozen=True)
class VersionManifest:
    """One version of one run; ``root`` covers all tensors, those without records too."""

    run_id: str
    kind: VersionKind
    target: Identity
    base: Identity | None
    directory: str  # plain name of the payload's folder
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    num_changed: int = 0

    @property
    def version(self) -> int:
        return self.target.version

    @property
    def is_full(self) -> bool:
        """Whether it stands on nothing."""
        return self.base is None

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return sum(file.num_bytes for file in self.files)

    @cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(entry.meta for entry in self.tensors)

    @property
    def file_name(self) -> str:
        """Of the manifest itself."""
        if self.kind is VersionKind.FOLD and self.base is not None:
            return fold_name(self.version, self.base.version)
        if self.kind is VersionKind.ANCHOR:
            return anchor_name(self.version)
        return manifest_name(self.version)

    def to_bytes(self) -> bytes:
        """The canonical form."""
        body = _canonical(self._to_json())
        return body[:-1] + f',"zz_hash":"{_hash(body)}"}}'.encode()

    @property
    def format(self) -> str:
        """Of the manifest."""
        if any(entry.is_packed for entry in self.tensors):
            return FORMAT_PACKED
        return FORMAT_PIECES if any(entry.pieces for entry in self.tensors) else FORMAT

    def _to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "run_id": self.run_id,
            "kind": self.kind.value,
            "version": self.version,
            "root": self.target.root,
            "base": None if self.base is None else [self.base.version, self.base.root],
            "directory": self.directory,
            "num_changed": self.num_changed,
            "files": [[f.name, f.num_bytes, f.hash] for f in self.files],
            "tensors": [_entry_to_json(entry) for entry in self.tensors],
        }

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> VersionManifest:
        """Parse and check one; ``where`` is for messages. Raises :class:`IntegrityError`."""
        try:
            manifest = cls._from_json(json.loads(data))
            if manifest.to_bytes() != data:
                raise ValueError("its hash or its form is not what was written")
            manifest.check()
        except (KeyError, TypeError, ValueError, RecursionError, LayoutError) as error:
            raise IntegrityError(f"{where}: not a manifest that can be trusted: {error}") from error
        return manifest

    @classmethod
    def _from_json(cls, value: Any) -> VersionManifest:
        if value["format"] not in _FORMATS:
            raise ValueError(f"format {value['format']!r}, expected one of {', '.join(_FORMATS)}")
        base = value["base"]
        return cls(
            run_id=plain_name(value["run_id"]),
            kind=VersionKind(value["kind"]),
            target=_identity(value["version"], value["root"]),
            base=None if base is None else _identity(*base),
            directory=plain_name(value["directory"]),
            num_changed=_count(value["num_changed"]),
            files=tuple(
                FileEntry(plain_name(n), _count(b), _matching(_HASH, h))
                for n, b, h in value["files"]
            ),
            tensors=tuple(_entry_from_json(entry) for entry in value["tensors"]),
        )

    def check(self) -> None:
        """Raises ``ValueError`` naming what contradicts itself."""
        if self.is_full != (self.kind in (VersionKind.FULL, VersionKind.ANCHOR)):
            raise ValueError("a full version stands on nothing, any other on a base")
        if self.base is not None and self.base.version >= self.version:
            raise ValueError(f"version {self.version} on a base of {self.base.version}")
        names = [entry.meta.name for entry in self.tensors]
        if len(set(names)) != len(names):
            raise ValueError("a tensor is listed twice")
        for entry in self.tensors:
            if not entry.pieces:
                self._check_place(entry)
                continue
            for _, part in entry.parts():
                self._check_place(part)
            self._check_pieces(entry)
        if root_of(self.tensors) != self.target.root:
            raise ValueError("its root does not fit its tensors")

    def _check_place(self, entry: TensorEntry) -> None:
        if type(entry.file) is not int or not _NO_FILE <= entry.file < len(self.files):
            raise ValueError(f"{entry.meta.name!r} lies in file {entry.file}")
        if entry.has_records:
            end = entry.offset_bytes + entry.num_bytes
            if end > self.files[entry.file].num_bytes or entry.num_bytes == 0:
                raise ValueError(f"{entry.meta.name!r} does not lie within its file")
        unpacked = entry.unpacked_bytes
        if unpacked and not entry.num_bytes < unpacked <= MAX_PACKED_RECORD_BYTES:
            raise ValueError(
                f"{entry.meta.name!r}: {entry.num_bytes} bytes cannot be packed records of {unpacked}"
            )

    def _check_pieces(self, entry: TensorEntry) -> None:
        name = entry.meta.name
        if self.is_full:
            raise ValueError(f"{name!r} is in pieces, but a full version is plain safetensors")
        check_tiling(entry.meta, entry.boxes)
        num_bytes = sum(p.num_bytes for p in entry.pieces)
        if entry.file != _NO_FILE or entry.unpacked_bytes or entry.num_bytes != num_bytes:
            raise ValueError(f"{name!r}: its records are not those of its pieces")
        if any(p.num_bytes and p.file == _NO_FILE for p in entry.pieces):
            raise ValueError(f"{name!r}: a piece has records in no file")
        shares = sum(p.share for p in entry.pieces) % (1 << 64)
        if shares != entry.digest:
            raise ValueError(
                f"{name!r}: its pieces add up to {shares:016x}, its digest is {entry.digest:016x}"
            )

    def renamed(self, directory: str) -> VersionManifest:
        """The same with its payload in another folder."""
        return replace(self, directory=directory)


def manifest_name(version: int) -> str:
    """The plain name of a version's manifest."""
    return f"v{version:012}.json"


def fold_name(version: int, base_version: int) -> str:
    """The plain name of a fold's manifest."""
    return f"v{version:012}-from-{base_version:012}.json"


def anchor_name(version: int) -> str:
    """The plain name of an anchor's manifest."""
    return f"v{version:012}-full.json"


def root_of(tensors: Sequence[TensorEntry]) -> str:
    """The root digest over all tensors."""
    digests = np.array([entry.digest for entry in tensors], dtype=np.uint64)
    return digest_root(root_basis([entry.meta for entry in tensors]), digests)


def _entry_to_json(entry: TensorEntry) -> list[Any]:
    found = [
        entry.meta.name, entry.meta.dtype, list(entry.meta.shape), f"{entry.digest:016x}",
        entry.file, entry.offset_bytes, _sizes_to_json(entry),
    ]  # fmt: skip
    if entry.pieces:
        found.append([
            [
                list(p.box.start), list(p.box.shape), f"{p.digest:016x}", f"{p.share:016x}",
                p.file, p.offset_bytes, _sizes_to_json(p),
            ]
            for p in entry.pieces
        ])  # fmt: skip
    return found


def _sizes_to_json(entry: TensorEntry | PieceEntry) -> int | list[int]:
    """The bytes of its records; of packed ones these and those that they become."""
    if entry.unpacked_bytes:
        return [entry.num_bytes, entry.unpacked_bytes]
    return entry.num_bytes


def _sizes_from_json(value: Any) -> tuple[int, int]:
    packed, unpacked = value if isinstance(value, list) else (value, 0)
    return _count(packed), _count(unpacked)


def _entry_from_json(value: Any) -> TensorEntry:
    name, dtype, shape, digest, file, offset, sizes, *rest = value
    meta = TensorMeta(str(name), str(dtype), tuple(_count(x) for x in shape))
    pieces = []
    if rest:
        (found,) = rest
        pieces = [_piece_from_json(piece) for piece in found]
    size, unpacked = _sizes_from_json(sizes)
    return TensorEntry(
        meta, _digest(digest), file, _count(offset), size, tuple(pieces), unpacked
    )  # fmt: skip


def _piece_from_json(value: Any) -> PieceEntry:
    start, shape, digest, share, file, offset, sizes = value
    first, extent = [_count(x) for x in start], [_count(x) for x in shape]
    box = Box(tuple(first), tuple(a + n for a, n in zip(first, extent, strict=True)))
    size, unpacked = _sizes_from_json(sizes)
    return PieceEntry(box, _digest(digest), _digest(share), file, _count(offset), size, unpacked)


def plain_name(value: Any) -> str:
    """``value`` if it can be nothing but a name in its folder. Raises ``ValueError``."""
    return _matching(_PLAIN_NAME, value)


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise ValueError(f"{value!r} does not look as {pattern.pattern}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a count")
    return value


def _digest(value: Any) -> int:
    return int(_matching(_DIGEST, value), 16)


def _identity(version: Any, root: Any) -> Identity:
    if _count(version) > MAX_VERSION:
        raise ValueError(f"version {version} is above {MAX_VERSION}")
    return Identity(version, _matching(_ROOT, root))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _hash(body: bytes) -> str:
    hasher = new_hasher()
    hasher.update(body)
    found: str = hasher.hexdigest()
    return found
