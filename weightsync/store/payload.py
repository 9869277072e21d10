"""Writing versions: payload files in a folder of one's own, then the manifest that makes them one."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from weightsync.checkpoints import INDEX_FILE, write_header
from weightsync.codec import tensor_digest
from weightsync.codec.packed import MAX_PACKED_RECORD_BYTES, pack_records
from weightsync.codec.spans import Bytes, Digests
from weightsync.device_tables import CPU, HostBuffer
from weightsync.faults import reach
from weightsync.store.directory import Store
from weightsync.store.durable import (
    create_file,
    named_errors,
    remove_tree,
    sync_directory,
    write_durable,
)
from weightsync.store.object_path import AnyPath
from weightsync.store.version import FileEntry, TensorEntry, VersionManifest
from weightsync.store.weights import CHUNK_BYTES, Joined
from weightsync.types import TensorMeta

DEFAULT_FILE_BYTES: Final = 1 << 30
#: Files of records that are written side by side are no smaller.
PART_BYTES: Final = 16 << 20


class RecordWriter:
    """Payload files of records, cut at tensors; those of small tensors are packed. Files of ``PART_BYTES``
    are written at once, on ``num_threads``; as a context manager, so that nobody writes any more when
    it is left."""

    def __init__(
        self, folder: AnyPath, file_bytes: int, stem: str = "delta", num_threads: int = 1
    ) -> None:
        self._folder, self._stem = folder, stem
        self._file_bytes = min(file_bytes, PART_BYTES) if num_threads > 1 else file_bytes
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._files: list[Future[FileEntry]] = []
        self._pool = ThreadPoolExecutor(num_threads, "weightsync-files")
        self.num_changed = 0

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(
        self, meta: TensorMeta, records: Iterable[bytes | memoryview], digests: Digests
    ) -> TensorEntry:
        """One tensor; ``digests`` are the new ones once its records were taken."""
        found, num_bytes = [], 0
        for record in records:
            found.append(record)
            num_bytes += len(record)
            self.num_changed += int.from_bytes(record[20:24], "little")
        digest = tensor_digest(digests)
        if num_bytes == 0:
            return TensorEntry(meta, digest)
        unpacked_bytes, packed = 0, None
        if num_bytes <= MAX_PACKED_RECORD_BYTES:
            packed = pack_records(meta, digest, found)
        if packed is not None:
            found, unpacked_bytes, num_bytes = [packed], num_bytes, len(packed)
        entry = TensorEntry(
            meta, digest, len(self._files), self._pending_bytes, num_bytes,
            unpacked_bytes=unpacked_bytes,
        )  # fmt: skip
        self._pending += found
        self._pending_bytes += num_bytes
        if self._pending_bytes >= self._file_bytes:
            self._flush()
        return entry

    def finish(self) -> tuple[FileEntry, ...]:
        """All files, durable."""
        if self._pending:
            self._flush()
        return tuple(file.result() for file in self._files)

    def _flush(self) -> None:
        name = f"{self._stem}-{len(self._files):05}.wsd"
        self._files.append(self._pool.submit(self._write, name, self._pending))
        self._pending, self._pending_bytes = [], 0

    def _write(self, name: str, records: Sequence[bytes | memoryview]) -> FileEntry:
        entry = FileEntry(name, *write_durable(self._folder / name, records))
        reach("store.payload")
        return entry


@contextlib.contextmanager
def payload_folder(store: Store, stem: str) -> Iterator[Any]:
    """A payload folder with a name of its own; removed again if the block raises."""
    folder = store.path / f"{stem}-{uuid.uuid4().hex[:12]}"
    with named_errors("creating", folder):
        folder.mkdir()
    try:
        yield folder
    except BaseException:
        remove_tree(folder)
        raise


def commit(store: Store, manifest: VersionManifest) -> None:
    """Make a version visible whose payload is written. Raises :class:`BusyError` if its number is
    taken."""
    sync_directory(store.payload_path(manifest))
    sync_directory(store.path)
    path = store.path / manifest.file_name
    create_file(path, manifest.to_bytes(), before=lambda: reach("store.manifest"))
    reach("store.committed")


def write_full(
    folder: AnyPath,
    weights: Sequence[Joined[Any]],
    file_bytes: int,
    extra: Mapping[str, bytes],
    num_threads: int = 1,
) -> tuple[FileEntry, ...]:
    """A Hugging Face directory of these tensors, durable; several files are written at once."""
    data_of = {weight.meta: weight for weight in weights}
    device = next((weight.device for weight in weights if weight.device != CPU), CPU)
    local = threading.local()
    shards = shards_of([weight.meta for weight in weights], file_bytes)

    def write(item: tuple[str, list[TensorMeta]]) -> FileEntry:
        name, metas = item
        if device != CPU and not hasattr(local, "buffer"):
            local.buffer = HostBuffer(CHUNK_BYTES, device)
        buffer = local.buffer.data if device != CPU else None
        chunks = shard_chunks([data_of[meta] for meta in metas], buffer)
        entry = FileEntry(name, *write_durable(folder / name, chunks))
        reach("store.payload")
        return entry

    # When this raises, nobody writes any more: what was written is removed then.
    with ThreadPoolExecutor(num_threads, "weightsync-files") as pool:
        files = list(pool.map(write, shards.items()))
    for name, data in {**extra, INDEX_FILE: index_of(shards)}.items():
        files.append(FileEntry(name, *write_durable(folder / name, [data])))
    return tuple(files)


def shards_of(metas: Sequence[TensorMeta], file_bytes: int) -> dict[str, list[TensorMeta]]:
    """Which tensors lie in which safetensors file, in order."""
    shards: list[list[TensorMeta]] = [[]]
    used = 0
    for meta in metas:
        if shards[-1] and used + meta.num_bytes > file_bytes:
            shards.append([])
            used = 0
        shards[-1].append(meta)
        used += meta.num_bytes
    count = len(shards)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def index_of(shards: Mapping[str, Sequence[TensorMeta]]) -> bytes:
    """The Hugging Face index of these files."""
    total = sum(meta.num_bytes for metas in shards.values() for meta in metas)
    weight_map = {meta.name: name for name, metas in shards.items() for meta in metas}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode()


def header_of(metas: Sequence[TensorMeta]) -> bytes:
    """What a safetensors file of these tensors begins with."""

    class Sink:
        """What the header is written to."""

        data = b""

        def write(self, data: bytes) -> None:
            self.data += data

    sink: Any = Sink()
    write_header(sink, [(meta.name, meta.dtype, meta.shape) for meta in metas])
    data: bytes = sink.data
    return data


def shard_chunks(
    shard: Sequence[Joined[Any]], buffer: Bytes | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file of these tensors, in turn; ``buffer`` as in :meth:`Joined.chunks`."""
    yield header_of([weight.meta for weight in shard])
    for weight in shard:
        yield from weight.chunks(buffer)
