"""Tensors and modules that are watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weightsync import watch
from weightsync.watch import Look, ModuleWatch, laziness, where

torch = pytest.importorskip("torch")


def module_of() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.BatchNorm1d(4)))


def replace_parameter(module: Any) -> None:
    module[0].weight = torch.nn.Parameter(module[0].weight.detach())


def replace_buffer(module: Any) -> None:
    module[1][0].running_mean = torch.zeros(4)


def add_parameter(module: Any) -> None:
    module[0].extra = torch.nn.Parameter(torch.zeros(1))


def add_first_parameter(module: Any) -> None:
    module.extra = torch.nn.Parameter(torch.zeros(1))


def remove_parameter(module: Any) -> None:
    del module[0].bias


def rename_parameter(module: Any) -> None:
    module[0].other = module[0].bias
    del module[0].bias


def forget_parameter(module: Any) -> None:
    module[0].bias = None


def replace_submodule(module: Any) -> None:
    module[0] = torch.nn.Linear(4, 4)


def add_submodule(module: Any) -> None:
    module.append(torch.nn.Identity())


def add_first_submodule(module: Any) -> None:
    module[0].inner = torch.nn.Identity()


def move_storage(module: Any) -> None:
    module[0].weight.data = module[0].weight.data.clone()


def transpose(module: Any) -> None:
    module[0].weight.data = module[0].weight.data.t()


def reshape(module: Any) -> None:
    module[0].weight.data = module[0].weight.data.view(2, 8)


def reinterpret(module: Any) -> None:
    module[0].weight.data = module[0].weight.data.view(torch.int32).view(torch.float32)[:2]


REPLACED = [
    replace_parameter, replace_buffer, add_parameter, add_first_parameter, remove_parameter,
    rename_parameter, forget_parameter, replace_submodule, add_submodule, add_first_submodule,
]  # fmt: skip
MOVED = [move_storage, transpose, reshape, reinterpret]


def test_values_are_not_looked_at() -> None:
    module = module_of()
    watch = ModuleWatch(module)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1.0)
    module.eval()
    for look in Look:
        assert not watch.has_changed(look)


@pytest.mark.parametrize("look", Look)
@pytest.mark.parametrize("change", REPLACED)
def test_what_is_replaced_shows_at_any_look(change: Callable[[Any], None], look: Look) -> None:
    module = module_of()
    watch = ModuleWatch(module)
    change(module)
    assert watch.has_changed(look)


@pytest.mark.parametrize("change", MOVED)
def test_what_has_moved_shows_at_a_close_look(change: Callable[[Any], None]) -> None:
    module = module_of()
    watch = ModuleWatch(module)
    change(module)
    assert watch.has_changed(Look.EVERYTHING)


def test_the_same_views_of_the_same_memory_are_equal() -> None:
    a, b = torch.zeros(2, 2), torch.zeros(4, dtype=torch.complex64)
    seen = where([a, b])
    assert where([a.detach(), b[:]]) == seen
    for others in ([b, a], [a], [a.t(), b], [a.view(4), b], [a.view(torch.int32), b]):
        assert where(others) != seen
    assert laziness([a, b]) == laziness([b, a])
    assert laziness([b.conj().imag]) != laziness([b.imag])
    assert laziness([b.conj()]) != laziness([b])


def test_both_ways_of_asking_see_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.zeros(4, 4)
    tensors = [
        a, a.t(), a[1:], a.view(16), a[:, :2], a.view(torch.int32), torch.zeros(0), a.sum(),
        torch.nn.Parameter(a), a.expand(3, 4, 4), a.clone(), a.to(torch.bfloat16),
        a.to(torch.float8_e4m3fn), a.to(torch.complex64),
    ]  # fmt: skip

    def equals() -> list[list[bool]]:
        states = [where([t]) for t in tensors]
        return [[left == right for right in states] for left in states]

    def refuse(*_: object) -> bytes:
        raise BufferError

    found = equals()
    monkeypatch.setattr(watch, "tensor_state", refuse)
    assert equals() == found
    assert sum(map(sum, found)) == len(tensors) + 2  # the parameter is the first one's memory
