"""What of a plan goes between one rank of each side: a plan of its own, for its own tables and slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightsync.plan import RefitPlan


@dataclass(frozen=True, eq=False)
class PairPlan:
    """``plan`` has this pair's transfers only; ``places`` (int64 [transfers]) are theirs in the whole."""

    plan: RefitPlan
    places: npt.NDArray[np.int64]


def pair_plan(plan: RefitPlan, source_rank: int, target_rank: int) -> PairPlan:
    """The transfers between two ranks, in the plan's order; the whole plan where there are no others."""
    transfers = plan.transfers
    is_theirs = (transfers.source_rank == source_rank) & (transfers.target_rank == target_rank)
    places = np.flatnonzero(is_theirs).astype(np.int64, copy=False)
    if len(places) == len(transfers):
        return PairPlan(plan, places)
    return PairPlan(replace(plan, transfers=transfers.take(places)), places)
