"""Refits between two processes of one CUDA device over ``ipc``, against one device copy.

    python benchmarks/ipc_cuda.py [--tensors 9000] [--kib 3072] [--repeats 9] [--tiny] [--json FILE]

A trainer process holds the tensors, this one the engine. Times are medians of whole updates, as the
trainer sees them, digests included; ``copy`` is the read alone, as the engine sees it. The engine's
tensors are compared with the trainer's bit for bit afterwards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from bench_parts.command import command_line, has_gpus, write_figures

from engine_adapter.module import ModuleAdapter
from weightsync.receiver import Receiver
from weightsync.sender import Sender

DEVICE = "cuda:0"


def make_module(num_tensors: int, num_bytes: int, seed: int | None) -> Any:
    generator = torch.Generator(DEVICE).manual_seed(0 if seed is None else seed)

    def tensor() -> Any:
        value = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=DEVICE)
        if seed is not None:
            value.normal_(generator=generator)
        return torch.nn.Parameter(value, requires_grad=False)

    module = torch.nn.Module()
    module.weights = torch.nn.ParameterList(tensor() for _ in range(num_tensors))
    return module


def trainer(args: argparse.Namespace) -> None:
    module = make_module(args.tensors, args.kib * 1024, seed=args.seed)
    options = {"transport": "ipc", "placement": args.placement, "verify": args.verify}
    with Sender.connect([args.trainer], **options) as sender:
        for version in range(args.repeats + 2):
            start_s = time.perf_counter()
            with sender.update(version=version) as update:
                update.send(module)
            spent_s = time.perf_counter() - start_s
            assert update.report is not None
            (engine,) = update.report.engines
            phases = dict(engine.phases)
            print(
                json.dumps({"s": spent_s, "pause_s": engine.pause_s, "phases": phases}), flush=True
            )


def device_copy_s(num_bytes: int) -> float:
    source, target = (torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    found = []
    for _ in range(9):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start_s)
    return statistics.median(found)


def measure(
    args: argparse.Namespace, placement: str, verify: str, seed: int, copy_s: float
) -> dict[str, Any]:
    module = make_module(args.tensors, args.kib * 1024, seed=None)
    with Receiver(ModuleAdapter(module)).start() as receiver:
        command = [
            sys.executable, __file__, "--trainer", receiver.url, "--placement", placement,
            "--verify", verify, "--tensors", str(args.tensors), "--kib", str(args.kib),
            "--repeats", str(args.repeats), "--seed", str(seed),
        ]  # fmt: skip
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
        runs = [json.loads(line) for line in done.stdout.splitlines()]
        copies = [s for _, _, s in receiver._work.stats.buckets]
    expected = make_module(args.tensors, args.kib * 1024, seed=seed)
    for found, wanted in zip(module.weights, expected.weights, strict=True):
        if not torch.equal(found, wanted):
            raise SystemExit(f"{placement}, {verify}: the bytes did not arrive")
    warm = runs[2:]
    phases = {
        name: statistics.median(run["phases"].get(name, 0.0) for run in warm) * 1e3
        for name in warm[-1]["phases"]
    }
    stages = ("begin", "move", "prepare", "commit")
    refits = [sum(run["phases"].get(stage, 0.0) for stage in stages) for run in warm]
    row = {
        "refit_s": statistics.median(refits),  # begin to commit
        "placement": placement,
        "verify": verify,
        "first_s": runs[0]["s"],
        "update_s": statistics.median(run["s"] for run in warm),
        "pause_s": statistics.median(run["pause_s"] for run in warm),
        "copy_s": copies[-1],
        "phases_ms": phases,
    }
    print(
        f"{placement:9} {verify:9} first {row['first_s'] * 1e3:8.1f} ms, then "
        f"{row['update_s'] * 1e3:7.2f} ms, begin to commit {row['refit_s'] * 1e3:7.2f} ms = "
        f"{row['refit_s'] / copy_s:5.2f} copies, pause {row['pause_s'] * 1e3:7.2f} ms, copy "
        f"{row['copy_s'] * 1e3:6.2f} ms",
        {name: round(ms, 2) for name, ms in phases.items()},
        flush=True,
    )
    return row


def main() -> None:
    parser = command_line(__doc__, "small and quick, for a smoke test")
    parser.add_argument("--tensors", type=int, default=9000)
    parser.add_argument("--kib", type=int, default=3072)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--trainer", default="", help=argparse.SUPPRESS)
    parser.add_argument("--placement", default="", help="only this one")
    parser.add_argument("--verify", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not has_gpus():
        return
    if args.tiny:
        args.tensors, args.kib, args.repeats = 100, 64, 2
    if args.trainer:
        trainer(args)
        return
    num_bytes = args.tensors * args.kib * 1024
    copy_s = device_copy_s(num_bytes)
    print(
        f"{args.tensors} x {args.kib} KiB = {num_bytes / 1e9:.2f} GB on "
        f"{torch.cuda.get_device_name(0)}; one device copy {copy_s * 1e3:.2f} ms"
    )
    torch.cuda.empty_cache()
    ways = [(p, v) for p in ("in_place", "staged") for v in ("read", "read_back")]
    if args.placement:
        ways = [way for way in ways if way[0] == args.placement]
    rows = [measure(args, *way, seed, copy_s) for seed, way in enumerate(ways)]
    result = {"num_bytes": num_bytes, "num_tensors": args.tensors, "device_copy_s": copy_s}
    write_figures(args.json, {**result, "rows": rows})


if __name__ == "__main__":
    main()
