"""How far is p2p between CUDA devices from raw NIXL?

Two processes of one GPU hold a model's tensors, each allocated by itself in a shuffled order of its
own. Candidates take turns in each round, in a new order; each is checked first: digests of every
tensor.

    raw               NIXL alone, as many bytes in descriptors of 1 GiB, prepared once: a device copy
    raw per tensor    NIXL alone, a descriptor a tensor
    direct            ours, as it is within one machine: one launch over mapped memory
    direct, nixl      ours, as between machines: merged reads, straight or through windows
    stream            ours, within one machine: slots packed by the trainer, unpacked where they are
    stream, nixl      ours, as between machines: slots packed, read, and unpacked

Settings of UCX are of a process, so that raw NIXL has ours too; UCX_CUDA_IPC_CACHE=y in the environment
gives all candidates UCX's own cache of mappings, which it never lets go of.

    python benchmarks/p2p_cuda.py [--tiny] [--model NAME ...] [--rounds N] [--bucket SIZE] [--json FILE]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_parts.command import command_line, has_gpus, write_figures

from weightsync.bucket import cut_stream
from weightsync.deadline import Deadline
from weightsync.device_tables import CudaCopy, owned_digests, segment_copy
from weightsync.plan import slot_bytes
from weightsync.presets import get_preset
from weightsync.slot_pack import SlotPack
from weightsync.tables import digest_rows
from weightsync.transports.base import RingOptions, SlotHeader
from weightsync.transports.nixl_binding import load_nixl
from weightsync.transports.p2p import P2pTransport
from weightsync.transports.p2p_cuda import DeviceWay, allocations_of
from weightsync.types import Contract, RegionAddress, format_bytes, parse_bytes

DEVICE = "cuda:0"
RAW_BYTES = 2**30
Action = Callable[[], object]


def deadline(stage: str) -> Deadline:
    return Deadline(120.0, peer="the other process", stage=stage)


def sizes_of(model: str, is_tiny: bool) -> list[int]:
    if is_tiny:
        return [3 * 2**20] * 20 + [5000] * 100
    return [2 * int(np.prod(shape)) for _, _, shape in get_preset(model).tensors()]


def allocate(sizes: list[int], seed: int) -> list[Any]:
    """Tensors of bf16, each allocated by itself, in an order of its own."""
    tensors: list[Any] = [None] * len(sizes)
    for i in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        tensors[i] = torch.empty(sizes[i] // 2, dtype=torch.bfloat16, device=DEVICE)
    return tensors


def regions_of(tensors: list[Any]) -> list[RegionAddress]:
    return [
        RegionAddress(i, t.data_ptr(), t.nbytes, DEVICE)  # torch's storages are what is published
        for i, t in enumerate(tensors)
    ]


def digests_of(tensors: list[Any]) -> list[int]:
    rows, owners = [], []
    for i, t in enumerate(tensors):
        made = digest_rows(
            (t.numel(),), ptr=t.data_ptr(), strides_bytes=(2,), index_strides=(1,), start_index=0,
            item=2, seed=i + 1,
        )  # fmt: skip
        rows += made
        owners += [i] * len(made)
    return [int(d) for d in owned_digests(rows, owners, len(tensors), DEVICE).run(1)]


def plain_table(source: Any, target: Any, sizes: Any) -> Any:
    table = np.zeros((len(sizes), 13), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 2] = source, target, sizes
    table[:, [4, 7, 10]] = 1
    return table


class RawPeer:
    """NIXL alone."""

    def __init__(self, name: str) -> None:
        self.api = load_nixl()
        self.agent = self.api.nixl_agent(name, self.api.nixl_agent_config(enable_prog_thread=False))

    def register(self, tensors: list[Any]) -> None:
        found = allocations_of(regions_of(tensors), DEVICE)
        rows = [(a.span.ptr, a.span.num_bytes, 0, "") for a in found]
        self.agent.register_memory(rows, "VRAM")

    def serve(self) -> None:
        threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        while True:
            time.sleep(0.001)
            self.agent.get_new_notifs()

    def descs(self, ptrs: Any, sizes: Any) -> Any:
        rows = np.zeros((len(sizes), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = ptrs, sizes
        return self.agent.get_xfer_descs(rows, "VRAM")


def cuts_of(sizes: list[int], bucket_bytes: int) -> list[list[Any]]:
    return [list(cuts) for cuts in cut_stream(sizes, bucket_bytes)]


# -- the trainer's process ------------------------------------------------------------------------


def run_trainer(args: argparse.Namespace) -> None:
    sizes = sizes_of(args.model[0], args.tiny)
    tensors = allocate(sizes, seed=1)
    generator = torch.Generator(DEVICE).manual_seed(7)
    for t in tensors:
        t.normal_(generator=generator)
    big = torch.zeros(RAW_BYTES, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    raw = RawPeer("raw-trainer")
    raw.register([*tensors, big])
    raw.serve()
    packs = []
    for cuts in cuts_of(sizes, args.bucket_bytes):
        rows = plain_table(
            [tensors[c.item].data_ptr() + c.start_bytes for c in cuts],
            [c.offset_bytes for c in cuts],
            [c.num_bytes for c in cuts],
        )
        data_bytes = cuts[-1].offset_bytes + cuts[-1].num_bytes
        packs.append(SlotPack(segment_copy(rows, DEVICE), b"", data_bytes, DEVICE))
    with P2pTransport().open_source(DEVICE) as mapped, P2pTransport().open_source(DEVICE) as read:
        sources = [mapped, read]
        start_s = time.perf_counter()
        published = [dict(s.direct().publish(regions_of(tensors))) for s in sources]
        about = {
            "big": big.data_ptr(),
            "ptrs": [t.data_ptr() for t in tensors],
            "raw": base64.b64encode(raw.agent.get_agent_metadata()).decode(),
            "sources": [dict(s.descriptor()) for s in sources],
            "published": published,
            "publish_s": (time.perf_counter() - start_s) / len(sources),
            "digests": digests_of(tensors),
        }
        print(json.dumps(about), flush=True)
        options = RingOptions(args.slots, slot_bytes(args.bucket_bytes), DEVICE)
        rings = []
        for source in sources:  # the engine opens one after the other
            source.accept(deadline("accept"))
            rings.append(source.stream(options, deadline("ring")))
        for line in sys.stdin:
            fill_slots(rings[int(line)], packs)


def fill_slots(ring: Any, packs: list[SlotPack]) -> None:
    ring.begin_move("bench", deadline("begin"))
    for n, pack in enumerate(packs):
        slot = ring.acquire(deadline("acquire"))
        pack.fill(slot.ptr, num_threads=1, cancel=None)
        size, is_last = pack.data_bytes, n == len(packs) - 1
        ring.submit(slot, SlotHeader("bench", 1, n, size, size, 0, is_last))
    ring.flush(deadline("flush"))


# -- the engine's process -------------------------------------------------------------------------


class Engine:
    """What each candidate does, on one set of tensors."""

    def __init__(self, sizes: list[int], args: argparse.Namespace, trainer: Any) -> None:
        self.sizes = sizes
        self.total_bytes = sum(sizes)
        self._trainer = trainer
        self._args = args
        self.tensors = allocate(sizes, seed=2)
        self._big = torch.zeros(RAW_BYTES, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        line = trainer.stdout.readline()
        while line and not line.startswith("{"):
            line = trainer.stdout.readline()
        self.remote = json.loads(line)
        self._connect_raw()
        unpacks = self._make_unpacks()
        self.ours = [
            Ours(self, n, way, unpacks) for n, way in enumerate((DeviceWay.AUTO, DeviceWay.NIXL))
        ]

    def _make_unpacks(self) -> list[CudaCopy]:
        return [
            CudaCopy(
                plain_table(
                    [c.offset_bytes for c in cuts],
                    [self.tensors[c.item].data_ptr() + c.start_bytes for c in cuts],
                    [c.num_bytes for c in cuts],
                ),
                DEVICE,
            )
            for cuts in cuts_of(self.sizes, self._args.bucket_bytes)
        ]

    def ask(self, number: int) -> None:
        """Have the trainer fill a ring."""
        self._trainer.stdin.write(f"{number}\n")
        self._trainer.stdin.flush()

    def _connect_raw(self) -> None:
        self._raw = RawPeer("raw-engine")
        self._raw.register([*self.tensors, self._big])
        self._raw_peer = self._raw.agent.add_remote_agent(base64.b64decode(self.remote["raw"]))
        rest = self.total_bytes % RAW_BYTES
        sizes = [RAW_BYTES] * (self.total_bytes // RAW_BYTES) + ([rest] if rest else [])
        local = self._raw.descs([self._big.data_ptr()] * len(sizes), sizes)
        remote = self._raw.descs([self.remote["big"]] * len(sizes), sizes)
        self._raw_handle = self._raw.agent.initialize_xfer("READ", local, remote, self._raw_peer)

    def _run_handle(self, handle: Any) -> None:
        state = self._raw.agent.transfer(handle)
        while state == "PROC":
            state = self._raw.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"raw NIXL ended in state {state}")

    def run_raw(self) -> None:
        self._run_handle(self._raw_handle)

    def run_raw_per_tensor(self) -> None:
        local = self._raw.descs([t.data_ptr() for t in self.tensors], self.sizes)
        remote = self._raw.descs(self.remote["ptrs"], self.sizes)
        handle = self._raw.agent.initialize_xfer("READ", local, remote, self._raw_peer)
        self._run_handle(handle)
        self._raw.agent.release_xfer_handle(handle)

    def candidates(self) -> dict[str, Action]:
        return {
            "raw": self.run_raw,
            "raw per tensor": self.run_raw_per_tensor,
            "direct": self.ours[0].run_direct,
            "direct, nixl": self.ours[1].run_direct,
            "stream": self.ours[0].run_stream,
            "stream, nixl": self.ours[1].run_stream,
        }

    def check(self, name: str, action: Action) -> None:
        """Run once over cleared memory, and compare the digest of every tensor."""
        for t in self.tensors:
            t.zero_()
        torch.cuda.synchronize()
        action()
        if name != "raw" and digests_of(self.tensors) != self.remote["digests"]:
            raise SystemExit(f"{name}: the bytes did not arrive")


class Ours:
    """One connection of ours."""

    def __init__(
        self, engine: Engine, number: int, way: DeviceWay, unpacks: list[CudaCopy]
    ) -> None:
        self._engine = engine
        self._number = number
        self._unpacks = unpacks
        start_s = time.perf_counter()
        transport, source = P2pTransport(device_way=way), engine.remote["sources"][number]
        self.target = transport.open_target(source, deadline("attach"), DEVICE)
        connected_s = time.perf_counter()
        self.direct = self.target.direct()
        local = regions_of(engine.tensors)
        at = self.direct.open(engine.remote["published"][number], local, deadline("open"))
        opened_s = time.perf_counter()
        pointers = [t.data_ptr() for t in engine.tensors]
        rows = plain_table([at[i] for i in range(len(pointers))], pointers, engine.sizes)
        self._prepared = self.direct.prepare(rows)
        self.setup_s = {
            "publish": engine.remote["publish_s"],
            "attach": connected_s - start_s,
            "open": opened_s - connected_s,
            "prepare": time.perf_counter() - opened_s,
        }
        self._ring = self.target.stream(deadline("ring"), DEVICE)

    @property
    def num_reads(self) -> int:
        """Descriptors of ``direct`` after merging; one launch has none."""
        return int(self._prepared.state.num_reads)

    def run_direct(self) -> None:
        self.direct.read(self._prepared, deadline("read"))

    def run_stream(self) -> None:
        self._ring.begin_move("bench")
        self._engine.ask(self._number)
        for unpack in self._unpacks:
            _, slot = self._ring.receive(deadline("receive"))
            unpack.run(source_base=slot.ptr)
            self._ring.release(slot)


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


def summarise(engine: Engine, seconds: dict[str, list[float]], chosen: str) -> list[dict[str, Any]]:
    num = len(engine.sizes)
    num_slots = len(cuts_of(engine.sizes, engine._args.bucket_bytes))
    descriptors = {
        "raw": 1, "raw per tensor": num, "direct": 0, "direct, nixl": engine.ours[1].num_reads,
        "stream": 0, "stream, nixl": num_slots,
    }  # fmt: skip
    found = []
    for name, times in seconds.items():
        pairs = zip(seconds["raw"], times, strict=True)
        per_tensor = zip(seconds["raw per tensor"], times, strict=True)
        found.append(
            {
                "candidate": name + (" (chosen)" if name == chosen else ""),
                "descriptors": descriptors[name],
                "median_ms": statistics.median(times) * 1e3,
                "best_ms": min(times) * 1e3,
                "gb_per_s": engine.total_bytes / statistics.median(times) / 1e9,
                "of_raw": statistics.median(a / b for a, b in pairs),
                "times_per_tensor": statistics.median(a / b for a, b in per_tensor),
            }
        )
    return found


def run_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    sizes = sizes_of(model, args.tiny)
    command = [sys.executable, __file__, "--trainer", "--model", model, "--bucket", args.bucket]
    command += ["--slots", str(args.slots), *(["--tiny"] if args.tiny else [])]
    trainer = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        engine = Engine(sizes, args, trainer)
        costs = P2pTransport().capabilities().cuda_costs
        predicted = {
            "direct": costs[Contract.DIRECT].seconds(len(sizes), engine.total_bytes),
            "stream": costs[Contract.STREAM].seconds(
                -(-engine.total_bytes // args.bucket_bytes), engine.total_bytes
            ),
        }
        chosen = min(predicted, key=lambda name: predicted[name])
        print(f"{model}: {len(sizes)} tensors, {format_bytes(engine.total_bytes)}")
        for ours in engine.ours:
            spent = ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in ours.setup_s.items())
            print(f"  {ours.target.path}; set-up {spent}", flush=True)
        rows = summarise(engine, measure(engine, args.rounds), chosen)
        about = [{"path": o.target.path, "setup_s": o.setup_s} for o in engine.ours]
        for ours in engine.ours:
            ours.target.close()
    finally:
        trainer.kill()
        trainer.wait()
    print(
        f"{'candidate':18} {'descriptors':>11} {'ms':>8} {'best':>8} {'GB/s':>7} {'of raw':>7} "
        f"{'x per tensor':>12}"
    )
    for row in rows:
        print(
            f"{row['candidate']:18} {row['descriptors']:11} {row['median_ms']:8.2f} "
            f"{row['best_ms']:8.2f} {row['gb_per_s']:7.0f} {row['of_raw']:7.1%} "
            f"{row['times_per_tensor']:12.2f}",
            flush=True,
        )
    return {
        "model": model, "tensors": len(sizes), "bytes": sum(sizes), "connections": about,
        "predicted_s": predicted, "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__, "small sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9)
    models = ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"]
    parser.add_argument("--model", nargs="*", default=models, help="whose tensor shapes")
    parser.add_argument("--bucket", default="512MiB", help="bytes of a slot")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not has_gpus():
        return
    args.bucket_bytes = parse_bytes(args.bucket)
    if args.trainer:
        run_trainer(args)
        return
    if args.tiny:
        args.model, args.rounds = ["tiny"], 2
    versions = f"torch {torch.__version__}, {load_nixl().__name__}"
    ucx = " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("UCX_"))
    print(f"{torch.cuda.get_device_name(0)}, {versions}; {ucx}")
    found = [run_model(model, args) for model in args.model]
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
