"""``weightsync plan``: what would move where in a cluster, and how long it would take."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError

TRAINER_KINDS = ("fsdp", "tp", "ep", "pp", "dp")
ENGINE_KINDS = ("tp", "ep", "dp")

_EPILOG = """\
No hardware is needed: layouts and plan are computed as for a real update, and the seconds come from
rates that were measured or published (--constants FILE replaces them; `weightsync doctor --constants FILE`
writes one). Ranks fill hosts in order; the trainer's hosts come first, engines have their own.

  weightsync plan --model kimi-k2 --trainer-layout pp=8,ep=32 --engine-layout tp=8,ep=32 \\
      --engines 8 --wire fp8 --network 400Gbps --plot kimi.png

GB = 10^9 bytes. Exit status: 0; 2 a layout that does not fit, or an unknown model.
"""


def add_parser(commands: Any) -> None:
    """Add this command to the ``weightsync`` parser."""
    parser = commands.add_parser(
        "plan",
        help="say what would move where in a cluster, and how long it would take",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="qwen3-30b-a3b", metavar="NAME|DIR",
        help="published shapes by name (an unknown name lists the closest), or a directory with "
        "safetensors (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--trainer-layout", default="fsdp=8", metavar="fsdp=..,tp=..,ep=..,pp=..,dp=..",
        help="how many ways each kind of parallelism cuts the trainer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--engine-layout", default="tp=8", metavar="tp=..,ep=..,dp=..",
        help="the same for one engine; dp is attention data parallel (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--wire", choices=["bf16", "fp8"], default="bf16",
        help="what travels: weights as they are, or block fp8 with its scales, quantised by the "
        "trainer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--network", default="400Gbps", metavar="RATE",
        help="line rate of one network card, each way: 400Gbps, 50GB/s (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--gpus-per-host", type=int, default=8, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--nics-per-host", type=int, metavar="N", help="default: one for each GPU")
    parser.add_argument(
        "--colocated", action="store_true", help="the engines run on the trainer's GPUs"
    )
    parser.add_argument(
        "--bucket", default="1GB", metavar="SIZE", help="a stream's slot (default: %(default)s)"
    )
    parser.add_argument(
        "--constants", type=Path, metavar="FILE", help="measured rates instead of the built-in ones"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw who sends to whom, and the seconds"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from weightsync.cli.plan_run import run_plan

    return run_plan(args)


def parse_layout(text: str, kinds: Sequence[str], side: str) -> dict[str, int]:
    """``"pp=8,ep=32"`` as counts by kind. Raises :class:`ConfigError`."""
    found: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, count = part.partition("=")
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"{side} {text!r}: {name!r} is not a kind of parallelism here{hint}; known: "
                f"{', '.join(kinds)}"
            )
        if name in found:
            raise ConfigError(f"{side} {text!r}: {name} is given twice")
        if not equals or not re.fullmatch(r"[0-9]+", count) or int(count) < 1:
            raise ConfigError(f"{side} {text!r}: {part!r} must be {name}=COUNT, at least 1")
        found[name] = int(count)
    return found


_RATES = {
    "gbps": 1e9 / 8, "gbit/s": 1e9 / 8, "gb/s": 1e9, "tbps": 1e12 / 8, "tbit/s": 1e12 / 8,
    "tb/s": 1e12, "mbps": 1e6 / 8, "mbit/s": 1e6 / 8, "mb/s": 1e6,
}  # fmt: skip


def parse_rate(text: str) -> float:
    """Bytes a second of ``400Gbps`` (bits) or ``50GB/s`` (bytes). Raises :class:`ConfigError`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]+)\s*", text)
    rate = _RATES.get(match[2].lower()) if match else None
    if match is None or rate is None or float(match[1]) <= 0:
        raise ConfigError(f"rate {text!r} is not a number with a unit: 400Gbps, 50GB/s, 1.6Tbps")
    return float(match[1]) * rate
