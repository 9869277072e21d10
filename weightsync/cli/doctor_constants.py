"""Rates of this machine for ``weightsync plan --constants``: copies and digests of its memory.

What takes a network (cards, collectives) keeps its built-in value and says so in the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weightsync.cli.doctor_transports import devices_here
from weightsync.cli.versions import gpu, versions
from weightsync.cost.constants import Constant, Constants
from weightsync.device_tables import CPU, cuda_index, owned_digests, private_memory, segment_copy
from weightsync.errors import ConfigError
from weightsync.tables import digest_rows, segment_rows, table

_SEGMENT_BYTES = 256 * 2**10
_NUM_SEGMENTS = {"cpu": 512, "cuda": 8192}
_ROUNDS = 5


def write_constants(path: Path, device: str | None) -> int:
    """Measure on the GPU where there is one, else on the host; write, say what was measured."""
    where = devices_here(device)[-1]
    found = measure(where)
    try:
        path.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    for name in ("device_copy_bytes_per_s", "device_read_bytes_per_s"):
        constant = getattr(found, name)
        print(f"{name:<28}{constant.value:<12.4g}{constant.source}")
    print(f"written to {path}; all other constants are the built-in ones")
    return 0


def measure(device: str) -> Constants:
    """Built-in constants with those of memory replaced by what ``device`` does now."""
    count = _NUM_SEGMENTS[device.partition(":")[0]]
    num_bytes = count * _SEGMENT_BYTES
    threads = len(os.sched_getaffinity(0))
    source, target = private_memory(num_bytes, device), private_memory(num_bytes, device)
    try:
        starts = [i * _SEGMENT_BYTES for i in range(count)]
        rows = [
            row
            for at in starts
            for row in segment_rows(
                (_SEGMENT_BYTES,),
                source=(source.ptr + at, (1,), 1),
                target=(target.ptr + at, (1,), 1),
            )
        ]
        copies = segment_copy(table(rows, 13), device)
        parts = [
            row
            for at in starts
            for row in digest_rows(
                (_SEGMENT_BYTES // 2,), ptr=source.ptr + at, strides_bytes=(2,), index_strides=(1,),
                start_index=at // 2, item=2, seed=1,
            )
        ]  # fmt: skip
        digests = owned_digests(parts, [0] * len(parts), 1, device)
        copy_s = _best_s(lambda: copies.run(threads))
        digest_s = _best_s(lambda: digests.run(threads))
    finally:
        source.close()
        target.close()
    what = f"{count} x {_SEGMENT_BYTES // 2**10} KiB on {_named(device)}"
    return replace(
        Constants(),
        device_copy_bytes_per_s=Constant(
            2 * num_bytes / copy_s, f"measured: segment copy of {what}, read plus written"
        ),
        device_read_bytes_per_s=Constant(num_bytes / digest_s, f"measured: digest of {what}"),
    )


def _named(device: str) -> str:
    if device == CPU:
        return f"host memory of {versions()['processor']}"
    return gpu(cuda_index(device))


def _best_s(work: Callable[[], object]) -> float:
    work()  # the first use pays for more
    times = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return min(times)
