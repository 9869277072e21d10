"""What a movement costs: fixed cost of a bucket and of a tensor, and a bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NOTHING = 1e-6  # of a movement


@dataclass(frozen=True)
class Sample:
    """One movement: how much of each, and how long (seconds)."""

    num_buckets: int
    num_tensors: int
    num_bytes: int
    seconds: float


def fit(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Least squares of ``seconds = buckets * a + tensors * b + bytes / c`` with a, b, 1/c >= 0.

    Terms that would come out negative are dropped one by one, the most negative first. ``gb_per_s``
    is None when the samples show no cost of bytes.
    """
    names = ["bucket_s", "tensor_s", "byte_s"]
    rows = np.array([[s.num_buckets, s.num_tensors, s.num_bytes] for s in samples], dtype=float)
    seconds = np.array([s.seconds for s in samples])
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-30)
    kept = list(range(3))
    found = np.zeros(3)
    while kept:
        solution, *_ = np.linalg.lstsq(rows[:, kept] / scale[kept], seconds, rcond=None)
        if (solution >= 0).all():
            found[kept] = solution / scale[kept]
            break
        kept.pop(int(np.argmin(solution)))
    found[found * scale < _NOTHING * np.mean(seconds)] = 0.0  # rounding, not a cost
    costs = dict(zip(names, map(float, found), strict=True))
    byte_s = costs.pop("byte_s")
    left = seconds - rows @ found
    error = float(np.sqrt(np.mean(left**2)) / max(np.mean(seconds), 1e-30))
    return {**costs, "gb_per_s": 1e-9 / byte_s if byte_s else None, "relative_error": error}
