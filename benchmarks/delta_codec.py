"""How small is a sparse delta, and how fast, next to the formats that others have published?

First the check: every candidate's payload gives back the new bits. Then sizes, in bits a changed element,
on one matrix under AdamW (steps 1, 2, 10, 100, 1000 at learning rate 1e-6, all from bf16 masters) and on
an i.i.d. mask. Then times on a larger matrix in steady state: encode and decode + apply of ours (the
result digested and compared) and of each baseline, round by round in turn, with ceilings beside them: a
memcpy, and what reading one version or both of them takes (NumPy);
rates are bytes of the new weights a second on one thread. Last, the extra memory of encode and decode.

    python benchmarks/delta_codec.py [--tiny] [--elements N] [--rounds N] [--json FILE]

Baselines are formats as published, our implementation; the last stage is the real zstd, level 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from weightsync import native, native_delta, workloads
from weightsync.cli.delta_baselines import BASELINES, Bits, Candidate
from weightsync.codec import (
    Variant,
    apply_changes,
    block_digests,
    decode_tensor,
    encode_tensor,
    num_blocks,
    tensor_digest,
)
from weightsync.codec.packed import pack_records
from weightsync.types import TensorMeta

SIZES_AT = (1, 2, 10, 100, 1000)
MIB = 1 << 20


class Ours(Candidate):
    """The codec of this package. Encoder and decoder keep block digests, as a sender and a receiver do;
    with ``is_read_back`` the decoder digests all of the old bytes instead of trusting them."""

    def __init__(self, variant: Variant = Variant.EXACT, *, is_read_back: bool = False) -> None:
        self.name = "ours" if variant is Variant.EXACT else "ours, absolute"
        self.name += ", base read back" if is_read_back else ""
        self._variant, self._is_read_back = variant, is_read_back
        self._kept: dict[int, npt.NDArray[np.uint64]] = {}
        self.meta = TensorMeta("matrix", "bfloat16", (0,))  # of what was encoded last
        self.expected = 0

    def _meta(self, bits: Bits) -> TensorMeta:
        return TensorMeta("matrix", "bfloat16", (bits.size,))

    def prepare(self, old: Bits) -> None:
        self._kept = {old.ctypes.data: block_digests(self._meta(old), old.view(np.uint8))}

    def _digests(self, old: Bits) -> npt.NDArray[np.uint64]:
        if self._is_read_back:
            return block_digests(self._meta(old), old.view(np.uint8))
        found = self._kept.get(old.ctypes.data)
        if found is None:
            found = next(iter(self._kept.values()))
        return found.copy()

    def encode(self, old: Bits, new: Bits) -> Any:
        digests = next(iter(self._kept.values())).copy()
        self.meta = self._meta(old)
        found = encode_tensor(
            self.meta, old.view(np.uint8), new.view(np.uint8), digests, variant=self._variant
        )
        records = [(p, np.frombuffer(r, dtype=np.uint8)) for p, r in found]
        self.expected = tensor_digest(digests)
        return records

    def decode(self, payload: Any, old: Bits) -> Bits:
        data = old.view(np.uint8)
        meta = self._meta(old)
        for changes in list(decode_tensor(meta, payload, data, self._digests(old), self.expected)):
            apply_changes(data, changes)
        return old

    def size(self, payload: Any) -> int:
        """As a store keeps them."""
        records = [record.tobytes() for _, record in payload]
        packed = pack_records(self.meta, self.expected, records)
        return sum(map(len, records)) if packed is None else len(packed)


def candidates() -> list[Candidate]:
    return [Ours(), Ours(Variant.ABSOLUTE), *(kind() for kind in BASELINES)]


def checked_sizes(case: str, old: Bits, new: Bits) -> list[dict[str, Any]]:
    """Payloads of all candidates; SystemExit if one does not give back the new bits."""
    num_changed = int(np.count_nonzero(old != new))
    lines = []
    for candidate in candidates():
        if isinstance(candidate, Ours):
            candidate.prepare(old)
        payload = candidate.encode(old, new)
        if not (candidate.decode(payload, old.copy()) == new).all():
            raise SystemExit(f"{candidate.name}: other bits came back ({case})")
        size = candidate.size(payload)
        lines.append({
            "case": case, "candidate": candidate.name, "changed": num_changed / old.size,
            "bytes": size, "bits_per_changed_element": 8 * size / max(num_changed, 1),
        })  # fmt: skip
    return lines


def sizes(num_elements: int, last_step: int) -> list[dict[str, Any]]:
    """All candidates on the generator, and on a mask that depends on nothing."""
    old = workloads.drawn_matrix(max(num_elements // 1024, 1), 1024, 1).reshape(-1)
    tensor = workloads.AdamTensor(old, workloads.AdamOptions(), seed=5)
    lines = []
    for step in range(1, last_step + 1):
        new = tensor.step()
        if step in SIZES_AT or step == last_step:
            lines += checked_sizes(f"step {step}", old, new)
        old = new
    return lines + checked_sizes("i.i.d. 1 %", old, workloads.random_mask(old, 0.01, 3))


def timed(num_elements: int, rounds: int) -> list[dict[str, Any]]:
    """Encode and decode + apply, in turn, on one thread; the first round is not counted."""
    old = workloads.drawn_matrix(max(num_elements // 4096, 1), 4096, 2).reshape(-1)
    new = workloads.quick_change(old, 4)
    live, other = old.copy(), np.empty_like(old)
    every: list[Candidate] = [Ours(), Ours(is_read_back=True), *candidates()[1:]]
    payloads = []
    for candidate in every:
        if isinstance(candidate, Ours):
            candidate.prepare(old)
        payloads.append(candidate.encode(old, new))
    actions: dict[tuple[str, str], Callable[[], Any]] = {
        ("memcpy", "encode"): lambda: native.memcpy_bytes(
            other.ctypes.data, old.ctypes.data, old.nbytes, num_threads=1
        ),
        ("read both versions", "encode"): lambda: (
            np.bitwise_or.reduce(old.view(np.uint64)),
            np.bitwise_or.reduce(new.view(np.uint64)),
        ),
        ("read one version", "decode + apply"): lambda: np.bitwise_or.reduce(old.view(np.uint64)),
    }
    for candidate, payload in zip(every, payloads, strict=True):
        if not candidate.name.endswith("read back"):
            actions[candidate.name, "encode"] = lambda c=candidate: c.encode(old, new)
        actions[candidate.name, "decode + apply"] = lambda c=candidate, p=payload: c.decode(p, live)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in actions}
    for round_ in range(rounds + 1):
        for key, action in actions.items():
            native.memcpy_bytes(live.ctypes.data, old.ctypes.data, old.nbytes, num_threads=1)
            start = time.perf_counter()
            action()
            elapsed = time.perf_counter() - start
            is_decoded = key[1] == "decode + apply" and not key[0].startswith("read")
            if is_decoded and not (live == new).all():
                raise SystemExit(f"{key[0]}: other bits came back")
            if round_ > 0:
                seconds[key].append(elapsed)
    return [
        {
            "candidate": name, "what": what, "bytes": old.nbytes,
            "best_gb_per_s": old.nbytes / min(times) / 1e9,
            "median_gb_per_s": old.nbytes / statistics.median(times) / 1e9,
        }
        for (name, what), times in seconds.items()
    ]  # fmt: skip


def extra_memory(num_elements: int) -> dict[str, Any]:
    """Peaks beyond old, new and payload, in MiB; the core's scratch (some 4 MB a thread) comes on top."""
    old = workloads.drawn_matrix(max(num_elements // 4096, 1), 4096, 3).reshape(-1)
    new = workloads.quick_change(old, 4)
    meta = TensorMeta("matrix", "bfloat16", (old.size,))
    digests = block_digests(meta, old.view(np.uint8))
    tracemalloc.start()
    found = encode_tensor(meta, old.view(np.uint8), new.view(np.uint8), digests.copy())
    records = [(p, np.frombuffer(r, dtype=np.uint8)) for p, r in found]
    encode_peak = tracemalloc.get_traced_memory()[1]
    payload = sum(r.size for _, r in records)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    changes = list(decode_tensor(meta, records, old.view(np.uint8), digests))
    decode_peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    changed = sum(c.count for c in changes)
    return {
        "elements": old.size, "blocks": num_blocks(meta), "payload_mib": payload / MIB,
        "encode_beyond_payload_mib": (encode_peak - payload) / MIB,
        "decode_mib": decode_peak / MIB, "bytes_per_changed": decode_peak / max(changed, 1),
    }  # fmt: skip


def environment() -> dict[str, Any]:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model, "cpus_allowed": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0], "kernel": native_delta.kernel(),
        "zstandard": zstandard.__version__, "numpy": np.__version__,
    }  # fmt: skip


def print_sizes(lines: list[dict[str, Any]]) -> None:
    cases = list(dict.fromkeys(line["case"] for line in lines))
    print(f"{'bits a changed element':26}" + "".join(f"{case:>12}" for case in cases))
    changed = {line["case"]: line["changed"] for line in lines}
    print(f"{'changed':26}" + "".join(f"{changed[case]:12.2%}" for case in cases))
    for name in dict.fromkeys(line["candidate"] for line in lines):
        row = [x["bits_per_changed_element"] for x in lines if x["candidate"] == name]
        print(f"{name:26}" + "".join(f"{value:12.2f}" for value in row))


def print_times(lines: list[dict[str, Any]]) -> None:
    print(f"\n{'GB/s of weights, one thread':26} {'what':15} {'best':>8} {'median':>8}")
    for line in lines:
        print(
            f"{line['candidate']:26} {line['what']:15} {line['best_gb_per_s']:8.2f} "
            f"{line['median_gb_per_s']:8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="few elements and steps: does it run?")
    parser.add_argument("--elements", type=int, default=32 << 20, help="of the timed matrix")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write every result here, one a line")
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = [{"environment": environment()}]
    print(json.dumps(lines[0]), flush=True)
    found = sizes(*((1 << 17, 10) if arguments.tiny else (1 << 20, 1000)))
    print_sizes(found)
    elements, rounds = (1 << 20, 1) if arguments.tiny else (arguments.elements, arguments.rounds)
    times = timed(elements, rounds)
    print_times(times)
    memory = {"memory": extra_memory(elements)}
    print("\n" + json.dumps(memory))
    if arguments.json is not None:
        lines += [*found, *times, memory]
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
