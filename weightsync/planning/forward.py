"""Boxes that several ranks of one host need: one of them reads it over the network and hands it on.

Only within one engine, whose ranks turn to a version together; never in a chain. Greedy and in integers,
like the choice of sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigError, ProtocolError
from weightsync.planning.topology import Places, Reach, Sites, reach_of
from weightsync.planning.transfers import Transfers

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HandingOn:
    """When it pays: what a box costs the network, against a link of the host and one more step.

    Rates are whole bytes a microsecond (a card of 400 Gbit/s: 50,000), so that every process that
    plans decides alike.
    """

    network_bytes_per_us: int
    host_bytes_per_us: int
    step_us: int  # to begin the second copy

    def __post_init__(self) -> None:
        if min(self.network_bytes_per_us, self.host_bytes_per_us) < 1 or self.step_us < 0:
            raise ConfigError(
                f"handing on at {self.network_bytes_per_us} and {self.host_bytes_per_us} B/us and "
                f"{self.step_us} us a step: rates must be at least 1, a step not negative"
            )

    @property
    def least_bytes(self) -> int | None:
        """Boxes of at least so many bytes reach the second rank sooner over the host's link than over
        the network; None: none do."""
        network, host = self.network_bytes_per_us, self.host_bytes_per_us
        if host <= network:
            return None
        return -(-self.step_us * network * host // (host - network))


def choose_relays(
    plans: Sequence[Transfers], trainer: Sites, engines: Sequence[Sites], when: HandingOn
) -> list[Int64]:
    """For each engine int64 [n]: the transfer whose target hands the box on to this one's target, or
    -1 where it comes straight from the trainer.

    What leaves no choice is counted first, then large boxes before small ones: of the ranks of a host
    that need a box, the one reads it whose path over the network has carried least.
    """
    theirs = Places.of(trainer)
    least = when.least_bytes
    shared = [
        _Shared.of(t, theirs, Places.of(sites)) for t, sites in zip(plans, engines, strict=True)
    ]
    num_nics = 1 + max((max(sites.nic, default=0) for sites in (trainer, *engines)), default=0)
    out, into = (np.zeros(num_nics, dtype=np.int64) for _ in range(2))
    for s in shared:
        straight = s.order[np.repeat(~s.pays(least), s.counts)]
        np.add.at(out, s.gives[straight], s.size[straight])
        np.add.at(into, s.takes[straight], s.size[straight])
    sent, got = out.tolist(), into.tolist()
    return [_chosen(s, len(t), least, sent, got) for s, t in zip(shared, plans, strict=True)]


def check_relays(transfers: Transfers, via: Int64) -> None:
    """Every box that is handed on is what another rank reads straight. Raises :class:`ProtocolError`."""
    if via.shape != (len(transfers),):
        raise ProtocolError(f"plan: {len(via)} relays for {len(transfers)} transfers")
    rows = np.flatnonzero(via >= 0)
    given = via[rows]
    if (via < -1).any() or (given >= len(transfers)).any():
        raise ProtocolError("plan: a relay points outside of the plan")
    same = (transfers.tensor[rows] == transfers.tensor[given]) & (via[given] < 0)
    same &= (transfers.start[rows] == transfers.start[given]).all(axis=1)
    same &= (transfers.stop[rows] == transfers.stop[given]).all(axis=1)
    same &= transfers.target_rank[rows] != transfers.target_rank[given]
    if not same.all():
        row = int(rows[np.argmin(same)])
        raise ProtocolError(
            f"plan: transfer {row} is handed on by transfer {int(via[row])}, which does not bring the "
            "same box straight to another rank"
        )


def same_boxes(transfers: Transfers, group: Int64) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Rows ordered so that those of one group that bring the same box are neighbours, and which of
    them begin another box."""
    keys = np.column_stack([transfers.tensor, group, transfers.start, transfers.stop])
    order = np.lexsort(keys.T[::-1])
    ranked = keys[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    return order.astype(np.int64, copy=False), is_new


@dataclass(frozen=True, eq=False)
class _Shared:
    """The transfers of one engine over the network, those of one host that bring one box together."""

    far: Int64  # rows of the transfers
    order: Int64  # [far] places in ``far``, group after group
    first: Int64  # [groups] where each begins in ``order``
    counts: Int64  # [groups]
    gives: Int64  # [far] card of the source
    takes: Int64  # [far] card of the target
    ranks: Int64  # [far] of the target
    size: Int64  # [far] bytes

    @classmethod
    def of(cls, transfers: Transfers, theirs: Places, ours: Places) -> _Shared:
        reach = reach_of(theirs, ours, transfers.source_rank, transfers.target_rank)
        far = np.flatnonzero((reach == Reach.NETWORK) & (transfers.num_bytes > 0))
        part = transfers.take(far)
        order, is_new = same_boxes(part, ours.host[part.target_rank])
        first = np.flatnonzero(is_new)
        counts = np.diff(np.append(first, len(order)))
        gives, takes = theirs.nic[part.source_rank], ours.nic[part.target_rank]
        return cls(far, order, first, counts, gives, takes, part.target_rank, part.num_bytes)

    def pays(self, least_bytes: int | None) -> npt.NDArray[np.bool_]:
        """[groups] whether boxes are handed on."""
        if least_bytes is None:
            return np.zeros(len(self.first), dtype=bool)
        found: npt.NDArray[np.bool_] = self.counts > 1
        return found & (self.size[self.order[self.first]] >= least_bytes)


def _chosen(s: _Shared, num: int, least: int | None, sent: list[int], got: list[int]) -> Int64:
    """[num] relays of one engine; counts what it adds to the cards."""
    via = np.full(num, -1, dtype=np.int64)
    groups = np.flatnonzero(s.pays(least))
    groups = groups[np.argsort(-s.size[s.order[s.first[groups]]], kind="stable")]
    for g in groups.tolist():
        rows = s.order[s.first[g] : s.first[g] + s.counts[g]]
        paths = zip(rows.tolist(), s.gives[rows].tolist(), s.takes[rows].tolist(), strict=True)
        _, _, row, card, mine = min(
            (max(sent[a], got[b]), sent[a] + got[b], r, a, b) for r, a, b in paths
        )
        is_other = s.ranks[rows] != s.ranks[row]  # a rank with two slots of a box reads both
        num_read = len(rows) - int(is_other.sum())
        sent[card] += num_read * int(s.size[row])
        got[mine] += num_read * int(s.size[row])
        via[s.far[rows[is_other]]] = s.far[row]
    return via
