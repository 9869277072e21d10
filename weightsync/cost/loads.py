"""How many bytes each link of a cluster carries under the plans of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.planning.forward import same_boxes
from weightsync.planning.topology import Places, Reach, Sites, reach_of
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
    plans: Sequence[Transfers], cluster: Cluster, operations: Sequence[Int64],
    vias: Sequence[Int64 | None] | None = None,
) -> Loads:  # fmt: skip
    """Loads of one plan for each engine. ``operations`` counts the reads of each transfer.

    ``vias`` are :attr:`RefitPlan.via` of each plan: boxes that are handed on within a host cross the
    network once, and reach the others over NVLink.
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
    theirs = Places.of(cluster.trainer)
    places = [Places.of(sites) for sites in cluster.engines]
    relays = [_relay(t, via) for t, via in zip(plans, vias or [None] * len(plans), strict=True)]
    first = 0
    engines = zip(plans, places, relays, operations, strict=True)
    for transfers, ours, relay, counts in engines:
        size, source, target = transfers.num_bytes, transfers.source_rank, transfers.target_rank
        reach = reach_of(theirs, ours, source, target)
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


def _relay(transfers: Transfers, via: Int64 | None) -> Int64:
    """[n] the rank that hands each box on; -1: it comes straight."""
    if via is None:
        return np.full(len(transfers), -1, dtype=np.int64)
    return np.where(via < 0, -1, transfers.target_rank[via])


def unique_bytes(transfers: Transfers) -> int:
    """Bytes of all boxes, each counted once however many ranks need it."""
    order, is_new = same_boxes(transfers, np.zeros(len(transfers), dtype=np.int64))
    return int(transfers.num_bytes[order[is_new]].sum())


def unique_bytes_by_host(transfers: Transfers, sites: Sites) -> Int64:
    """[hosts] bytes that the ranks of each host need at least once between them."""
    ours = Places.of(sites)
    hosts = ours.host[transfers.target_rank]
    order, is_new = same_boxes(transfers, hosts)
    rows = order[is_new]
    sums = np.zeros(max(sites.host, default=0) + 1, dtype=np.int64)
    np.add.at(sums, hosts[rows], transfers.num_bytes[rows])
    return sums
