"""The redo log of a local checkpoint: what an update will write, absolute, durable before it is.

Header (JSON: the target, the tensors touched with their digests), then entries of (tensor, first element,
elements, count, positions, values). Its length and hash stand in the state, so a log is believed whole or
not at all; writing from it twice does no harm.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from weightsync.codec import Changes
from weightsync.codec.spans import spans_of
from weightsync.errors import IntegrityError, LayoutError
from weightsync.store.durable import hash_file
from weightsync.store.version import Identity
from weightsync.types import TensorMeta

_LENGTH: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<IIQ")  # tensor, count, first element of the span


@dataclass(frozen=True)
class Touched:
    """A tensor that the update writes to, and what it must digest to afterwards."""

    meta: TensorMeta
    digest: int


@dataclass(frozen=True)
class RedoHeader:
    """What an update makes of a checkpoint."""

    target: Identity
    touched: tuple[Touched, ...]

    def to_bytes(self) -> bytes:
        body = json.dumps({
            "target": [self.target.version, self.target.root],
            "touched": [
                [t.meta.name, t.meta.dtype, list(t.meta.shape), t.digest] for t in self.touched
            ],
        }).encode()  # fmt: skip
        return _LENGTH.pack(len(body)) + body


def entry_chunks(tensor: int, changes: Changes) -> list[bytes | memoryview]:
    """One entry, ready to be written."""
    head = _ENTRY.pack(tensor, changes.count, changes.place.start_element)
    return [head, changes.positions.data.cast("B"), changes.values.data]


def check_redo(path: Path, num_bytes: int, expected_hash: str) -> None:
    """Raises :class:`IntegrityError` unless the log is what the state says."""
    found = hash_file(path)
    if found != (num_bytes, expected_hash):
        raise IntegrityError(f"{path}: got {found}, expected {(num_bytes, expected_hash)}")


def read_redo(path: Path) -> tuple[RedoHeader, Iterator[tuple[int, Changes]]]:
    """The header and the entries of a log that was checked."""
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        value = json.loads(file.read(length))
    header = RedoHeader(
        Identity(*value["target"]),
        tuple(Touched(TensorMeta(n, d, tuple(s)), x) for n, d, s, x in value["touched"]),
    )
    return header, _entries(path, header, _LENGTH.size + length)


def _entries(path: Path, header: RedoHeader, start: int) -> Iterator[tuple[int, Changes]]:
    places: dict[int, dict[int, Any]] = {}
    with path.open("rb") as file:
        file.seek(start)
        while head := file.read(_ENTRY.size):
            tensor, count, first = _ENTRY.unpack(head)
            if tensor not in places:
                spans = spans_of(header.touched[tensor].meta)
                places[tensor] = {place.start_element: place for place in spans}
            place = places[tensor].get(first)
            if place is None:
                raise LayoutError(f"{path}: no span begins at element {first}")
            positions = np.frombuffer(file.read(4 * count), dtype=np.uint32)
            values = np.frombuffer(file.read(place.kind.element_bytes * count), dtype=np.uint8)
            yield tensor, Changes(place, positions, values)
