"""How long does it take to plan a trillion parameters, and what does a rank get of the plan?

Kimi-K2 with all expert tensors, from 256 trainer ranks (PP 8 x EP 32) to eight engines of EP 32. Everything
is checked first: each plan against both layouts, bytes against what the targets hold, a share through
JSON and its segments against the plan's own. Then timed, on one core; seconds are of this process's
CPU, beside the clock, because a busy machine stretches the clock only.

    python benchmarks/plan_scale.py [--tiny] [--model NAME] [--wire bf16|fp8] [--rounds N] [--json FILE]
"""

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.binding import Landing, direct_table, plan_staging
from weightsync.layout import Layout
from weightsync.layouts.describe import engine_layout, trainer_layout
from weightsync.layouts.quantised import fp8_metas
from weightsync.model_shapes import model_metas
from weightsync.plan import RefitPlan, check_plan, plan_engines
from weightsync.planning.bind import BoundReads, Located, bind_reads
from weightsync.planning.contract import SourceMemory
from weightsync.planning.share import RankShare
from weightsync.planning.topology import sites_in_order
from weightsync.types import Availability, Capabilities, Contract, CostConstants, Placement

CAN = Capabilities(
    "p2p",
    {c: Availability(True) for c in Contract},
    {c: CostConstants(5e-6, 44e9) for c in Contract},
)


class Clock:
    """CPU and clock seconds of named steps."""

    def __init__(self) -> None:
        self.spent: dict[str, list[tuple[float, float]]] = {}

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        cpu_s, clock_s = time.process_time(), time.perf_counter()
        found = work()
        spent = time.process_time() - cpu_s, time.perf_counter() - clock_s
        self.spent.setdefault(name, []).append(spent)
        return found

    def medians(self) -> dict[str, tuple[float, float]]:
        return {
            name: (statistics.median(c for c, _ in runs), statistics.median(w for _, w in runs))
            for name, runs in self.spent.items()
        }


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Case:
    """The two layouts, and the plans between them."""

    def __init__(self, arguments: argparse.Namespace, clock: Clock) -> None:
        is_tiny: bool = arguments.tiny
        self.engines = 2 if is_tiny else 8
        metas = model_metas("tiny-moe" if is_tiny else arguments.model)
        pp, ep = (2, 4) if is_tiny else (8, 32)
        wired = metas if arguments.wire == "bf16" else fp8_metas(metas)
        wire = "bfloat16" if arguments.wire == "bf16" else "fp8"
        self.source: Layout = clock.timed(
            "describe the trainer", lambda: trainer_layout(wired, pp=pp, ep=ep)
        )
        self.target: Layout = clock.timed(
            "describe the engines", lambda: engine_layout(metas, ep=ep, wire=wire)
        )
        clock.timed("layout digests", lambda: (self.source.digest, self.target.digest))

    def plan(self) -> tuple[RefitPlan, ...]:
        ranks = self.target.world_size
        return plan_engines(
            self.source, [self.target] * self.engines, bucket_bytes=2**30, capabilities=CAN,
            source_sites=sites_in_order(self.source.world_size, gpus_per_host=8),
            target_sites=[sites_in_order(ranks, gpus_per_host=8, first_host=100 + 10 * i)
                          for i in range(self.engines)],
        )  # fmt: skip

    def located(self, epoch: int = 0) -> dict[tuple[int, int], Located]:
        """Made-up addresses: nothing is read."""
        return {
            (r, i): Located(((r + 1) << 40) + epoch * 4096, region.num_bytes, epoch)
            for r, regions in enumerate(self.source.regions)
            for i, region in enumerate(regions)
        }

    def landing(self, rank: int) -> Landing:
        """A staging copy, as quantised slots have no address of their own."""
        return plan_staging(self.target, rank, Placement.STAGED).spots(self.target, 1 << 50)


def check(case: Case, plans: tuple[RefitPlan, ...]) -> None:
    held = sum(
        p.box.num_elements * t.wire_forms[0].num_bytes // max(1, t.wire_forms[0].num_elements)
        for t in case.target.tensors
        for p in t.placed
    )
    for plan in plans:
        check_plan(plan, case.source, case.target)
        assert plan.total_bytes == held, (plan.total_bytes, held)
    rank = case.target.world_size - 1
    share = plans[-1].share(case.source, target_rank=rank)
    again = RankShare.from_json(json.loads(json.dumps(share.to_json())))
    assert again.digest == share.digest
    again.check(case.target)
    check_rows(case, plans[-1], again, case.landing(rank))


def check_rows(case: Case, plan: RefitPlan, share: RankShare, landing: Landing) -> None:
    """The bound share is what the plan itself becomes, row by row."""
    bound = bind_reads(share, case.located(), landing)
    base = np.array([place.ptr for place in bound.located])[bound.region_of]
    mine = bound.rows.copy()
    mine[:, 0] -= base
    rows = direct_table(plan, case.source, {0: 0}, landing, share.rank)
    assert sorted(mine.tolist()) == sorted(rows.tolist())


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    clock = Clock()
    case = Case(arguments, clock)
    before_gb = peak_gb()
    plans = case.plan()
    check(case, plans)
    for _ in range(arguments.rounds):
        plans = clock.timed("plan all engines", case.plan)
        clock.timed("digests of the plans", lambda: [p.digest for p in plans])  # noqa: B023
    gc.freeze()  # a rank's process does not hold the records of a whole cluster, so nothing walks them
    memory = SourceMemory(case.source)
    rank, sizes = case.target.world_size // 2, []
    landing = case.landing(rank)
    for _ in range(max(5, arguments.rounds)):
        share: RankShare = clock.timed(
            "one rank's share", lambda: plans[0].share(memory, target_rank=rank)
        )
        text = clock.timed("share to JSON", lambda: json.dumps(share.to_json()))  # noqa: B023
        sizes.append(len(text))
        share = clock.timed("share from JSON", lambda: RankShare.from_json(json.loads(text)))  # noqa: B023
        replay(case, share, landing, clock)
    return {
        "model": "tiny-moe" if arguments.tiny else arguments.model,
        "wire": arguments.wire,
        "trainer_ranks": case.source.world_size,
        "engines": case.engines,
        "engine_ranks": case.target.world_size,
        "tensors": len(case.source.tensors),
        "transfers": sum(len(p.transfers) for p in plans),
        "bytes": sum(p.total_bytes for p in plans),
        "share_bytes": max(sizes),
        "share_transfers": len(share.transfers),
        "seconds": clock.medians(),
        "peak_gb": peak_gb(),
        "peak_gb_before_planning": before_gb,
    }


def replay(case: Case, share: RankShare, landing: Landing, clock: Clock) -> None:
    places, moved = case.located(), case.located(epoch=1)
    bound: BoundReads = clock.timed("bind", lambda: bind_reads(share, places, landing))
    same = clock.timed("a refit, nothing moved", lambda: bound.rebound(places))
    assert same is bound
    again = clock.timed("a refit, every region moved", lambda: bound.rebound(moved))
    assert (again.rows[:, 0] - bound.rows[:, 0] == 4096).all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--model", default="kimi-k2")
    parser.add_argument("--wire", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds = 1
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = run(arguments)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, one core")
    print(
        f"{found['model']}, {found['tensors']:,} tensors, {found['wire']} on the wire: "
        f"{found['trainer_ranks']} trainer ranks, {found['engines']} engines of "
        f"{found['engine_ranks']}"
    )
    print(f"{found['transfers']:,} transfers, {found['bytes'] / 1e12:.3f} TB")
    print(f"\n{'step':<30}{'CPU s':>10}{'clock s':>10}")
    for name, (cpu_s, clock_s) in found["seconds"].items():
        print(f"{name:<30}{cpu_s:>10.4f}{clock_s:>10.4f}")
    print(
        f"\nshare of one engine rank: {found['share_transfers']:,} transfers, "
        f"{found['share_bytes'] / 1e6:.3f} MB"
    )
    print(f"peak memory: {found['peak_gb']:.2f} GB ({found['peak_gb_before_planning']:.2f} before)")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
