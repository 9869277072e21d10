"""A broadcast group whose members are missing, end, stand still or change: an error in time, never a hang.

Every process is real, and the group is gloo's. Members of a group share fate within one update; what
an engine serves then is what it would have served with any other transport, and the next update works.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from nursery import Brood, Nursery
from processes import Child, Pipe
from updating import attempt

from faults.worker import (
    BUCKET_BYTES,
    LIMIT_S,
    TrainerCommands,
    ask,
    check_seen,
    commands_of,
    fill,
    root,
    serve,
    weights,
)
from weightsync.errors import UnavailableError, WeightSyncError
from weightsync.report import UpdateReport
from weightsync.sender import Sender
from weightsync.transports import collective_gloo
from weightsync.transports.channel import Channel
from weightsync.types import Outcome

pytestmark = pytest.mark.timeout(120)

VERSIONS = count(1)
#: Of updates that must run out, and longer than a good one takes on a busy machine.
SHORT_S = 1.5
#: A lease that runs out while the trainer stands still.
LEASE_S = 2.0
#: Of the trainer: it ends, or stands still, in the middle of making a group or of a bucket.
AT_TRAINER = [
    ("group.invited", "staged", "kill"),
    ("stream.announced", "in_place", "kill"),
    ("stream.announced@4", "staged", "kill"),
    ("stream.announced@4", "in_place", "kill"),
    ("group.invited", "staged", "stop"),
    ("stream.announced@4", "in_place", "stop"),
]
#: Of an engine, likewise.
AT_ENGINE = [
    ("group.join", "staged"),
    ("stream.landing", "in_place"),
    ("stream.landing@4", "staged"),
    ("stream.landing@4", "in_place"),
]


@pytest.fixture(scope="module")
def nest() -> Iterator[Nursery]:
    """Where torch is there already."""
    with Nursery(
        "faults.worker", "torch.distributed", "weightsync.transports.broadcast"
    ) as nursery:
        yield nursery


@pytest.fixture
def brood(nest: Nursery) -> Iterator[Brood]:
    brood = Brood(nest)
    yield brood
    brood.end()


def options(**more: Any) -> dict[str, Any]:
    limits = {
        "connect_timeout_s": LIMIT_S,
        "deadline_s": LIMIT_S,
        "commit_timeout_s": LIMIT_S,
        "lease_s": 3600.0,
    }
    return {"transport": "broadcast", "bucket": BUCKET_BYTES, **limits, **more}


class Member:
    """An engine that is a member of a group: a process, and where it listens."""

    def __init__(self, brood: Brood, port: int = 0) -> None:
        self._brood = brood
        self.child: Child = brood.start("faults.worker:engine")
        self.child.send(port)
        self.url: str = self.child.receive(LIMIT_S)

    def restart(self) -> None:
        """Another process in its place, with the weights of version 0."""
        self.child.kill()
        self.child = self._brood.start("faults.worker:engine")
        self.child.send(int(self.url.rpartition(":")[2]))
        assert self.child.receive(LIMIT_S) == self.url

    def arm(self, fault: str) -> None:
        ask(self.child, "arm", fault)

    def check_serves(self, version: int) -> None:
        """This version, whole, and never a later one so far."""
        label = version or None
        assert ask(self.child, "now") == [label, root(version), label]
        check_seen(ask(self.child, "seen"), *range(version + 1))

    def check_lives(self, old: int, placement: str) -> None:
        """After a failed update: at the old version, or refusing where its weights were being changed."""
        ask(self.child, "settled", LIMIT_S)
        if placement == "in_place" and ask(self.child, "status")["tainted"]:
            assert "refuses to generate" in ask(self.child, "now")
        else:
            self.check_serves(old)


def update(sender: Sender, source: Any, version: int) -> UpdateReport:
    fill(source, version)
    with sender.update(version=version) as started:
        started.send(source)
    assert started.report is not None
    return started.report


def failed(sender: Sender, source: Any, version: int) -> tuple[list[Outcome], str]:
    """What each engine of an update that must fail came to, and what was said of it, within its deadline."""
    fill(source, version)
    start_s = time.monotonic()
    report, error = attempt(sender, version, source)
    assert time.monotonic() - start_s < LIMIT_S
    assert isinstance(error, WeightSyncError), error
    told = [str(error), *getattr(error, "__notes__", ()), *(str(e.detail) for e in report.engines)]
    return [e.outcome for e in report.engines], "\n".join(told)


def resolved(sender: Sender, report: UpdateReport) -> UpdateReport:
    """The report, once every engine has ended its session by itself."""
    end_s = time.monotonic() + LIMIT_S
    while any(e.outcome is Outcome.UNKNOWN for e in report.engines):
        assert time.monotonic() < end_s, report
        report = sender.resolve(report)
    return report


# --- the trainer ends or stands still -----------------------------------------------------------------


@pytest.mark.parametrize(("point", "placement", "how"), AT_TRAINER)
def test_the_trainer_goes(brood: Brood, point: str, placement: str, how: str) -> None:
    """Both engines of the group live on, and the next trainer updates both."""
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    members = [Member(brood), Member(brood)]
    urls = [member.url for member in members]
    trainer = brood.start("faults.worker:trainer")
    lease_s = LEASE_S if how == "stop" else 3600.0
    ask(trainer, "connect", urls, {**trainer_options(placement), "lease_s": lease_s})
    name, _, times = point.partition("@")
    if name == "group.invited":  # a group is made in the first update
        old = 0
    else:
        ask(trainer, "update", old)
    ask(trainer, "arm", f"{name}={how}@{times or 1}")
    trainer.send(["update", fatal])
    if how == "kill":
        assert trainer.wait(LIMIT_S) < 0
    else:
        trainer.wait_stopped(LIMIT_S)
    for member in members:
        ask(member.child, "settle", LIMIT_S)
        member.check_lives(old, placement)
    source = weights(0)
    with Sender.connect(urls, **options()) as second:
        assert update(second, source, later).is_committed
        for member in members:
            member.check_serves(later)
        if how == "stop":  # it goes on: nothing of what it had still to send lands
            trainer.resume()
            assert "error" in trainer.receive(LIMIT_S)
            for member in members:
                member.check_serves(later)


def trainer_options(placement: str) -> dict[str, Any]:
    found = options(placement=placement)
    del found["bucket"]  # the trainer's own
    return found


# --- an engine ends or stands still -------------------------------------------------------------------


@pytest.mark.parametrize(("point", "placement"), AT_ENGINE)
def test_an_engine_of_three_members_is_killed(
    brood: Brood, monkeypatch: pytest.MonkeyPatch, point: str, placement: str
) -> None:
    old, fatal, later, last = (next(VERSIONS) for _ in range(4))
    dying, other = Member(brood), Member(brood)
    source = weights(0)
    with Sender.connect([dying.url, other.url], **options(placement=placement)) as sender:
        old = begin(sender, source, old, point)
        dying.arm(armed(point, "kill"))
        outcomes, told = failed(sender, source, fatal)
        assert Outcome.COMMITTED not in outcomes
        assert dying.url.removeprefix("http://") in told
        assert dying.child.wait(LIMIT_S) < 0
        other.check_lives(old, placement)
        # Without it, the group is made anew of those that are left.
        fill(source, later)
        link = sender._links[0]
        with monkeypatch.context() as patch:  # how long it looks for the one that is gone
            patch.setattr(link, "_options", replace(link._options, connect_timeout_s=0.5))
            report, _ = attempt(sender, later, source)
        assert report.engines[1].outcome is Outcome.COMMITTED, report.engines[1].detail
        other.check_serves(later)
        # And with one that was started in its place.
        dying.restart()
        assert update(sender, source, last).is_committed
        for member in (dying, other):
            member.check_serves(last)


@pytest.mark.parametrize(("point", "placement"), [AT_ENGINE[0], AT_ENGINE[-1]])
def test_an_engine_of_three_members_stands_still(
    brood: Brood, monkeypatch: pytest.MonkeyPatch, point: str, placement: str
) -> None:
    monkeypatch.setattr("weightsync.link._STATUS_LIMIT_S", 0.5)  # for what it asks afterwards
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    stopped, other = Member(brood), Member(brood)
    source = weights(0)
    short = {"deadline_s": SHORT_S, "commit_timeout_s": SHORT_S}
    with Sender.connect(
        [stopped.url, other.url], **options(placement=placement, **short)
    ) as sender:
        old = begin(sender, source, old, point)
        stopped.arm(armed(point, "stop"))
        fill(source, fatal)
        start_s = time.monotonic()
        report, error = attempt(sender, fatal, source)
        assert time.monotonic() - start_s < LIMIT_S  # that is all: the machine may be busy
        assert isinstance(error, WeightSyncError)
        assert "stage 'move' after" in str(error) or "within" in str(error), error
        assert Outcome.COMMITTED not in [e.outcome for e in report.engines]
        stopped.child.wait_stopped(LIMIT_S)
        other.check_lives(old, placement)
        stopped.child.resume()
        settled = resolved(sender, report)
        assert Outcome.COMMITTED not in [e.outcome for e in settled.engines]
        stopped.check_lives(old, placement)
        assert update(sender, source, later).is_committed
        for member in (stopped, other):
            member.check_serves(later)


def begin(sender: Sender, source: Any, version: int, point: str) -> int:
    """The version served before the fault: a group is made in the first update."""
    if point.startswith("group."):
        return 0
    assert update(sender, source, version).is_committed
    return version


def armed(point: str, how: str) -> str:
    name, _, times = point.partition("@")
    return f"{name}={how}@{times or 1}"


# --- other sizes --------------------------------------------------------------------------------------


def test_a_trainer_with_another_bucket_and_one_more_engine(brood: Brood) -> None:
    """How large a bucket is and who is in the group is the trainer's to say; what was left is rebuilt."""
    first, second, third = (next(VERSIONS) for _ in range(3))
    members = [Member(brood) for _ in range(3)]
    source = weights(0)
    urls = [member.url for member in members]
    with Sender.connect(urls[:2], **options()) as sender:
        assert update(sender, source, first).is_committed
    with Sender.connect(urls, **options(bucket=4 * BUCKET_BYTES)) as sender:
        assert update(sender, source, second).is_committed
        for member in members:
            member.check_serves(second)
    with Sender.connect(urls[2:], **options(bucket=BUCKET_BYTES // 2)) as sender:
        assert update(sender, source, third).is_committed
    members[2].check_serves(third)
    members[0].check_serves(second)


def test_a_ring_that_an_engine_refuses(brood: Brood, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides keep the same limits: one that breaks them is told why, and nobody joins."""
    fatal, later = next(VERSIONS), next(VERSIONS)
    members = [Member(brood), Member(brood)]
    source = weights(0)
    original = Channel.send

    def other_limit(self: Channel, message: Any, *rest: Any, **more: Any) -> None:
        if message.get("kind") == "group":
            message = {**message, "slot_bytes": 0}
        original(self, message, *rest, **more)

    with Sender.connect([member.url for member in members], **options()) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(Channel, "send", other_limit)
            outcomes, told = failed(sender, source, fatal)
        assert Outcome.COMMITTED not in outcomes
        assert "frame 'group'" in told
        for member in members:
            member.check_lives(0, "staged")
        assert update(sender, source, later).is_committed
        for member in members:
            member.check_serves(later)


# --- ports --------------------------------------------------------------------------------------------


def test_the_meeting_place_is_somebody_else_s_port(
    brood: Brood, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who listens there never answers: every member gives up by the deadline that it was told."""
    fatal, later = next(VERSIONS), next(VERSIONS)
    members = [Member(brood), Member(brood)]
    source = weights(0)
    limits = {"deadline_s": SHORT_S, "commit_timeout_s": SHORT_S}
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        Sender.connect([member.url for member in members], **options(**limits)) as sender,
    ):
        with monkeypatch.context() as patch:
            place = {"host": "127.0.0.1", "port": mute.getsockname()[1]}
            patch.setattr(collective_gloo.GlooStore, "to_json", lambda self: place)
            outcomes, told = failed(sender, source, fatal)
        assert Outcome.COMMITTED not in outcomes
        assert "join" in told or "stage 'move'" in told
        for member in members:
            member.check_lives(0, "staged")
        assert update(sender, source, later).is_committed
        for member in members:
            member.check_serves(later)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(UnavailableError, match="name an address of this machine"):
        collective_gloo.GlooStore("192.0.2.1")


def test_groups_beside_the_trainer_s_own(brood: Brood) -> None:
    """The trainer has a default group, with its store on a port of its own; ours takes another."""
    version = next(VERSIONS)
    member = Member(brood)
    trainer = brood.start("faults.test_broadcast_group:trainer_with_a_group")
    ask(trainer, "connect", member.url, trainer_options("staged"))
    assert ask(trainer, "update", version)["outcome"] == "committed"
    assert ask(trainer, "own_sum") == 1.0
    ask(trainer, "close")
    assert ask(trainer, "own_sum") == 1.0
    member.check_serves(version)


class _WithGroup(TrainerCommands):
    def own_sum(self) -> float:
        """Of a collective of the trainer's own group."""
        import torch

        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        return float(ones)


def trainer_with_a_group(pipe: Pipe) -> None:
    import torch.distributed as dist

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make_store("127.0.0.1", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    serve(pipe, commands_of(_WithGroup()))
