"""Work on bytes runs one at a time, in order, and on the thread that lent itself if it may."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from weightsync.job_lane import JobLane

LIMIT_S = 10.0


class Worker:
    """A lane with a thread of its own."""

    def __init__(self) -> None:
        self.lane = JobLane()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.lane.run_next(None):
            pass

    def end(self) -> None:
        self.lane.end()
        self.thread.join(timeout=LIMIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


class Seen:
    """Which jobs ran, and on which threads."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[threading.Thread] = []
        self._changed = threading.Condition()

    def note(self, name: str) -> None:
        with self._changed:
            self.names.append(name)
            self.threads.append(threading.current_thread())
            self._changed.notify_all()

    def wait_for(self, num_jobs: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.names) >= num_jobs, LIMIT_S)


def test_without_lending_the_lanes_own_thread_works(worker: Worker) -> None:
    seen = Seen()
    for name in "abc":
        worker.lane.put(lambda name=name: seen.note(name))  # type: ignore[misc]
    seen.wait_for(3)
    assert seen.names == ["a", "b", "c"]
    assert set(seen.threads) == {worker.thread}


def test_who_lends_itself_works_after_the_block_and_does_what_comes_of_it(worker: Worker) -> None:
    seen = Seen()

    def place() -> None:
        seen.note("place")
        worker.lane.put(lambda: seen.note("resume"))

    with worker.lane.lending():
        worker.lane.put(place)
        assert seen.names == [], "whoever puts a job may hold locks"
    assert seen.names == ["place", "resume"]
    assert set(seen.threads) == {threading.current_thread()}
    worker.lane.put(lambda: seen.note("later"))
    seen.wait_for(3)
    assert seen.threads[-1] is worker.thread, "the loan is over with its block"


def test_a_job_that_runs_is_not_joined_by_another(worker: Worker) -> None:
    seen, begun, go = Seen(), threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        assert go.wait(LIMIT_S)
        seen.note("long")

    worker.lane.put(long)
    assert begun.wait(LIMIT_S)
    with worker.lane.lending():
        worker.lane.put(lambda: seen.note("lent"))
    assert seen.names == []
    assert not worker.lane.wait_until_free(0.0)
    go.set()
    seen.wait_for(2)
    assert seen.names == ["long", "lent"]
    assert set(seen.threads) == {worker.thread}
    assert worker.lane.wait_until_free(LIMIT_S)


def test_what_waits_is_not_overtaken() -> None:
    """Nobody has begun the first one: there is no thread yet."""
    lane, seen = JobLane(), Seen()
    lane.put(lambda: seen.note("first"))
    with lane.lending():
        lane.put(lambda: seen.note("second"))
    assert seen.names == []
    assert lane.run_next()
    assert lane.run_next()
    assert not lane.run_next()
    assert seen.names == ["first", "second"]


def test_an_interrupted_loan_leaves_its_work_to_others(worker: Worker) -> None:
    seen = Seen()

    def interrupted() -> None:
        with worker.lane.lending():
            worker.lane.put(lambda: seen.note("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    seen.wait_for(1)
    assert seen.threads == [worker.thread]

    def stop() -> None:
        worker.lane.put(lambda: seen.note("b"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), worker.lane.lending():
        worker.lane.put(stop)
    seen.wait_for(2)
    assert seen.threads == [worker.thread] * 2


def test_a_job_may_poll_for_the_next() -> None:
    lane, seen = JobLane(), Seen()

    def outer() -> None:
        seen.note("outer")
        assert lane.run_next()

    lane.put(outer)
    lane.put(lambda: seen.note("inner"))
    assert lane.run_next()
    assert seen.names == ["outer", "inner"]
