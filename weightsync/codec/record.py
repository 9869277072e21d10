"""Records: the header of one, its dense section, its seal."""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np

from weightsync import native_delta
from weightsync.codec.spans import Bytes
from weightsync.errors import IntegrityError, MissingDependencyError
from weightsync.native_delta import Place

_HEADER: Final = struct.Struct("<IBBBBQIIIIIIIIQQ")
HEADER_BYTES: Final = _HEADER.size
_NUM_CHANGED: Final = struct.Struct("<I")
_NUM_CHANGED_AT: Final = 20
_DENSE_CODING_AT, _DENSE_BYTES_AT, _CHECKSUM_AT = 7, 40, 56
_ELEMENTS, _PLANES = 0, 1
_ZSTD_LEVEL: Final = 1


class Header(NamedTuple):
    """The fields of a record's first 64 bytes, unchecked but for their sizes."""

    magic: int
    kind: int
    flags: int
    num_thresholds: int
    dense_coding: int
    start_element: int
    num_elements: int
    num_changed: int
    num_typical: int
    index_bytes: int
    sparse_bytes: int
    dense_elements: int
    dense_bytes: int
    word_bytes: int
    result_digest: int
    checksum: int


def read_header(record: Bytes, place: Place) -> Header:
    """The header of a record that should be that of ``place``.

    Raises :class:`IntegrityError` for one that is too short, fails its checksum, or whose counts
    exceed the place; memory for what it says is then bounded by what the place is.
    """
    if record.size < HEADER_BYTES or record.size % 8:
        raise IntegrityError(f"a record of {record.size} bytes")
    header = Header(*_HEADER.unpack(record[:HEADER_BYTES].tobytes()))
    if native_delta.checksum(record.ctypes.data, record.size) != header.checksum:
        raise IntegrityError(f"elements from {place.start_element}: the record's checksum is wrong")
    if max(header.num_changed, header.dense_elements) > place.num_elements:
        raise IntegrityError(
            f"elements from {place.start_element}: {header.num_changed} changed and "
            f"{header.dense_elements} dense of {place.num_elements}"
        )
    if header.dense_bytes > record.size - HEADER_BYTES:
        raise IntegrityError(f"a dense section of {header.dense_bytes} in {record.size} bytes")
    return header


def num_changed(record: Bytes) -> int:
    """Changed elements, as a record says that nobody checked; none of one without a whole header."""
    if record.size < HEADER_BYTES:
        return 0
    found: int = _NUM_CHANGED.unpack_from(record.data, _NUM_CHANGED_AT)[0]
    return found


def record_bytes(header: bytes) -> tuple[int, int]:
    """Length of the whole record, and its first element, from the first 64 bytes of it.

    Nothing else is checked here. Raises :class:`IntegrityError` if they are too few.
    """
    if len(header) != HEADER_BYTES:
        raise IntegrityError(f"a record's header of {len(header)} bytes, expected {HEADER_BYTES}")
    h = Header(*_HEADER.unpack(header))
    return _lengths(h), h.start_element


def record_at(data: Bytes, at: int) -> tuple[int, int]:
    """The same of a record that begins at byte ``at`` of ``data``."""
    if data.size - at < HEADER_BYTES:
        raise IntegrityError(
            f"a record's header of {data.size - at} bytes, expected {HEADER_BYTES}"
        )
    fields = _HEADER.unpack_from(data.data, at)
    return _lengths(Header._make(fields)), fields[5]


def _lengths(h: Header) -> int:
    front = HEADER_BYTES + h.num_thresholds + 2 * h.num_typical + h.index_bytes + h.sparse_bytes
    return (front + 7) // 8 * 8 + (h.dense_bytes + 7) // 8 * 8


def seal(front: Bytes, dense: Bytes, element_bytes: int) -> bytes:
    """A whole record from what the core wrote and the elements of its dense blocks."""
    coding, stored = _pack_dense(dense, element_bytes)
    record = np.zeros(front.size + (len(stored) + 7) // 8 * 8, dtype=np.uint8)
    record[: front.size] = front
    record[front.size : front.size + len(stored)] = np.frombuffer(stored, dtype=np.uint8)
    struct.pack_into("<B", record.data, _DENSE_CODING_AT, coding)
    struct.pack_into("<I", record.data, _DENSE_BYTES_AT, len(stored))
    checksum = native_delta.checksum(record.ctypes.data, record.size)
    struct.pack_into("<Q", record.data, _CHECKSUM_AT, checksum)
    return record.tobytes()


def dense_elements(record: Bytes, header: Header, element_bytes: int) -> Bytes:
    """The elements of a record's dense blocks, uint8 [elements * element_bytes].

    Raises :class:`IntegrityError`, and :class:`MissingDependencyError` where byte planes need a
    package that is absent.
    """
    num_bytes = header.dense_elements * element_bytes
    start = record.size - (header.dense_bytes + 7) // 8 * 8
    stored = record[start : start + header.dense_bytes]
    if header.dense_coding == _ELEMENTS:
        if stored.size != num_bytes:
            raise IntegrityError(f"dense elements: {stored.size} bytes, expected {num_bytes}")
        return stored
    zstd = _zstd()
    if zstd is None:
        raise MissingDependencyError("zstandard", "delta", "a record holds compressed byte planes")
    data = stored.tobytes()
    try:  # a frame is believed only if it says the size that must come out of it
        declared = zstd.frame_content_size(data)
        if declared != num_bytes:
            raise IntegrityError(f"dense planes: {declared} bytes, expected {num_bytes}")
        planes = np.frombuffer(zstd.ZstdDecompressor().decompress(data), dtype=np.uint8)
    except zstd.ZstdError as error:
        raise IntegrityError(f"dense planes: {error}") from error
    return np.ascontiguousarray(planes.reshape(element_bytes, -1).T).reshape(-1)


def _pack_dense(dense: Bytes, element_bytes: int) -> tuple[int, bytes]:
    zstd = _zstd()
    if zstd is not None and dense.size:
        planes = np.ascontiguousarray(dense.reshape(-1, element_bytes).T)
        packed: bytes = zstd.ZstdCompressor(level=_ZSTD_LEVEL).compress(planes.data)
        if len(packed) < dense.size:
            return _PLANES, packed
    return _ELEMENTS, dense.tobytes()


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard
