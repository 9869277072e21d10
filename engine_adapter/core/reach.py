"""Every tensor that can be reached from an object, by which path, and who holds it."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

_LEAVES = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType,
    torch.dtype, torch.device, range,
)  # fmt: skip


class Held(NamedTuple):
    """``value`` as ``key`` (an attribute, index or mapping's key) of ``holder``."""

    path: str
    value: Any
    holder: Any
    key: Any

    def is_still_held(self) -> bool:
        """Whether the holder shows this very object; what a closure holds cannot be told."""
        try:
            if isinstance(self.holder, Mapping | list | tuple):
                return self.holder[self.key] is self.value
            if isinstance(self.holder, types.FunctionType | set | frozenset):
                return True
            return getattr(self.holder, self.key) is self.value
        except (AttributeError, IndexError, KeyError):
            return False


def reachable_tensors(root: Any, skip: tuple[type, ...] = ()) -> Iterator[Held]:
    """Every tensor once; objects of the types ``skip`` are not entered.

    Follows attributes, slots, mappings, sequences, sets, partials, bound methods and closures.
    """
    seen: set[int] = set()
    pending = [Held(type(root).__name__, root, [root], 0)]
    while pending:
        held = pending.pop()
        value = held.value
        if isinstance(value, (*_LEAVES, *skip)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield held
        else:
            pending.extend(_children(held.path, value))


def _children(path: str, held: Any) -> Iterator[Held]:
    if isinstance(held, Mapping):
        for key, value in held.items():
            yield Held(f"{path}[{key!r}]", value, held, key)
    elif isinstance(held, list | tuple | set | frozenset):
        for i, value in enumerate(held):
            yield Held(f"{path}[{i}]", value, held, i)
    elif isinstance(held, partial):
        for name in ("func", "args", "keywords"):
            yield Held(f"{path}.{name}", getattr(held, name), held, name)
    elif isinstance(held, types.MethodType):
        yield Held(f"{path}.__self__", held.__self__, held, "__self__")
    elif isinstance(held, types.FunctionType):
        names = held.__code__.co_freevars
        for name, cell in zip(names, held.__closure__ or (), strict=True):
            try:
                yield Held(f"{path}.<{name}>", cell.cell_contents, held, name)
            except ValueError:  # a name that is not bound yet
                continue
        yield Held(f"{path}.__defaults__", held.__defaults__, held, "__defaults__")
    else:
        yield from _attributes(path, held)


def _attributes(path: str, held: Any) -> Iterator[Held]:
    for name, value in getattr(held, "__dict__", {}).items():
        yield Held(f"{path}.{name}", value, held, name)
    for kind in type(held).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(held, name):
                yield Held(f"{path}.{name}", getattr(held, name), held, name)
