"""Records that a device codes are those of the CPU, byte for byte; its twin runs the same code here."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.codec.helpers import flat, meta_of
from weightsync import native
from weightsync.codec import block_digests, encode_tensor
from weightsync.codec.device_encode import DeviceSpans, Outcome, SpanEncoder
from weightsync.codec.spans import spans_of
from weightsync.device_tables import CPU, DeviceMemory, write_bytes

CUDA = "cuda:0"
DEVICES = [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)]
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
BLOCK, SPAN = 65536, 1 << 22


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param != CPU and not native.has_cuda():
        pytest.skip("no CUDA device, or a build without CUDA")
    return str(request.param)


class Held:
    """Bytes at a multiple of 16 on a device, or in this process."""

    def __init__(self, data: npt.NDArray[np.uint8], device: str) -> None:
        self._memory: Any
        if device == CPU:
            self._memory = np.empty(data.size + 16, dtype=np.uint8)
            at = -self._memory.ctypes.data % 16
            self._memory[at : at + data.size] = data
            self.ptr = self._memory.ctypes.data + at
        else:
            self._memory = DeviceMemory(data.size, device)
            self.ptr = self._memory.ptr
            write_bytes(self.ptr, data.tobytes(), device)

    def close(self) -> None:
        if isinstance(self._memory, DeviceMemory):
            self._memory.close()


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


def weights(dtype: str, size: int, seed: int) -> npt.NDArray[Any]:
    """Bits of drawn weights."""
    random = np.random.default_rng(seed)
    drawn = (random.standard_normal(size) * 0.02).astype(np.float32)
    if dtype == "float32":
        return drawn.view(np.uint32)
    if dtype == "bfloat16":
        return (drawn.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float16":
        return drawn.astype(np.float16).view(np.uint16)
    return (drawn.view(np.uint32) >> 20 & 0xFF).astype(np.uint8)


def stepped(old: npt.NDArray[Any], share: float, seed: int, longest: int = 3) -> npt.NDArray[Any]:
    """Some elements, small ones rather than large ones, some steps off."""
    random = np.random.default_rng(seed)
    mask = random.random(old.size) < share
    steps = random.integers(1, longest + 1, old.size) * random.choice([-1, 1], old.size)
    return np.where(mask, old.astype(np.int64) + steps, old).astype(old.dtype)


DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"]
#: One element, a vector's ends, a warp's, a block's, a span's.
SIZES = [1, 7, 16, 17, 255, 256, 257, 8191, 8193, BLOCK, BLOCK + 1, 5 * BLOCK - 9, SPAN + 70_003]


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
    old = weights(dtype, 2 * BLOCK + 33, 5)
    magnitude = old & (0x7FFFFFFF if dtype == "float32" else 0x7FFF)
    limit = np.quantile(magnitude, 0.04)
    random = np.random.default_rng(6)
    step = np.where(random.random(old.size) < 0.9, 5, random.integers(1, 200, old.size))
    new = np.where(magnitude < limit, old + step.astype(old.dtype), old).astype(old.dtype)
    assert check(dtype, old, new, device) == [Outcome.CODED]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(dtype: str, device: str) -> None:
    """NaNs, infinities, zeros of both signs, subnormals; steps as long as there are."""
    random = np.random.default_rng(8)
    kind = _UNSIGNED[weights(dtype, 1, 0).itemsize]
    top = np.iinfo(kind).max
    old = random.integers(0, top, 2 * BLOCK, dtype=kind, endpoint=True)
    new = old.copy()
    at = random.random(old.size) < 0.01
    new[at] = random.integers(0, top, int(at.sum()), dtype=kind, endpoint=True)
    new[:2], old[:2] = (0, top // 2 + 1), (top // 2 + 1, 0)
    check(dtype, old, new, device)


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


def test_a_step_of_adam_in_exponents(device: str) -> None:
    """Whether an element changes depends on its exponent: classes are made."""
    old = weights("bfloat16", SPAN, 13)
    random = np.random.default_rng(14)
    values = (old.astype(np.uint32) << 16).view(np.float32)
    p = np.minimum(1, 2e-5 / (np.abs(values) + 1e-9))
    mask = random.random(old.size) < p
    new = np.where(mask, old ^ np.uint16(1), old).astype(np.uint16)
    assert check("bfloat16", old, new, device) == [Outcome.CODED]


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
