"""The promises of an update session, held over many simulated histories.

``WEIGHTSYNC_SESSION_SEEDS`` asks for another number of histories than the default; a failing one is
replayed with ``python -m tests.session.simulation --replay SEED``.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .planted import PLANTS, Plant
from .simulation import first_failure, main, report, run_parallel, run_seed, trace_seed

NUM_SEEDS = int(os.environ.get("WEIGHTSYNC_SESSION_SEEDS", "20000"))
NUM_SEEDS_TO_FIND = 6_000

#: How often each situation must come up in 10,000 histories, at the least: about a third of what
#: does. If a change of the machines or of the simulation makes one rare, this says so.
REQUIRED = {
    "published": 5_000,
    "partial update published": 300,
    "outcome committed": 5_000,
    "outcome aborted": 1_200,
    "outcome tainted": 1_800,
    "aborted after no move": 500,
    "aborted after a move": 500,
    "tainted after no move": 300,
    "tainted after a move": 1_000,
    "answer outcome committed": 5_000,
    "answer outcome aborted": 300,
    "answer outcome tainted": 600,
    "answer BusyError": 2_000,
    "answer DeadlineError": 300,
    "answer EpochError": 200,
    "answer IntegrityError": 200,
    "answer MissingNameError": 60,
    "answer PeerLostError": 250,
    "answer ScopeError": 300,
    "answer SessionError": 1_500,
    "answer TaintedError": 80,
    "answer TransportError": 150,
    "answer VersionError": 120,
    "begin while busy": 600,
    "second run refused": 2_000,
    "lease expired": 700,
    "deadline passed": 600,
    "trainer left a session open": 200,
    "trainer's end noticed": 100,
    "overrun in placing": 30,
    "overrun in resuming": 10,
    "overrun in aborting": 50,
    "leader lost while open": 100,
    "leader lost while prepared": 10,
    "leader lost while placed": 10,
    "status known": 300,
    "status unknown": 500,
    "message lost": 3_000,
    "late or doubled order": 5_000,
    "order of an unknown leader": 5_000,
    "request repeated": 1_000,
    "update in one exchange": 1_200,
    "asked again after it committed": 60,
    "caller gave up waiting": 1_500,
    "answer after the caller gave up": 2_000,
    "answer to a copy or a broken connection": 400,
    "read changed sources": 200,
    "byte corrupted": 200,
    "job cancelled": 600,
    "delta taken back": 20,
    "job hangs": 200,
    "job open failed": 20,
    "job move failed": 80,
    "job prepare failed": 15,
    "job place failed": 15,
    "job resume failed": 8,
    "job discard failed": 10,
    "initial weights could serve": 10_000,
    "idle at last and serves": 60,
    "idle at last and refuses": 60,
}
PHASES = (
    "idle", "opening", "open", "moving", "preparing", "prepared", "placing", "resuming", "aborting",
)  # fmt: skip
REQUIRED |= {f"crash leader while {phase}": 20 for phase in PHASES}
REQUIRED |= {f"crash rank while {phase}": 12 for phase in PHASES}
REQUIRED |= {f"stall leader while {phase}": 10 for phase in PHASES}
REQUIRED |= {f"cut rank while {phase}": 10 for phase in PHASES}
REQUIRED |= {f"stall trainer while {phase}": 8 for phase in PHASES}
REQUIRED |= {f"crash trainer while {phase}": 3 for phase in PHASES}
REQUIRED |= {f"abort in {phase}": 150 for phase in PHASES[1:6]}


@pytest.fixture(scope="module")
def total() -> Counter[str]:
    """What all histories came across; each of them kept every promise."""
    return run_parallel(0, NUM_SEEDS)


@pytest.mark.timeout(1800)
def test_every_history_keeps_the_promises(total: Counter[str]) -> None:
    print(report(total))
    assert total["seeds"] == NUM_SEEDS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", REQUIRED)
def test_the_histories_are_rich(total: Counter[str], name: str) -> None:
    assert total[name] >= REQUIRED[name] * NUM_SEEDS // 10_000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    with plant.applied():
        failure = first_failure(range(NUM_SEEDS_TO_FIND))
    assert failure is not None, f"{NUM_SEEDS_TO_FIND} histories did not find: {plant.name}"
    assert failure.rule in plant.rules, str(failure)
    assert f"--replay {failure.seed}" in str(failure)
    run_seed(failure.seed)  # and it was the planted bug


def test_a_history_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = trace_seed(5)
    assert lines == trace_seed(5)
    assert any("PEACE" in line for line in lines)
    assert main(["--replay", "5"], print) == 0
    assert capsys.readouterr().out.strip() == "\n".join(lines).strip()


def test_a_failing_history_ends_its_trace_with_the_broken_promise() -> None:
    [plant] = [p for p in PLANTS if p.name == "versions may go back"]
    with plant.applied():
        failure = first_failure(range(NUM_SEEDS_TO_FIND))
        assert failure is not None
        assert "versions rise" in trace_seed(failure.seed)[-1]
