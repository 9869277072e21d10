"""Small words that tests on either end of a pair use; importing it is cheap, for child processes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.transports.base import SlotHeader
from weightsync.types import RegionAddress

Bytes = npt.NDArray[np.uint8]
LIMIT_S = 20.0
SHORT_S = 0.15


def deadline(limit_s: float = LIMIT_S, stage: str = "test", **more: Any) -> Deadline:
    return Deadline(limit_s, peer="the peer", stage=stage, **more)


def header(num_bytes: int, sequence: int = 0, session: str = "s1", **more: Any) -> SlotHeader:
    return SlotHeader(session, 1, sequence, num_bytes, num_bytes, 0, **more)


def view(ptr: int, num_bytes: int) -> Bytes:
    """Bytes at an address, which must outlive the view."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(ptr))


def row(source: int, target: int, num_bytes: int, *dims: tuple[int, int, int]) -> list[int]:
    """One row of a segment table; ``dims`` outermost first."""
    padded = [(1, 0, 0)] * (3 - len(dims)) + list(dims)
    return [source, target, num_bytes, 0, *(n for dim in padded for n in dim)]


def table(*rows: list[int]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(len(rows), 13)


def random_bytes(num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def addresses(arrays: Sequence[Any]) -> list[RegionAddress]:
    """Of NumPy arrays, or of what is like them and has a ``device``."""
    return [
        RegionAddress(i, int(a.ctypes.data), a.nbytes, getattr(a, "device", "cpu"))
        for i, a in enumerate(arrays)
    ]
