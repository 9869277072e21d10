"""The same layouts give the same plan, on every machine, in every process, by every version.

A golden digest that changes breaks updates between two versions of this library: change it only
together with the protocol.
"""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from layouts import Held, build, shards, whole

from weightsync.layout import Layout
from weightsync.plan import RefitPlan, plan_engines
from weightsync.planning.forward import HandingOn
from weightsync.planning.topology import sites_in_order
from weightsync.types import (
    Availability,
    Box,
    Capabilities,
    Contract,
    ContractChoice,
    CostConstants,
)

GOLDEN = {
    "engine 0": "d30431bb402b485b0f3e90b082a434f86d2d2249912cb41ac6dedb917f8a38b1",
    "engine 1": "6eec1bdc90f5cbaaf7ea1414ee8d2a4129f9dca651465335ece4ef70b7108bd8",
    "share of engine 1, rank 2": "5e8c2eb706244187b46a6f7b00512916f3efacb0d2226c6c9fc405c6e17a0b36",
    "engine 1, handed on": "58dfa59182f65aa4d2d5cef4a44eff8b0f8e56429ce36b7bd553e581a17d4eb2",
    "share of engine 1, rank 1, relayed": "2bfdda329173637a50ad7f71faee612cee898be89454cb652828cf7f888eb7dc",
}


def trainer(seed: int | None = None) -> Layout:
    """Four ranks: two replicas of rows in halves; experts on one rank each; a vector everywhere."""
    rows = [replace(h, rank=h.rank + 2 * r) for r in range(2) for h in shards((6, 4), 0, [3, 6])]
    tensors = {
        "rows": ("bfloat16", (6, 4), rows),
        "vector": ("float32", (5,), [whole((5,), r) for r in range(4)]),
        "scalar": ("int64", (), [Held(1, Box((), ()), ())]),
        "nothing": ("int8", (0, 3), [whole((0, 3), 2)]),
        **{f"expert.{e}": ("bfloat16", (2, 3), [whole((2, 3), e % 4)]) for e in range(6)},
    }
    names = list(tensors)
    if seed is not None:
        random.Random(seed).shuffle(names)
    return build(4, {n: tensors[n] for n in names}, aliases={"tied": "rows", "also": "rows"}).layout


def engine(ranks: int) -> Layout:
    """Columns of the rows; experts dealt out; the rest everywhere."""
    stops = [(i + 1) * 4 // ranks for i in range(ranks)]
    return build(
        ranks,
        {
            "vector": ("float32", (5,), [whole((5,), r) for r in range(ranks)]),
            **{f"expert.{e}": ("bfloat16", (2, 3), [whole((2, 3), e % ranks)]) for e in range(6)},
            "rows": ("bfloat16", (6, 4), shards((6, 4), 1, stops)),
            "scalar": ("int64", (), [Held(0, Box((), ()), ())]),
            "nothing": ("int8", (0, 3), [whole((0, 3), 0)]),
        },
        aliases={"also": "rows", "tied": "rows"},
    ).layout


def plans(source: Layout, handing_on: HandingOn | None = None) -> tuple[RefitPlan, ...]:
    have = Capabilities(
        "fake", {c: Availability(True) for c in Contract},
        {c: CostConstants(0.0, 1e9) for c in Contract}, True,
    )  # fmt: skip
    return plan_engines(
        source, [engine(2), engine(3)], bucket_bytes=4096, capabilities=have,
        choice=ContractChoice.DIRECT,
        source_sites=sites_in_order(4, gpus_per_host=2),
        target_sites=[sites_in_order(2, gpus_per_host=2, first_host=1),
                      sites_in_order(3, gpus_per_host=2, first_host=2)],
        handing_on=handing_on,
    )  # fmt: skip


def digests() -> dict[str, str]:
    source = trainer()
    first, second = plans(source)
    share = second.share(source, target_rank=2)
    _, handed = plans(source, HandingOn(50_000, 400_000, 0))
    relayed = handed.share(source, target_rank=1)
    return {
        "engine 0": first.digest, "engine 1": second.digest, "share of engine 1, rank 2": share.digest,
        "engine 1, handed on": handed.digest, "share of engine 1, rank 1, relayed": relayed.digest,
    }  # fmt: skip


def test_digests_are_the_committed_ones() -> None:
    assert digests() == GOLDEN


def test_neither_hash_seed_nor_process_matters() -> None:
    code = "import test_golden; print(sorted(test_golden.digests().items()))"
    here = Path(__file__)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, timeout=60, check=True, cwd=here.parent,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{here.parents[1]}:{here.parents[2]}"},
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert outputs == {str(sorted(GOLDEN.items()))}


def test_the_order_of_the_trainers_tensors_does_not_matter() -> None:
    def told(plan: RefitPlan) -> list[object]:
        return [
            (plan.tensors[t.tensor].meta, t.source_rank, t.target_rank, t.box, t.num_bytes)
            for t in plan.transfers
        ]

    for one, other in zip(plans(trainer()), plans(trainer(seed=3)), strict=True):
        assert told(one) == told(other)


def test_the_order_of_aliases_does_not_matter() -> None:
    source = trainer()
    turned = replace(source, aliases=dict(reversed(source.aliases.items())))
    assert [p.digest for p in plans(turned)] == [p.digest for p in plans(source)]
