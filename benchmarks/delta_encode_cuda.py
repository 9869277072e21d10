"""How fast are deltas coded on a GPU that holds the weights in both versions?

Weights of ``--gib`` GiB in bf16, drawn there; a share changes, small ones rather than large ones, as Adam
does it. Records of some spans are compared with the CPU's, byte for byte.

    python benchmarks/delta_encode_cuda.py [--tiny] [--gib N] [--share P] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
from bench_parts.command import command_line, has_gpus, write_figures

from weightsync.codec import encode_span
from weightsync.codec.device_encode import DeviceSpans, Outcome, SpanEncoder
from weightsync.codec.spans import spans_of
from weightsync.native_delta import SPAN_ELEMENTS
from weightsync.types import TensorMeta

DEVICE = "cuda:0"
ROUNDS = 5
DRAWN = 1 << 26  # elements at a time


def draw(elements: int, share: float) -> tuple[Any, Any]:
    """Old and new weights, bf16 [elements] on the device."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    old = torch.empty(elements, dtype=torch.bfloat16, device=DEVICE)
    new = torch.empty_like(old)
    for start in range(0, elements, DRAWN):
        part = old[start : start + DRAWN]
        drawn = torch.randn(part.numel(), device=DEVICE, generator=generator).mul_(0.02)
        part.copy_(drawn)
        # P(change) halves with every octave; E[1 / |w|] of a normal diverges slowly: cut at 1.
        chance = torch.frexp(part.float())[1].neg().float().exp2_()
        chance.clamp_(max=1e5).mul_(share / float(chance.mean()))
        mask = torch.rand(part.numel(), device=DEVICE, generator=generator) < chance
        down = torch.rand(part.numel(), device=DEVICE, generator=generator) < 0.5
        step = torch.where(down, -1, 1).to(torch.int16) * mask.to(torch.int16)
        new[start : start + DRAWN].view(torch.int16).copy_(part.view(torch.int16) + step)
    torch.cuda.synchronize()
    return old, new


def check(spans: DeviceSpans, results: list[Any], old: Any, new: Any) -> int:
    """Compares some records with the CPU's; how many."""
    chosen = sorted({0, len(results) // 2, len(results) - 1})
    for i in chosen:
        place, (outcome, record) = spans.places[i], results[i]
        part = slice(place.start_element, place.start_element + place.num_elements)
        before, after = (t[part].cpu().view(torch.int16).numpy().view(np.uint8) for t in (old, new))
        expected = encode_span(place, before, after, np.zeros(place.num_blocks, dtype=np.uint64))
        if outcome is not Outcome.CODED or bytes(record) != expected:
            raise SystemExit(f"span {i}: {outcome}, and not the bytes that the CPU codes")
    return len(chosen)


def measure(
    elements: int, share: float, threads: int, cores: int, chunk_spans: int
) -> dict[str, Any]:
    """Seconds of each part, medians."""
    old, new = draw(elements, share)
    places = list(spans_of(TensorMeta("w", "bfloat16", (elements,))))
    encoder = SpanEncoder(DEVICE, chunk_spans=chunk_spans, num_cores=cores)

    def spans() -> DeviceSpans:
        digests = np.zeros(sum(p.num_blocks for p in places), dtype=np.uint64)
        offsets = [2 * p.start_element for p in places]
        return DeviceSpans(
            places, [old.data_ptr() + o for o in offsets], [new.data_ptr() + o for o in offsets],
            digests,
        )  # fmt: skip

    parts: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        asked = spans()
        start = time.perf_counter()
        results = encoder.encode(asked, threads)
        parts.append({"encode_s": time.perf_counter() - start, **encoder.seconds})
        encoder.recycle(encoder.payload)  # the next records are the same
    found: dict[str, Any] = {name: statistics.median(p[name] for p in parts) for name in parts[0]}
    changed = sum(int.from_bytes(r[20:24], "little") for _, r in results if r is not None)
    payload = sum(len(r) for _, r in results if r is not None)
    coded = sum(outcome is Outcome.CODED for outcome, _ in results)
    found |= {"bytes": 2 * elements, "changed": changed, "payload": payload, "spans": len(places)}
    found |= {"coded": coded, "compared": check(asked, results, old, new)}
    encoder.close()
    return found


def arguments(doc: str | None) -> argparse.Namespace:
    """``elements``, ``share``, ``threads``, ``json``."""
    parser = command_line(doc, "small and quick, for a smoke test")
    parser.add_argument("--gib", type=float, default=56, help="of weights")
    parser.add_argument("--share", type=float, default=0.01, help="of elements that change")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cores", type=int, default=3, help="encoders that take turns")
    parser.add_argument("--chunk-spans", type=int, default=512, help="that one codes at once")
    args = parser.parse_args()
    spans = 2 if args.tiny else max(1, int(args.gib * (1 << 29)) // SPAN_ELEMENTS)
    args.elements = spans * SPAN_ELEMENTS
    return args


def main() -> None:
    args = arguments(__doc__)
    if not has_gpus():
        return
    found = measure(args.elements, args.share, args.threads, args.cores, args.chunk_spans)
    print(
        f"{torch.cuda.get_device_name(DEVICE)}, {args.threads} threads: {found['bytes'] / 1e9:.1f} GB, "
        f"{found['changed']:,} changed, {found['payload']:,} B "
        f"({8 * found['payload'] / max(found['changed'], 1):.2f} bits each), {found['coded']} of "
        f"{found['spans']} spans on the device, {found['compared']} compared"
    )
    for name in [name for name in found if name.endswith("_s")]:  # chunks overlap: sums of all
        print(f"{name[:-2]:8} {found[name] * 1e3:8.2f} ms")
    write_figures(args.json, found)


if __name__ == "__main__":
    main()
