"""What would these updates take here, beside what others published for the same clusters?

First table: our plan and prediction for the published model, GPUs and layouts. Second: the same arithmetic
applied to the published designs themselves, with their gathers, broadcasts and calls for each tensor,
against the seconds that their authors gave. Nothing is run; every constant is measured or cited, here
or in weightsync/cost/constants.py.

    python benchmarks/published_plans.py [--tiny] [--only WORD] [--json FILE]
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsync.cost.constants import Constants
from weightsync.cost.study import BROADCAST, FORWARDED, P2P, Setup, Study, study
from weightsync.layouts.quantised import fp8_metas
from weightsync.model_shapes import model_metas

#: measured: NCCL 2.28.9 broadcast of 1 GiB between two H200 over NVLink (900 GB/s by the data sheet).
NVLINK_COLLECTIVE = 366e9
#: The H800's NVLink is 400 GB/s by the data sheet; a collective is taken to reach the same share.
H800_COLLECTIVE = NVLINK_COLLECTIVE * 400 / 900
#: measured: pinned host memory to an H200.
HOST_LINK = 52.4e9
#: measured: unpacking and copying one tensor of a bucket in Python (SGLang's bucket 40, verl's 41 us).
LOAD_CALL_S = 41e-6
#: published: what a card reached in Perplexity's updates.
PERPLEXITY_CARD = 36e9
C = Constants()
CARD_COLLECTIVE = 50e9 * C.broadcast_share.value


@dataclass(frozen=True)
class Case:
    """A published cluster. Miles and NeMo-RL publish the engines' layouts; trainers' mostly nobody does."""

    model: str
    who: str
    trainer: dict[str, int]
    engine: dict[str, int]
    engines: int
    wire: str
    published: str
    is_assumed: bool = True  # the trainer's layout


CASES = (
    Case("qwen3-30b-a3b", "Miles, 2 + 2 hosts", {"tp": 4, "dp": 4, "ep": 8}, {"tp": 8, "ep": 8}, 2,
         "bf16", "NCCL 2.67, P2P 2.16"),
    Case("glm-4.5-air", "Miles, 4 + 4 hosts", {"tp": 4, "dp": 8, "ep": 8}, {"tp": 8, "ep": 8}, 4,
         "bf16", "NCCL 5.00, P2P 2.64"),
    Case("qwen3-235b-a22b", "Miles, 8 + 8 hosts", {"pp": 4, "tp": 4, "dp": 4, "ep": 8},
         {"tp": 32, "ep": 32}, 2, "bf16", "NCCL 10.75, P2P 3.16"),
    Case("qwen3-235b-a22b", "vLLM sharded_rdt, 8 + 8 GPUs", {"fsdp": 8, "ep": 8},
         {"tp": 8, "ep": 8}, 1, "bf16", "2.70 to 3.3"),
    Case("qwen3-235b-a22b", "Perplexity, 128 + 32 GPUs", {"fsdp": 16, "dp": 8, "ep": 8},
         {"tp": 8, "ep": 8}, 4, "bf16", "about 2"),
    Case("deepseek-v3", "NeMo-RL reshard, PP16 x EP16 to TP32 x DP8", {"pp": 16, "ep": 16},
         {"tp": 32}, 8, "bf16", "2.39 to 2.83", is_assumed=False),
    Case("kimi-k2", "Miles, 32 + 32 hosts", {"pp": 8, "tp": 8, "dp": 4, "ep": 32},
         {"tp": 32, "ep": 32}, 8, "fp8", "NCCL 53.28, P2P 7.23"),
    Case("kimi-k2", "Perplexity, 256 + 128 GPUs", {"pp": 8, "ep": 32}, {"tp": 8, "ep": 32}, 4,
         "fp8", "1.3"),
    Case("kimi-k2", "256 + 256 GPUs, attention TP 8", {"pp": 8, "ep": 32}, {"tp": 8, "ep": 32}, 8,
         "fp8", "", is_assumed=False),
    Case("kimi-k2", "256 + 256 GPUs, attention DP 32", {"pp": 8, "ep": 32}, {"ep": 32}, 8, "fp8",
         "", is_assumed=False),
)  # fmt: skip
TINY = (
    Case("tiny-moe", "two hosts", {"pp": 2, "ep": 4}, {"tp": 2, "ep": 4}, 2, "fp8", ""),
)  # fmt: skip


def predict(case: Case) -> Study:
    setup = Setup(
        trainer=case.trainer, engine=case.engine, num_engines=case.engines, wire=case.wire
    )
    found = study(model_metas(case.model), setup)
    check(found)
    return found


def check(found: Study) -> None:
    """Bytes that arrive are what the engines' slots hold, and no way beats the bound."""
    held = sum(r.num_bytes for regions in found.target.regions for r in regions)
    if found.setup.wire == "bf16":  # quantised slots have no region of their own
        padding = 256 * len(found.target.tensors) * found.target.world_size
        assert 0 <= held - found.plans[0].total_bytes <= padding
    for plan in found.plans:
        assert plan.total_bytes == found.plans[0].total_bytes
    least = found.estimate("lower bound").seconds
    assert all(e.seconds >= least * 0.999 for e in found.estimates)


@dataclass(frozen=True)
class Design:
    """A published system as arithmetic. Terms in seconds, one after the other."""

    who: str
    model: str
    terms: dict[str, float]
    published_s: float
    note: str = ""
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", sum(self.terms.values()))


def sizes(model: str, wire: str) -> tuple[float, int]:
    metas: Sequence[Any] = model_metas(model)
    if wire == "fp8":
        metas = fp8_metas(metas)
    return sum(m.num_bytes for m in metas), len(metas)


def miles_broadcast(model: str, wire: str, gather: float, published_s: float, where: str) -> Design:
    """Gather a bucket, broadcast it tensor by tensor, one bucket after the other under one lock."""
    num_bytes, num_tensors = sizes(model, wire)
    terms = {
        "gather": num_bytes / gather,
        "broadcast": num_bytes / CARD_COLLECTIVE,
        "calls": num_tensors * C.broadcast_call_s.value,
    }
    return Design("Miles NCCL", model, terms, published_s, f"experts gathered {where}")


def miles_p2p(
    model: str, wire: str, gather: float, stages: int, ranks: int, published_s: float
) -> Design:
    """Gather the stage, run the engine's loader into a host copy, write that to the engines."""
    num_bytes, num_tensors = sizes(model, wire)
    own = num_bytes / ranks
    terms = {
        "gather": num_bytes / stages / gather,
        "load": num_tensors / stages * LOAD_CALL_S + own / stages / HOST_LINK,
        "write": own / (50e9 * C.nic_share.value),
    }
    return Design("Miles P2P", model, terms, published_s, f"{stages} stages assumed")


def nemo_reshard() -> Design:
    """Dense and expert FFN shard to shard, everything else by packed broadcast."""
    metas = model_metas("deepseek-v3")
    ffn = sum(m.num_bytes for m in metas if ".mlp." in m.name and m.name.endswith("_proj.weight"))
    rest = sum(m.num_bytes for m in metas) - ffn
    copies = 4 * (ffn / 32 + rest) / C.device_copy_bytes_per_s.value
    terms = {
        "reshard": ffn / 32 / CARD_COLLECTIVE,
        "broadcast": rest / CARD_COLLECTIVE,
        "pack and unpack": copies,
    }
    return Design("NeMo-RL reshard", "deepseek-v3", terms, 2.39, "best of 2.39 to 2.83")


def checkpoint_engine(model: str, wire: str, gpus: int, rate: float, published_s: float) -> Design:
    """Host to device, broadcast of every byte to every GPU, one load for each tensor."""
    num_bytes, num_tensors = sizes(model, wire)
    terms = {
        "host to device": num_bytes / gpus / HOST_LINK,
        "broadcast": num_bytes / rate,
        "load": num_tensors * LOAD_CALL_S,
    }
    return Design("checkpoint-engine", model, terms, published_s, f"{gpus} GPUs")


def perplexity(found: Study, published_s: float) -> Design:
    """One-sided writes of a static schedule: our plan at the rate that they publish for a card."""
    card = max(found.loads.nic_in.max(), found.loads.nic_out.max())
    terms = {"quantise": found.estimate(P2P).terms["quantise"], "write": card / PERPLEXITY_CARD}
    return Design("Perplexity", found_model(found), terms, published_s, "layouts assumed")


def found_model(found: Study) -> str:
    return "kimi-k2" if found.setup.wire == "fp8" else "qwen3-235b-a22b"


def designs(studies: dict[str, Study]) -> list[Design]:
    near, far = NVLINK_COLLECTIVE, CARD_COLLECTIVE
    on_host, over_network = "within a host", "over the network"
    found = [
        miles_broadcast("qwen3-30b-a3b", "bf16", near, 2.670, on_host),
        miles_broadcast("glm-4.5-air", "bf16", near, 5.001, on_host),
        miles_broadcast("qwen3-235b-a22b", "bf16", near, 10.754, on_host),
        miles_broadcast("kimi-k2", "fp8", far, 53.279, over_network),
        miles_p2p("qwen3-30b-a3b", "bf16", near, 1, 8, 2.160),
        miles_p2p("glm-4.5-air", "bf16", near, 1, 8, 2.637),
        miles_p2p("qwen3-235b-a22b", "bf16", near, 4, 32, 3.162),
        miles_p2p("kimi-k2", "fp8", far, 8, 32, 7.227 - 0.884),
        nemo_reshard(),
        checkpoint_engine("glm-4.5-air", "bf16", 8, H800_COLLECTIVE, 3.47),
        checkpoint_engine("qwen3-235b-a22b", "bf16", 8, H800_COLLECTIVE, 6.22),
        checkpoint_engine("deepseek-v3", "fp8", 16, near, 10.19),
        checkpoint_engine("kimi-k2", "fp8", 16, near, 14.36),
    ]
    for who, published_s in (
        ("Perplexity, 128 + 32 GPUs", 2.0),
        ("Perplexity, 256 + 128 GPUs", 1.3),
    ):
        if who in studies:
            found.append(perplexity(studies[who], published_s))
    return found


def print_cases(cases: Sequence[Case], progress: Callable[[Case], Study]) -> dict[str, Study]:
    columns = ("lower bound", "lower bound, no forwarding", FORWARDED, P2P, BROADCAST)
    print("| model | cluster | wire | bound | bound, no forwarding | p2p, forwarding | p2p | "
          "broadcast | published |")  # fmt: skip
    print("|---|---|---|--:|--:|--:|--:|--:|---|")
    studies = {}
    for case in cases:
        found = studies[case.who] = progress(case)
        numbers = " | ".join(f"{found.estimate(way).seconds:.3f}" for way in columns)
        star = "*" if case.is_assumed else ""
        print(f"| {case.model} | {case.who}{star} | {case.wire} | {numbers} | {case.published} |",
              flush=True)  # fmt: skip
    return studies


def print_designs(found: Sequence[Design]) -> None:
    print("\n| design | model | terms, s | model s | published s | off |  |")
    print("|---|---|---|--:|--:|--:|---|")
    for d in found:
        terms = ", ".join(f"{name} {spent_s:.2f}" for name, spent_s in d.terms.items())
        off = d.seconds / d.published_s - 1
        print(f"| {d.who} | {d.model} | {terms} | {d.seconds:.2f} | {d.published_s:.2f} | "
              f"{off:+.0%} | {d.note} |")  # fmt: skip


def as_json(studies: dict[str, Study], found: Sequence[Design]) -> dict[str, Any]:
    return {
        "cases": {
            who: {e.way: {"seconds": e.seconds, "terms": dict(e.terms), "bound_by": e.bound_by}
                  for e in s.estimates}
            for who, s in studies.items()
        },
        "designs": [
            {"who": d.who, "model": d.model, "terms": d.terms, "seconds": d.seconds,
             "published_s": d.published_s}
            for d in found
        ],
        "constants": C.to_json(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--only", default="", metavar="WORD", help="lines that hold it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = TINY if arguments.tiny else CASES
    studies = print_cases([c for c in cases if arguments.only in f"{c.model} {c.who}"], predict)
    print("\n* the trainer's layout is assumed")
    found = [
        d
        for d in ([] if arguments.tiny else designs(studies))
        if arguments.only in f"{d.model} {d.who}"
    ]
    if found:
        print_designs(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(studies, found), indent=1) + "\n")


if __name__ == "__main__":
    main()
