"""What landed is digested before prepare asks, once nothing more can come; and never what may change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from updating import Gate, connected, digests, engine_of, only, placements, refit, ways, weights

from engine_adapter.fake import FakeEngine
from weightsync.deadline import CancelToken
from weightsync.digest import DigestTable
from weightsync.errors import IntegrityError, ProtocolError, UpdateFailedError, WeightSyncError
from weightsync.layout import join_layouts
from weightsync.manifest import Manifest, manifest_basis
from weightsync.native import copy_segments
from weightsync.plan import RefitPlan, make_plan
from weightsync.rank_digests import RankDigests
from weightsync.rank_work import RankWork
from weightsync.session import Job, Scope, SessionSpec, StartJob
from weightsync.tensors import LocalTensors, local_tensors
from weightsync.transports.base import PreparedRead
from weightsync.transports.loopback import LoopbackTransport
from weightsync.types import ContractChoice, Outcome, Placement

# --- whole updates ----------------------------------------------------------------------------------


class Watched:
    """How often digests of what landed were begun early, and how often taken in prepare."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early: list[int] = []  # moves that each was of
        self.late = 0
        start, at = RankDigests.start_landed, RankDigests.at

        def start_landed(this: RankDigests, opened: Any, moves: Any) -> None:
            self.early.append(len(moves))
            start(this, opened, moves)

        def at_(this: RankDigests, opened: Any, spots: Any, what: str, found: Any) -> None:
            self.late += what == "landed"
            at(this, opened, spots, what, found)

        monkeypatch.setattr(RankDigests, "start_landed", start_landed)
        monkeypatch.setattr(RankDigests, "at", at_)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@ways
def test_one_move_of_everything_is_digested_early(
    placement: str, contract: str, watched: Watched
) -> None:
    engine = engine_of(0)
    with connected(engine, placement=placement, contract=contract) as (sender, _):
        for version in (1, 2):
            refit(sender, version, weights(version))
            assert engine.generate() == (version, digests(weights(version)))
    assert (watched.early, watched.late) == ([1, 1], 0)


@placements
def test_of_several_moves_the_last_one_completes_it(placement: str, watched: Watched) -> None:
    engine = engine_of(0)
    with connected(engine, placement=placement, contract="direct") as (sender, _):
        with sender.update(version=1) as update:
            for name, array in weights(1).items():
                update.send({name: array})
        assert engine.generate() == (1, digests(weights(1)))
    assert (watched.early, watched.late) == ([5], 0)


def test_a_named_scope_is_complete_with_its_names(watched: Watched) -> None:
    engine = engine_of(0)
    with connected(engine, placement="in_place", contract="direct") as (sender, _):
        refit(sender, 1, weights(1))
        refit(sender, 2, {"a": weights(2)["a"]}, scope=["a"])
        assert engine.generate() == (2, digests({**weights(1), "a": weights(2)["a"]}))
    assert watched.early == [1, 1]


@placements
def test_a_byte_that_changes_before_the_digest_is_seen(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the memory of the engine that is digested, not what was read on the way."""
    engine = engine_of(0)
    start = RankDigests.start_landed

    def spoilt(this: RankDigests, opened: Any, moves: Any) -> None:
        spot = next(s for s in opened.staging.landing.values() if s.dtype == "float32")
        copied = np.zeros(1, np.uint8)
        copied[0] = 1  # over a byte of what landed
        copy_segments(_one_byte(copied.ctypes.data, spot.ptr))
        start(this, opened, moves)

    with connected(engine, placement=placement, contract="direct") as (sender, _):
        refit(sender, 1, weights(1))
        monkeypatch.setattr(RankDigests, "start_landed", spoilt)
        with pytest.raises(UpdateFailedError) as caught:
            refit(sender, 2, weights(2))
        assert isinstance(caught.value.__cause__, IntegrityError)
        refuses = placement == "in_place"
        expected = Outcome.TAINTED if refuses else Outcome.ABORTED
        assert only(caught.value.report).outcome is expected


def _one_byte(source: int, target: int) -> Any:
    row = np.zeros((1, 13), np.int64)
    row[0, :3] = source, target, 1
    row[0, [4, 7, 10]] = 1
    return row


def test_what_fails_while_it_is_digested_fails_in_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(this: DigestTable, num_threads: int, aside: Any) -> Callable[[], Any]:
        def wait() -> Any:
            raise WeightSyncError("the device is of no use any more")

        return wait

    engine = engine_of(0)
    with connected(engine, placement="staged", contract="direct") as (sender, _):
        refit(sender, 1, weights(1))
        with monkeypatch.context() as patch:
            patch.setattr(DigestTable, "start", failing)
            with pytest.raises(UpdateFailedError, match="of no use any more") as caught:
                refit(sender, 2, weights(2))
        assert [e.outcome for e in caught.value.report.engines] == [Outcome.ABORTED]
        refit(sender, 3, weights(3))
        assert engine.generate() == (3, digests(weights(3)))


def test_giving_up_waits_for_whoever_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is read by a digest under way must not be let go of."""
    gate, resumed_early = Gate(), []
    start = DigestTable.start

    def slow(this: DigestTable, num_threads: int, aside: Any) -> Callable[[], Any]:
        wait = start(this, num_threads, aside)

        def wait_long() -> Any:
            gate()
            return wait()

        return wait_long

    engine = engine_of(0)
    resume = engine.resume

    def resuming() -> None:
        resumed_early.append(not gate.opened.is_set())
        resume()

    with connected(engine, placement="in_place", contract="direct") as (sender, _):
        refit(sender, 1, weights(1))
        monkeypatch.setattr(DigestTable, "start", slow)
        monkeypatch.setattr(engine, "resume", resuming)
        update = sender.update(version=2)
        update.__enter__()
        update.send(weights(2))
        reason = ValueError("given up")
        leaving = threading.Thread(target=update.__exit__, args=(ValueError, reason, None))
        leaving.start()
        gate.wait()
        assert resumed_early == []
        gate.opened.set()
        leaving.join(20)
        assert only(update.report).outcome is Outcome.TAINTED
        assert resumed_early == [False]


# --- one rank ---------------------------------------------------------------------------------------


class Peer:
    """A trainer rank whose reads are of this process, each with the device's order of things: enqueued,
    then what is done meanwhile, then there."""

    digests_reads = True

    def __init__(self, source: LocalTensors, note: Callable[[str], None]) -> None:
        self._addresses = {a.region: a.ptr for a in source.addresses}
        self._note = note

    def direct(self) -> Peer:
        return self

    def open(self, descriptor: Any, local: Any, deadline: Any) -> Mapping[int, int]:
        return self._addresses

    def prepare(self, table: Any, digests: Any = None) -> PreparedRead:
        assert digests is None
        return PreparedRead(table, 0)

    def read(self, prepared: PreparedRead, deadline: Any) -> None:
        copy_segments(prepared.table)
        assert prepared.meanwhile is not None
        self._note("enqueued")
        prepared.meanwhile()
        self._note("there")

    def close(self) -> None:
        return None


class Rank:
    """A rank of an engine and the trainer ranks that feed it."""

    def __init__(self, *arrays: Mapping[str, Any]) -> None:
        world_size = len(arrays)
        sources = [
            local_tensors(of_rank.items(), rank=rank, world_size=world_size)
            for rank, of_rank in enumerate(arrays)
        ]
        joint = join_layouts([s.layout for s in sources])
        self.engine = FakeEngine({n: np.zeros_like(a) for d in arrays for n, a in d.items()})
        self.work = RankWork(self.engine, 0, 1)
        self.plan: RefitPlan = make_plan(
            joint, self.work.layout, bucket_bytes=4096,
            capabilities=LoopbackTransport().capabilities(), choice=ContractChoice.DIRECT,
        )  # fmt: skip
        self.work.add_plan(self.plan, joint)
        self._sent = digests({n: a for d in arrays for n, a in d.items()})
        self.seen: list[tuple[str, bool]] = []  # and whether digests were begun by then
        for rank, source in enumerate(sources):
            self.work.set_endpoint(Peer(source, self.note), rank)  # type: ignore[arg-type]

    def note(self, what: str) -> None:
        self.seen.append((what, self.early is not None))

    @property
    def early(self) -> Any:
        opened = self.work._open
        return None if opened is None else opened.early

    def run(self, job: Job, **fields: Any) -> BaseException | None:
        spec = SessionSpec("s", "run", 1, Scope(), Placement.IN_PLACE, 20.0, 20.0)
        return self.work.run(StartJob(job, spec, **fields), CancelToken()).error

    def manifest(self) -> dict[str, Any]:
        metas = self.plan.metas
        found = np.array([self._sent[m.name] for m in metas], dtype=np.uint64)
        return Manifest(manifest_basis([(self.plan.digest, metas)]), found).to_json()

    def move(self, **payload: Any) -> BaseException | None:
        sources = [[rank, "1", {}] for rank in self.work._moves.endpoints]
        fields = {"plan_digest": self.plan.digest, "sources": sources, **payload}
        return self.run(Job.MOVE, move_id=0, payload=fields)


def test_on_a_device_it_is_enqueued_behind_the_copy() -> None:
    array = np.arange(100, dtype=np.float32)
    rank = Rank({"a": array})
    assert rank.run(Job.OPEN) is None
    assert rank.move() is None
    assert rank.seen == [("enqueued", False), ("there", True)]
    assert rank.early.wait().tolist() == list(digests({"a": array}).values())
    rank.work.close()


def test_a_manifest_that_is_foreseen_is_read_while_the_device_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, read = Rank({"a": np.arange(100, dtype=np.float32)}), []
    from_json = Manifest.from_json

    def reading(value: Any, basis: Any) -> Manifest:
        read.append(value)
        return from_json(value, basis)

    monkeypatch.setattr(Manifest, "from_json", reading)
    manifest = rank.manifest()
    rank.work.foresee("another", manifest)
    assert (rank.run(Job.OPEN), rank.move(), read) == (None, None, [])
    rank.run(Job.DISCARD)
    rank.work.foresee("s", manifest)
    assert (rank.run(Job.OPEN), rank.move(), read) == (None, None, [manifest])
    assert rank.run(Job.PREPARE, payload={"manifest": manifest}) is None
    assert read == [manifest], "and not again"
    rank.work.close()


def test_what_is_foreseen_does_not_stand_for_what_comes() -> None:
    """Be it wrong, or another's: prepare looks at what it is given."""
    rank = Rank({"a": np.arange(100, dtype=np.float32)})
    good = rank.manifest()
    other = Manifest(rank.work._digests.basis([]), np.zeros(0, np.uint64)).to_json()
    for foreseen, given, error in (
        (good, dict(other), IntegrityError), (other, dict(good), None), ({"plans": 3}, good, None),
    ):  # fmt: skip
        rank.work.foresee("s", foreseen)
        assert (rank.run(Job.OPEN), rank.move()) == (None, None)
        found = rank.run(Job.PREPARE, payload={"manifest": given})
        assert found is None if error is None else isinstance(found, error)
        rank.run(Job.DISCARD)
    rank.work.close()


def test_of_several_trainer_ranks_all_must_have_landed() -> None:
    arrays = {n: np.full(50, i, np.float32) for i, n in enumerate("ab", start=1)}
    rank = Rank(*({n: a} for n, a in arrays.items()))
    assert rank.run(Job.OPEN) is None
    assert rank.move() is None
    assert [begun for _, begun in rank.seen] == [False] * 4
    found = np.zeros(2, np.uint64)
    found[rank.early.places] = rank.early.wait()
    assert found.tolist() == list(digests(arrays).values())
    rank.work.close()


def test_what_was_begun_is_void_when_more_may_land() -> None:
    rank = Rank({"a": np.ones(10, np.float32)})
    assert rank.run(Job.OPEN) is None
    assert rank.move() is None
    assert rank.early is not None
    assert isinstance(rank.move(plan_digest="another"), ProtocolError)
    assert rank.early is None
    rank.work.close()
