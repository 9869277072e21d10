"""``weightsync bench``: move a real model between two processes, prove it, and time it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError
from weightsync.presets import PRESETS
from weightsync.transports import transport_names
from weightsync.types import BUCKET_ALIGNMENT_BYTES, ContractChoice, Placement, parse_bytes

#: The first three make what is made once.
MIN_UPDATES = 4

_EPILOG = """\
A trainer process holds the model, an engine process holds the same model with other weights (with
--engine core it generates all the while, which takes its share of the machine). With
disk-delta the trainer publishes versions in which some 1 % of the elements changed. Before
every repeat the trainer changes every tensor; after every repeat each side digests its own live
tensors, and both lists must agree; a model that was drawn on a GPU is also drawn anew, tensor by
tensor, and compared with the engine's bit for bit. GB = 10^9 bytes, GiB = 2^30. Exit status: 0; 1 not
verified, grown or failed; 2 bad arguments; 3 a slow path under --strict.
"""


@dataclass(frozen=True)
class BenchSettings:
    """What a run was asked to do, resolved."""

    transport: str
    bucket: str
    model: str
    device: str
    engine: str
    placement: str
    contract: str
    repeat: int
    json_file: Path | None
    plot_file: Path | None
    strict: bool
    updates: int = 0
    trainer_layout: str = ""
    store_directory: Path | None = None
    engine_layout: str = ""


def add_parser(commands: Any) -> None:
    """Add this command to the ``weightsync`` parser."""
    parser = commands.add_parser(
        "bench",
        help="move a real model between two processes on this machine, prove it and time it",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [n for n in transport_names() if n != "loopback"]  # loopback is one process by nature
    parser.add_argument("--transport", choices=names, default="p2p", help="default: %(default)s")
    parser.add_argument(
        "--bucket",
        default="auto",
        type=_bucket,
        metavar="SIZE",
        help="size of a stream's slot: 1GB, 512MiB, auto = 64MiB (default)",
    )
    parser.add_argument(
        "--model",
        default="qwen3-0.6b",
        metavar="NAME|DIR",
        help="a directory with config.json and safetensors, or real shapes by name: "
        f"{', '.join(PRESETS)} (default: %(default)s, a transformers checkpoint written once to "
        "the user's cache)",
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        metavar="cpu|cuda",
        help="cuda, cuda:1, ...: one GPU holds both models, drawn there (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        choices=["module", "core"],
        default="module",
        help="what is refitted: a module, or the bundled core while it generates "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--trainer-layout",
        default="",
        metavar="KIND=N,...",
        help="ranks of the trainer, real shards over gloo: fsdp, dp (with fsdp: HSDP), tp, ep, pp",
    )
    parser.add_argument(
        "--engine-layout",
        default="",
        metavar="KIND=N,...",
        help="ranks of the engine, with --engine core: tp, ep",
    )
    parser.add_argument(
        "--placement",
        choices=[p.value for p in Placement if p is not Placement.DELTA],
        default=Placement.STAGED.value,
        help="where an update lands: a second copy, or the live slots (default: %(default)s)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stream", action="store_true", help="through a ring of slots")
    how.add_argument("--direct", action="store_true", help="the engine reads the trainer's memory")
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="with disk-delta: where the store is made, and removed again (default: /dev/shm)",
    )
    parser.add_argument(
        "--repeat", type=_positive, default=5, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--updates",
        type=_updates,
        default=0,
        metavar="N",
        help="then N updates more; status 1 if memory, files or handles of either side grew",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw phases and rates")
    parser.add_argument(
        "--strict", action="store_true", help="a slow path instead of a fast one is an error"
    )
    parser.set_defaults(run=_run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count >= 1")
    return int(text)


def _updates(text: str) -> int:
    if (count := _positive(text)) < MIN_UPDATES:
        raise argparse.ArgumentTypeError(f"{count} updates show no growth: at least {MIN_UPDATES}")
    return count


def _device(text: str) -> str:
    """Asks the driver, so only for a device that is asked for."""
    if text == "cpu":
        return text
    from weightsync.cli.bench_cuda import check_device

    try:
        return check_device(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bucket(text: str) -> str:
    try:
        if text != "auto" and parse_bytes(text) < BUCKET_ALIGNMENT_BYTES:
            raise ValueError(
                f"a bucket holds at least {BUCKET_ALIGNMENT_BYTES} bytes, got {text!r}"
            )
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _run(args: argparse.Namespace) -> int:
    contract = ContractChoice.AUTO
    if args.stream or args.direct:
        contract = ContractChoice.STREAM if args.stream else ContractChoice.DIRECT
    if args.engine == "core" and args.device != "cpu":
        raise ConfigError(
            f"--engine core --device {args.device}: the core's kernels are the CPU's so far; use "
            "--engine module"
        )
    settings = BenchSettings(
        transport=args.transport,
        bucket=args.bucket,
        model=args.model,
        device=args.device,
        engine=args.engine,
        placement=args.placement,
        contract=contract.value,
        repeat=args.repeat,
        json_file=args.json,
        plot_file=args.plot,
        strict=args.strict,
        updates=args.updates,
        trainer_layout=args.trainer_layout,
        engine_layout=args.engine_layout,
        store_directory=args.store,
    )
    if settings.transport == "disk-delta":
        from weightsync.cli.bench_delta import run_delta

        if settings.trainer_layout or settings.engine_layout or args.stream or args.direct:
            raise ConfigError(
                "--transport disk-delta takes no layouts of ranks, and no --stream or --direct"
            )
        return run_delta(settings)
    if settings.trainer_layout or settings.engine_layout:
        from weightsync.cli.bench_ranks import run_ranks

        return run_ranks(settings)
    from weightsync.cli.bench_run import run_bench

    return run_bench(settings)
