"""A cache of things made once and used at every refit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, TypeVar

#: Plans, and what is made for each, that either side keeps.
NUM_KEPT: Final = 64

K = TypeVar("K")
V = TypeVar("V")


class Kept(Generic[K, V]):
    """A small cache, least recently used out first. Any thread may ask."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._items: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.RLock()
        self._num_kept = num_kept

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What is kept for ``key``, made now if nothing is; others wait meanwhile."""
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
            value = self._items[key] = make()
            while len(self._items) > self._num_kept:
                self._items.popitem(last=False)
            return value

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
