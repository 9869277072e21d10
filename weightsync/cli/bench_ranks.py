"""``bench`` between trainers and engines of several ranks: real shards, each rank pulling its share, proven
against the checkpoint that one process holds whole."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, Final

from weightsync.cli.bench import BenchSettings
from weightsync.cli.bench_model import (
    ModelChoice,
    change_all,
    check_room,
    choose_model,
    load,
    mask_of,
    ready_checkpoint,
    show_progress,
)
from weightsync.cli.bench_process import WorkerProcess
from weightsync.cli.plan import parse_layout
from weightsync.device_tables import CPU
from weightsync.digest import DigestPart, DigestTable
from weightsync.errors import ConfigError
from weightsync.layout import Layout
from weightsync.naming import module_tensors, rules_for
from weightsync.tensors import view_of
from weightsync.types import format_bytes

TRAINER_KINDS: Final = ("pp", "dp", "fsdp", "ep", "tp")
ENGINE_KINDS: Final = ("tp", "ep")
#: Processes that load torch side by side on a small machine.
MAX_RANKS: Final = 16
_WIDTH: Final = 22


def run_ranks(settings: BenchSettings) -> int:
    """Measure, print, write; the exit status."""
    trainer = parse_layout(settings.trainer_layout, TRAINER_KINDS, "--trainer-layout")
    engine = parse_layout(settings.engine_layout, ENGINE_KINDS, "--engine-layout")
    num_trainers, num_engine = prod(trainer.values()), _engine_size(engine)
    choice = choose_model(settings.model)
    _check(settings, choice, num_trainers, num_engine)
    choice = ready_checkpoint(choice)
    if choice.directory is None:
        raise ConfigError(f"model {choice.name!r} is drawn in memory; take one with a directory")
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder, ExitStack() as stack:
        sides = {
            role: [stack.enter_context(WorkerProcess(f"{role} rank {r}")) for r in range(size)]
            for role, size in (("engine", num_engine), ("trainer", num_trainers))
        }
        result = _Run(settings, choice, sides, Path(folder)).measure(trainer, engine)
    show_progress("")
    print(_table(result))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["verified"] else 1


def _engine_size(engine: Mapping[str, int]) -> int:
    sizes = {n for n in engine.values() if n > 1}
    if len(sizes) > 1:
        raise ConfigError(
            f"--engine-layout {dict(engine)}: of the core tp and ep each span all ranks or are 1"
        )
    return max(sizes, default=1)


def _check(
    settings: BenchSettings, choice: ModelChoice, num_trainers: int, num_engine: int
) -> None:
    if settings.device != CPU:
        raise ConfigError("--trainer-layout and --engine-layout run on the CPU so far")
    if settings.plot_file is not None or settings.updates:
        raise ConfigError("--plot and --updates are for one rank on each side")
    if num_trainers + num_engine > MAX_RANKS:
        raise ConfigError(
            f"{num_trainers} + {num_engine} ranks are {num_trainers + num_engine} processes here, at "
            f"most {MAX_RANKS}; `weightsync plan` needs none for any number of ranks"
        )
    if num_engine > 1 and settings.engine != "core":
        raise ConfigError("an engine of several ranks is the core's: add --engine core")
    check_room(choice, settings.placement, settings.bucket)


class _Run:
    """Ranks of both sides, and the whole model in this process as what they must agree with."""

    def __init__(
        self,
        settings: BenchSettings,
        choice: ModelChoice,
        sides: Mapping[str, Sequence[WorkerProcess]],
        folder: Path,
    ) -> None:
        self._settings, self._choice, self._folder = settings, choice, folder
        self._engines, self._trainers = sides["engine"], sides["trainer"]
        self._whole = _load_here(choice)
        self._expected: list[DigestTable] = []

    def measure(self, trainer: Mapping[str, int], engine: Mapping[str, int]) -> dict[str, Any]:
        settings = self._settings
        url = self._start(trainer, engine)
        self._expect([Layout.from_json(f["layout"]) for f in _all(self._engines, "layout")])
        options = {
            "transport": settings.transport,
            "bucket": settings.bucket,
            "placement": settings.placement,
            "contract": settings.contract,
            "strict": settings.strict,
        }
        _all(self._trainers, "connect", url=url, options=options)
        is_verified = self._differ()
        refits = []
        for version in range(1, settings.repeat + 2):
            show_progress(f"refit {version} of {settings.repeat + 1}")
            self._change(mask_of(version))
            refits.append(_all(self._trainers, "refit", version=version)[0])
            is_verified = self._agree() and is_verified
        pairs = self._trainers[0].call("pairs")["pairs"]
        _all(self._trainers, "leave")
        _all(self._engines, "halt")
        return self._summary(trainer, engine, refits, pairs, is_verified)

    def _start(self, trainer: Mapping[str, int], engine: Mapping[str, int]) -> str:
        show_progress(f"loading {self._choice.name} on every rank")
        choice = asdict(self._choice)
        for name, workers in (("engine", self._engines), ("trainer", self._trainers)):
            _each(
                workers, "join",
                [
                    {"store": str(self._folder / name), "rank": rank, "size": len(workers)}
                    for rank in range(len(workers))
                ],
            )  # fmt: skip
        _all(self._trainers, "load", choice=choice, layout=dict(trainer))
        kind = {"engine": self._settings.engine, "split": dict(engine)}
        _all(self._engines, "load", choice=choice, **kind)
        return str(_all(self._engines, "serve")[0]["url"])

    def _expect(self, layouts: Sequence[Layout]) -> None:
        """Tables that digest, of the whole model here, the boxes that each engine rank holds."""
        named = dict(module_tensors(self._whole, rules_for(self._whole)).named)
        self._kept = {name: view_of(tensor, name) for name, tensor in named.items()}
        for layout in layouts:
            parts = []
            for tensor in layout.tensors:
                view = self._kept[tensor.name]
                for placed in tensor.placed:
                    steps = zip(placed.box.start, view.strides_bytes, strict=True)
                    ptr = view.ptr + sum(start * stride for start, stride in steps)
                    parts.append(
                        DigestPart(
                            tensor.wire_forms[0], placed.box, ptr, view.strides_bytes, view.dtype
                        )
                    )
            self._expected.append(DigestTable(parts))

    def _change(self, mask: int) -> None:
        for worker in self._trainers:
            worker.send("change", mask=mask)
        change_all(self._whole, mask)  # of ``.data``: no gradient is in the way
        for worker in self._trainers:
            worker.answer("change")

    def _compared(self) -> list[tuple[str, str]]:
        """(expected, found) of every tensor of every engine rank."""
        found = _all(self._engines, "digest")
        pairs = []
        for table, have in zip(self._expected, found, strict=True):
            wanted = table.compute(num_threads=2)
            if wanted.keys() != have.keys():
                raise ConfigError("an engine rank serves other tensors than its layout lists")
            pairs += [(f"{wanted[name]:016x}", have[name]) for name in sorted(wanted)]
        return pairs

    def _agree(self) -> bool:
        pairs = self._compared()
        return bool(pairs) and all(wanted == found for wanted, found in pairs)

    def _differ(self) -> bool:
        """Before the first refit nothing may be right already, or nothing is proven."""
        return all(wanted != found for wanted, found in self._compared())

    def _summary(
        self,
        trainer: Mapping[str, int],
        engine: Mapping[str, int],
        refits: Sequence[Mapping[str, Any]],
        pairs: Sequence[Sequence[int]],
        is_verified: bool,
    ) -> dict[str, Any]:
        first, *later = refits
        phases = {
            name: statistics.median([refit["phases"].get(name, 0.0) for refit in later])
            for name in later[-1]["phases"]
        }
        return {
            "model": self._choice.name,
            "transport": self._settings.transport,
            "engine": self._settings.engine,
            "placement": self._settings.placement,
            "contract": later[-1]["contract"],
            "path": later[-1]["path"],
            "trainer_layout": dict(trainer),
            "engine_layout": dict(engine),
            "num_trainer_ranks": len(self._trainers),
            "num_engine_ranks": len(self._engines),
            "num_tensors": later[-1]["num_tensors"],
            "total_bytes": later[-1]["num_bytes"],
            "model_bytes": self._choice.total_bytes,
            "pairs": [list(pair) for pair in pairs],
            "seconds": [refit["seconds"] for refit in later],
            "first_seconds": first["seconds"],
            "phases": phases,
            "pause_s": statistics.median([refit["pause_s"] for refit in later]),
            "verified": is_verified,
        }


def _load_here(choice: ModelChoice) -> Any:
    """The module in this process, whose ways with gradients are its own."""
    import torch

    was_enabled = torch.is_grad_enabled()
    try:
        return load(choice, 0)
    finally:
        torch.set_grad_enabled(was_enabled)


def _all(workers: Sequence[WorkerProcess], command: str, **arguments: Any) -> list[dict[str, Any]]:
    return _each(workers, command, [arguments] * len(workers))


def _each(
    workers: Sequence[WorkerProcess], command: str, arguments: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Side by side: ranks wait for each other."""
    for worker, given in zip(workers, arguments, strict=True):
        worker.send(command, **given)
    return [worker.answer(command) for worker in workers]


def _table(result: Mapping[str, Any]) -> str:
    def layout(side: str) -> str:
        sizes = result[f"{side}_layout"]
        return ",".join(f"{kind}={n}" for kind, n in sizes.items()) or "one rank"

    def row(name: str, value: str) -> str:
        return f"{name:<{_WIDTH}}{value}"

    median_s = statistics.median(result["seconds"])
    total = result["total_bytes"]
    lines = [
        f"weightsync bench: {result['model']} by {result['transport']} ({result['contract']}, "
        f"{result['placement']}), trainer {layout('trainer')} -> {result['engine']} "
        f"{layout('engine')}",
        "",
        row("tensors", f"{result['num_tensors']:,}"),
        row("bytes", f"{format_bytes(total)}; the model has {format_bytes(result['model_bytes'])}"),
        row("path", result["path"]),
        "",
        "trainer rank -> engine rank: bytes",
        *(f"  {a:>3} -> {b:<3}{format_bytes(n):>14}" for a, b, n in result["pairs"]),
        "",
        f"{'phase':<{_WIDTH}}{'seconds':>10}",
        *(f"{'  ' + n.replace('_', ' '):<{_WIDTH}}{s:>10.4f}" for n, s in result["phases"].items()),
        f"{'refit (median)':<{_WIDTH}}{median_s:>10.4f}   {total / median_s / 1e9:.2f} GB/s; the first "
        f"{result['first_seconds']:.4f}",
        f"{'pause':<{_WIDTH}}{result['pause_s']:>10.4f}",
        "",
    ]
    verdict = (
        "yes: every box of every engine rank digests as that of the whole model, after every refit"
        if result["verified"]
        else "NO: some engine rank does not hold what the whole model says"
    )
    return "\n".join([*lines, row("verified", verdict)])
