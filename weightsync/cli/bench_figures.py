"""What the repeats of ``bench`` gave, and the figures made of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync.cli.bench import BenchSettings
from weightsync.cli.bench_fit import Sample, fit
from weightsync.cli.bench_model import ModelChoice
from weightsync.cli.versions import versions
from weightsync.types import Placement

#: Names of the phases of a refit, by the names in an engine's report whose seconds add up to them.
#: ``prepare`` and ``commit`` are what these stages take beyond the work listed on its own.
PHASES: dict[str, tuple[str, ...]] = {
    "begin": ("begin",),
    "pack": ("pack",),
    "move": ("move",),
    "read_device": ("engine_read_device",),
    "digest": ("digest",),
    "prepare": ("prepare", "-engine_verify"),
    "verify": ("engine_verify",),
    "place": ("engine_place",),
    "read_back": ("engine_read_back",),
    "commit": ("commit", "-engine_place", "-engine_read_back"),
}
#: What an update asks of the engine; the trainer publishes and digests its sources before.
STAGES = ("begin", "move", "prepare", "commit")
#: Paid by the first refit of a connection only.
ONCE_PHASES: dict[str, tuple[str, ...]] = {
    "plan": ("plan",),
    "register": ("register", "engine_register"),
}


@dataclass
class Measured:
    """What the repeats gave."""

    connect_s: float = 0.0
    first: dict[str, Any] = field(default_factory=dict)
    refits: list[dict[str, Any]] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ceiling: str = ""  # what was measured
    trainer_extra_bytes: int = 0
    engine_extra_bytes: int = 0
    device_extra_bytes: int = 0  # of both processes, what the placement holds included
    flipped: int = 0  # all bits that the trainer flipped so far
    num_different: int | None = None  # tensors that are not what was drawn, where that can be told
    growth: dict[str, Any] | None = None
    is_verified: bool = True
    num_tensors: int = 0
    total_bytes: int = 0
    traffic: dict[str, Any] | None = None  # of an engine that generates


def summarise(settings: BenchSettings, choice: ModelChoice, measured: Measured) -> dict[str, Any]:
    """The result under stable names (seconds, bytes, GB/s with GB = 10^9)."""
    seconds = [r["seconds"] for r in measured.refits]
    median_s = statistics.median(seconds)
    ceiling = statistics.median(measured.ceilings)
    move_s = statistics.median(r["phases"]["move"] for r in measured.refits)
    begin_to_commit_s = statistics.median(
        sum(r["phases"].get(stage, 0.0) for stage in STAGES) for r in measured.refits
    )
    rate = measured.total_bytes / median_s / 1e9
    served = {} if measured.traffic is None else {"traffic": measured.traffic}
    staged_bytes = measured.total_bytes if settings.placement == Placement.STAGED.value else 0
    return served | {
        "transport": settings.transport,
        "device": settings.device,
        "engine": settings.engine,
        "model": choice.name,
        "num_tensors": measured.num_tensors,
        "total_bytes": measured.total_bytes,
        "bucket_bytes": _bucket_bytes(settings),
        "placement": settings.placement,
        "contract": measured.refits[-1]["contract"],
        "path": measured.refits[-1]["path"],
        "repeat": settings.repeat,
        "begin_to_commit_seconds": begin_to_commit_s,
        "seconds": {"median": median_s, "min": min(seconds), "p99": _percentile(seconds, 0.99)},
        "phases": _phases(measured),
        "gb_per_s": rate,
        "move_gb_per_s": measured.total_bytes / move_s / 1e9,
        "ceiling_gb_per_s": ceiling,
        "ceiling": measured.ceiling,
        "fraction_of_ceiling": rate / ceiling,
        "move_fraction_of_ceiling": measured.total_bytes / move_s / 1e9 / ceiling,
        "fit": fit(measured.samples),
        "pause_seconds": statistics.median(r["pause_s"] for r in measured.refits),
        "peak_extra_bytes": max(measured.trainer_extra_bytes, measured.engine_extra_bytes),
        "trainer_extra_bytes": measured.trainer_extra_bytes,
        "engine_extra_bytes": measured.engine_extra_bytes,
        "device_extra_bytes": measured.device_extra_bytes,
        "placement_bytes": staged_bytes,
        "verified": _is_verified(measured),
        "num_tensors_that_differ": measured.num_different,
        "growth": measured.growth,
        "versions": versions(),
    }


def _is_verified(measured: Measured) -> bool:
    """Every bit arrived, and whoever asked the engine during the refits got an answer."""
    traffic = measured.traffic
    is_served = traffic is None or (not traffic["failures"] and traffic["num_tokens"] > 0)
    return measured.is_verified and not measured.num_different and is_served


def _bucket_bytes(settings: BenchSettings) -> int:
    from weightsync.sources import resolve_bucket

    return resolve_bucket(settings.bucket)


def _phases(measured: Measured) -> dict[str, float]:
    """Median seconds by phase; what the connection and its first refit cost once, first."""
    phases = {"connect": measured.connect_s}
    phases |= {name: _added(measured.first, keys) for name, keys in ONCE_PHASES.items()}
    for name, keys in PHASES.items():
        if any(keys[-1].lstrip("-") in r["phases"] for r in measured.refits):
            phases[name] = statistics.median(_added(r, keys) for r in measured.refits)
    phases["first_refit"] = measured.first["seconds"]
    return phases


def _added(refit: Mapping[str, Any], keys: Sequence[str]) -> float:
    """Sum of named seconds; a leading minus takes away."""
    found: Mapping[str, float] = refit["phases"]
    total = sum(found.get(k.lstrip("-"), 0.0) * (-1 if k.startswith("-") else 1) for k in keys)
    return max(0.0, total)


def _percentile(values: Sequence[float], part: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
