"""How far is the p2p transport from raw NIXL?

Two processes hold the same bytes: the tensors of a model in one arena. Candidates take turns in each
round, in a new order, so that a noisy machine is equally unkind to all; each is checked first, byte
for byte.

    raw                 NIXL alone, one descriptor for everything, prepared once
    raw again           the same once more: what the ratio of a thing to itself looks like here
    raw per tensor      NIXL alone, a descriptor a tensor and a new handle each time
    direct              ours, prepared once; the tensors land densely
    direct, scattered   ours, prepared once; the tensors land in another order, a read each
    stream              ours, through a ring: filled by the trainer, emptied into the tensors here
    stream, wire only   ours, through a ring that is neither filled nor emptied

    python benchmarks/raw_nixl.py [--tiny] [--rounds N] [--model NAME] [--json FILE]
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.deadline import Deadline
from weightsync.memory import HostMemory
from weightsync.native import copy_segments
from weightsync.presets import get_preset
from weightsync.transports.base import RingOptions, SlotHeader
from weightsync.transports.nixl_binding import load_nixl
from weightsync.transports.p2p import P2pTransport
from weightsync.types import RegionAddress

ALIGNMENT_BYTES = 256
SLOT_BYTES = 64 * 2**20
NUM_SLOTS = 3
SEED = 1

Table = npt.NDArray[np.int64]
Action = Callable[[], object]


def deadline(stage: str) -> Deadline:
    return Deadline(120.0, peer="the other process", stage=stage)


@dataclass(frozen=True)
class Shape:
    """Sizes and offsets of the tensors, equal in both processes."""

    sizes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    total_bytes: int

    @classmethod
    def of(cls, model: str, is_tiny: bool) -> Shape:
        tensors = list(get_preset(model).tensors())
        if is_tiny:
            sizes = np.full(40, 100_000, dtype=np.int64)
        else:
            sizes = np.array([2 * int(np.prod(shape)) for _, _, shape in tensors], dtype=np.int64)
        padded = -(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(sizes, np.cumsum(padded) - padded, int(padded.sum()))

    def scattered(self) -> npt.NDArray[np.int64]:
        """Other offsets for the same tensors: a shuffled order, so that nothing can be merged."""
        order = np.random.default_rng(SEED).permutation(len(self.sizes))
        padded = -(-self.sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets = np.empty_like(self.offsets)
        offsets[order] = np.cumsum(padded[order]) - padded[order]
        return offsets

    def buckets(self) -> list[tuple[int, int]]:
        """The arena cut into slots: offset and size."""
        starts = range(0, self.total_bytes, SLOT_BYTES)
        return [(a, min(SLOT_BYTES, self.total_bytes - a)) for a in starts]


def plain_table(source: Any, target: Any, sizes: Any) -> Table:
    table = np.zeros((len(sizes), 13), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 2] = source, target, sizes
    table[:, [4, 7, 10]] = 1
    return table


def pattern(num_bytes: int) -> npt.NDArray[np.uint8]:
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:num_bytes]


# -- the trainer's process ------------------------------------------------------------------------


class RawPeer:
    """NIXL alone: an agent that answers, and whose progress is made by a thread of ours."""

    def __init__(self, name: str) -> None:
        self.api = load_nixl()
        self.agent = self.api.nixl_agent(name, self.api.nixl_agent_config(enable_prog_thread=False))

    def register(self, ptr: int, num_bytes: int) -> None:
        self.agent.register_memory([(ptr, num_bytes, 0, "")], "DRAM")

    def serve(self) -> None:
        """Connecting needs answers; a loop of ours, because NIXL's own would take a whole core."""
        threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        while True:
            time.sleep(0.001)
            self.agent.get_new_notifs()


def run_trainer(model: str, is_tiny: bool) -> None:
    shape = Shape.of(model, is_tiny)
    memory = HostMemory.anonymous(shape.total_bytes)
    memory.bytes_view()[:] = pattern(shape.total_bytes)
    raw = RawPeer("raw-trainer")
    raw.register(memory.ptr, memory.num_bytes)
    raw.serve()
    with P2pTransport().open_source() as source:
        regions = [
            RegionAddress(i, memory.ptr + int(at), int(size))
            for i, (at, size) in enumerate(zip(shape.offsets, shape.sizes, strict=True))
        ]
        say(
            {
                "ptr": memory.ptr,
                "raw": base64.b64encode(raw.agent.get_agent_metadata()).decode(),
                "source": dict(source.descriptor()),
                "published": dict(source.direct().publish(regions)),
            }
        )
        source.accept(deadline("accept"))
        ring = source.stream(RingOptions(NUM_SLOTS, SLOT_BYTES), deadline("ring"))
        for line in sys.stdin:
            fill_slots(ring, shape, memory.ptr, fills=line.strip() == "stream")


def fill_slots(ring: Any, shape: Shape, base_ptr: int, *, fills: bool) -> None:
    ring.begin_move("bench", deadline("begin"))
    buckets = shape.buckets()
    for n, (at, size) in enumerate(buckets):
        slot = ring.acquire(deadline("acquire"))
        if fills:
            copy_segments(plain_table([base_ptr + at], [slot.ptr], [size]))
        ring.submit(slot, SlotHeader("bench", 1, n, size, size, 0, n == len(buckets) - 1))
    ring.flush(deadline("flush"))


def say(message: Any) -> None:
    print(json.dumps(message), flush=True)


# -- the engine's process -------------------------------------------------------------------------


class Engine:
    """What each candidate does, on one set of tensors and one landing memory."""

    def __init__(self, shape: Shape, trainer: subprocess.Popen[str]) -> None:
        self.shape = shape
        self._trainer = trainer
        if trainer.stdout is None:
            raise RuntimeError("the trainer has no output")
        line = trainer.stdout.readline()
        while line and not line.startswith("{"):
            line = trainer.stdout.readline()
        self._remote = json.loads(line)
        self.landing = HostMemory.anonymous(shape.total_bytes)
        self._expected = pattern(shape.total_bytes)
        self._connect_raw()
        self._connect_ours()

    def tell(self, word: str) -> None:
        if self._trainer.stdin is not None:
            self._trainer.stdin.write(word + "\n")
            self._trainer.stdin.flush()

    def _connect_raw(self) -> None:
        self._raw = RawPeer("raw-engine")
        self._raw.register(self.landing.ptr, self.landing.num_bytes)
        self._raw_peer = self._raw.agent.add_remote_agent(base64.b64decode(self._remote["raw"]))
        lists = self._raw_lists([0], [self.shape.total_bytes], [0])
        self._raw_handle = self._raw.agent.initialize_xfer("READ", *lists, self._raw_peer)
        self.run_raw(self._raw_handle)

    def _raw_lists(self, at: Any, sizes: Any, landing_at: Any) -> tuple[Any, Any]:
        rows = np.zeros((len(sizes), 3), dtype=np.uint64)
        rows[:, 1] = sizes
        local, remote = rows.copy(), rows
        local[:, 0] = np.asarray(landing_at) + self.landing.ptr
        remote[:, 0] = np.asarray(at) + self._remote["ptr"]
        return (
            self._raw.agent.get_xfer_descs(local, "DRAM"),
            self._raw.agent.get_xfer_descs(remote, "DRAM"),
        )

    def run_raw(self, handle: Any) -> None:
        state = self._raw.agent.transfer(handle)
        while state == "PROC":
            state = self._raw.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"raw NIXL ended in state {state}")

    def run_raw_per_tensor(self) -> None:
        shape = self.shape
        lists = self._raw_lists(shape.offsets, shape.sizes, shape.scattered())
        handle = self._raw.agent.initialize_xfer("READ", *lists, self._raw_peer)
        self.run_raw(handle)
        handle.release()

    def _connect_ours(self) -> None:
        self.target = P2pTransport().open_target(self._remote["source"], deadline("attach"))
        self.direct = self.target.direct()
        local = [RegionAddress(0, self.landing.ptr, self.landing.num_bytes)]
        at = self.direct.open(self._remote["published"], local, deadline("open"))
        sources = np.array([at[i] for i in range(len(self.shape.sizes))])
        dense = plain_table(sources, self.shape.offsets + self.landing.ptr, self.shape.sizes)
        scattered = dense.copy()
        scattered[:, 1] = self.shape.scattered() + self.landing.ptr
        self._dense = self.direct.prepare(dense)
        self._scattered = self.direct.prepare(scattered)
        self._ring = self.target.stream(deadline("ring"))

    def run_direct(self) -> None:
        self.direct.read(self._dense, deadline("read"))

    def run_scattered(self) -> None:
        self.direct.read(self._scattered, deadline("read"))

    def run_stream(self, word: str) -> None:
        self._ring.begin_move("bench")
        self.tell(word)
        at = 0
        while True:
            header, slot = self._ring.receive(deadline("receive"))
            if word == "stream":
                row = plain_table([slot.ptr], [self.landing.ptr + at], [header.data_bytes])
                copy_segments(row)
            at += header.data_bytes
            self._ring.release(slot)
            if header.is_last:
                return

    def candidates(self) -> dict[str, Action]:
        return {
            "raw": lambda: self.run_raw(self._raw_handle),
            "direct": self.run_direct,
            "raw again": lambda: self.run_raw(self._raw_handle),
            "direct, scattered": self.run_scattered,
            "raw per tensor": self.run_raw_per_tensor,
            "stream": lambda: self.run_stream("stream"),
            "stream, wire only": lambda: self.run_stream("wire"),
        }

    def check(self, name: str, action: Action) -> None:
        """Run once over cleared memory, and compare every tensor."""
        landed = self.landing.bytes_view()
        landed[:] = 0
        action()
        if name == "stream, wire only":
            return  # nothing lands; its bytes are those of the last stream
        is_scattered = name in ("direct, scattered", "raw per tensor")
        places = self.shape.scattered() if is_scattered else self.shape.offsets
        expected = self._expected
        for at, place, size in zip(self.shape.offsets, places, self.shape.sizes, strict=True):
            if not np.array_equal(landed[place : place + size], expected[at : at + size]):
                raise RuntimeError(f"{name}: the tensor at byte {at} landed wrong")


def measure(engine: Engine, rounds: int) -> dict[str, list[float]]:
    candidates = engine.candidates()
    for name, action in candidates.items():
        engine.check(name, action)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(SEED).shuffle
    for _ in range(rounds):
        shuffle(order)  # whoever comes after a pause gets more of a busy machine
        for name in order:
            start_s = time.perf_counter()
            candidates[name]()
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def summarise(seconds: dict[str, list[float]], num_bytes: int) -> list[dict[str, Any]]:
    raw = seconds["raw"]
    return [
        {
            "candidate": name,
            "median_ms": statistics.median(times) * 1e3,
            "best_ms": min(times) * 1e3,
            "gb_per_s": num_bytes / statistics.median(times) / 1e9,
            # The median of the ratios within a round: load that comes and goes hits both.
            "best_of_raw": min(raw) / min(times),
            "of_raw": statistics.median(a / b for a, b in zip(raw, times, strict=True)),
        }
        for name, times in seconds.items()
    ]


def environment() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "cpu": model or platform.processor(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "nixl": load_nixl().__name__,
        "ucx": {name: value for name, value in os.environ.items() if name.startswith("UCX_")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--rounds", type=int, help="default: 15, tiny 3")
    parser.add_argument("--model", default="qwen3-0.6b", help="whose tensor shapes")
    parser.add_argument("--json", type=Path, help="write every result here, one a line")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        run_trainer(arguments.model, arguments.tiny)
        return
    shape = Shape.of(arguments.model, arguments.tiny)
    rounds = arguments.rounds or (3 if arguments.tiny else 15)
    command = [sys.executable, __file__, "--trainer", "--model", arguments.model]
    if arguments.tiny:
        command.append("--tiny")
    trainer = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        engine = Engine(shape, trainer)
        about = environment() | {"path": engine.target.path}
        print(json.dumps(about))
        print(f"{len(shape.sizes)} tensors, {shape.total_bytes / 1e9:.2f} GB, {rounds} rounds")
        results = summarise(measure(engine, rounds), shape.total_bytes)
    finally:
        trainer.kill()
        trainer.wait()
    print(f"{'candidate':20} {'ms':>9} {'best ms':>9} {'GB/s':>7} {'of raw':>8} {'best':>7}")
    for result in results:
        print(
            f"{result['candidate']:20} {result['median_ms']:9.1f} {result['best_ms']:9.1f} "
            f"{result['gb_per_s']:7.2f} {result['of_raw']:8.1%} "
            f"{result['best_of_raw']:7.1%}"
        )
    if arguments.json is not None:
        lines = [json.dumps(line) for line in ({"environment": about}, *results)]
        arguments.json.write_text("\n".join(lines) + "\n")
    with contextlib.suppress(Exception):
        engine.target.close()


if __name__ == "__main__":
    main()
