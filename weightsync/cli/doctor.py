"""``weightsync doctor``: what works here, what does not, and why."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add this command to the ``weightsync`` parser."""
    parser = commands.add_parser(
        "doctor", help="say what works on this machine, what not, and what to do about it"
    )
    parser.add_argument(
        "--device",
        metavar="cpu|cuda",
        help="try transports on this device only (default: the host, and the first GPU if there is one)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--constants",
        type=Path,
        metavar="FILE",
        help="instead, measure rates of this machine's memory and write them for weightsync plan",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from weightsync.cli.bench_cuda import check_device
    from weightsync.cli.doctor_checks import run_doctor

    is_json: bool = args.json
    device = None if args.device is None else check_device(args.device)
    if args.constants is not None:
        from weightsync.cli.doctor_constants import write_constants

        return write_constants(args.constants, device)
    return run_doctor(device=device, is_json=is_json)
