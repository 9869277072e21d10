"""Every tensor that can be reached from an object, and by which path."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

_LEAVES = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType,
    torch.dtype, torch.device, range,
)  # fmt: skip


def reachable_tensors(root: Any, skip: tuple[type, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor), each object once; objects of the types ``skip`` are not entered.

    Follows attributes, slots, mappings, sequences, sets, partials, bound methods and closures.
    """
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while pending:
        path, held = pending.pop()
        if isinstance(held, (*_LEAVES, *skip)) or id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, torch.Tensor):
            yield path, held
        else:
            pending.extend(_children(path, held))


def _children(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(held, Mapping):
        for key, value in held.items():
            yield f"{path}[{key!r}]", value
    elif isinstance(held, list | tuple | set | frozenset):
        for i, value in enumerate(held):
            yield f"{path}[{i}]", value
    elif isinstance(held, partial):
        yield f"{path}.func", held.func
        yield f"{path}.args", held.args
        yield f"{path}.keywords", held.keywords
    elif isinstance(held, types.MethodType):
        yield f"{path}.__self__", held.__self__
    elif isinstance(held, types.FunctionType):
        names = held.__code__.co_freevars
        for name, cell in zip(names, held.__closure__ or (), strict=True):
            try:
                yield f"{path}.<{name}>", cell.cell_contents
            except ValueError:  # a name that is not bound yet
                continue
        yield f"{path}.__defaults__", held.__defaults__
    else:
        yield from _attributes(path, held)


def _attributes(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(held, "__dict__", {}).items():
        yield f"{path}.{name}", value
    for kind in type(held).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(held, name):
                yield f"{path}.{name}", getattr(held, name)
