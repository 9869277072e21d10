"""Ranks' own tensors declared as boxes: stages, experts, hand-written tensor parallel, padding."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed_ranks import Whole, collect
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import ConfigError, LayoutError
from weightsync.layouts import (
    BoxRule,
    InTurn,
    LocalPart,
    Renumber,
    Sharded,
    ShardRule,
    check_layout,
)
from weightsync.naming import Drop, FusedExperts, Rename, Rule, apply_rules
from weightsync.sources import ModuleSource, NamedSource
from weightsync.tensors import LocalTensors, local_tensors
from weightsync.types import CastPolicy

Array = np.ndarray[Any, Any]


def number(*shape: int, start: int = 0) -> Array:
    return np.arange(start, start + math.prod(shape), dtype=np.float32).reshape(shape)


def gathered(
    size: int, named: Callable[[int], list[tuple[str, Any]]], rules: Callable[[int], Sequence[Rule]]
) -> Whole:
    """Every rank's tensors through its rules; the arrays stay alive until all were read."""
    whole = Whole()
    for rank in range(size):
        source = NamedSource(rules(rank), CastPolicy.STRICT, rank, size)
        listed = named(rank)
        whole.add(source.collect(listed)[0])
    check_layout(whole.layout)
    return whole


@settings(max_examples=60, deadline=None)
@given(
    extent=st.integers(1, 17),
    count=st.integers(1, 5),
    dim=st.integers(-2, 1),
    extra=st.integers(0, 2),
)
def test_parts_with_padding_are_the_whole(extent: int, count: int, dim: int, extra: int) -> None:
    shape = [3, 3]
    shape[dim] = extent
    table = number(*shape)
    size = -(-extent // count) + extra
    filled = np.pad(table, [(0, size * count - extent if d == dim % 2 else 0) for d in range(2)],
                    constant_values=-1.0)  # fmt: skip
    parts = np.split(filled, count, axis=dim)
    whole = gathered(
        count,
        lambda rank: [("local.w", parts[rank])],
        lambda rank: [ShardRule(r"local\.(w)", dim, rank, count, extent, r"whole.\1")],
    )
    whole.check({"whole.w": table})


def test_experts_numbered_from_0_on_every_rank_and_layers_on_every_stage() -> None:
    weights = {
        f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": number(4, 2, start=100 * i + 10 * e)
        for i in range(4)
        for e in range(6)
    }

    def named(rank: int) -> list[tuple[str, Any]]:
        stage, ep = divmod(rank, 3)
        return [
            (f"model.layers.{i}.mlp.experts.{e}.up_proj.weight",
             weights[f"model.layers.{2 * stage + i}.mlp.experts.{2 * ep + e}.up_proj.weight"])
            for i in range(2) for e in range(2)
        ]  # fmt: skip

    def rules(rank: int) -> list[Rule]:
        stage, ep = divmod(rank, 3)
        first = [2 * ep, 2 * ep + 1]
        return [
            InTurn(
                [Renumber(r"\.layers\.(\d+)\.", 2 * stage)],
                [Renumber(r"\.experts\.(\d+)\.", first)],
            )
        ]

    gathered(6, named, rules).check(weights)


def test_a_local_stack_of_experts() -> None:
    gate_up, down = number(6, 8, 3), number(6, 3, 4, start=1000)
    expected = dict(
        apply_rules(
            [("mlp.experts.gate_up_proj", gate_up), ("mlp.experts.down_proj", down)],
            [FusedExperts()],
        ).named
    )
    parts = {"gate_up_proj": np.split(gate_up, 3), "down_proj": np.split(down, 3)}
    whole = gathered(
        3,
        lambda rank: [(f"mlp.experts.{p}", parts[p][rank]) for p in parts],
        lambda rank: [FusedExperts(first_expert=2 * rank)],
    )
    whole.check(expected)


def test_interleaved_heads_and_halves_as_boxes() -> None:
    """A fused tensor of two groups of (queries, key), transposed, on two ranks."""
    q, k = number(8, 3), number(4, 3, start=500)

    def local(rank: int) -> list[tuple[str, Any]]:
        group = np.concatenate([q[4 * rank : 4 * rank + 4], k[2 * rank : 2 * rank + 2]])
        return [("attn.qk", np.ascontiguousarray(group.T))]

    def boxes(rank: int) -> Callable[[Any, tuple[int, ...]], list[LocalPart]]:
        def of(match: Any, shape: tuple[int, ...]) -> list[LocalPart]:
            assert shape == (3, 6)
            cut = slice(None)
            return [
                LocalPart("attn.q", (8, 3), (4 * rank, 0), (cut, slice(0, 2)), is_transposed=True),
                LocalPart(
                    "attn.q", (8, 3), (4 * rank + 2, 0), (cut, slice(2, 4)), is_transposed=True
                ),
                LocalPart("attn.k", (4, 3), (2 * rank, 0), (cut, slice(4, 6)), is_transposed=True),
            ]

        return of

    whole = gathered(2, local, lambda rank: [BoxRule(r"attn\.qk", boxes(rank))])
    whole.check({"attn.q": q, "attn.k": k})


def test_files_that_are_fused_from_tensors_that_are_not() -> None:
    """Three local tensors are boxes of one."""
    q, k, v = number(4, 3), number(2, 3, start=50), number(2, 3, start=90)
    start = {"q": 0, "k": 4, "v": 6}

    def boxes(match: Any, shape: tuple[int, ...]) -> list[LocalPart]:
        return [LocalPart("qkv_proj.weight", (8, 3), (start[match[1]], 0))]

    named = [(f"{n}_proj.weight", t) for n, t in (("q", q), ("k", k), ("v", v))]
    whole = gathered(1, lambda _: named, lambda _: [BoxRule(r"(\w)_proj\.weight", boxes)])
    whole.check({"qkv_proj.weight": np.concatenate([q, k, v])})


@pytest.mark.filterwarnings("ignore")
def test_hand_written_tensor_parallel_under_fsdp() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    table = torch.arange(66.0).reshape(11, 6)
    alive = []

    def one(rank: int) -> LocalTensors:
        tp = rank % 2  # sharded again over the ranks of the same number
        module = torch.nn.Linear(3, 11, bias=False)
        module.weight.data.copy_(table[:, 3 * tp : 3 * tp + 3])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))["fsdp"]
        fully_shard(module, mesh=mesh)
        alive.append(module)
        rules = [ShardRule("weight", 1, tp, 2)]
        return ModuleSource(rules, CastPolicy.STRICT, rank, 4).collect(module)[0]

    whole = collect(4, one)
    whole.check({"weight": table})
    check_layout(whole.layout)


def test_a_stage_that_drops_is_listed() -> None:
    rules = [InTurn([Rename("^a", "b")], [Drop("b.*", "not wanted")])]
    found = apply_rules([("a", number(1)), ("c", number(1))], rules)
    assert ([n for n, _ in found.named], list(found.dropped)) == (["c"], ["a"])


# --- a part of a tensor, sliced -----------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_slices_of_a_part_are_parts_of_slices(data: st.DataObject) -> None:
    shape = (4, 5, 6)
    whole = number(*shape)
    low = [data.draw(st.integers(0, n)) for n in shape]
    high = [data.draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True)]
    held = tuple(map(slice, low, high))
    part = Sharded.whole(whole[held]).within(shape, low)
    keys = tuple(
        data.draw(
            st.one_of(st.integers(-n, n - 1), st.slices(n).filter(lambda s: s.step in (None, 1)))
        )
        for n in shape[: data.draw(st.integers(1, 3))]
    )
    mask = np.zeros(shape, bool)
    mask[held] = True
    cut, expected, seen = part[keys], whole[keys], mask[keys]
    assert cut.shape == expected.shape
    if cut.ndim > 1 and data.draw(st.booleans()):
        cut, expected, seen = (
            cut.transpose(-2, -1),
            expected.swapaxes(-2, -1),
            seen.swapaxes(-2, -1),
        )
    found = np.zeros(expected.shape, bool)
    for piece in cut.pieces:
        box = tuple(map(slice, piece.box.start, piece.box.stop))
        np.testing.assert_array_equal(piece.tensor, expected[box])
        found[box] = True
    np.testing.assert_array_equal(found, seen)


# --- refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ShardRule("w", 0, 2, 2), ConfigError, "part 2 of 2"),
        (lambda: ShardRule("(", 0, 0, 1), ConfigError, "regular expression"),
        (lambda: Renumber("layers", 1), ConfigError, "group"),
        (lambda: ShardRule("w", 3, 0, 1).apply("w", number(2)), LayoutError, "no dimension 3"),
        (lambda: ShardRule("w", 0, 0, 2, 9).apply("w", number(4)), LayoutError, "fewer than the 9"),
        (lambda: Renumber(r"(\d+)", [5]).apply("l.1", number(1)), LayoutError, "1 numbers"),
        (
            lambda: BoxRule("w", lambda m, s: [LocalPart("x", (2,), (1,))]).apply("w", number(2)),
            LayoutError,
            "outside",
        ),
        (
            lambda: BoxRule("w", lambda m, s: [LocalPart("x", (2, 2), (0, 0))]).apply(
                "w", number(2)
            ),
            LayoutError,
            "no box",
        ),
    ],
)
def test_declarations_that_cannot_be_are_refused(make: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_two_tensors_that_a_rule_makes_one_are_named() -> None:
    with pytest.raises(LayoutError, match="'a1' and 'a2' both become 'b'"):
        apply_rules([("a1", number(2)), ("a2", number(2))], [Rename(r"a\d", "b")])
    rules = [ShardRule(r"a\d", 0, 0, 2, name="b")]
    ruled = apply_rules([("a1", number(2)), ("a2", number(2))], rules)
    with pytest.raises(LayoutError, match=r"'b': two local tensors .* overlap"):
        local_tensors(ruled.named, world_size=2)


def test_parts_of_one_tensor_that_disagree_are_refused() -> None:
    parts = [
        Sharded.whole(number(2)).within((4,), (0,)),
        Sharded.whole(number(2)).within((5,), (2,)),
    ]
    with pytest.raises(LayoutError, match="'w': its parts disagree"):
        local_tensors([("w", part) for part in parts])


def test_a_rule_that_matches_nothing_is_an_error_where_one_rank_is_all() -> None:
    torch = pytest.importorskip("torch")
    module, rules = torch.nn.Linear(2, 2), [Rename("^bias", "b"), Rename("^wieght", "w")]
    with pytest.raises(ConfigError, match=r"1 of 2 rules match no name .*wieght"):
        ModuleSource(rules, CastPolicy.STRICT).collect(module)
    local, _ = ModuleSource(rules, CastPolicy.STRICT, 0, 2).collect(module)
    assert set(local.views) == {"weight", "b"}
    rules = [Rename("^bias", "b"), Drop("vision.*", "of models that have it")]
    local, _ = ModuleSource(rules, CastPolicy.STRICT).collect(module)
    assert set(local.views) == {"weight", "b"}


def test_the_examples_of_the_page_run_as_they_stand() -> None:
    pytest.importorskip("torch")
    page = Path(__file__).parents[1] / "docs" / "layouts.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(page), "exec"), {})
