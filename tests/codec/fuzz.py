"""Forged records: damaged, then sealed anew, so that only the decoder's own checks are left.

    python tests/codec/fuzz.py [SECONDS] [SEED]

runs for long; under a build with ``-C cmake.define.WEIGHTSYNC_SANITIZE=ON`` it finds any over-read.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from codec.helpers import encoded, flat, meta_of
from weightsync import native_delta, workloads
from weightsync.codec import Variant, block_digests, decode_record
from weightsync.codec.packed import unpack_records
from weightsync.codec.spans import Bytes, Digests
from weightsync.errors import IntegrityError
from weightsync.native_delta import Place, TensorForm
from weightsync.types import TensorMeta

Case = tuple[Place, Bytes, Bytes, Digests]
_HEADER_BYTES = 64


def cases() -> list[Case]:
    """Honest records of every mode and width: place, record, base, its block digests."""
    old = workloads.drawn_matrix(1, 70_000, 1)
    noise = np.random.default_rng(2).integers(0, 65536, old.size).astype(np.uint16)
    pairs = [
        ("bfloat16", old, workloads.quick_change(old, 3)),
        ("bfloat16", old[:, :900], workloads.quick_change(old, 3, rate=2**-10)[:, :900]),
        (
            "float32",
            old.astype(np.uint32) << 16,
            workloads.quick_change(old, 4).astype(np.uint32) << 16,
        ),
        ("float8_e4m3fn", (old >> 4).astype(np.uint8), (noise >> 4).astype(np.uint8)),
        ("int32", old.astype(np.uint32), workloads.random_mask(old, 0.01, 5).astype(np.uint32)),
        ("bfloat16", old, noise),
    ]
    found = []
    for dtype, before, after in pairs:
        base = flat(before)
        meta = meta_of(base, dtype)
        for variant in Variant:
            ((place, record),) = encoded(meta, base, flat(after), variant)[0]
            found.append((place, record, base, block_digests(meta, base)))
    return found


def forged(record: Bytes, random: np.random.Generator) -> Bytes:
    """Some bits flipped, bytes replaced or a run repeated, more often near the front; sealed."""
    damaged = record.copy()
    for _ in range(int(random.integers(1, 5))):
        reach = int(random.choice([_HEADER_BYTES, min(256, record.size), record.size]))
        at = int(random.integers(4, reach))
        kind = random.integers(0, 4)
        if kind == 0:
            damaged[at] ^= np.uint8(1 << random.integers(0, 8))
        elif kind == 1:
            damaged[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            length = int(random.integers(1, 32))
            damaged[at : at + length] = random.integers(0, 256)
        else:
            rest = damaged[at:].copy()
            shift = int(random.integers(1, 16))
            damaged[at : at + max(rest.size - shift, 0)] = rest[shift:]
    checksum = native_delta.checksum(damaged.ctypes.data, damaged.size)
    damaged[56:64] = np.array([checksum], dtype=np.uint64).view(np.uint8)
    return damaged


def fuzz(seed: int, limit_s: float) -> tuple[int, int]:
    """(records tried, refused). Whatever is not refused must digest to what the record promises."""
    random, honest = np.random.default_rng(seed), cases()
    tried = refused = 0
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        place, record, base, digests = honest[tried % len(honest)]
        is_portable = bool(random.integers(0, 4) == 0)
        native_delta.use_portable(is_portable)
        found = digests.copy()
        tried += 1
        try:
            changes = decode_record(
                place, forged(record, random), base, found, are_digests_known=True
            )
        except IntegrityError:
            refused += 1
            continue
        if changes.count > place.num_elements:
            raise AssertionError(f"{changes.count} changes of {place.num_elements} elements")
        if changes.count and int(changes.positions.max()) >= place.num_elements:
            raise AssertionError("a position outside its span")
    native_delta.use_portable(False)
    return tried, refused


# --- packed -------------------------------------------------------------------------------------------


def forged_packed(
    meta: TensorMeta, digest: int, packed: Bytes, num_bytes: int, random: np.random.Generator
) -> Bytes | None:
    """The records that damaged packed ones become once their checksum fits; None if they are refused
    before it is looked at. The checksum of a record with one span is found by trying: that it is wrong
    is said with the records in place."""
    damaged = packed.copy()
    at = int(random.integers(0, packed.size))
    damaged[at] = random.integers(0, 256)
    records: Bytes = np.zeros(num_bytes, dtype=np.uint8)
    try:
        unpack_records(meta, digest, damaged, records)
    except IntegrityError as error:
        if "checksum" not in str(error):
            return None
    records[56:64] = 0
    checksum = native_delta.checksum(records.ctypes.data, records.size)
    records[56:64] = np.array([checksum], dtype=np.uint64).view(np.uint8)
    return records


def fuzz_packed(seed: int, limit_s: float) -> tuple[int, int]:
    """(packed records tried, refused), of any bytes and of any sizes that a manifest may say. Beyond their
    room nothing is written; a sanitizer sees what is read."""
    random, honest = np.random.default_rng(seed), []
    for place, record, _, _ in cases():
        digest = int(record[48:56].view(np.uint64)[0])
        form = TensorForm(place.kind, place.word_bytes, place.num_elements, digest)
        packed = native_delta.pack(form, record.tobytes())
        if packed:
            honest.append((form, np.frombuffer(packed, dtype=np.uint8), record.size))
    tried = refused = 0
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        form, packed, num_bytes = honest[tried % len(honest)]
        damaged = packed.copy()
        for _ in range(int(random.integers(1, 5))):
            at = int(random.integers(0, min(random.choice([16, 64, packed.size]), packed.size)))
            length = int(random.choice([1, 1, 1, 8]))
            damaged[at : at + length] = random.choice([0, 1, 0x7F, 0x80, 0xFF])
        if random.integers(0, 4) == 0:
            damaged = damaged[: int(random.integers(0, damaged.size + 1))].copy()
        if random.integers(0, 4) == 0:
            num_bytes = int(random.integers(0, 2 * num_bytes))
        room = np.full(num_bytes + 64, 0xA5, dtype=np.uint8)
        tried += 1
        try:
            native_delta.unpack(form, damaged, room[:num_bytes])
        except IntegrityError:
            refused += 1
        if not (room[num_bytes:] == 0xA5).all():
            raise AssertionError("written beyond its room")
    return tried, refused


if __name__ == "__main__":
    arguments = [float(a) for a in sys.argv[1:]]
    limit_s, seed = [*arguments, *(3600.0, time.time())[len(arguments) :]]
    print(f"seed {int(seed)}, {limit_s:.0f} s", flush=True)
    print("tried {}, refused {}".format(*fuzz(int(seed), limit_s / 2)))
    print("packed: tried {}, refused {}".format(*fuzz_packed(int(seed), limit_s / 2)))
