"""``bench --updates N``: many updates, and nothing that grows with them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weightsync import native
from weightsync.cli.bench_model import mask_of, show_progress
from weightsync.cli.bench_process import WorkerProcess
from weightsync.cli.memory_watch import private_bytes
from weightsync.types import format_bytes

#: What is made once is made in the first updates.
WARM_UPDATES = 3
#: A Python heap breathes; a leak of a kilobyte an update shows in a thousand of them.
_HOST_SLACK_BYTES = 32 * 2**20
_DEVICE_SLACK_BYTES = 2 * 2**20  # the driver's granularity
_SETTLE_LIMIT_S = 10.0


@dataclass(frozen=True)
class Held:
    """What a process holds. ``device_bytes`` is of all processes of its device."""

    fds: int
    device_allocations: int
    device_mappings: int
    host_bytes: int
    device_bytes: int


def held_here(device_bytes: int) -> Held:
    """Of this process, now."""
    allocations, mappings = native.extension.cuda_held()
    return Held(
        len(os.listdir("/proc/self/fd")), allocations, mappings, private_bytes(), device_bytes
    )


def growth(before: Held, after: Held) -> list[str]:
    """What is more than it was, beyond what breathes."""
    slack = {"host_bytes": _HOST_SLACK_BYTES, "device_bytes": _DEVICE_SLACK_BYTES}
    was, now = asdict(before), asdict(after)
    return [
        f"{name.replace('_', ' ')} {was[name]} -> {now[name]}"
        for name in was
        if now[name] > was[name] + slack.get(name, 0)
    ]


def run_updates(
    workers: Mapping[str, WorkerProcess], num_updates: int, first_version: int
) -> tuple[dict[str, Any], int]:
    """``num_updates`` updates in a row over the trainer's connection.

    Returns what was held after the third and at the end, by role, with what ``grew``; and the bits
    that were flipped in all.
    """
    trainer = workers["trainer"]
    before: dict[str, Held] = {}
    seconds, flipped = [], 0
    for i in range(num_updates):
        if i % max(1, num_updates // 20) == 0:
            show_progress(f"update {i} of {num_updates}")
        mask = mask_of(first_version + i)
        flipped ^= mask
        trainer.call("change", mask=mask)
        seconds.append(trainer.call("refit", version=first_version + i, names=None)["seconds"])
        if i + 1 == WARM_UPDATES:
            before = _held(workers)
    after = _settled(before, lambda: _held(workers))
    return {
        "updates": num_updates,
        "median_seconds": sorted(seconds[WARM_UPDATES:])[(num_updates - WARM_UPDATES) // 2],
        "before": {role: asdict(held) for role, held in before.items()},
        "after": {role: asdict(held) for role, held in after.items()},
        "grew": [f"{role}: {g}" for role in before for g in growth(before[role], after[role])],
    }, flipped


def _held(workers: Mapping[str, WorkerProcess]) -> dict[str, Held]:
    return {role: Held(**worker.call("held")) for role, worker in workers.items()}


def _settled(before: Mapping[str, Held], ask: Callable[[], dict[str, Held]]) -> dict[str, Held]:
    """Ask again while a connection of a heartbeat may be on its way out."""
    end_s = time.monotonic() + _SETTLE_LIMIT_S
    after = ask()
    while any(growth(before[r], after[r]) for r in before) and time.monotonic() < end_s:
        time.sleep(0.2)
        after = ask()
    return after


def describe(found: Mapping[str, Any]) -> list[str]:
    """Lines for people."""
    grew = found["grew"]
    lines = [
        f"{found['updates']} updates, median {found['median_seconds'] * 1e3:.2f} ms; since the "
        f"third: {'; '.join(grew) if grew else 'nothing grew'}"
    ]
    for role, was in found["before"].items():
        now = found["after"][role]
        counts = ", ".join(
            f"{name.replace('_', ' ')} {was[name]} -> {now[name]}"
            for name in ("fds", "device_allocations", "device_mappings")
        )
        sizes = f"host {format_bytes(was['host_bytes'])} -> {format_bytes(now['host_bytes'])}"
        if now["device_bytes"]:
            sizes += f", device {was['device_bytes']} -> {now['device_bytes']} B"
        lines.append(f"{role}: {counts}, {sizes}")
    return lines
