"""Weights as reinforcement learning changes them, drawn: what deltas are measured and tested on.

bf16 can show only moves of about 1/256 of a weight, and Adam moves every weight by about the learning
rate; so which elements change between two steps is decided by their exponents. These workloads run
AdamW on fp32 masters and hand out the bf16 casts. The same seed gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Bits16 = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

_BLOCK = 1 << 20


def to_bf16(values: Floats) -> Bits16:
    """The bits of the nearest bf16, ties to even; finite values."""
    bits = values.view(np.uint32)
    rounded: Bits16 = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def from_bf16(bits: Bits16) -> Floats:
    """The values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class AdamOptions:
    """AdamW, and the gradients it sees: a persistent mean (``signal`` deviations) and white noise."""

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    signal: float = 0.3
    step_deviation: float = 0.3  # of the log of each step's gradient scale
    is_on_grid: bool = True  # masters start from the cast values


@dataclass
class AdamTensor:
    """One matrix under AdamW. ``frozen_rows`` get no gradient: unseen tokens, unrouted experts."""

    weights: Bits16
    options: AdamOptions
    seed: int
    frozen_rows: npt.NDArray[np.bool_] | None = None
    num_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._random = np.random.Generator(np.random.SFC64(self.seed))
        self._master = from_bf16(self.weights).copy()
        if not self.options.is_on_grid:
            shape = self._master.shape
            jitter = self._random.random(shape, dtype=np.float32) - np.float32(0.5)
            spacing = np.abs(np.spacing(self._master)) * np.float32(2**16)
            self._master += jitter * spacing
        self._mean = self._random.standard_normal(self._master.shape, dtype=np.float32)
        self._mean *= np.float32(self.options.signal)
        self._first = np.zeros_like(self._master)
        self._second = np.zeros_like(self._master)

    def step(self) -> Bits16:
        """One optimizer step; the new weights, an array of their own."""
        o, self.num_steps = self.options, self.num_steps + 1
        scale = np.float32(np.exp(self._random.standard_normal() * o.step_deviation))
        gradient = self._random.standard_normal(self._master.shape, dtype=np.float32)
        gradient += self._mean
        gradient *= scale
        if self.frozen_rows is not None:
            gradient[self.frozen_rows] = 0
        self._first *= np.float32(o.beta1)
        self._first += np.float32(1 - o.beta1) * gradient
        self._second *= np.float32(o.beta2)
        gradient *= gradient
        self._second += np.float32(1 - o.beta2) * gradient
        corrected = o.learning_rate / (1 - o.beta1**self.num_steps)
        root = np.sqrt(self._second, out=gradient)
        root *= np.float32(1 / np.sqrt(1 - o.beta2**self.num_steps))
        root += np.float32(o.epsilon)
        moved = np.divide(self._first, root, out=root)
        moved *= np.float32(corrected)
        if self.frozen_rows is not None:
            moved[self.frozen_rows] = 0
        else:
            self._master *= np.float32(1 - o.learning_rate * o.weight_decay)
        self._master -= moved
        self.weights = to_bf16(self._master)
        return self.weights


def drawn_matrix(rows: int, columns: int, seed: int, deviation: float = 0.02) -> Bits16:
    """bf16 bits [rows, columns]: normal, with log-normal scales of rows and columns."""
    random = np.random.Generator(np.random.SFC64(seed))
    values = random.standard_normal((rows, columns), dtype=np.float32)
    values *= np.float32(deviation)
    values *= np.exp(random.standard_normal((rows, 1), dtype=np.float32) * np.float32(0.2))
    values *= np.exp(random.standard_normal((1, columns), dtype=np.float32) * np.float32(0.2))
    return to_bf16(values)


def small_model(seed: int = 0, size: int = 256) -> dict[str, Bits16]:
    """Every kind of tensor in a model, small: projections of several deviations, a Student-t one, an
    embedding, norms about 1, biases of +0 and -0, one element, none."""
    random = np.random.Generator(np.random.SFC64([seed, 1]))
    heavy = random.standard_t(4, (size, size)).astype(np.float32) * np.float32(0.02)
    zeros = np.zeros(size, dtype=np.uint16)
    zeros[::2] = 0x8000
    found = {"embed.weight": drawn_matrix(4 * size, size, seed + 2, 0.03)}
    for i, deviation in enumerate((0.015, 0.02, 0.03)):
        found[f"layers.{i}.proj.weight"] = drawn_matrix(size, 4 * size, seed + 3 + i, deviation)
        norm = 1 + random.standard_normal(size).astype(np.float32) * np.float32(0.05)
        found[f"layers.{i}.norm.weight"] = to_bf16(norm)
    found |= {
        "heavy.weight": to_bf16(heavy),
        "bias": zeros,
        "scale": to_bf16(np.ones(1, np.float32)),
    }
    return found | {"empty": np.zeros((0, 4), dtype=np.uint16)}


def versions(
    weights: dict[str, Bits16], options: AdamOptions, seed: int = 0
) -> Iterator[dict[str, Bits16]]:
    """The model after each step, endlessly. Half of the rows of an embedding are never seen."""
    tensors = {}
    for i, (name, bits) in enumerate(weights.items()):
        frozen = None
        if "embed" in name:
            frozen = np.arange(bits.shape[0]) % 2 == 0
        tensors[name] = AdamTensor(bits, options, seed * 1000 + i, frozen)
    while True:
        yield {name: tensor.step() for name, tensor in tensors.items()}


def quick_change(
    old: Bits16, seed: int, rate: float = 2**-15.4, learning_rate: float = 1e-6
) -> Bits16:
    """A steady-state step without an optimizer, for tensors too large to hold one: an element changes
    with P = min(1, ``rate`` / 2^E), by max(1, learning_rate / ULP, blurred) ULPs of either sign."""
    flat = old.reshape(-1)
    new = flat.copy()
    random = np.random.Generator(np.random.SFC64(seed))
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK]
        exponents = ((part >> 7) & 0xFF).astype(np.int32) - 127
        chance = np.minimum(1.0, rate * np.exp2(-exponents.astype(np.float32)))
        where = np.flatnonzero(random.random(part.size, dtype=np.float32) < chance)
        ulps = learning_rate * 0.25 * np.exp2(7.0 - exponents[where])
        blurred = ulps * np.abs(1 + random.standard_normal(where.size))
        steps = np.clip(np.rint(blurred), 1, 1 << 14).astype(np.int32)
        steps *= np.where(random.random(where.size) < 0.5, -1, 1)
        new[start + where] = _stepped(part[where], steps)
    return new.reshape(old.shape)


def random_mask(old: Bits16, share: float, seed: int) -> Bits16:
    """Steps of one ULP at a share of positions that depends on nothing: the honest worst case."""
    random = np.random.Generator(np.random.SFC64(seed))
    flat = old.reshape(-1).copy()
    where = np.flatnonzero(random.random(flat.size, dtype=np.float32) < share)
    steps = np.where(random.random(where.size) < 0.5, -1, 1).astype(np.int32)
    flat[where] = _stepped(flat[where], steps)
    return flat.reshape(old.shape)


def _stepped(bits: Bits16, steps: npt.NDArray[np.int32]) -> Bits16:
    """Bits that lie ``steps`` further in the order of values."""
    wide = bits.astype(np.int32)
    ordered = np.where(wide & 0x8000, ~wide & 0xFFFF, wide | 0x8000) + steps
    ordered &= 0xFFFF
    back = np.where(ordered & 0x8000, ordered & 0x7FFF, ~ordered & 0xFFFF)
    found: Bits16 = back.astype(np.uint16)
    return found


def adversarial(size: int = 5000) -> dict[str, tuple[Bits16, Bits16]]:
    """Old and new bf16 bits that break codecs which look at values instead of bits."""
    random = np.random.Generator(np.random.SFC64(11))
    plain = to_bf16(random.standard_normal(size).astype(np.float32) * np.float32(0.02))
    every_bit = np.arange(65536, dtype=np.uint16)
    one = plain.copy()
    one[size // 2] ^= 1
    ends = plain.copy()
    ends[[0, -1]] ^= 1
    sprinkled = plain.copy()
    sprinkled[::7] = 0x7F80
    sprinkled[3::7] = 0xFF80
    payloads = np.resize(np.array([0x7FC0, 0x7F81, 0xFFFF, 0x7FFF], np.uint16), size)
    zeros = np.resize(np.array([0x0000, 0x8000], np.uint16), size)
    subnormal = np.resize(np.arange(1, 128, dtype=np.uint16), size)
    return {
        "none": (plain, plain.copy()),
        "one": (plain, one),
        "first and last": (plain, ends),
        "all by one": (plain, _stepped(plain, np.ones(size, np.int32))),
        "all random": (plain, random.integers(0, 65536, size).astype(np.uint16)),
        "infinities": (plain, sprinkled),
        "from infinity": (sprinkled, plain),
        "NaN payloads": (payloads, np.roll(payloads, 1)),
        "zeros change sign": (zeros, zeros ^ np.uint16(0x8000)),
        "subnormals": (subnormal, subnormal + np.uint16(1)),
        "every pattern reversed": (every_bit, every_bit[::-1].copy()),
        "sign of all": (every_bit, every_bit ^ np.uint16(0x8000)),
    }
