"""How a tensor is cut into spans, and the digests of its blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from weightsync import native_delta
from weightsync.digest import digest_seed
from weightsync.errors import LayoutError
from weightsync.native_delta import BLOCK_ELEMENTS, SPAN_ELEMENTS, Kind, Place
from weightsync.types import TensorMeta, item_bytes

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]

_KINDS = {
    "bfloat16": Kind.FLOAT16,
    "float16": Kind.FLOAT16,
    "float32": Kind.FLOAT32,
    "float8_e4m3fn": Kind.FLOAT8,
    "float8_e4m3fnuz": Kind.FLOAT8,
    "float8_e5m2": Kind.FLOAT8,
    "float8_e5m2fnuz": Kind.FLOAT8,
}


def kind_of(dtype: str) -> Kind:
    """How a dtype is coded; what is no float of 1, 2 or 4 bytes goes byte by byte."""
    return _KINDS.get(dtype, Kind.BYTES)


def spans_of(meta: TensorMeta) -> Iterator[Place]:
    """The spans of a tensor in order; none for an empty one."""
    kind = kind_of(meta.dtype)
    total = meta.num_bytes // kind.element_bytes
    seed, word_bytes = digest_seed(meta), min(item_bytes(meta.dtype), 4)
    for start in range(0, total, SPAN_ELEMENTS):
        yield Place(kind, start, min(SPAN_ELEMENTS, total - start), seed, word_bytes)


def num_blocks(meta: TensorMeta) -> int:
    """Blocks of a tensor: the length of its block digests."""
    return -(-(meta.num_bytes // kind_of(meta.dtype).element_bytes) // BLOCK_ELEMENTS)


def check_bytes(data: Bytes, num_bytes: int, what: str) -> None:
    """Raises :class:`LayoutError` unless ``data`` is uint8 [num_bytes], contiguous."""
    if data.dtype != np.uint8 or data.shape != (num_bytes,) or not data.flags.c_contiguous:
        raise LayoutError(
            f"{what}: got {data.dtype} {data.shape}, expected contiguous uint8 ({num_bytes},)"
        )


def span_bytes(data: Bytes, place: Place) -> Bytes:
    """The bytes of one span of a whole tensor's."""
    start = place.start_element * place.kind.element_bytes
    return data[start : start + place.num_bytes]


def span_digests(digests: Digests, place: Place) -> Digests:
    """The block digests of one span of a whole tensor's."""
    start = place.start_element // BLOCK_ELEMENTS
    return digests[start : start + place.num_blocks]


def block_digests(meta: TensorMeta, data: Bytes) -> Digests:
    """Parts of the tensor's digest, one a block; they add up to it modulo 2^64.

    ``data`` is the tensor, uint8 [meta.num_bytes]. Raises :class:`LayoutError`.
    """
    check_bytes(data, meta.num_bytes, meta.name)
    digests: Digests = np.zeros(num_blocks(meta), dtype=np.uint64)
    for place in spans_of(meta):
        native_delta.block_digests(
            place, span_bytes(data, place).ctypes.data, span_digests(digests, place).ctypes.data
        )
    return digests


def tensor_digest(digests: Digests) -> int:
    """The digest of a tensor from those of its blocks."""
    return int(digests.sum(dtype=np.uint64))
