"""Records back to changes, and changes onto tensors.

Decoding and applying are two steps: nothing is written to a tensor before everything that is to be
applied was decoded, and its result known to be what was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync import native_delta
from weightsync.codec.record import dense_elements, read_header
from weightsync.codec.spans import Bytes, Digests, check_bytes, span_bytes, span_digests
from weightsync.errors import IntegrityError
from weightsync.native_delta import Place
from weightsync.types import TensorMeta


@dataclass(frozen=True, eq=False)
class Changes:
    """What one record does to its span: ``positions`` (uint32, within the span) get ``values``
    (uint8 [count * element bytes]). At most eight bytes a changed element."""

    place: Place
    positions: npt.NDArray[np.uint32]
    values: Bytes

    @property
    def count(self) -> int:
        return int(self.positions.size)


def decode_record(
    place: Place, record: Bytes, old: Bytes, digests: Digests, *, are_digests_known: bool = False
) -> Changes:
    """What a record changes in the span ``old`` (uint8 [place.num_bytes]); nothing is applied.

    ``digests`` (uint64 [place.num_blocks]) become those of the new blocks. Those of the old ones are
    computed from ``old``, or, if ``are_digests_known``, taken from ``digests``: faster, and blind to
    what changed in memory since. Raises :class:`IntegrityError` for a record that is damaged or
    whose result would not be what was sent.
    """
    check_bytes(old, place.num_bytes, "span")
    header = read_header(record, place)
    width = place.kind.element_bytes
    dense = dense_elements(record, header, width)
    positions = np.empty(max(header.num_changed, 1), dtype=np.uint32)
    values = np.empty(max(header.num_changed, 1) * width, dtype=np.uint8)
    count, _, _ = native_delta.decode(
        place,
        (record.ctypes.data, record.size),
        (dense.ctypes.data, header.dense_elements),
        old.ctypes.data,
        (positions.ctypes.data, values.ctypes.data, header.num_changed),
        (digests.ctypes.data, are_digests_known),
    )
    return Changes(place, positions[:count], values[: count * width])


def decode_tensor(
    meta: TensorMeta,
    records: Iterable[tuple[Place, Bytes]],
    old: Bytes,
    digests: Digests,
    expected_digest: int | None = None,
) -> Iterator[Changes]:
    """All changes of a tensor. ``digests`` are the block digests of ``old`` and become the new ones.

    Raises :class:`IntegrityError`, at the latest when exhausted, if the result is not
    ``expected_digest``.
    """
    check_bytes(old, meta.num_bytes, meta.name)
    for place, record in records:
        try:
            yield decode_record(
                place,
                record,
                span_bytes(old, place),
                span_digests(digests, place),
                are_digests_known=True,
            )
        except IntegrityError as error:
            raise IntegrityError(f"{meta.name}: {error}") from error
    found = int(digests.sum(dtype=np.uint64))
    if expected_digest is not None and found != expected_digest:
        raise IntegrityError(
            f"{meta.name}: the result would digest to {found:016x}, expected {expected_digest:016x}; "
            "the base is not the sender's"
        )


def apply_changes(target: Bytes, changes: Changes) -> None:
    """Write them into a whole tensor, uint8 [num_bytes]; doing it twice does no harm."""
    part = span_bytes(target, changes.place)
    native_delta.scatter(
        changes.place.kind,
        (part.ctypes.data, changes.place.num_elements),
        changes.positions.ctypes.data,
        changes.values.ctypes.data,
        changes.count,
    )
