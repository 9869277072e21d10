"""Calls between steps: by whom they run, and what a late one may still do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine_adapter.core.boundary import StepBoundary
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError

LIMIT_S = 30.0


def deadline(limit_s: float = LIMIT_S) -> Deadline:
    return Deadline(limit_s, peer="the engine", stage="step boundary")


class Caller:
    """A call from a thread of its own."""

    def __init__(
        self, boundary: StepBoundary, function: Any, waits: Deadline | None = None
    ) -> None:
        self.result: Any = None
        self.error: BaseException | None = None

        def run() -> None:
            try:
                self.result = boundary.call(function, waits or deadline())
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def test_without_a_driver_the_caller_runs_it() -> None:
    boundary = StepBoundary()
    assert boundary.call(threading.get_ident, deadline()) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        boundary.call(lambda: 1 // 0, deadline())


def test_a_driver_runs_calls_in_order_before_its_next_step() -> None:
    boundary, seen = StepBoundary(), []
    boundary.has_driver = True
    callers = []
    for number in range(3):
        callers.append(Caller(boundary, lambda n=number: seen.append((n, threading.get_ident()))))
        while len(boundary._calls) <= number:
            boundary.wait_for_work(0.01)
    assert not seen
    with boundary.step():
        assert seen == [(n, threading.get_ident()) for n in range(3)]
        assert boundary.call(lambda: "within", deadline()) == "within"
    for caller in callers:
        caller.join()


def test_no_call_runs_during_a_step() -> None:
    boundary = StepBoundary()
    with boundary.step():
        caller = Caller(boundary, lambda: "late", deadline(0.05))
        caller.join()
        assert isinstance(caller.error, DeadlineError)
    with boundary.step():  # the call keeps its place and does nothing
        assert not boundary._calls
    assert caller.result is None


def test_a_call_that_began_counts_although_its_time_ran_out() -> None:
    boundary = StepBoundary()
    boundary.has_driver = True
    has_begun, has_expired, may_end = threading.Event(), threading.Event(), threading.Event()
    has_looked = threading.Event()  # at the clock, after it ran out

    def slow() -> str:
        has_begun.set()
        assert may_end.wait(LIMIT_S)
        return "done"

    def clock() -> float:
        if not has_expired.is_set():
            return 0.0
        has_looked.set()
        return 1e6

    waits = Deadline(LIMIT_S, peer="the engine", stage="step boundary", clock=clock)
    caller = Caller(boundary, slow, waits)

    def drive() -> None:
        with boundary.step():
            pass

    while not boundary._calls:
        boundary.wait_for_work(0.01)
    driver = threading.Thread(target=drive)
    driver.start()
    assert has_begun.wait(LIMIT_S)
    has_expired.set()
    assert has_looked.wait(LIMIT_S)
    may_end.set()
    driver.join(LIMIT_S)
    caller.join()
    assert (caller.result, caller.error) == ("done", None)


def test_ranks_run_only_what_all_have_seen() -> None:
    seen: list[str] = []
    allowed = [0]
    boundary = StepBoundary(agree=lambda count: min(count, allowed[0]))
    boundary.has_driver = True
    callers = [Caller(boundary, lambda: seen.append("call"))]
    while not boundary._calls:
        boundary.wait_for_work(0.01)
    with boundary.step():
        assert not seen
    allowed[0] = 1
    with boundary.step():
        assert seen == ["call"]
    callers[0].join()


def test_sleepers_wake_for_a_call() -> None:
    boundary = StepBoundary()
    sleeper = threading.Thread(target=boundary.wait_for_work, args=(LIMIT_S,))
    sleeper.start()
    while sleeper.is_alive():
        boundary.wake()
        sleeper.join(0.001)
