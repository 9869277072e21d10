"""Records of small tensors, packed: what a store keeps of them, see ``docs/delta.md``.

A record is self-contained and of a fixed form, so that a device may look into it; of a small tensor
most of it is header. Packed is only what does not follow from the tensor. Unpacked, records are byte
for byte what they were, so that nobody who codes or decodes knows of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from weightsync import native_delta
from weightsync.codec.spans import Bytes, kind_of
from weightsync.errors import IntegrityError
from weightsync.native_delta import Kind, TensorForm
from weightsync.types import TensorMeta, item_bytes

#: Records of a tensor that take more together stay as they are: packing would save less than 2 %, and
#: what is not packed is read to where it is decoded.
MAX_PACKED_RECORD_BYTES: Final = 4 << 10
_MAX_ELEMENTS: Final = 1 << 60


def pack_records(
    meta: TensorMeta, digest: int, records: Sequence[bytes | memoryview]
) -> bytes | None:
    """All records of a tensor, whose new elements have this digest; None if they should stay as they are."""
    whole = b"".join(records)
    if not 0 < len(whole) <= MAX_PACKED_RECORD_BYTES:
        return None
    return native_delta.pack(_form(meta, digest), whole) or None


def unpack_records(meta: TensorMeta, digest: int, packed: Bytes, records: Bytes) -> None:
    """The inverse, into ``records``, uint8 of exactly their size.

    Raises :class:`IntegrityError` naming the tensor.
    """
    form = _form(meta, digest)
    if not 0 < form.num_elements <= _MAX_ELEMENTS:
        raise IntegrityError(f"{meta.name}: packed records of {form.num_elements} elements")
    try:
        native_delta.unpack(form, packed, records)
    except IntegrityError as error:
        raise IntegrityError(f"{meta.name}: {error}") from error


def _form(meta: TensorMeta, digest: int) -> TensorForm:
    return TensorForm(*_columns(meta), digest)


@lru_cache(maxsize=200_000)
def _columns(meta: TensorMeta) -> tuple[Kind, int, int]:
    kind = kind_of(meta.dtype)
    return kind, min(item_bytes(meta.dtype), 4), meta.num_bytes // kind.element_bytes
