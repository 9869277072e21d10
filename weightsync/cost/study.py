"""A cluster from a description: layouts, plans, loads and estimates in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weightsync.cost.constants import Constants
from weightsync.cost.estimates import (
    Estimate,
    Work,
    estimate_broadcast,
    estimate_p2p,
    lower_bound,
)
from weightsync.cost.loads import Cluster, Loads, loads_of
from weightsync.errors import ConfigError
from weightsync.layout import Layout
from weightsync.layouts.describe import engine_layout, trainer_layout
from weightsync.layouts.quantised import fp8_metas
from weightsync.plan import RefitPlan, plan_engines
from weightsync.planning.contract import SourceMemory, run_counts
from weightsync.planning.forward import HandingOn, choose_relays
from weightsync.planning.topology import sites_in_order
from weightsync.types import (
    Availability,
    Capabilities,
    Contract,
    CostConstants,
    TensorMeta,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a cluster looks like. Layouts by kind of parallelism, as ``layouts.describe`` takes them."""

    trainer: dict[str, int]
    engine: dict[str, int]
    num_engines: int = 1
    wire: str = "bf16"
    line_bytes_per_s: float = 50e9
    gpus_per_host: int = 8
    nics_per_host: int | None = None  # None: one for each GPU
    is_colocated: bool = False  # the engines share the trainer's hosts and GPUs
    bucket_bytes: int = 2**30
    head_dim: int | None = None  # where neither a norm of heads nor 128 tells it
    constants: Constants = field(default_factory=Constants)


@dataclass(frozen=True, eq=False)
class Study:
    """What was found."""

    setup: Setup
    metas: tuple[TensorMeta, ...]  # in wire form
    source: Layout
    target: Layout  # of each engine
    plans: tuple[RefitPlan, ...]
    cluster: Cluster
    loads: Loads
    forwarded: Loads
    work: Work
    estimates: tuple[Estimate, ...]

    def estimate(self, way: str) -> Estimate:
        """The estimate of that way."""
        return next(e for e in self.estimates if e.way == way)


P2P, FORWARDED, BROADCAST = "p2p", "p2p, forwarding", "broadcast"


def study(
    metas: Sequence[TensorMeta], setup: Setup, progress: Callable[[str], None] = lambda _: None
) -> Study:
    """Plan and predict. Raises :class:`ConfigError` for counts that do not fit each other."""
    wired = tuple(metas) if setup.wire == "bf16" else fp8_metas(metas)
    progress("describing the trainer")
    source = trainer_layout(wired, **setup.trainer)
    progress("describing the engines")
    target = engine_layout(metas, wire=_WIRES[setup.wire], head_dim=setup.head_dim, **setup.engine)
    cluster = _cluster(source.world_size, target.world_size, setup)
    progress("planning")
    plans = plan_engines(
        source, [target] * setup.num_engines, bucket_bytes=setup.bucket_bytes,
        capabilities=_capabilities(setup, target.world_size), source_sites=cluster.trainer,
        target_sites=cluster.engines,
    )  # fmt: skip
    progress("weighing links")
    memory = SourceMemory(source)
    operations = [run_counts(p.transfers, memory, p.tensors) for p in plans]
    columns = [p.transfers for p in plans]
    loads = loads_of(columns, cluster, operations)
    vias = choose_relays(columns, cluster.trainer, cluster.engines, _handing_on(setup))
    forwarded = loads_of(columns, cluster, operations, vias)
    unique = sum(m.num_bytes for m in wired)
    work = Work(
        line_bytes_per_s=setup.line_bytes_per_s,
        bucket_bytes=setup.bucket_bytes,
        unique_bytes=unique,
        held_bytes=max(sum(r.num_bytes for r in regions) for regions in source.regions),
        source_bytes_per_wire_byte=1 if setup.wire == "bf16" else _bytes_ratio(metas, unique),
    )
    c = setup.constants
    estimates = (
        lower_bound(columns, cluster, work, is_forwarded=True),
        lower_bound(columns, cluster, work, is_forwarded=False),
        estimate_p2p(FORWARDED, forwarded, cluster, work, c),
        estimate_p2p(P2P, loads, cluster, work, c),
        estimate_broadcast(loads, work, c),
    )
    return Study(
        setup, wired, source, target, plans, cluster, loads, forwarded, work, estimates
    )  # fmt: skip


def _handing_on(setup: Setup) -> HandingOn:
    c = setup.constants
    return HandingOn(
        max(1, int(setup.line_bytes_per_s * c.nic_share.value / 1e6)),
        int(c.nvlink_bytes_per_s.value / 1e6),
        math.ceil(c.nic_op_s.value * 1e6),
    )


_WIRES = {"bf16": "bfloat16", "fp8": "fp8"}


def _bytes_ratio(metas: Sequence[TensorMeta], unique: int) -> float:
    return max(1.0, sum(m.num_bytes for m in metas) / unique)


def _cluster(trainer_ranks: int, engine_ranks: int, setup: Setup) -> Cluster:
    if setup.num_engines < 1:
        raise ConfigError(f"{setup.num_engines} engines: there must be at least one")
    hosts = {"gpus_per_host": setup.gpus_per_host, "nics_per_host": setup.nics_per_host}
    trainer = sites_in_order(trainer_ranks, **hosts)  # type: ignore[arg-type]
    if setup.is_colocated and engine_ranks * setup.num_engines > trainer_ranks:
        raise ConfigError(
            f"{setup.num_engines} engines of {engine_ranks} ranks do not fit on the trainer's "
            f"{trainer_ranks} GPUs"
        )
    # Engines that are smaller than a host share one.
    everyone = sites_in_order(
        engine_ranks * setup.num_engines,
        first_host=0 if setup.is_colocated else max(trainer.host) + 1,
        **hosts,  # type: ignore[arg-type]
    )
    parts = [slice(i * engine_ranks, (i + 1) * engine_ranks) for i in range(setup.num_engines)]
    engines = (type(everyone)(everyone.host[p], everyone.gpu[p], everyone.nic[p]) for p in parts)
    return Cluster(trainer, tuple(engines))


def _capabilities(setup: Setup, engine_ranks: int) -> Capabilities:
    """Of the one-sided transport, by the same constants; an engine's ranks work side by side."""
    rate = setup.line_bytes_per_s * setup.constants.nic_share.value
    op_s = setup.constants.nic_op_s.value
    # A stream fills and empties slots beside the wire; only the first and the last are waited for.
    copy_s = 2 * setup.bucket_bytes / setup.constants.device_copy_bytes_per_s.value
    bytes_per_s = rate * engine_ranks
    yes = Availability(True)
    return Capabilities(
        "p2p", {Contract.DIRECT: yes, Contract.STREAM: yes},
        {
            Contract.DIRECT: CostConstants(op_s / engine_ranks, bytes_per_s),
            Contract.STREAM: CostConstants((op_s + copy_s) / engine_ranks, bytes_per_s),
        },
    )  # fmt: skip
