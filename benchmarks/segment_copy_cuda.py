"""How close is one segment-copy launch to one device copy of the same bytes?

Each case is checked first, then its candidates are timed in turn, round by round, with CUDA events;
the ceiling is in the same rounds. Tables are built and uploaded before timing, because a refit
replays them. Copies count bytes read plus written, digests bytes read. Blocks are shuffled, and
larger together than the cache. The host gets a head start of 200 us, so that a single launch is
timed without its host work; where that is more (many small copies), the device waits for it, and so
would a user.

    python benchmarks/segment_copy_cuda.py [--tiny] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync import native

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

KIB = 1 << 10
MIB = 1 << 20
ROUNDS = 15
SLOW_ROUNDS = 3
SLOW_MS = 10.0
HEAD_START_CYCLES = 400_000  # some 200 us
SEED = 1
NO_DIMS = (1, 0, 0) * 3

Table = npt.NDArray[np.int64]
Action = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One question: `candidates` do the same work and move `num_bytes`, the first being the
    ceiling. `check` raises unless ours is right; `target` is the least share of the ceiling that
    `ours` should reach."""

    name: str
    num_bytes: int
    candidates: dict[str, Action]
    check: Callable[[], None]
    ours: str
    target: float | None = None


def random_block(num_bytes: int) -> Any:
    return torch.randint(-(2**63), 2**63 - 1, (num_bytes // 8,), device="cuda").view(torch.uint8)


def plain_table(source_ptrs: Any, target_ptrs: Any, num_bytes: int, convert: int = 0) -> Table:
    table = np.zeros((len(source_ptrs), len(native.SEGMENT_COLUMNS)), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = (
        source_ptrs,
        target_ptrs,
        num_bytes,
        convert,
    )
    table[:, [4, 7, 10]] = 1
    return table


def digest_table(ptrs: Any, word_bytes: int, num_words: int, convert: int = 0) -> Table:
    rows = [(int(p), word_bytes, num_words, SEED, 0, convert, *NO_DIMS) for p in ptrs]
    return np.array(rows, dtype=np.int64)


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def launcher(table: native.SegmentTableCuda) -> Action:
    return lambda: table.launch(stream())


def require(is_right: bool, what: str) -> None:
    if not is_right:
        raise SystemExit(f"wrong result: {what}")


def size_of(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def gather_case(num_segments: int, segment_bytes: int, spread: int, target: float) -> Case:
    """Blocks of a region `spread` times as large, in shuffled order, written densely."""
    num_slots = int(num_segments * spread)
    source = random_block(num_slots * segment_bytes).view(num_slots, segment_bytes)
    landing = torch.zeros(num_segments * segment_bytes, dtype=torch.uint8, device="cuda")
    # Elsewhere than the landing block of ours, lest one finds the other's lines in the cache.
    spare = torch.empty_like(landing)
    order = np.random.default_rng(SEED).permutation(num_slots)[:num_segments].copy()
    table = native.SegmentTableCuda(
        plain_table(
            source.data_ptr() + order * segment_bytes,
            landing.data_ptr() + np.arange(num_segments) * segment_bytes,
            segment_bytes,
        ),
        0,
    )
    flat = source.view(-1)[: landing.numel()]

    def check() -> None:
        landing.fill_(0xA5)
        table.launch(stream())
        expected = source[torch.from_numpy(order).cuda()]
        require(torch.equal(landing.view(num_segments, segment_bytes), expected), "gather")

    return Case(
        f"gather {num_segments:,} x {size_of(segment_bytes)}",
        2 * landing.numel(),
        {"one device copy": lambda: spare.copy_(flat), "segment copy": launcher(table)},
        check,
        "segment copy",
        target,
    )


def tensor_cases(num_tensors: int, tensor_bytes: int, target: float) -> Iterator[Case]:
    """Pack separate tensors into one buffer and unpack them, against what torch offers."""
    tensors = [random_block(tensor_bytes).view(torch.bfloat16).clone() for _ in range(num_tensors)]
    buffer = torch.zeros(num_tensors * tensor_bytes // 2, dtype=torch.bfloat16, device="cuda")
    spare = torch.empty_like(buffer)
    slots = list(torch.split(buffer, tensor_bytes // 2))
    pointers = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    places = buffer.data_ptr() + np.arange(num_tensors) * tensor_bytes
    pack = native.SegmentTableCuda(plain_table(pointers, places, tensor_bytes), 0)
    unpack = native.SegmentTableCuda(plain_table(places, pointers, tensor_bytes), 0)
    num_bytes = 2 * num_tensors * tensor_bytes
    size = f"{num_tensors:,} x {size_of(tensor_bytes)}"

    def cat() -> None:
        torch.cat([tensor.flatten() for tensor in tensors], out=buffer)

    def copy_each(targets: list[Any], sources: list[Any]) -> Action:
        def action() -> None:
            for one, other in zip(targets, sources, strict=True):
                one.copy_(other)

        return action

    def check_pack() -> None:
        cat()
        expected = buffer.view(torch.int16).clone()
        buffer.zero_()
        pack.launch(stream())
        require(torch.equal(buffer.view(torch.int16), expected), "pack")

    def check_unpack() -> None:
        cat()
        expected = buffer.view(torch.int16).clone()
        for tensor in tensors:
            tensor.zero_()
        unpack.launch(stream())
        cat()
        require(torch.equal(buffer.view(torch.int16), expected), "unpack")

    yield Case(
        f"pack {size}",
        num_bytes,
        {
            "one device copy": lambda: spare.copy_(buffer),
            "segment copy": launcher(pack),
            "flatten + torch.cat": cat,
            "_foreach_copy_": lambda: torch._foreach_copy_(slots, tensors),
            "copy_ per tensor": copy_each(slots, tensors),
        },
        check_pack,
        "segment copy",
        target,
    )
    yield Case(
        f"unpack {size}",
        num_bytes,
        {
            "one device copy": lambda: spare.copy_(buffer),
            "segment copy": launcher(unpack),
            "_foreach_copy_": lambda: torch._foreach_copy_(tensors, slots),
            "copy_ per tensor": copy_each(tensors, slots),
        },
        check_unpack,
        "segment copy",
        target,
    )


def shape_case(name: str, num_bytes: int, row: Callable[[int, int], tuple[int, ...]]) -> Case:
    """One row of another shape, against a plain copy; checked against the CPU on a part."""
    source, landing = random_block(num_bytes), random_block(num_bytes)
    spare = torch.empty_like(landing)
    table_of = np.array([row(source.data_ptr(), landing.data_ptr())], dtype=np.int64)
    table = native.SegmentTableCuda(table_of, 0)

    def check() -> None:
        host_source, host_landing = source.cpu().numpy(), landing.cpu().numpy()
        moved = np.array([row(host_source.ctypes.data, host_landing.ctypes.data)], dtype=np.int64)
        native.copy_segments(moved)
        table.launch(stream())
        require(bool(np.array_equal(landing.cpu().numpy(), host_landing)), name)

    converts = bool(table_of[0, 3])
    moved_bytes = table.num_bytes + (table.num_bytes // 2 if converts else table.num_bytes)
    flat = source[: moved_bytes // 2]
    return Case(
        name,
        moved_bytes,
        {
            "one device copy": lambda: spare[: flat.numel()].copy_(flat),
            "segment copy": launcher(table),
        },
        check,
        "segment copy",
    )


def every_other(run_bytes: int, num_runs: int) -> Callable[[int, int], tuple[int, ...]]:
    dims = (num_runs, 2 * run_bytes, run_bytes, *(1, 0, 0) * 2)
    return lambda s, t: (s, t, run_bytes, 0, *dims)


def shape_cases(num_bytes: int) -> Iterator[Case]:
    half = num_bytes // 2
    side = int((num_bytes // 2) ** 0.5) // 64 * 64
    yield shape_case(
        "source and target 2 bytes apart", num_bytes, lambda s, t: (s + 2, t, half, 0, *NO_DIMS)
    )
    yield shape_case("fp32 to bf16", num_bytes, lambda s, t: (s, t, num_bytes, 1, *NO_DIMS))
    for run in (1 * KIB, 64):
        yield shape_case(f"every other run of {run} B", num_bytes, every_other(run, half // run))
    yield shape_case(
        f"transpose {side} x {side}, 2 B",
        num_bytes,
        lambda s, t: (s, t, 2, 0, side, 2, 2 * side, side, 2 * side, 2, 1, 0, 0),
    )


def digest_case(num_bytes: int, word_bytes: int, converts: bool, target: float | None) -> Case:
    """Against the fastest plain read: a sum of 64-bit words by torch."""
    source = random_block(num_bytes)
    memory_word_bytes = 4 if converts else word_bytes
    num_words = num_bytes // memory_word_bytes
    table_of = digest_table([source.data_ptr()], word_bytes, num_words, int(converts))
    table = native.DigestTableCuda(table_of, 0)
    floats = source.view(torch.float32)

    def check() -> None:
        table.launch(stream())
        host = source.cpu().numpy()
        rows = digest_table([host.ctypes.data], word_bytes, num_words, int(converts))
        require(bool(table.result() == native.digest_segments(rows)), "digest")

    words = "fp32 as bf16" if converts else f"{word_bytes}-byte words"
    return Case(
        f"digest, {words}",
        num_bytes,
        {"read (torch.amax)": lambda: torch.amax(floats), "digest": lambda: table.launch(stream())},
        check,
        "digest",
        target,
    )


def digest_rows_case(num_rows: int, row_bytes: int) -> Case:
    source = random_block(num_rows * row_bytes)
    pointers = source.data_ptr() + np.arange(num_rows) * row_bytes
    table = native.DigestTableCuda(digest_table(pointers, 2, row_bytes // 2), 0)
    floats = source.view(torch.float32)

    def check() -> None:
        table.launch(stream())
        host = source.cpu().numpy()
        pointers = host.ctypes.data + np.arange(num_rows) * row_bytes
        expected = native.digest_segments(digest_table(pointers, 2, row_bytes // 2))
        require(bool(np.array_equal(table.result(), expected)), "digests")

    return Case(
        f"digest {num_rows:,} x {size_of(row_bytes)}",
        num_rows * row_bytes,
        {"read (torch.amax)": lambda: torch.amax(floats), "digest": lambda: table.launch(stream())},
        check,
        "digest",
    )


def fused_case(num_rows: int, row_bytes: int) -> Case:
    source = random_block(num_rows * row_bytes)
    landing = torch.zeros_like(source)
    spare = torch.empty_like(source)
    pointers = source.data_ptr() + np.arange(num_rows) * row_bytes
    places = landing.data_ptr() + np.random.default_rng(SEED).permutation(num_rows) * row_bytes
    segments = plain_table(pointers, places, row_bytes)
    digests = digest_table(pointers, 2, row_bytes // 2)
    copy, digest = native.SegmentTableCuda(segments, 0), native.DigestTableCuda(digests, 0)
    both = native.CopyDigestTableCuda(segments, digests, 0)

    def separate() -> None:
        copy.launch(stream())
        digest.launch(stream())

    def check() -> None:
        separate()
        expected = landing.clone()
        landing.zero_()
        both.launch(stream())
        require(bool(np.array_equal(both.result(), digest.result())), "digests of a copy")
        require(torch.equal(landing, expected), "copy with digests")

    return Case(
        f"copy and digest {num_rows:,} x {size_of(row_bytes)}",
        2 * source.numel(),
        {
            "one device copy": lambda: spare.copy_(source),
            "copy with digest": lambda: both.launch(stream()),
            "copy, then digest": separate,
        },
        check,
        "copy with digest",
    )


def cases(is_tiny: bool) -> Iterator[Case]:
    shrink = 100 if is_tiny else 1
    yield gather_case(1_000 // shrink, 3 * MIB, 1, 0.95)
    yield gather_case(20_000 // shrink, 8 * KIB, 8, 0.94)
    yield gather_case(200_000 // shrink, 8 * KIB, 2, 0.94)
    yield from tensor_cases(20_000 // shrink, 8 * KIB, 0.94)
    yield from shape_cases(MIB if is_tiny else 1024 * MIB)
    big = MIB if is_tiny else 2048 * MIB
    for word_bytes, converts in ((2, False), (4, False), (1, False), (2, True)):
        yield digest_case(big, word_bytes, converts, 0.8 if word_bytes == 2 else None)
    yield digest_rows_case(100_000 // shrink, 8 * KIB)
    yield fused_case(1_000 // shrink, 3 * MIB)
    yield fused_case(100_000 // shrink, 8 * KIB)


def timed_ms(action: Action) -> float:
    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def measured(case: Case) -> list[dict[str, Any]]:
    case.check()
    times: dict[str, list[float]] = {name: [] for name in case.candidates}
    is_slow = {}
    for name, action in case.candidates.items():
        timed_ms(action)
        is_slow[name] = timed_ms(action) > SLOW_MS
    for turn in range(ROUNDS):
        for name, action in case.candidates.items():
            if turn < SLOW_ROUNDS or not is_slow[name]:
                times[name].append(timed_ms(action))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ceiling = next(iter(medians.values()))
    return [
        {
            "case": case.name,
            "num_bytes": case.num_bytes,
            "candidate": name,
            "median_ms": median,
            "best_ms": min(times[name]),
            "p99_ms": float(np.percentile(times[name], 99)),
            "gb_per_s": case.num_bytes / median / 1e6,
            "of_ceiling": ceiling / median,
            "target": case.target if name == case.ours else None,
        }
        for name, median in medians.items()
    ]


def environment() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "numpy": np.__version__,
        "build": dict(native.build_info()),
    }


def unusable_reason() -> str | None:
    reason = native.cuda_unavailable_reason()
    if reason is None and (torch is None or not torch.cuda.is_available()):
        reason = "torch is not installed, or was built without CUDA"
    return reason


def verdict(result: dict[str, Any], is_tiny: bool) -> str:
    if result["target"] is None or is_tiny:
        return ""
    is_met = result["of_ceiling"] >= result["target"]
    return f"target {result['target']:.0%} {'met' if is_met else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write every result here, one a line")
    arguments = parser.parse_args()
    reason = unusable_reason()
    if reason is not None:
        print(f"nothing to measure here: {reason}")
        sys.exit(0)

    print(json.dumps(environment()))
    print(f"{'case':36} {'candidate':20} {'ms':>9} {'GB/s':>8} {'of ceiling':>10}")
    results = []
    for case in cases(arguments.tiny):
        if arguments.only not in case.name:
            continue
        for result in measured(case):
            results.append(result)
            print(
                f"{result['case']:36} {result['candidate']:20} {result['median_ms']:9.4f} "
                f"{result['gb_per_s']:8.0f} {result['of_ceiling']:10.1%} "
                f"{verdict(result, arguments.tiny)}",
                flush=True,
            )
    if arguments.json is not None:
        lines = [json.dumps(line) for line in ({"environment": environment()}, *results)]
        arguments.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
