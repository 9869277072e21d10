"""A thousand refits: neither process grows by a descriptor, a mapping, a thread, or memory.

Each refit changes bytes; the engine's weights are strided and opaque too. All five ways do the
same number of refits.
"""

from __future__ import annotations

import pytest
from nursery import Brood

from faults.skips import NEEDS_NIXL
from faults.worker import LIMIT_S, ask

pytestmark = pytest.mark.timeout(600)

NUM_WARM = 50
NUM_REFITS = 1000
REFITS_LIMIT_S = 500.0
#: What the C library takes for arenas of its threads now and then.
FEW_MAPS = 12
FEW_BYTES = 4 * 2**20
#: No heartbeat, which would open a connection of its own in the middle.
QUIET = {"lease_s": 3600.0}

HOW = [
    pytest.param("ipc", "stream", "staged", id="ipc-stream-staged"),
    pytest.param("ipc", "direct", "in_place", id="ipc-direct-in_place"),
    pytest.param("p2p", "stream", "in_place", id="p2p-stream-in_place", marks=NEEDS_NIXL),
    pytest.param("p2p", "direct", "staged", id="p2p-direct-staged", marks=NEEDS_NIXL),
]


def check_flat(before: dict[str, int], after: dict[str, int]) -> None:
    assert after["fds"] <= before["fds"]
    assert after["threads"] <= before["threads"]
    assert after["maps"] - before["maps"] <= FEW_MAPS
    assert after["resident"] - before["resident"] <= FEW_BYTES


@pytest.mark.parametrize(("transport", "contract", "placement"), HOW)
def test_refits_between_processes(
    brood: Brood, transport: str, contract: str, placement: str
) -> None:
    engine = brood.start("faults.worker:engine", transport=transport)
    engine.send(0)
    url = engine.receive(LIMIT_S)
    trainer = brood.start("faults.worker:trainer", transport=transport)
    options = {**QUIET, "transport": transport, "contract": contract, "placement": placement}
    ask(trainer, "connect", url, options)
    ask(trainer, "refits", 1, NUM_WARM)
    before = [ask(p, "footprint") for p in (engine, trainer)]
    # The engine witnesses all the while; that costs it a digest every 10 ms, and nothing else.
    trainer.send(["refits", NUM_WARM + 1, NUM_REFITS])
    assert trainer.receive(REFITS_LIMIT_S) == {"result": None}
    after = [ask(p, "footprint") for p in (engine, trainer)]
    assert ask(engine, "now")[0] == NUM_WARM + NUM_REFITS
    for was, now in zip(before, after, strict=True):
        check_flat(was, now)


@pytest.mark.parametrize(("contract", "client"), [("stream", "here"), ("direct", "by http")])
def test_refits_within_a_process(brood: Brood, contract: str, client: str) -> None:
    process = brood.start("faults.worker:both")
    ask(process, "connect", client, {**QUIET, "transport": "loopback", "contract": contract})
    ask(process, "refits", 1, NUM_WARM)
    before = ask(process, "footprint")
    process.send(["refits", NUM_WARM + 1, NUM_REFITS])
    assert process.receive(REFITS_LIMIT_S) == {"result": None}
    check_flat(before, ask(process, "footprint"))


@pytest.mark.parametrize("contract", ["stream", "direct"])
def test_trainers_that_come_and_go(brood: Brood, contract: str) -> None:
    """Fifty runs, one after the other, on one engine."""
    engine = brood.start("faults.worker:engine")
    engine.send(0)
    url = engine.receive(LIMIT_S)
    options = {**QUIET, "transport": "ipc", "contract": contract}
    trainer = brood.start("faults.worker:trainer")
    footprints = []
    for run in range(60):
        ask(trainer, "connect", url, options)
        ask(trainer, "refits", run + 1, 1)
        ask(trainer, "close")
        if run == 9:
            ask(engine, "released", LIMIT_S)
            footprints = [ask(p, "footprint") for p in (engine, trainer)]
    ask(engine, "released", LIMIT_S)
    for was, process in zip(footprints, (engine, trainer), strict=True):
        check_flat(was, ask(process, "footprint"))
