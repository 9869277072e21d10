"""A look at an engine's tensors that is taken while their bytes move.

It holds the interpreter lock for milliseconds if they are many. A thread of its own would keep whoever
launches a copy on a device from doing so for as long, so there the look is taken by that very thread, once
the device is at work; copies by the host's own threads leave the lock alone, and a thread aside suits them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager


class Glance:
    """One look, taken once: by the first to say how. Without any, nothing is done."""

    def __init__(self, look: Callable[[], None] | None, aside: ThreadPoolExecutor) -> None:
        self._look, self._aside = look, aside
        self._lock = threading.Lock()
        self._future: Future[None] | None = None

    def take_aside(self) -> None:
        """Begin to look, on a thread for it."""
        if self._look is None:
            return
        with self._lock:
            if self._future is None:
                self._future = self._aside.submit(self._look)

    def take_here(self) -> None:
        """Look now; what is found is raised by :meth:`around`."""
        if self._look is None:
            return
        with self._lock:
            if self._future is not None:
                return
            found = self._future = Future()
        try:
            self._look()
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(None)

    @contextmanager
    def around(self) -> Iterator[Glance]:
        """Until the end of the block, and not longer. Raises what the look found, unless the block raised."""
        try:
            yield self
            self.take_here()
        finally:
            if self._future is not None:
                wait([self._future])
        if self._future is not None:
            self._future.result()
