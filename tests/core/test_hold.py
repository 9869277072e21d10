"""What several ranks must want before the engine stands still, and before it goes on."""

from __future__ import annotations

import pytest

from engine_adapter.core.hold import Hold
from weightsync.types import PauseMode

MODE = PauseMode.RETRACT


@pytest.mark.parametrize("was_on", [False, True])
@pytest.mark.parametrize(
    ("wanting", "is_on"),
    [
        ([True, True], True),
        ([False, False], False),
        ([True, False], None),  # as it was: one asked first, or gave up first
        ([False, True], None),
    ],
)
def test_it_changes_only_when_all_want_the_same(
    was_on: bool, wanting: list[bool], is_on: bool | None
) -> None:
    acts: list[PauseMode] = []
    hold = Hold(acts.append)
    hold.is_on = was_on
    hold.settle(MODE if wanting[0] else None, wanting)
    assert hold.is_on is (was_on if is_on is None else is_on)
    assert acts == ([MODE] if hold.is_on and not was_on else [])


def test_what_was_told_counts_not_what_is_wanted_since() -> None:
    """A rank that gives up meanwhile must decide as the others do, or their steps would part."""
    acts: list[PauseMode] = []
    hold = Hold(acts.append)
    hold.wanted = None
    hold.settle(MODE, [True, True])
    assert hold.is_on
    assert acts == [MODE]
