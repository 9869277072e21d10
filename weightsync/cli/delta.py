"""``weightsync delta``: look at a store of versions, check it, fold it, collect it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.store import Store, VersionManifest


def add_parser(commands: Any) -> None:
    """Add this command to the ``weightsync`` parser."""
    parser = commands.add_parser("delta", help="log, show, verify, fold or collect stored versions")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        verb: argparse.ArgumentParser = verbs.add_parser(name, help=text)
        verb.add_argument(
            "directory",
            metavar="DIR",
            help="the store: a directory, or a URL such as s3://bucket/prefix",
        )
        verb.add_argument("--run", dest="run_id", help="the run (default: the only one there is)")
        verb.set_defaults(run=run)
        return verb

    add("log", _log, "one line a version")
    show = add("show", _show, "one version, tensor by tensor")
    show.add_argument("--version", type=int, help="default: the newest")
    verify = add("verify", _verify, "read every byte of versions and check it")
    verify.add_argument("--version", type=int, help="default: all of them")
    fold = add("fold", _fold, "write one delta in place of many")
    fold.add_argument("--from", dest="base", type=int, required=True, metavar="VERSION")
    fold.add_argument("--to", dest="version", type=int, help="default: the newest")
    gc = add("gc", _gc, "forget what neither the last versions nor a lease needs")
    gc.add_argument("--keep", type=int, default=1, help="versions that must stay (default 1)")
    gc.add_argument(
        "--grace-s", type=float, default=3600.0, help="seconds between withdrawal and removal"
    )


def _store(args: argparse.Namespace) -> Store:
    from weightsync.errors import ConfigError
    from weightsync.store import Store

    runs = Store.runs(args.directory)
    if args.run_id is not None:
        if args.run_id not in runs:
            raise ConfigError(f"{args.directory} has no run {args.run_id!r}; it has {runs}")
        return Store(args.directory, args.run_id)
    if len(runs) != 1:
        raise ConfigError(f"{args.directory} has {len(runs)} runs {runs}; name one with --run")
    return Store(args.directory, runs[0])


def _newest(store: Store, version: int | None) -> int:
    from weightsync.errors import UnavailableError

    found = store.latest() if version is None else version
    if found is None:
        raise UnavailableError(f"{store.path} holds no version")
    return found


def _line(manifest: VersionManifest) -> str:
    base = "" if manifest.base is None else f"on {manifest.base.version}"
    elements = sum(meta.num_elements for meta in manifest.metas)
    share = bits = ""
    if manifest.num_changed:
        share = f"{manifest.num_changed / max(elements, 1):.3%}"
        bits = f"{8 * manifest.num_bytes / manifest.num_changed:.2f}"
    return (
        f"{manifest.version:>9} {manifest.kind.value:6} {base:>12} {manifest.num_bytes:>15,} "
        f"{share:>9} {bits:>10} {manifest.target.root[:12]}"
    )


def _log(args: argparse.Namespace) -> int:
    store = _store(args)
    print(f"run {store.run_id}")
    print(
        f"{'version':>9} {'kind':6} {'base':>12} {'bytes':>15} {'changed':>9} {'bits each':>10} root"
    )
    for name in store.manifest_names():
        print(_line(store.read_manifest(name)))
    return 0


def _show(args: argparse.Namespace) -> int:
    store = _store(args)
    manifest = store.manifest(_newest(store, args.version))
    print(f"run {manifest.run_id}, version {manifest.version}, {manifest.kind.value}")
    print(f"root {manifest.target.root}")
    if manifest.base is not None:
        print(f"base {manifest.base.version} {manifest.base.root}")
    for file in manifest.files:
        print(f"file {manifest.directory}/{file.name}  {file.num_bytes:,} B  xxh3-128 {file.hash}")
    for entry in manifest.tensors:
        shape = "x".join(map(str, entry.meta.shape)) or "scalar"
        size = f"{entry.num_bytes:,} B" if entry.has_records else "-"
        print(f"{entry.meta.name}  {entry.meta.dtype} {shape}  {size}  {entry.digest:016x}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from weightsync.errors import WeightSyncError

    store, status = _store(args), 0
    names = store.manifest_names()
    if args.version is not None:
        names = [store.manifest(args.version).file_name]
    for name in names:
        try:
            manifest = store.read_manifest(name)
            store.check_files(manifest)
        except WeightSyncError as error:
            status = 1
            print(f"{name}: {error}")
        else:
            print(f"{name}: {len(manifest.files)} files, {manifest.num_bytes:,} B: good")
    return status


def _fold(args: argparse.Namespace) -> int:
    from weightsync.store import fold

    store = _store(args)
    manifest = fold(store, args.base, _newest(store, args.version))
    print(_line(manifest))
    return 0


def _gc(args: argparse.Namespace) -> int:
    from weightsync.store import collect

    done = collect(_store(args), keep=args.keep, grace_s=args.grace_s)
    for name in done.withdrawn:
        print(f"withdrawn {name}")
    for name in done.removed:
        print(f"removed {name}")
    return 0
