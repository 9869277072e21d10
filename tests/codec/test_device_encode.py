"""Records that a device codes are those of the CPU, byte for byte; its twin runs the same code here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.codec.device_cases import (
    BLOCK,
    DTYPES,
    SIZES,
    SPAN,
    Held,
    adam_step,
    any_bits,
    small_ones_change,
    stepped,
    weights,
)
from tests.codec.helpers import flat, meta_of
from weightsync.codec import block_digests, encode_tensor
from weightsync.codec.device_encode import DeviceSpans, Outcome, SpanEncoder
from weightsync.codec.spans import spans_of


def check(
    dtype: str, old: npt.NDArray[Any], new: npt.NDArray[Any], device: str, capacity: int = 288
) -> list[Outcome]:
    """Outcomes by span; whatever was coded is what the CPU codes, digests too."""
    before, after = flat(old), flat(new)
    meta = meta_of(before, dtype)
    digests = block_digests(meta, before)
    expected_digests = digests.copy()
    expected = {
        place: bytes(record)
        for place, record in encode_tensor(meta, before, after, expected_digests)
    }
    held = Held(before, device), Held(after, device)
    encoder = SpanEncoder(device, capacity=capacity)
    places = list(spans_of(meta))
    width = places[0].kind.element_bytes
    spans = DeviceSpans(
        places,
        [held[0].ptr + p.start_element * width for p in places],
        [held[1].ptr + p.start_element * width for p in places],
        digests,
    )
    results = encoder.encode(spans, num_threads=2)
    for place, (outcome, record) in zip(places, results, strict=True):
        if outcome is Outcome.UNCHANGED:
            assert place not in expected
            assert record is None
        elif outcome is Outcome.CODED:
            assert record is not None
            assert bytes(record) == expected[place]
            first = place.start_element // BLOCK
            part = slice(first, first + place.num_blocks)
            assert (digests[part] == expected_digests[part]).all()
        else:
            assert record is None
    encoder.close()
    for memory in held:
        memory.close()
    return [outcome for outcome, _ in results]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(dtype: str, size: int, device: str) -> None:
    old = weights(dtype, size, size)
    new = stepped(old, 0.01, size + 1)
    new[size // 2] ^= 1
    new[-1] ^= 1
    outcomes = check(dtype, old, new, device)
    if size >= SPAN:
        assert set(outcomes) == {Outcome.CODED}


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.003, 0.02, 0.06, 0.2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shares(dtype: str, share: float, device: str) -> None:
    old = weights(dtype, 3 * BLOCK + 100, 3)
    outcomes = check(dtype, old, stepped(old, share, 4), device)
    if share in (0.003, 0.02) and dtype not in ("int8", "float8_e4m3fn"):
        assert outcomes == [Outcome.CODED]
    if share == 0:
        assert outcomes == [Outcome.UNCHANGED]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_small_ones_change_all(dtype: str, device: str) -> None:
    """As in a first step: gaps are those between the unchanged ones, steps are long and typical."""
    assert check(dtype, *small_ones_change(dtype, 0.04), device) == [Outcome.CODED]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(dtype: str, device: str) -> None:
    check(dtype, *any_bits(dtype), device)


@pytest.mark.parametrize("where", ["begin", "end", "row", "every", "one_warp"])
def test_crowds(where: str, device: str) -> None:
    """Changes that lie where a warp's stage is too small, or in one row."""
    old = weights("bfloat16", 4 * BLOCK, 9)
    new = old.copy()
    part = {
        "begin": slice(0, 3000),
        "end": slice(-3000, None),
        "row": slice(BLOCK + 256, BLOCK + 512),
        "every": slice(0, None, 64),
        "one_warp": slice(8192, 16384),
    }[where]
    new[part] += 1
    assert check("bfloat16", old, new, device) == [Outcome.CODED]
    assert check("bfloat16", old, new, device, capacity=8) == [Outcome.CODED]


def test_what_the_host_must_code(device: str) -> None:
    old = weights("bfloat16", 2 * BLOCK, 10)
    random = np.random.default_rng(11)
    noise = random.integers(0, 65535, old.size, dtype=np.uint16)
    assert check("bfloat16", old, noise, device) == [Outcome.DENSE_BLOCK]
    half = stepped(old, 0.5, 12, longest=100)
    assert check("bfloat16", old, half, device) == [Outcome.DENSE_SPAN]


@pytest.mark.parametrize("octaves", [0, 10, 60])
def test_a_step_of_adam_in_exponents(octaves: int, device: str) -> None:
    old, new = adam_step(octaves)
    assert check("bfloat16", old, new, device) == [Outcome.CODED]
    meta = meta_of(flat(old), "bfloat16")
    ((_, record),) = encode_tensor(meta, flat(old), flat(new), block_digests(meta, flat(old)))
    reached = [threshold >= 128 for threshold in record[64 : 64 + record[6]]]
    assert len(reached) >= 2
    assert (any(reached), all(reached)) == (octaves > 0, octaves == 60)


def test_addresses_are_checked(device: str) -> None:
    old = weights("bfloat16", 64, 1)
    meta = meta_of(flat(old), "bfloat16")
    (place,) = spans_of(meta)
    held = Held(flat(old), device)
    encoder = SpanEncoder(device)
    with pytest.raises(ValueError, match="multiple of 16"):
        encoder.encode(
            DeviceSpans([place], [held.ptr + 2], [held.ptr], block_digests(meta, flat(old)))
        )
    encoder.close()
    held.close()


def test_chunks_make_no_difference(device: str) -> None:
    """Spans of several tensors, two at a time on two cores, and all at once."""
    sizes = [70_000, 64, BLOCK, 5, 3 * BLOCK + 1, 900, 40_000]
    olds = [weights("bfloat16", n, n) for n in sizes]
    held = [(Held(flat(old), device), Held(flat(stepped(old, 0.01, 3)), device)) for old in olds]
    metas = [meta_of(flat(old), "bfloat16") for old in olds]
    places = [place for meta in metas for place in spans_of(meta)]
    found = []
    for chunk_spans in (2, 512):
        encoder = SpanEncoder(device, chunk_spans=chunk_spans)
        parts = [block_digests(m, flat(o)) for m, o in zip(metas, olds, strict=True)]
        spans = DeviceSpans(
            places, [a.ptr for a, _ in held], [b.ptr for _, b in held], np.concatenate(parts)
        )
        for _ in range(2):  # the second time in memory of the first
            spans.digests[:] = np.concatenate(parts)
            results = encoder.encode(spans, num_threads=2)
            found.append(
                ([(o, None if r is None else bytes(r)) for o, r in results], spans.digests.copy())
            )
            encoder.recycle(encoder.payload)
        encoder.close()
    assert any(record is not None for _, record in found[0][0])
    for results_, digests in found[1:]:
        assert results_ == found[0][0]
        assert (digests == found[0][1]).all()
    for pair in held:
        for memory in pair:
            memory.close()
