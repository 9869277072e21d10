"""Packed records come back as they were, and what is damaged or forged does not come back at all."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from codec.fuzz import forged_packed, fuzz_packed
from codec.helpers import decoded, encoded, flat, meta_of
from weightsync import native_delta, workloads
from weightsync.codec import Variant
from weightsync.codec.packed import MAX_PACKED_RECORD_BYTES, pack_records, unpack_records
from weightsync.codec.spans import Bytes
from weightsync.errors import IntegrityError
from weightsync.native_delta import BLOCK_ELEMENTS, SPAN_ELEMENTS
from weightsync.types import ITEM_BYTES, TensorMeta

Packed = tuple[TensorMeta, int, Bytes, Bytes]


def joined(records: list[tuple[Any, Bytes]]) -> Bytes:
    return np.concatenate([record for _, record in records])


def packed_of(
    dtype: str, old: np.ndarray, new: np.ndarray, variant: Variant = Variant.EXACT
) -> Packed | None:
    """Meta, digest, records and packed records of a tensor that went round; None if it stays as it is."""
    before, after = flat(old), flat(new)
    meta = meta_of(before, dtype)
    records, digest = encoded(meta, before, after, variant)
    if not records:
        return None
    whole = joined(records)
    packed = pack_records(meta, digest, [record.tobytes() for _, record in records])
    if packed is None:
        assert whole.size > MAX_PACKED_RECORD_BYTES
        return None
    assert len(packed) < whole.size
    data = np.frombuffer(packed, dtype=np.uint8)
    assert (unpacked(meta, digest, data, whole.size) == whole).all()
    return meta, digest, whole, data


def unpacked(meta: TensorMeta, digest: int, packed: Bytes, num_bytes: int) -> Bytes:
    """Into exactly that room; a byte before or behind it is never touched."""
    room = np.full(num_bytes + 32, 0xA5, dtype=np.uint8)
    exact = packed.copy()  # so that a read beyond its end leaves its memory
    try:
        unpack_records(meta, digest, exact, room[16 : 16 + num_bytes])
    finally:
        assert (room[:16] == 0xA5).all()
        assert (room[16 + num_bytes :] == 0xA5).all()
    return room[16 : 16 + num_bytes]


@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_every_dtype(dtype: str, variant: Variant) -> None:
    random, num_packed = np.random.default_rng(1), 0
    for count in (1, 2, 63, 300, 5000):
        for share in (0.003, 0.2, 0.9, 1.0):
            old = random.integers(0, 256, count * ITEM_BYTES[dtype], dtype=np.uint8)
            change = random.integers(1, 256, old.size, dtype=np.uint8)
            new = old ^ np.where(random.random(old.size) < share, change, 0).astype(np.uint8)
            num_packed += packed_of(dtype, old, new, variant) is not None
    assert num_packed > 8


@pytest.mark.parametrize("case", list(workloads.adversarial()))
def test_adversarial_bf16(case: str) -> None:
    old, new = workloads.adversarial()[case]
    for variant in Variant:
        packed_of("bfloat16", old, new, variant)
        packed_of("uint8", (old >> 4).astype(np.uint8), (new >> 4).astype(np.uint8), variant)


@given(
    st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int64", "bool"]),
    st.integers(1, 3 * BLOCK_ELEMENTS),
    st.floats(0, 12),
    st.integers(0, 2**32),
    st.sampled_from(list(Variant)),
)
@settings(max_examples=80, deadline=None)
def test_any_tensor_goes_round(
    dtype: str, count: int, rarity: float, seed: int, variant: Variant
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, count * ITEM_BYTES[dtype], dtype=np.uint8)
    is_changed = rng.random(old.size) < 2.0**-rarity * min(1.0, 2000 / old.size)
    is_changed[rng.integers(0, old.size)] = True
    new = np.where(is_changed, old ^ 1, old).astype(np.uint8)
    found = packed_of(dtype, old, new, variant)
    if found is None:
        return
    meta, digest, whole, packed = found
    assert (unpacked(meta, digest, packed, whole.size) == whole).all()


@pytest.mark.parametrize("changed_spans", [[0], [1], [3], [0, 3], [1, 2], [0, 1, 2, 3]])
def test_spans_of_a_long_tensor(changed_spans: list[int]) -> None:
    """Some of four, the last one shorter; spans without changes have no record."""
    old = np.zeros(3 * SPAN_ELEMENTS + 1000, dtype=np.uint8)
    new = old.copy()
    for span in changed_spans:
        new[span * SPAN_ELEMENTS + 7 : span * SPAN_ELEMENTS + 999 : 300] = span + 1
    found = packed_of("uint8", old, new)
    assert found is not None
    _, digest, whole, packed = found
    assert packed.size < 0.7 * whole.size
    shorter = TensorMeta("t", "uint8", (changed_spans[-1] * SPAN_ELEMENTS,))
    with pytest.raises(IntegrityError, match=r"beyond the end|of 0 elements"):
        unpacked(shorter, digest, packed, whole.size)


def test_a_small_tensor_takes_a_few_bytes() -> None:
    old = workloads.drawn_matrix(1, 384, 1)
    new = old.copy()
    new[0, [5, 77, 300]] ^= 1
    found = packed_of("bfloat16", old, new)
    assert found is not None
    _, _, whole, packed = found
    assert whole.size >= 80
    assert packed.size <= 20


def test_what_is_long_stays_as_it_is() -> None:
    old = workloads.drawn_matrix(1, 90_000, 1)
    records, digest = encoded(
        meta_of(flat(old), "bfloat16"), flat(old), flat(workloads.random_mask(old, 0.3, 1))
    )
    assert joined(records).size > MAX_PACKED_RECORD_BYTES
    assert pack_records(meta_of(flat(old), "bfloat16"), digest, [r for _, r in records]) is None


def small() -> Packed:
    old = workloads.drawn_matrix(1, 400, 1)
    found = packed_of("bfloat16", old, workloads.quick_change(old, 2, rate=2**-12))
    assert found is not None
    return found


def two_blocks() -> Packed:
    old = workloads.drawn_matrix(1, 70_000, 1)
    found = packed_of("bfloat16", old, workloads.random_mask(old, 0.001, 2))
    assert found is not None
    return found


def dense() -> Packed:
    old = workloads.drawn_matrix(1, 300, 1)
    noise = np.random.default_rng(1).integers(0, 65536, old.size).astype(np.uint16)
    found = packed_of("bfloat16", old, noise)
    assert found is not None
    return found


CASES = [small, two_blocks, dense]


@pytest.mark.parametrize("case", CASES)
def test_any_changed_byte_is_detected(case: Any) -> None:
    meta, digest, whole, packed = case()
    for at in range(packed.size):
        for change in (1, 0x10, 0x80):
            damaged = packed.copy()
            damaged[at] ^= change
            with pytest.raises(IntegrityError):
                unpacked(meta, digest, damaged, whole.size)


@pytest.mark.parametrize("case", CASES)
def test_any_length_is_detected(case: Any) -> None:
    meta, digest, whole, packed = case()
    for length in range(packed.size):
        with pytest.raises(IntegrityError):
            unpacked(meta, digest, packed[:length], whole.size)
    for longer in (b"\0", b"\0" * 64, packed.tobytes()):
        more = np.concatenate([packed, np.frombuffer(longer, dtype=np.uint8)])
        with pytest.raises(IntegrityError):
            unpacked(meta, digest, more, whole.size)
    for size in range(0, whole.size + 64, 8):
        if size != whole.size:
            with pytest.raises(IntegrityError, match="than their manifest says"):
                unpacked(meta, digest, packed, size)


def test_records_of_another_tensor_are_refused() -> None:
    meta, digest, whole, packed = small()
    for other, wrong in (
        (meta, digest ^ 1),
        (TensorMeta(meta.name, "float32", meta.shape), digest),
        (TensorMeta(meta.name, meta.dtype, (399,)), digest),
        (TensorMeta(meta.name, meta.dtype, (2 * BLOCK_ELEMENTS,)), digest),
    ):
        with pytest.raises(IntegrityError, match="packed records"):
            unpacked(other, wrong, packed, whole.size)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record[:-8],
        lambda record: record[:60],
        lambda record: np.concatenate([record, record]),
        lambda record: np.concatenate([record, np.zeros(8, np.uint8)]),
        lambda record: np.concatenate([record[:56], record[56:64] ^ 1, record[64:]]),
        lambda record: np.concatenate([record[:8], record[8:9] ^ 1, record[9:]]),
        lambda record: np.concatenate([record[:28], record[28:29] ^ 0x10, record[29:]]),
        lambda record: np.concatenate([record[:48], record[48:49] ^ 1, record[49:]]),
    ],
)
def test_what_would_not_come_back_is_not_packed(change: Any) -> None:
    meta, digest, whole, _ = small()
    assert pack_records(meta, digest, [whole.tobytes()]) is not None
    assert pack_records(meta, digest, [change(whole).tobytes()]) is None


def test_forged_packed_records_never_decode_to_something_else() -> None:
    """With checksums that fit, so that only the record's own and the tensor's digest are left."""
    old = workloads.drawn_matrix(1, 400, 1)
    new = workloads.quick_change(old, 2, rate=2**-12)
    meta, digest, whole, packed = small()
    random, reached = np.random.default_rng(3), 0
    for _ in range(2000):
        records = forged_packed(meta, digest, packed, whole.size, random)
        if records is None:
            continue
        reached += 1
        place = encoded(meta, flat(old), flat(new))[0][0][0]
        try:
            found = decoded(meta, [(place, records)], flat(old), digest)
        except IntegrityError:
            continue
        assert (found == flat(new)).all()
    assert reached > 100


def test_unpacking_survives_forged_bytes() -> None:
    tried, refused = fuzz_packed(seed=1, limit_s=3.0)
    assert tried > 200
    assert refused > tried // 2


def test_a_form_that_cannot_be_is_refused() -> None:
    kind, room = native_delta.Kind.FLOAT16, np.zeros(64, dtype=np.uint8)
    for word_bytes, num_elements in ((2, 0), (2, 1 << 61), (3, 5), (1, 5)):
        form = native_delta.TensorForm(kind, word_bytes, num_elements, 0)
        with pytest.raises(ValueError, match=r"num_elements|word_bytes"):
            native_delta.unpack(form, room, room)
    form = native_delta.TensorForm(kind, 2, 400, 0)
    with pytest.raises(ValueError, match="dense"):
        native_delta.unpack(form, room[::2], room)
    with pytest.raises(ValueError, match="dense"):
        native_delta.unpack(form, room, room.view(np.uint16))
    room.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        native_delta.unpack(form, b"", room)
