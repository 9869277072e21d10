"""The two processes of ``bench``: each answers commands, one JSON line each, on its own pipes.

Run as ``python -m weightsync.cli.bench_worker ROLE COMMAND_FD ANSWER_FD``; standard output stays free.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from weightsync.cli.bench_core import Traffic, open_engine
from weightsync.cli.bench_device import BenchDevice, HostDevice, bench_device
from weightsync.cli.bench_growth import held_here
from weightsync.cli.bench_model import ModelChoice, change_all
from weightsync.cli.memory_watch import MemoryWatch, private_bytes
from weightsync.errors import ConfigError, WeightSyncError, to_wire


class _Worker:
    """Commands that both roles answer."""

    def __init__(self) -> None:
        self.module: Any = None
        self.device: BenchDevice = HostDevice()
        self._watches: list[MemoryWatch] = []

    def use(self, device: str) -> dict[str, Any]:
        """Before anything else."""
        self.device = bench_device(device)
        return {"room_bytes": self.device.room_bytes()}

    def load(self, choice: Mapping[str, Any], mask: int) -> dict[str, Any]:
        self.module = self.device.load(ModelChoice(**choice), mask)
        return {"device_used_bytes": self.device.used_bytes()}

    def watch(self) -> dict[str, Any]:
        self._watches = [MemoryWatch(private_bytes), MemoryWatch(self.device.used_bytes)]
        return {}

    def watched(self) -> dict[str, Any]:
        """Of this process; and the most that was in use on the device, by anybody."""
        if not self._watches:
            raise ConfigError("nothing is being watched")
        host, device = self._watches
        return {"extra_bytes": host.extra_bytes(), "device_peak_bytes": device.peak_bytes()}

    def held(self) -> dict[str, Any]:
        """Everything that an update could leave behind."""
        gc.collect()
        self.device.room_bytes()  # what a framework keeps for itself is given back
        return asdict(held_here(self.device.used_bytes()))

    def stop(self) -> dict[str, Any]:
        return {}


class EngineWorker(_Worker):
    """Holds the live module, or the core; a receiver serves it."""

    def __init__(self) -> None:
        super().__init__()
        self._adapter: Any = None
        self._receiver: Any = None
        self._core: Any = None
        self._traffic: Traffic | None = None

    def load_core(self, choice: Mapping[str, Any], mask: int) -> dict[str, Any]:
        self._core = open_engine(ModelChoice(**choice), mask)
        return {"device_used_bytes": self.device.used_bytes()}

    def start_traffic(self) -> dict[str, Any]:
        self._traffic = Traffic(self._core)
        return {}

    def stop_traffic(self) -> dict[str, Any]:
        if self._traffic is None:
            raise ConfigError("no traffic was started")
        traffic, self._traffic = self._traffic, None
        return traffic.stop()

    def serve(self) -> dict[str, Any]:
        from weightsync.receiver import Receiver

        if self._core is None:
            from engine_adapter.module import ModuleAdapter

            self._adapter = ModuleAdapter(self.module)
        else:
            from engine_adapter.bundled import BundledAdapter

            self._adapter = BundledAdapter(self._core)
            self._core.start()
        self._receiver = Receiver(self._adapter).start()
        return {"url": self._receiver.url}

    def digest(self) -> dict[str, Any]:
        names = list(self._adapter.layout().index)
        return {n: f"{d:016x}" for n, d in self._adapter.digest(names).items()}

    def compare(self, preset: str | None, mask: int) -> dict[str, Any]:
        """Every bit against what a preset draws, with ``mask`` flipped; None: not drawn here."""
        if preset is None:
            return {"num_different": None}
        return {"num_different": self.device.num_different(self.module, preset, mask)}

    def stop(self) -> dict[str, Any]:
        if self._traffic is not None:
            self.stop_traffic()
        if self._receiver is not None:
            self._receiver.close()
        if self._core is not None:
            self._core.stop()
        return {}


class TrainerWorker(_Worker):
    """Holds the source module; a sender updates the engine."""

    def __init__(self) -> None:
        super().__init__()
        self._sender: Any = None
        self._scoped: dict[str, Any] = {}

    def connect(self, url: str, options: dict[str, Any]) -> dict[str, Any]:
        from weightsync.sender import Sender

        if self._sender is not None:
            self._sender.close()
        start_s = time.perf_counter()
        self._sender = Sender.connect([url], **options)
        return {"connect_s": time.perf_counter() - start_s}

    def change(self, mask: int) -> dict[str, Any]:
        change_all(self.module, mask)
        return {}

    def digest(self) -> dict[str, Any]:
        """Of this side's own memory, by this side's own reading of the module."""
        from weightsync.digest import digest_tensors
        from weightsync.naming import module_tensors, rules_for

        named = module_tensors(self.module, rules_for(self.module)).named
        return {n: f"{d:016x}" for n, d in digest_tensors(named, num_threads=2).items()}

    def refit(self, version: int, names: list[str] | None) -> dict[str, Any]:
        source = self.module if names is None else self._named(names)
        start_s = time.perf_counter()
        with self._sender.update(version=version, scope=names) as update:
            update.send(source)
        seconds = time.perf_counter() - start_s
        engine = update.report.engines[0]
        return {
            "seconds": seconds,
            "phases": dict(engine.phases),
            "pause_s": engine.pause_s,
            "num_bytes": engine.num_bytes,
            "num_tensors": engine.num_tensors,
            "contract": engine.contract,
            "root": engine.root,
            "path": engine.path,
            "num_buckets": self._num_buckets(),
        }

    def _named(self, names: list[str]) -> dict[str, Any]:
        from weightsync.naming import module_tensors, rules_for

        if not self._scoped:
            self._scoped = dict(module_tensors(self.module, rules_for(self.module)).named)
        return {n: self._scoped[n] for n in names}

    def _num_buckets(self) -> int:
        plan = list(self._sender._links[0]._bound.values())[-1].plan
        return len(plan.buckets) if plan.contract == "stream" else 1

    def ceiling(self, total_bytes: int) -> dict[str, Any]:
        return self.device.ceiling(total_bytes)

    def drop_ceiling(self) -> dict[str, Any]:
        self.device.drop_ceiling()
        return {}

    def stop(self) -> dict[str, Any]:
        if self._sender is not None:
            self._sender.close()
        return {}


def _worker_of(role: str) -> Any:
    if role in ("engine", "trainer"):
        return EngineWorker() if role == "engine" else TrainerWorker()
    if role.startswith("delta-"):
        from weightsync.cli.bench_delta_worker import DeltaEngine, DeltaTrainer

        return DeltaEngine() if role == "delta-engine" else DeltaTrainer()
    from weightsync.cli.bench_rank_worker import EngineRank, TrainerRank

    return EngineRank() if role.startswith("engine") else TrainerRank()


def main(argv: list[str]) -> int:
    """Answer commands until ``stop`` or the parent's end."""
    role, command_fd, answer_fd = argv
    worker = _worker_of(role)
    commands, answers = os.fdopen(int(command_fd), "r"), os.fdopen(int(answer_fd), "w")
    with suppress(BrokenPipeError):
        for line in commands:
            request = json.loads(line)
            command: Callable[..., dict[str, Any]] = getattr(worker, request.pop("command"))
            is_last = command.__name__ == "stop"
            try:
                answer = {"result": command(**request)}
            except WeightSyncError as error:
                answer = {"failure": to_wire(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if is_last:
                return 0
    worker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
