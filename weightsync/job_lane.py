"""Who runs work on bytes: one job at a time, on a thread for it, in ``poll``, or by whoever asked.

To wake a thread for a job, and be woken by it, takes longer than most jobs of a small update. So a
thread that is about to wait for what it asks may lend itself: the job that comes of it then runs there.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Job = Callable[[], None]


class JobLane:
    """Jobs start in the order of ``put``; no two run at once."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lane = threading.RLock()  # held by whoever runs a job, which may poll for another
        self._counting = threading.Lock()
        self._num_queued = 0  # of which none has begun
        self._own = threading.local()

    def put(self, job: Job) -> None:
        """Have a job run: by this very thread, if it lent itself and nothing is before it."""
        taken: deque[Job] | None = getattr(self._own, "taken", None)
        if taken is not None and (self._own.holds_lane or self._take_lane()):
            taken.append(job)
            return
        with self._counting:
            self._num_queued += 1
        self._queue.put(job)

    def _take_lane(self) -> bool:
        with self._counting:
            is_free = self._num_queued == 0 and self._lane.acquire(blocking=False)
        self._own.holds_lane = is_free
        return is_free

    @contextmanager
    def lending(self) -> Iterator[None]:
        """What the block puts runs when it ends, on this thread, and so does what comes of that."""
        self._own.taken, self._own.holds_lane = deque(), False
        try:
            yield
            while self._own.taken:
                self._own.taken.popleft()()
        finally:
            self._part()

    def _part(self) -> None:
        """What is left, because a job or the block was interrupted, is for others."""
        left, holds_lane = self._own.taken, self._own.holds_lane
        self._own.taken, self._own.holds_lane = None, False
        if holds_lane:
            self._lane.release()
        for job in left:
            self.put(job)

    def run_next(self, timeout_s: float | None = 0.0) -> bool:
        """Wait for a job (None: for ever) and run it on this thread; False if none came, or the end."""
        try:
            job = self._queue.get(block=timeout_s != 0.0, timeout=timeout_s)
        except queue.Empty:
            return False
        if job is None:
            return False
        with self._lane:
            with self._counting:
                self._num_queued -= 1
            job()
        return True

    def end(self) -> None:
        """One ``run_next`` that waits, or the next one, returns False."""
        self._queue.put(None)

    def wait_until_free(self, timeout_s: float) -> bool:
        """Whether no job runs, after at most so long."""
        if not self._lane.acquire(timeout=timeout_s):
            return False
        self._lane.release()
        return True
