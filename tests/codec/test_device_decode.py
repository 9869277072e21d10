"""What a device decodes are the changes that the CPU's decoder finds; its twin runs the same code here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.codec.device_cases import (
    BLOCK,
    DTYPES,
    SIZES,
    Held,
    adam_step,
    any_bits,
    small_ones_change,
    stepped,
    weights,
)
from tests.codec.fuzz import cases, forged
from tests.codec.helpers import flat, meta_of
from weightsync.codec import Variant, block_digests, decode_record, encode_tensor
from weightsync.codec.device_decode import CodedSpans, Outcome, SpanDecoder
from weightsync.codec.spans import Bytes, Digests, span_bytes, span_digests
from weightsync.errors import IntegrityError
from weightsync.native_delta import Place

Records = list[tuple[Place, Bytes]]


def decode(records: Records, base: Bytes, digests: Digests, device: str) -> list[Outcome]:
    """Outcomes by span; of whatever was decoded changes and digests are the CPU's."""
    held = Held(base, device)
    decoder = SpanDecoder(device)
    places = [place for place, _ in records]
    parts = [span_digests(digests, place) for place in places]
    coded = CodedSpans(
        places,
        [record for _, record in records],
        [held.ptr + p.start_element * p.kind.element_bytes for p in places],
        np.concatenate([np.zeros(0, dtype=np.uint64), *parts]),
    )
    found = decoder.decode(coded)
    first = 0
    for i, (place, record) in enumerate(records):
        outcome, at = found.spans[i].outcome, slice(first, first + place.num_blocks)
        first += place.num_blocks
        if outcome is not Outcome.DECODED:
            assert outcome.reason
            continue
        expected_digests = parts[i].copy()
        expected = decode_record(
            place, record, span_bytes(base, place), expected_digests, are_digests_known=True
        )
        positions, values = found.changes(i, place)
        order = np.argsort(positions, kind="stable")
        width = place.kind.element_bytes
        expected_order = np.argsort(expected.positions, kind="stable")
        assert (positions[order] == expected.positions[expected_order]).all()
        assert (
            values.reshape(-1, width)[order] == expected.values.reshape(-1, width)[expected_order]
        ).all()
        assert (found.digests[at] == expected_digests).all()
    outcomes = [span.outcome for span in found.spans]
    found.close()
    decoder.close()
    held.close()
    return outcomes


def check(
    dtype: str,
    old: npt.NDArray[Any],
    new: npt.NDArray[Any],
    device: str,
    variant: Variant = Variant.EXACT,
) -> list[Outcome]:
    base = flat(old)
    meta = meta_of(base, dtype)
    digests = block_digests(meta, base)
    records = [
        (place, np.frombuffer(record, dtype=np.uint8))
        for place, record in encode_tensor(meta, base, flat(new), digests.copy(), variant=variant)
    ]
    return decode(records, base, digests, device)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(dtype: str, size: int, device: str) -> None:
    old = weights(dtype, size, size)
    new = stepped(old, 0.01, size + 1)
    new[0] ^= 1
    new[-1] ^= 2
    assert set(check(dtype, old, new, device)) <= {Outcome.DECODED, Outcome.FORM}
    if size > 300:
        assert Outcome.DECODED in check(dtype, old, new, device)


@pytest.mark.parametrize("share", [1e-5, 0.003, 0.02, 0.06, 0.2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shares(dtype: str, share: float, device: str) -> None:
    old = weights(dtype, 3 * BLOCK + 100, 3)
    outcomes = check(dtype, old, stepped(old, share, 4), device)
    if share < 0.03:
        assert outcomes == [Outcome.DECODED]
    if share == 0.06:
        assert outcomes in ([Outcome.CROWDED], [Outcome.FORM])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_most_of_a_class_changes(dtype: str, device: str) -> None:
    """As in a first step: what is listed did not change, steps are long and typical."""
    assert check(dtype, *small_ones_change(dtype, 0.02), device) == [Outcome.DECODED]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(dtype: str, device: str) -> None:
    check(dtype, *any_bits(dtype), device)


@pytest.mark.parametrize("where", ["begin", "end", "row", "every"])
def test_crowds(where: str, device: str) -> None:
    """Changes that lie side by side, or in one row."""
    old = weights("bfloat16", 4 * BLOCK, 9)
    new = old.copy()
    part = {
        "begin": slice(0, 2000),
        "end": slice(-2000, None),
        "row": slice(BLOCK + 256, BLOCK + 512),
        "every": slice(0, None, 64),
    }[where]
    new[part] += 1
    assert check("bfloat16", old, new, device) == [Outcome.DECODED]


@pytest.mark.parametrize("octaves", [0, 10, 60])
def test_a_step_of_adam_in_exponents(octaves: int, device: str) -> None:
    assert check("bfloat16", *adam_step(octaves), device) == [Outcome.DECODED]


def test_what_the_host_must_decode(device: str) -> None:
    old = weights("bfloat16", 2 * BLOCK, 10)
    noise = np.random.default_rng(11).integers(0, 65535, old.size, dtype=np.uint16)
    assert check("bfloat16", old, noise, device) == [Outcome.FORM]
    few = stepped(old, 0.01, 12)
    assert check("bfloat16", old, few, device, Variant.ABSOLUTE) == [Outcome.FORM]
    crowded = old.copy()
    crowded[: 4 * 2304 : 2] += 1
    assert check("bfloat16", old, crowded, device) == [Outcome.CROWDED]


def test_another_base_is_noticed(device: str) -> None:
    """One bit of one element that does not even change."""
    old = weights("bfloat16", 2 * BLOCK, 15)
    new = stepped(old, 0.01, 16)
    base = flat(old)
    meta = meta_of(base, "bfloat16")
    digests = block_digests(meta, base)
    records = [
        (place, np.frombuffer(record, dtype=np.uint8))
        for place, record in encode_tensor(meta, base, flat(new), digests.copy())
    ]
    other = old.copy()
    other[int(np.flatnonzero(old == new)[5])] ^= 1
    changed = flat(other)
    outcomes = decode(records, changed, block_digests(meta, changed), device)
    assert outcomes == [Outcome.DAMAGED]


def test_forged_records_are_refused_or_mean_what_they_mean_to_the_cpu(device: str) -> None:
    """Damaged and sealed anew. Nothing is read or written out of bounds: on a device a sanitizer says so."""
    random, honest = np.random.default_rng(17), cases()
    seen: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
    for i in range(600 if device == "cpu" else 120):
        place, record, base, digests = honest[i % len(honest)]
        damaged = forged(record, random)
        try:
            (outcome,) = decode([(place, damaged)], base, digests, device)
        except IntegrityError as error:  # of the CPU's decoder, which is the judge
            raise AssertionError(
                f"case {i}: the device took what the CPU refuses: {error}"
            ) from error
        seen[outcome] += 1
    assert seen[Outcome.DAMAGED] > 100 // (1 if device == "cpu" else 4)
    assert seen[Outcome.FORM]


def test_addresses_are_checked(device: str) -> None:
    old = weights("bfloat16", 640, 1)
    base = flat(old)
    meta = meta_of(base, "bfloat16")
    digests = block_digests(meta, base)
    new = stepped(old, 0.1, 2)
    ((place, record),) = list(encode_tensor(meta, base, flat(new), digests.copy()))
    held = Held(base, device)
    decoder = SpanDecoder(device)
    coded = CodedSpans([place], [np.frombuffer(record, dtype=np.uint8)], [held.ptr + 2], digests)
    with pytest.raises(ValueError, match="multiple of 16"):
        decoder.decode(coded)
    decoder.close()
    held.close()
