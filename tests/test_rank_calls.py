"""What a rank is asked besides orders: whose transports are kept, and whose are closed."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.rank_calls import RankCalls


class Lost:
    """An endpoint whose peer may be gone."""

    def __init__(self, reason: str | None) -> None:
        self._reason = reason

    def lost(self) -> str | None:
        return self._reason


class Work:
    """As much of a rank's work as is watched."""

    def __init__(self, reason: str | None = None) -> None:
        self.endpoints = [Lost(reason)]

    def drop_endpoints(self) -> None:
        self.endpoints = []


def watched(work: Work, mine: str, holder: Any, *, is_quiet: bool = True) -> Any:
    calls = RankCalls(work, lambda job: None, lambda: False)  # type: ignore[arg-type]
    calls._tag = mine
    return calls.watch(lambda: holder(calls), lambda: is_quiet)


@pytest.mark.parametrize(
    ("holder", "is_quiet", "is_kept"),
    [("run#1", True, True), ("run#2", True, False), (None, True, False), (None, False, True)],
)
def test_transports_of_a_connection_that_is_over_are_closed(
    holder: str | None, is_quiet: bool, is_kept: bool
) -> None:
    work = Work()
    assert watched(work, "run#1", lambda calls: holder, is_quiet=is_quiet) is None
    assert bool(work.endpoints) is is_kept


def test_who_holds_the_engine_is_asked_while_nothing_can_be_attached() -> None:
    """An answer from before an attach would take the new transport for an old one."""
    work = Work()

    def holder(calls: RankCalls) -> str:
        assert calls._attaching.locked()
        return "run#1"

    watched(work, "run#1", holder)
    assert work.endpoints


def test_the_end_of_a_peer_is_told_with_its_connection() -> None:
    assert watched(Work("it ended"), "run#1", lambda calls: "run#2") == ("run#1", "it ended")
