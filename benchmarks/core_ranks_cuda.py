"""How much faster does the core decode with two GPUs than with one?

One engine of one rank and one of two ranks (tensor parallel, NCCL inside decode graphs) of the same
published shapes, with random weights, alive side by side and taking turns. The check: both ranks make the
same tokens with the same log-probs, and a request has the same bits alone and in a batch. A step is the
difference between generating 72 and 8 tokens for requests of one size, over 64; prefixes are cached.

    python benchmarks/core_ranks_cuda.py [--tiny] [--model NAME] [--batches N ...] [--rounds N] [--eager]
                                         [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
from bench_parts.command import command_line, has_gpus, write_figures

from weightsync import native
from weightsync.presets import get_preset

CONTEXT = 512
SHORT, LONG = 8, 72
LIMIT_S = 120


# -- one rank --------------------------------------------------------------------------------------


def make_engine(args: argparse.Namespace) -> Any:
    import torch.distributed as dist

    from engine_adapter.core.config import parse_config
    from engine_adapter.core.engine import Engine
    from engine_adapter.core.engine_config import EngineConfig
    from engine_adapter.core.model import DecoderModel
    from engine_adapter.core.parallel import ALONE, Group
    from engine_adapter.core.shards import Shards

    group = ALONE
    if args.size > 1:
        make_store: Any = dist.FileStore  # type: ignore[attr-defined]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=make_store(args.store, args.size), rank=args.rank,
            world_size=args.size, timeout=timedelta(seconds=LIMIT_S),
        )  # fmt: skip
        group = Group(dist.group.WORLD, args.rank, args.size)
    model = DecoderModel(
        parse_config(get_preset(args.model).config()), torch.bfloat16, torch.device("cuda:0"),
        max_positions=2 * CONTEXT, shards=Shards(args.rank, args.size, tp_size=args.size), group=group,
    )  # fmt: skip
    torch.manual_seed(args.rank)
    for storage in model.slots.storages.values():
        if storage.dim() == 1:
            storage.fill_(1.0)
        else:
            storage.normal_(0.0, storage.shape[-1] ** -0.5)
    rows = max(args.batches)
    settings: Any = {
        "kv_cache_tokens": rows * (CONTEXT + 2 * LONG) + 4096, "max_running": max(rows, 24),
        "max_step_tokens": 8192, "decode": "eager" if args.eager else "auto",
    }  # fmt: skip
    return Engine(model, EngineConfig(**settings), group=group)


def generate(engine: Any, rows: int, count: int) -> Any:
    from engine_adapter.core.sampling_params import SamplingParams

    prompts = [[3 + (i * 7 + row) % 1000 for i in range(CONTEXT)] for row in range(rows)]
    params = [
        SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=row)
        for row in range(rows)
    ]
    return engine.generate(prompts, params)


def bits(outputs: Any) -> Any:
    return [[list(o.token_ids), [r.log_prob for r in o.log_probs]] for o in outputs]


def answer(engine: Any, task: Any) -> Any:
    if task["do"] == "check":
        together = bits(generate(engine, 24, 20))
        if bits(generate(engine, 1, 20))[0] != together[0]:
            raise SystemExit("a request has other bits alone than in a batch")
        return together
    found = {}
    for count in (SHORT, LONG):
        start_s = time.perf_counter()
        generate(engine, task["rows"], count)
        found[count] = time.perf_counter() - start_s
    return (found[LONG] - found[SHORT]) / (LONG - SHORT)


def serve(args: argparse.Namespace) -> None:
    start_s = time.perf_counter()
    engine = make_engine(args)
    kind = "eager" if engine.decode_steps is None else "graphs"
    say({"start_s": time.perf_counter() - start_s, "decode": kind})
    for line in sys.stdin:
        say(answer(engine, json.loads(line)))


def say(message: Any) -> None:
    print("answer " + json.dumps(message), flush=True)


# -- the ranks of one engine, from outside ----------------------------------------------------------


class Ranks:
    """A process for each rank, each with a GPU of its own."""

    def __init__(self, args: argparse.Namespace, size: int, directory: str) -> None:
        given = ["--model", args.model, "--batches", *map(str, args.batches)]
        given += ["--size", str(size), "--store", f"{directory}/{size}"]
        given += ["--eager"] if args.eager else []
        self.children = [
            subprocess.Popen(
                [sys.executable, __file__, *given, "--rank", str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": own_gpu_first(rank)},
            )
            for rank in range(size)
        ]  # fmt: skip

    def ask(self, task: Any) -> list[Any]:
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write(json.dumps(task) + "\n")
            child.stdin.flush()
        return self.receive()

    def receive(self) -> list[Any]:
        found = []
        for rank, child in enumerate(self.children):
            assert child.stdout is not None
            line = next((x for x in child.stdout if x.startswith("answer ")), None)
            if line is None:
                raise SystemExit(f"rank {rank} of {len(self.children)} ended: {child.wait()}")
            found.append(json.loads(line.removeprefix("answer ")))
        return found

    def kill(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()


def own_gpu_first(rank: int) -> str:
    """Both, so that ranks may map each other's memory."""
    return ",".join(name_of_gpu(index) for index in (rank, 1 - rank))


def name_of_gpu(index: int) -> str:
    raw = native.extension.cuda_device_uuid(index).hex()
    return f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


def measure(args: argparse.Namespace, engines: dict[int, Ranks]) -> list[dict[str, Any]]:
    for size, ranks in engines.items():
        print(f"{size} rank(s): {ranks.receive()[0]}", flush=True)
        found = ranks.ask({"do": "check"})
        if any(other != found[0] for other in found):
            raise SystemExit("ranks of one engine made different tokens")
    rows = []
    for batch in args.batches:
        times: dict[int, list[float]] = {size: [] for size in engines}
        for round_index in range(args.rounds + 1):
            for size, ranks in engines.items():
                step_s = max(ranks.ask({"do": "time", "rows": batch}))
                if round_index:  # the first one fills the prefix cache
                    times[size].append(step_s)
        one, two = (statistics.median(times[size]) for size in (1, 2))
        rows.append({"rows": batch, "one_s": one, "two_s": two, "times": one / two})
        print(
            f"{args.model}, {batch:4} requests: {one * 1e3:7.3f} ms a step with one GPU, "
            f"{two * 1e3:7.3f} with two: {one / two:.2f} x",
            flush=True,
        )
    return rows


def main() -> None:
    parser = command_line(__doc__, "a small model: does it run?")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without graphs")
    for hidden in ("--rank", "--size"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        serve(args)
        return
    if not has_gpus(2):
        return
    if args.tiny:
        args.model, args.batches, args.rounds = "qwen3-0.6b", [1], 1
    with tempfile.TemporaryDirectory() as directory:
        engines = {}
        try:
            for size in (1, 2):
                engines[size] = Ranks(args, size, directory)
            found = measure(args, engines)
        finally:
            for ranks in engines.values():
                ranks.kill()
    write_figures(args.json, {"model": args.model, "rows": found})


if __name__ == "__main__":
    main()
