"""``weightsync doctor``: what works here, what does not, and why."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add this command to the ``weightsync`` parser."""
    parser = commands.add_parser(
        "doctor", help="say what works on this machine, what not, and what to do about it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from weightsync.cli.doctor_checks import run_doctor

    is_json: bool = args.json
    return run_doctor(is_json=is_json)
