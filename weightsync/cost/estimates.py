"""Seconds of an update from the loads of links, and what bounds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.cost.constants import Constants
from weightsync.cost.loads import Cluster, Loads, unique_bytes, unique_bytes_by_host
from weightsync.planning.topology import Reach
from weightsync.planning.transfers import Transfers
from weightsync.types import format_bytes

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One way to move the weights."""

    way: str
    seconds: float
    terms: Mapping[str, float]  # seconds, in the order in which they happen; they add up
    bound_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is asked of a cluster, beside the loads of its links."""

    line_bytes_per_s: float  # of one network card, each direction
    bucket_bytes: int
    unique_bytes: int  # of the model, in wire form
    held_bytes: int  # the most that one trainer rank holds, in wire form
    source_bytes_per_wire_byte: float  # what is read to make one byte of the wire; 1: as it is
    is_staged: bool = True


def estimate_p2p(way: str, loads: Loads, cluster: Cluster, work: Work, c: Constants) -> Estimate:
    """Every rank gets what it owns from a rank that has it: the plan itself."""
    card, card_bytes = busiest_card(loads, cluster)
    link_bytes = max(_most(loads.nvlink_out), _most(loads.nvlink_in), _most(loads.relay_out))
    rate = work.line_bytes_per_s * c.nic_share.value
    wire_s, link_s = card_bytes / rate, link_bytes / c.nvlink_bytes_per_s.value
    # Direct reads pay for every contiguous run, a stream for every slot and packing beside the wire.
    num_slots = -(-_most(loads.engine_in) // work.bucket_bytes)
    num_ops = min(_most(loads.operations), num_slots)
    move_s = max(wire_s, link_s)
    if wire_s >= link_s:
        bound = f"{card}: {format_bytes(card_bytes)} at {rate / 1e9:.1f} GB/s"
    else:
        bound = f"NVLink of one GPU: {format_bytes(link_bytes)}"
    terms = {
        "quantise": _quantise_s(work, c),
        "move": move_s,
        "operations": num_ops * c.nic_op_s.value,
        **_after(_most(loads.engine_in), work, c),
    }
    return _total(way, terms, bound)


def estimate_broadcast(loads: Loads, work: Work, c: Constants) -> Estimate:
    """Every byte to every GPU of every engine, in packed buckets, along one chain through each GPU's
    own card."""
    rate = work.line_bytes_per_s * c.broadcast_share.value
    num_calls = -(-work.unique_bytes // work.bucket_bytes)
    terms = {
        "quantise": _quantise_s(work, c),
        "move": work.unique_bytes / rate,
        "operations": num_calls * c.broadcast_call_s.value,
        **_after(_most(loads.engine_in), work, c),
    }
    bound = (
        f"every card of the engines: the whole model, {format_bytes(work.unique_bytes)} at "
        f"{rate / 1e9:.1f} GB/s"
    )
    return _total("broadcast", terms, bound)


def lower_bound(
    plans: Sequence[Transfers], cluster: Cluster, work: Work, *, is_forwarded: bool
) -> Estimate:
    """No way can be faster: what must come in and go out, evenly over all cards, at line rate.

    With ``is_forwarded`` a host needs each byte once; without, each of its ranks needs its own.
    """
    out_bytes, in_s, worst = 0, 0.0, 0
    for transfers, sites in zip(plans, cluster.engines, strict=True):
        hosts = np.array(sites.host, dtype=np.int64)
        is_far = ~np.isin(hosts, cluster.trainer.host)
        if is_forwarded:
            need = unique_bytes_by_host(transfers, sites)
            out_bytes += unique_bytes(transfers)  # once to each engine, which could pass it on
        else:
            need = np.zeros(max(sites.host) + 1, dtype=np.int64)
            np.add.at(need, hosts[transfers.target_rank], transfers.num_bytes)
            out_bytes += int(need.sum())
        for host in np.unique(hosts[is_far]).tolist():
            cards = len({n for h, n in zip(sites.host, sites.nic, strict=True) if h == host})
            spent_s = int(need[host]) / (cards * work.line_bytes_per_s)
            if spent_s > in_s:
                in_s, worst = spent_s, host
    out_s = out_bytes / (len(set(cluster.trainer.nic)) * work.line_bytes_per_s)
    if not in_s:  # everyone shares the trainer's hosts
        out_s = 0.0
    what = (
        f"what host {worst} lacks" if in_s >= out_s else "what all engines lack, from the trainer"
    )
    way = "lower bound" if is_forwarded else "lower bound, no forwarding"
    return Estimate(way, max(in_s, out_s), {"move": max(in_s, out_s)}, f"{what}, at line rate")


def busiest_card(loads: Loads, cluster: Cluster) -> tuple[str, int]:
    """The card with the most bytes in one direction, in words, and those bytes."""
    out, into = _most(loads.nic_out), _most(loads.nic_in)
    if not max(out, into):
        return "no network card", 0
    if out >= into:
        nic = int(np.argmax(loads.nic_out))
        rank = cluster.trainer.nic.index(nic)
        return f"card of trainer rank {rank} (host {cluster.trainer.host[rank]}), sending", out
    nic = int(np.argmax(loads.nic_in))
    for number, sites in enumerate(cluster.engines):
        if nic in sites.nic:
            rank = sites.nic.index(nic)
            return f"card of engine {number} rank {rank} (host {sites.host[rank]}), receiving", into
    return f"card {nic}", into


def is_all_local(loads: Loads) -> bool:
    """Whether nothing crosses the network."""
    return not loads.by_reach[Reach.NETWORK]


def _quantise_s(work: Work, c: Constants) -> float:
    """What the busiest trainer rank holds, once; not hidden behind the wire, though most of it is."""
    extra = work.source_bytes_per_wire_byte
    return 0.0 if extra <= 1 else work.held_bytes * (1 + extra) / c.quantise_bytes_per_s.value


def _after(landed_bytes: int, work: Work, c: Constants) -> dict[str, float]:
    """Digests of what landed, placing (a copy reads and writes), the read-back, messages."""
    read_s = landed_bytes / c.device_read_bytes_per_s.value
    place_s = 2 * landed_bytes / c.device_copy_bytes_per_s.value if work.is_staged else 0.0
    return {"verify": read_s, "place": place_s, "read back": read_s, "control": c.control_s.value}


def _total(way: str, terms: Mapping[str, float], bound: str) -> Estimate:
    return Estimate(way, sum(terms.values()), terms, bound)


def _most(values: Int64) -> int:
    return int(values.max(initial=0))
