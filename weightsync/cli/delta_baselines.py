"""Formats of deltas as others have published them, our implementation: what ``disk-delta`` is compared
with. Each codes 16-bit elements of one tensor to one payload, and back."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

Bits = npt.NDArray[np.uint16]


def _zstd(data: bytes, level: int = 1) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


class Candidate(ABC):
    """A codec: ``encode(old, new)`` to one payload, ``decode(payload, old)`` to the new bits.

    ``old`` of decode may be written to.
    """

    name = ""

    @abstractmethod
    def encode(self, old: Bits, new: Bits) -> Any: ...

    @abstractmethod
    def decode(self, payload: Any, old: Bits) -> Bits: ...

    def size(self, payload: Any) -> int:
        return len(payload)


class IndexValue(Candidate):
    name = "int32 + bf16"

    def encode(self, old: Bits, new: Bits) -> bytes:
        where = np.flatnonzero(old != new).astype(np.int32)
        return struct.pack("<q", where.size) + where.tobytes() + new[where].tobytes()

    def decode(self, payload: bytes, old: Bits) -> Bits:
        (count,) = struct.unpack_from("<q", payload)
        where = np.frombuffer(payload, np.int32, count, 8)
        old[where] = np.frombuffer(payload, np.uint16, count, 8 + 4 * count)
        return old


class XorZstd(Candidate):
    name = "XOR + zstd-1"

    def encode(self, old: Bits, new: Bits) -> bytes:
        return _zstd((old ^ new).tobytes())

    def decode(self, payload: bytes, old: Bits) -> Bits:
        old ^= np.frombuffer(_unzstd(payload), np.uint16)
        return old


class OverwriteZstd(Candidate):
    """Byte positions and new bytes, as Miles' "overwrite"."""

    name = "overwrite + zstd-1"

    def encode(self, old: Bits, new: Bits) -> bytes:
        a, b = old.view(np.uint8), new.view(np.uint8)
        where = np.flatnonzero(a != b).astype(np.uint32)
        return _zstd(struct.pack("<I", where.size) + where.tobytes() + b[where].tobytes())

    def decode(self, payload: bytes, old: Bits) -> Bits:
        data = _unzstd(payload)
        (count,) = struct.unpack_from("<I", data)
        where = np.frombuffer(data, np.uint32, count, 4)
        old.view(np.uint8)[where] = np.frombuffer(data, np.uint8, count, 4 + 4 * count)
        return old


class Gap16Zstd(Candidate):
    """Gaps in u16 (escaped by 65,535) and XOR of values, as NeMo-RL's; one zstd stream."""

    name = "u16 gap, XOR + zstd-1"

    def encode(self, old: Bits, new: Bits) -> bytes:
        where = np.flatnonzero(old != new)
        gaps = np.diff(where, prepend=-1) - 1
        far = gaps >= 65535
        values = (old ^ new)[where]
        escapes = gaps[far].astype(np.uint64)
        head = struct.pack("<qq", where.size, escapes.size)
        narrow = np.where(far, 65535, gaps).astype(np.uint16)
        return _zstd(head + escapes.tobytes() + narrow.tobytes() + values.tobytes())

    def decode(self, payload: bytes, old: Bits) -> Bits:
        data = _unzstd(payload)
        count, num_far = struct.unpack_from("<qq", data)
        gaps = np.frombuffer(data, np.uint16, count, 16 + 8 * num_far).astype(np.int64)
        gaps[gaps == 65535] = np.frombuffer(data, np.uint64, num_far, 16).astype(np.int64)
        where = np.cumsum(gaps + 1) - 1
        old[where] ^= np.frombuffer(data, np.uint16, count, 16 + 8 * num_far + 2 * count)
        return old


class ByteGapZstd(Candidate):
    """The strongest of the plain ones: byte gaps with a 255 escape and ULP steps as bytes, each zstd-1."""

    name = "byte gap, ULP + zstd-1"

    @staticmethod
    def _ordered(bits: Bits) -> npt.NDArray[np.int32]:
        wide = bits.astype(np.int32)
        return np.where(wide & 0x8000, ~wide & 0xFFFF, wide | 0x8000)

    @staticmethod
    def _escaped(values: npt.NDArray[np.int64]) -> bytes:
        far = values >= 255
        narrow = np.where(far, 255, values).astype(np.uint8)
        body = _zstd(narrow.tobytes()), _zstd(values[far].astype(np.uint32).tobytes())
        return struct.pack("<II", len(body[0]), len(body[1])) + body[0] + body[1]

    @staticmethod
    def _unescaped(data: bytes, start: int) -> tuple[npt.NDArray[np.int64], int]:
        first, second = struct.unpack_from("<II", data, start)
        at = start + 8
        values = np.frombuffer(_unzstd(data[at : at + first]), np.uint8).astype(np.int64)
        at += first
        values[values == 255] = np.frombuffer(_unzstd(data[at : at + second]), np.uint32)
        return values, at + second

    def encode(self, old: Bits, new: Bits) -> bytes:
        where = np.flatnonzero(old != new)
        gaps = np.diff(where, prepend=-1) - 1
        steps = (self._ordered(new[where]) - self._ordered(old[where])).astype(np.int64)
        folded = np.where(steps > 0, 2 * (steps - 1), -2 * steps - 1)
        return self._escaped(gaps) + self._escaped(folded)

    def decode(self, payload: bytes, old: Bits) -> Bits:
        gaps, at = self._unescaped(payload, 0)
        folded, _ = self._unescaped(payload, at)
        where = np.cumsum(gaps + 1) - 1
        steps = np.where(folded % 2 == 0, folded // 2 + 1, -(folded + 1) // 2)
        ordered = self._ordered(old[where]) + steps
        old[where] = np.where(ordered & 0x8000, ordered & 0x7FFF, ~ordered & 0xFFFF)
        return old


BASELINES = (IndexValue, XorZstd, OverwriteZstd, Gap16Zstd, ByteGapZstd)
