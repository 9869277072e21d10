"""The run behind ``weightsync bench --transport disk-delta``."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weightsync.cli.bench import BenchSettings
from weightsync.cli.bench_model import (
    ENGINE_MASK,
    ModelChoice,
    check_room,
    choose_model,
    ready_checkpoint,
    show_progress,
)
from weightsync.cli.bench_process import WorkerProcess
from weightsync.cli.bench_report import row
from weightsync.cli.bench_run import check_packages
from weightsync.cli.versions import versions
from weightsync.device_tables import CPU
from weightsync.errors import CapacityError, ConfigError, IntegrityError
from weightsync.types import format_bytes

_TMPFS = Path("/dev/shm")


def run_delta(settings: BenchSettings) -> int:
    """Measure, print the table, write the files; the exit status."""
    if settings.device != CPU:
        raise ConfigError(
            f"--transport disk-delta --device {settings.device}: deltas are coded and applied in host "
            "memory so far"
        )
    choice = choose_model(settings.model)
    check_packages(settings, choice)
    check_room(choice, settings.placement, "64MiB")
    choice = ready_checkpoint(choice)
    with (
        _store_directory(settings, choice) as directory,
        WorkerProcess("delta-engine") as engine,
        WorkerProcess("delta-trainer") as trainer,
    ):
        result = _measure(settings, choice, directory, trainer, engine)
    show_progress("")
    print(table(result))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["verified"] else 1


@contextmanager
def _store_directory(settings: BenchSettings, choice: ModelChoice) -> Iterator[Path]:
    """One of our own, removed afterwards: in --store, else in memory, where the disk does not count."""
    where = settings.store_directory
    if where is None:
        where = _TMPFS if _TMPFS.is_dir() else Path(tempfile.gettempdir())
    free = shutil.disk_usage(where).free
    need = choice.total_bytes * 2  # a full version, and deltas that could be as large
    if free < need:
        raise CapacityError(
            f"{where}: {format_bytes(need)} are needed for a store of {choice.name!r}, "
            f"{format_bytes(free)} are free; give another place with --store DIR"
        )
    with tempfile.TemporaryDirectory(prefix="weightsync-store-", dir=where) as directory:
        yield Path(directory)


def _measure(
    settings: BenchSettings,
    choice: ModelChoice,
    directory: Path,
    trainer: WorkerProcess,
    engine: WorkerProcess,
) -> dict[str, Any]:
    show_progress(f"loading {choice.name} in both processes")
    for worker in (trainer, engine):
        worker.call("use", device=settings.device)
    trainer.send("load", choice=asdict(choice), mask=0)
    load = "load_core" if settings.engine == "core" else "load"
    engine.call(load, choice=asdict(choice), mask=ENGINE_MASK)
    trainer.answer("load")
    engine.call("serve")
    trainer.call("publish_to", directory=str(directory))
    engine.call("follow", directory=str(directory), placement=settings.placement, verify="read")
    if settings.engine == "core":
        engine.call("start_traffic")
    is_verified = True
    rounds: list[dict[str, Any]] = []
    for version in range(settings.repeat + 1):
        show_progress(f"version {version} of {settings.repeat}")
        if version == settings.repeat:
            trainer.call("keep")
        trainer.call("change_sparsely", seed=version)
        found = _round(trainer, engine, version)
        is_verified = is_verified and found.pop("is_verified")
        rounds.append(found)
    traffic = engine.call("stop_traffic") if settings.engine == "core" else None
    show_progress("coding by other formats")
    compared = trainer.call("baselines", directory=str(directory), version=settings.repeat)
    show_progress("a full reload")
    (full,) = directory.glob(f"*/v{0:012}-*")
    reload = engine.call("reload", directory=str(full), version=1)
    is_served = traffic is None or (not traffic["failures"] and traffic["num_tokens"] > 0)
    is_verified = is_verified and is_served and all(r["is_same"] for r in compared["rows"])
    return summarise(settings, choice, rounds, compared, reload, traffic, is_verified)


def _round(trainer: WorkerProcess, engine: WorkerProcess, version: int) -> dict[str, Any]:
    """One proven version: each side digests its own before and after."""
    sent, before = trainer.call("digest"), engine.call("digest")
    if all(before[name] == sent.get(name) for name in before):
        raise IntegrityError(
            f"before version {version} the engine holds it: nothing could be proven"
        )
    trainer.call("publish", version=version)
    published = trainer.call("published")
    pulled = engine.call("pull")
    after = engine.call("digest")
    is_same = bool(after) and all(sent.get(name) == digest for name, digest in after.items())
    return {**published, "pull": pulled, "is_verified": is_same}


def summarise(
    settings: BenchSettings,
    choice: ModelChoice,
    rounds: list[dict[str, Any]],
    compared: Mapping[str, Any],
    reload: Mapping[str, Any],
    traffic: Mapping[str, Any] | None,
    is_verified: bool,
) -> dict[str, Any]:
    """The result under stable names (seconds, bytes; medians over the deltas)."""
    first, deltas = rounds[0], rounds[1:]

    def median(pick: Any) -> float:
        return float(statistics.median(pick(r) for r in deltas))

    return {
        "transport": settings.transport,
        "device": settings.device,
        "engine": settings.engine,
        "model": choice.name,
        "num_tensors": choice.num_tensors,
        "total_bytes": first["total_bytes"],
        "placement": settings.placement,
        "contract": "store",
        "repeat": settings.repeat,
        "kinds": [r["kind"] for r in rounds],
        "encode_seconds": median(lambda r: r["encode_s"]),
        "publish_seconds": median(lambda r: r["publish_s"]),
        "fetch_seconds": median(lambda r: r["pull"]["phases"].get("fetch", 0.0)),
        "place_seconds": median(lambda r: r["pull"]["phases"].get("place", 0.0)),
        "pause_seconds": median(lambda r: r["pull"]["pause_s"]),
        "pull_seconds": median(lambda r: r["pull"]["seconds"]),
        "publish_to_served_seconds": median(
            lambda r: r["encode_s"] + r["publish_s"] + r["pull"]["seconds"]
        ),
        "payload_bytes": median(lambda r: r["payload_bytes"]),
        "num_changed": median(lambda r: r["num_changed"]),
        "bits_per_changed_element": median(
            lambda r: 8 * r["payload_bytes"] / max(r["num_changed"], 1)
        ),
        "full_version": {
            "encode_seconds": first["encode_s"],
            "publish_seconds": first["publish_s"],
            "payload_bytes": first["payload_bytes"],
            "pull_seconds": first["pull"]["seconds"],
            "pause_seconds": first["pull"]["pause_s"],
        },
        "reload_pause_seconds": reload["pause_s"],
        "reload_seconds": reload["seconds"],
        "baselines": [
            {
                **r,
                "bits_per_changed_element": 8
                * r["payload_bytes"]
                / max(compared["num_changed"], 1),
            }
            for r in compared["rows"]
        ],
        "baseline_bytes": compared["num_bytes"],
        **({} if traffic is None else {"traffic": dict(traffic)}),
        "verified": is_verified,
        "versions": versions(),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    total, full = result["total_bytes"], result["full_version"]
    changed = result["num_changed"]
    lines = [
        f"weightsync bench: {result['model']} by disk-delta on {result['device']}",
        "",
        row("tensors", f"{result['num_tensors']:,}"),
        row("bytes", f"{format_bytes(total)} ({total:,} B)"),
        row("changed elements", f"{changed:,.0f} a version"),
        "",
        f"{'':<24}{'delta':>12}{'full':>12}",
    ]
    for label, name in (
        ("encode", "encode_seconds"), ("publish", "publish_seconds"), ("fetch and decode", "fetch_seconds"),
        ("scatter and check", "place_seconds"), ("pause of the engine", "pause_seconds"),
        ("pull", "pull_seconds"), ("publish to served", "publish_to_served_seconds"),
    ):  # fmt: skip
        other = f"{full[name]:>10.4f} s" if name in full else ""
        lines.append(f"{label:<24}{result[name]:>10.4f} s{other}")
    lines += [
        f"{'payload':<24}{format_bytes(int(result['payload_bytes'])):>12}"
        f"{format_bytes(full['payload_bytes']):>12}",
        row(
            "full reload in place",
            f"pause {result['reload_pause_seconds']:.4f} s, "
            f"{result['reload_pause_seconds'] / max(result['pause_seconds'], 1e-9):.1f} x the delta's",
        ),
        "",
        f"{'format':<26}{'payload':>12}{'bits a changed element':>24}{'x ours':>9}",
    ]
    ours = result["baselines"][0]["payload_bytes"]
    for r in result["baselines"]:
        lines.append(
            f"{r['name']:<26}{format_bytes(r['payload_bytes']):>12}"
            f"{r['bits_per_changed_element']:>24.2f}{r['payload_bytes'] / max(ours, 1):>9.2f}"
        )
    measured = format_bytes(result["baseline_bytes"])
    lines.append(
        f"(of {measured} of the tensors, the last version; formats as published, our implementation)"
    )
    lines.append("")
    if "traffic" in result:
        traffic = result["traffic"]
        lines.append(
            row("traffic", f"{traffic['num_tokens']:,} tokens, {len(traffic['failures'])} failed")
        )
    lines.append(row("verified", _verdict(result)))
    return "\n".join(lines)


def _verdict(result: Mapping[str, Any]) -> str:
    if result["verified"]:
        return "yes: the engine's live tensors digest as the trainer's, after every version"
    return "NO: digests differ, a request failed, or a baseline gave other bits back"
