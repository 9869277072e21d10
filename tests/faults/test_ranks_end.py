"""One of several ranks ends (SIGKILL) at a named point: an error that names it within the deadline, no mix of
versions anywhere, and the next update works."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from nursery import Brood
from processes import Child

from faults.worker import LIMIT_S, answer_of, ask

pytestmark = pytest.mark.timeout(120)

#: A rank that ended is noticed at once by who speaks to it; a leader waits for its report this long.
DEADLINE_S = 2.0


def options(contract: str, placement: str) -> dict[str, Any]:
    return {
        "transport": "ipc", "contract": contract, "placement": placement,
        "connect_timeout_s": LIMIT_S, "lease_s": 3600.0,
        "deadline_s": DEADLINE_S, "commit_timeout_s": DEADLINE_S,
    }  # fmt: skip


class Ranks:
    """An engine of two ranks and a trainer of two, as processes."""

    def __init__(self, brood: Brood, folder: Path, contract: str, placement: str) -> None:
        self._brood, self._folder = brood, folder
        self._options = options(contract, placement)
        self.engines = self.start_engines()
        self.trainers = self.start_trainers()

    def _begin_engine(self, rank: int, folder: str) -> Child:
        child = self._brood.start("faults.rank_worker:engine")
        child.send([rank, 2, folder])
        return child

    def start_engines(self) -> list[Child]:
        self._home = self._folder_of("engine")
        found = [self._begin_engine(rank, self._home) for rank in range(2)]
        assert [child.receive(LIMIT_S) for child in found] == ["joined"] * 2
        return found

    def restart_engine_rank(self, rank: int) -> None:
        self.engines[rank] = self._begin_engine(rank, self._home)
        assert self.engines[rank].receive(LIMIT_S) == "joined"

    def _folder_of(self, name: str) -> str:
        number = len(list(self._folder.iterdir()))
        folder = self._folder / f"{name}-{number}"
        folder.mkdir()
        return str(folder)

    def start_trainers(self) -> list[Child]:
        url, folder = ask(self.engines[0], "url"), self._folder_of("trainer")
        found = [self._brood.start("faults.rank_worker:trainer") for _ in range(2)]
        for rank, child in enumerate(found):
            child.send(["connect", url, rank, 2, folder, self._options])
        for child in found:
            answer_of(child)
        return found

    def begin_update(self, version: int) -> None:
        for child in self.trainers:
            child.send(["update", version])

    def update(self, version: int) -> None:
        self.begin_update(version)
        for child in self.trainers:
            assert answer_of(child)["outcome"] == "committed"
        assert self.now(version) == [[version, version]] * 2

    def now(self, *versions: int) -> list[Any]:
        return [ask(child, "now", *versions) for child in self.engines]


@pytest.fixture
def start(brood: Brood, tmp_path: Path) -> Any:
    return lambda contract, placement: Ranks(brood, tmp_path, contract, placement)


def failed(child: Child) -> str:
    """The words of the error that a trainer rank ends an update with."""
    answer = child.receive(LIMIT_S)
    assert "error" in answer, answer
    return f"{answer['error']}: {answer['message']} {answer.get('notes', '')}"


@pytest.mark.parametrize(
    ("point", "contract", "placement", "after"),
    [
        ("engine.open", "direct", "staged", "old"),
        ("engine.move", "direct", "staged", "old"),
        ("direct.read", "direct", "in_place", "refuses"),
        ("engine.bucket", "stream", "staged", "old"),
        ("engine.prepare", "stream", "staged", "old"),
        ("engine.prepared", "direct", "in_place", "refuses"),
        ("engine.half_placed", "stream", "staged", "refuses"),
        ("engine.placed", "direct", "staged", "refuses"),
        ("engine.resume", "direct", "staged", "new"),
    ],
)
def test_a_rank_of_the_engine_that_does_not_lead_ends(
    start: Any, point: str, contract: str, placement: str, after: str
) -> None:
    ranks = start(contract, placement)
    ranks.update(1)
    ask(ranks.engines[1], "arm", f"{point}=kill")
    ranks.begin_update(2)
    said = [failed(child) for child in ranks.trainers]
    assert any("rank 1" in words or "did not report: 1" in words for words in said), said
    ranks.engines[1].wait(LIMIT_S)
    now = ask(ranks.engines[0], "now", 1, 2)
    # Without a rank it refuses; whole and old it may only be where nothing live was written.
    assert "refuses to generate" in now or (after == "old" and now == [1, 1]), now
    ranks.restart_engine_rank(1)
    ranks.update(3)


@pytest.mark.parametrize(
    ("point", "contract", "placement"),
    [
        ("engine.open", "direct", "staged"),
        ("direct.read", "direct", "in_place"),
        ("engine.bucket", "stream", "staged"),
        ("engine.prepared", "direct", "staged"),
        ("engine.half_placed", "direct", "staged"),
        ("engine.resume", "stream", "staged"),
    ],
)
def test_the_leader_ends(start: Any, point: str, contract: str, placement: str) -> None:
    ranks = start(contract, placement)
    ranks.update(1)
    ask(ranks.engines[0], "arm", f"{point}=kill")
    ranks.begin_update(2)
    for child in ranks.trainers:
        assert "engine" in failed(child)
    ranks.engines[0].wait(LIMIT_S)
    end_s = time.monotonic() + LIMIT_S
    while isinstance(said := ask(ranks.engines[1], "now", 1, 2), list):  # not noticed yet
        assert time.monotonic() < end_s, "alone it may not go on"
    assert "lost the leader" in said
    ranks.engines[1].kill()
    for child in ranks.trainers:
        child.kill()
    ranks.engines = ranks.start_engines()
    ranks.trainers = ranks.start_trainers()
    ranks.update(3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("point", "contract", "placement", "after"),
    [
        ("direct.publish", "direct", "staged", "old"),
        ("direct.published", "direct", "in_place", "old"),
        ("stream.acquire", "stream", "staged", "old"),
        ("stream.submitted", "stream", "staged", "old"),
        ("stream.flush", "stream", "staged", "old"),
    ],
)
def test_a_rank_of_the_trainer_ends(
    start: Any, point: str, contract: str, placement: str, after: str, rank: int
) -> None:
    ranks = start(contract, placement)
    ranks.update(1)
    ask(ranks.trainers[rank], "arm", f"{point}=kill")
    ranks.begin_update(2)
    words = failed(ranks.trainers[1 - rank])
    assert f"rank {rank}" in words or "run" in words, words
    ranks.trainers[rank].wait(LIMIT_S)
    ranks.trainers[1 - rank].kill()
    ranks.trainers = ranks.start_trainers()
    assert ranks.now(1, 2) == [[1, 1]] * 2
    ranks.update(3)
