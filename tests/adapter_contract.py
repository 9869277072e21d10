"""What every adapter must do: inherited by the test of each.

A subclass gives ``make``: an adapter and the tensors it serves, by checkpoint name. Tests read those
tensors directly, so that they see what a step of the engine would see.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from weightsync.deadline import Deadline
from weightsync.digest import digest_tensors
from weightsync.engine import EngineAdapter, RunningEngine, UpdatingEngine
from weightsync.errors import DeadlineError, TaintedError, WeightSyncError
from weightsync.layout import Layout
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.session import Scope, SessionSpec, Version
from weightsync.types import PauseMode, Placement

LIMIT_S = 20.0


@dataclass
class Subject:
    """An adapter under test and its live tensors (tied ones once)."""

    adapter: Any
    tensors: Mapping[str, Any]


def deadline(limit_s: float = LIMIT_S) -> Deadline:
    return Deadline(limit_s, peer="the engine", stage="pause")


def spec(version: int = 1, placement: Placement = Placement.STAGED) -> SessionSpec:
    return SessionSpec("s", "r", version, Scope(), placement, LIMIT_S, LIMIT_S)


class AdapterContract(ABC):
    """Inherit, and give ``make`` and ``other``."""

    @abstractmethod
    def make(self) -> Subject:
        """A fresh adapter with fresh weights."""

    @abstractmethod
    def other(self, subject: Subject, seed: int) -> Mapping[str, Any]:
        """Other values for every tensor of a subject, of the same dtypes and shapes."""

    @pytest.fixture
    def subject(self) -> Subject:
        return self.make()

    @pytest.fixture
    def sender(self, subject: Subject, request: pytest.FixtureRequest) -> Iterator[Sender]:
        placement = getattr(request, "param", "staged")
        with (
            Receiver(subject.adapter) as receiver,
            Sender.connect(
                [receiver.url],
                transport="loopback",
                bucket="64KiB",
                placement=placement,
                deadline_s=LIMIT_S,
            ) as sender,
        ):
            yield sender

    # --- what it is -------------------------------------------------------------------------------

    def test_it_keeps_both_protocols(self, subject: Subject) -> None:
        for protocol in (UpdatingEngine, RunningEngine, EngineAdapter):
            assert isinstance(subject.adapter, protocol)

    def test_its_layout_is_constant_and_speaks_of_its_tensors(self, subject: Subject) -> None:
        layout = subject.adapter.layout()
        assert isinstance(layout, Layout)
        assert layout == subject.adapter.layout()
        assert set(layout.index) == set(subject.tensors)
        assert list(subject.adapter.addresses()) == list(subject.adapter.addresses())
        sizes = [r.num_bytes for r in layout.regions[0]]
        assert [a.num_bytes for a in subject.adapter.addresses()] == sizes

    def test_digests_are_of_the_live_tensors(self, subject: Subject) -> None:
        names = list(subject.tensors)
        assert subject.adapter.digest(names) == digest_tensors(subject.tensors.items())
        assert subject.adapter.digest(names[:1]).keys() == {names[0]}

    def test_the_fingerprint_is_stable(self, subject: Subject) -> None:
        assert dict(subject.adapter.fingerprint()) == dict(subject.adapter.fingerprint())
        assert subject.adapter.fingerprint()

    def test_memory_it_cannot_release_is_an_error(self, subject: Subject) -> None:
        for act in (subject.adapter.release_memory, subject.adapter.resume_memory):
            error: Exception | None = None
            try:
                assert act(["weights"]) >= 0
            except WeightSyncError as raised:
                error = raised
            assert error is None or "weights" in str(error)

    # --- pausing ----------------------------------------------------------------------------------

    def test_no_step_runs_within_a_pause(self, subject: Subject) -> None:
        adapter = subject.adapter
        within, leave, entered = threading.Event(), threading.Event(), threading.Event()

        def step() -> None:
            with adapter.step():
                within.set()
                assert leave.wait(LIMIT_S)

        def later() -> None:
            with adapter.step():
                entered.set()

        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(step)
            assert within.wait(LIMIT_S)
            pausing = pool.submit(adapter.pause, PauseMode.RETRACT, deadline())
            assert not pausing.done()
            leave.set()
            first.result(LIMIT_S)
            pausing.result(LIMIT_S)
            second = pool.submit(later)
            assert not entered.is_set()
            adapter.resume()
            second.result(LIMIT_S)
            assert entered.is_set()

    def test_a_pause_that_runs_out_lets_steps_go_on(self, subject: Subject) -> None:
        adapter = subject.adapter
        with adapter.step(), pytest.raises(DeadlineError, match="'pause'"):
            adapter.pause(PauseMode.RETRACT, deadline(0.05))
        with adapter.step(limit_s=0.5):
            pass

    def test_steps_may_overlap(self, subject: Subject) -> None:
        with subject.adapter.step(), subject.adapter.step():
            pass

    def test_resuming_an_engine_that_runs_is_harmless(self, subject: Subject) -> None:
        subject.adapter.resume()
        subject.adapter.pause(PauseMode.RETRACT, deadline())
        subject.adapter.resume()
        subject.adapter.resume()
        with subject.adapter.step(limit_s=0.5):
            pass

    def test_a_step_waits_for_a_pause_only_so_long(self, subject: Subject) -> None:
        subject.adapter.pause(PauseMode.RETRACT, deadline())
        with pytest.raises(DeadlineError, match="paused"), subject.adapter.step(limit_s=0.05):
            pass
        subject.adapter.resume()

    def test_refusing_ends_steps_with_the_reason_even_those_that_wait(
        self, subject: Subject
    ) -> None:
        adapter = subject.adapter
        adapter.pause(PauseMode.RETRACT, deadline())

        def step() -> None:
            with adapter.step():
                pass

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(step)
            adapter.refuse("half a model")
            with pytest.raises(TaintedError, match="half a model"):
                waiting.result(LIMIT_S)
        adapter.resume()
        with pytest.raises(TaintedError, match="half a model"):
            step()
        adapter.refuse(None)
        step()

    # --- updating ---------------------------------------------------------------------------------

    def test_the_calls_of_an_update_that_is_given_up(self, subject: Subject) -> None:
        before = subject.adapter.digest(list(subject.tensors))
        for placement in Placement:
            subject.adapter.begin_update(spec(placement=placement))
            subject.adapter.abort()
        subject.adapter.begin_update(spec())
        subject.adapter.prepare()
        subject.adapter.abort()
        assert subject.adapter.digest(list(subject.tensors)) == before

    def test_a_commit_takes_the_label(self, subject: Subject) -> None:
        subject.adapter.begin_update(spec(7))
        subject.adapter.prepare()
        subject.adapter.commit(Version("r", 7))
        subject.adapter.flush_cache()
        assert subject.adapter.version == Version("r", 7)

    @pytest.mark.parametrize("sender", ["staged", "in_place"], indirect=True)
    def test_three_updates_land_where_the_tensors_are(
        self, subject: Subject, sender: Sender
    ) -> None:
        before = dict(subject.adapter.fingerprint())
        for version in (1, 2, 3):
            new = self.other(subject, version)
            with sender.update(version=version) as update:
                update.send(new)
            assert digest_tensors(subject.tensors.items()) == digest_tensors(new.items())
            assert subject.adapter.digest(list(new)) == digest_tensors(new.items())
            assert subject.adapter.version.number == version
        assert dict(subject.adapter.fingerprint()) == before

    def test_sending_its_own_weights_changes_nothing(
        self, subject: Subject, sender: Sender
    ) -> None:
        before = digest_tensors(subject.tensors.items())
        for version in (1, 2, 3):
            with sender.update(version=version) as update:
                update.send(subject.tensors)
            assert digest_tensors(subject.tensors.items()) == before
