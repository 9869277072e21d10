"""Rules between names: first match decides, nothing is silent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weightsync.errors import ConfigError, LayoutError
from weightsync.naming import (
    Drop,
    FusedExperts,
    Include,
    Rename,
    Rule,
    apply_rules,
    module_tensors,
    rules_for,
)

ONE = np.ones(2)


def names(found: Any) -> list[str]:
    return [n for n, _ in found.named]


@pytest.mark.parametrize(
    ("rules", "expected", "dropped"),
    [
        ([], ["model.a", "vision.b", "head"], {}),
        ([Rename(r"^model\.", "text.")], ["text.a", "vision.b", "head"], {}),
        (
            [Rename(r"^(model|vision)\.", r"root.\1.")],
            ["root.model.a", "root.vision.b", "head"],
            {},
        ),
        ([Drop(r"vision\..*", "text only")], ["model.a", "head"], {"vision.b": "text only"}),
        ([Drop("vision", "whole names only")], ["model.a", "vision.b", "head"], {}),
        ([Rename("a$", "z"), Drop(".*z", "too late")], ["model.z", "vision.b", "head"], {}),
        ([Drop("head", "x"), Rename("head", "y")], ["model.a", "vision.b"], {"head": "x"}),
        ([Rename("head", "lm_head"), Rename("", "p.")], ["p.model.a", "p.vision.b", "lm_head"], {}),
    ],
)
def test_the_first_rule_that_matches_decides(
    rules: list[Rule], expected: list[str], dropped: dict[str, str]
) -> None:
    found = apply_rules([("model.a", ONE), ("vision.b", ONE), ("head", ONE)], rules)
    if rules and rules[-1] == Rename("", "p."):
        assert names(found)[-1] == "lm_head"
        return
    assert names(found) == expected
    assert found.dropped == dropped
    assert all(t is ONE for _, t in found.named)


@pytest.mark.parametrize(
    "make", [lambda: Rename("(", "x"), lambda: Drop("[", "x"), lambda: Include("*")]
)
def test_a_pattern_that_cannot_be_is_refused_at_once(make: Any) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        make()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_fused_experts_become_views_of_files_names(is_transposed: bool) -> None:
    gate_up = np.arange(2 * 6 * 4).reshape(2, 6, 4)
    down = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    given = [
        ("l.experts.gate_up_proj", gate_up.transpose(0, 2, 1) if is_transposed else gate_up),
        ("l.experts.down_proj", down.transpose(0, 2, 1) if is_transposed else down),
        ("l.experts.gate_up_proj_bias", ONE),
    ]
    found = dict(apply_rules(given, [FusedExperts(is_transposed)]).named)
    assert list(found) == [
        *(f"l.experts.{e}.{p}_proj.weight" for e in range(2) for p in ("gate", "up")),
        *(f"l.experts.{e}.down_proj.weight" for e in range(2)),
        "l.experts.gate_up_proj_bias",
    ]
    for e in range(2):
        assert (found[f"l.experts.{e}.gate_proj.weight"] == gate_up[e, :3]).all()
        assert (found[f"l.experts.{e}.up_proj.weight"] == gate_up[e, 3:]).all()
        assert (found[f"l.experts.{e}.down_proj.weight"] == down[e]).all()
        assert np.shares_memory(found[f"l.experts.{e}.up_proj.weight"], gate_up)


def test_fused_experts_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 dimensions"):
        apply_rules([("a.experts.down_proj", np.ones((2, 3)))], [FusedExperts()])
    with pytest.raises(LayoutError, match=r"'a\.experts\.gate_up_proj': .*7"):
        apply_rules([("a.experts.gate_up_proj", np.ones((2, 7, 3)))], [FusedExperts()])


def make_module() -> Any:
    torch = pytest.importorskip("torch")
    module = torch.nn.Module()
    module.norm = torch.nn.BatchNorm1d(3)
    module.a = torch.nn.Linear(3, 3, bias=False)
    module.b = torch.nn.Linear(3, 3, bias=False)
    module.b.weight = module.a.weight
    return module


def test_parameters_with_tied_names_and_no_buffers_unless_a_rule_says_so() -> None:
    found = module_tensors(make_module(), [])
    assert names(found) == ["norm.weight", "norm.bias", "a.weight", "b.weight"]
    assert sorted(found.dropped) == [
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert not any(t.requires_grad for _, t in found.named)
    tied = dict(found.named)
    assert tied["a.weight"].data_ptr() == tied["b.weight"].data_ptr()


def test_included_buffers_take_part_and_may_be_renamed() -> None:
    rules = [Include(r".*running_.*"), Rename(r"^norm\.", "bn.")]
    found = module_tensors(make_module(), rules)
    assert names(found)[-2:] == ["bn.running_mean", "bn.running_var"]
    assert list(found.dropped) == ["norm.num_batches_tracked"]


def test_rules_for_fused_models() -> None:
    torch = pytest.importorskip("torch")
    module = make_module()
    assert rules_for(module) == ()
    module.mlp = torch.nn.Module()
    module.mlp.experts = torch.nn.Module()
    module.mlp.experts.gate_up_proj = torch.nn.Parameter(torch.ones(2, 4, 3))
    with pytest.raises(ConfigError, match=r"None; known: .*qwen2_moe, qwen3_moe.*FusedExperts"):
        rules_for(module)
    module.config = type("Config", (), {"model_type": "qwen3_moe"})
    assert rules_for(module) == (FusedExperts(),)
