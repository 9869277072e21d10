"""Between two GPUs of one machine: how far are our transports from the library or the copy below them?

This process holds a model on its first GPU; a trainer process, which sees the GPUs in the opposite
order, holds the same tensors on the other one, in another order within one allocation. Candidates take
turns in each round, in a new order; each is checked first, by the digest of every tensor.

    nccl              one broadcast of as many bytes, by torch.distributed
    nccl per tensor   a broadcast a tensor, as most frameworks do
    broadcast         ours: buckets packed by one launch each, and unpacked likewise
    peer copy         one copy_ of 4 GiB between the GPUs, within this process
    ipc direct        ours: one launch of this GPU over the other's mapped memory
    nixl              one descriptor of 1 GiB, READ
    p2p direct        ours, as it is within one machine: one launch over mapped memory
    p2p nixl          ours, as between machines: merged reads

    python benchmarks/two_gpus.py [--tiny] [--model NAME ...] [--rounds N] [--bucket SIZE] [--only NAME ...]
                                  [--json FILE]
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
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_parts.command import command_line, has_gpus, write_figures

from weightsync import native
from weightsync.bucket import Cut, cut_stream
from weightsync.cli.versions import versions
from weightsync.deadline import Deadline
from weightsync.device_tables import CudaCopy, owned_digests, segment_copy
from weightsync.plan import slot_bytes
from weightsync.presets import get_preset
from weightsync.slot_pack import SlotPack
from weightsync.tables import digest_rows
from weightsync.transports import get_transport
from weightsync.transports.base import RingOptions, SlotHeader
from weightsync.transports.nixl_binding import load_nixl
from weightsync.transports.p2p import P2pTransport
from weightsync.transports.p2p_cuda import DeviceWay
from weightsync.types import RegionAddress, format_bytes, parse_bytes

DEVICE = "cuda:0"  # of either process: another GPU
COPY_BYTES = 4 * 2**30
NIXL_BYTES = 2**30
ALIGNMENT_BYTES = 256
LIMIT_S = 120.0
#: Of which candidate each one's rate is a share.
FLOORS = {
    "nccl per tensor": "nccl", "broadcast": "nccl", "ipc direct": "peer copy", "p2p direct": "nixl",
    "p2p nixl": "nixl",
}  # fmt: skip


def deadline(stage: str) -> Deadline:
    return Deadline(LIMIT_S, peer="the other process", stage=stage)


def sizes_of(model: str, is_tiny: bool) -> list[int]:
    if is_tiny:
        return [3 * 2**20] * 20 + [5000] * 100
    return [2 * int(np.prod(shape)) for _, _, shape in get_preset(model).tensors()]


class Model:
    """Tensors within one allocation, in an order drawn from a seed."""

    def __init__(self, sizes: list[int], seed: int) -> None:
        padded = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
        self.sizes, self.total_bytes = sizes, sum(sizes)
        self.arena = torch.zeros(sum(padded), dtype=torch.uint8, device=DEVICE)
        self.offsets = [0] * len(sizes)
        at = 0
        for i in np.random.default_rng(seed).permutation(len(sizes)).tolist():
            self.offsets[i] = at
            at += padded[i]
        self.ptrs = [self.arena.data_ptr() + offset for offset in self.offsets]
        self._digests: Any = None
        torch.cuda.synchronize()

    def tensors(self) -> list[Any]:
        rows = zip(self.offsets, self.sizes, strict=True)
        return [self.arena[offset : offset + size] for offset, size in rows]

    def regions(self) -> list[RegionAddress]:
        rows = zip(self.ptrs, self.sizes, strict=True)
        return [RegionAddress(i, ptr, size, DEVICE) for i, (ptr, size) in enumerate(rows)]

    def digests(self) -> list[int]:
        if self._digests is None:
            self._digests = self._make_digests()
        return [int(d) for d in self._digests.run(1)]

    def _make_digests(self) -> Any:
        rows, owners = [], []
        for i, (ptr, size) in enumerate(zip(self.ptrs, self.sizes, strict=True)):
            made = digest_rows(
                (size // 2,), ptr=ptr, strides_bytes=(2,), index_strides=(1,), start_index=0, item=2,
                seed=i + 1,
            )  # fmt: skip
            rows += made
            owners += [i] * len(made)
        return owned_digests(rows, owners, len(self.sizes), DEVICE)

    def columns(self, cuts: list[Cut]) -> tuple[list[int], list[int], list[int]]:
        """Where these cuts lie here, where in their bucket, and how many bytes each has."""
        ptrs = [self.ptrs[c.item] + c.start_bytes for c in cuts]
        return ptrs, [c.offset_bytes for c in cuts], [c.num_bytes for c in cuts]


class Progress:
    """Says on standard error how long each part took."""

    def __init__(self, who: str) -> None:
        self._who, self._last_s = who, time.perf_counter()

    def done(self, part: str) -> None:
        now_s = time.perf_counter()
        print(f"{self._who}: {part} {now_s - self._last_s:.2f} s", file=sys.stderr, flush=True)
        self._last_s = now_s


def plain_table(source: Any, target: Any, sizes: Any) -> Any:
    table = np.zeros((len(sizes), 13), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 2] = source, target, sizes
    table[:, [4, 7, 10]] = 1
    return table


def join_nccl(port: int, rank: int) -> None:
    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=LIMIT_S))
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=2, device_id=torch.device(DEVICE)
    )


class RawNixl:
    """NIXL alone."""

    def __init__(self, name: str, memory: Any) -> None:
        self.api = load_nixl()
        self.agent = self.api.nixl_agent(name, self.api.nixl_agent_config(enable_prog_thread=False))
        self.agent.register_memory([(memory.data_ptr(), memory.nbytes, 0, "")], "VRAM")

    def serve(self) -> None:
        threading.Thread(target=self._progress, daemon=True).start()

    def _progress(self) -> None:
        while True:
            time.sleep(0.001)
            self.agent.get_new_notifs()

    def one(self, ptr: int) -> Any:
        rows = np.array([[ptr, NIXL_BYTES, 0]], dtype=np.uint64)
        return self.agent.get_xfer_descs(rows, "VRAM")


# -- the trainer's process -------------------------------------------------------------------------


class Trainer:
    """Does what this file's other process asks for, one line at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        progress = Progress("trainer")
        self.model = Model(sizes_of(args.model[0], args.tiny), seed=1)
        words = self.model.arena[: self.model.arena.nbytes // 8 * 8].view(torch.int64)
        words.random_(generator=torch.Generator(DEVICE).manual_seed(7))
        self.big = torch.zeros(NIXL_BYTES, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        progress.done("memory")
        self.packs = self._make_packs(args.bucket_bytes)
        progress.done("packs")
        self.nixl = None if args.no_nixl else RawNixl("raw-trainer", self.big)
        if self.nixl is not None:
            self.nixl.serve()
        self.sources = {name: open_end(name) for name in ends_of(args)}
        port = free_port()
        self._joined = threading.Thread(target=join_nccl, args=(port, 0))
        self._joined.start()
        progress.done("ends")
        digests, regions = self.model.digests(), self.model.regions()
        progress.done("digests")
        published = {
            name: dict(s.direct().publish(regions))
            for name, s in self.sources.items()
            if name != "broadcast"
        }
        progress.done("publish")
        say(
            {
                "port": port, "big": self.big.data_ptr(), "digests": digests,
                "sources": {name: dict(s.descriptor()) for name, s in self.sources.items()},
                "published": published,
                "nixl": "" if self.nixl is None
                else base64.b64encode(self.nixl.agent.get_agent_metadata()).decode(),
            }
        )  # fmt: skip
        self._joined.join()
        for source in self.sources.values():  # the engine opens one after the other
            source.accept(deadline("accept"))
        options = RingOptions(args.slots, slot_bytes(args.bucket_bytes), DEVICE)
        self.ring = self.sources["broadcast"].stream(options, deadline("ring"))

    def _make_packs(self, bucket_bytes: int) -> list[SlotPack]:
        packs = []
        for cuts in cut_stream(self.model.sizes, bucket_bytes):
            ptrs, offsets, sizes = self.model.columns(cuts)
            rows = plain_table(ptrs, offsets, sizes)
            data_bytes = cuts[-1].offset_bytes + cuts[-1].num_bytes
            packs.append(SlotPack(segment_copy(rows, DEVICE), b"", data_bytes, DEVICE))
        return packs

    def run(self) -> None:
        tensors = self.model.tensors()
        for line in sys.stdin:
            match line.strip():
                case "nccl":
                    dist.broadcast(self.model.arena, src=0)
                case "nccl per tensor":
                    for tensor in tensors:
                        dist.broadcast(tensor, src=0)
                case "broadcast":
                    self._fill(self.ring.max_copy_blocks)
                case word if word.startswith("broadcast "):
                    self._fill(int(word.split()[1]))
                case "end":
                    dist.destroy_process_group()  # together with the other process
                    return
            torch.cuda.synchronize()

    def _fill(self, blocks: int) -> None:
        self.ring.begin_move("bench", deadline("begin"))
        for n, pack in enumerate(self.packs):
            slot = self.ring.acquire(deadline("acquire"))
            pack.fill(slot.ptr, num_threads=1, cancel=None, max_blocks=blocks)
            size, is_last = pack.data_bytes, n == len(self.packs) - 1
            self.ring.submit(slot, SlotHeader("bench", 1, n, size, size, 0, is_last))
        self.ring.flush(deadline("flush"))


def ends_of(args: argparse.Namespace) -> list[str]:
    return ["broadcast", "ipc", *([] if args.no_nixl else ["p2p direct", "p2p nixl"])]


def open_end(name: str) -> Any:
    return transport_of(name).open_source(DEVICE)


def transport_of(name: str) -> Any:
    if name.startswith("p2p"):
        return P2pTransport(device_way=DeviceWay.NIXL if name.endswith("nixl") else DeviceWay.AUTO)
    return get_transport(name)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def say(message: Any) -> None:
    print(json.dumps(message), flush=True)


# -- the engine's process --------------------------------------------------------------------------


class Engine:
    """What each candidate does, on one set of tensors."""

    def __init__(self, args: argparse.Namespace, trainer: Any) -> None:
        progress = Progress("engine")
        self.model = Model(sizes_of(args.model[0], args.tiny), seed=2)
        self._tensors = self.model.tensors()
        self._trainer, self._args = trainer, args
        line = trainer.stdout.readline()
        while line and not line.startswith("{"):
            line = trainer.stdout.readline()
        self.remote = json.loads(line)
        progress.done("memory, and waiting for the trainer")
        join_nccl(self.remote["port"], 1)
        progress.done("NCCL")
        self.targets: dict[str, Any] = {}
        self._reads: dict[str, Any] = {}
        for name, descriptor in self.remote["sources"].items():
            self.targets[name] = transport_of(name).open_target(
                descriptor, deadline("attach"), DEVICE
            )
            progress.done(f"attach {name}")
        self.ring = self.targets["broadcast"].stream(deadline("ring"), DEVICE)
        progress.done("ring")
        for name in self.remote["published"]:
            self._prepare(name)
            progress.done(f"open and prepare {name}")
        self._unpacks = self._make_unpacks(args.bucket_bytes)
        self._big = torch.zeros(NIXL_BYTES, dtype=torch.uint8, device=DEVICE)
        size = min(COPY_BYTES, max(self.model.total_bytes, 2**20))
        self._copy = (
            torch.ones(size, dtype=torch.uint8, device="cuda:1"),
            torch.zeros(size, dtype=torch.uint8, device=DEVICE),
        )
        torch.cuda.synchronize()
        if not args.no_nixl:
            self._connect_nixl()
        progress.done("unpacks and floors")

    def _prepare(self, name: str) -> None:
        direct = self.targets[name].direct()
        at = direct.open(self.remote["published"][name], self.model.regions(), deadline("open"))
        sources = [at[i] for i in range(len(self.model.sizes))]
        self._reads[name] = direct.prepare(plain_table(sources, self.model.ptrs, self.model.sizes))

    def _make_unpacks(self, bucket_bytes: int) -> list[CudaCopy]:
        unpacks = []
        for cuts in cut_stream(self.model.sizes, bucket_bytes):
            ptrs, offsets, sizes = self.model.columns(cuts)
            unpacks.append(CudaCopy(plain_table(offsets, ptrs, sizes), DEVICE))
        return unpacks

    def _connect_nixl(self) -> None:
        self._nixl = RawNixl("raw-engine", self._big)
        peer = self._nixl.agent.add_remote_agent(base64.b64decode(self.remote["nixl"]))
        local, remote = self._nixl.one(self._big.data_ptr()), self._nixl.one(self.remote["big"])
        self._handle = self._nixl.agent.initialize_xfer("READ", local, remote, peer)

    # --- candidates: each returns the bytes that it moved --------------------------------------------

    def candidates(self) -> dict[str, Callable[[], int]]:
        found: dict[str, Callable[[], int]] = {
            "nccl": self._run_nccl,
            "nccl per tensor": self._run_per_tensor,
            "broadcast": self._run_broadcast,
            **{
                f"broadcast {n}": lambda n=n: self._run_broadcast(n)  # type: ignore[misc]
                for n in self._args.copy_blocks
            },
            "peer copy": self._run_copy,
            "ipc direct": lambda: self._run_direct("ipc"),
        }
        if not self._args.no_nixl:
            found["nixl"] = self._run_nixl
            found["p2p direct"] = lambda: self._run_direct("p2p direct")
            found["p2p nixl"] = lambda: self._run_direct("p2p nixl")
        only = self._args.only
        return {n: found[n] for n in found if not only or n in only or n.split()[0] in only}

    def _ask(self, word: str) -> None:
        self._trainer.stdin.write(word + "\n")
        self._trainer.stdin.flush()

    def _run_nccl(self) -> int:
        """Lands in the trainer's order: it has a check of its own."""
        self._ask("nccl")
        dist.broadcast(self.model.arena, src=0)
        torch.cuda.synchronize()
        return self.model.total_bytes

    def _run_per_tensor(self) -> int:
        self._ask("nccl per tensor")
        for tensor in self._tensors:
            dist.broadcast(tensor, src=0)
        torch.cuda.synchronize()
        return self.model.total_bytes

    def _run_broadcast(self, own: int | None = None) -> int:
        self.ring.begin_move("bench")
        self._ask("broadcast" if own is None else f"broadcast {own}")
        blocks = self.ring.max_copy_blocks if own is None else own
        for unpack in self._unpacks:
            _, slot = self.ring.receive(deadline("receive"))
            unpack.run(source_base=slot.ptr, max_blocks=blocks)
            self.ring.release(slot)
        return self.model.total_bytes

    def _run_copy(self) -> int:
        source, target = self._copy
        target.copy_(source)
        torch.cuda.synchronize()
        return int(source.nbytes)

    def _run_direct(self, name: str) -> int:
        self.targets[name].direct().read(self._reads[name], deadline("read"))
        return self.model.total_bytes

    def _run_nixl(self) -> int:
        state = self._nixl.agent.transfer(self._handle)
        while state == "PROC":
            state = self._nixl.agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise RuntimeError(f"raw NIXL ended in state {state}")
        return NIXL_BYTES

    def end(self) -> None:
        self._ask("end")
        dist.destroy_process_group()

    def check(self, name: str, action: Callable[[], int]) -> None:
        """Run once over cleared memory, and compare the digest of every tensor."""
        self.model.arena.zero_()
        torch.cuda.synchronize()
        action()
        if name in ("nccl", "nixl", "peer copy"):
            return  # the floors move other bytes, or the same in another order
        if self.model.digests() != self.remote["digests"]:
            raise SystemExit(f"{name}: the bytes did not arrive")


def measure(engine: Engine, rounds: int) -> dict[str, list[float]]:
    """GB/s of each candidate in each round."""
    candidates, progress = engine.candidates(), Progress("engine")
    for name, action in candidates.items():
        engine.check(name, action)
        action()
        progress.done(f"check of {name}")
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(1).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            start_s = time.perf_counter()
            num_bytes = candidates[name]()
            rates[name].append(num_bytes / (time.perf_counter() - start_s) / 1e9)
        progress.done("a round")
    return rates


def summarise(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for name, found in rates.items():
        floor = FLOORS.get(name, FLOORS.get(name.split()[0]))
        share = None
        if floor in rates:
            share = statistics.median(a / b for a, b in zip(found, rates[floor], strict=True))
        slow = rates.get("nccl per tensor")
        rows.append(
            {
                "candidate": name, "gb_per_s": statistics.median(found), "best": max(found),
                "floor": floor, "of_floor": share,
                "times_per_tensor": None if slow is None
                else statistics.median(a / b for a, b in zip(found, slow, strict=True)),
            }
        )  # fmt: skip
    return rows


def reversed_order() -> str:
    """The two GPUs of this process for the other one, the second first."""
    names = []
    for index in (1, 0):
        raw = native.extension.cuda_device_uuid(index).hex()
        names.append(f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}")
    return ",".join(names)


def run_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--trainer", "--model", model, "--bucket", args.bucket]
    command += ["--slots", str(args.slots), *(["--tiny"] if args.tiny else [])]
    command += ["--no-nixl"] if args.no_nixl else []
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": reversed_order()}
    trainer = subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    try:
        args.model = [model]
        engine = Engine(args, trainer)
        rows = summarise(measure(engine, args.rounds))
        paths = {name: target.path for name, target in engine.targets.items()}
        for target in engine.targets.values():
            target.close()
        engine.end()
    finally:
        trainer.kill()
        trainer.wait()
    num, total = len(engine.model.sizes), engine.model.total_bytes
    print(f"{model}: {num} tensors, {format_bytes(total)}; bucket {args.bucket} x {args.slots}")
    print(f"{'candidate':17} {'GB/s':>7} {'best':>7} {'of its floor':>26} {'x per tensor':>13}")
    for row in rows:
        share = "" if row["of_floor"] is None else f"{row['of_floor']:.1%} of {row['floor']}"
        print(
            f"{row['candidate']:17} {row['gb_per_s']:7.1f} {row['best']:7.1f} {share:>26} "
            f"{row['times_per_tensor'] or float('nan'):13.2f}",
            flush=True,
        )
    return {"model": model, "tensors": num, "bytes": total, "paths": paths, "rows": rows}


def main() -> None:
    parser = command_line(__doc__, "small sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=9)
    models = ["qwen3-8b", "qwen3-30b-a3b"]
    parser.add_argument("--model", nargs="*", default=models, help="whose tensor shapes")
    parser.add_argument("--bucket", default="1GiB", help="bytes of a slot")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument(
        "--copy-blocks", type=int, nargs="*", default=[],
        help="broadcast also with so many blocks that pack and unpack (0: all)",
    )  # fmt: skip
    parser.add_argument("--no-nixl", action="store_true", help="without p2p")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="candidates, of those above")
    parser.add_argument("--trainer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not has_gpus(2):
        return
    args.bucket_bytes = parse_bytes(args.bucket)
    if args.trainer:
        Trainer(args).run()
        return
    results = [run_model(model, args) for model in list(args.model)]
    found = {"bucket": args.bucket, "slots": args.slots, "versions": versions()}
    write_figures(args.json, {**found, "models": results})


if __name__ == "__main__":
    main()
