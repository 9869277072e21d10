"""Generate text from the command line: ``python -m engine_adapter.core --model DIR --prompt "..."``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from weightsync.errors import WeightSyncError


def parser() -> argparse.ArgumentParser:
    """Every option of the command."""
    made = argparse.ArgumentParser(
        prog="python -m engine_adapter.core",
        description="Generate text with the bundled inference core.",
    )
    made.add_argument("--model", required=True, help="a Hugging Face model directory")
    made.add_argument("--prompt", action="append", required=True, help="text; may be repeated")
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    made.add_argument("--top-k", type=int, default=0)
    made.add_argument("--top-p", type=float, default=1.0)
    made.add_argument("--min-p", type=float, default=0.0)
    made.add_argument("--stop", action="append", default=[], help="text; may be repeated")
    made.add_argument("--seed", type=int, default=None)
    made.add_argument("--n", type=int, default=1, help="samples of each prompt")
    made.add_argument("--ignore-eos", action="store_true")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--device", default="cpu")
    made.add_argument("--attention", default="auto", help="auto, paged or reference")
    made.add_argument("--kv-cache-tokens", type=int, default=None)
    made.add_argument("--log-probs", action="store_true", help="a line for each token")
    return made


def _engine(options: argparse.Namespace) -> Any:
    from engine_adapter.core.engine import Engine

    settings: dict[str, Any] = {"attention": options.attention}
    if options.kv_cache_tokens is not None:
        settings["kv_cache_tokens"] = options.kv_cache_tokens
    return Engine.from_pretrained(
        options.model, dtype=options.dtype, device=options.device, **settings
    )


def _params(options: argparse.Namespace) -> Any:
    from engine_adapter.core.sampling_params import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        stop=options.stop,
        seed=options.seed,
        n=options.n,
        ignore_eos=options.ignore_eos,
    )


def run(options: argparse.Namespace) -> None:
    """Print a single sample as it comes, several once all have ended."""
    params = _params(options)
    engine = _engine(options)
    is_single = len(options.prompt) * params.n == 1
    outputs = []
    start = time.monotonic()
    for chunk in engine.stream(options.prompt, params):
        if is_single:
            print(chunk.text, end="" if chunk.output is None else "\n", flush=True)
        if chunk.output is not None:
            outputs.append(chunk.output)
    elapsed_s = time.monotonic() - start
    outputs.sort(key=lambda output: (int(output.request_id[1:]), output.sample_index))
    for output in outputs:
        name = f"{output.request_id}.{output.sample_index}"
        if not is_single:
            print(f"{name}: {output.text}")
        if options.log_probs:
            for result in output.log_probs:
                print(f"{name} token {result.token} log-prob {result.log_prob:.4f}")
    num_tokens = sum(len(output.token_ids) for output in outputs)
    reasons = ", ".join(sorted({str(output.finish_reason) for output in outputs}))
    print(
        f"{num_tokens} tokens in {elapsed_s:.2f} s ({num_tokens / elapsed_s:.0f} tokens/s); "
        f"ended by {reasons}",
        file=sys.stderr,
    )
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise WeightSyncError("; ".join(failed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; an expected error is one line on stderr."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except WeightSyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
