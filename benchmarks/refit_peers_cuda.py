"""How do whole refits between two processes of one GPU compare with the usual ways, and with one copy?

A trainer process (this one) and an engine process hold a model each, drawn on the GPU in shuffled, separate
allocations; all ways share these two copies. A time is that of a whole refit, as the trainer sees it: from
its first step to the engine's last acknowledgement. The peers are our own writing of what others do:

    flattened buckets   concatenate tensors into a bucket, hand it over by CUDA IPC, copy each one out of it
    packed bucket       one bucket kept and shared for the whole refit, filled and emptied by a copy a tensor,
                        acknowledged bucket by bucket
    handle a tensor     CUDA IPC handles of all tensors in one message, a copy each

They verify nothing; ours are whole transactions, digests included: an update that is sent to, and the same
in one call (``update_weights``), which is one exchange. Everything is checked before it is timed; rounds are
interleaved, with rests in which the device clears what the way before gave back; the floor is one device copy
of as many bytes, taken in every round.

    python benchmarks/refit_peers_cuda.py [--tiny] [--rounds N] [--model NAME ...] [--only ours] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from engine_adapter.tensors import TensorEngine
from weightsync import native
from weightsync.cli.bench_cuda import drawn_module
from weightsync.cli.bench_device import bench_device
from weightsync.cli.bench_model import ENGINE_MASK, bits_of, mask_of
from weightsync.cli.versions import versions
from weightsync.device_tables import CPU
from weightsync.digest import digest_tensors
from weightsync.receiver import Receiver
from weightsync.sender import Sender

BUCKET_BYTES = 512 * 2**20
TINY_BUCKET_BYTES = 2**20
ALIGNMENT_BYTES = 256
LIMIT_S = 300.0
#: The device clears memory that was given back, at some 0.6 TB/s and beside whatever runs then.
CLEARING_S = 0.2
VERIFIES = ("read", "read_back")
#: From begin to commit; before them a trainer looks at its tensors, publishes and digests them.
STAGES = ("begin", "move", "prepare", "commit")
#: The stages alone, and with what the trainer does between two requests.
ALL_STAGES, SESSION = "begin to commit", "by the clock"
LIMITS = {"deadline_s": LIMIT_S, "commit_timeout_s": LIMIT_S, "request_timeout_s": LIMIT_S}

Tensors = dict[str, torch.Tensor]
Place = tuple[str, int, int]  # name, offset and size in a bucket, in bytes


def make_tensors(model: str, device: str, mask: int) -> Tensors:
    """Those of a preset, in an order of allocation that differs with ``mask``, which is flipped in."""
    module = drawn_module(model, device, order_seed=mask)
    tensors = {name: p.data for name, p in module.named_parameters()}
    flip(tensors, mask)
    return tensors


def flip(tensors: Tensors, mask: int) -> None:
    for tensor in tensors.values():
        tensor.view(bits_of(tensor)).bitwise_xor_(mask)


def synchronize(device: str) -> None:
    if device != CPU:
        torch.cuda.synchronize(device)


def buckets(tensors: Tensors, bucket_bytes: int) -> Iterator[list[Place]]:
    """Which tensors go into each bucket, and where; one that is larger has a bucket of its own."""
    places: list[Place] = []
    offset = 0
    for name, tensor in tensors.items():
        if places and offset + tensor.nbytes > bucket_bytes:
            yield places
            places, offset = [], 0
        places.append((name, offset, tensor.nbytes))
        offset += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if places:
        yield places


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


# --- the engine process ---------------------------------------------------------------------------


def engine_main(pipe: Connection, model: str, device: str) -> None:
    """Serves whatever way the trainer asks for, one command at a time."""
    torch.set_grad_enabled(False)
    tensors = make_tensors(model, device, ENGINE_MASK)
    with ExitStack() as stack:
        receivers = [
            stack.enter_context(Receiver(TensorEngine(tensors.items())).start()) for _ in VERIFIES
        ]
        while (command := pipe.recv()) != "stop":
            match command:
                case "urls":
                    pipe.send([receiver.url for receiver in receivers])
                case "digest":
                    pipe.send(digest_tensors(tensors.items(), num_threads=2))
                case "quiet":
                    synchronize(device)
                    pipe.send("done")
                case "bucket":
                    take_buckets(pipe, tensors, device)
                case "handles":
                    take_handles(pipe, tensors, device)


def take_buckets(pipe: Connection, tensors: Tensors, device: str) -> None:
    """Messages (bucket, or None for the one before; places) until None; each is acknowledged."""
    bucket: torch.Tensor | None = None
    while (message := pipe.recv()) is not None:
        sent, places = message
        bucket = bucket if sent is None else sent
        assert bucket is not None
        for name, offset, size in places:
            target = tensors[name]
            part = bucket[offset : offset + size]
            target.copy_(part.view(target.dtype).view(target.shape))
        del sent, message
        synchronize(device)
        pipe.send("done")
    bucket = None
    pipe.send("done")


def take_handles(pipe: Connection, tensors: Tensors, device: str) -> None:
    received = pipe.recv()
    for name, tensor in received.items():
        tensors[name].copy_(tensor)
    synchronize(device)
    del received, tensor
    pipe.send("done")


# --- the trainer's ways ---------------------------------------------------------------------------


class Trainer:
    """The trainer, its connections, and the ways it has."""

    def __init__(self, model: str, device: str, pipe: Connection, stack: ExitStack) -> None:
        self.device = device
        self.tensors = make_tensors(model, device, mask=0)
        self.num_bytes = sum(t.nbytes for t in self.tensors.values())
        self._pipe = pipe
        self._version = 0
        self.phases: dict[str, float] = {}  # of our last refit
        self._bucket_bytes = min(BUCKET_BYTES, max(TINY_BUCKET_BYTES, self.num_bytes // 4))
        self._bench = bench_device(device)
        urls = self.ask("urls")
        self._senders = {
            verify: stack.enter_context(
                Sender.connect([url], transport="ipc", contract="direct", placement="in_place",
                               verify=verify, **LIMITS)
            )
            for verify, url in zip(VERIFIES, urls, strict=True)
        }  # fmt: skip

    def ask(self, command: str) -> Any:
        self._pipe.send(command)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"the engine process did not answer within {LIMIT_S} s")
        return self._pipe.recv()

    def floor_s(self) -> float:
        """Seconds of one copy of all bytes, by the rate of one of at most 8 GiB; the engine rests."""
        self.ask("quiet")
        found_s = self.num_bytes / (self._bench.ceiling(self.num_bytes)["gb_per_s"] * 1e9)
        self.rest()
        return found_s

    def rest(self) -> None:
        """Let what the way before gave back be cleared, which the next one did not cause."""
        if self.device != CPU:
            time.sleep(CLEARING_S)

    def ours(self, verify: str) -> None:
        self._version += 1
        with self._senders[verify].update(version=self._version) as update:
            update.send(self.tensors)
        self.phases = dict(update.report.engines[0].phases)

    def ours_in_one_call(self, verify: str) -> None:
        self._version += 1
        report = self._senders[verify].update_weights(self.tensors, version=self._version)
        self.phases = dict(report.engines[0].phases)

    def flattened_buckets(self) -> None:
        self._pipe.send("bucket")
        for places in buckets(self.tensors, self._bucket_bytes):
            parts, end = [], 0
            for name, offset, size in places:
                if offset > end:
                    gap = torch.empty(offset - end, dtype=torch.uint8, device=self.device)
                    parts.append(gap)
                parts.append(as_bytes(self.tensors[name]))
                end = offset + size
            flat = torch.cat(parts)
            synchronize(self.device)
            self._pipe.send((flat, places))
            self._answer()
            del flat, parts
        self._pipe.send(None)
        self._answer()

    def packed_bucket(self) -> None:
        size = max(self._bucket_bytes, *(t.nbytes for t in self.tensors.values()))
        bucket = torch.empty(size, dtype=torch.uint8, device=self.device)
        shared: torch.Tensor | None = bucket
        self._pipe.send("bucket")
        for places in buckets(self.tensors, self._bucket_bytes):
            for name, offset, num_bytes in places:
                bucket[offset : offset + num_bytes].copy_(as_bytes(self.tensors[name]))
            synchronize(self.device)
            self._pipe.send((shared, places))
            shared = None
            self._answer()
        self._pipe.send(None)
        self._answer()

    def handle_a_tensor(self) -> None:
        synchronize(self.device)
        self._pipe.send("handles")
        self._pipe.send(self.tensors)
        self._answer()

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            **{f"ours, verify={verify}": partial(self.ours, verify) for verify in VERIFIES},
            **{
                f"ours in one call, {verify}": partial(self.ours_in_one_call, verify)
                for verify in VERIFIES
            },
            "flattened buckets": self.flattened_buckets,
            "packed bucket": self.packed_bucket,
            "handle a tensor": self.handle_a_tensor,
        }

    def check(self, name: str, way: Callable[[], None], version: int) -> None:
        """Every bit arrives: all digests differ before, none after. Warms up, too."""
        flip(self.tensors, mask_of(version))
        sent = digest_tensors(self.tensors.items(), num_threads=2)
        before = self.ask("digest")
        way()
        after = self.ask("digest")
        if any(before[n] == sent[n] for n in sent) or after != sent:
            raise SystemExit(f"{name}: the bytes did not arrive")

    def tidy(self) -> None:
        """Outside of the times: what CUDA IPC keeps of the former way."""
        gc.collect()
        if self.device != CPU:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        self.rest()


def measure(
    trainer: Trainer, rounds: int, only: str = ""
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Seconds of every way whose name begins with ``only``, and the median phases of ours."""
    ways = {name: way for name, way in trainer.ways().items() if name.startswith(only)}
    for version, (name, way) in enumerate(ways.items()):
        trainer.check(name, way, version)
        trainer.tidy()
    parts = {
        name: f"  {name.removeprefix('ours').strip(' ,')}: "
        for name in ways
        if name.startswith("ours")
    }
    seconds: dict[str, list[float]] = {"one copy": []} | {name: [] for name in ways}
    seconds |= {part + what: [] for part in parts.values() for what in (ALL_STAGES, SESSION)}
    phases: dict[str, list[dict[str, float]]] = {}
    for version in range(rounds):
        flip(trainer.tensors, mask_of(version))
        seconds["one copy"].append(trainer.floor_s())
        for name, way in ways.items():
            synchronize(trainer.device)
            start_s = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start_s)
            if name in parts:
                phases.setdefault(name, []).append(trainer.phases)
                stages_s = sum(trainer.phases.get(s, 0.0) for s in STAGES)
                seconds[parts[name] + ALL_STAGES].append(stages_s)
                seconds[parts[name] + SESSION].append(trainer.phases["session"])
            trainer.tidy()
    medians = {
        name: {phase: statistics.median(p.get(phase, 0.0) for p in found) for phase in found[-1]}
        for name, found in phases.items()
    }
    return seconds, medians


def run(model: str, device: str, rounds: int, only: str = "") -> dict[str, Any]:
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=engine_main, args=(theirs, model, device), daemon=True)
    engine.start()
    theirs.close()
    with ExitStack() as stack:
        trainer = Trainer(model, device, ours, stack)
        seconds, phases = measure(trainer, rounds, only)
    ours.send("stop")
    engine.join(timeout=60)
    return {
        "model": model,
        "device": device,
        "num_bytes": trainer.num_bytes,
        "num_tensors": len(trainer.tensors),
        "phases_s": phases,
        "rows": [
            {"way": name, "median_s": statistics.median(values), "seconds": values}
            for name, values in seconds.items()
        ],
    }


def report(result: dict[str, Any]) -> None:
    floor_s = result["rows"][0]["median_s"]
    print(f"\n{result['model']}: {result['num_tensors']} tensors, {result['num_bytes']:,} B")
    print(f"{'way':<40}{'median ms':>11}{'min ms':>10}{'GB/s':>9}{'x one copy':>12}")
    for row in result["rows"]:
        median_s = row["median_s"]
        rate = result["num_bytes"] / median_s / 1e9
        print(
            f"{row['way']:<40}{median_s * 1e3:>11.2f}{min(row['seconds']) * 1e3:>10.2f}"
            f"{rate:>9.1f}{median_s / floor_s:>12.2f}",
            flush=True,
        )
    for name, phases in result["phases_s"].items():
        print(f"{name}, ms:", ", ".join(f"{p} {s * 1e3:.2f}" for p, s in phases.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small and quick, for a smoke test")
    parser.add_argument("--model", nargs="+", default=None, help="shapes of presets")
    parser.add_argument("--rounds", type=int, default=None, help="default 5")
    parser.add_argument("--only", choices=("ours",), default="", help="leave the peers out")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument(
        "--device", default="cuda:0", help="cpu tries the program where there is no GPU"
    )
    args = parser.parse_args()
    if args.device != CPU and not native.has_cuda() and not args.tiny:
        print(f"nothing to measure: {native.cuda_unavailable_reason()}")
        return
    device = args.device if native.has_cuda() else CPU
    torch.set_grad_enabled(False)
    models = args.model or (["tiny"] if args.tiny else ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"])
    results = []
    for model in models:
        results.append(run(model, device, args.rounds or (2 if args.tiny else 5), args.only))
        report(results[-1])
    if args.json is not None:
        args.json.write_text(
            json.dumps({"results": results, "versions": versions()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
