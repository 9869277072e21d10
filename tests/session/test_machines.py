"""The machines of one rank, driven: what is carried out, and by whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from weightsync.machines import Hands, Machines
from weightsync.session import Connect, JobDone, Open, Scope, SessionSpec, Tick, Welcome
from weightsync.types import Placement

SPEC = SessionSpec("s", "run", 1, Scope(), Placement.STAGED, 20.0, 20.0)
STAMP: Any = {"leader_epoch": "leader", "rank_epoch": "life"}


class Recorder:
    """Hands that remember; jobs succeed at once, on the thread that runs them."""

    def __init__(self) -> None:
        self.refused: list[str | None] = []
        self.said: list[Any] = []
        self.jobs: list[Callable[[], None]] = []

    def hands(self) -> Hands:
        return Hands(
            refuse=self.refused.append,
            run_job=lambda action, token: JobDone(action.job, action.spec.session_id),
            put_job=self.jobs.append,
            tell=lambda rank, order: None,
            say=self.said.append,
            answer=lambda action: None,
        )

    def run_jobs(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


def test_a_rank_that_lost_its_leader_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once the session that was open has been given up for the leader's silence."""
    monkeypatch.setattr("weightsync.machines._LEADER_LEASE_S", 0.05)
    seen = Recorder()
    machines = Machines(1, 2, "life", seen.hands())
    machines.start()
    machines.hear(Welcome(serve=True, nonce=0, challenge=1, seq=1, **STAMP))
    assert seen.refused[-1] is None, "welcomed, it may generate"
    machines.hear(Open(SPEC, seq=2, **STAMP))
    seen.run_jobs()
    machines.lose_leader("its process ended")
    assert seen.refused[-1] == "its process ended"
    for _ in range(200):
        machines.feed(Tick())
        seen.run_jobs()
        if machines._rank is not None and machines._rank.spec is None:
            break
        threading.Event().wait(0.01)
    assert machines._rank is not None
    assert machines._rank.spec is None, "the session was given up"
    assert machines._rank.refusal is None, "the machine itself has nothing against it"
    assert seen.refused[-1] == "its process ended"


def test_a_run_that_is_refused_changes_nothing_for_the_one_that_holds() -> None:
    """Else the transports of the holder would be taken for those of a connection that is over."""
    machines = Machines(0, 1, "life", Recorder().hands())
    machines.start()
    machines.feed(Connect(1, "first", 60.0))
    held = machines.tag
    machines.feed(Connect(2, "second", 60.0))
    assert machines.tag == held
    machines.feed(Connect(3, "first", 60.0))
    assert machines.tag not in (held, None), "the same run again is another connection"
