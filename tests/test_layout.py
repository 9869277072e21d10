"""Layouts: what they refuse, how they resolve names, and that JSON keeps all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import LayoutError, ProtocolError, UnknownNameError, WeightSyncError
from weightsync.layout import NO_REGION, Layout, PlacedBox, Region, TensorLayout, join_layouts
from weightsync.tables import dense_strides
from weightsync.types import Box, RegionKind, SlotKind, TensorMeta, item_bytes


def placed(
    shape: tuple[int, ...],
    dtype: str = "float32",
    *,
    rank: int = 0,
    region: int = 0,
    offset: int = 0,
) -> PlacedBox:
    strides = dense_strides(shape, item_bytes(dtype))
    return PlacedBox(rank, Box.whole(shape), region, offset, strides, dtype)


def tensor(name: str, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> TensorLayout:
    return TensorLayout(name, (TensorMeta(name, dtype, shape),), (placed(shape, dtype),))


def layout(*names: str, aliases: dict[str, str] | None = None) -> Layout:
    return Layout(1, tuple(tensor(n) for n in names), ((Region(24),),), aliases or {})


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world_size = draw(st.integers(1, 3))
    kinds = st.sampled_from(list(RegionKind))
    regions = tuple(
        tuple(
            Region(
                draw(st.integers(2**16, 2**40)),
                draw(kinds),
                draw(st.sampled_from(["cpu", "cuda:1"])),
            )
            for _ in range(draw(st.integers(1, 3)))
        )
        for _ in range(world_size)
    )
    tensors = []
    for name in draw(st.lists(st.text(max_size=8), max_size=4, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtypes = draw(
            st.lists(st.sampled_from(["bfloat16", "float32", "int8"]), min_size=1, unique=True)
        )
        boxes = []
        for _ in range(draw(st.integers(0, 3))):
            rank = draw(st.integers(0, world_size - 1))
            region = draw(st.integers(0, len(regions[rank]) - 1))
            offset = draw(st.integers(0, 1000))
            boxes.append(placed(shape, dtypes[0], rank=rank, region=region, offset=offset))
        forms = tuple(TensorMeta(name, d, shape) for d in dtypes)
        tensors.append(
            TensorLayout(name, forms, tuple(boxes), draw(st.sampled_from(list(SlotKind))))
        )
    aliases = {}
    if tensors:
        names = {t.name for t in tensors}
        for alias in draw(st.lists(st.text(max_size=8), max_size=2, unique=True)):
            if alias not in names:
                aliases[alias] = tensors[0].name
    return Layout(world_size, tuple(tensors), regions, aliases)


@given(layouts())
def test_json_is_an_exact_inverse(one: Layout) -> None:
    back = Layout.from_json(json.loads(json.dumps(one.to_json())))
    assert back == one
    assert back.digest == one.digest


def mutations(value: Any) -> list[Any]:
    """The value with each leaf replaced by each piece of nonsense, and with each key removed."""
    found: list[Any] = []
    if isinstance(value, dict):
        for key in value:
            found.append({k: v for k, v in value.items() if k != key})
            found += [{**value, key: m} for m in mutations(value[key])]
    elif isinstance(value, list | tuple):
        for i in range(len(value)):
            found.append([*value[:i], *value[i + 1 :]])
            found += [[*value[:i], m, *value[i + 1 :]] for m in mutations(value[i])]
    found += [None, "x", -1, 2.5e300, float("inf"), float("nan"), [[]], {"a": 1}, 10**40]
    return found


def test_malformed_json_raises_only_our_errors() -> None:
    good = json.loads(json.dumps(layout("a", "b", aliases={"c": "a"}).to_json()))
    cases = mutations(good)
    assert len(cases) > 200
    for bad in cases:
        try:
            Layout.from_json(bad)
        except (ProtocolError, LayoutError):
            continue


def test_a_layout_checks_itself() -> None:
    a = tensor("a")
    region = ((Region(24),),)
    cases: list[tuple[str, Any]] = [
        ("lists of regions", lambda: Layout(2, (a,), region)),
        ("listed twice", lambda: Layout(1, (a, a), region)),
        ("alias 'b' of 'x'", lambda: Layout(1, (a,), region, {"b": "x"})),
        ("alias 'a'", lambda: Layout(1, (a,), region, {"a": "a"})),
        ("rank 1 of 1", lambda: Layout(1, (replace(a, placed=(placed((2, 3), rank=1),)),), region)),
        (
            "no region 1",
            lambda: Layout(1, (replace(a, placed=(placed((2, 3), region=1),)),), region),
        ),
        (
            "bytes 4:28",
            lambda: Layout(1, (replace(a, placed=(placed((2, 3), offset=4),)),), region),
        ),
        (
            "no region -1",
            lambda: Layout(1, (replace(a, placed=(placed((2, 3), region=-1),)),), region),
        ),
        ("no wire form", lambda: replace(a, wire_forms=())),
        ("does not fit shape", lambda: replace(a, placed=(placed((3, 3)),))),
        ("does not fit shape", lambda: replace(a, placed=(placed((2,)),))),
        (
            "wire form",
            lambda: replace(a, wire_forms=(*a.wire_forms, TensorMeta("a", "int8", (6,)))),
        ),
        ("wire form", lambda: replace(a, wire_forms=(TensorMeta("b", "int8", (2, 3)),))),
    ]
    for words, make in cases:
        with pytest.raises(LayoutError, match=words):
            make()


def test_negative_strides_reach_back() -> None:
    back = PlacedBox(0, Box.whole((3,)), 0, 8, (-4,), "float32")
    entry = TensorLayout("a", (TensorMeta("a", "float32", (3,)),), (back,))
    Layout(1, (entry,), ((Region(12),),))
    with pytest.raises(LayoutError, match="bytes -4:8"):
        Layout(1, (replace(entry, placed=(replace(back, offset_bytes=4),)),), ((Region(12),),))


def test_an_opaque_slot_needs_no_region() -> None:
    entry = replace(tensor("a"), placed=(placed((2, 3), region=NO_REGION),), kind=SlotKind.OPAQUE)
    assert Layout(1, (entry,), ((),)).tensors[0].kind is SlotKind.OPAQUE


def test_names_resolve_through_aliases() -> None:
    one = layout("embed", "norm", aliases={"head": "embed"})
    assert one.resolve(["head", "norm"], "engine") == ["embed", "norm"]
    assert one.canonical("nothing") is None
    with pytest.raises(UnknownNameError, match=r"'lm_head' .* of the engine; closest: 'head'"):
        one.resolve(["lm_head"], "engine")
    assert one.closest("zzzzzzzz") == "it has 3 names"


def test_the_digest_knows_everything_but_addresses() -> None:
    one = layout("a", "b")
    assert one.digest == layout("a", "b").digest
    others = [layout("a"), layout("b", "a"), layout("a", "b", aliases={"c": "a"})]
    assert len({o.digest for o in [one, *others]}) == 4


def test_all_errors_are_ours() -> None:
    assert issubclass(LayoutError, WeightSyncError)


# --- layouts of several ranks -----------------------------------------------------------------------


def of_rank(rank: int, world_size: int, *tensors: TensorLayout, **aliases: str) -> Layout:
    moved = (replace(t, placed=tuple(replace(p, rank=rank) for p in t.placed)) for t in tensors)
    regions = tuple((Region(24),) if r == rank else () for r in range(world_size))
    return Layout(world_size, tuple(moved), regions, aliases)


def test_ranks_join_in_their_order() -> None:
    second = of_rank(1, 2, tensor("a"), tensor("b"), tied="b")
    joined = join_layouts([of_rank(0, 2, tensor("a")), second])
    assert [t.name for t in joined.tensors] == ["a", "b"]
    assert [p.rank for p in joined.tensors[0].placed] == [0, 1]
    assert joined.aliases == {"tied": "b"}
    assert joined.regions == ((Region(24),), (Region(24),))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (of_rank(1, 2, tensor("a", (3, 2))), r"'a': ranks 0 and 1 disagree about its form"),
        (of_rank(1, 2, tensor("a"), tensor("b"), tied="b"), "rank 1 ties 'tied' to 'b'"),
        (of_rank(1, 3), "rank 1 declares a layout of 3 ranks, there are 2"),
    ],
)
def test_ranks_must_agree(second: Layout, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        join_layouts([of_rank(0, 2, tensor("a"), tied="a"), second])
