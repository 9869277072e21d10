"""Filling the slots of streams: for each target by itself, or once for all that get the same bytes.

Where a transport streams to many, engines of one move find each other in a :class:`FillMeeting`: those of
their ranks whose slots are equal, byte for byte, become one group, filled and sent once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from weightsync.deadline import CancelToken, Deadline
from weightsync.errors import CancelledError, WeightSyncError
from weightsync.faults import reach
from weightsync.slot_pack import SlotPack
from weightsync.transports.base import (
    GroupSource,
    RingOptions,
    SlotHeader,
    SourceEndpoint,
    StreamSource,
    Transport,
)

Spent = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class FillJob:
    """One target's slots of one move."""

    engine: int
    target: int
    end: SourceEndpoint
    packs: Sequence[SlotPack]
    ring: RingOptions
    session_id: str
    move_id: int
    deadline: Deadline
    is_shared: bool  # the transport streams to many

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for targets that get the same bytes in the same slots, and can be sent them at once."""
        alone = () if self.is_shared else (self.engine, self.target)
        return (self.ring, alone, *(pack.identity for pack in self.packs))

    def header(self, sequence: int) -> SlotHeader:
        pack = self.packs[sequence]
        is_last = sequence == len(self.packs) - 1
        return SlotHeader(
            self.session_id, self.move_id, sequence, pack.data_bytes, pack.words_offset_bytes,
            len(pack.words), is_last,
        )  # fmt: skip


class _JointDeadline(Deadline):
    """Over when the first of several is; given up when one of them is."""

    def __init__(self, parts: Sequence[Deadline]) -> None:
        first = min(parts, key=lambda d: d.remaining_s())
        super().__init__(
            max(first.remaining_s(), 1e-3), peer=first.peer, stage=first.stage, token=CancelToken()
        )
        self._parts = parts

    def check(self) -> None:
        for part in self._parts:
            if part.token is not None and part.token.is_cancelled:
                if self.token is not None:
                    self.token.cancel(part.token.reason)
                part.check()
        super().check()


def fill_group(
    transport: Transport, jobs: Sequence[FillJob], num_threads: int, spent: Spent
) -> None:
    """Fill and send the slots of jobs of one key; returns when every target has emptied all."""
    first = jobs[0]
    start_s = time.perf_counter()
    if len(jobs) == 1:
        deadline = first.deadline
        pair: StreamSource = first.end.stream(first.ring, deadline)
        spent("register", time.perf_counter() - start_s)
        pair.begin_move(first.session_id, deadline)
        for i, pack in enumerate(first.packs):
            slot = pair.acquire(deadline)
            _pack(pack, slot.ptr, deadline, num_threads, pair.max_copy_blocks, spent)
            pair.submit(slot, first.header(i))
            reach("trainer.bucket")
        pair.flush(deadline)
        return
    deadline = _JointDeadline([job.deadline for job in jobs])
    group: GroupSource = transport.open_group([job.end for job in jobs], first.ring, deadline)
    spent("register", time.perf_counter() - start_s)
    group.begin_move([job.session_id for job in jobs], deadline)
    for i, pack in enumerate(first.packs):
        slot = group.acquire(deadline)
        _pack(pack, slot.ptr, deadline, num_threads, group.max_copy_blocks, spent)
        group.submit(slot, [job.header(i) for job in jobs])
        reach("trainer.bucket")
    group.flush(deadline)


def _pack(
    pack: SlotPack,
    slot_ptr: int,
    deadline: Deadline,
    num_threads: int,
    max_blocks: int,
    spent: Spent,
) -> None:
    cancel = None if deadline.token is None else deadline.token.native_flag
    start_s = time.perf_counter()
    pack.fill(slot_ptr, num_threads=num_threads, max_blocks=max_blocks, cancel=cancel)
    spent("pack", time.perf_counter() - start_s)
    deadline.check()


def groups_of(jobs: Iterable[FillJob]) -> list[list[FillJob]]:
    """Jobs of one key together, in an order that does not depend on who came first."""
    found: dict[tuple[object, ...], list[FillJob]] = {}
    for job in sorted(jobs, key=lambda j: (j.engine, j.target)):
        found.setdefault(job.key, []).append(job)
    return list(found.values())


@dataclass(eq=False)
class _Group:
    jobs: list[FillJob]
    done: Future[None] = field(default_factory=Future)

    @property
    def leader(self) -> int:
        """The engine whose thread does the work."""
        return self.jobs[0].engine


class FillMeeting:
    """Engines of one move at one trainer rank. Every one that is expected either fills or leaves."""

    def __init__(self, engines: Iterable[int]) -> None:
        self._missing = set(engines)
        self._jobs: list[FillJob] = []
        self._groups: list[_Group] | None = None
        self._changed = threading.Condition()

    def leave(self, engine: int) -> None:
        """This engine fills nothing (any more). Idempotent."""
        with self._changed:
            self._missing.discard(engine)
            self._changed.notify_all()

    def meet(self, engine: int, jobs: Sequence[FillJob], deadline: Deadline) -> list[_Group]:
        """The groups that this engine has a part in, once all that are expected have come."""
        with self._changed:
            self._jobs += jobs
            self._missing.discard(engine)
            self._changed.notify_all()
            while self._missing and self._groups is None:
                try:
                    deadline.check()
                except WeightSyncError:
                    self._jobs = [job for job in self._jobs if job.engine != engine]
                    raise
                self._changed.wait(deadline.slice_s())
            if self._groups is None:
                self._groups = [_Group(found) for found in groups_of(self._jobs)]
            return [g for g in self._groups if any(job.engine == engine for job in g.jobs)]


@dataclass(frozen=True)
class FillSeat:
    """One engine's place in a meeting."""

    meeting: FillMeeting
    engine: int

    @classmethod
    def alone(cls) -> FillSeat:
        return cls(FillMeeting([0]), 0)

    def leave(self) -> None:
        """See :meth:`FillMeeting.leave`."""
        self.meeting.leave(self.engine)


def fill_all(
    transport: Transport, seat: FillSeat, jobs: Sequence[FillJob], num_threads: int, spent: Spent
) -> None:
    """This engine's part of a move: fill what it leads, wait for what others do."""
    if not jobs:
        seat.leave()
        return
    engine = seat.engine
    groups = seat.meeting.meet(engine, jobs, jobs[0].deadline)
    led = [group for group in groups if group.leader == engine]
    if len(groups) == len(led) == 1:
        _lead(transport, led[0], num_threads, spent)
    else:
        with ThreadPoolExecutor(max(len(led), 1), "weightsync-fill") as pool:
            for group in led:
                pool.submit(_lead_quietly, transport, group, num_threads, spent)
            _wait_for(groups, jobs)
    _raise_first([group.done for group in groups])


def _lead(transport: Transport, group: _Group, num_threads: int, spent: Spent) -> None:
    try:
        fill_group(transport, group.jobs, num_threads, spent)
    except BaseException as error:
        group.done.set_exception(error)
        raise
    group.done.set_result(None)


def _lead_quietly(transport: Transport, group: _Group, num_threads: int, spent: Spent) -> None:
    try:
        _lead(transport, group, num_threads, spent)
    except WeightSyncError:
        return  # whoever waits for the group raises it


def _wait_for(groups: Sequence[_Group], jobs: Sequence[FillJob]) -> None:
    """Until all are over. One that fails stops the others of this engine."""
    for group in groups:
        group.done.add_done_callback(lambda f: _give_up(jobs) if f.exception() else None)
    for group in groups:
        group.done.exception()  # its leader keeps the deadline of everybody in it


def _give_up(jobs: Sequence[FillJob]) -> None:
    for job in jobs:
        if job.deadline.token is not None:
            job.deadline.token.cancel("another rank failed")


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """The error that was not the cancelling of the others by it, if there is one."""
    errors = [f.exception() for f in futures]
    real = [e for e in errors if e is not None and not isinstance(e, CancelledError)]
    for error in [*real, *errors]:
        if error is not None:
            raise error
