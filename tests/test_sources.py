"""What a sender may be given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from weightsync.errors import ConfigError
from weightsync.naming import Drop, Rename
from weightsync.options import resolve_options
from weightsync.sources import (
    ModuleSource,
    NamedSource,
    chunks,
    listed_pairs,
    pairs,
    resolve_bucket,
)
from weightsync.types import CastPolicy, ContractChoice, PauseMode, Placement, VerifyMode


def test_an_automatic_bucket_is_small_and_others_are_as_asked() -> None:
    assert resolve_bucket("auto") == 64 * 2**20
    assert resolve_bucket("1MiB") == resolve_bucket(2**20) == 2**20
    with pytest.raises(ConfigError, match="size 'automatic'"):
        resolve_bucket("automatic")


def groups(named: Any, size: int, rules: Any = ()) -> list[list[str]]:
    return [[n for n, _ in c.named] for c in chunks(named, rules, size)]


def test_tensors_are_gathered_up_to_a_bucket() -> None:
    named = [(str(i), np.zeros(n, np.uint8)) for i, n in enumerate([400, 400, 400, 5000, 1, 0])]
    assert groups(iter(named), 1000) == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert groups(iter([]), 1000) == []
    assert groups(iter(named), 1000, [Drop("[0-3]", "x")]) == [["4", "5"]]
    assert groups(iter(named[:1]), 1000, [Rename("0", "z")]) == [["z"]]
    (only,) = chunks(iter(named), [Drop(".*", "why")], 1000)
    assert (only.named, len(only.dropped)) == ([], 6)


@pytest.mark.parametrize(
    "bad", [1, None, "ab", ("a",), (1, np.ones(1)), np.ones(2), ["a", np.ones(1)]]
)
def test_what_is_no_pair_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"\(name, tensor\) pairs"):
        list(chunks(iter([bad]), (), 100))


def test_a_generator_is_not_read_ahead_of_its_bucket() -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    def source() -> Iterator[tuple[str, Any]]:
        nonlocal most
        for i in range(20):
            array = np.zeros(100, np.uint8)
            alive.append(weakref.ref(array))
            most = max(most, sum(r() is not None for r in alive))
            yield str(i), array
            del array

    for chunk in chunks(source(), (), 300):
        assert len(chunk.named) <= 3
        del chunk
        gc.collect()
    assert most <= 5


# --- modules ----------------------------------------------------------------------------------------


def linear() -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Linear(4, 4)


def test_the_layout_of_a_module_is_kept_while_its_tensors_stay() -> None:
    module, source = linear(), ModuleSource(None, CastPolicy.STRICT)
    first = source.collect(module)
    with __import__("torch").no_grad():
        module.weight += 1
    assert source.collect(module) is first
    assert source.collect(linear()) is not first


def replace_weight(module: Any) -> None:
    import torch

    module.weight = torch.nn.Parameter(torch.ones(4, 4))


def transpose_data(module: Any) -> None:
    module.weight.data = module.weight.data.t()


def move_storage(module: Any) -> None:
    module.weight.data = module.weight.data.clone()


def cast(module: Any) -> None:
    module.half()


def rename(module: Any) -> None:
    weight = module.weight
    del module.weight
    module.matrix = weight


def tie(module: Any) -> None:
    module.other = module.weight


def add_buffer(module: Any) -> None:
    import torch

    module.register_buffer("scale", torch.ones(1))


@pytest.mark.parametrize(
    "change", [replace_weight, transpose_data, move_storage, cast, rename, tie, add_buffer]
)
def test_a_module_that_changed_is_looked_at_again(change: Any) -> None:
    module, source = linear(), ModuleSource(None, CastPolicy.STRICT)
    before, _ = source.collect(module)
    change(module)
    after, dropped = source.collect(module)
    expected, expected_dropped = ModuleSource(None, CastPolicy.STRICT).collect(module)
    assert after.layout == expected.layout
    assert [a.ptr for a in after.addresses] == [a.ptr for a in expected.addresses]
    assert dropped == expected_dropped
    assert before is not after


def test_lazy_views_are_resolved_anew_each_time() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Module()
    base = torch.ones(3, dtype=torch.complex64)
    module.w = torch.nn.Parameter(base.conj(), requires_grad=False)
    if not module.w.is_conj():
        pytest.skip("this torch resolves a parameter at once")
    source = ModuleSource(None, CastPolicy.STRICT)
    source.collect(module)
    base *= 2j
    local, _ = source.collect(module)
    assert local.views["w"].owner[0].item() == -2j


# --- mappings and lists -----------------------------------------------------------------------------


def tensors_of(**shapes: tuple[int, ...]) -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def test_a_new_state_dict_of_the_same_model_is_the_same_source() -> None:
    module, source = linear(), NamedSource((Drop("bias", "x"),), CastPolicy.STRICT)
    first, dropped = source.collect(list(module.state_dict().items()))
    again, dropped_again = source.collect(list(module.state_dict().items()))
    assert again.layout is first.layout
    assert again.addresses is first.addresses
    assert dropped == dropped_again == {"bias": "x"}


@pytest.mark.parametrize("how", ["name", "order", "memory", "transposed", "more", "fewer"])
def test_another_mapping_is_looked_at_again(how: str) -> None:
    named = tensors_of(a=(2, 2), b=(4,))
    source = NamedSource((), CastPolicy.STRICT)
    source.collect(list(named.items()))
    other = {
        "name": lambda: {"a": named["a"], "c": named["b"]},
        "order": lambda: {"b": named["b"], "a": named["a"]},
        "memory": lambda: {**named, "a": named["a"].clone()},
        "transposed": lambda: {**named, "a": named["a"].t()},
        "more": lambda: {**named, "c": named["b"].clone()},
        "fewer": lambda: {"a": named["a"]},
    }[how]()
    found, _ = source.collect(list(other.items()))
    expected, _ = NamedSource((), CastPolicy.STRICT).collect(list(other.items()))
    assert found.layout == expected.layout
    assert [a.ptr for a in found.addresses] == [a.ptr for a in expected.addresses]


def test_no_tensor_of_a_mapping_is_kept_alive() -> None:
    named = tensors_of(a=(2,))
    source = NamedSource((), CastPolicy.STRICT)
    source.collect(list(named.items()))
    alive = weakref.ref(named["a"])
    named.clear()
    gc.collect()
    assert alive() is None


def test_arrays_are_looked_at_each_time() -> None:
    source = NamedSource((), CastPolicy.STRICT)
    array = np.zeros(3, np.float32)
    first, _ = source.collect([("a", array)])
    again, _ = source.collect([("a", array)])
    assert first.layout == again.layout
    assert again.views["a"].owner is array


def test_lazy_views_of_a_mapping_are_resolved_anew_each_time() -> None:
    torch = pytest.importorskip("torch")
    source = NamedSource((), CastPolicy.STRICT)
    base = torch.ones(3, dtype=torch.complex64)
    source.collect([("w", base.conj())])
    base *= 2j
    local, _ = source.collect([("w", base.conj())])
    assert local.views["w"].owner[0].item() == -2j


def test_a_module_is_forgotten_when_it_is_told() -> None:
    module, source = linear(), ModuleSource(None, CastPolicy.STRICT)
    source.collect(module)
    alive = weakref.ref(module.weight)
    source.forget()
    del module
    gc.collect()
    assert alive() is None


# --- options ----------------------------------------------------------------------------------------


def test_options_are_words_or_enums() -> None:
    o = resolve_options(
        2**20,
        placement="in_place",
        contract="direct",
        verify="read",
        pause_mode="abort",
        cast="strict",
    )
    assert (o.placement, o.contract, o.verify) == (
        Placement.IN_PLACE,
        ContractChoice.DIRECT,
        VerifyMode.READ,
    )
    assert (o.pause_mode, o.cast) == (PauseMode.ABORT, CastPolicy.STRICT)
    assert resolve_options(2**20).num_threads >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": "sideways"}, "placement='sideways'; known: staged, in_place"),
        ({"plaecment": "staged"}, "plaecment.*known: bucket_bytes"),
        ({"lease_s": 0}, "lease_s=0"),
        ({"deadline_s": float("nan")}, "deadline_s=nan"),
        ({"request_timeout_s": 10**9}, "request_timeout_s"),
        ({"commit_timeout_s": -1}, "commit_timeout_s"),
        ({"connect_timeout_s": float("inf")}, "connect_timeout_s"),
        ({"num_slots": 0}, "num_slots=0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_options(2**20, **options)
    with pytest.raises(ConfigError, match="bucket of 100 B"):
        resolve_options(100)


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_pairs_that_are_looked_at_together(kind: Any) -> None:
    """The same as one by one, whatever they come in."""

    class Name(str):
        __slots__ = ()

    good = [("a", 1), (Name("b"), 2), ("c", None)]
    assert listed_pairs(kind(good)) == list(pairs(good)) == good
    assert listed_pairs(kind([])) == []
    for wrong in ([("a", 1), ("b",)], [("a", 1), ("b", 2, 3)], [(1, 2)], [["a", 1]], ["ab"], [()]):
        with pytest.raises(ConfigError, match=r"\(name, tensor\) pairs"):
            listed_pairs(kind(wrong))
    with pytest.raises(ConfigError, match="int cannot be sent"):
        listed_pairs(3)
