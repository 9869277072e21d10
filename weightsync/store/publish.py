"""The sender's side of a store: payload first, manifest last, snapshot last of all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from weightsync.codec import Variant, encode_span
from weightsync.codec.spans import Digests, span_bytes, span_digests, spans_of
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
from weightsync.store.snapshot import Encoded, Snapshot, base_of, copied, share_in
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
    DeviceWeight,
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


class Publisher(StoreSource):
    """Publishes the versions of one run, from one process.

    Keeps a copy of the weights (their size) to diff against, in host memory, where weights of a device are
    copied to be compared; or, with ``is_mirrored``, on the device of the weights, where they are compared
    and coded then. It advances only when a version is visible in the store; after any failure the
    next version is coded against the last one that is. Nothing is ever overwritten: a second
    publisher of the run gets :class:`BusyError`. ``publish`` is ``commit(encode(...))``, and ``commit``
    is ``make_visible`` and ``advance``; one may go on changing weights once it is encoded.
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
        self._snapshot: Snapshot | None = None
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
        start_s = time.perf_counter()
        former, self._snapshot = self._snapshot, None
        mirror = self._mirror_of(weights, None if former is None else former.mirror)
        copies: AnyWeights
        if mirror is not None:
            copies, digests = mirror.weights, mirror.block_digests(self._threads)
        else:
            kept = {} if former is None else former.weights
            copies, digests = copied(weights, kept, self._threads)
        shares = shares_of(copies, list(copies), self._threads)
        self._snapshot = Snapshot(None, copies, digests, shares, mirror)
        phases = {"copy": time.perf_counter() - start_s}
        return Encoded(version, None, None, digests, shares, phases=phases)

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
        placed, mirror = on_device(weights), snapshot.mirror
        if mirror is None or placed is None or mirror.device != next(iter(placed.values())).device:
            return self._encode_on_host(version, snapshot, weights)
        return self._encode_there(version, snapshot, mirror, placed)

    def _encode_there(
        self, version: int, snapshot: Snapshot, mirror: Mirror, weights: Mapping[str, DeviceWeight]
    ) -> Encoded:
        start_s = time.perf_counter()
        delta = mirror.encode(weights, snapshot.digests, self._threads)
        coded_s = time.perf_counter()
        encoded = Encoded(
            version,
            snapshot.identity,
            delta.records,
            delta.digests,
            self._new_shares(snapshot, weights, delta.records),
            delta.on_host,
            delta.payload,
            {"code": coded_s - start_s, **{f"code_{n}": s for n, s in delta.seconds.items()}},
        )
        if encoded.num_bytes > self._limit_bytes(weights):
            return self.encode_full(version, weights)
        return encoded

    def _limit_bytes(self, weights: AnyWeights) -> float:
        return DENSE_SHARE * sum(w.meta.num_bytes for w in weights.values())

    def _encode_on_host(self, version: int, snapshot: Snapshot, weights: AnyWeights) -> Encoded:
        digests = {name: d.copy() for name, d in snapshot.digests.items()}
        limit_bytes, start_s = self._limit_bytes(weights), time.perf_counter()
        former, here = (
            {name: Weight(w.meta, w.data, w, w.box_of) for name, w in held.items()}
            for held in (snapshot.weights, weights)
        )
        records: Records = {name: [] for name in weights}
        num_bytes = 0
        for name, place, record in self._encoded_spans(former, here, digests):
            records[name].append((place, record))
            num_bytes += len(record)
            if num_bytes > limit_bytes:
                return self.encode_full(version, weights)
        shares = self._new_shares(snapshot, here, records)
        phases = {"code": time.perf_counter() - start_s}
        return Encoded(version, snapshot.identity, records, digests, shares, phases=phases)

    def _new_shares(
        self, snapshot: Snapshot, weights: AnyWeights, records: Records
    ) -> dict[str, int]:
        changed = [name for name, found in records.items() if found]
        return snapshot.shares | shares_of(weights, changed, self._threads)

    def _encoded_spans(
        self, former: Weights, weights: Weights, digests: dict[str, Digests]
    ) -> Iterator[tuple[str, Place, bytes]]:
        """Spans side by side, so that one large tensor is not the tail of all."""

        def one(item: tuple[str, Place]) -> tuple[str, Place, bytes | None]:
            name, place = item
            old, new = former[name].data, weights[name].data
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
        """Make it visible, then advance the snapshot. Raises as :meth:`publish_full`: the store and the
        last version are then what they were, or, if only the snapshot could not advance, the version is
        there and the next one is full."""
        manifest = self.make_visible(pending)
        self.advance(pending, manifest.target)
        return manifest

    def make_visible(self, encoded: Encoded) -> VersionManifest:
        """The first half of :meth:`commit`."""
        start_s = time.perf_counter()
        self._check_version(encoded.version)
        snapshot = base_of(self._snapshot, encoded)
        with payload_folder(self.store, f"v{encoded.version:012}") as folder:
            if encoded.records is None:
                manifest = self._full(folder, encoded, snapshot)
            else:
                manifest = self._delta(folder, encoded, encoded.records, snapshot)
            written_s = time.perf_counter()
            commit(self.store, manifest)
        encoded.phases["write"] = written_s - start_s
        encoded.phases["manifest"] = time.perf_counter() - written_s
        return manifest

    def advance(self, encoded: Encoded, target: Identity) -> None:
        """The second half of :meth:`commit`: what was encoded is visible, as ``target``.

        Raises :class:`IntegrityError`, and :class:`VersionError`; the next version is then full.
        """
        snapshot = base_of(self._snapshot, encoded)
        self._snapshot = None  # neither one nor the other until all is there
        if encoded.records is not None:
            try:
                snapshot.advance(encoded, self._threads)
            except BaseException:
                snapshot.close()
                raise
        self._snapshot = Snapshot(
            target, snapshot.weights, encoded.digests, encoded.shares, snapshot.mirror
        )

    def close(self) -> None:
        """Free what lies on a device. Idempotent."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.close()

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
        snapshot: Snapshot,
        kind: VersionKind = VersionKind.FULL,
    ) -> VersionManifest:
        whole = by_tensor(snapshot.weights)
        tensors = tuple(
            TensorEntry(
                tensor.meta, sum(share_in(encoded, part) for part in tensor.parts) % (1 << 64)
            )
            for tensor in whole
        )
        files = write_full(folder, whole, self._file_bytes, self._extra, self._threads)
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
        snapshot: Snapshot,
    ) -> VersionManifest:
        entries = []
        with RecordWriter(folder, self._file_bytes, num_threads=self._threads) as writer:
            for tensor in by_tensor(snapshot.weights):
                parts = []
                for part in tensor.parts:
                    name = part.meta.name
                    found = (record for _, record in records[name])
                    entry = writer.add(part.meta, found, encoded.digests[name])
                    parts.append((part.piece, entry))
                shares = [share_in(encoded, part) for part in tensor.parts]
                entries.append(joined_entry(parts, shares))
            files = writer.finish()
        return VersionManifest(
            run_id=self.store.run_id,
            kind=VersionKind.DELTA,
            target=Identity(encoded.version, root_of(entries)),
            base=encoded.base,
            directory=folder.name,
            files=files,
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


__all__ = ["DEFAULT_FILE_BYTES", "Encoded", "Publisher", "Weight", "Weights", "weights_of"]
