"""What one rank digests of an update: what landed, and what lives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync.binding import landed_parts
from weightsync.coverage import PlanShare
from weightsync.device_tables import Digesting
from weightsync.digest import DigestTable
from weightsync.errors import WeightSyncError
from weightsync.kept import Kept
from weightsync.manifest import Digests, Manifest, ManifestBasis, manifest_basis
from weightsync.rank_session import Landing, OpenSession
from weightsync.types import Placement

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PlacedDigests:
    """A digest table and the place of each of its names in the manifest."""

    table: DigestTable
    places: Any  # int64 [names]


@dataclass(frozen=True)
class EarlyDigests:
    """Digests of what landed, begun when the last bytes of these moves had landed (on a device: enqueued
    behind them). They count until anything more is written there."""

    plans: tuple[str, ...]  # digests, in the order of the moves
    places: Any  # int64 [names]
    wait: Digesting


class RankDigests:
    """Tables are made once for a list of plans and used at every refit."""

    def __init__(self, device: str, num_threads: int) -> None:
        self._device = device
        self._threads = num_threads
        self._bases: Kept[tuple[str, ...], ManifestBasis] = Kept(8)
        self._digests: Kept[tuple[Any, ...], _PlacedDigests] = Kept(8)
        self._aside = ThreadPoolExecutor(1, "weightsync-digest")

    def clear(self) -> None:
        """Free the tables."""
        self._digests.clear()

    def close(self) -> None:
        """Take no early digests any more."""
        self._aside.shutdown(wait=False)

    def basis(self, moves: Sequence[PlanShare]) -> ManifestBasis:
        """Of these moves."""

        def make() -> ManifestBasis:
            return manifest_basis((share.plan.digest, share.metas) for share in moves)

        return self._bases.get(tuple(share.plan.digest for share in moves), make)

    # --- early ----------------------------------------------------------------------------------------

    def start_landed(self, opened: OpenSession, moves: Sequence[PlanShare]) -> None:
        """Begin to digest what all the moves of a session have landed, or on a device have enqueued on
        lane 0. Whoever writes there afterwards calls :meth:`drop_early` before."""
        self.drop_early(opened)
        placed = self._placed(moves, opened.spec.placement, opened.staging.landing, "landed")
        plans = self.basis(moves).plans
        wait = placed.table.start(self._threads, self._aside)
        opened.early = EarlyDigests(plans, placed.places, wait)

    def drop_early(self, opened: OpenSession) -> None:
        """What was begun counts no more, and reads no memory any more when this returns."""
        early, opened.early = opened.early, None
        if early is None:
            return
        try:
            early.wait()
        except WeightSyncError as error:  # nobody asks for them any more
            _LOG.warning("digests that were given up could not be taken: %s", error)

    # --- in prepare -----------------------------------------------------------------------------------

    def landed(self, opened: OpenSession, manifest: Manifest) -> Digests:
        """Those taken while reading, or begun early, or taken now."""
        taken = [d for d in opened.read_digests if d is not None]
        if len(taken) == len(opened.moves):
            return np.concatenate(taken) if taken else manifest.digests
        found = np.zeros_like(manifest.digests)
        early: EarlyDigests | None = opened.early
        if early is not None and early.plans == manifest.basis.plans:
            opened.early = None
            found[early.places] = early.wait()
        else:
            self.drop_early(opened)
            self.at(opened, opened.staging.landing, "landed", found)
        return found

    def at(self, opened: OpenSession, spots: Landing, what: str, found: Digests) -> None:
        """Digests of what lies at ``spots``, into their places of the manifest."""
        placed = self._placed(opened.moves, opened.spec.placement, spots, what)
        found[placed.places] = placed.table.values(self._threads)

    def _placed(
        self, moves: Sequence[PlanShare], placement: Placement, spots: Landing, what: str
    ) -> _PlacedDigests:
        basis = self.basis(moves)

        def make() -> _PlacedDigests:
            parts = []
            for share in moves:
                plan = share.plan
                mine = (plan.transfers[n] for n in share.transfers.tolist())
                here = [
                    t for t in mine if (plan.tensors[t.tensor].target, t.target_placed) in spots
                ]
                parts += landed_parts(plan, spots, here)
            table = DigestTable(parts, self._device)
            return _PlacedDigests(table, basis.places(table.names))

        return self._digests.get((what, placement, *basis.plans), make)
