"""The run behind ``weightsync bench``: two workers, repeats, proofs, figures."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weightsync import __version__
from weightsync.cli.bench import BenchSettings
from weightsync.cli.bench_fit import Sample, fit
from weightsync.cli.bench_model import (
    ENGINE_MASK,
    ModelChoice,
    check_room,
    choose_model,
    mask_of,
    ready_checkpoint,
    show_progress,
)
from weightsync.cli.bench_process import WorkerProcess
from weightsync.cli.bench_report import draw, table
from weightsync.errors import ConfigError, IntegrityError, MissingDependencyError
from weightsync.packages import is_installed
from weightsync.transports import get_transport
from weightsync.types import Placement

#: Names of the phases of a refit, by the names in an engine's report whose seconds add up to them.
#: ``prepare`` and ``commit`` are what these stages take beyond the work listed on its own.
PHASES: dict[str, tuple[str, ...]] = {
    "begin": ("begin",),
    "pack": ("pack",),
    "move": ("move",),
    "digest": ("digest",),
    "prepare": ("prepare", "-engine_verify"),
    "verify": ("engine_verify",),
    "place": ("engine_place",),
    "read_back": ("engine_read_back",),
    "commit": ("commit", "-engine_place", "-engine_read_back"),
}
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
    num_threads: int = 1
    trainer_extra_bytes: int = 0
    engine_extra_bytes: int = 0
    is_verified: bool = True
    num_tensors: int = 0
    total_bytes: int = 0
    traffic: dict[str, Any] | None = None  # of an engine that generates


def run_bench(settings: BenchSettings) -> int:
    """Measure, print the table, write the files; the exit status."""
    check_packages(settings)
    choice = choose_model(settings.model)
    check_room(choice, settings.placement, settings.bucket)
    choice = ready_checkpoint(choice)
    with WorkerProcess("engine") as engine, WorkerProcess("trainer") as trainer:
        measured = _measure(settings, choice, trainer, engine)
    result = summarise(settings, choice, measured)
    show_progress("")
    print(table(result))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(result, indent=1) + "\n")
    if settings.plot_file is not None:
        draw(result, settings.plot_file)
    return 0 if result["verified"] else 1


def check_packages(settings: BenchSettings) -> None:
    """Refuse before anything is loaded, with what to install.

    Raises :class:`MissingDependencyError` or :class:`ConfigError`.
    """
    needed = [("torch", "hf", "models are torch modules"), ("transformers", "hf", "it loads them")]
    if settings.plot_file is not None:
        needed.append(("matplotlib", "bench", "--plot draws with it"))
    for package, extra, why in needed:
        if not is_installed(package):
            raise MissingDependencyError(package, extra, why)
    have = get_transport(settings.transport).capabilities()
    if not have.is_usable:
        found = next(iter(have.contracts.values()))
        raise ConfigError(
            f"{settings.transport} cannot be used here: {found.reason}. To mend it: {found.remedy}"
        )


def _measure(
    settings: BenchSettings, choice: ModelChoice, trainer: WorkerProcess, engine: WorkerProcess
) -> Measured:
    show_progress(f"loading {choice.name} in both processes")
    trainer.send("load", choice=asdict(choice), mask=0)
    load = "load_core" if settings.engine == "core" else "load"
    engine.call(load, choice=asdict(choice), mask=ENGINE_MASK)
    trainer.answer("load")
    url = engine.call("serve")["url"]
    options = {
        "transport": settings.transport,
        "bucket": settings.bucket,
        "placement": settings.placement,
        "contract": settings.contract,
        "strict": settings.strict,
    }
    measured = Measured()
    trainer.call(
        "change", mask=mask_of(0)
    )  # its own pages, not the file's, before memory is watched
    connected = trainer.call("connect", url=url, options=options)
    measured.connect_s = connected["connect_s"]

    if settings.engine == "core":
        engine.call("start_traffic")
    # The first refit pays for plan, registration and staging memory.
    measured.first = _refit(trainer, engine, measured, version=1, is_sampled=False)
    for i in range(settings.repeat):
        show_progress(f"refit {i + 1} of {settings.repeat}")
        ceiling = trainer.call("ceiling", total_bytes=choice.total_bytes)
        measured.ceilings.append(ceiling["gb_per_s"])
        measured.num_threads = ceiling["num_threads"]
        measured.refits.append(_refit(trainer, engine, measured, version=i + 2))
    if settings.engine == "core":
        measured.traffic = engine.call("stop_traffic")
    trainer.call("drop_ceiling")
    last = _measure_scopes(trainer, measured, settings.repeat + 2)
    _measure_memory(trainer, engine, measured, {"url": url, "options": options}, last)
    return measured


def _refit(
    trainer: WorkerProcess,
    engine: WorkerProcess,
    measured: Measured,
    version: int,
    *,
    is_sampled: bool = True,
) -> dict[str, Any]:
    """One proven refit: everything differs before, nothing after; each side digests its own."""
    trainer.call("change", mask=mask_of(version))
    sent = trainer.call("digest")
    before = engine.call("digest")
    same = [n for n in before if before[n] == sent.get(n)]
    if same:
        raise IntegrityError(
            f"before refit {version}, {len(same)} tensors of the engine already equal the trainer's "
            f"(first: {same[0]!r}): this run could not prove anything"
        )
    found = trainer.call("refit", version=version, names=None)
    after = engine.call("digest")
    measured.is_verified = measured.is_verified and _agree(sent, after)
    if is_sampled:
        measured.samples.append(_sample(found))
    measured.num_tensors, measured.total_bytes = found["num_tensors"], found["num_bytes"]
    return found


def _measure_memory(
    trainer: WorkerProcess,
    engine: WorkerProcess,
    measured: Measured,
    connection: dict[str, Any],
    version: int,
) -> None:
    """Peak memory of a refit over a fresh connection, against the connected state.

    A refit of its own, since the kernel stops a process to count its pages. The engine's staging copy
    stays from the refits before, so what is seen is beyond what the placement needs.
    """
    show_progress("watching memory")
    trainer.call("connect", **connection)
    for worker in (trainer, engine):
        worker.call("watch")
    _refit(trainer, engine, measured, version, is_sampled=False)
    measured.trainer_extra_bytes = trainer.call("watched")["extra_bytes"]
    measured.engine_extra_bytes = engine.call("watched")["extra_bytes"]


def _agree(sent: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Every live tensor of the engine digests as the trainer's; tied names travel once."""
    return bool(found) and all(sent.get(name) == digest for name, digest in found.items())


def _sample(refit: Mapping[str, Any]) -> Sample:
    seconds = refit["phases"]["move"]
    return Sample(refit["num_buckets"], refit["num_tensors"], refit["num_bytes"], seconds)


def _measure_scopes(trainer: WorkerProcess, measured: Measured, version: int) -> int:
    """Refits of parts, so that the costs of buckets, tensors and bytes come apart;
    returns the next version."""
    names = sorted(trainer.call("digest"))
    parts: list[Sequence[str]] = [names[::2], names[1::4], names[::8], names[:1], names[-4:]]
    for part in [p for p in parts if p] * 2:
        show_progress(f"refit of {len(part)} tensors")
        found = trainer.call("refit", version=version, names=list(part))
        measured.samples.append(_sample(found))
        version += 1
    return version


# --- figures --------------------------------------------------------------------------------------


def summarise(settings: BenchSettings, choice: ModelChoice, measured: Measured) -> dict[str, Any]:
    """The result under stable names (seconds, bytes, GB/s with GB = 10^9)."""
    seconds = [r["seconds"] for r in measured.refits]
    median_s = statistics.median(seconds)
    ceiling = statistics.median(measured.ceilings)
    move_s = statistics.median(r["phases"]["move"] for r in measured.refits)
    rate = measured.total_bytes / median_s / 1e9
    staged_bytes = measured.total_bytes if settings.placement == Placement.STAGED.value else 0
    return {
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
        "seconds": {"median": median_s, "min": min(seconds), "p99": _percentile(seconds, 0.99)},
        "phases": _phases(measured),
        "gb_per_s": rate,
        "move_gb_per_s": measured.total_bytes / move_s / 1e9,
        "ceiling_gb_per_s": ceiling,
        "ceiling": f"memcpy, {measured.num_threads} threads",
        "fraction_of_ceiling": rate / ceiling,
        "move_fraction_of_ceiling": measured.total_bytes / move_s / 1e9 / ceiling,
        "fit": fit(measured.samples),
        "pause_seconds": statistics.median(r["pause_s"] for r in measured.refits),
        "peak_extra_bytes": max(measured.trainer_extra_bytes, measured.engine_extra_bytes),
        "trainer_extra_bytes": measured.trainer_extra_bytes,
        "engine_extra_bytes": measured.engine_extra_bytes,
        "placement_bytes": staged_bytes,
        "verified": measured.is_verified and _was_served(measured.traffic),
        "versions": versions(),
    } | ({} if measured.traffic is None else {"traffic": measured.traffic})


def _was_served(traffic: Mapping[str, Any] | None) -> bool:
    """Whoever asked the engine during the refits got an answer."""
    return traffic is None or (not traffic["failures"] and traffic["num_tokens"] > 0)


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


def versions() -> dict[str, str]:
    """What ran, for whoever reads the figures later."""
    from importlib import metadata

    found = {"weightsync": __version__, "python": sys.version.split()[0]}
    for package in ("torch", "numpy", "transformers", "nixl-cu13", "nixl-cu12"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["platform"] = platform.platform()
    found["processor"] = _processor()
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
