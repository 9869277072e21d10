"""How near to the matrix units' limit is a prefill of a whole model?

Random weights of published shapes; prompts that fill one or several steps of 8,192 tokens, each asked
for a single token. Times are of whole calls, sampling included. Operations: 2 x parameters that a token
meets, embedding and head left out, head for one row a prompt, and attention's 4 x head_dim x heads a
pair of tokens; set against the rate of a large bf16 product in the same run.

    python benchmarks/core_prefill_cuda.py [--models qwen3-8b ...] [--json FILE]
"""

import statistics
import time
from typing import Any

import torch
from bench_parts.command import command_line, has_gpus, write_figures
from core_decode_cuda import Shape, make_engine, measure_rates

from engine_adapter.core.arena import MemoryKind
from engine_adapter.core.engine import Engine
from engine_adapter.core.sampling_params import SamplingParams

#: Prompts and tokens of each.
JOBS = ((16, 512), (8, 1024), (4, 2048), (16, 2048), (2, 4000))
KV_CACHE_TOKENS = 65_536


def operations(engine: Engine, prompts: int, tokens: int) -> float:
    config = engine.model.config
    head = config.vocab_size * config.hidden_size
    pairs = prompts * tokens * (tokens + 1) // 2
    attention = 4 * config.head_dim * config.num_heads * config.num_layers * pairs
    body = Shape(engine).active - head
    return 2 * body * prompts * tokens + 2 * head * prompts + attention


def prefill_s(engine: Engine, prompts: int, tokens: int, rounds: int) -> float:
    vocab = engine.model.config.vocab_size
    asked = [[(i * 131 + j * 7) % vocab for j in range(tokens)] for i in range(prompts)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    found = []
    for _ in range(rounds + 1):
        engine.flush_cache()
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate(asked, params)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def main() -> None:
    parser = command_line(__doc__, "the smallest model, once: does it run?")
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not has_gpus():
        return
    if options.tiny:
        options.models, options.rounds = ["qwen3-0.6b"], 1
    figures: dict[str, Any] = {}
    for name in options.models:
        engine = make_engine(name, KV_CACHE_TOKENS, "eager", MemoryKind.PLAIN)
        rate = measure_rates().product
        print(f"{name}: product {rate / 1e12:.0f} TFLOP/s")
        figures[name] = {"product_rate": rate}
        for prompts, tokens in JOBS[:1] if options.tiny else JOBS:
            taken = prefill_s(engine, prompts, tokens, options.rounds)
            share = operations(engine, prompts, tokens) / taken / rate
            figures[name][f"{prompts}x{tokens}"] = {"s": taken, "share": share}
            print(
                f"  {prompts:3} x {tokens:5} {taken * 1e3:8.1f} ms {prompts * tokens / taken:9.0f} tokens/s "
                f"{share * rate / 1e12:4.0f} TFLOP/s {share:6.1%} of a product"
            )
        del engine
        torch.cuda.empty_cache()
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
