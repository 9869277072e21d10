"""SIGKILL of either process while a whole update is asked for in one exchange.

The points are those of the protocol's table. What differs is that the trainer has nothing more to say once it
has asked: an engine that lost it goes on to the end of the stage, and decides or gives up by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from itertools import count
from typing import Any

import pytest
from nursery import Brood
from processes import ChildEnded

from faults.kill_table import Case
from faults.test_kill_points import Trainer, options_of, start_engine, with_trainer
from faults.worker import LIMIT_S, ask, check_seen, fill, root, wait_until
from weightsync.errors import UpdateFailedError
from weightsync.types import Outcome

pytestmark = pytest.mark.timeout(300)

PLACEMENTS = ("staged", "in_place")
#: A version is given once in this file, so that a label alone says what must stand behind it.
VERSIONS = count(1)
BEFORE_IT_IS_DECIDED = (
    "engine.open", "engine.opened", "direct.open", "direct.read", "direct.read_done", "engine.moved",
    "engine.prepare", "engine.prepared",
)  # fmt: skip
AFTERWARDS = ("engine.place", "engine.placed", "engine.resume", "engine.resumed")
both = pytest.mark.parametrize("placement", PLACEMENTS)


class Pushing(Trainer):
    """Sends in one call."""

    report: Any = None

    def send(self, version: int) -> None:
        fill(self.source, version)
        self.report = self.sender.update_weights(self.source, version=version)


@both
@pytest.mark.parametrize(
    ("point", "is_new"),
    [("trainer.begin", False), ("trainer.prepare", False), ("trainer.prepared", False),
     ("trainer.committed", True)],
)  # fmt: skip
def test_the_trainer_ends(point: str, is_new: bool, placement: str, brood: Brood) -> None:
    """Before it asks nothing has begun; once it was answered all is done."""
    case = Case(point, "direct", placement)
    engine, url = start_engine(brood, case, 0)
    dying = brood.start("faults.worker:trainer")
    ask(dying, "connect", url, options_of(case))
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    assert ask(dying, "update_weights", old)["outcome"] == "committed"
    ask(dying, "arm", f"{point}=kill")
    dying.send(["update_weights", fatal])
    assert dying.wait(LIMIT_S) == -signal.SIGKILL
    assert ask(engine, "settle", LIMIT_S)["tainted"] is None
    serving = fatal if is_new else old
    assert ask(engine, "now") == [serving, root(serving), serving]
    with_trainer(url, case, later)
    assert ask(engine, "now") == [later, root(later), later]
    check_seen(ask(engine, "seen"), 0, old, later, *([fatal] if is_new else []))


@both
def test_the_trainer_ends_before_its_manifests_came(placement: str, brood: Brood) -> None:
    """The engine reads meanwhile, and has nothing to decide by."""
    case = Case("trainer.manifest", "direct", placement)
    engine, url = start_engine(brood, case, 0)
    dying = brood.start("faults.worker:trainer")
    ask(dying, "connect", url, options_of(case))
    ask(dying, "send_manifests_apart")
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    assert ask(dying, "update_weights", old)["outcome"] == "committed"
    ask(dying, "arm", "trainer.manifest=kill")
    dying.send(["update_weights", fatal])
    assert dying.wait(LIMIT_S) == -signal.SIGKILL
    status = ask(engine, "settle", LIMIT_S)
    now = ask(engine, "now")
    if status["tainted"] is None:
        assert now == [old, root(old), old]
    else:
        assert placement == "in_place"
        assert "refuses to generate" in now
    with_trainer(url, case, later)
    assert ask(engine, "now") == [later, root(later), later]
    check_seen(ask(engine, "seen"), 0, old, later)


@both
@pytest.mark.parametrize("point", BEFORE_IT_IS_DECIDED + AFTERWARDS)
def test_the_trainer_ends_when_it_has_asked(point: str, placement: str, brood: Brood) -> None:
    """The engine stands still at a point while its trainer ends. Then it serves one version or the other
    whole, or refuses; and takes a new trainer."""
    case = Case(point, "direct", placement)
    engine, url = start_engine(brood, case, 0)
    dying = brood.start("faults.worker:trainer")
    ask(dying, "connect", url, options_of(case))
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    assert ask(dying, "update_weights", old)["outcome"] == "committed"
    ask(engine, "arm", f"{point}=stop")
    dying.send(["update_weights", fatal])
    wait_until(lambda: _is_stopped(engine.pid), LIMIT_S, lambda: f"not stopped at {point}")
    dying.kill()
    with contextlib.suppress(ChildEnded):
        dying.receive(LIMIT_S)
        pytest.fail("the trainer had its answer")
    os.kill(engine.pid, signal.SIGCONT)

    status = ask(engine, "settle", LIMIT_S)
    now = ask(engine, "now")
    if status["tainted"] is None:
        assert now in ([old, root(old), old], [fatal, root(fatal), fatal])
        assert point in BEFORE_IT_IS_DECIDED or now[0] == fatal
    else:
        assert "refuses to generate" in now
        assert (placement, point in BEFORE_IT_IS_DECIDED) == ("in_place", True)
    with_trainer(url, case, later)
    assert ask(engine, "now") == [later, root(later), later]
    check_seen(ask(engine, "seen"), 0, old, fatal, later)


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


@both
@pytest.mark.parametrize("point", BEFORE_IT_IS_DECIDED + AFTERWARDS)
def test_the_engine_ends(point: str, placement: str, brood: Brood) -> None:
    case = Case(point, "direct", placement)
    dying, url = start_engine(brood, case, 0)
    port = int(url.rpartition(":")[2])
    old, fatal, later = (next(VERSIONS) for _ in range(3))
    trainer = Pushing(url, case)
    try:
        trainer.send(old)
        assert ask(dying, "now") == [old, root(old), old]
        ask(dying, "arm", f"{point}=kill")
        with pytest.raises(UpdateFailedError) as caught:
            trainer.send(fatal)
        assert dying.wait(LIMIT_S) == -signal.SIGKILL
        assert f"127.0.0.1:{port}" in str(caught.value)
        assert re.search(r"stage '[\w ]+'", str(caught.value)), str(caught.value)
        (failed,) = caught.value.report.engines
        assert (failed.outcome, failed.version) == (Outcome.UNKNOWN, None)

        engine, _ = start_engine(brood, case, port)
        assert ask(engine, "now") == [None, root(0), None]
        trainer.send(later)
        assert ask(engine, "now") == [later, root(later), later]
        check_seen(ask(engine, "seen"), 0, later)
    finally:
        trainer.close()
