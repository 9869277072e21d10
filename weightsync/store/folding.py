"""One delta in place of many: a fold stands beside the deltas that it replaces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightsync.checkpoints import read_tensors
from weightsync.codec import block_digests, encode_tensor, tensor_digest
from weightsync.codec.spans import Bytes
from weightsync.errors import ConfigError, IntegrityError
from weightsync.store.chain import advance
from weightsync.store.directory import Store, read_exactly
from weightsync.store.payload import DEFAULT_FILE_BYTES, RecordWriter, commit, payload_folder
from weightsync.store.pieces import share_of, take
from weightsync.store.version import TensorEntry, VersionKind, VersionManifest, joined_entry
from weightsync.types import TensorMeta


def fold(store: Store, base_version: int, version: int) -> VersionManifest:
    """Write the delta from ``base_version`` straight to ``version``, made of those between.

    Reads the full version below the base; memory is two of the largest tensor. Raises
    :class:`ConfigError` if there is nothing to fold, :class:`UnavailableError`,
    :class:`IntegrityError`, :class:`BusyError` if it was done already.
    """
    base = store.manifest(base_version)
    chain = store.route(base.target, version)
    if len(chain) < 2 or chain[0].is_full:
        raise ConfigError(
            f"nothing to fold from version {base_version} to {version}: "
            "a single delta or a full version is the cheapest way already"
        )
    way = store.route(None, base_version)
    for manifest in [*way, *chain]:
        store.check_files(manifest)
    last = chain[-1]
    files = {t.meta.name: t for t in read_tensors(store.payload_path(way[0]))}
    with payload_folder(store, f"v{version:012}-from-{base_version:012}") as folder:
        entries = []
        with RecordWriter(folder, DEFAULT_FILE_BYTES) as writer:
            for entry in last.tensors:
                tensor = files[entry.meta.name]
                old: Bytes = np.empty(entry.meta.num_bytes, dtype=np.uint8)
                read_exactly(store.payload_path(way[0]) / tensor.file, tensor.offset_bytes, old)
                _advance(store, way[1:], entry.meta, old)
                new = old.copy()
                _advance(store, chain, entry.meta, new)
                entries.append(_folded(writer, entry, old, new))
            written = writer.finish()
        manifest = VersionManifest(
            run_id=store.run_id,
            kind=VersionKind.FOLD,
            target=last.target,
            base=base.target,
            directory=folder.name,
            files=written,
            tensors=tuple(entries),
            num_changed=writer.num_changed,
        )
        commit(store, manifest)
    return manifest


def _folded(writer: RecordWriter, entry: TensorEntry, old: Bytes, new: Bytes) -> TensorEntry:
    """The delta of one tensor, in the pieces of its last version."""
    parts, shares = [], []
    for piece, expected in entry.parts():
        before, after = take(entry.meta, piece.box, old), take(entry.meta, piece.box, new)
        digests = block_digests(piece.meta, before)
        records = encode_tensor(piece.meta, before, after, digests)
        part = writer.add(piece.meta, (r for _, r in records), digests)
        if part.digest != expected.digest:
            raise IntegrityError(f"{piece.meta.name!r}: the chain leads to another tensor")
        parts.append((piece, part))
        shares.append(part.digest if piece.is_whole else share_of(entry.meta, piece.box, after))
    found = joined_entry(parts, shares)
    if found.digest != entry.digest:
        raise IntegrityError(f"{entry.meta.name!r}: the chain leads to another tensor")
    return found


def _advance(store: Store, chain: Sequence[VersionManifest], meta: TensorMeta, data: Bytes) -> None:
    """Take one tensor through a chain of deltas, in place."""
    digests = block_digests(meta, data)
    for manifest in chain:
        entry = _entry_of(manifest, meta)
        digests = advance(store, manifest, entry, data, digests)
        if tensor_digest(digests) != entry.digest:
            raise IntegrityError(
                f"{manifest.file_name}: {meta.name!r} would digest to {tensor_digest(digests):016x}, "
                f"expected {entry.digest:016x}"
            )


def _entry_of(manifest: VersionManifest, meta: TensorMeta) -> TensorEntry:
    for entry in manifest.tensors:
        if entry.meta == meta:
            return entry
    raise IntegrityError(f"version {manifest.version} does not hold {meta.name!r} as {meta}")
