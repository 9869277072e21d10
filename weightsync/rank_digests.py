"""What one rank digests of an update: what landed, and what lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync.binding import landed_parts
from weightsync.digest import DigestTable
from weightsync.kept import Kept
from weightsync.manifest import Digests, Manifest, ManifestBasis, manifest_basis
from weightsync.rank_session import Landing, OpenSession


@dataclass(frozen=True)
class _PlacedDigests:
    """A digest table and the place of each of its names in the manifest."""

    table: DigestTable
    places: Any  # int64 [names]


class RankDigests:
    """Tables are made once for a list of plans and used at every refit."""

    def __init__(self, device: str, num_threads: int) -> None:
        self._device = device
        self._threads = num_threads
        self._bases: Kept[tuple[str, ...], ManifestBasis] = Kept(8)
        self._digests: Kept[tuple[Any, ...], _PlacedDigests] = Kept(8)

    def clear(self) -> None:
        """Free the tables."""
        self._digests.clear()

    def basis(self, opened: OpenSession) -> ManifestBasis:
        """Of the moves so far."""

        def make() -> ManifestBasis:
            return manifest_basis((share.plan.digest, share.metas) for share in opened.moves)

        return self._bases.get(tuple(share.plan.digest for share in opened.moves), make)

    def landed(self, opened: OpenSession, manifest: Manifest) -> Digests:
        taken = [d for d in opened.read_digests if d is not None]
        if len(taken) == len(opened.moves):
            return np.concatenate(taken) if taken else manifest.digests
        found = np.zeros_like(manifest.digests)
        self.at(opened, opened.staging.landing, "landed", found)
        return found

    def at(self, opened: OpenSession, spots: Landing, what: str, found: Digests) -> None:
        """Digests of what lies at ``spots``, into their places of the manifest."""
        basis = self.basis(opened)

        def make() -> _PlacedDigests:
            parts = []
            for share in opened.moves:
                plan = share.plan
                mine = (plan.transfers[n] for n in share.transfers.tolist())
                here = [
                    t for t in mine if (plan.tensors[t.tensor].target, t.target_placed) in spots
                ]
                parts += landed_parts(plan, spots, here)
            table = DigestTable(parts, self._device)
            return _PlacedDigests(table, basis.places(table.names))

        placed = self._digests.get((what, opened.spec.placement, *basis.plans), make)
        found[placed.places] = placed.table.values(self._threads)
