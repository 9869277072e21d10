"""The work of one rank, against a peer that says what it likes."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import pytest

from engine_adapter.fake import FakeEngine
from weightsync.binding import encode_entries, pack_table, rebased
from weightsync.deadline import CancelToken
from weightsync.errors import ProtocolError
from weightsync.native import copy_segments
from weightsync.plan import RefitPlan, make_plan, slot_bytes
from weightsync.rank_work import RankWork
from weightsync.session import Job, Scope, SessionSpec, StartJob
from weightsync.tensors import LocalTensors, local_tensors
from weightsync.transports.base import PreparedRead, Slot, SlotHeader
from weightsync.transports.loopback import LoopbackTransport
from weightsync.types import ContractChoice, Placement


class Ring:
    """A stream that brings one prepared slot, and the endpoint that it belongs to."""

    max_copy_blocks = 0

    def __init__(self, header: SlotHeader, memory: Any) -> None:
        self.header, self.memory = header, memory

    def stream(self, deadline: Any, device: str) -> Ring:
        return self

    def begin_move(self, session_id: str) -> None:
        return None

    def receive(self, deadline: Any) -> tuple[SlotHeader, Slot]:
        return self.header, Slot(0, self.memory.ctypes.data, self.memory.nbytes)

    def release(self, slot: Slot) -> None:
        return None

    def close(self) -> None:
        return None


def planned(work: RankWork, source: LocalTensors) -> RefitPlan:
    plan = make_plan(
        source.layout,
        work.layout,
        bucket_bytes=4096,
        capabilities=LoopbackTransport().capabilities(),
        choice=ContractChoice.STREAM,
    )
    work.add_plan(plan, source.layout)
    return plan


def run(work: RankWork, job: Job, session_id: str, **fields: Any) -> BaseException | None:
    spec = SessionSpec(session_id, "run", 1, Scope(), Placement.STAGED, 20.0, 20.0)
    return work.run(StartJob(job, spec, **fields), CancelToken()).error


def test_a_description_that_was_seen_before_is_checked_against_each_slot() -> None:
    """The same words may come with another slot, which holds less than they say."""
    weights = {"a": np.arange(100, dtype=np.float32)}
    work = RankWork(FakeEngine({"a": np.zeros(100, np.float32)}), 0, 1)
    source = local_tensors(weights.items())
    plan = planned(work, source)
    (cuts,) = plan.buckets
    entries = encode_entries(cuts)
    memory = np.zeros(slot_bytes(4096), np.uint8)
    addresses = {a.region: a.ptr for a in source.addresses}
    copy_segments(
        rebased(pack_table(plan, cuts, source.layout, addresses), target=memory.ctypes.data),
        num_threads=1,
    )
    ctypes.memmove(memory.ctypes.data + 400, entries, len(entries))

    def move(session_id: str, data_bytes: int) -> BaseException | None:
        header = SlotHeader(session_id, 0, 0, data_bytes, 400, len(entries), True)
        work.set_endpoint(Ring(header, memory))  # type: ignore[arg-type]
        assert run(work, Job.OPEN, session_id) is None
        error = run(work, Job.MOVE, session_id, move_id=0, payload={"plan_digest": plan.digest})
        run(work, Job.DISCARD, session_id)
        return error

    assert move("first", 400) is None
    assert isinstance(move("second", 100), ProtocolError)
    work.close()


def test_an_endpoint_ends_before_the_reads_that_were_prepared_on_it() -> None:
    """Reads let go of handles of their endpoint, which must not be at work any more."""
    work, said = RankWork(FakeEngine({"a": np.zeros(4, np.float32)}), 0, 1), []

    class Closing(Ring):
        def close(self) -> None:
            said.append("endpoint")

    class Read(PreparedRead):
        __slots__ = ("__weakref__",)

    def prepare() -> PreparedRead:
        read = Read(np.zeros((0, 13), np.int64), 0)
        weakref.finalize(read, said.append, "read")
        return read

    header = SlotHeader("s", 0, 0, 0, 0, 0)
    work.set_endpoint(Closing(header, None))  # type: ignore[arg-type]
    work._moves._reads.get(("plan", "epoch", Placement.STAGED), prepare)
    work.set_endpoint(None)
    assert said == ["endpoint", "read"]


def test_staging_outlives_a_job_that_does_not_end() -> None:
    work = RankWork(FakeEngine({"a": np.zeros(4, np.float32)}), 0, 1)
    assert run(work, Job.OPEN, "s") is None
    memory = work._staging[Placement.STAGED].memory
    assert memory is not None
    mapping = memory._map
    assert mapping is not None
    work.close()
    assert not mapping.closed, "a copy may still read it"
    run(work, Job.DISCARD, "s")


@pytest.mark.parametrize("names", [["a", "a"], ["a", "tied"], ["tied"]])
def test_a_live_digest_counts_a_tensor_once_whatever_it_is_called(names: list[str]) -> None:
    array = np.arange(12, dtype=np.float32)
    work = RankWork(FakeEngine({"a": array, "tied": array}), 0, 1)
    assert work.digest_live(names) == work.digest_live(["a"])
