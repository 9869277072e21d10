"""The run behind ``weightsync bench``: two workers, repeats, proofs, figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from weightsync.cli.bench import BenchSettings
from weightsync.cli.bench_cuda import check_device_room
from weightsync.cli.bench_figures import Measured, summarise
from weightsync.cli.bench_fit import Sample
from weightsync.cli.bench_growth import run_updates
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
from weightsync.device_tables import CPU
from weightsync.errors import ConfigError, IntegrityError, MissingDependencyError
from weightsync.packages import is_installed
from weightsync.transports import get_transport

#: No heartbeat on the way while files are counted: its connection is one on either side.
_QUIET_LEASE_S = 3600.0


def run_bench(settings: BenchSettings) -> int:
    """Measure, print the table, write the files; the exit status."""
    choice = choose_model(settings.model)
    check_packages(settings, choice)
    if settings.engine == "core" and settings.device != CPU:
        raise ConfigError(f"--engine core runs on the CPU, not on {settings.device}")
    if settings.device == CPU:
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
    has_grown = result["growth"] is not None and result["growth"]["grew"]
    return 0 if result["verified"] and not has_grown else 1


def check_packages(settings: BenchSettings, choice: ModelChoice) -> None:
    """Refuse before anything is loaded, with what to install.

    Raises :class:`MissingDependencyError` or :class:`ConfigError`.
    """
    needed = [("torch", "hf", "models are torch modules")]
    if settings.device == CPU or choice.directory is not None:
        needed.append(("transformers", "hf", "it loads them"))
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
    trainer.call("use", device=settings.device)
    room = engine.call("use", device=settings.device)
    if settings.device != CPU:
        check_device_room(choice, settings.placement, room["room_bytes"])
    trainer.send("load", choice=asdict(choice), mask=0)
    load = "load_core" if settings.engine == "core" else "load"
    engine.call(load, choice=asdict(choice), mask=ENGINE_MASK)
    trainer.answer("load")
    measured = Measured()
    _change(trainer, measured, 0)  # its own pages, not the file's, before memory is watched
    used_bytes = engine.call("held")["device_bytes"]
    url = engine.call("serve")["url"]
    options = {
        "transport": settings.transport,
        "bucket": settings.bucket,
        "placement": settings.placement,
        "contract": settings.contract,
        "strict": settings.strict,
    }
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
        measured.ceiling = ceiling["what"]
        measured.refits.append(_refit(trainer, engine, measured, version=i + 2))
    if settings.engine == "core":
        measured.traffic = engine.call("stop_traffic")
    trainer.call("drop_ceiling")
    last = _measure_scopes(trainer, measured, settings.repeat + 2)
    connection = {"url": url, "options": options}
    _measure_memory(trainer, engine, measured, connection, last)
    measured.device_extra_bytes -= used_bytes
    if settings.updates:
        connection["options"] = {**options, "lease_s": _QUIET_LEASE_S}
        trainer.call("connect", **connection)
        workers = {"trainer": trainer, "engine": engine}
        measured.growth, flipped = run_updates(workers, settings.updates, last + 1)
        measured.flipped ^= flipped
        _refit(trainer, engine, measured, last + 1 + settings.updates, is_sampled=False)
    preset = choice.preset if choice.directory is None else None
    found = engine.call("compare", preset=preset, mask=measured.flipped)
    measured.num_different = found["num_different"]
    return measured


def _change(trainer: WorkerProcess, measured: Measured, version: int) -> None:
    mask = mask_of(version)
    trainer.call("change", mask=mask)
    measured.flipped ^= mask


def _refit(
    trainer: WorkerProcess,
    engine: WorkerProcess,
    measured: Measured,
    version: int,
    *,
    is_sampled: bool = True,
) -> dict[str, Any]:
    """One proven refit: everything differs before, nothing after; each side digests its own."""
    _change(trainer, measured, version)
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
    watched = engine.call("watched")
    measured.engine_extra_bytes = watched["extra_bytes"]
    measured.device_extra_bytes = watched["device_peak_bytes"]


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
