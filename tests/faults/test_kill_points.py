"""SIGKILL of the trainer or of the engine at every point that the protocol's table names.

One process dies, the other one lives on through many of these tests. An engine that lost its
trainer must do what the table says, whole and under the right label, and take a new trainer at
once. A trainer that lost its engine must say which and where, and update the one that is started
on the same port.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from nursery import Brood
from processes import Child, ChildEnded

from engine_adapter.fake import FakeEngine
from faults.kill_table import Case, cases, rows
from faults.skips import NEEDS_NIXL
from faults.worker import (
    BUCKET_BYTES,
    LIMIT_S,
    OPAQUE,
    ask,
    check_seen,
    fill,
    root,
    root_of,
    weights,
)
from weightsync.digest import digest_tensors
from weightsync.errors import DeadlineError, PeerLostError, UpdateFailedError
from weightsync.faults import FAULT_POINTS
from weightsync.receiver import Receiver, ReceiverHooks
from weightsync.report import UpdateReport
from weightsync.sender import Sender
from weightsync.types import Outcome

pytestmark = pytest.mark.timeout(300)

#: Reached between the handshake and the first update, so there is no good update of this run before.
AT_CONNECT = {
    "trainer.connected", "trainer.attached", "trainer.planned",
    "engine.attach", "engine.attached", "engine.planned",
}  # fmt: skip
#: No transport is attached yet whose end could be seen: only the lease ends this run.
BY_LEASE = {"trainer.connected"}
#: Points without a row: what happens there is what happens at a neighbour that has one.
WITHOUT_ROW = {
    "stream.announced": "of broadcast alone; test_broadcast_group.py",
    "stream.landing": "likewise",
    "group.invited": "likewise",
    "group.join": "likewise",
    "stream.submitted": "as stream.submit, or as trainer.bucket",
    "stream.reset": "after an unclean end on a whole channel; as stream.acquire",
    "stream.release": "as engine.bucket",
    "direct.withdraw": "a sender does not withdraw while it is connected",
    "trainer.manifest": "of updates in one call; test_one_exchange.py",
    "trainer.bucket": "as stream.flush, or as stream.acquire",
    "engine.move": "as direct.open and stream.receive",
    "engine.discard": "on the way to an abort; its test stands below",
}
#: Once more by NIXL, which has threads and memory of its own.
P2P = [
    ("trainer.attached", "direct", "staged"),
    ("direct.published", "direct", "in_place"),
    ("stream.flush", "stream", "staged"),
    ("direct.read", "direct", "in_place"),
    ("stream.received", "stream", "staged"),
    ("engine.prepared", "direct", "staged"),
]
#: A version is given once in this file, so that a label alone says what must stand behind it.
VERSIONS = count(1)


def chosen(process: str) -> list[Any]:
    """The tests of a process: all of them by ipc, some by p2p."""
    every = cases(process)
    by_p2p = [
        replace(case, transport="p2p")
        for case in every
        if (case.point, case.contract, case.placement) in P2P
    ]
    return [pytest.param(c, id=str(c)) for c in every] + [
        pytest.param(c, id=str(c), marks=NEEDS_NIXL) for c in by_p2p
    ]


def options_of(case: Case, **more: Any) -> dict[str, Any]:
    lease_s = 1.0 if case.point in BY_LEASE else 3600.0
    limits = {"connect_timeout_s": LIMIT_S, "deadline_s": LIMIT_S, "commit_timeout_s": LIMIT_S}
    return {
        "transport": case.transport,
        "contract": case.contract,
        "placement": case.placement,
        "lease_s": lease_s,
        **limits,
        **more,
    }


class Trainer:
    """The trainer in this process: its tensors stay where they are."""

    def __init__(self, url: str, case: Case) -> None:
        self.source = weights(0)
        self.sender = Sender.connect([url], bucket=BUCKET_BYTES, **options_of(case))
        self.update: Any = None

    def send(self, version: int) -> None:
        """A full update, proven by the engine's own words."""
        fill(self.source, version)
        self.update = self.sender.update(version=version)
        with self.update:
            self.update.send(self.source)

    def close(self) -> None:
        self.sender.close()


def with_trainer(url: str, case: Case, version: int) -> None:
    """One good update by a run of its own."""
    trainer = Trainer(url, replace(case, point=""))
    try:
        trainer.send(version)
    finally:
        trainer.close()


# --- the table --------------------------------------------------------------------------------------


def test_the_table_names_points_that_exist() -> None:
    named = [row.point for row in rows()]
    assert len(named) == len(set(named))
    assert set(named) <= set(FAULT_POINTS)


def test_every_other_point_has_a_reason() -> None:
    named = {row.point for row in rows()}
    updates = {p for p in FAULT_POINTS if not p.startswith(("store.", "local.", "follow."))}
    assert updates - named == set(WITHOUT_ROW)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.point)
def test_a_row_speaks_of_the_process_that_reaches_its_point(row: Any) -> None:
    assert FAULT_POINTS[row.point].startswith(f"{row.process}:")


# --- the trainer ends -------------------------------------------------------------------------------


class Engines:
    """The engine of each transport, kept over the tests that do not end it; one lives at a time."""

    def __init__(self, keeper: Brood) -> None:
        self._keeper = keeper
        self._kept: tuple[str, Child] | None = None

    def of(self, transport: str) -> Child:
        if self._kept is not None and self._kept[0] == transport:
            return self._kept[1]
        self._keeper.end()
        child = self._keeper.start("faults.worker:engine", transport=transport)
        child.send(0)
        child.receive(LIMIT_S)
        self._kept = (transport, child)
        return child

    def forget(self) -> None:
        self._kept = None


@pytest.fixture(scope="module")
def kept(keeper: Brood) -> Engines:
    return Engines(keeper)


@pytest.fixture
def engines(kept: Engines, request: pytest.FixtureRequest) -> Iterator[Engines]:
    """After a test that failed the next one gets an engine of its own."""
    failed = request.session.testsfailed
    yield kept
    if request.session.testsfailed != failed:
        kept.forget()


@pytest.mark.parametrize("case", chosen("trainer"))
def test_the_trainer_ends(case: Case, engines: Engines, brood: Brood) -> None:
    engine = engines.of(case.transport)
    url = ask(engine, "url")
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    connect = ["connect", url, options_of(case)]
    fault = f"{case.point}=kill"

    if case.point in AT_CONNECT:
        with_trainer(url, case, old)
        dying = brood.start("faults.worker:trainer", fault, case.transport)
        dying.send(connect)
    else:
        dying = brood.start("faults.worker:trainer", None, case.transport)
        ask(dying, *connect)
        assert ask(dying, "update", old)["outcome"] == "committed"
        ask(dying, "arm", fault)
    assert ask(engine, "now") == [old, root(old), old]
    ask(engine, "seen")
    dying.send(["update", fatal])
    with contextlib.suppress(ChildEnded):
        while dying.receive(LIMIT_S) == {"result": None}:
            """The answer to the connect; there must be none to the fatal update."""
        pytest.fail(f"{case.point} was not reached")
    assert dying.wait(LIMIT_S) == -signal.SIGKILL

    # The lease would take an hour: it is the end of the channel that is noticed.
    status = ask(engine, "settle", LIMIT_S)
    now = ask(engine, "now")
    if case.after == "refuses":
        assert isinstance(now, str)
        assert "refuses to generate" in now
        assert status["tainted"]
    else:
        serving = old if case.after == "old" else fatal
        assert now == [serving, root(serving), serving]
        assert status["tainted"] is None
    check_seen(ask(engine, "seen"), old, *([fatal] if case.after == "new" else []))

    with_trainer(url, case, later)
    assert ask(engine, "now") == [later, root(later), later]
    possible = {"old": (old, later), "new": (fatal, later), "refuses": (later,)}[case.after]
    check_seen(ask(engine, "seen"), *possible)


# --- the engine ends --------------------------------------------------------------------------------


def start_engine(
    brood: Brood, case: Case, port: int, fault: str | None = None
) -> tuple[Child, str]:
    engine = brood.start("faults.worker:engine", fault, case.transport)
    engine.send(port)
    return engine, engine.receive(LIMIT_S)


@pytest.mark.parametrize("case", chosen("engine"))
def test_the_engine_ends(case: Case, brood: Brood) -> None:
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    fault = f"{case.point}=kill"
    dying, url = start_engine(brood, case, 0)
    port = int(url.rpartition(":")[2])
    trainer = Trainer(url, case)
    try:
        trainer.send(old)
        assert ask(dying, "now") == [old, root(old), old]
        if case.point in AT_CONNECT:
            dying.kill()
            dying, _ = start_engine(brood, case, port, fault)
        else:
            ask(dying, "arm", fault)

        with pytest.raises((PeerLostError, DeadlineError, UpdateFailedError)) as caught:
            trainer.send(fatal)
        assert dying.wait(LIMIT_S) == -signal.SIGKILL
        assert f"127.0.0.1:{port}" in str(caught.value)
        assert re.search(r"stage '[\w ]+'", str(caught.value)), str(caught.value)
        check_outcome(case, trainer.update.report)

        engine, _ = start_engine(brood, case, port)
        assert ask(engine, "now") == [None, root(0), None]
        trainer.send(later)
        assert ask(engine, "now") == [later, root(later), later]
        check_seen(ask(engine, "seen"), 0, later)
        settled = trainer.update.report.engines[0]
        assert (settled.outcome, settled.version) == (Outcome.COMMITTED, later)
    finally:
        trainer.close()


def check_outcome(case: Case, report: UpdateReport | None) -> None:
    """Nobody can know how a session ended that an engine took with it; one never begun did not."""
    if report is None:  # the update was not entered: the engine could not be connected again
        assert case.point in AT_CONNECT
        return
    outcome = Outcome.ABORTED if case.point in AT_CONNECT else Outcome.UNKNOWN
    assert [e.outcome for e in report.engines] == [outcome]
    assert report.engines[0].version is None
    assert not report.is_committed


@pytest.mark.parametrize("placement", ["staged", "in_place"])
def test_the_engine_ends_while_it_gives_an_update_up(placement: str, brood: Brood) -> None:
    case = Case("engine.discard", "direct", placement)
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    dying, url = start_engine(brood, case, 0)
    trainer = Trainer(url, case)
    try:
        trainer.send(old)
        ask(dying, "arm", "engine.discard=kill")
        fill(trainer.source, fatal)
        trainer.update = trainer.sender.update(version=fatal)
        trainer.update.__enter__()
        trainer.update.send(trainer.source)
        reason = ZeroDivisionError("of the user's own")
        trainer.update.__exit__(ZeroDivisionError, reason, None)
        assert dying.wait(LIMIT_S) == -signal.SIGKILL
        check_outcome(case, trainer.update.report)
        assert str(Outcome.UNKNOWN) in "".join(reason.__notes__)

        engine, _ = start_engine(brood, case, int(url.rpartition(":")[2]))
        trainer.send(later)
        assert ask(engine, "now") == [later, root(later), later]
    finally:
        trainer.close()


# --- in between -------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["staged", "in_place"])
@pytest.mark.parametrize("contract", ["stream", "direct"])
def test_nothing_is_published_before_every_byte_is_in_place(contract: str, placement: str) -> None:
    """At each step of a commit: the label that is published, and the bytes that it stands on."""
    published: list[tuple[str, int | None]] = []
    engine = FakeEngine(weights(0), OPAQUE)
    hooks = ReceiverHooks(
        on_prepare=lambda spec: note("prepare"), on_commit=lambda spec: note("commit")
    )
    receiver = Receiver(engine, hooks=hooks)

    def note(when: str) -> None:
        published.append((when, receiver.version))

    def resume() -> None:
        note("resume")
        assert root_of(digest_tensors(engine.weights.items())) == root(receiver.version or 0)
        FakeEngine.resume(engine)

    engine.resume = resume  # type: ignore[method-assign]
    case = Case("", contract, placement)
    with receiver:
        trainer = Trainer(receiver.url, case)
        try:
            trainer.send(1)
            published.clear()
            trainer.send(2)
        finally:
            trainer.close()
    assert published == [("prepare", 1), ("commit", 1), ("resume", 2)]
