"""How fast are deltas decoded on a GPU that holds the old weights, and how fast put into them?

Weights of ``--gib`` GiB in bf16 and their changes as in ``delta_encode_cuda.py``, which also codes them. The
ceiling is reading the old weights twice. What was decoded is put into the weights, which must then be the
new ones, bit for bit, and taken back.

    python benchmarks/delta_decode_cuda.py [--tiny] [--gib N] [--share P] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_parts.command import has_gpus, write_figures
from delta_encode_cuda import DEVICE, DRAWN, ROUNDS, arguments, draw

from weightsync.codec.device_decode import PADDING_BYTES
from weightsync.codec.device_encode import DeviceSpans, SpanEncoder
from weightsync.codec.spans import spans_of
from weightsync.device_delta import DeviceDeltas, LiveDelta, LiveDigests, decode_there
from weightsync.device_patch import DecodedWrite, DevicePatch
from weightsync.types import TensorMeta


def timed(act: Callable[[], Any], seconds: list[float]) -> Any:
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = act()
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)
    return found


def is_equal(old: Any, new: Any) -> bool:
    """In parts: comparing makes a tensor of what is compared."""
    parts = zip(old.split(DRAWN), new.split(DRAWN), strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in parts)


def coded(
    meta: TensorMeta, old: Any, new: Any, digests: Any, threads: int
) -> tuple[Any, list[Any]]:
    """The records of all spans in one piece of memory of the host, as they are read from files."""
    places = list(spans_of(meta))
    encoder = SpanEncoder(DEVICE)
    offsets = [2 * p.start_element for p in places]
    spans = DeviceSpans(
        places,
        [old.data_ptr() + o for o in offsets],
        [new.data_ptr() + o for o in offsets],
        digests,
    )
    results = encoder.encode(spans, threads)
    known = [(p, r) for p, (_, r) in zip(places, results, strict=True) if r is not None]
    buffer = np.zeros(sum(len(r) for _, r in known) + PADDING_BYTES, dtype=np.uint8)
    found, start = [], 0
    for place, record in known:
        part = buffer[start : start + len(record)]
        part[:] = np.frombuffer(record, dtype=np.uint8)
        found.append((place, part))
        start += len(record)
    encoder.close()
    return buffer, found


def measure(elements: int, share: float, threads: int) -> dict[str, Any]:
    """Seconds of each part, medians."""
    old, new = draw(elements, share)
    meta = TensorMeta("w", "bfloat16", (elements,))
    live = LiveDigests([(meta, old.data_ptr())], DEVICE)
    (before,) = live.compute(threads)
    after = before.copy()
    buffer, records = coded(meta, old, new, after, threads)
    delta = LiveDelta(meta, old.data_ptr(), records, int(after.sum(dtype=np.uint64)))
    seconds: dict[str, list[float]] = {
        name: [] for name in ("read old", "digest of all blocks", "decode", "exchange", "take back")
    }
    changed = on_host = 0
    for number in range(ROUNDS + 1):
        timed(lambda: old.view(torch.int32).amax(), seconds["read old"])
        (digests,) = timed(lambda: live.compute(threads), seconds["digest of all blocks"])
        found: DeviceDeltas = timed(
            partial(decode_there, [delta], [digests], DEVICE, buffer=buffer, num_threads=threads),
            seconds["decode"],
        )
        for name, spent_s in found.seconds.items():
            seconds.setdefault(f"  {name[:-2]}", []).append(spent_s)
        writes = found.writes[0]
        changed = sum(write.count for write in writes)
        on_host = sum(not isinstance(write, DecodedWrite) for write in writes)
        patch = DevicePatch(writes, DEVICE)
        timed(patch.put, seconds["exchange"])
        if not is_equal(old, new):
            raise SystemExit("the weights are not the new ones")
        timed(patch.take_back, seconds["take back"])
        patch.close()
        found.close()
        if number == 0:
            for spent in seconds.values():
                spent.clear()
    return {
        "bytes": 2 * elements, "changed": changed, "payload": sum(r.size for _, r in records),
        "spans": len(records), "on_host": on_host,
        "seconds": {name: statistics.median(spent) for name, spent in seconds.items()},
    }  # fmt: skip


def main() -> None:
    args = arguments(__doc__)
    if not has_gpus():
        return
    found = measure(args.elements, args.share, args.threads)
    print(
        f"{torch.cuda.get_device_name(DEVICE)}: {found['bytes'] / 1e9:.1f} GB, {found['changed']:,} "
        f"changed, {found['payload']:,} B; {found['on_host']} of {found['spans']} spans by the host"
    )
    for name, spent in found["seconds"].items():
        print(f"{name:22} {spent * 1e3:8.2f} ms {found['bytes'] / spent / 1e9:8.0f} GB/s")
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
