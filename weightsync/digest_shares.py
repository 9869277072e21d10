"""Which rank of a trainer digests what, so that every rank of an engine can check all that it gets.

An engine rank compares digests of its own boxes only, so a manifest has a part for each of them: of each
tensor that it gets, the sum over the boxes that it gets. The update as a whole is named by digests of
whole tensors, each element once. Both are sums of the same *pieces*: boxes that transfers bring, each
digested once by the rank that holds it, whatever the number of ranks that get it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightsync.binding import Addresses, spot_of
from weightsync.digest import DigestPart
from weightsync.layout import Layout
from weightsync.manifest import Digests
from weightsync.plan import RefitPlan
from weightsync.types import Box, TensorMeta

Int64Array = npt.NDArray[np.int64]

#: Whose digest a piece counts in: an engine rank, or the update as a whole.
WHOLE = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """A box in one placement of a trainer rank, and the owner that its digest counts for."""

    owner: int
    tensor: int  # index in RefitPlan.tensors
    source_placed: int
    box: Box


@dataclass(frozen=True, eq=False)
class DigestShares:
    """The pieces of a plan. An *owner* is a sum of pieces of one tensor that all count alike."""

    plan: RefitPlan
    pieces: tuple[tuple[Piece, ...], ...]  # [trainer ranks]
    tensors: tuple[Int64Array, ...]  # [engine ranks] places in plan.tensors of what each gets
    owner_tensor: Int64Array  # [owners]
    owner_counts: tuple[tuple[tuple[int, int], ...], ...]  # [owners] (engine rank or WHOLE, times)

    @property
    def num_owners(self) -> int:
        return len(self.owner_tensor)

    def metas(self, target_rank: int) -> tuple[TensorMeta, ...]:
        """The tensors that an engine rank gets, in the order of its part of the manifest."""
        return tuple(self.plan.metas[i] for i in self.tensors[target_rank].tolist())

    def parts(
        self, rank: int, source: Layout, addresses: Addresses
    ) -> tuple[list[DigestPart], list[int]]:
        """What a trainer rank digests, where it lies in its process, and the owner of each."""
        parts, owners = [], []
        for piece in self.pieces[rank]:
            planned = self.plan.tensors[piece.tensor]
            spot = spot_of(source.tensors[planned.source].placed[piece.source_placed], addresses)
            box = piece.box
            parts.append(
                DigestPart(planned.meta, box, spot.at(box), spot.strides_bytes, spot.dtype)
            )
            owners.append(piece.owner)
        return parts, owners

    def for_rank(self, target_rank: int, sums: Digests) -> Digests:
        """An engine rank's digests, uint64 [tensors that it gets], from sums of all owners."""
        owners, places, times = self._uses[target_rank]
        found: Digests = np.zeros(len(self.tensors[target_rank]), dtype=np.uint64)
        np.add.at(found, places, sums[owners] * times)
        return found

    def whole(self, sums: Digests) -> Digests:
        """Digests of whole tensors, uint64 [tensors of the plan]."""
        owners, places, times = self._uses[WHOLE]
        found: Digests = np.zeros(len(self.plan.tensors), dtype=np.uint64)
        np.add.at(found, places, sums[owners] * times)
        return found

    @cached_property
    def _uses(self) -> dict[int, tuple[Int64Array, Int64Array, Digests]]:
        """For each engine rank and WHOLE: owners, their places in its digests, how often each counts."""
        place = {
            rank: {int(t): n for n, t in enumerate(tensors)}
            for rank, tensors in enumerate(self.tensors)
        }
        place[WHOLE] = {t: t for t in range(len(self.plan.tensors))}
        rows: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in place}
        for owner, counts in enumerate(self.owner_counts):
            tensor = int(self.owner_tensor[owner])
            for rank, times in counts:
                rows[rank].append((owner, place[rank][tensor], times))
        found = {}
        for rank, listed in rows.items():
            columns = np.array(listed, dtype=np.int64).reshape(-1, 3)
            found[rank] = (columns[:, 0], columns[:, 1], columns[:, 2].astype(np.uint64))
        return found


def digest_shares(plan: RefitPlan, num_sources: int, num_targets: int) -> DigestShares:
    """Worked out once for a plan between so many trainer and engine ranks."""
    counts: dict[tuple[int, int, int, Box], dict[int, int]] = {}
    wanted: list[set[int]] = [set() for _ in range(num_targets)]
    covered: dict[int, list[Box]] = {}
    for t in plan.transfers:
        wanted[t.target_rank].add(t.tensor)
        key = (t.source_rank, t.tensor, t.source_placed, t.box)
        uses = counts.setdefault(key, {})
        uses[t.target_rank] = uses.get(t.target_rank, 0) + 1
        seen = covered.setdefault(t.tensor, [])
        for box in _outside(t.box, seen):
            seen.append(box)
            whole = counts.setdefault((t.source_rank, t.tensor, t.source_placed, box), {})
            whole[WHOLE] = 1
    owners: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
    pieces: list[list[Piece]] = [[] for _ in range(num_sources)]
    for (rank, tensor, placed, box), uses in counts.items():
        owner = owners.setdefault((tensor, tuple(sorted(uses.items()))), len(owners))
        pieces[rank].append(Piece(owner, tensor, placed, box))
    return DigestShares(
        plan,
        tuple(map(tuple, pieces)),
        tuple(np.array(sorted(tensors), dtype=np.int64) for tensors in wanted),
        np.array([tensor for tensor, _ in owners], dtype=np.int64),
        tuple(uses for _, uses in owners),
    )


def _outside(box: Box, seen: Sequence[Box]) -> list[Box]:
    """What of a box none of these holds."""
    if not box.num_elements:
        return []
    rest = [box]
    for other in seen:
        rest = [piece for left in rest for piece in left.subtract(other)]
        if not rest:
            break
    return rest
