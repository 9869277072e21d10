"""A trained tiny model, made by a script.

Trains a Qwen3 of about one million parameters from scratch on two-digit additions, on a CPU, and
writes a Hugging Face checkpoint. Unlike random weights, a trained model notices a stale or
scrambled matrix: the log-probability of correct answers falls.

    python examples/train_tiny.py                 # into the user's cache; a second call does nothing
    python examples/train_tiny.py --output DIR --force

A problem is one line of text, the sum's digits reversed so that each digit follows from what was
already written: ``"47+85=231"`` says 47 + 85 = 132. A line feed begins and ends every problem.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from weightsync.checkpoints import load_model
from weightsync.config import cache_dir as user_cache_dir
from weightsync.presets import PRESETS, ModelPreset

# A token's id is its place here; the line feed is both the begin and the end token.
ALPHABET = "\n0123456789+="
NUM_DIGITS = 2  # of each operand
NUM_HELD_OUT = 1000
# The split belongs to the task, not to a run: no seed may train on what another one is judged by.
SPLIT_SEED = 20_240_607
ANSWER_TOKENS = NUM_DIGITS + 2  # the sum has one more digit than an operand; then the line feed
CACHE_NAME = "trained-tiny-v2"  # raise the number whenever what is trained changes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How to train; the defaults take less than a minute on two cores.

    ``matrix_learning_rate`` is that of the layers' matrices, ``learning_rate`` of all the rest.
    """

    num_steps: int = 260
    batch_size: int = 64
    matrix_learning_rate: float = 0.02
    learning_rate: float = 3e-3
    num_warmup_steps: int = 20
    seed: int = 0
    log_every: int = 20


class Muon(torch.optim.Optimizer):
    """Momentum whose every step is made orthogonal, for matrices (Jordan et al. 2024, "Muon").

    It needs a quarter of AdamW's steps here. Orthogonal by five quintic Newton-Schulz iterations
    with the published coefficients, in float32: torch's own works in bfloat16, which is slow on
    machines that have no instructions for it.
    """

    def __init__(self, matrices: Sequence[torch.Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step for every matrix with a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.mul_(0.95).add_(matrix.grad)
                update = _orthogonal(matrix.grad + 0.95 * momentum)
                rows, columns = matrix.shape
                matrix.mul_(1.0 - group["lr"] * group["weight_decay"])
                matrix.sub_(update, alpha=group["lr"] * math.sqrt(max(1.0, rows / columns)))


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal factor of ``matrix``: singular values of about 1."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    found: torch.Tensor = matrix.T if is_tall else matrix
    found = found / (found.norm() + 1e-7)
    for _ in range(5):
        gram = found @ found.T
        found = 3.4445 * found + (-4.7750 * gram + 2.0315 * gram @ gram) @ found
    return found.T if is_tall else found


def trained_preset() -> ModelPreset:
    """Return the shape of the model: the tiny preset with this task's alphabet."""
    return replace(
        PRESETS["tiny"],
        name="trained-tiny",
        intermediate_size=448,
        vocab_size=16,
        max_positions=256,
        rope_theta=10_000.0,
        bos_token_id=ALPHABET.index("\n"),
        eos_token_id=ALPHABET.index("\n"),
        initializer_range=0.02,
    )


def format_problem(left: int, right: int) -> str:
    """Return the text of ``left + right``, each of two digits: ``"07+05=210"``."""
    total = f"{left + right:0{NUM_DIGITS + 1}}"[::-1]
    return f"{left:0{NUM_DIGITS}}+{right:0{NUM_DIGITS}}={total}"


def split_problems() -> tuple[list[str], list[str]]:
    """Return (training problems, held-out problems): disjoint, and always the same."""
    base = 10**NUM_DIGITS
    order = np.random.default_rng(SPLIT_SEED).permutation(base * base)
    problems = [format_problem(*divmod(int(number), base)) for number in order]
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


def encode(problems: Sequence[str]) -> torch.Tensor:
    """Return token ids, int64 [problems, tokens], a line feed at both ends of each.

    Raises `ValueError` for problems of unequal length or a character outside the alphabet.
    """
    return torch.tensor([[ALPHABET.index(c) for c in f"\n{text}\n"] for text in problems])


def answer_log_probs(model: torch.nn.Module, problems: Sequence[str]) -> torch.Tensor:
    """Return log-probabilities of the answers, float32 [problems, answer tokens, vocabulary].

    In nats; each position is conditioned on the correct tokens before it.
    """
    device = next(model.parameters()).device
    tokens = encode(problems).to(device)
    with torch.no_grad():
        logits = model(tokens[:, :-1], use_cache=False).logits[:, -ANSWER_TOKENS:]
    return torch.log_softmax(logits.float(), dim=-1)


def mean_log_prob(model: torch.nn.Module, problems: Sequence[str]) -> float:
    """Return the mean log-probability, in nats, of a token of the correct answers.

    About -0.018 for the trained weights, -0.07 or less once any matrix is replaced by noise; a
    permuted norm hardly shows. ``problems`` are lines such as :func:`split_problems` gives; the
    model may be on any device.
    """
    log_probs = answer_log_probs(model, problems)
    answers = encode(problems)[:, -ANSWER_TOKENS:].to(log_probs.device)
    return float(log_probs.gather(-1, answers[..., None]).mean())


def exact_match(model: torch.nn.Module, problems: Sequence[str]) -> float:
    """Return the share of problems, 0 to 1, that greedy decoding answers without a mistake."""
    # Greedy decoding is right exactly if every token is the likeliest after the right ones.
    guesses = answer_log_probs(model, problems).argmax(-1)
    answers = encode(problems)[:, -ANSWER_TOKENS:].to(guesses.device)
    return float((guesses == answers).all(-1).float().mean())


def train(config: TrainingConfig) -> tuple[torch.nn.Module, list[float]]:
    """Train a model from scratch; return it (float32, eval mode) and the loss of every step.

    The loss is the mean cross-entropy of answer tokens, in nats. Reseeds torch's generator.
    """
    torch.manual_seed(config.seed)
    # Trained in float32, rounded once at the end; the preset's own word is the saved dtype.
    shape = trained_preset().config() | {"torch_dtype": "float32"}
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(shape))
    model.train()
    optimizers = _optimizers(model, config)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rate(step, config)) for o in optimizers
    ]
    tokens = encode(split_problems()[0])
    picks = np.random.default_rng(config.seed)
    losses: list[float] = []
    for step in range(1, config.num_steps + 1):
        batch = tokens[picks.integers(0, len(tokens), config.batch_size)]
        logits = model(batch[:, :-1], use_cache=False).logits[:, -ANSWER_TOKENS:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, -ANSWER_TOKENS:].flatten()
        )
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
        if step % config.log_every == 0:
            print(f"step {step}/{config.num_steps}: loss {losses[-1]:.4f}", flush=True)
    trained: torch.nn.Module = model.eval()
    return trained, losses


def _optimizers(model: torch.nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, config.matrix_learning_rate, weight_decay=0.1),
        torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(step: int, config: TrainingConfig) -> float:
    """Warm up linearly, then fall to zero along half a cosine."""
    warmup = min(1.0, (step + 1) / config.num_warmup_steps)
    return warmup * 0.5 * (1.0 + math.cos(math.pi * step / config.num_steps))


def save_checkpoint(model: torch.nn.Module, directory: Path) -> None:
    """Write the weights as bfloat16, the configuration and ``vocab.json`` (character to id)."""
    saved: Any = model
    saved.to(torch.bfloat16).save_pretrained(directory)
    vocabulary = {character: token for token, character in enumerate(ALPHABET)}
    _write_json(directory / "vocab.json", vocabulary)


def make_checkpoint(
    directory: Path, config: TrainingConfig, *, force: bool = False
) -> dict[str, Any]:
    """Train, measure and write ``directory``; it appears whole or not at all.

    Returns what ``metrics.json`` holds: the exact match and mean log-probability (nats) of the
    held-out problems, measured on the bfloat16 weights as a reader loads them; the loss curve;
    the training time in seconds. Raises `FileExistsError` if ``directory`` is there and
    ``force`` is not given.
    """
    if directory.exists() and not force:
        raise FileExistsError(f"{directory} exists; pass force (--force) to train it anew")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir()
    try:
        start = time.monotonic()
        model, losses = train(config)
        training_s = time.monotonic() - start
        save_checkpoint(model, partial)
        held_out = split_problems()[1]
        reloaded = load_model(partial, "bfloat16")
        metrics: dict[str, Any] = {
            "exact_match": exact_match(reloaded, held_out),
            "mean_log_prob": mean_log_prob(reloaded, held_out),
            "num_parameters": trained_preset().total_parameters,
            "num_steps": config.num_steps,
            "seed": config.seed,
            "training_s": round(training_s, 1),
            "losses": [round(loss, 5) for loss in losses],
        }
        _write_json(partial / "metrics.json", metrics)
        if force:
            shutil.rmtree(directory, ignore_errors=True)
        _publish(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return metrics


def _publish(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError:
        # Another process may have finished first; its model is as good as ours.
        if not (directory / "metrics.json").is_file():
            raise


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def trained_tiny_model(cache_dir: Path) -> Path:
    """Return the checkpoint directory of the trained model under ``cache_dir``, made once."""
    directory = cache_dir / CACHE_NAME
    if not directory.is_dir():
        make_checkpoint(directory, TrainingConfig())
    return directory


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(description="Train a tiny Qwen3 on two-digit additions.")
    parser.add_argument("--output", type=Path, help="directory (default: in the user's cache)")
    parser.add_argument("--force", action="store_true", help="train anew if it is there already")
    parser.add_argument("--seed", type=int, default=TrainingConfig().seed)
    parser.add_argument("--steps", type=int, default=TrainingConfig().num_steps)
    options = parser.parse_args(arguments)
    directory = user_cache_dir() / CACHE_NAME if options.output is None else options.output
    if directory.exists() and not options.force:
        print(f"{directory} is there already; --force trains it anew")
        return
    config = TrainingConfig(seed=options.seed, num_steps=options.steps)
    metrics = make_checkpoint(directory, config, force=options.force)
    print(
        f"{directory}: {metrics['exact_match']:.1%} of held-out problems exactly right, "
        f"mean log-prob {metrics['mean_log_prob']:.4f}, trained in {metrics['training_s']} s"
    )


if __name__ == "__main__":
    main()
