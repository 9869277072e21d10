"""The sender's side of a store: payload first, manifest last, snapshot last of all."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from weightsync.checkpoints import INDEX_FILE, write_header
from weightsync.codec import (
    Variant,
    block_digests,
    encode_tensor,
    tensor_digest,
)
from weightsync.codec.spans import Bytes, Digests
from weightsync.errors import LayoutError, UnknownNameError, VersionError
from weightsync.faults import reach
from weightsync.manifest import name_some
from weightsync.store.directory import Store
from weightsync.store.durable import create_file, named_errors, sync_directory, write_durable
from weightsync.store.version import (
    MAX_VERSION,
    FileEntry,
    Identity,
    TensorEntry,
    VersionKind,
    VersionManifest,
    plain_name,
    root_of,
)
from weightsync.tables import dense_strides
from weightsync.tensors import view_of
from weightsync.types import TensorMeta, item_bytes

DEFAULT_FILE_BYTES: Final = 1 << 30
#: A delta larger than this share of the weights is a full version instead: byte planes of weights
#: compress to about 11/16, and a full version needs no base.
_DENSE_SHARE: Final = 0.6


@dataclass(frozen=True, eq=False)
class Weight:
    """A dense tensor in host memory: its wire form and its bytes, uint8 [meta.num_bytes]."""

    meta: TensorMeta
    data: Bytes
    owner: Any = None


Weights = dict[str, Weight]


def weights_of(named: Iterable[tuple[str, Any]]) -> Weights:
    """Tensors in host memory (torch, NumPy) by name, without a copy where they are contiguous.

    Raises :class:`LayoutError` for one that is elsewhere, or a name that comes twice.
    """
    found: Weights = {}
    for name, tensor in named:
        view = view_of(tensor, name)
        if view.device != "cpu":
            raise LayoutError(f"{name!r} is on {view.device}; a store takes tensors in host memory")
        if name in found:
            raise LayoutError(f"{name!r} comes twice")
        meta = TensorMeta(name, view.dtype, view.shape)
        if view.strides_bytes != dense_strides(view.shape, item_bytes(view.dtype)):
            view = view_of(np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray)
                           else tensor.contiguous(), name)  # fmt: skip
        memory: Any = b""
        if meta.num_bytes:
            memory = (ctypes.c_uint8 * meta.num_bytes).from_address(view.ptr)
        found[name] = Weight(meta, np.frombuffer(memory, dtype=np.uint8), view.owner)
    return found


@dataclass(eq=False)
class _Snapshot:
    """What the store's newest version of this publisher holds, in this process's memory."""

    identity: Identity
    weights: Weights
    digests: dict[str, Digests]


class Publisher:
    """Publishes the versions of one run, from one process.

    Keeps a copy of the weights in host memory (their size) to diff against. It advances only when a
    version is visible in the store; after any failure the next version is coded against the last one
    that is. Nothing is ever overwritten: a second publisher of the run gets :class:`BusyError`.
    """

    def __init__(
        self,
        store: Store,
        *,
        file_bytes: int = DEFAULT_FILE_BYTES,
        extra_files: Mapping[str, bytes] | None = None,
        variant: Variant = Variant.EXACT,
    ) -> None:
        """``extra_files`` (config, tokenizer) go beside the weights of every full version."""
        self.store = store
        self._file_bytes = file_bytes
        self._extra = {plain_name(name): data for name, data in (extra_files or {}).items()}
        self._variant = variant
        self._snapshot: _Snapshot | None = None
        store.path.mkdir(parents=True, exist_ok=True)
        sync_directory(store.directory)

    def publish_full(self, version: int, weights: Weights) -> VersionManifest:
        """Every tensor, as a Hugging Face directory; stands on nothing.

        Raises :class:`VersionError`, :class:`BusyError`, :class:`CapacityError`.
        """
        self._check_version(version)
        digests = {name: block_digests(w.meta, w.data) for name, w in weights.items()}
        tensors = tuple(TensorEntry(w.meta, tensor_digest(digests[n])) for n, w in weights.items())
        with self._payload(version) as folder:
            files = self._write_full(folder, weights)
            manifest = VersionManifest(
                run_id=self.store.run_id,
                kind=VersionKind.FULL,
                target=Identity(version, root_of(tensors)),
                base=None,
                directory=folder.name,
                files=files,
                tensors=tensors,
            )
            commit(self.store, manifest)
        copies = {n: Weight(w.meta, w.data.copy()) for n, w in weights.items()}
        self._snapshot = _Snapshot(manifest.target, copies, digests)
        return manifest

    def publish(self, version: int, weights: Weights) -> VersionManifest:
        """What changed since this publisher's last version, or a full one if that takes no more.

        The first version of a publisher is full. Raises as :meth:`publish_full`, and
        :class:`LayoutError` if names, dtypes or shapes are not those of the last version.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return self.publish_full(version, weights)
        self._check_version(version)
        _check_same(snapshot.weights, weights)
        digests = {name: d.copy() for name, d in snapshot.digests.items()}
        raw_bytes = sum(w.meta.num_bytes for w in weights.values())
        with self._payload(version) as folder:
            writer = RecordWriter(folder, self._file_bytes, _DENSE_SHARE * raw_bytes)
            entries = []
            for name, weight in weights.items():
                records = encode_tensor(
                    weight.meta, snapshot.weights[name].data, weight.data, digests[name],
                    variant=self._variant,
                )  # fmt: skip
                entries.append(writer.add(weight.meta, (r for _, r in records), digests[name]))
                if writer.is_over:
                    break
            else:
                manifest = VersionManifest(
                    run_id=self.store.run_id,
                    kind=VersionKind.DELTA,
                    target=Identity(version, root_of(entries)),
                    base=snapshot.identity,
                    directory=folder.name,
                    files=writer.finish(),
                    tensors=tuple(entries),
                    num_changed=writer.num_changed,
                )
                commit(self.store, manifest)
                self._advance(snapshot, manifest, weights, digests)
                return manifest
            writer.discard()
            shutil.rmtree(folder)
        return self.publish_full(version, weights)

    def _advance(
        self,
        snapshot: _Snapshot,
        manifest: VersionManifest,
        weights: Weights,
        digests: dict[str, Digests],
    ) -> None:
        self._snapshot = None  # neither one nor the other until all are copied
        for entry in manifest.tensors:
            if entry.has_records:
                name = entry.meta.name
                snapshot.weights[name].data[:] = weights[name].data
        self._snapshot = _Snapshot(manifest.target, snapshot.weights, digests)

    def _check_version(self, version: int) -> None:
        last = self.store.last_number()
        if not last < version <= MAX_VERSION:
            raise VersionError(
                f"version {version} of run {self.store.run_id!r}: the store holds {last}; "
                "versions rise, and a number is never used again"
            )

    @contextlib.contextmanager
    def _payload(self, version: int) -> Iterator[Path]:
        """A folder of our own; removed if the version does not come to be."""
        with payload_folder(self.store, f"v{version:012}") as folder:
            yield folder

    def _write_full(self, folder: Path, weights: Weights) -> tuple[FileEntry, ...]:
        shards: list[list[Weight]] = [[]]
        used = 0
        for weight in weights.values():
            if shards[-1] and used + weight.meta.num_bytes > self._file_bytes:
                shards.append([])
                used = 0
            shards[-1].append(weight)
            used += weight.meta.num_bytes
        files: list[FileEntry] = []
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map |= {weight.meta.name: name for weight in shard}
            files.append(FileEntry(name, *write_durable(folder / name, _shard_chunks(shard))))
            reach("store.payload")
        total = sum(weight.meta.num_bytes for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, data in {**self._extra, INDEX_FILE: json.dumps(index, indent=2).encode()}.items():
            files.append(FileEntry(name, *write_durable(folder / name, [data])))
        return tuple(files)


class RecordWriter:
    """Payload files of records, cut at tensors; ``limit_bytes`` is where a delta stops to pay."""

    def __init__(self, folder: Path, file_bytes: int, limit_bytes: float) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._limit_bytes = limit_bytes
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0
        self._files: list[FileEntry] = []
        self.num_changed = 0

    @property
    def is_over(self) -> bool:
        return self._written + self._pending_bytes > self._limit_bytes

    def add(self, meta: TensorMeta, records: Iterable[bytes], digests: Digests) -> TensorEntry:
        """One tensor; ``digests`` are the new ones once its records were taken."""
        start, num_bytes = self._pending_bytes, 0
        for record in records:
            self._pending.append(record)
            num_bytes += len(record)
            self.num_changed += int.from_bytes(record[20:24], "little")
        digest = tensor_digest(digests)
        if num_bytes == 0:
            return TensorEntry(meta, digest)
        entry = TensorEntry(meta, digest, len(self._files), start, num_bytes)
        self._pending_bytes += num_bytes
        if self._pending_bytes >= self._file_bytes:
            self._flush()
        return entry

    def finish(self) -> tuple[FileEntry, ...]:
        """All files, durable."""
        if self._pending:
            self._flush()
        return tuple(self._files)

    def discard(self) -> None:
        """Forget what is pending."""
        self._pending = []

    def _flush(self) -> None:
        name = f"delta-{len(self._files):05}.wsd"
        self._files.append(FileEntry(name, *write_durable(self._folder / name, self._pending)))
        self._written += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        reach("store.payload")


@contextlib.contextmanager
def payload_folder(store: Store, stem: str) -> Iterator[Path]:
    """A payload folder with a name of its own; removed again if the block raises."""
    folder = store.path / f"{stem}-{uuid.uuid4().hex[:12]}"
    with named_errors("creating", folder):
        folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def commit(store: Store, manifest: VersionManifest) -> None:
    """Make a version visible whose payload is written. Raises :class:`BusyError` if its number is
    taken."""
    sync_directory(store.payload_path(manifest))
    sync_directory(store.path)
    path = store.path / manifest.file_name
    create_file(path, manifest.to_bytes(), before=lambda: reach("store.manifest"))
    reach("store.committed")


def _shard_chunks(shard: list[Weight]) -> Iterator[bytes | memoryview]:
    class Sink:
        """What the header is written to."""

        data = b""

        def write(self, data: bytes) -> None:
            self.data += data

    sink: Any = Sink()
    write_header(sink, [(w.meta.name, w.meta.dtype, w.meta.shape) for w in shard])
    yield sink.data
    for weight in shard:
        yield weight.data.data


def _check_same(kept: Weights, weights: Weights) -> None:
    unknown = sorted(weights.keys() - kept.keys())
    missing = sorted(kept.keys() - weights.keys())
    if unknown or missing:
        raise UnknownNameError(
            f"a version must hold the tensors of its run: unknown {name_some(unknown) or 'none'}, "
            f"missing {name_some(missing) or 'none'}; publish a full version, or start a new run"
        )
    for name, weight in weights.items():
        if weight.meta != kept[name].meta:
            raise LayoutError(f"{name!r}: got {weight.meta}, the run has {kept[name].meta}")
