"""How close is one segment-copy call to one memcpy of the same bytes?

Each case is checked first, then its candidates are timed in turn, round by round, so that a noisy
machine is equally unkind to all. The ceiling is in the same rounds. Tables are built before timing,
because a refit replays them. Rates count the bytes copied once, not read plus written.

    python benchmarks/segment_copy.py [--tiny] [--threads N] [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import time
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
ROUNDS = 9
SEED = 1

Table = npt.NDArray[np.int64]
Action = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One question: `candidates` do the same work on `num_bytes`, the first being the ceiling."""

    name: str
    num_bytes: int
    num_threads: int
    candidates: dict[str, Action]
    check: Callable[[], None]


def random_bytes(num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(SEED).integers(0, 256, num_bytes, dtype=np.uint8)


def touched(num_bytes: int) -> npt.NDArray[np.uint8]:
    block = np.empty(num_bytes, dtype=np.uint8)
    block.fill(0)
    return block


def plain_table(source_ptrs: Any, target_ptrs: Any, num_bytes: int) -> Table:
    table = np.zeros((len(source_ptrs), len(native.SEGMENT_COLUMNS)), dtype=np.int64)
    table[:, 0], table[:, 1], table[:, 2] = source_ptrs, target_ptrs, num_bytes
    table[:, [4, 7, 10]] = 1
    return table


def memcpy(
    target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], num_threads: int
) -> Action:
    return lambda: native.memcpy_bytes(
        target.ctypes.data, source.ctypes.data, source.nbytes, num_threads=num_threads
    )


def gather_case(num_segments: int, segment_bytes: int, num_threads: int) -> Case:
    """Segments of one arena, read in shuffled order and written densely."""
    source = random_bytes(num_segments * segment_bytes)
    target = touched(source.nbytes)
    order = np.random.default_rng(SEED).permutation(num_segments)
    table = plain_table(
        source.ctypes.data + order * segment_bytes,
        target.ctypes.data + np.arange(num_segments) * segment_bytes,
        segment_bytes,
    )

    def check() -> None:
        assert native.copy_segments(table, num_threads=num_threads) == source.nbytes
        expected = source.reshape(num_segments, segment_bytes)
        for place in range(0, num_segments, max(1, num_segments // 100)):
            begin = place * segment_bytes
            assert np.array_equal(target[begin : begin + segment_bytes], expected[order[place]])

    candidates = {
        "memcpy": memcpy(target, source, num_threads),
        "copy_segments": lambda: native.copy_segments(table, num_threads=num_threads),
    }
    size = f"{segment_bytes // MIB} MiB" if segment_bytes >= MIB else f"{segment_bytes // KIB} KiB"
    return Case(f"{num_segments:,} x {size}", source.nbytes, num_threads, candidates, check)


def transpose_case(side: int, element_bytes: int, num_threads: int) -> Case:
    source = random_bytes(side * side * element_bytes)
    target = touched(source.nbytes)
    table = plain_table([source.ctypes.data], [target.ctypes.data], element_bytes)
    row_bytes = side * element_bytes
    table[0, 4:10] = (side, element_bytes, row_bytes, side, row_bytes, element_bytes)
    elements = source.reshape(side, side, element_bytes)

    def check() -> None:
        native.copy_segments(table, num_threads=num_threads)
        shape = (side, side, element_bytes)
        assert np.array_equal(target.reshape(shape), elements.transpose(1, 0, 2))

    candidates: dict[str, Action] = {
        "memcpy": memcpy(target, source, num_threads),
        "copy_segments": lambda: native.copy_segments(table, num_threads=num_threads),
    }
    if torch is not None and element_bytes == 2:
        turned = torch.from_numpy(source).view(torch.bfloat16).view(side, side).t()
        place = torch.from_numpy(target).view(torch.bfloat16).view(side, side)
        candidates["torch copy_"] = lambda: place.copy_(turned)
    name = f"transpose {side} x {side}, {element_bytes} B"
    return Case(name, source.nbytes, num_threads, candidates, check)


def convert_case(num_elements: int, num_threads: int) -> Case:
    source = random_bytes(num_elements * 4)
    target = touched(num_elements * 4)
    table = plain_table([source.ctypes.data], [target.ctypes.data], source.nbytes)
    table[0, 3] = native.CONVERT_FP32_TO_BF16

    def check() -> None:
        native.copy_segments(table, num_threads=num_threads)
        bits = source.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
        halves = target.view(np.uint16)[:num_elements]
        assert np.array_equal(halves[is_number], rounded[is_number])

    candidates = {
        "memcpy": memcpy(target, source, num_threads),
        "copy_segments": lambda: native.copy_segments(table, num_threads=num_threads),
    }
    return Case("fp32 to bf16", source.nbytes, num_threads, candidates, check)


def tensor_cases(num_tensors: int, tensor_bytes: int, num_threads: int) -> Iterator[Case]:
    """Pack separate tensors into one buffer and unpack them, against what torch offers."""
    tensors = [
        torch.from_numpy(block).view(torch.bfloat16)
        for block in random_bytes(num_tensors * tensor_bytes)
        .reshape(num_tensors, tensor_bytes)
        .copy()
    ]
    tensors = [tensor.clone() for tensor in tensors]
    buffer = torch.zeros(num_tensors * tensor_bytes // 2, dtype=torch.bfloat16)
    spare = torch.zeros_like(buffer)
    slots = list(torch.split(buffer, tensor_bytes // 2))
    pointers = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    places = buffer.data_ptr() + np.arange(num_tensors) * tensor_bytes
    pack = plain_table(pointers, places, tensor_bytes)
    unpack = plain_table(places, pointers, tensor_bytes)
    num_bytes = num_tensors * tensor_bytes

    def ceiling() -> None:
        native.memcpy_bytes(spare.data_ptr(), buffer.data_ptr(), num_bytes, num_threads=num_threads)

    def cat() -> None:
        torch.cat([tensor.flatten() for tensor in tensors], out=buffer)

    def copy_into_slots() -> None:
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.copy_(tensor)

    def copy_out_of_slots() -> None:
        for slot, tensor in zip(slots, tensors, strict=True):
            tensor.copy_(slot)

    def check_pack() -> None:
        cat()
        expected = buffer.view(torch.int16).clone()
        buffer.zero_()
        native.copy_segments(pack, num_threads=num_threads)
        assert torch.equal(buffer.view(torch.int16), expected)

    def check_unpack() -> None:
        cat()
        for tensor in tensors:
            tensor.zero_()
        native.copy_segments(unpack, num_threads=num_threads)
        expected = buffer.view(torch.int16).clone()
        cat()
        assert torch.equal(buffer.view(torch.int16), expected)

    name = f"{num_tensors:,} tensors of {tensor_bytes // KIB} KiB"
    yield Case(
        f"pack {name}",
        num_bytes,
        num_threads,
        {
            "memcpy": ceiling,
            "copy_segments": lambda: native.copy_segments(pack, num_threads=num_threads),
            "flatten + torch.cat": cat,
            "copy_ per tensor": copy_into_slots,
        },
        check_pack,
    )
    yield Case(
        f"unpack {name}",
        num_bytes,
        num_threads,
        {
            "memcpy": ceiling,
            "copy_segments": lambda: native.copy_segments(unpack, num_threads=num_threads),
            "copy_ per tensor": copy_out_of_slots,
        },
        check_unpack,
    )


def digest_case(num_bytes: int, word_bytes: int, is_converted: bool = False) -> Case:
    """One thread, against the fastest plain read that numpy has."""
    source = random_bytes(num_bytes)
    memory_word_bytes = 4 if is_converted else word_bytes

    def table_of(begin: int, end: int) -> Table:
        ptr = source.ctypes.data + begin * memory_word_bytes
        row = (ptr, word_bytes, end - begin, SEED, begin, int(is_converted), *(1, 0, 0) * 3)
        return np.array([row], dtype=np.int64)

    num_words = num_bytes // memory_word_bytes
    table = table_of(0, num_words)

    def check() -> None:
        cut = num_words // 3
        whole = int(native.digest_segments(table)[0])
        parts = [int(native.digest_segments(table_of(*p))[0]) for p in ((0, cut), (cut, num_words))]
        assert sum(parts) % 2**64 == whole != 0

    candidates: dict[str, Action] = {
        "read (numpy sum)": lambda: np.sum(source.view(np.uint64)),
        "digest_segments": lambda: native.digest_segments(table, num_threads=1),
    }
    words = "fp32 as bf16" if is_converted else f"{word_bytes}-byte words"
    return Case(f"digest, {words}", num_bytes, 1, candidates, check)


def cases(is_tiny: bool, num_threads: int) -> Iterator[Case]:
    shrink = 100 if is_tiny else 1
    for threads in sorted({1, num_threads}):
        yield gather_case(1_000 // shrink, 3 * MIB, threads)
        yield gather_case(20_000 // shrink, 8 * KIB, threads)
    yield transpose_case(8_192 // shrink, 2, num_threads)
    yield transpose_case(8_192 // shrink, 4, num_threads)
    yield convert_case((64 * MIB) // shrink, num_threads)
    if torch is not None:
        yield from tensor_cases(20_000 // shrink, 8 * KIB, num_threads)
    for word_bytes in (1, 2, 4):
        yield digest_case(512 * MIB // (128 if is_tiny else 1), word_bytes)
    yield digest_case(512 * MIB // (128 if is_tiny else 1), 2, is_converted=True)


def measured(case: Case) -> list[dict[str, Any]]:
    case.check()
    seconds: dict[str, list[float]] = {name: [] for name in case.candidates}
    for action in case.candidates.values():
        action()
    for _ in range(ROUNDS):
        for name, action in case.candidates.items():
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ceiling = next(iter(medians.values()))
    return [
        {
            "case": case.name,
            "num_bytes": case.num_bytes,
            "num_threads": case.num_threads,
            "candidate": name,
            "median_ms": median * 1e3,
            "best_ms": min(seconds[name]) * 1e3,
            "gb_per_s": case.num_bytes / median / 1e9,
            "of_ceiling": ceiling / median,
        }
        for name, median in medians.items()
    ]


def environment() -> dict[str, Any]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": None if torch is None else torch.__version__,
        "build": dict(native.build_info()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--threads", type=int, default=native.default_num_threads())
    parser.add_argument("--json", type=Path, help="write every result here, one a line")
    arguments = parser.parse_args()
    if torch is not None:
        torch.set_num_threads(arguments.threads)

    print(json.dumps(environment()))
    print(f"{'case':32} {'threads':>7}  {'candidate':20} {'ms':>9} {'GB/s':>7} {'of ceiling':>10}")
    results = []
    for case in cases(arguments.tiny, arguments.threads):
        for result in measured(case):
            results.append(result)
            print(
                f"{result['case']:32} {result['num_threads']:>7}  {result['candidate']:20} "
                f"{result['median_ms']:9.2f} {result['gb_per_s']:7.2f} {result['of_ceiling']:10.1%}",
                flush=True,
            )
    if arguments.json is not None:
        lines = [json.dumps(line) for line in ({"environment": environment()}, *results)]
        arguments.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
