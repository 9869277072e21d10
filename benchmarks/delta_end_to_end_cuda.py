"""From new weights on a GPU to an engine that serves them, through a store in memory: where the time goes.

A trainer and an engine in one process, both on one GPU, random weights in the shapes of ``--model``;
before each version a share of the elements moves by one step, small ones rather than large ones.

    python benchmarks/delta_end_to_end_cuda.py [--tiny] [--model NAME] [--share P] [--versions N] [--every N]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from bench_parts.command import command_line, has_gpus, write_figures

from engine_adapter.module import ModuleAdapter
from weightsync import native
from weightsync.model_shapes import model_metas, model_names
from weightsync.receiver import Receiver
from weightsync.store_sender import StoreOptions, StoreSender

DEVICE = "cuda:0"
DRAWN = 1 << 26  # elements at a time


class Net(torch.nn.Module):
    """Parameters in the shapes of a model, without its forward."""

    def __init__(self, model: str, device: str, is_drawn: bool) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(1)
        for meta in model_metas(model):
            data = torch.zeros(meta.shape, dtype=torch.bfloat16, device=device)
            flat = data.view(-1)
            for start in range(0, flat.numel() if is_drawn else 0, DRAWN):
                part = flat[start : start + DRAWN]
                drawn = torch.randn(part.numel(), device=device, generator=generator)
                part.copy_(drawn.mul_(0.02))
            name = meta.name.replace(".", "_")
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

    def step(self, share: float, seed: int) -> None:
        """P(change) halves with every octave that a weight grows, as under Adam."""
        for parameter in self.parameters():
            device, flat = parameter.device, parameter.data.view(-1)
            generator = torch.Generator(device).manual_seed(seed)
            for start in range(0, flat.numel(), DRAWN):
                part = flat[start : start + DRAWN]
                chance = torch.frexp(part.float())[1].neg().float().exp2_().clamp_(max=1e5)
                chance.mul_(share / chance.mean().clamp_min(1e-9))
                mask = torch.rand(part.numel(), device=device, generator=generator) < chance
                part.view(torch.int16).add_(mask.to(torch.int16))
        if parameter.is_cuda:
            torch.cuda.synchronize()


def is_same(net: Net, other: Net) -> bool:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def shown(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {spent * 1e3:.1f}" for name, spent in phases.items())


def run(
    model: str, share: float, versions: int, every: int, device: str, directory: str
) -> dict[str, Any]:
    """What each version that was pulled took, the first in full."""
    start_s = time.perf_counter()
    net, served = Net(model, device, is_drawn=True), Net(model, device, is_drawn=False)
    rows: list[dict[str, Any]] = []
    print(f"drawn in {time.perf_counter() - start_s:.1f} s", flush=True)
    snapshot: Any = "host" if device == "cpu" else "device"
    options = StoreOptions(
        fold_every=0, anchor_every=0, keep=every + 1, grace_s=0, snapshot=snapshot
    )
    with (
        StoreSender(directory, "run", options) as sender,
        Receiver(ModuleAdapter(served)) as receiver,
    ):
        follower = receiver.follow(directory, placement="in_place")
        for version in range(versions + 1):
            start_s = time.perf_counter()
            with sender.update(version=version) as update:
                update.send(net)
            report = update.report
            published_s = time.perf_counter() - start_s
            if version % every:
                sender.wait_for_upkeep()
                net.step(share, version)
                continue
            pulled = follower.pull()
            served_s = time.perf_counter() - start_s
            if report is None or not is_same(net, served):
                raise SystemExit(f"version {version} is not what the engine serves")
            row = {
                "kind": report.kind, "pulled": list(pulled.kinds), "served_s": served_s,
                "published_s": published_s, "encode_s": report.encode_s,
                "publish_s": report.publish_s, "pull_s": pulled.seconds,
                "pause_s": pulled.pause_s, "payload_bytes": report.payload_bytes,
                "total_bytes": report.total_bytes, "num_changed": report.num_changed,
                "phases": dict(pulled.phases), "on_host": dict(report.on_host),
                "publish_phases": dict(report.phases),
            }  # fmt: skip
            rows.append(row)
            print(report, flush=True)
            print(
                f"  served {served_s:.3f} s = published {published_s:.3f} s + pull {pulled.seconds:.3f} "
                f"({', '.join(pulled.kinds)}); pause {pulled.pause_s * 1e3:.1f} ms; "
                f"on the host {dict(report.on_host)}"
            )
            print(f"  publish, ms: {shown(report.phases)}")
            print(f"  pull, ms: {shown(pulled.phases)}", flush=True)
            sender.wait_for_upkeep()
            net.step(share, version)
    return {"model": model, "rows": rows}


def main() -> None:
    parser = command_line(__doc__, "small and quick, for a smoke test")
    parser.add_argument("--model", choices=model_names(), default="qwen3-8b")
    parser.add_argument("--share", type=float, default=0.01, help="of elements that change")
    parser.add_argument("--versions", type=int, default=4, help="behind the first one")
    parser.add_argument(
        "--every", type=int, default=1, help="the engine pulls one version in so many"
    )
    args = parser.parse_args()
    if not args.tiny and not has_gpus():
        return
    has_cuda = native.has_cuda() and torch.cuda.is_available()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        model = "tiny" if args.tiny else args.model
        device = DEVICE if has_cuda or not args.tiny else "cpu"
        found = run(model, args.share, args.versions, args.every, device, directory)
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
