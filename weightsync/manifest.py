"""The manifest of one update: what the trainer published, tensor by tensor.

Names, dtypes and shapes travelled with the plans, once; a manifest says which plans were moved and
the digests of their tensors, in their order.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.digest import RootBasis, digest_root, root_basis
from weightsync.errors import IntegrityError, ProtocolError
from weightsync.types import TensorMeta

_MAX_NAMED = 5

Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class ManifestBasis:
    """The tensors of the moves of an update, worked out once and used at every refit."""

    plans: tuple[str, ...]  # digests, in the order of the moves
    metas: tuple[TensorMeta, ...]  # those of the plans, one after the other
    root: RootBasis

    @cached_property
    def place(self) -> dict[str, int]:
        """Name -> its place in ``metas``."""
        return {meta.name: i for i, meta in enumerate(self.metas)}

    def places(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """Places of some names. Raises ``KeyError`` for one that is not there."""
        return np.array([self.place[n] for n in names], dtype=np.int64)


def manifest_basis(moves: Iterable[tuple[str, Sequence[TensorMeta]]]) -> ManifestBasis:
    """From digest and wire forms of each move's plan."""
    listed = list(moves)
    metas = tuple(meta for _, of_plan in listed for meta in of_plan)
    return ManifestBasis(tuple(digest for digest, _ in listed), metas, root_basis(metas))


@dataclass(frozen=True, eq=False)
class Manifest:
    """Digests of every tensor of an update (uint64, in the order of ``basis.metas``)."""

    basis: ManifestBasis
    digests: Digests

    @cached_property
    def root(self) -> str:
        """One fingerprint of the update."""
        return digest_root(self.basis.root, self.digests)

    def to_json(self) -> dict[str, Any]:
        """``digests`` are little-endian 64-bit words, base64."""
        body = binascii.b2a_base64(self.digests.astype("<u8").tobytes(), newline=False).decode()
        return {"plans": list(self.basis.plans), "digests": body, "root": self.root}

    @classmethod
    def from_json(cls, value: Any, basis: ManifestBasis) -> Manifest:
        """Parse what should be the manifest of the moves in ``basis``.

        Raises :class:`ProtocolError`, or :class:`IntegrityError` for one of other moves.
        """
        try:
            plans = [str(p) for p in value["plans"]]
            body = binascii.a2b_base64(value["digests"], strict_mode=True)
            root = str(value["root"])
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise ProtocolError(f"malformed manifest: {error!r}") from error
        if plans != list(basis.plans):
            raise IntegrityError("the manifest does not list exactly what arrived")
        if len(body) != 8 * len(basis.metas):
            raise ProtocolError(
                f"manifest: {len(body)} B of digests for {len(basis.metas)} tensors"
            )
        manifest = cls(basis, np.frombuffer(body, dtype="<u8").astype(np.uint64))
        if manifest.root != root:
            raise ProtocolError(f"manifest: root {root!r} does not fit its list ({manifest.root})")
        return manifest

    def check(self, found: Digests, what: str) -> None:
        """Compare with digests of this side in the same order; ``what`` says of which bytes.

        Raises :class:`IntegrityError` naming the tensors.
        """
        wrong = np.flatnonzero(found != self.digests)
        if len(wrong):
            first = int(wrong[0])
            names = [self.basis.metas[i].name for i in wrong.tolist()]
            raise IntegrityError(
                f"{what}: {len(wrong)} of {len(self.digests)} digests differ: {name_some(names)} "
                f"(first: got {int(found[first]):016x}, expected {int(self.digests[first]):016x})"
            )


def name_some(names: Sequence[str]) -> str:
    """A few names for an error message, and how many more there are."""
    some = ", ".join(map(repr, names[:_MAX_NAMED]))
    more = len(names) - _MAX_NAMED
    return f"{some} and {more} more" if more > 0 else some
