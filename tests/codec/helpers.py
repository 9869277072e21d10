"""What codec tests share: one tensor through encoder and decoder, every promise checked on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.codec import (
    Variant,
    apply_changes,
    block_digests,
    decode_tensor,
    encode_tensor,
    tensor_digest,
)
from weightsync.codec.spans import Bytes
from weightsync.digest import DigestTable, part_of
from weightsync.native_delta import Place
from weightsync.tensors import TensorView
from weightsync.types import TensorMeta, item_bytes

Records = list[tuple[Place, Bytes]]


def flat(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of an array, as a copy."""
    return np.frombuffer(array.tobytes(), dtype=np.uint8).copy()


def meta_of(data: Bytes, dtype: str) -> TensorMeta:
    return TensorMeta("t", dtype, (data.size // item_bytes(dtype),))


def house_digest(meta: TensorMeta, data: Bytes) -> int:
    """The digest that the rest of the house takes of a tensor."""
    view = TensorView(
        data.ctypes.data,
        meta.dtype,
        meta.shape,
        (item_bytes(meta.dtype),),
        "cpu",
        data.ctypes.data,
        data.size,
        data,
    )
    return DigestTable([part_of(meta, view)]).compute(1)[meta.name]


def encoded(
    meta: TensorMeta, old: Bytes, new: Bytes, variant: Variant = Variant.EXACT
) -> tuple[Records, int]:
    """Records and the digest of the result, which the digests kept along must equal."""
    digests = block_digests(meta, old)
    found = encode_tensor(meta, old, new, digests, variant=variant)
    records = [(place, np.frombuffer(record, dtype=np.uint8)) for place, record in found]
    assert (digests == block_digests(meta, new)).all()
    assert tensor_digest(digests) == house_digest(meta, new)
    return records, tensor_digest(digests)


def decoded(meta: TensorMeta, records: Records, old: Bytes, digest: int | None = None) -> Bytes:
    """The new tensor; the old one is not touched."""
    digests = block_digests(meta, old)
    before = old.copy()
    changes = list(decode_tensor(meta, records, old, digests, digest))
    assert (old == before).all()
    target = old.copy()
    for change in changes:
        assert change.count * (4 + change.place.kind.element_bytes) <= 8 * change.count
        apply_changes(target, change)
        apply_changes(target, change)  # changes are absolute
    assert (digests == block_digests(meta, target)).all()
    return target


def round_trip(
    dtype: str, old: npt.NDArray[Any], new: npt.NDArray[Any], variant: Variant = Variant.EXACT
) -> int:
    """Payload bytes of a tensor that came through bit for bit."""
    before, after = flat(old), flat(new)
    meta = meta_of(before, dtype)
    records, digest = encoded(meta, before, after, variant)
    assert (decoded(meta, records, before, digest) == after).all()
    return sum(record.size for _, record in records)
