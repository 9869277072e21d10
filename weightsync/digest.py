"""The digest of tensors, the same on every device and under every sharding.

``D = sum_b m(seed, b) * sum_{j<8} k_j * u(8b+j) mod 2^64`` over the words ``u`` of a tensor in
row-major order of its *whole* wire form (elements wider than 32 bits count as little-endian 32-bit
words); ``m`` is a 64-bit mix forced odd, ``k_j`` are fixed odd constants (csrc/include/weightsync/
digest.hpp). Parts of a tensor add up modulo 2^64; order counts; the seed is made of name, dtype and
shape, so that equal shapes cannot be swapped unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.device_tables import CPU, Digesting, owned_digests, synchronize
from weightsync.errors import LayoutError
from weightsync.tables import dense_strides, digest_rows
from weightsync.tensors import TensorView, view_of
from weightsync.types import Box, Convert, TensorMeta, item_bytes


@lru_cache(maxsize=200_000)
def digest_seed(meta: TensorMeta) -> int:
    """The 64-bit seed of a tensor: blake2b-8 of name, dtype and shape."""
    text = f"{meta.name}\0{meta.dtype}\0{','.join(map(str, meta.shape))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class DigestPart:
    """A box of a tensor in this process's memory: ``ptr`` is its first element.

    ``dtype`` is how it is stored; the digest is of the wire form ``meta``.
    """

    meta: TensorMeta
    box: Box
    ptr: int
    strides_bytes: tuple[int, ...]
    dtype: str


def part_of(meta: TensorMeta, view: TensorView) -> DigestPart:
    """The whole tensor ``view`` as wire form ``meta``."""
    return DigestPart(meta, Box.whole(meta.shape), view.ptr, view.strides_bytes, view.dtype)


def convert_of(stored: str, wire: str) -> Convert:
    """How an element gets from its stored dtype to the wire's. Raises :class:`LayoutError`."""
    if stored == wire:
        return Convert.NONE
    if (stored, wire) == ("float32", "bfloat16"):
        return Convert.FP32_TO_BF16
    raise LayoutError(f"no conversion from {stored} to {wire}")


class DigestTable:
    """Parts made ready to be digested again and again; holds addresses, not tensors.

    All of them lie on one ``device``, where whoever wrote them last has synchronised.
    """

    def __init__(self, parts: Iterable[DigestPart], device: str = CPU) -> None:
        self.names: list[str] = []
        self.num_bytes = 0
        places: dict[str, int] = {}
        rows: list[tuple[int, ...]] = []
        owners: list[int] = []
        for part in parts:
            place = places.setdefault(part.meta.name, len(places))
            new = part_rows(part)
            rows += new
            owners += [place] * len(new)
            self.num_bytes += part.box.num_elements * item_bytes(part.dtype)
        self.names = list(places)
        self._digests = owned_digests(rows, owners, len(places), device)

    def values(self, num_threads: int) -> npt.NDArray[np.uint64]:
        """D of the present contents, for each of ``names`` (of all parts of that name together)."""
        return self._digests.run(num_threads)

    def start(self, num_threads: int, aside: Executor) -> Digesting:
        """Begin to take them; see :meth:`OwnedDigests.start`."""
        return self._digests.start(num_threads, aside)

    def compute(self, num_threads: int) -> dict[str, int]:
        """The same by name."""
        return dict(zip(self.names, self.values(num_threads).tolist(), strict=True))


def part_rows(part: DigestPart) -> list[tuple[int, ...]]:
    """Rows of a digest table that cover the part."""
    index_strides = dense_strides(part.meta.shape, 1)
    start = sum(a * s for a, s in zip(part.box.start, index_strides, strict=True))
    return digest_rows(
        part.box.shape,
        ptr=part.ptr,
        strides_bytes=part.strides_bytes,
        index_strides=index_strides,
        start_index=start,
        item=item_bytes(part.dtype),
        seed=digest_seed(part.meta),
        convert=convert_of(part.dtype, part.meta.dtype),
    )


def digest_tensors(named: Iterable[tuple[str, Any]], num_threads: int = 1) -> dict[str, int]:
    """Digests of whole tensors as they are: name -> D."""
    parts: dict[str, list[DigestPart]] = {}
    owners = []  # a view may stand on a copy of its own
    for name, tensor in named:
        view = view_of(tensor, name)
        owners.append(view.owner)
        meta = TensorMeta(name, view.dtype, view.shape)
        parts.setdefault(view.device, []).append(part_of(meta, view))
    found: dict[str, int] = {}
    for device, here in parts.items():
        synchronize(device)
        found |= DigestTable(here, device).compute(num_threads)
    return found


@dataclass(frozen=True, eq=False)
class RootBasis:
    """What of an update's root does not change with its digests: the sorted wire forms."""

    order: npt.NDArray[np.int64]  # [n] places of the wire forms, sorted by name
    head: bytes  # sha256 over their names, dtypes and shapes


def root_basis(metas: Sequence[TensorMeta]) -> RootBasis:
    """Worked out once for a list of wire forms."""
    order = sorted(range(len(metas)), key=lambda i: metas[i].name)
    hasher = hashlib.sha256()
    for i in order:
        hasher.update(f"{metas[i].name}\0{metas[i].dtype}\0{metas[i].shape}\n".encode())
    return RootBasis(np.array(order, dtype=np.int64), hasher.digest())


def digest_root(basis: RootBasis, digests: npt.NDArray[np.uint64]) -> str:
    """One fingerprint of an update: sha256 over the sorted (name, dtype, shape), hashed, and the
    digests in that order as little-endian 64-bit words. ``digests`` is in the order of the metas."""
    body = digests[basis.order].astype("<u8").tobytes()
    return hashlib.sha256(basis.head + body).hexdigest()
