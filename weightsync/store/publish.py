"""The sender's side of a store: payload first, manifest last, snapshot last of all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from weightsync.codec import (
    Changes,
    Variant,
    apply_changes,
    block_digests,
    decode_record,
    encode_span,
    tensor_digest,
)
from weightsync.codec.spans import Bytes, Digests, span_bytes, span_digests, spans_of
from weightsync.errors import VersionError
from weightsync.native_delta import Place
from weightsync.store.directory import Store
from weightsync.store.durable import sync_directory
from weightsync.store.mirror import Mirror, Records
from weightsync.store.object_path import AnyPath
from weightsync.store.payload import (
    DEFAULT_FILE_BYTES,
    RecordWriter,
    commit,
    payload_folder,
    write_full,
)
from weightsync.store.version import (
    MAX_VERSION,
    Identity,
    TensorEntry,
    VersionKind,
    VersionManifest,
    joined_entry,
    plain_name,
    root_of,
)
from weightsync.store.weights import (
    AnyWeights,
    Weight,
    Weights,
    by_tensor,
    check_same,
    check_whole,
    on_device,
    shares_of,
    weights_of,
)
from weightsync.transports.base import StoreSource

#: A delta larger than this share of the weights is a full version instead: byte planes of weights
#: compress to about 11/16, and a full version needs no base.
DENSE_SHARE: Final = 0.6
_SPANS_AT_ONCE: Final = 256


@dataclass(eq=False)
class _Snapshot:
    """Copies of weights in this process's memory; ``identity`` is the version of the store that they
    are, None while they are none that is visible. ``mirror``: the same on the device that trains."""

    identity: Identity | None
    weights: Weights
    digests: dict[str, Digests]
    shares: dict[str, int]  # of pieces, in the digests of their tensors
    mirror: Mirror | None = None


@dataclass(eq=False)
class Encoded:
    """A version that is not published yet; the weights it was made of may change.

    ``records`` are those of a delta on ``base``; None: a full version, whose bytes are the
    publisher's snapshot by now. ``on_host``: spans that the host coded because the device could not,
    by reason. ``payload``: what records of a device lie in.
    """

    version: int
    base: Identity | None
    records: Records | None
    digests: dict[str, Digests]
    shares: dict[str, int]
    on_host: Mapping[str, int] = field(default_factory=dict)
    payload: Bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Of the records."""
        return sum(len(r) for rs in (self.records or {}).values() for _, r in rs)


class Publisher(StoreSource):
    """Publishes the versions of one run, from one process.

    Keeps a copy of the weights in host memory (their size) to diff against, and with ``is_mirrored``
    one more on the device of the weights, where they are compared and coded then; otherwise weights
    of a device are copied to the host for that. It advances only when a
    version is visible in the store; after any failure the next version is coded against the last one
    that is. Nothing is ever overwritten: a second publisher of the run gets :class:`BusyError`.
    ``publish`` is ``commit(encode(...))``; one may go on changing weights between the two.
    """

    def __init__(
        self,
        store: Store,
        *,
        file_bytes: int = DEFAULT_FILE_BYTES,
        extra_files: Mapping[str, bytes] | None = None,
        variant: Variant = Variant.EXACT,
        num_threads: int = 1,
        is_mirrored: bool = False,
    ) -> None:
        """``extra_files`` (config, tokenizer) go beside the weights of every full version."""
        self.store = store
        self._file_bytes = file_bytes
        self._extra = {plain_name(name): data for name, data in (extra_files or {}).items()}
        self._variant = variant
        self._threads = num_threads
        self._is_mirrored = is_mirrored and variant is Variant.EXACT
        self._snapshot: _Snapshot | None = None
        #: Between what writes the snapshot and what reads it behind the next step. Not reentrant.
        self.snapshot_lock = threading.Lock()
        store.path.mkdir(parents=True, exist_ok=True)
        sync_directory(store.directory)

    def publish_full(self, version: int, weights: AnyWeights) -> VersionManifest:
        """Every tensor, as a Hugging Face directory; stands on nothing.

        Raises :class:`VersionError`, :class:`BusyError`, :class:`CapacityError`.
        """
        return self.commit(self.encode_full(version, weights))

    def publish(self, version: int, payload: AnyWeights) -> VersionManifest:
        """What changed since this publisher's last version, or a full one if that takes no more.

        The first version of a publisher is full. Raises as :meth:`publish_full`, and
        :class:`LayoutError` if names, dtypes or shapes are not those of the last version.
        """
        return self.commit(self.encode(version, payload))

    # --- first half: reads the weights ------------------------------------------------------------

    def encode_full(self, version: int, weights: AnyWeights) -> Encoded:
        """Copies the weights into the snapshot, which is no version of the store until it is
        committed."""
        self._check_version(version)
        self._check_weights(weights)
        with self.snapshot_lock:
            return self._copy_all(version, weights)

    def _copy_all(self, version: int, weights: AnyWeights) -> Encoded:
        former, copies = self._snapshot, {}
        self._snapshot = None
        for name, weight in weights.items():
            kept = None if former is None else former.weights.get(name)
            if kept is not None and (kept.meta, kept.piece) == (weight.meta, weight.piece):
                kept.data[:] = weight.data
                copies[name] = kept
            else:
                copies[name] = Weight(weight.meta, weight.data.copy(), None, weight.box_of)
        with ThreadPoolExecutor(self._threads, "weightsync-digest") as pool:
            found = pool.map(lambda w: block_digests(w.meta, w.data), copies.values())
            digests = dict(zip(copies, found, strict=True))
        shares = shares_of(copies, list(copies), self._threads)
        mirror = self._mirror_of(weights, None if former is None else former.mirror)
        self._snapshot = _Snapshot(None, copies, digests, shares, mirror)
        return Encoded(version, None, None, digests, shares)

    def _check_weights(self, weights: AnyWeights) -> None:
        check_whole(weights)

    def _mirror_of(self, weights: AnyWeights, former: Mirror | None) -> Mirror | None:
        """The device's copy of these weights, in the memory of the former one if they fit there."""
        placed = on_device(weights) if self._is_mirrored else None
        device = next(iter(placed.values())).device if placed else ""
        if former is not None and placed and former.fits(placed, device):
            former.seed(placed)
            return former
        if former is not None:
            former.close()
        return Mirror(placed, device) if placed else None

    def encode(self, version: int, payload: AnyWeights) -> Encoded:
        """What changed since the last version, in memory; the snapshot stays what it is. Full, if there
        is no last version or a delta would not pay."""
        snapshot, weights = self._snapshot, payload
        if snapshot is None or snapshot.identity is None:
            return self.encode_full(version, weights)
        self._check_version(version)
        check_same(snapshot.weights, weights)
        placed = on_device(weights)
        if snapshot.mirror is not None and placed is not None:
            delta = snapshot.mirror.encode(
                placed, snapshot.weights, snapshot.digests, self._threads
            )
            encoded = Encoded(
                version,
                snapshot.identity,
                delta.records,
                delta.digests,
                self._new_shares(snapshot, placed, delta.records),
                delta.on_host,
                delta.payload,
            )
            if encoded.num_bytes > self._limit_bytes(weights):
                return self.encode_full(version, weights)
            return encoded
        return self._encode_on_host(version, snapshot, weights)

    def _limit_bytes(self, weights: AnyWeights) -> float:
        return DENSE_SHARE * sum(w.meta.num_bytes for w in weights.values())

    def _encode_on_host(self, version: int, snapshot: _Snapshot, weights: AnyWeights) -> Encoded:
        digests = {name: d.copy() for name, d in snapshot.digests.items()}
        limit_bytes = self._limit_bytes(weights)
        here = {name: Weight(w.meta, w.data, w, w.box_of) for name, w in weights.items()}
        records: Records = {name: [] for name in weights}
        num_bytes = 0
        for name, place, record in self._encoded_spans(snapshot, here, digests):
            records[name].append((place, record))
            num_bytes += len(record)
            if num_bytes > limit_bytes:
                return self.encode_full(version, weights)
        shares = self._new_shares(snapshot, here, records)
        return Encoded(version, snapshot.identity, records, digests, shares)

    def _new_shares(
        self, snapshot: _Snapshot, weights: AnyWeights, records: Records
    ) -> dict[str, int]:
        changed = [name for name, found in records.items() if found]
        return snapshot.shares | shares_of(weights, changed, self._threads)

    def _encoded_spans(
        self, snapshot: _Snapshot, weights: Weights, digests: dict[str, Digests]
    ) -> Iterator[tuple[str, Place, bytes]]:
        """Spans side by side, so that one large tensor is not the tail of all."""

        def one(item: tuple[str, Place]) -> tuple[str, Place, bytes | None]:
            name, place = item
            old, new = snapshot.weights[name].data, weights[name].data
            part = span_digests(digests[name], place)
            record = encode_span(
                place, span_bytes(old, place), span_bytes(new, place), part, self._variant
            )
            return name, place, record

        spans = [(name, place) for name, w in weights.items() for place in spans_of(w.meta)]
        with ThreadPoolExecutor(self._threads, "weightsync-encode") as pool:
            for start in range(0, len(spans), _SPANS_AT_ONCE):
                for name, place, record in pool.map(one, spans[start : start + _SPANS_AT_ONCE]):
                    if record is not None:
                        yield name, place, record

    # --- second half: writes the store --------------------------------------------------------------

    def commit(self, pending: Encoded) -> VersionManifest:
        """Make it visible, then advance the snapshot. Raises as :meth:`publish_full`; the store and the
        last version are then what they were."""
        encoded = pending
        self._check_version(encoded.version)
        snapshot = self._base_of(encoded)
        with payload_folder(self.store, f"v{encoded.version:012}") as folder:
            if encoded.records is None:
                manifest = self._full(folder, encoded, snapshot)
            else:
                manifest = self._delta(folder, encoded, encoded.records, snapshot)
            commit(self.store, manifest)
        self._become(encoded, manifest.target)
        return manifest

    def _base_of(self, encoded: Encoded) -> _Snapshot:
        """Raises :class:`VersionError` if it was encoded on another than the last version."""
        snapshot = self._snapshot
        if snapshot is None or (encoded.records is not None and snapshot.identity != encoded.base):
            raise VersionError(
                f"version {encoded.version} was encoded on {encoded.base}, which is not this "
                "publisher's last version any more; encode it again"
            )
        return snapshot

    def _become(self, encoded: Encoded, target: Identity) -> None:
        """Advance the snapshot: what was encoded is visible."""
        snapshot = self._snapshot
        if snapshot is None:
            raise VersionError(f"version {encoded.version}: there is no snapshot to advance")
        self._snapshot = None  # neither one nor the other until all is copied
        if encoded.records is not None:
            self._advance(snapshot, encoded)
        self._snapshot = _Snapshot(
            target, snapshot.weights, encoded.digests, encoded.shares, snapshot.mirror
        )

    def _advance(self, snapshot: _Snapshot, encoded: Encoded) -> None:
        items = (encoded.records or {}).items()
        with ThreadPoolExecutor(self._threads, "weightsync-advance") as pool:
            found = pool.map(lambda item: _advance(snapshot, *item), items)
            changes = [(name, c) for (name, _), cs in zip(items, found, strict=True) for c in cs]
        if snapshot.mirror is not None:
            snapshot.mirror.advance(changes)
            if encoded.payload is not None:  # nobody looks at the records any more
                snapshot.mirror.recycle(encoded.payload)

    def close(self) -> None:
        """Free what lies on a device. Idempotent."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None and snapshot.mirror is not None:
            snapshot.mirror.close()

    def anchor(self) -> VersionManifest:
        """The last version once more, in full, beside the delta that leads to it: for who starts anew.

        Raises :class:`VersionError` if there is no last version, :class:`BusyError` if it is in full
        already.
        """
        with self.snapshot_lock:
            snapshot = self._snapshot
            if snapshot is None or snapshot.identity is None:
                raise VersionError(
                    f"run {self.store.run_id!r}: no version of this publisher to write"
                )
            version = snapshot.identity.version
            with payload_folder(self.store, f"v{version:012}-full") as folder:
                encoded = Encoded(version, None, None, snapshot.digests, snapshot.shares)
                manifest = self._full(folder, encoded, snapshot, VersionKind.ANCHOR)
                commit(self.store, manifest)
            return manifest

    def _full(
        self,
        folder: AnyPath,
        encoded: Encoded,
        snapshot: _Snapshot,
        kind: VersionKind = VersionKind.FULL,
    ) -> VersionManifest:
        whole = by_tensor(snapshot.weights)
        tensors = tuple(
            TensorEntry(
                tensor.meta, sum(share_in(encoded, part) for part in tensor.parts) % (1 << 64)
            )
            for tensor in whole
        )
        files = write_full(folder, whole, self._file_bytes, self._extra)
        return VersionManifest(
            run_id=self.store.run_id,
            kind=kind,
            target=Identity(encoded.version, root_of(tensors)),
            base=None,
            directory=folder.name,
            files=files,
            tensors=tensors,
        )

    def _delta(
        self,
        folder: AnyPath,
        encoded: Encoded,
        records: Records,
        snapshot: _Snapshot,
    ) -> VersionManifest:
        writer = RecordWriter(folder, self._file_bytes)
        entries = []
        for tensor in by_tensor(snapshot.weights):
            parts = []
            for part in tensor.parts:
                name = part.meta.name
                found = (record for _, record in records[name])
                entry = writer.add(part.meta, found, encoded.digests[name])
                parts.append((part.piece, entry))
            entries.append(joined_entry(parts, [share_in(encoded, part) for part in tensor.parts]))
        return VersionManifest(
            run_id=self.store.run_id,
            kind=VersionKind.DELTA,
            target=Identity(encoded.version, root_of(entries)),
            base=encoded.base,
            directory=folder.name,
            files=writer.finish(),
            tensors=tuple(entries),
            num_changed=writer.num_changed,
        )

    def _check_version(self, version: int) -> None:
        last = self.store.last_number()
        if not last < version <= MAX_VERSION:
            raise VersionError(
                f"version {version} of run {self.store.run_id!r}: the store holds {last}; "
                "versions rise, and a number is never used again"
            )


def share_in(encoded: Encoded, weight: Weight) -> int:
    """Of a piece in the digest of its tensor; of a whole tensor its digest."""
    name = weight.meta.name
    return tensor_digest(encoded.digests[name]) if weight.piece.is_whole else encoded.shares[name]


def _advance(
    snapshot: _Snapshot, name: str, records: list[tuple[Place, bytes | memoryview]]
) -> list[Changes]:
    """Take a tensor of the snapshot to what was published, from the records: the weights may be others
    by now. Returns the changes, for the mirror. Raises :class:`IntegrityError` if the records do not
    lead there."""
    data, digests = snapshot.weights[name].data, snapshot.digests[name].copy()
    found: list[Changes] = []
    for place, record in records:
        changes = decode_record(
            place,
            np.frombuffer(record, dtype=np.uint8),
            span_bytes(data, place),
            span_digests(digests, place),
            are_digests_known=True,
        )
        apply_changes(data, changes)
        if snapshot.mirror is not None:
            found.append(changes)
    return found


__all__ = ["DEFAULT_FILE_BYTES", "Encoded", "Publisher", "Weight", "Weights", "weights_of"]
