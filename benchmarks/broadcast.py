"""How far is ``broadcast`` over gloo from one gloo broadcast of as many bytes, and from one a tensor?

Two processes hold the same tensors in shuffled, separate places. Candidates take turns in each round, in
a new order; each is checked first, by the digest of every tensor.

    one broadcast     torch.distributed: everything as one flat tensor, which nobody packs or unpacks
    a tensor each     torch.distributed: a broadcast a tensor, as most frameworks do
    ours              buckets packed from the tensors, sent through a ring, unpacked into the tensors
    ours, wire only   the same ring, neither filled nor emptied

    python benchmarks/broadcast.py [--tiny] [--rounds N] [--bucket SIZE] [--slots N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weightsync import config
from weightsync.bucket import cut_stream
from weightsync.cli.versions import versions
from weightsync.deadline import Deadline
from weightsync.device_tables import CPU, segment_copy
from weightsync.digest import digest_tensors
from weightsync.plan import slot_bytes
from weightsync.presets import get_preset
from weightsync.slot_pack import SlotPack
from weightsync.transports.base import RingOptions, SlotHeader
from weightsync.transports.broadcast import BroadcastTransport
from weightsync.types import format_bytes, parse_bytes

LIMIT_S = 300.0
ALIGNMENT_BYTES = 256
FLOOR, PEER = "one broadcast", "a tensor each"


def deadline(stage: str) -> Deadline:
    return Deadline(LIMIT_S, peer="the other process", stage=stage)


def cases(is_tiny: bool) -> dict[str, list[int]]:
    """Sizes of tensors in bytes."""
    if is_tiny:
        return {"40 small tensors": [8192] * 40}
    shapes = [shape for _, _, shape in get_preset("qwen3-0.6b").tensors()]
    return {
        "20,000 tensors of 8 KiB": [8192] * 20_000,
        "qwen3-0.6b": [2 * int(np.prod(shape)) for shape in shapes],
    }


class Model:
    """Tensors within one allocation, in an order drawn from a seed."""

    def __init__(self, sizes: list[int], seed: int) -> None:
        padded = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        self.sizes, self.total_bytes = sizes, sum(sizes)
        self.arena = torch.zeros(sum(padded), dtype=torch.uint8)
        self.tensors: list[Any] = [None] * len(sizes)
        at = 0
        for i in np.random.default_rng(seed).permutation(len(sizes)).tolist():
            self.tensors[i] = self.arena[at : at + sizes[i]]
            at += padded[i]

    def digests(self) -> list[int]:
        named = ((str(i), t) for i, t in enumerate(self.tensors))
        return list(digest_tensors(named, num_threads=config.num_threads()).values())

    def cuts(self, bucket_bytes: int) -> list[list[Any]]:
        return [list(cuts) for cuts in cut_stream(self.sizes, bucket_bytes)]

    def at(self, cut: Any) -> int:
        return int(int(self.tensors[cut.item].data_ptr()) + cut.start_bytes)


def plain_table(source: Any, target: Any, sizes: Any) -> Any:
    table = np.zeros((len(sizes), 13), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 2] = source, target, sizes
    table[:, [4, 7, 10]] = 1
    return table


def join_gloo(port: int, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=LIMIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def run_torch(name: str, model: Model) -> None:
    """Either end of a peer."""
    if name == FLOOR:
        dist.broadcast(model.arena, src=0)
    else:
        for tensor in model.tensors:
            dist.broadcast(tensor, src=0)


# -- the trainer's process -------------------------------------------------------------------------


class Trainer:
    """Does what the other process asks for, one line at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._threads = config.num_threads()
        self.model = Model(cases(args.tiny)[args.case], seed=1)
        noise = np.random.default_rng(3).integers(0, 256, self.model.arena.numel(), dtype=np.uint8)
        self.model.arena.copy_(torch.from_numpy(noise))
        self.packs = []
        for cuts in self.model.cuts(args.bucket_bytes):
            rows = plain_table(
                [self.model.at(c) for c in cuts],
                [c.offset_bytes for c in cuts],
                [c.num_bytes for c in cuts],
            )
            data_bytes = cuts[-1].offset_bytes + cuts[-1].num_bytes
            self.packs.append(SlotPack(segment_copy(rows, CPU), b"", data_bytes, CPU))
        self.source = BroadcastTransport().open_source()
        about = {"digests": self.model.digests(), "source": dict(self.source.descriptor())}
        print(json.dumps(about), flush=True)
        join_gloo(args.port, 0)
        self.source.accept(deadline("accept"))
        options = RingOptions(args.slots, slot_bytes(args.bucket_bytes))
        self.ring = self.source.stream(options, deadline("ring"))

    def run(self) -> None:
        for line in sys.stdin:
            if (name := line.strip()) in (FLOOR, PEER):
                run_torch(name, self.model)
            else:
                self._fill(is_packed=name == "ours")
        self.source.close()

    def _fill(self, *, is_packed: bool) -> None:
        self.ring.begin_move("bench", deadline("begin"))
        for n, pack in enumerate(self.packs):
            slot = self.ring.acquire(deadline("acquire"))
            if is_packed:
                pack.fill(slot.ptr, num_threads=self._threads, cancel=None)
            size, is_last = pack.data_bytes, n == len(self.packs) - 1
            self.ring.submit(slot, SlotHeader("bench", 1, n, size, size, 0, is_last))
        self.ring.flush(deadline("flush"))


# -- the engine's process --------------------------------------------------------------------------


@dataclass
class Engine:
    """What each candidate does, on one set of tensors."""

    args: argparse.Namespace
    trainer: Any

    def __post_init__(self) -> None:
        self._threads = config.num_threads()
        self.model = Model(cases(self.args.tiny)[self.args.case], seed=2)
        self.unpacks = [
            segment_copy(
                plain_table(
                    [c.offset_bytes for c in cuts],
                    [self.model.at(c) for c in cuts],
                    [c.num_bytes for c in cuts],
                ),
                CPU,
            )
            for cuts in self.model.cuts(self.args.bucket_bytes)
        ]
        line = self.trainer.stdout.readline()
        while line and not line.startswith("{"):
            line = self.trainer.stdout.readline()
        self.remote = json.loads(line)
        join_gloo(self.args.port, 1)
        self.target = BroadcastTransport().open_target(self.remote["source"], deadline("attach"))
        self.ring = self.target.stream(deadline("ring"))

    def candidates(self) -> dict[str, Callable[[], None]]:
        return {
            FLOOR: lambda: self._torch(FLOOR),
            PEER: lambda: self._torch(PEER),
            "ours": lambda: self._ours("ours"),
            "ours, wire only": lambda: self._ours("wire"),
        }

    def _ask(self, word: str) -> None:
        self.trainer.stdin.write(word + "\n")
        self.trainer.stdin.flush()

    def _torch(self, name: str) -> None:
        self._ask(name)
        run_torch(name, self.model)

    def _ours(self, name: str) -> None:
        self.ring.begin_move("bench")
        self._ask(name)
        for unpack in self.unpacks:
            _, slot = self.ring.receive(deadline("receive"))
            if name == "ours":
                unpack.run(self._threads, source_base=slot.ptr)
            self.ring.release(slot)

    def check(self, name: str, action: Callable[[], None]) -> None:
        """Run once over cleared memory, and compare the digest of every tensor."""
        self.model.arena.zero_()
        action()
        if name in (PEER, "ours") and self.model.digests() != self.remote["digests"]:
            raise SystemExit(f"{name}: the bytes did not arrive")


def measure(engine: Engine, rounds: int) -> dict[str, list[float]]:
    candidates = engine.candidates()
    for name, action in candidates.items():
        engine.check(name, action)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(1).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start_s = time.perf_counter()
            candidates[name]()
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        args.port = int(server.getsockname()[1])
    args.case = case
    command = [sys.executable, __file__, "--trainer", "--case", case, "--bucket", args.bucket]
    command += ["--slots", str(args.slots), "--port", str(args.port)]
    command += ["--tiny"] if args.tiny else []
    trainer = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        engine = Engine(args, trainer)
        seconds = measure(engine, args.rounds)
        engine.target.close()
        dist.destroy_process_group()
    finally:
        trainer.kill()
        trainer.wait()
    total = engine.model.total_bytes
    rows = []
    for name, times in seconds.items():
        floor = zip(seconds[FLOOR], times, strict=True)
        peer = zip(seconds[PEER], times, strict=True)
        rows.append(
            {
                "candidate": name, "median_ms": statistics.median(times) * 1e3,
                "gb_per_s": total / statistics.median(times) / 1e9,
                "of_one": statistics.median(a / b for a, b in floor),
                "times_per_tensor": statistics.median(a / b for a, b in peer),
            }
        )  # fmt: skip
    print(f"{case}: {format_bytes(total)}, {len(engine.unpacks)} buckets of {args.bucket}")
    print(f"{'candidate':17} {'ms':>9} {'GB/s':>6} {'of one broadcast':>17} {'x per tensor':>13}")
    for row in rows:
        print(
            f"{row['candidate']:17} {row['median_ms']:9.1f} {row['gb_per_s']:6.2f} "
            f"{row['of_one']:17.1%} {row['times_per_tensor']:13.2f}",
            flush=True,
        )
    return {"case": case, "bytes": total, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bucket", default="64MiB", help="bytes of a slot")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every result here")
    parser.add_argument("--case", help="one of the cases only")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.bucket_bytes = parse_bytes(args.bucket)
    if args.trainer:
        Trainer(args).run()
        return
    wanted = [args.case] if args.case else list(cases(args.tiny))
    results = [run_case(case, args) for case in wanted]
    if args.json is not None:
        found = {"bucket": args.bucket, "slots": args.slots, "versions": versions()}
        args.json.write_text(json.dumps({**found, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
