"""Whether tensors, and the module that holds them, are still the very same and where they were.

A model may have tens of thousands of small tensors, and this is asked at every refit, so the questions
are put to all of them at once: no line of Python runs for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

from weightsync.layouts.dtensor import dtensor_class, is_dtensor, local_part
from weightsync.native import same_objects, tensor_state


class Look(Enum):
    """How closely to look."""

    IDENTITY = "identity"  # the module holds the same tensor objects
    EVERYTHING = "everything"  # and each has its pointer, shape, strides and dtype


_ASKED = (
    methodcaller("data_ptr"), attrgetter("device"), attrgetter("dtype"), attrgetter("shape"),
    methodcaller("stride"),
)  # fmt: skip
_LAZY = (methodcaller("is_conj"), methodcaller("is_neg"))


def where(tensors: Sequence[Any]) -> object:
    """Where torch tensors lie, and as what dtype, shape and strides: equal if all of these are.

    Of a DTensor: where its local tensor lies, and what mesh and placements make of it.
    """
    listed = list(tensors)
    if _has_dtensors(listed):
        specs = [t._spec for t in listed if is_dtensor(t)]
        return [where(local_tensors_of(listed)), specs]
    exchange = getattr(type(listed[0]), "__dlpack_c_exchange_api__", None) if listed else None
    if exchange is not None:
        with suppress(BufferError, RuntimeError, TypeError):  # some tensor has no word in DLPack
            return tensor_state(exchange, listed)
    return [list(map(ask, listed)) for ask in _ASKED]


def local_tensors_of(tensors: Sequence[Any]) -> list[Any]:
    """The local tensor of every DTensor; all others as they are."""
    if not _has_dtensors(tensors):
        return list(tensors)
    return [local_part(t) if is_dtensor(t) else t for t in tensors]


def _has_dtensors(tensors: Sequence[Any]) -> bool:
    kind = dtensor_class()
    return kind is not None and any(issubclass(k, kind) for k in set(map(type, tensors)))


def laziness(tensors: Sequence[Any]) -> object:
    """Which of them are conjugates or negatives that nobody has computed yet."""
    listed = local_tensors_of(tensors)
    return [list(map(ask, listed)) for ask in _LAZY]


class ModuleWatch:
    """A ``torch.nn.Module`` and all that hangs in it: submodules, parameters and buffers."""

    def __init__(self, module: Any) -> None:
        modules = list(module.modules())
        self._children = [m._modules for m in modules if m._modules]
        self._held = [h for m in modules for h in (m._parameters, m._buffers) if h]
        # Dictionaries that are empty now must stay so; most are, and need no list of their own.
        self._empty = [h for m in modules for h in (m._modules, m._parameters, m._buffers) if not h]
        self._submodules = list(self._listed(self._children))
        self._keys = list(chain.from_iterable(self._held))
        self._objects = list(self._listed(self._held))
        self._tensors = [t for t in self._objects if t is not None]
        self._where = where(self._tensors)

    @staticmethod
    def _listed(dicts: Sequence[dict[str, Any]]) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, dicts))

    def has_changed(self, look: Look) -> bool:
        """Whether anything was replaced, added or removed, or (everything) has moved."""
        is_same = (
            not any(self._empty)
            and same_objects(list(self._listed(self._children)), self._submodules)
            and same_objects(list(self._listed(self._held)), self._objects)
            and list(chain.from_iterable(self._held)) == self._keys
        )
        if not is_same:
            return True
        return look is Look.EVERYTHING and where(self._tensors) != self._where
