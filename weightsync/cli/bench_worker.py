"""The two processes of ``bench``: each answers commands, one JSON line each, on its own pipes.

Run as ``python -m weightsync.cli.bench_worker ROLE COMMAND_FD ANSWER_FD``; standard output stays free.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from weightsync.cli.bench_core import Traffic, open_engine
from weightsync.cli.bench_model import ModelChoice, change_all, load
from weightsync.cli.memory_watch import MemoryWatch
from weightsync.errors import ConfigError, WeightSyncError, to_wire

_CEILING_BYTES = 2**30
_CEILING_MIN_BYTES = 128 * 2**20  # four times a large last-level cache: memory, not cache


class _Worker:
    """Commands that both roles answer."""

    def __init__(self) -> None:
        self.module: Any = None
        self._watch: MemoryWatch | None = None

    def load(self, choice: Mapping[str, Any], mask: int) -> dict[str, Any]:
        self.module = load(ModelChoice(**choice), mask)
        return {}

    def watch(self) -> dict[str, Any]:
        self._watch = MemoryWatch()
        return {}

    def watched(self) -> dict[str, Any]:
        if self._watch is None:
            raise ConfigError("nothing is being watched")
        return {"extra_bytes": self._watch.extra_bytes()}

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
        return {}

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
        self._ceiling: tuple[Any, Any] | None = None

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
        """One plain memcpy over pre-faulted memory, in this run, with as many threads as we use."""
        from weightsync import config, native
        from weightsync.memory import HostMemory

        if self._ceiling is None:
            size = max(_CEILING_MIN_BYTES, min(total_bytes, _CEILING_BYTES))
            self._ceiling = (HostMemory.anonymous(size), HostMemory.anonymous(size))
            for memory in self._ceiling:
                native.prefault(memory.ptr, memory.num_bytes)
        source, target = self._ceiling
        threads = config.num_threads()
        start_s = time.perf_counter()
        native.memcpy_bytes(target.ptr, source.ptr, source.num_bytes, num_threads=threads)
        spent_s = time.perf_counter() - start_s
        return {"gb_per_s": source.num_bytes / spent_s / 1e9, "num_threads": threads}

    def drop_ceiling(self) -> dict[str, Any]:
        """Give the ceiling's memory back before memory is watched."""
        for memory in self._ceiling or ():
            memory.close()
        self._ceiling = None
        return {}

    def stop(self) -> dict[str, Any]:
        if self._sender is not None:
            self._sender.close()
        return {}


def main(argv: list[str]) -> int:
    """Answer commands until ``stop`` or the parent's end."""
    role, command_fd, answer_fd = argv
    worker: _Worker = EngineWorker() if role == "engine" else TrainerWorker()
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
