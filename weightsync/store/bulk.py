"""Records of many tensors at once: read side by side into one piece of memory, and looked up in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from weightsync.codec.device_decode import PADDING_BYTES
from weightsync.codec.packed import unpack_records
from weightsync.codec.spans import Bytes
from weightsync.native_delta import Place
from weightsync.store.directory import Store, read_exactly, records_in
from weightsync.store.object_path import AnyPath
from weightsync.store.version import TensorEntry, VersionManifest

#: A thread reads so much at once.
READ_BYTES: Final = 4 << 20

Step = tuple[Store, VersionManifest, TensorEntry]


def read_records(
    steps: Sequence[Step],
    num_threads: int,
    room: Callable[[int], Bytes] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Bytes, list[list[tuple[Place, Bytes]]]]:
    """The memory that all records lie in, and by step its records: parts of that, unchecked but for
    where they belong. ``room`` gives the memory, uint8 of that size; ``check`` is called before every
    ``READ_BYTES`` and raises what ends the reading. Beyond that memory: the packed records.

    Raises :class:`UnavailableError` for a file that is not there, :class:`IntegrityError` for one that
    ends early, holds a record out of place, or packed records that are none of their tensor.
    """
    total = sum(entry.record_bytes for _, _, entry in steps)
    size = total + PADDING_BYTES
    data: Bytes = np.empty(size, dtype=np.uint8) if room is None else room(size)
    if data.size != size:
        raise ValueError(f"room for {size} bytes of records has {data.size}")
    data[total:] = 0
    targets = _targets(steps, data)
    reads = [part for extent in _extents(steps, targets) for part in extent.cut(READ_BYTES)]

    def read(part: tuple[AnyPath, int, list[Bytes]]) -> None:
        check()
        path, offset, memory = part
        read_exactly(path, offset, *memory)

    if num_threads <= 1 or len(reads) <= 1:
        for part in reads:
            read(part)
    else:
        with ThreadPoolExecutor(min(num_threads, len(reads)), "weightsync-read") as pool:
            list(pool.map(read, reads))
    found, start = [], 0
    for (store, manifest, entry), target in zip(steps, targets, strict=True):
        records = data[start : start + entry.record_bytes]
        if entry.is_packed:
            packed = target.memory[target.start : target.stop]
            unpack_records(entry.meta, entry.digest, packed, records)
        found.append(records_in(_path_of(store, manifest, entry), entry.meta, records))
        start += entry.record_bytes
    return data, found


class _Target(NamedTuple):
    """Where bytes of a file go: a part of a piece of memory."""

    memory: Bytes
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class _Extent:
    """What lies together in a file, and where it is to go, in order."""

    path: AnyPath
    offset_bytes: int
    targets: list[_Target]

    def add(self, target: _Target) -> None:
        """What follows in the file."""
        memory, start, stop = self.targets[-1]
        if memory is target.memory and stop == target.start:
            self.targets[-1] = _Target(memory, start, target.stop)
        else:
            self.targets.append(target)

    def cut(self, most_bytes: int) -> Iterator[tuple[AnyPath, int, list[Bytes]]]:
        """Path, offset and memory of parts of so many bytes, the last one less."""
        offset, parts, size = self.offset_bytes, list[Bytes](), 0
        for memory, start, stop in self.targets:
            at = start
            while at < stop:
                part = memory[at : min(at + most_bytes - size, stop)]
                parts.append(part)
                at, size = at + part.size, size + part.size
                if size == most_bytes:
                    yield self.path, offset, parts
                    offset, parts, size = offset + size, [], 0
        if parts:
            yield self.path, offset, parts


def _targets(steps: Sequence[Step], data: Bytes) -> list[_Target]:
    """Where the bytes of each step's file go: to their place in ``data``, or, packed, beside it."""
    packed_bytes = sum(entry.num_bytes for _, _, entry in steps if entry.is_packed)
    beside: Bytes = np.empty(packed_bytes, dtype=np.uint8)
    found, at, at_beside = [], 0, 0
    for _, _, entry in steps:
        if entry.is_packed:
            found.append(_Target(beside, at_beside, at_beside + entry.num_bytes))
            at_beside += entry.num_bytes
        else:
            found.append(_Target(data, at, at + entry.num_bytes))
        at += entry.record_bytes
    return found


def _extents(steps: Sequence[Step], targets: Sequence[_Target]) -> list[_Extent]:
    """What lies together in a file, in the order of the steps."""
    found: list[_Extent] = []
    end = 0  # in the file of the last one
    for (store, manifest, entry), target in zip(steps, targets, strict=True):
        path = _path_of(store, manifest, entry)
        if found and found[-1].path == path and end == entry.offset_bytes:
            found[-1].add(target)
        else:
            found.append(_Extent(path, entry.offset_bytes, [target]))
        end = entry.offset_bytes + entry.num_bytes
    return found


def _path_of(store: Store, manifest: VersionManifest, entry: TensorEntry) -> AnyPath:
    path: AnyPath = store.payload_path(manifest) / manifest.files[entry.file].name
    return path


__all__ = ["read_records"]
