"""How many tokens a second does the bundled core decode, next to transformers' `generate`?

Both run the same model on the same threads. First the check: transformers' greedy tokens score what
transformers' own forward pass says of them, and what the core generates in a batch equals what it
generates of each prompt alone, bit for bit. Then both are timed in turn, round by round, so that a
noisy machine is equally unkind to both. A rate counts new tokens over the whole call, prefill included.

    python benchmarks/core_decode.py [--model DIR] [--tiny] [--threads N] [--json FILE]

Without `--model` a random Qwen3 of 4 layers and hidden size 128 is made.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from engine_adapter.core.engine import Engine
from engine_adapter.core.sampling_params import SamplingParams

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
PROMPT_TOKENS = 12
TOLERANCE = 0.1  # of a log-prob in bf16, and...
LOGIT_STEP = 1 / 64  # ...of the largest logit, whose neighbours may lie further apart
SEED = 3


def random_model(directory: Path) -> Path:
    """A Qwen3 with the shape of the trained tiny model; weights wide enough for a clear argmax."""
    config = transformers.Qwen3Config(
        hidden_size=128, intermediate_size=448, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=256,
        initializer_range=0.1, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(2, vocab_size, (count, PROMPT_TOKENS), generator=generator)
    return [[int(token) for token in row] for row in ids]


class Peers:
    """The two engines, each as a function from prompts to new tokens, greedy."""

    def __init__(self, directory: Path, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.core = Engine.from_pretrained(directory, kv_cache_tokens=65_536)
        self.theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto"
        ).eval()
        self.theirs.generation_config.eos_token_id = None
        self.params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def run_core(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(o.token_ids) for o in self.core.generate(list(prompts), self.params)]

    def run_transformers(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            found = self.theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return [[int(token) for token in row] for row in found[:, ids.shape[1] :]]

    def check(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Raises if they disagree; returns the largest difference of a log-prob, and the share of
        prompts whose greedy tokens are all the same."""
        theirs = self.run_transformers(prompts)
        sequences = [[*p, *t] for p, t in zip(prompts, theirs, strict=True)]
        with torch.inference_mode():
            logits = self.theirs(torch.tensor(sequences)).logits.float()
        expected = logits.log_softmax(-1)[:, :-1].gather(2, torch.tensor(sequences)[:, 1:, None])[
            ..., 0
        ]
        found = torch.tensor([
            [r.log_prob for r in o.log_probs] for o in self.core.score(sequences)
        ])  # fmt: skip
        largest = float((found - expected).abs().max())
        limit = TOLERANCE + LOGIT_STEP * float(logits.abs().max())
        if largest > limit:
            raise SystemExit(f"log-probs differ by {largest} from transformers', limit {limit}")
        together = self.core.generate(list(prompts), self.params)
        for prompt, output in zip(prompts, together, strict=True):
            (alone,) = self.core.generate([list(prompt)], self.params)
            if alone.log_probs != output.log_probs:
                raise SystemExit(f"prompt {prompt}: other bits alone than in a batch")
        same = [list(o.token_ids) == t for o, t in zip(together, theirs, strict=True)]
        return {"largest_difference": largest, "same_greedy_tokens": sum(same) / len(same)}


def measured(peers: Peers, batch_size: int, rounds: int, vocab: int) -> list[dict[str, Any]]:
    prompts = random_prompts(batch_size, vocab)
    candidates: dict[str, Callable[[Sequence[Sequence[int]]], Any]] = {
        "transformers generate": peers.run_transformers,
        "core": peers.run_core,
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for action in candidates.values():
        action(prompts)
    for _ in range(rounds):
        for name, action in candidates.items():
            start = time.perf_counter()
            action(prompts)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "batch_size": batch_size,
            "candidate": name,
            "new_tokens": batch_size * peers.num_tokens,
            "tokens_per_s": batch_size * peers.num_tokens / median,
            "best_tokens_per_s": batch_size * peers.num_tokens / min(seconds[name]),
            "ms_per_step": median / peers.num_tokens * 1e3,
            "of_transformers": medians["transformers generate"] / median,
        }
        for name, median in medians.items()
    ]


def environment(threads: int) -> dict[str, Any]:
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory")
    parser.add_argument("--tiny", action="store_true", help="few tokens: does it run?")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every result here, one a line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model or random_model(Path(scratch))
        peers = Peers(directory, num_tokens=4 if arguments.tiny else 64)
    vocab = peers.core.model.config.vocab_size
    lines: list[dict[str, Any]] = [{"environment": environment(arguments.threads)}]
    lines.append({"check": peers.check(random_prompts(8, vocab))})
    for line in lines:
        print(json.dumps(line), flush=True)
    print(f"{'batch':>5}  {'candidate':22} {'tokens/s':>9} {'best':>9} {'ms/step':>8} {'ratio':>6}")
    for batch_size in (1, 4) if arguments.tiny else BATCH_SIZES:
        rounds = 1 if arguments.tiny else arguments.rounds
        for result in measured(peers, batch_size, rounds, vocab):
            lines.append(result)
            print(
                f"{batch_size:5}  {result['candidate']:22} {result['tokens_per_s']:9.0f} "
                f"{result['best_tokens_per_s']:9.0f} {result['ms_per_step']:8.2f} "
                f"{result['of_transformers']:6.2f}",
                flush=True,
            )
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
