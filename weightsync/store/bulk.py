"""Records of many tensors at once: read side by side into one piece of memory, and looked up in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from weightsync.codec.device_decode import PADDING_BYTES
from weightsync.codec.record import record_at
from weightsync.codec.spans import Bytes, spans_of
from weightsync.errors import IntegrityError
from weightsync.native_delta import Place
from weightsync.store.directory import Store, open_payload
from weightsync.store.object_path import AnyPath
from weightsync.store.version import TensorEntry, VersionManifest
from weightsync.types import TensorMeta

#: A thread reads so much at once.
READ_BYTES: Final = 4 << 20
_MAX_READ_BYTES: Final = 64 << 20

Step = tuple[Store, VersionManifest, TensorEntry]


def read_records(
    steps: Sequence[Step],
    num_threads: int,
    room: Callable[[int], Bytes] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Bytes, list[list[tuple[Place, Bytes]]]]:
    """The memory that all records lie in, and by step its records: parts of that, unchecked but for
    where they belong. ``room`` gives the memory, uint8 of that size; ``check`` is called before every
    ``READ_BYTES`` and raises what ends the reading.

    Raises :class:`UnavailableError` for a file that is not there, :class:`IntegrityError` for one that
    ends early or holds a record out of place.
    """
    total = sum(entry.num_bytes for _, _, entry in steps)
    size = total + PADDING_BYTES
    data: Bytes = np.empty(size, dtype=np.uint8) if room is None else room(size)
    if data.size != size:
        raise ValueError(f"room for {size} bytes of records has {data.size}")
    data[total:] = 0
    pieces: list[tuple[AnyPath, int, Bytes]] = []
    found, start = [], 0
    for path, offset, size in _extents(steps):
        for at in range(0, size, READ_BYTES):
            part = data[start + at : start + min(at + READ_BYTES, size)]
            pieces.append((path, offset + at, part))
        start += size

    def read(piece: tuple[AnyPath, int, Bytes]) -> None:
        check()
        read_exactly(*piece)

    if num_threads <= 1 or len(pieces) <= 1:
        for piece in pieces:
            read(piece)
    else:
        with ThreadPoolExecutor(min(num_threads, len(pieces)), "weightsync-read") as pool:
            list(pool.map(read, pieces))
    start = 0
    for store, manifest, entry in steps:
        path = _path_of(store, manifest, entry)
        found.append(records_in(path, entry.meta, data[start : start + entry.num_bytes]))
        start += entry.num_bytes
    return data, found


def read_exactly(path: AnyPath, offset_bytes: int, data: Bytes) -> None:
    """All of ``data`` from a file. By reads, never mapped: an error of a network file system must be
    an error, not a signal. Raises :class:`IntegrityError` if it ends early."""
    with open_payload(path) as file:
        file.seek(offset_bytes)
        view, done = data.data, 0
        while done < data.size:
            count = file.readinto(view[done : done + _MAX_READ_BYTES])
            if not count:
                raise IntegrityError(f"{path} ends early, at {offset_bytes + done} bytes")
            done += count


def records_in(path: AnyPath, meta: TensorMeta, data: Bytes) -> list[tuple[Place, Bytes]]:
    """The records that follow each other in ``data``, which is all of a tensor's of a file."""
    places = {place.start_element: place for place in spans_of(meta)}
    found, at, last = [], 0, -1
    while at < data.size:
        num_bytes, start = record_at(data, at)
        if num_bytes > data.size - at or start not in places or start <= last:
            raise IntegrityError(f"{path}: {meta.name!r} has a record out of place")
        found.append((places[start], data[at : at + num_bytes]))
        at, last = at + num_bytes, start
    return found


def _extents(steps: Iterable[Step]) -> list[tuple[AnyPath, int, int]]:
    """Path, offset and bytes of what lies together in a file, in the order of the steps."""
    found: list[tuple[AnyPath, int, int]] = []
    for store, manifest, entry in steps:
        path = _path_of(store, manifest, entry)
        if found:
            last, offset, size = found[-1]
            if last == path and offset + size == entry.offset_bytes:
                found[-1] = (last, offset, size + entry.num_bytes)
                continue
        found.append((path, entry.offset_bytes, entry.num_bytes))
    return found


def _path_of(store: Store, manifest: VersionManifest, entry: TensorEntry) -> AnyPath:
    path: AnyPath = store.payload_path(manifest) / manifest.files[entry.file].name
    return path


__all__ = ["read_exactly", "read_records", "records_in"]
