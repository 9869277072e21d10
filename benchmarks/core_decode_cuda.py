"""How near to the memory's limit does the core decode, on models of published shapes?

Weights are random, written straight into the slots. First the check: a prompt's greedy tokens and bits
alone equal those in a batch. Then the workload of nano-vllm's benchmark (256 requests, prompts and
outputs of 100 to 1024 tokens, seed 0; time of the whole call, prefill included), and decoding one
request with a context of 512.

Roofline of the workload: every decode step reads all weights once (of experts those that a step of that
many rows is expected to hit, at k of E even chances), every token reads K and V of the tokens before it,
and a token costs 2 x active parameters operations at the rate of a large product; a step takes the
larger of weights' reading and operations, plus the reading of K and V. Rates are measured in the run.
Steps are counted as if all ran together and each left at its own length; prefill is counted by its
operations.

    python benchmarks/core_decode_cuda.py [--models qwen3-0.6b ...] [--eager] [--json FILE]
"""

import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from bench_parts.command import command_line, has_gpus, write_figures

from engine_adapter.core.arena import MemoryKind
from engine_adapter.core.config import parse_config
from engine_adapter.core.cuda_launch import launch_on
from engine_adapter.core.decode_graphs import DecodeGraphs
from engine_adapter.core.engine import Engine
from engine_adapter.core.engine_config import EngineConfig
from engine_adapter.core.model import DecoderModel
from engine_adapter.core.sampling_params import SamplingParams
from weightsync import native_cuda_core
from weightsync.presets import get_preset

DEVICE = torch.device("cuda:0")
READ_BYTES = 4 << 30
REQUESTS = 256
SHORTEST, LONGEST = 100, 1024
CONTEXT = 512
NEW_TOKENS = 128


@dataclass(frozen=True)
class Rates:
    """Measured in this run."""

    read: float  # bytes a second
    product: float  # operations a second


def seconds(action: Any, rounds: int = 5) -> float:
    found = []
    for index in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            action()
        torch.cuda.synchronize()
        if index > 1:
            found.append((time.perf_counter() - start) / 4)
    return statistics.median(found)


def measure_rates() -> Rates:
    memory = torch.zeros(READ_BYTES // 4, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    args = memory.data_ptr(), READ_BYTES, out.data_ptr(), launch_on(DEVICE)
    left, right = torch.randn(2, 8192, 8192, device=DEVICE).bfloat16()
    read = READ_BYTES / seconds(lambda: native_cuda_core.read_bytes(*args))
    return Rates(read, 2 * 8192**3 / seconds(lambda: F.linear(left, right)))


def make_engine(name: str, kv_cache_tokens: int, decode: str, memory: MemoryKind) -> Engine:
    """An engine with random weights that give tame logits."""
    config = parse_config(get_preset(name).config())
    model = DecoderModel(config, torch.bfloat16, DEVICE, max_positions=4096, memory=memory)
    torch.manual_seed(0)
    for storage in model.slots.storages.values():
        if storage.dim() == 1:
            storage.fill_(1.0)
        else:
            storage.normal_(0.0, storage.shape[-1] ** -0.5)
    settings = EngineConfig(
        kv_cache_tokens=kv_cache_tokens, max_running=REQUESTS, max_step_tokens=8192,
        decode=decode, memory=memory,  # type: ignore[arg-type]
    )  # fmt: skip
    return Engine(model, settings)


def workload(vocab: int, count: int = REQUESTS) -> tuple[list[list[int]], list[int]]:
    """As nano-vllm's bench.py draws it; the first ``count`` of its requests."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, min(10_000, vocab - 1)) for _ in range(draw.randint(SHORTEST, LONGEST))]
        for _ in range(REQUESTS)
    ]
    outputs = [draw.randint(SHORTEST, LONGEST) for _ in range(REQUESTS)]
    return prompts[:count], outputs[:count]


class Shape:
    """Bytes and operations of a model's steps."""

    def __init__(self, engine: Engine) -> None:
        config = engine.model.config
        self.experts = config.experts
        sparse, dense = 0, 0
        for name, storage in engine.model.slots.storages.items():
            if ".experts_" in name:
                sparse += storage.numel()
            elif name != "embed_tokens" or config.is_tied:
                dense += storage.numel()
        self.dense, self.sparse = dense, sparse
        share = 1.0 if self.experts is None else self.experts.top_k / self.experts.num_experts
        self.active = dense + sparse * share
        self.kv_bytes = engine.cache.shape.page_bytes // engine.cache.page_size

    def weight_bytes(self, rows: int) -> float:
        """Read by a step of ``rows``; of experts those expected to be hit."""
        hit = 1.0
        if self.experts is not None:
            hit = 1.0 - (1.0 - self.experts.top_k / self.experts.num_experts) ** rows
        return 2 * (self.dense + self.sparse * hit)

    def decode_s(self, rows: int, context: int, rates: Rates) -> float:
        """The least time of a step with ``context`` tokens over all its rows."""
        weights = self.weight_bytes(rows) / rates.read
        return max(weights, 2 * self.active * rows / rates.product) + (
            context * self.kv_bytes / rates.read
        )


def roofline_s(shape: Shape, prompts: list[list[int]], outputs: list[int], rates: Rates) -> float:
    total = 2 * shape.active * sum(map(len, prompts)) / rates.product
    for step in range(1, max(outputs)):  # the first token comes of prefill
        rows = [len(p) + step for p, o in zip(prompts, outputs, strict=True) if o > step]
        total += shape.decode_s(len(rows), sum(rows), rates)
    return total


def check(engine: Engine, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True, seed=5)
    (alone,) = engine.generate(prompts[:1], params)
    together = engine.generate(prompts[:24], params)[0]
    if (alone.token_ids, alone.log_probs) != (together.token_ids, together.log_probs):
        raise SystemExit("a request has other bits alone than in a batch")


def time_workload(engine: Engine, rates: Rates, count: int = REQUESTS) -> dict[str, float]:
    prompts, outputs = workload(engine.model.config.vocab_size, count)
    check(engine, prompts)
    engine.flush_cache()
    params = [
        SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, seed=i)
        for i, count in enumerate(outputs)
    ]
    first = engine.num_steps
    eager, waits = Stopwatch(engine.runner, "run"), Stopwatch(engine.decode_steps, "take")
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(prompts, params)
    taken = time.perf_counter() - start
    least = roofline_s(Shape(engine), prompts, outputs, rates)
    return {
        "s": taken, "tokens_per_s": sum(outputs) / taken, "share": least / taken,
        "steps": engine.num_steps - first, "eager_s": eager.total_s, "waits_s": waits.total_s,
    }  # fmt: skip


class Stopwatch:
    """The time spent in a method of an object, from now on."""

    def __init__(self, owner: Any, name: str) -> None:
        self.total_s = 0.0
        method = getattr(owner, name, None)
        if method is None:
            return

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            found = method(*args)
            self.total_s += time.perf_counter() - start
            return found

        setattr(owner, name, timed)


def profile_alone(engine: Engine) -> None:
    """Kernels of steps of one request: how many a step, and the time of each."""
    prompt = [3 + i % 1000 for i in range(CONTEXT)]
    params = SamplingParams(temperature=0.6, max_tokens=2, ignore_eos=True, seed=1)
    engine.generate(prompt, params)  # its prefix is cached from here on
    params = SamplingParams(temperature=0.6, max_tokens=42, ignore_eos=True, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        engine.generate(prompt, params)
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:14]:
        print(
            f"    {row.self_device_time_total / 40:8.1f} us a step, {row.count / 40:6.1f} of "
            f"{row.self_device_time_total / row.count:6.2f} us  {row.key[:70]}"
        )


def time_memory(engine: Engine) -> dict[str, float]:
    """All tags released and resumed, with nothing kept: twice at once, then after a rest."""
    held = sum(a.num_bytes for a in [*engine.model.arenas, engine.cache.arena])
    found: dict[str, float] = {"held_bytes": held}
    for name, rest_s in (("first", 0.0), ("at_once", 0.0), ("rested", 1.0)):
        start = time.perf_counter()
        freed = engine.release_memory(backups={"static": "none"})
        release_s = time.perf_counter() - start
        time.sleep(rest_s)
        start = time.perf_counter()
        engine.resume_memory()
        resume_s = time.perf_counter() - start
        found |= {f"{name}_freed_bytes": freed, f"{name}_release_s": release_s}
        found[f"{name}_resume_s"] = resume_s
        print(
            f"  {name}: freed {freed / held:.2%} of {held / 2**30:.1f} GiB in "
            f"{release_s * 1e3:.1f} ms, back in {resume_s * 1e3:.1f} ms"
        )
    return found


def time_alone(engine: Engine, rates: Rates) -> dict[str, float]:
    """Steps of one request around a context of 512, by the clock between tokens."""
    prompt = [3 + i % 1000 for i in range(CONTEXT - NEW_TOKENS // 2)]
    params = SamplingParams(temperature=0.6, max_tokens=NEW_TOKENS, ignore_eos=True, seed=1)
    times: list[float] = []
    for chunk in engine.stream(prompt, params):
        times += [time.perf_counter()] * len(chunk.token_ids)
    gaps = [b - a for a, b in pairwise(times[8:])]
    taken = statistics.median(gaps)
    least = Shape(engine).decode_s(1, CONTEXT, rates)
    return {"step_s": taken, "share": least / taken, "least_s": least}


def main() -> None:
    parser = command_line(__doc__, "the smallest model alone: does it run?")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--alone", action="store_true", help="one request only")
    parser.add_argument("--profile", action="store_true", help="kernels of one request's steps")
    parser.add_argument("--memory", action="store_true", help="also release and resume all memory")
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, help="the first of the workload only"
    )
    parser.add_argument("--kv-cache-tokens", type=int, default=320_000)
    options = parser.parse_args()
    if not has_gpus():
        return
    if options.tiny:
        options.models, options.alone = ["qwen3-0.6b"], True
    figures: dict[str, Any] = {}
    for name in options.models:
        start = time.perf_counter()
        decode = "eager" if options.eager else "auto"
        kind = MemoryKind.RELEASABLE if options.memory else MemoryKind.PLAIN
        engine = make_engine(name, options.kv_cache_tokens, decode, kind)
        found: dict[str, Any] = {"start_s": time.perf_counter() - start}
        if isinstance(engine.decode_steps, DecodeGraphs):
            found["capture_s"] = engine.decode_steps.capture_s
            print(f"  rows of a graph by rows wanted: {engine.decode_steps.choice}")
        rates = measure_rates()
        found |= {"read_rate": rates.read, "product_rate": rates.product}
        print(f"{name}: start {found['start_s']:.1f} s, capture {found.get('capture_s', 0):.1f} s, "
              f"read {rates.read / 1e12:.2f} TB/s, product {rates.product / 1e12:.0f} TFLOP/s")  # fmt: skip
        found["alone"] = alone = time_alone(engine, rates)
        print(f"  alone     {alone['step_s'] * 1e3:.3f} ms a step, {alone['share']:.1%} of roofline "
              f"({alone['least_s'] * 1e3:.3f} ms)")  # fmt: skip
        if options.profile:
            profile_alone(engine)
        if not options.alone:
            found["workload"] = load = time_workload(engine, rates, options.requests)
            print(f"  workload  {load['s']:.2f} s, {load['tokens_per_s']:.0f} tok/s, "
                  f"{load['share']:.1%} of roofline, {load['steps']} steps; eager steps "
                  f"{load['eager_s']:.2f} s, waiting for graphs {load['waits_s']:.2f} s")  # fmt: skip
        if options.memory:
            found["memory"] = time_memory(engine)
        figures[name] = found
        del engine
        torch.cuda.empty_cache()
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
