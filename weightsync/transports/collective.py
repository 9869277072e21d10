"""What ``broadcast`` needs of a group of processes: gloo and NCCL both give it.

A group is made by all its members at once, each naming its seat. Rank 0 is the root of every broadcast:
the one that has the bytes. Nothing here is a framework's default group, and nothing ends a process.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, TypeVar

from weightsync.deadline import Deadline

T = TypeVar("T")

#: Raises what is known to have gone wrong elsewhere, while something is waited for.
Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place: rank 0 is the trainer's."""

    rank: int
    size: int


class Pending(ABC):
    """One broadcast under way."""

    @abstractmethod
    def wait(self, limit_s: float) -> bool:
        """Whether it was done within ``limit_s``. Raises :class:`TransportError` if it failed."""

    def settle(self, deadline: Deadline, check: Check) -> None:
        """Wait until it is done. Raises what failed, or what ``check`` raises."""
        while not self.wait(max(deadline.slice_s(), 1e-4)):
            check()
            deadline.check()


class Collective(ABC):
    """A group that exists. ``broadcast`` is called by one thread, ``abort`` by any."""

    #: For people: ``gloo``, ``NCCL 2.28.9``.
    name: str
    #: A broadcast that waits for the others occupies a device, and with it whoever waits for that.
    holds_device: bool
    #: What a copy into or out of a slot may take of a device beside broadcasts; 0 for all.
    max_copy_blocks: int = 0

    @abstractmethod
    def broadcast(self, ptr: int, num_bytes: int) -> Pending:
        """Start one, from the memory of rank 0 into that of all others; ``num_bytes > 0``.

        Every member starts the same ones in the same order. Does not wait. The memory is the
        group's until the broadcast is done.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the group: what is under way fails, here at once. Idempotent; never waits for a peer."""


def lost_of(lost: Callable[[], str | None], limit_s: float = 0.5) -> str | None:
    """Why a member is gone, after a broadcast failed: the death of a process closes one socket after
    the other, and this one may follow."""
    end_s = time.monotonic() + limit_s
    while (reason := lost()) is None and time.monotonic() < end_s:
        time.sleep(0.005)
    return reason


def run_aside(
    work: Callable[[], T], undo: Callable[[T], Any], deadline: Deadline, check: Check
) -> T:
    """``work`` on a thread of its own, for calls of others that know no cancelling.

    Raises what it raised, or, when ``deadline`` or ``check`` gives it up, that: what it makes later is
    undone.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weightsync-group", daemon=True).start()
    try:
        while True:
            try:
                return future.result(timeout=max(deadline.slice_s(), 1e-4))
            except FutureTimeout:
                if future.done():
                    raise
                check()
                deadline.check()
    except BaseException:
        future.add_done_callback(lambda f: None if f.exception() else undo(f.result()))
        raise
