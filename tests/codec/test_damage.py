"""What is damaged, or does not fit its base, is refused before anything is applied."""

from __future__ import annotations

import numpy as np
import pytest

from codec.fuzz import fuzz
from codec.helpers import decoded, encoded, flat, meta_of
from weightsync import native_delta, workloads
from weightsync.codec import Variant, block_digests, decode_record, decode_tensor
from weightsync.errors import IntegrityError, LayoutError

OLD = workloads.drawn_matrix(20, 200, 1)
NEW = workloads.quick_change(OLD, 2, rate=2**-12)
META = meta_of(flat(OLD), "bfloat16")


@pytest.mark.parametrize("variant", list(Variant))
def test_any_changed_byte_is_detected(variant: Variant) -> None:
    records, digest = encoded(META, flat(OLD), flat(NEW), variant)
    ((place, record),) = records
    for at in range(record.size):
        for change in (1, 0x80):
            damaged = record.copy()
            damaged[at] ^= change
            with pytest.raises(IntegrityError):
                decoded(META, [(place, damaged)], flat(OLD), digest)


def test_any_length_is_detected() -> None:
    ((place, record),), digest = encoded(META, flat(OLD), flat(NEW))
    for length in range(record.size):
        with pytest.raises(IntegrityError):
            decoded(META, [(place, record[:length].copy())], flat(OLD), digest)
    with pytest.raises(IntegrityError):
        decoded(META, [(place, np.append(record, np.zeros(8, np.uint8)))], flat(OLD), digest)


@pytest.mark.parametrize("at", [0, 1777, 3999])
def test_a_base_that_differs_in_one_element_is_refused(at: int) -> None:
    records, digest = encoded(META, flat(OLD), flat(NEW))
    base = OLD.reshape(-1).copy()
    base[at] ^= 1
    with pytest.raises(IntegrityError, match="base"):
        decoded(META, records, flat(base), digest)


def test_applying_twice_is_refused() -> None:
    records, digest = encoded(META, flat(OLD), flat(NEW))
    with pytest.raises(IntegrityError):
        decoded(META, records, flat(NEW), digest)


def test_an_absolute_record_may_be_applied_to_what_is_half_done() -> None:
    records, digest = encoded(META, flat(OLD), flat(NEW), Variant.ABSOLUTE)
    half = flat(OLD)
    half[: half.size // 2] = flat(NEW)[: half.size // 2]
    assert (decoded(META, records, half, digest) == flat(NEW)).all()
    assert (decoded(META, records, flat(NEW), digest) == flat(NEW)).all()


def test_a_record_of_another_place_is_refused() -> None:
    ((place, record),), _ = encoded(META, flat(OLD), flat(NEW))
    digests = np.zeros(place.num_blocks, dtype=np.uint64)
    for other in (
        place._replace(start_element=native_delta.BLOCK_ELEMENTS),
        place._replace(seed=place.seed ^ 1),
        place._replace(kind=native_delta.Kind.BYTES, num_elements=2 * place.num_elements),
    ):
        with pytest.raises(IntegrityError):
            decode_record(other, record, flat(OLD), digests)


def test_memory_that_changed_behind_known_digests_is_seen_by_the_full_check() -> None:
    ((place, record),), _ = encoded(META, flat(OLD), flat(NEW))
    known = block_digests(META, flat(OLD))
    untouched = int(np.flatnonzero((OLD == NEW).reshape(-1))[0])
    base = OLD.reshape(-1).copy()
    base[untouched] ^= 0x4000
    with pytest.raises(IntegrityError):
        decode_record(place, record, flat(base), known.copy(), are_digests_known=False)


def test_a_dense_section_cannot_claim_memory() -> None:
    zstandard = pytest.importorskip("zstandard")
    noise = np.random.default_rng(1).integers(0, 65536, OLD.size).astype(np.uint16)
    noise[: noise.size // 2] = 7  # so that planes compress
    ((place, record),), _ = encoded(META, flat(OLD), flat(noise))
    assert record[7] == 1
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    dense_bytes = int(record[40:44].view(np.uint32)[0])
    start = record.size - (dense_bytes + 7) // 8 * 8
    forged = np.concatenate(
        [record[:start], np.frombuffer(bomb + bytes(-len(bomb) % 8), dtype=np.uint8)]
    )
    forged[40:44] = np.array([len(bomb)], np.uint32).view(np.uint8)
    checksum = native_delta.checksum(forged.ctypes.data, forged.size)
    forged[56:64] = np.array([checksum], np.uint64).view(np.uint8)
    with pytest.raises(IntegrityError, match="dense planes"):
        decode_record(place, forged, flat(OLD), np.zeros(place.num_blocks, np.uint64))


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(LayoutError, match="expected contiguous uint8"):
        block_digests(META, flat(OLD)[:-2])
    records, _ = encoded(META, flat(OLD), flat(NEW))
    with pytest.raises(LayoutError):
        list(decode_tensor(META, records, flat(OLD)[2:], block_digests(META, flat(OLD))))


def test_positions_outside_are_never_written() -> None:
    target = np.zeros(8, dtype=np.uint8)
    positions, values = np.array([1, 8], dtype=np.uint32), np.ones(2, dtype=np.uint8)
    with pytest.raises(IntegrityError, match="position 8 of 8"):
        native_delta.scatter(
            native_delta.Kind.BYTES, (target.ctypes.data, 8), positions.ctypes.data,
            values.ctypes.data, 2,
        )  # fmt: skip
    assert not target.any()


def test_the_decoder_survives_forged_records() -> None:
    """Damage with a valid checksum, so that the codes themselves are hostile; seeded."""
    tried, refused = fuzz(seed=1, limit_s=3.0)
    assert tried > 200
    assert refused > tried // 2
