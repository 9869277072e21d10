"""What ``weightsync plan`` does: a model and two layouts in, a table, JSON and a picture out."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightsync.cli.plan import ENGINE_KINDS, TRAINER_KINDS, parse_layout, parse_rate
from weightsync.cli.plan_report import as_json, table
from weightsync.cost.constants import Constants, read_constants
from weightsync.cost.study import Setup, study
from weightsync.errors import ConfigError
from weightsync.model_shapes import model_metas
from weightsync.types import TensorMeta, parse_bytes


def run_plan(args: argparse.Namespace) -> int:
    """Compute, print, write. Raises :class:`ConfigError` for what does not fit."""
    setup = Setup(
        trainer=parse_layout(args.trainer_layout, TRAINER_KINDS, "--trainer-layout"),
        engine=parse_layout(args.engine_layout, ENGINE_KINDS, "--engine-layout"),
        num_engines=args.engines,
        wire=args.wire,
        line_bytes_per_s=parse_rate(args.network),
        gpus_per_host=args.gpus_per_host,
        nics_per_host=args.nics_per_host,
        is_colocated=args.colocated,
        bucket_bytes=parse_bytes(args.bucket),
        head_dim=_head_dim(args.model),
        constants=Constants() if args.constants is None else read_constants(args.constants),
    )
    metas = metas_of(args.model)
    check_counts(metas, setup)
    with _no_collector():
        found = study(metas, setup, _show_progress)
    _show_progress("")
    print(table(args.model, found))
    if args.json is not None:
        _write(args.json, json.dumps(as_json(args.model, found), indent=1))
    if args.plot is not None:
        from weightsync.cli.plan_picture import draw

        draw(args.model, found, args.plot)
    return 0


@contextmanager
def _no_collector() -> Iterator[None]:
    """Millions of records without a cycle among them: walking them again and again took a third of
    the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def metas_of(model: str) -> tuple[TensorMeta, ...]:
    """Tensors of a model by name or of a checkpoint's directory, from its headers alone."""
    if Path(model).is_dir():
        from weightsync.checkpoints import read_index

        entries = read_index(Path(model))
        return tuple(TensorMeta(e[0], e[1], tuple(e[2])) for e in entries)
    return model_metas(model)


def _head_dim(model: str) -> int | None:
    """What a directory's config.json says of the head size; None where it says nothing."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
        found = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(found)
    except (AttributeError, KeyError, OSError, TypeError, ValueError, ZeroDivisionError):
        return None  # models of another make; the tensors may show it


def check_counts(metas: tuple[TensorMeta, ...], setup: Setup) -> None:
    """Expert counts that a layout cannot deal out evenly. Raises :class:`ConfigError`."""
    from weightsync.layouts.roles import model_sizes

    experts = model_sizes(metas, head_dim=1).num_experts
    for side, counts in (("--trainer-layout", setup.trainer), ("--engine-layout", setup.engine)):
        ep = counts.get("ep", 1)
        if ep > 1 and not experts:
            raise ConfigError(f"{side}: ep={ep}, but the model has no experts; leave ep out")
        if ep > 1 and experts % ep:
            fits = [n for n in range(2, experts + 1) if experts % n == 0]
            near = sorted(fits, key=lambda n: abs(n - ep))[:4]
            raise ConfigError(
                f"{side}: {experts} experts cannot be dealt evenly over ep={ep}; closest that fit: "
                f"{', '.join(map(str, sorted(near)))}"
            )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
