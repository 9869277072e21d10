"""Old and new bits for what codes and decodes on a device, and memory that it lies in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.device_tables import CPU, DeviceMemory, write_bytes

Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
BLOCK, SPAN = 65536, 1 << 22


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


DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"]
#: One element, a vector's ends, a warp's, a block's, a span's.
SIZES = [1, 7, 16, 17, 255, 256, 257, 8191, 8193, BLOCK, BLOCK + 1, 5 * BLOCK - 9, SPAN + 70_003]


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


def small_ones_change(dtype: str, share: float) -> Pair:
    """As in a first step: all small ones change, by steps that are long and typical."""
    old = weights(dtype, 2 * BLOCK + 33, 5)
    magnitude = old & (0x7FFFFFFF if dtype == "float32" else 0x7FFF)
    limit = np.quantile(magnitude, share)
    random = np.random.default_rng(6)
    step = np.where(random.random(old.size) < 0.9, 5, random.integers(1, 200, old.size))
    return old, np.where(magnitude < limit, old + step.astype(old.dtype), old).astype(old.dtype)


def any_bits(dtype: str) -> Pair:
    """NaNs, infinities, zeros of both signs, subnormals; steps as long as there are."""
    random = np.random.default_rng(8)
    kind = _UNSIGNED[weights(dtype, 1, 0).itemsize]
    top = np.iinfo(kind).max
    old = random.integers(0, top, 2 * BLOCK, dtype=kind, endpoint=True)
    new = old.copy()
    at = random.random(old.size) < 0.01
    new[at] = random.integers(0, top, int(at.sum()), dtype=kind, endpoint=True)
    new[:2], old[:2] = (0, top // 2 + 1), (top // 2 + 1, 0)
    return old, new


def adam_step(octaves: int = 0) -> Pair:
    """Whether an element changes depends on its exponent: classes are made. Of weights that are larger
    by so many octaves: from some on, keys do not fit 7 bits."""
    old = weights("bfloat16", SPAN, 13)
    random = np.random.default_rng(14)
    values = (old.astype(np.uint32) << 16).view(np.float32)
    p = np.minimum(1, 2e-5 / (np.abs(values) + 1e-9))
    mask = random.random(old.size) < p
    old = np.where(old & 0x7FFF, old + (octaves << 7), old).astype(np.uint16)
    return old, np.where(mask, old ^ np.uint16(1), old).astype(np.uint16)
