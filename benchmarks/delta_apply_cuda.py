"""How long does a delta keep weights on a GPU from being used, and how far is that from digesting them?

Weights of ``--gib`` GiB in bf16, of which a share changes at random places. A delta is uploaded (while an
engine would generate), then exchanged with what it overwrites and read back (while it would pause); the
check is that every element holds its new value, and its old one after it was taken back.

    python benchmarks/delta_apply_cuda.py [--tiny] [--gib N] [--share P] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from bench_parts.command import command_line, has_gpus, write_figures

from weightsync.device_patch import DevicePatch, DeviceWrite, Work
from weightsync.digest import DigestPart, DigestTable
from weightsync.types import Box, TensorMeta

DEVICE = "cuda:0"
SPAN = 4 << 20  # elements of one write, as the codec cuts them
ROUNDS = 5


def digest_table(tensors: list[Any]) -> DigestTable:
    parts = [
        DigestPart(
            TensorMeta(f"t{i}", "bfloat16", (t.numel(),)), Box((0,), (t.numel(),)), t.data_ptr(), (2,),
            "bfloat16",
        )
        for i, t in enumerate(tensors)
    ]  # fmt: skip
    return DigestTable(parts, DEVICE)


def seconds(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(num_tensors: int, elements: int, share: float) -> dict[str, Any]:
    """Seconds of each part, medians."""
    tensors = [
        torch.zeros(elements, dtype=torch.bfloat16, device=DEVICE) for _ in range(num_tensors)
    ]
    random = np.random.default_rng(1)
    span = min(SPAN, elements)
    places = np.flatnonzero(random.random(span, dtype=np.float32) < share).astype(np.uint32)
    values = random.integers(1, 2**15, places.size).astype(np.uint16)
    writes = [
        DeviceWrite(t.data_ptr() + 2 * start, places, values)
        for t in tensors
        for start in range(0, elements, span)
    ]
    whole = digest_table(tensors)
    before = whole.compute(1)
    start = time.perf_counter()
    patch = DevicePatch(writes, DEVICE)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"upload_s": time.perf_counter() - start}
    times: dict[str, list[float]] = {"put_s": [], "read_s": [], "take_back_s": []}
    for _ in range(ROUNDS):
        times["put_s"].append(seconds(patch.put))  # writes and reads back
        times["read_s"].append(seconds(lambda: patch.run(Work.COMPARE)))
        changed = whole.compute(1)
        times["take_back_s"].append(seconds(patch.take_back))
        if any(changed[name] == digest for name, digest in before.items()):
            raise SystemExit("a tensor was not changed")
        if whole.compute(1) != before:
            raise SystemExit("what was taken back is not what was there")
    found |= {name: statistics.median(values) for name, values in times.items()}
    found["digest_all_s"] = statistics.median(
        seconds(lambda: whole.compute(1)) for _ in range(ROUNDS)
    )
    found |= {"bytes": num_tensors * elements * 2, "changed": patch.num_changed}
    patch.close()
    return found


def main() -> None:
    parser = command_line(__doc__, "small and quick, for a smoke test")
    parser.add_argument("--gib", type=int, default=56, help="of weights, in tensors of 2 GiB")
    parser.add_argument("--share", type=float, default=0.01, help="of elements that change")
    args = parser.parse_args()
    if not has_gpus():
        return
    num, elements = (2, 1 << 20) if args.tiny else (max(1, args.gib // 2), 1 << 30)
    found = measure(num, elements, args.share)
    print(
        f"{torch.cuda.get_device_name(DEVICE)}: {found['bytes'] / 1e9:.1f} GB, "
        f"{found['changed']:,} elements changed"
    )
    for name in ("upload_s", "put_s", "read_s", "take_back_s", "digest_all_s"):
        print(f"{name[:-2].replace('_', ' '):12} {found[name] * 1e3:8.2f} ms")
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
