"""How many bytes each link of a cluster carries under the plans of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.planning.topology import Reach, Sites
from weightsync.planning.transfers import Transfers

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cluster:
    """Where everyone sits. Engines may share hosts, GPUs and cards with the trainer."""

    trainer: Sites
    engines: tuple[Sites, ...]

    @property
    def num_nics(self) -> int:
        """Cards are numbered over all hosts, from 0."""
        return 1 + max(max(sites.nic) for sites in (self.trainer, *self.engines))

    @property
    def num_hosts(self) -> int:
        return 1 + max(max(sites.host) for sites in (self.trainer, *self.engines))


@dataclass(frozen=True, eq=False)
class Loads:
    """Bytes by link; the ranks of engines are numbered one engine after the other."""

    nic_out: Int64  # [cards]
    nic_in: Int64  # [cards]
    nvlink_out: Int64  # [trainer ranks] to others of their host
    nvlink_in: Int64  # [engine ranks] from others of their host, trainers or relays
    relay_out: Int64  # [engine ranks] what is handed on within their host
    trainer_out: Int64  # [trainer ranks] by any way
    engine_in: Int64  # [engine ranks] by any way
    operations: Int64  # [engine ranks] reads
    by_reach: dict[Reach, int]
    host_pairs: Int64  # [hosts, hosts] over the network

    @property
    def total_bytes(self) -> int:
        return int(self.engine_in.sum())


def loads_of(
    plans: Sequence[Transfers], cluster: Cluster, operations: Sequence[Int64], *,
    is_forwarded: bool = False,
) -> Loads:  # fmt: skip
    """Loads of one plan for each engine. ``operations`` counts the reads of each transfer.

    With ``is_forwarded`` a box that several ranks of one host and engine need crosses the network
    once, to one of them, and reaches the others over NVLink. The transports of this version
    do not do that; it says what it would gain.
    """
    num_engine_ranks = sum(sites.num_ranks for sites in cluster.engines)
    num_trainer, nics, hosts = cluster.trainer.num_ranks, cluster.num_nics, cluster.num_hosts
    sums = {
        name: np.zeros(size, dtype=np.int64)
        for name, size in (
            ("nic_out", nics), ("nic_in", nics), ("nvlink_out", num_trainer),
            ("nvlink_in", num_engine_ranks), ("relay_out", num_engine_ranks),
            ("trainer_out", num_trainer), ("engine_in", num_engine_ranks),
            ("operations", num_engine_ranks), ("host_pairs", hosts * hosts),
        )
    }  # fmt: skip
    by_reach = dict.fromkeys(Reach, 0)
    theirs = _Places.of(cluster.trainer)
    places = [_Places.of(sites) for sites in cluster.engines]
    relays = [np.full(len(t), -1, dtype=np.int64) for t in plans]
    if is_forwarded:
        relays = _relays(plans, theirs, places, nics)
    first = 0
    engines = zip(plans, places, relays, operations, strict=True)
    for transfers, ours, relay, counts in engines:
        size, source, target = transfers.num_bytes, transfers.source_rank, transfers.target_rank
        reach = _reach(theirs, ours, source, target)
        direct = relay < 0
        far = (reach == Reach.NETWORK) & direct
        near = (reach == Reach.HOST) & direct
        handed_on = ~direct
        for name, index, rows in (
            ("nic_out", theirs.nic[source], far), ("nic_in", ours.nic[target], far),
            ("nvlink_out", source, near), ("nvlink_in", first + target, near | handed_on),
            ("relay_out", first + relay, handed_on), ("trainer_out", source, direct),
            ("engine_in", first + target, np.ones(len(size), dtype=bool)),
            ("host_pairs", theirs.host[source] * hosts + ours.host[target], far),
        ):  # fmt: skip
            np.add.at(sums[name], index[rows], size[rows])
        np.add.at(sums["operations"], first + target, counts)
        for kind, rows in (
            (Reach.NETWORK, far), (Reach.HOST, near | handed_on), (Reach.GPU, reach == Reach.GPU),
        ):  # fmt: skip
            by_reach[kind] += int(size[rows].sum())
        first += len(ours.host)
    pairs = sums.pop("host_pairs").reshape(hosts, hosts)
    return Loads(**sums, by_reach=by_reach, host_pairs=pairs)


@dataclass(frozen=True, eq=False)
class _Places:
    host: Int64
    gpu: Int64
    nic: Int64

    @classmethod
    def of(cls, sites: Sites) -> _Places:
        return cls(*(np.array(c, dtype=np.int64) for c in (sites.host, sites.gpu, sites.nic)))


def _reach(theirs: _Places, ours: _Places, source: Int64, target: Int64) -> Int64:
    is_host = theirs.host[source] == ours.host[target]
    is_gpu = is_host & (theirs.gpu[source] == ours.gpu[target])
    found: Int64 = np.where(is_gpu, Reach.GPU, np.where(is_host, Reach.HOST, Reach.NETWORK))
    return found


@dataclass(frozen=True, eq=False)
class _Shared:
    """The transfers of one engine over the network, those of one host that bring one box together."""

    far: Int64  # rows of the transfers
    order: Int64  # [far] places in ``far``, group after group
    first: Int64  # [groups] where each begins in ``order``
    counts: Int64  # [groups]
    gives: Int64  # [far] card of the source
    takes: Int64  # [far] card of the target
    size: Int64  # [far] bytes

    @classmethod
    def of(cls, transfers: Transfers, theirs: _Places, ours: _Places) -> _Shared:
        reach = _reach(theirs, ours, transfers.source_rank, transfers.target_rank)
        far = np.flatnonzero((reach == Reach.NETWORK) & (transfers.num_bytes > 0))
        part = transfers.take(far)
        order, is_new = _same_boxes(part, ours.host[part.target_rank])
        first = np.flatnonzero(is_new)
        counts = np.diff(np.append(first, len(order)))
        gives, takes = theirs.nic[part.source_rank], ours.nic[part.target_rank]
        return cls(far, order, first, counts, gives, takes, part.num_bytes)


def _relays(
    plans: Sequence[Transfers], theirs: _Places, engines: Sequence[_Places], num_nics: int
) -> list[Int64]:
    """For each engine [n]: the rank that hands a box on to each transfer's target, or -1 where it
    comes straight.

    Greedy, what leaves no choice first, then large boxes: of the ranks of a host that need a box, the
    one gets it whose path has carried least.
    """
    shared = [_Shared.of(t, theirs, ours) for t, ours in zip(plans, engines, strict=True)]
    out, into = (np.zeros(num_nics, dtype=np.int64) for _ in range(2))
    for s in shared:
        alone = s.order[s.first[s.counts == 1]]
        np.add.at(out, s.gives[alone], s.size[alone])
        np.add.at(into, s.takes[alone], s.size[alone])
    sent, got = out.tolist(), into.tolist()
    found = []
    for s, transfers in zip(shared, plans, strict=True):
        relay = np.full(len(transfers), -1, dtype=np.int64)
        groups = np.flatnonzero(s.counts > 1)
        groups = groups[np.argsort(-s.size[s.order[s.first[groups]]], kind="stable")]
        for g in groups.tolist():
            rows = s.order[s.first[g] : s.first[g] + s.counts[g]]
            paths = zip(rows.tolist(), s.gives[rows].tolist(), s.takes[rows].tolist(), strict=True)
            _, _, row, card, mine = min(
                (max(sent[a], got[b]), sent[a] + got[b], r, a, b) for r, a, b in paths
            )
            sent[card] += int(s.size[row])
            got[mine] += int(s.size[row])
            relay[s.far[rows]] = transfers.target_rank[s.far[row]]
            relay[s.far[row]] = -1
        found.append(relay)
    return found


def _same_boxes(transfers: Transfers, group: Int64) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Rows ordered so that those of one group that bring the same box are neighbours, and which of
    them begin another box."""
    keys = np.column_stack([transfers.tensor, group, transfers.start, transfers.stop])
    order = np.lexsort(keys.T[::-1])
    ranked = keys[order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    return order.astype(np.int64, copy=False), is_new


def unique_bytes(transfers: Transfers) -> int:
    """Bytes of all boxes, each counted once however many ranks need it."""
    order, is_new = _same_boxes(transfers, np.zeros(len(transfers), dtype=np.int64))
    return int(transfers.num_bytes[order[is_new]].sum())


def unique_bytes_by_host(transfers: Transfers, sites: Sites) -> Int64:
    """[hosts] bytes that the ranks of each host need at least once between them."""
    ours = _Places.of(sites)
    hosts = ours.host[transfers.target_rank]
    order, is_new = _same_boxes(transfers, hosts)
    rows = order[is_new]
    sums = np.zeros(max(sites.host, default=0) + 1, dtype=np.int64)
    np.add.at(sums, hosts[rows], transfers.num_bytes[rows])
    return sums
