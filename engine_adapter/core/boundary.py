"""Calls from other threads, run between two steps of the engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from weightsync.deadline import Deadline

Result = TypeVar("Result")

_POLL_S = 0.002


class _Call:
    """Runs once, or is given up before it began."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_given_up = False
        self.is_done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        with self._lock:
            self._has_begun = True
        if not self._is_given_up:
            try:
                self.result = self._function()
            except BaseException as error:  # raised again where the call was made
                self.error = error
        self.is_done.set()

    def give_up(self) -> bool:
        """False if it has begun: then it counts."""
        with self._lock:
            self._is_given_up = not self._has_begun
            return self._is_given_up


class StepBoundary:
    """Whoever drives the engine holds ``step()`` around each step; calls wait for the gap.

    A call runs on the driver's thread, at the beginning of its next step, or on the caller's own if
    nobody drives. ``agree`` makes boundaries common to the ranks of an engine: given how many calls
    wait here, it returns how many to run, the same on every rank. Every rank must make the same
    calls in the same order, and a call that was given up keeps its place. With several ranks, one
    thread of each drives and calls: a thread that comes back by itself, or the only one there is.
    ``before`` runs at a boundary at which there are calls, ahead of them.
    """

    def __init__(
        self,
        agree: Callable[[int], int] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._agree, self._before = agree, before
        self._calls: deque[_Call] = deque()
        self._lock = threading.Lock()  # held during a step
        self._holder: int | None = None
        self._changed = threading.Condition()
        self.has_driver = False  # a thread that comes back by itself

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step: first runs the calls that wait."""
        with self._lock:
            self._holder = threading.get_ident()
            try:
                self._run_calls()
                yield
            finally:
                self._holder = None

    def call(self, function: Callable[[], Result], deadline: Deadline) -> Result:
        """Run ``function`` between two steps and return what it returns or raise what it raises.

        Raises :class:`DeadlineError` if no step ended in time; the function is then not run.
        """
        if self._holder == threading.get_ident():
            return function()
        call = _Call(function)
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()
        try:
            self._wait(call, deadline)
        except BaseException:
            # One that has begun counts: what it did is what is said, if it ends in as much time again.
            if call.give_up() or not call.is_done.wait(deadline.limit_s):
                raise
        if call.error is not None:
            raise call.error
        result: Result = call.result
        return result

    def _wait(self, call: _Call, deadline: Deadline) -> None:
        while not call.is_done.is_set():
            self._drive()
            if not call.is_done.wait(_POLL_S):
                deadline.check()

    def until(self, is_so: Callable[[], bool], deadline: Deadline) -> None:
        """Wait for what is decided at a boundary, driving it if nobody else does."""
        while not is_so():
            self._drive()
            if not is_so():
                deadline.check()
                time.sleep(deadline.slice_s(_POLL_S))

    def alone(self, function: Callable[[], Result], deadline: Deadline) -> Result:
        """Run ``function`` while no step runs, without the other ranks' agreement: for what no step can
        see before they have all agreed to go on."""
        if self._holder == threading.get_ident():
            return function()
        while not self._lock.acquire(timeout=deadline.slice_s()):
            deadline.check()
        self._holder = threading.get_ident()
        try:
            return function()
        finally:
            self._holder = None
            self._lock.release()

    def _drive(self) -> None:
        """A boundary of our own, if nobody drives."""
        if self.has_driver or not self._lock.acquire(blocking=False):
            return
        self._holder = threading.get_ident()
        try:
            self._run_calls()
        finally:
            self._holder = None
            self._lock.release()

    def wait_for_work(self, limit_s: float) -> None:
        """Sleep until a call arrives or :meth:`wake`, at most ``limit_s`` seconds."""
        with self._changed:
            if not self._calls:
                self._changed.wait(limit_s)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run_calls(self) -> None:
        with self._changed:
            count = len(self._calls)
        if self._agree is not None:
            count = self._agree(count)
        if count and self._before is not None:
            self._before()
        for _ in range(count):
            self._calls.popleft().run()
