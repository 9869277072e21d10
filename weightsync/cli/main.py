"""``weightsync``: the door to every command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from weightsync import __version__
from weightsync.cli import bench, delta, doctor, plan
from weightsync.errors import ConfigError, SlowPathError, WeightSyncError

#: Exit statuses beside 0: an update failed or was not verified; bad arguments; a slow path (--strict).
EXIT_FAILED, EXIT_USAGE, EXIT_SLOW = 1, 2, 3


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; building it imports nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="weightsync", description="Move model weights from a trainer to an inference engine."
    )
    parser.add_argument("--version", action="version", version=f"weightsync {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (bench, plan, delta, doctor):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except SlowPathError as error:
        print(f"weightsync: slow path refused: {error}", file=sys.stderr)
        return EXIT_SLOW
    except ConfigError as error:
        print(f"weightsync: {error}", file=sys.stderr)
        return EXIT_USAGE
    except WeightSyncError as error:
        print(f"weightsync: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("weightsync: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
