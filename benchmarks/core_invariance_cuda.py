"""What does it cost that a token's bits do not depend on its company?

The same core twice, each in processes of its own that take turns: as it is (cuBLASLt without workspaces,
proven on the model's shapes), and with the libraries' own choice of kernels (cuBLAS, workspaces, split
sums, reduced precision allowed, nothing proven, nothing padded). All other kernels are the same. Times
are medians between two tokens of decoding 1, 64 and 256 requests around a context of 512, and of
prefilling 4 x 2,048 tokens.

    python benchmarks/core_invariance_cuda.py [--models qwen3-8b ...] [--rounds N] [--json FILE]
"""

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

from bench_parts.command import command_line, has_gpus, write_figures

ROWS = (1, 64, 256)
CONTEXT = 512
NEW_TOKENS = 60
KV_CACHE_TOKENS = 192_000
POLICIES = ("invariant", "default")
LIMIT_S = 120.0


def use_default_products() -> None:
    """What torch does when nobody asks for anything."""
    from engine_adapter.core import cuda_products

    def prove(self: Any, shapes: Any, dtype: Any, device: Any) -> dict[Any, Any]:
        return {}

    cuda_products.prepare_cublas = lambda: None
    cuda_products.CudaProduct.prove = prove  # type: ignore[method-assign]


def step_s(engine: Any, rows: int) -> float:
    """Between two tokens of each of ``rows`` requests."""
    from engine_adapter.core.sampling_params import SamplingParams

    prompts = [
        [(i * 131 + j * 7) % 10_000 for j in range(CONTEXT - NEW_TOKENS // 2)] for i in range(rows)
    ]
    times: list[float] = []
    take = engine.decode_steps.take

    def timed() -> Any:
        found = take()
        times.append(time.perf_counter())
        return found

    engine.decode_steps.take = timed
    engine.generate(
        prompts, SamplingParams(temperature=0.6, max_tokens=NEW_TOKENS, ignore_eos=True, seed=1)
    )
    engine.decode_steps.take = take
    return statistics.median(b - a for a, b in pairwise(times[4:]))


def measure(model: str, policy: str) -> dict[str, float]:
    """In this process, which has not used cuBLAS yet."""
    if policy == "default":
        use_default_products()
    from core_decode_cuda import make_engine
    from core_prefill_cuda import prefill_s

    from engine_adapter.core.arena import MemoryKind

    engine = make_engine(model, KV_CACHE_TOKENS, "graphs", MemoryKind.PLAIN)
    found = {f"decode {rows}": step_s(engine, rows) for rows in ROWS}
    found["prefill 4 x 2048"] = prefill_s(engine, 4, 2048, 4)
    return found


def measured_apart(model: str, policy: str) -> dict[str, float]:
    """In a process of its own."""
    environment = dict(os.environ)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, __file__, "--models", model, "--policy", policy],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{model} with {policy} products failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(model: str, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for index in range(rounds):
        for policy in POLICIES if index % 2 == 0 else POLICIES[::-1]:
            found[policy].append(measured_apart(model, policy))
    figures: dict[str, Any] = {}
    for name in found["default"][0]:
        ours, plain = (
            statistics.median(each[name] for each in found[policy]) for policy in POLICIES
        )
        figures[name] = {"invariant_s": ours, "default_s": plain, "cost": ours / plain - 1}
        print(
            f"  {name:18} {ours * 1e3:8.3f} ms, by default {plain * 1e3:8.3f} ms: {ours / plain - 1:+.1%}"
        )
    return figures


def main() -> None:
    parser = command_line(__doc__, "the smallest model, once: does it run?")
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--policy", choices=POLICIES, help="measure this one here, as JSON")
    options = parser.parse_args()
    if not has_gpus():
        return
    if options.policy:
        print(json.dumps(measure(options.models[0], options.policy)))
        return
    if options.tiny:
        options.models, options.rounds = ["qwen3-0.6b"], 1
    figures = {}
    for name in options.models:
        print(name)
        figures[name] = compare(name, options.rounds)
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
