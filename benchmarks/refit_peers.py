"""How close is moving a model between two processes to one memcpy, and how do the usual ways compare?

A trainer process (this one) holds the tensors of a model in shuffled, separate allocations; an engine
process holds as many of its own. Ours are whole updates through ``Sender`` and ``Receiver``, of which the
move phase is timed as the trainer sees it (control messages included). The peers are our own writing of
what others do on a CPU, timed from the first byte to the last acknowledgement:

    memcpy              the ceiling: one thread, pre-faulted 4 KiB pages, the same bytes
    ipc direct          the engine reads the trainer's memory, in place; with two threads, and with one
    ipc direct, 1 call  the same by ``update_weights``: one exchange, of which the move is timed by the engine
    ipc stream          through a ring of slots
    p2p direct          NIXL READ
    p2p stream
    gloo per tensor     torch.distributed send and recv, a tensor at a time
    gloo packed         flatten + cat into 64 MiB buckets, send and recv, split + copy
    pickled             tensors pickled over a pipe, in 64 MiB batches, acknowledged

Everything is checked by digests before it is timed; rounds are interleaved.

    python benchmarks/refit_peers.py [--tiny] [--rounds N] [--model NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine_adapter.tensors import TensorEngine
from weightsync import native
from weightsync.cli.versions import versions
from weightsync.digest import digest_tensors
from weightsync.memory import HostMemory
from weightsync.presets import get_preset
from weightsync.receiver import Receiver
from weightsync.report import UpdateReport
from weightsync.sender import Sender

BATCH_BYTES = 64 * 2**20
LIMIT_S = 300.0

Tensors = dict[str, torch.Tensor]


def make_tensors(model: str, seed: int) -> Tensors:
    """Separate allocations, made in shuffled order so that neighbours in name are not in memory."""
    shapes = list(get_preset(model).tensors())
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(2**15), 2**15, (2**20,), generator=generator, dtype=torch.int16)
    found: Tensors = {}
    for name, _, shape in random.Random(seed).sample(shapes, len(shapes)):
        flat = torch.empty(int(np.prod(shape)), dtype=torch.int16)
        for start in range(0, flat.numel(), noise.numel()):
            part = flat[start : start + noise.numel()]
            part.copy_(noise[: part.numel()])
        found[name] = flat.view(torch.bfloat16).view(shape)
    return {name: found[name] for name, _, _ in shapes}


def change(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.view(torch.int16).add_(1)


def batches(tensors: Tensors) -> Iterator[Tensors]:
    """Named tensors in order, at most BATCH_BYTES at a time (or one larger one)."""
    batch: Tensors = {}
    size = 0
    for name, tensor in tensors.items():
        if batch and size + tensor.nbytes > BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor.nbytes
    if batch:
        yield batch


# --- the engine process ---------------------------------------------------------------------------


def engine_main(pipe: Connection, model: str, store: str) -> None:
    """Serves whatever way the trainer asks for, one command at a time."""
    tensors = make_tensors(model, seed=7)
    engine = TensorEngine(tensors.items())
    join_gloo(store, rank=1)
    with Receiver(engine) as receiver:
        while (command := pipe.recv()) != "stop":
            match command:
                case "url":
                    pipe.send(receiver.url)
                case "digest":
                    pipe.send(digest_tensors(tensors.items(), num_threads=2))
                case "gloo per tensor":
                    for tensor in tensors.values():
                        dist.recv(tensor, src=0)
                    pipe.send("done")
                case "gloo packed":
                    receive_packed(tensors)
                    pipe.send("done")
                case "pickled":
                    receive_pickled(pipe, tensors)
    dist.destroy_process_group()


def receive_packed(tensors: Tensors) -> None:
    for batch in batches(tensors):
        sizes = [t.numel() for t in batch.values()]
        flat = torch.empty(sum(sizes), dtype=torch.bfloat16)
        dist.recv(flat, src=0)
        for tensor, part in zip(batch.values(), flat.split(sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))


def receive_pickled(pipe: Connection, tensors: Tensors) -> None:
    while (blob := pipe.recv_bytes()) != b"":
        for name, array in pickle.loads(blob).items():
            tensors[name].view(torch.int16).copy_(torch.from_numpy(array))
        pipe.send("done")


def join_gloo(store: str, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


# --- the trainer's ways ---------------------------------------------------------------------------


Update = Callable[[Any, Tensors, int], UpdateReport]


def in_stages(sender: Any, tensors: Tensors, version: int) -> UpdateReport:
    with sender.update(version=version) as update:
        update.send(tensors)
    return update.report


def in_one_call(sender: Any, tensors: Tensors, version: int) -> UpdateReport:
    return sender.update_weights(tensors, version=version)


@dataclass
class Way:
    """One way to move everything; ``run`` returns the seconds of the movement."""

    name: str
    run: Callable[[], float]


class Trainer:
    def __init__(self, model: str, pipe: Connection) -> None:
        self.tensors = make_tensors(model, seed=3)
        self.num_bytes = sum(t.nbytes for t in self.tensors.values())
        self._pipe = pipe
        self._version = 0
        self._url = str(self.ask("url"))
        self._memory = [HostMemory.anonymous(self.num_bytes) for _ in range(2)]
        for memory in self._memory:
            no_huge_pages(memory)
            native.prefault(memory.ptr, memory.num_bytes)

    def ask(self, command: str) -> Any:
        self._pipe.send(command)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"the engine process did not answer within {LIMIT_S} s")
        return self._pipe.recv()

    def memcpy(self) -> float:
        source, target = self._memory
        start_s = time.perf_counter()
        native.memcpy_bytes(target.ptr, source.ptr, self.num_bytes, num_threads=1)
        return time.perf_counter() - start_s

    def ours(self, transport: str, contract: str, update: Update) -> float:
        """A whole update; the move phase of it. A connection of its own each time, warmed up."""
        options = {"contract": contract, "placement": "in_place", "bucket": BATCH_BYTES}
        with Sender.connect([self._url], transport=transport, **options) as sender:
            for _ in range(2):  # the first one plans and registers
                self._version += 1
                report = update(sender, self.tensors, self._version)
        return report.engines[0].phases["move"]

    def gloo_per_tensor(self) -> float:
        self._pipe.send("gloo per tensor")
        start_s = time.perf_counter()
        for tensor in self.tensors.values():
            dist.send(tensor, dst=1)
        self._answer()
        return time.perf_counter() - start_s

    def gloo_packed(self) -> float:
        self._pipe.send("gloo packed")
        start_s = time.perf_counter()
        for batch in batches(self.tensors):
            dist.send(torch.cat([t.flatten() for t in batch.values()]), dst=1)
        self._answer()
        return time.perf_counter() - start_s

    def pickled(self) -> float:
        self._pipe.send("pickled")
        start_s = time.perf_counter()
        for batch in batches(self.tensors):
            arrays = {name: t.view(torch.int16).numpy() for name, t in batch.items()}
            self._pipe.send_bytes(pickle.dumps(arrays, protocol=5))
            self._answer()
        self._pipe.send_bytes(b"")
        return time.perf_counter() - start_s

    def ways(self) -> list[Way]:
        return [
            Way("memcpy, 1 thread", self.memcpy),
            Way("ipc direct", lambda: self.ours("ipc", "direct", in_stages)),
            Way("ipc direct, 1 call", lambda: self.ours("ipc", "direct", in_one_call)),
            Way("ipc stream", lambda: self.ours("ipc", "stream", in_stages)),
            Way("p2p direct", lambda: self.ours("p2p", "direct", in_stages)),
            Way("p2p stream", lambda: self.ours("p2p", "stream", in_stages)),
            Way("gloo per tensor", self.gloo_per_tensor),
            Way("gloo packed", self.gloo_packed),
            Way("pickled over a pipe", self.pickled),
        ]

    def check(self, way: Way) -> None:
        """Every byte arrives: all digests differ before, none after."""
        change(self.tensors)
        sent = digest_tensors(self.tensors.items(), num_threads=2)
        before = self.ask("digest")
        way.run()
        after = self.ask("digest")
        if any(before[n] == sent[n] for n in sent) or after != sent:
            raise SystemExit(f"{way.name}: the bytes did not arrive")


def no_huge_pages(memory: HostMemory) -> None:
    """The ceiling copies what torch's allocator gives: plain pages."""
    import ctypes

    madv_nohugepage = 15
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(memory.ptr), ctypes.c_size_t(memory.num_bytes), madv_nohugepage)


def measure(trainer: Trainer, rounds: int) -> dict[str, list[float]]:
    ways = trainer.ways()
    for way in ways[1:]:
        trainer.check(way)
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seconds[way.name].append(way.run())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small and quick, for a smoke test")
    parser.add_argument("--model", default=None, help="shapes of a preset (default qwen3-0.6b)")
    parser.add_argument("--rounds", type=int, default=None, help="default 9")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    model = args.model or ("tiny" if args.tiny else "qwen3-0.6b")
    rounds = args.rounds or (2 if args.tiny else 9)

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        engine = context.Process(target=engine_main, args=(theirs, model, store), daemon=True)
        engine.start()
        theirs.close()
        join_gloo(store, rank=0)
        trainer = Trainer(model, ours)
        seconds = measure(trainer, rounds)
        ours.send("stop")
        dist.destroy_process_group()
        engine.join(timeout=30)
    report(model, trainer, seconds, args.json)


def report(
    model: str, trainer: Trainer, seconds: dict[str, list[float]], json_file: Path | None
) -> None:
    ceiling_s = statistics.median(seconds["memcpy, 1 thread"])
    threads = os.environ.get("WEIGHTSYNC_NUM_THREADS", "2 or fewer")
    print(
        f"{model}: {len(trainer.tensors)} tensors, {trainer.num_bytes:,} B; copies of ours use "
        f"{threads} threads (WEIGHTSYNC_NUM_THREADS)"
    )
    print(f"{'way':<22}{'median s':>10}{'GB/s':>8}{'of memcpy':>11}")
    rows = []
    for name, values in seconds.items():
        median_s = statistics.median(values)
        rate = trainer.num_bytes / median_s / 1e9
        print(f"{name:<22}{median_s:>10.4f}{rate:>8.2f}{ceiling_s / median_s:>11.1%}")
        rows.append({"way": name, "median_s": median_s, "gb_per_s": rate, "seconds": values,
                     "fraction_of_memcpy": ceiling_s / median_s})  # fmt: skip
    if json_file is not None:
        result = {
            "model": model,
            "num_bytes": trainer.num_bytes,
            "num_tensors": len(trainer.tensors),
            "rows": rows,
            "versions": versions(),
        }
        json_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
