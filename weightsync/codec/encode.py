"""Tensors to records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum

import numpy as np

from weightsync import native_delta
from weightsync.codec.record import seal
from weightsync.codec.spans import (
    Bytes,
    Digests,
    check_bytes,
    num_blocks,
    span_bytes,
    span_digests,
    spans_of,
)
from weightsync.errors import LayoutError
from weightsync.native_delta import Place
from weightsync.types import TensorMeta


class Variant(Enum):
    """What a record needs of the receiver."""

    EXACT = "exact"  # the exact old values; fewest bytes
    ABSOLUTE = "absolute"  # nothing: positions and new bits, so applying it twice does no harm


class _Buffers(threading.local):
    """Memory of one thread that spans are coded into; grows to the largest span it saw."""

    def __init__(self) -> None:
        self.front: Bytes = np.empty(0, dtype=np.uint8)
        self.dense: Bytes = np.empty(0, dtype=np.uint8)

    def fit(self, place: Place) -> None:
        if self.front.size < native_delta.record_capacity(place):
            self.front = np.empty(native_delta.record_capacity(place), dtype=np.uint8)
        if self.dense.size < place.num_bytes:
            self.dense = np.empty(place.num_bytes, dtype=np.uint8)


_buffers = _Buffers()


def encode_tensor(
    meta: TensorMeta,
    old: Bytes,
    new: Bytes,
    digests: Digests,
    *,
    variant: Variant = Variant.EXACT,
) -> Iterator[tuple[Place, bytes]]:
    """Records of the spans that changed, in order; a span without changes has none.

    ``old`` and ``new`` are the tensor, uint8 [meta.num_bytes]. ``digests`` are the block digests of
    ``old`` (:func:`weightsync.codec.block_digests`) and become those of ``new`` as the records are
    taken. Raises :class:`LayoutError`.
    """
    check_bytes(old, meta.num_bytes, f"{meta.name}, old")
    check_bytes(new, meta.num_bytes, f"{meta.name}, new")
    if digests.dtype != np.uint64 or digests.shape != (num_blocks(meta),):
        raise LayoutError(f"{meta.name}: digests {digests.dtype} {digests.shape}")
    for place in spans_of(meta):
        record = encode_span(
            place,
            span_bytes(old, place),
            span_bytes(new, place),
            span_digests(digests, place),
            variant,
        )
        if record is not None:
            yield place, record


def encode_span(
    place: Place, old: Bytes, new: Bytes, digests: Digests, variant: Variant = Variant.EXACT
) -> bytes | None:
    """The record of one span, None if nothing changed; see :func:`encode_tensor`. On the caller's
    thread, without the interpreter lock: spans may be coded side by side."""
    before = digests.copy()
    record = _encode_as(place, old, new, digests, variant, is_dense=False)
    if record is None or len(record) <= place.num_bytes // 4:
        return record
    # Few weights compress to a quarter: maybe the plain new ones take less.
    dense = _encode_as(place, old, new, before, variant, is_dense=True)
    return dense if dense is not None and len(dense) < len(record) else record


def _encode_as(
    place: Place, old: Bytes, new: Bytes, digests: Digests, variant: Variant, *, is_dense: bool
) -> bytes | None:
    _buffers.fit(place)
    front, dense = _buffers.front, _buffers.dense
    front_bytes, num_dense = native_delta.encode(
        place,
        (old.ctypes.data, new.ctypes.data),
        (front.ctypes.data, dense.ctypes.data, digests.ctypes.data),
        is_absolute=variant is Variant.ABSOLUTE,
        is_dense=is_dense,
    )
    element_bytes = place.kind.element_bytes
    if _num_changed(front) == 0:
        return None
    return seal(front[:front_bytes], dense[: num_dense * element_bytes], element_bytes)


def _num_changed(front: Bytes) -> int:
    return int.from_bytes(front[20:24].tobytes(), "little")
