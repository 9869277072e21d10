"""Whole updates from trainers of several ranks that hold parts: what engines hold is the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_engines import FakeRank, job
from updating import Arrays, only

from weightsync.layouts import MegatronModel, MegatronPlace, MegatronRules, ShardRule
from weightsync.layouts.dtensor import Trainer
from weightsync.naming import FusedExperts, Rename, apply_rules
from weightsync.types import Box

torch = pytest.importorskip("torch")

from distributed_ranks import fake_rank  # noqa: E402
from megatron_reference import Sizes, hf_model, megatron_rank  # noqa: E402


def part(shape: tuple[int, ...], rank: int, size: int, dim: int) -> Box:
    low, high = [0] * len(shape), list(shape)
    low[dim], high[dim] = shape[dim] * rank // size, shape[dim] * (rank + 1) // size
    return Box(tuple(low), tuple(high))


def engine(whole: Arrays, size: int) -> list[FakeRank]:
    """Experts are whole on ranks in turn, matrices are cut by rows, vectors are on every rank."""
    ranks = []
    for rank in range(size):
        boxes = {}
        for name, array in whole.items():
            _, _, expert = name.partition(".experts.")
            if expert:
                if int(expert.split(".")[0]) % size == rank:
                    boxes[name] = Box.whole(array.shape)
            else:
                is_cut = array.ndim == 2
                boxes[name] = part(array.shape, rank, size, 0) if is_cut else Box.whole(array.shape)
        zeros = {n: np.zeros_like(a) for n, a in whole.items()}
        ranks.append(FakeRank(zeros, boxes, rank, size))
    return ranks


def check(whole: Arrays, sources: list[Any], size: int, **options: Any) -> None:
    ranks = engine(whole, size)
    with job(ranks, num_trainers=len(sources), **options) as both:
        for version in (1, 2):
            reports = both.refit(version, sources)
            assert all(rank.holds(whole) for rank in ranks)
            held = sum(w.nbytes for rank in ranks for w in rank.weights.values())
            assert only(reports[0]).num_bytes == held  # each byte once, from one rank that has it


@pytest.mark.parametrize("contract", ["direct", "stream"])
@pytest.mark.parametrize("size", [1, 2])
def test_megatron_ranks_update_an_engine(size: int, contract: str) -> None:
    s = Sizes(tp=2, pp=2, ep=2, experts=4, experts_kind="stacked")
    hf = hf_model(s)
    model = MegatronModel(
        num_layers=s.layers, num_heads=s.heads, num_kv_heads=s.groups, head_dim=s.head_dim,
        vocab_size=s.vocab, num_experts=s.experts, vocab_divisor=s.divisor,
    )  # fmt: skip
    sources = []
    for rank in range(s.world):
        tp, ep, pp = s.coordinates(rank)
        place = MegatronPlace(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2, ep_rank=ep, ep_size=2)
        named = megatron_rank(hf, s, rank)
        sources.append(apply_rules(named.items(), [MegatronRules(model, place)]).named)
    check({n: t.numpy() for n, t in hf.items()}, sources, size, contract=contract)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("contract", ["direct", "stream"])
def test_fsdp2_over_tensor_parallel_with_empty_shards_updates_an_engine(contract: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    whole = {
        "up.weight": np.arange(50, dtype=np.float32).reshape(10, 5),
        "experts.gate_up_proj": np.arange(100, 160, dtype=np.float32).reshape(3, 4, 5),
    }
    sources, alive = [], []
    for rank in range(8):
        with fake_rank(rank, 8):
            module = torch.nn.Module()
            module.up = torch.nn.Linear(5, 10, bias=False)
            experts = {"gate_up_proj": torch.nn.Parameter(torch.zeros(3, 4, 5))}
            module.experts = torch.nn.ParameterDict(experts)
            module.forward = lambda x: x
            for name, p in module.named_parameters():
                p.data.copy_(torch.from_numpy(whole[name]))
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
            parallelize_module(module.up, mesh["tp"], ColwiseParallel(), src_data_rank=None)
            fully_shard(module, mesh=mesh["fsdp"])
            alive.append(module)
            named = module.named_parameters()
            sources.append(apply_rules(named, [FusedExperts()], Trainer(rank, 8)).named)
    expected = dict(apply_rules(whole.items(), [FusedExperts()]).named)
    check({n: np.ascontiguousarray(a) for n, a in expected.items()}, sources, 2, contract=contract)


def test_senders_with_rules_of_their_own_rank() -> None:
    """TP 2 -> TP 1 and back: the rules are those of the rank that connects."""
    whole = {"up": np.arange(24, dtype=np.float32).reshape(8, 3), "norm": np.ones(3, np.float32)}
    halves = [
        apply_rules(
            [("up", np.split(whole["up"], 2)[rank]), ("norm", whole["norm"])],
            [ShardRule("up", 0, rank, 2)],
        ).named
        for rank in range(2)
    ]
    check(whole, halves, 1)
    check(whole, [whole], 2)


def stages_of(whole: Arrays) -> list[Any]:
    """A module for each rank, with one tensor of its own."""
    found = []
    for name, array in whole.items():
        module = torch.nn.Module()
        module.register_parameter(f"their_{name}", torch.nn.Parameter(torch.from_numpy(array)))
        found.append(module)
    return found


@pytest.mark.parametrize("idle", [None, "never_"])
def test_a_rule_must_match_on_some_rank(idle: str | None) -> None:
    whole = {"up": np.arange(24, dtype=np.float32).reshape(8, 3), "norm": np.ones(3, np.float32)}
    rules: list[Any] = [Rename("^their_up$", "up"), Rename("^their_norm$", "norm")]
    ranks = engine(whole, 2)
    with job(ranks, num_trainers=2, rules=rules + ([Rename(idle, "")] if idle else [])) as both:
        for version in (1, 2):
            found = both.attempt(version, stages_of(whole))
            if idle is None:
                assert [error for _, error in found] == [None, None]
                assert all(rank.holds(whole) for rank in ranks)
            else:
                for _, error in found:
                    assert "1 of 3 rules match no name" in str(error)
                    assert "never_" in str(error)
