"""The command line of a benchmark: its options, when there is nothing to measure, figures in a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from weightsync import native


def command_line(doc: str | None, tiny: str) -> argparse.ArgumentParser:
    """A parser that describes itself by the first line of ``doc``, with ``--tiny`` (what that is) and
    ``--json``."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help=tiny)
    parser.add_argument("--json", type=Path, help="write figures here")
    return parser


def has_gpus(count: int = 1) -> bool:
    """Whether there are as many GPUs; says so if not."""
    if not native.has_cuda():
        print(f"nothing to measure: {native.cuda_unavailable_reason()}")
        return False
    if native.extension.cuda_num_devices() < count:
        print(f"nothing to measure: {count} GPUs are needed")
        return False
    return True


def write_figures(path: Path | None, figures: Any) -> None:
    """As JSON, if they are wanted."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
