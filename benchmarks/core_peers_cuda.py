"""How fast does the core generate beside transformers, on one GPU and the same weights?

The job: the first 64 prompts of nano-vllm's workload (100 to 1,024 tokens), 256 tokens each, greedy. Times
are of the whole job, prefill included. The peers are transformers' ``generate`` with a static cache and a
compiled step (prompts padded on the left to the longest), and its continuous batching. Every contestant runs
in a process of its own with a limit; one run is for warming up and compiling, the second is timed, and
both times are stated. One that fails or takes too long is named with its reason.

First the check: log-probs of a prompt by the core are near transformers'.

    python benchmarks/core_peers_cuda.py [--model qwen3-0.6b] [--requests N] [--limit-s S] [--json FILE]
"""

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_parts.command import command_line, has_gpus, write_figures

from weightsync.presets import get_preset

DEVICE = "cuda:0"
NEW_TOKENS = 256
CONTESTANTS = ("core", "generate", "continuous")
Job = list[list[int]]


def peer_library() -> Any:
    return importlib.import_module("transformers")


def load_peer(directory: str) -> Any:
    models = peer_library().AutoModelForCausalLM
    return models.from_pretrained(directory, dtype=torch.bfloat16).to(DEVICE).eval()


def save_model(name: str, directory: str) -> None:
    """Random weights in transformers' format."""
    transformers = peer_library()
    fields = dict(get_preset(name).config())
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def run_core(directory: str, job: Job, new_tokens: int) -> Callable[[], int]:
    from engine_adapter.core.engine import Engine
    from engine_adapter.core.sampling_params import SamplingParams

    engine = Engine.from_pretrained(
        directory, device=DEVICE, kv_cache_tokens=131_072, max_step_tokens=8192, max_context=4096
    )
    check(engine, directory, job[0])
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)

    def run() -> int:
        engine.flush_cache()
        return sum(len(output.token_ids) for output in engine.generate(job, params))

    return run


def check(engine: Any, directory: str, prompt: list[int]) -> None:
    peer = load_peer(directory)
    with torch.inference_mode():
        logits = peer(torch.tensor([prompt], device=DEVICE)).logits[0, :-1].float()
    following = torch.tensor(prompt[1:], device=DEVICE)[:, None]
    wanted = logits.log_softmax(-1).gather(1, following)[:, 0].cpu()
    (scored,) = engine.score([prompt])
    found = torch.tensor([result.log_prob for result in scored.log_probs])
    worst = float((found - wanted).abs().max())
    del peer
    torch.cuda.empty_cache()
    if not worst < 0.2:
        raise SystemExit(f"log-probs differ from transformers' by {worst}")


def run_generate(directory: str, job: Job, new_tokens: int) -> Callable[[], int]:
    model = load_peer(directory)
    longest = max(map(len, job))
    tokens = torch.zeros((len(job), longest), dtype=torch.int64, device=DEVICE)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(job):
        tokens[row, longest - len(prompt) :] = torch.tensor(prompt, device=DEVICE)
        mask[row, longest - len(prompt) :] = 1
    model.generation_config.pad_token_id = 0

    def run() -> int:
        made = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens,
            min_new_tokens=new_tokens, cache_implementation="static",
        )  # fmt: skip
        return int((made.shape[1] - longest) * len(job))

    return run


def run_continuous(directory: str, job: Job, new_tokens: int) -> Callable[[], int]:
    model = load_peer(directory)
    config = peer_library().GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def run() -> int:
        made = model.generate_batch(inputs=job, generation_config=config)
        return sum(len(output.generated_tokens) for output in made.values())

    return run


RUNS: dict[str, Callable[[str, Job, int], Callable[[], int]]] = {
    "core": run_core,
    "generate": run_generate,
    "continuous": run_continuous,
}


def measure(contestant: str, directory: str, job: Job, new_tokens: int) -> dict[str, float]:
    """In this process."""
    start = time.perf_counter()
    run = RUNS[contestant](directory, job, new_tokens)
    found = {"start_s": time.perf_counter() - start}
    for name in ("first_s", "s"):
        torch.cuda.synchronize()
        start = time.perf_counter()
        count = run()
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start
        if count != len(job) * new_tokens:
            raise SystemExit(f"{contestant} made {count} tokens, not {len(job) * new_tokens}")
    found["tokens_per_s"] = len(job) * new_tokens / found["s"]
    return found


def measured_apart(arguments: list[str], limit_s: float) -> dict[str, Any]:
    """In a process of its own; what went wrong if it did."""
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit_s:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return {"error": lines[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = command_line(__doc__, "four requests: does it run?")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each contestant")
    parser.add_argument("--here", help="measure one contestant on this directory, as JSON")
    options = parser.parse_args()
    if not has_gpus():
        return
    if options.tiny:
        options.requests, options.new_tokens = 4, 16
    if options.here:
        from core_decode_cuda import workload

        job, _ = workload(get_preset(options.model).config()["vocab_size"], options.requests)
        print(json.dumps(measure(options.only[0], options.here, job, options.new_tokens)))
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        save_model(options.model, directory)
        torch.cuda.empty_cache()
        for name in options.only:
            arguments = ["--here", directory, "--only", name, "--model", options.model,
                         "--requests", str(options.requests),
                         "--new-tokens", str(options.new_tokens)]  # fmt: skip
            figures[name] = found = measured_apart(arguments, options.limit_s)
            if "error" in found:
                print(f"{name:12} {found['error']}")
            else:
                print(f"{name:12} {found['tokens_per_s']:8.0f} tokens/s, {found['s']:.2f} s; the first time "
                      f"{found['first_s']:.2f} s, start {found['start_s']:.1f} s")  # fmt: skip
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
