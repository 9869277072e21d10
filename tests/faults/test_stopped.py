"""A process that stands still (SIGSTOP) is treated as gone; when it goes on, it can harm nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from nursery import Brood
from processes import Child

from engine_adapter.fake import FakeEngine
from faults.worker import BUCKET_BYTES, LIMIT_S, OPAQUE, ask, check_seen, fill, root, weights
from weightsync.errors import DeadlineError, TaintedError, UpdateFailedError
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.transports.ipc import IpcSource, IpcTransport
from weightsync.types import Outcome

pytestmark = pytest.mark.timeout(300)

VERSIONS = count(1)
#: Short, yet not so short that a busy machine misses it while all is well.
LEASE_S = 2.0


def options(**more: Any) -> dict[str, Any]:
    limits = {
        "connect_timeout_s": LIMIT_S,
        "deadline_s": LIMIT_S,
        "commit_timeout_s": LIMIT_S,
        "lease_s": 3600.0,
    }
    return {"transport": "ipc", **limits, **more}


@pytest.fixture
def engine(brood: Brood) -> Child:
    child = brood.start("faults.worker:engine")
    child.send(0)
    child.receive(LIMIT_S)
    return child


def update(sender: Sender, source: Any, version: int) -> Any:
    fill(source, version)
    started = sender.update(version=version)
    with started:
        started.send(source)
    return started


# --- the trainer stops --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "contract", "placement", "is_tainted"),
    [
        ("trainer.begun", "stream", "staged", False),
        ("trainer.begun", "stream", "in_place", False),
        ("stream.submit", "stream", "staged", False),
        ("stream.submit", "stream", "in_place", False),
        ("stream.submit@4", "stream", "in_place", True),
        ("stream.acquire", "stream", "staged", False),
        ("stream.acquire@4", "stream", "staged", False),
        ("trainer.moved", "stream", "in_place", True),
        ("trainer.moved", "direct", "staged", False),
        ("trainer.prepared", "direct", "in_place", True),
        ("trainer.prepared", "stream", "staged", False),
    ],
)
def test_the_trainer_stops_for_longer_than_its_lease(
    engine: Child, brood: Brood, point: str, contract: str, placement: str, is_tainted: bool
) -> None:
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    url = ask(engine, "url")
    name, _, times = point.partition("@")
    stopped = brood.start("faults.worker:trainer")
    how = options(contract=contract, placement=placement, lease_s=LEASE_S)
    ask(stopped, "connect", url, how)
    assert ask(stopped, "update", old)["outcome"] == "committed"
    ask(stopped, "arm", f"{name}=stop@{times or 1}")
    stopped.send(["update", fatal])
    stopped.wait_stopped(LIMIT_S)

    status = ask(engine, "settle", LIMIT_S)
    now = ask(engine, "now")
    if is_tainted:
        assert "refuses to generate" in now
        assert "lease" in status["tainted"]
    else:
        assert now == [old, root(old), old]
    check_seen(ask(engine, "seen"), 0, old)

    source = weights(0)
    with Sender.connect([url], bucket=BUCKET_BYTES, **options(contract=contract)) as second:
        update(second, source, later)
        served = [later, root(later), later]
        assert ask(engine, "now") == served
        ask(engine, "seen")

        stopped.resume()
        answer = stopped.receive(LIMIT_S)
        assert answer["error"] in (
            "SessionError",
            "DeadlineError",
            "PeerLostError",
            "UpdateFailedError",
            "TaintedError",
        )
        assert "lease" in answer["message"] + answer["notes"], answer
        report = ask(stopped, "report")
        assert report["outcome"] == ("tainted" if is_tainted else "aborted")
        assert report["version"] is None
        # Everything that it had still to say was said: nothing of it landed.
        assert ask(engine, "now") == served
        check_seen(ask(engine, "seen"), later)
        assert ask(engine, "status")["holder"] == second.run_id

        # Nor does it get in again while another run holds the engine.
        stopped.send(["update", next(VERSIONS)])
        last = next(VERSIONS)
        update(second, source, last)
        assert ask(engine, "now") == [last, root(last), last]
        check_seen(ask(engine, "seen"), later, last)
    # The second has closed: now the first may, with whole weights of its own.
    assert stopped.receive(LIMIT_S)["result"]["outcome"] == "committed"
    assert ask(engine, "now")[0] == last - 1


def test_the_trainer_ends_while_the_engine_stops_in_a_read(engine: Child, brood: Brood) -> None:
    for placement in ("staged", "in_place"):
        old, fatal, later = (next(VERSIONS) for _ in range(3))
        url = ask(engine, "url")
        dying = brood.start("faults.worker:trainer")
        ask(dying, "connect", url, options(contract="direct", placement=placement))
        assert ask(dying, "update", old)["outcome"] == "committed"
        ask(engine, "arm", "direct.read=stop")
        ask(engine, "seen")
        dying.send(["update", fatal])
        engine.wait_stopped(LIMIT_S)
        dying.kill()
        engine.resume()

        status = ask(engine, "settle", LIMIT_S)
        now = ask(engine, "now")
        if placement == "staged":
            assert now == [old, root(old), old]
        else:  # it was about to write when it stopped: nothing less than a refusal is safe
            assert "refuses to generate" in now
            assert status["tainted"]
        source = weights(0)
        with Sender.connect([url], bucket=BUCKET_BYTES, **options()) as second:
            update(second, source, later)
        assert ask(engine, "now") == [later, root(later), later]
        check_seen(ask(engine, "seen"), old, later)


# --- the engine stops ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "contract", "placement", "stage"),
    [
        ("engine.open", "direct", "staged", "begin and move"),
        ("engine.open", "stream", "in_place", "begin"),
        ("direct.read", "direct", "staged", "begin and move"),
        ("direct.read", "direct", "in_place", "begin and move"),
        ("stream.received", "stream", "staged", "move"),
        ("engine.prepare", "direct", "staged", "prepare and commit"),
        ("engine.prepare", "stream", "in_place", "prepare and commit"),
        ("engine.place", "direct", "staged", "prepare and commit"),
        ("engine.place", "stream", "in_place", "prepare and commit"),
    ],
)
def test_the_engine_stops_for_longer_than_the_deadlines(
    engine: Child,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    contract: str,
    placement: str,
    stage: str,
) -> None:
    monkeypatch.setattr("weightsync.link._STATUS_LIMIT_S", 0.5)  # for what it asks afterwards
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    url = ask(engine, "url")
    source = weights(0)
    how = options(contract=contract, placement=placement)
    with Sender.connect([url], bucket=BUCKET_BYTES, **how) as sender:
        update(sender, source, old)
        be_impatient(monkeypatch, sender, stage)
        ask(engine, "arm", f"{point}=stop")
        ask(engine, "seen")
        fill(source, fatal)
        started = sender.update(version=fatal)
        with pytest.raises((DeadlineError, UpdateFailedError)) as caught, started:
            started.send(source)
        engine.wait_stopped(LIMIT_S)
        text = str(caught.value)
        assert url.removeprefix("http://") in text
        assert re.search(rf"stage '{stage}' after \d+\.\d s", text), text
        assert started.report is not None
        assert [e.outcome for e in started.report.engines] == [Outcome.UNKNOWN]

        monkeypatch.undo()
        engine.resume()
        settled = resolved(sender, started.report, engine)
        outcome = settled.engines[0].outcome
        now = ask(engine, "now")
        if outcome is Outcome.TAINTED:
            assert "refuses to generate" in now
            assert placement == "in_place" or stage == "prepare and commit"
        else:
            serving = fatal if outcome is Outcome.COMMITTED else old
            assert now == [serving, root(serving), serving]
            assert outcome is Outcome.ABORTED or stage == "prepare and commit"
        check_seen(ask(engine, "seen"), old, fatal)

        update(sender, source, later)
        assert ask(engine, "now") == [later, root(later), later]
        check_seen(ask(engine, "seen"), old, fatal, later)


@pytest.mark.parametrize(
    ("point", "contract"),
    [("engine.open", "direct"), ("stream.received", "stream"), ("engine.prepare", "direct"),
     ("engine.place", "stream")],
)  # fmt: skip
def test_an_engine_that_stands_still_for_less_than_the_deadline_is_waited_for(
    engine: Child, monkeypatch: pytest.MonkeyPatch, point: str, contract: str
) -> None:
    """One exchange that runs out is not the end of a stage: it is asked for again."""
    monkeypatch.setattr("weightsync.control.POLL_S", 0.3)
    monkeypatch.setattr("weightsync.control._GRACE_S", 0.3)
    url = ask(engine, "url")
    source = weights(0)
    with Sender.connect([url], bucket=BUCKET_BYTES, **options(contract=contract)) as sender:
        update(sender, source, 1)
        ask(engine, "arm", f"{point}=stop")
        client, num_silent = sender._links[0].client, count(1)
        call = client.call

        def counted(request: Any, *, limit_s: float) -> Any:
            try:
                return call(request, limit_s=limit_s)
            except DeadlineError:
                if next(num_silent) == 2:
                    engine.wait_stopped(LIMIT_S)
                    engine.resume()
                raise

        monkeypatch.setattr(client, "call", counted)
        done = update(sender, source, 2)
        assert next(num_silent) > 2
        assert done.report.is_committed
        assert ask(engine, "now") == [2, root(2), 2]
        check_seen(ask(engine, "seen"), 0, 1, 2)


def be_impatient(patch: pytest.MonkeyPatch, sender: Sender, stage: str) -> None:
    """Short limits in the stage in which the engine will stop, long ones where it must get to it."""
    (link,) = sender._links
    if stage.startswith("begin"):
        patch.setattr(
            link, "_options", replace(link._options, deadline_s=1.0, commit_timeout_s=1.0)
        )
        return
    wait, short = link._wait, (stage, "abort")

    def impatient(make_request: Any, limit_s: float, at: str) -> Any:
        return wait(make_request, 1.0 if at in short else limit_s, at)

    wait_for_stages = link._wait_for_stages

    def impatient_together(stages: Any, limit_s: float) -> Any:
        return wait_for_stages(stages, 1.0 if " and ".join(stages) in short else limit_s)

    patch.setattr(link, "_wait", impatient)
    patch.setattr(link, "_wait_for_stages", impatient_together)


def resolved(sender: Sender, report: Any, engine: Child) -> Any:
    """Ask until the engine has ended the session by itself."""
    while True:
        settled = sender.resolve(report)
        if settled.engines[0].outcome is not Outcome.UNKNOWN:
            return settled
        ask(engine, "status")  # fails the test when the engine does not answer


# --- a trainer that connects again ----------------------------------------------------------------


def test_the_end_of_a_former_connection_does_not_end_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine sees the former channel break between the new handshake and its transport."""
    transport = _Patient()
    monkeypatch.setattr("weightsync.sender.get_transport", lambda name: transport)
    source = weights(0)
    receiver = _Ticking(FakeEngine(weights(0), OPAQUE))
    with receiver, Sender.connect([receiver.url], bucket=BUCKET_BYTES, **options()) as sender:
        update(sender, source, 1)
        transport.before = receiver.wait_for_ticks
        sender._links[
            0
        ].is_broken = True  # as after a deadline; the engine lives and has its channel
        update(sender, source, 2)
        assert receiver.version == 2


def test_a_run_that_connects_again_gives_up_its_open_session() -> None:
    source = weights(0)
    engine = FakeEngine(weights(0), OPAQUE)
    with Receiver(engine) as receiver:
        how = options(placement="in_place", contract="direct")
        with Sender.connect([receiver.url], bucket=BUCKET_BYTES, **how) as sender:
            update(sender, source, 1)
            fill(source, 2)
            started = sender.update(version=2)
            started.__enter__()
            started.send(source)
            sender._links[0].connect()
            with pytest.raises(UpdateFailedError, match="connected again"):
                started.__exit__(None, None, None)
            assert started.report is not None
            assert [e.outcome for e in started.report.engines] == [Outcome.TAINTED]
            with pytest.raises(TaintedError):
                engine.generate()
            update(sender, source, 3)
            assert engine.generate()[0] == 3


class _Patient(IpcTransport):
    """Does something first before it opens its end."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], None] = lambda: None

    def open_source(self, device: str = "cpu") -> IpcSource:
        self.before()
        return super().open_source(device)


class _Ticking(Receiver):
    """Counts how often it looked after its peer."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self._ticked = threading.Condition()
        self._num_ticks = 0

    def _watch_peer(self) -> None:
        super()._watch_peer()
        with self._ticked:
            self._num_ticks += 1
            self._ticked.notify_all()

    def wait_for_ticks(self) -> None:
        with self._ticked:
            wanted = self._num_ticks + 3
            assert self._ticked.wait_for(lambda: self._num_ticks >= wanted, LIMIT_S)
