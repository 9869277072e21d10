"""Every dtype and adversarial case comes through bit for bit, in every variant and kernel."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from codec.helpers import decoded, encoded, flat, meta_of, round_trip
from weightsync import native_delta, workloads
from weightsync.codec import Variant, block_digests, encode_tensor
from weightsync.codec.spans import spans_of
from weightsync.native_delta import BLOCK_ELEMENTS, SPAN_ELEMENTS
from weightsync.types import ITEM_BYTES, TensorMeta

ADVERSARIAL = workloads.adversarial()
VARIANTS = list(Variant)


@pytest.fixture(params=["native", "portable"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    native_delta.use_portable(request.param == "portable")
    yield request.param
    native_delta.use_portable(False)


def random_pair(dtype: str, count: int, share: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Any bits, and others in a share of the bytes."""
    random = np.random.default_rng([seed, count])
    old = random.integers(0, 256, count * ITEM_BYTES[dtype], dtype=np.uint8)
    change = random.integers(1, 256, old.size, dtype=np.uint8)
    return old, old ^ np.where(random.random(old.size) < share, change, 0).astype(np.uint8)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_every_dtype(dtype: str, variant: Variant) -> None:
    for count in (1, 63, 64, 65, 5000):
        for share in (0.0, 0.003, 0.2, 0.8, 1.0):
            old, new = random_pair(dtype, count, share)
            round_trip(dtype, old, new, variant)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", list(ADVERSARIAL))
def test_adversarial_bf16(case: str, variant: Variant) -> None:
    old, new = ADVERSARIAL[case]
    round_trip("bfloat16", old, new, variant)
    round_trip("float16", old, new, variant)
    wide = np.uint32(16)
    round_trip("float32", old.astype(np.uint32) << wide, new.astype(np.uint32) << wide, variant)
    for dtype in ("float8_e4m3fn", "float8_e5m2", "uint8"):
        round_trip(dtype, (old >> 4).astype(np.uint8), (new >> 4).astype(np.uint8), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_several_blocks_and_a_rest(variant: Variant) -> None:
    old = workloads.drawn_matrix(3, BLOCK_ELEMENTS, 1).reshape(-1)[: 2 * BLOCK_ELEMENTS + 77]
    new = workloads.quick_change(old, 2)
    new[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS] = old[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS]
    round_trip("bfloat16", old, new, variant)
    new[:BLOCK_ELEMENTS] = np.random.default_rng(3).integers(0, 65536, BLOCK_ELEMENTS)
    round_trip("bfloat16", old, new, variant)


def test_spans_without_changes_have_no_record() -> None:
    old = np.zeros(2 * SPAN_ELEMENTS + 9, dtype=np.uint8)
    new = old.copy()
    new[-1] = 1
    meta = meta_of(old, "uint8")
    records, digest = encoded(meta, old, new)
    assert [place.start_element for place, _ in records] == [2 * SPAN_ELEMENTS]
    assert (decoded(meta, records, old, digest) == new).all()
    assert encoded(meta, old, old)[0] == []


def test_both_kernels_write_the_same_bytes() -> None:
    old = workloads.drawn_matrix(1, BLOCK_ELEMENTS + 1000, 5)
    pairs = {"plain": (old, workloads.quick_change(old, 6)), **ADVERSARIAL}
    for name, (before, after) in pairs.items():
        found = []
        for is_portable in (False, True):
            native_delta.use_portable(is_portable)
            meta = meta_of(flat(before), "bfloat16")
            found.append([r.tobytes() for _, r in encoded(meta, flat(before), flat(after))[0]])
        native_delta.use_portable(False)
        assert found[0] == found[1], name


def test_an_empty_tensor_has_no_spans() -> None:
    meta = TensorMeta("t", "bfloat16", (0, 4))
    empty = np.zeros(0, dtype=np.uint8)
    digests = block_digests(meta, empty)
    assert list(encode_tensor(meta, empty, empty, digests)) == []


def test_positions_beyond_32_bits() -> None:
    """A tensor of 6 G elements: only its last span, whose header carries where it stands."""
    meta = TensorMeta("t", "bfloat16", (6 << 30,))
    *_, place = spans_of(meta)
    assert place.start_element + place.num_elements == 6 << 30
    near = place._replace(start_element=2**33)
    random = np.random.default_rng(1)
    old = random.integers(0, 65536, 70_000).astype(np.uint16)
    new = old.copy()
    new[[0, 65_535, 65_536, 69_999]] ^= 3
    far = near._replace(num_elements=old.size)
    front = np.zeros(native_delta.record_capacity(far), dtype=np.uint8)
    dense = np.zeros(far.num_bytes, dtype=np.uint8)
    digests, after = np.zeros(2, dtype=np.uint64), np.zeros(2, dtype=np.uint64)
    native_delta.block_digests(far, old.ctypes.data, digests.ctypes.data)
    native_delta.block_digests(far, new.ctypes.data, after.ctypes.data)
    native_delta.encode(
        far,
        (old.ctypes.data, new.ctypes.data),
        (front.ctypes.data, dense.ctypes.data, digests.ctypes.data),
        is_absolute=False,
        is_dense=False,
    )
    assert (digests == after).all()
    assert int.from_bytes(front[8:16].tobytes(), "little") == 2**33
    moved = far._replace(start_element=0)  # and the digest knows where it was
    native_delta.block_digests(moved, new.ctypes.data, after.ctypes.data)
    assert (digests != after).all()


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(["bfloat16", "float32", "float8_e4m3fn", "int32", "bool"]),
    count=st.integers(1, 3000),
    share=st.sampled_from([0.0005, 0.01, 0.1, 0.5, 1.0]),
    near=st.booleans(),
    seed=st.integers(0, 2**32),
    variant=st.sampled_from(VARIANTS),
)
def test_round_trips(
    dtype: str, count: int, share: float, near: bool, seed: int, variant: Variant
) -> None:
    old, new = random_pair(dtype, count, share, seed)
    if near:  # small steps about few values, as weights have them
        old = old % 7 + 40
        new = np.where(old != new, old + 1, old)
    round_trip(dtype, old, new.astype(np.uint8), variant)


def test_sizes_on_the_generator() -> None:
    """Bits a changed element, blocks' index and headers included."""
    old = workloads.drawn_matrix(512, 512, 1)
    tensor = workloads.AdamTensor(old, workloads.AdamOptions(), seed=5)
    for step in range(1, 61):
        new = tensor.step()
        limit = {1: 3.5, 10: 7.0, 60: 8.2}.get(step)
        if limit is not None:
            bits = 8 * round_trip("bfloat16", old, new) / np.count_nonzero(old != new)
            assert bits <= limit, f"step {step}"
        old = new
    new = workloads.random_mask(old, 0.01, 3)
    assert 8 * round_trip("bfloat16", old, new) / np.count_nonzero(old != new) <= 10.8
    noise = np.random.default_rng(1).integers(0, 65536, old.size).astype(np.uint16)
    assert round_trip("bfloat16", old, noise) <= old.nbytes * 1.01
