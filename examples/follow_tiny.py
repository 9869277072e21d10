"""Train the tiny model while a second process serves it and follows, through a directory of deltas.

One process trains with AdamW at a learning rate of reinforcement learning, and publishes the bf16 weights
after every step: what changed, coded, behind the next step. The other one runs the bundled inference core,
answers additions all the while, and takes each version as it appears, pausing for the scatter alone.
Nothing connects them but the directory. At the end the live weights of the engine are digested and
compared with what the trainer holds.

    python examples/follow_tiny.py                      # the trained tiny model, 30 steps
    python examples/follow_tiny.py --model DIR --steps 5 --store /shared/weights
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from train_tiny import ANSWER_TOKENS, encode, split_problems, trained_tiny_model

import weightsync
from weightsync.checkpoints import load_model
from weightsync.config import cache_dir

RUN = "tiny"
NUM_QUESTIONS = 32
LIMIT_S = 300.0


def train(model_directory: Path, store: Path, num_steps: int, learning_rate: float) -> str:
    """Version 0 is the checkpoint, version i the weights after step i. Returns the last root."""
    model: Any = load_model(model_directory, "float32").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    problems = encode(split_problems()[0])
    torch.manual_seed(0)
    root = ""
    with weightsync.Sender.connect(
        [store], transport="disk-delta", run_id=RUN, cast="fp32_to_bf16"
    ) as sender:
        for step in range(num_steps + 1):
            if step > 0:
                tokens = problems[torch.randint(len(problems), (64,))]
                logits = model(tokens[:, :-1], use_cache=False).logits[:, -ANSWER_TOKENS:]
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens[:, -ANSWER_TOKENS:].flatten()
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            with sender.update(version=step) as update:
                update.send(model)  # returns when the weights may change; the rest runs behind
        report = update.report
        if report is not None:
            print(f"trainer: {report}", flush=True)
            root = report.root
    return root


def follow(model_directory: Path, store: Path, last_version: int) -> None:
    """Serve, follow up to ``last_version``, and say at the end what is served, as JSON."""
    from engine_adapter.bundled import BundledAdapter
    from engine_adapter.core.engine import Engine
    from engine_adapter.core.sampling_params import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    questions = [problem.partition("=") for problem in split_problems()[1][:NUM_QUESTIONS]]
    with Engine.from_pretrained(model_directory, kv_cache_tokens=4096) as engine:
        adapter = BundledAdapter(engine)
        with (
            weightsync.Receiver(adapter) as receiver,
            receiver.follow(store, RUN, poll_s=0.02) as live,
        ):
            shown = 0
            print("ready", flush=True)
            while True:
                is_last = live.wait_for(last_version, 0.001)
                outputs = engine.generate([left + "=" for left, _, _ in questions], greedy)
                right = sum(o.text == q[2] for o, q in zip(outputs, questions, strict=True))
                for report in live.reports[shown:]:
                    bits = report.bits_per_changed_element
                    print(
                        f"engine: version {report.version} by {'+'.join(report.kinds)}, "
                        f"{report.payload_bytes:,} B"
                        + ("" if bits is None else f" ({bits:.1f} bits a changed element)")
                        + f", paused {report.pause_s * 1e3:.1f} ms; {right} of {NUM_QUESTIONS} right",
                        flush=True,
                    )
                shown = len(live.reports)
                if is_last:
                    break
            digests = adapter.digest(list(adapter.layout().index))
            print(json.dumps({"version": receiver.version, "digests": digests, "right": right}))


def compare(store: Path, version: int, found: dict[str, Any]) -> bool:
    """Whether the engine's live tensors are those of the version."""
    from weightsync.store import Store

    manifest = Store(store, RUN).manifest(version)
    expected = {entry.meta.name: entry.digest for entry in manifest.tensors}
    return bool(found["version"] == version and found["digests"] == expected)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a checkpoint of train_tiny.py (default: made)")
    parser.add_argument("--store", type=Path, help="directory of the versions (default: temporary)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--role", choices=["both", "follow"], default="both")
    options = parser.parse_args(arguments)
    model = trained_tiny_model(cache_dir()) if options.model is None else options.model
    if options.role == "follow":
        follow(model, options.store, options.steps)
        return 0
    with tempfile.TemporaryDirectory(prefix="weightsync-") as temporary:
        store = Path(temporary) if options.store is None else options.store
        store.mkdir(parents=True, exist_ok=True)
        engine = subprocess.Popen(
            [sys.executable, __file__, "--role", "follow", "--model", str(model),
             "--store", str(store), "--steps", str(options.steps)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            if engine.stdout is None or engine.stdout.readline() != "ready\n":
                raise RuntimeError("the engine did not start; its own message stands above")
            train(model, store, options.steps, options.learning_rate)
            printed, _ = engine.communicate(timeout=LIMIT_S)
        finally:
            engine.kill()
            engine.wait()
        *lines, last = printed.splitlines()
        print("\n".join(lines))
        is_same = engine.returncode == 0 and compare(store, options.steps, json.loads(last))
    print(f"verified: {'yes, every live tensor' if is_same else 'NO'}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
