"""Changed copies are those of ``dataclasses.replace``."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, is_dataclass, replace
from typing import Any

import pytest

from weightsync import session, session_leader, session_rank
from weightsync.records import evolve
from weightsync.session_leader import LeaderState
from weightsync.session_rank import RankPhase, RankState

RECORDS = [
    kind
    for module in (session, session_leader, session_rank)
    for kind in vars(module).values()
    if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
]


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        (LeaderState("e", 2), {"seq": 7, "taint": "x"}),
        (LeaderState("e", 2), {}),
        (RankState(1, "e", 5.0), {"phase": RankPhase.OPEN, "heard_s": 2.5}),
    ],
)
def test_a_changed_copy_equals_that_of_dataclasses(state: Any, changes: dict[str, Any]) -> None:
    before = repr(state)
    made = evolve(state, **changes)
    assert made == replace(state, **changes)
    assert hash(made) == hash(replace(state, **changes))
    assert type(made) is type(state)
    assert repr(state) == before
    with pytest.raises(FrozenInstanceError):
        made.seq = 1


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="LeaderState has no field sequence"):
        evolve(LeaderState("e", 2), sequence=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_what_a_changed_copy_would_skip_is_not_there(kind: Any) -> None:
    assert not hasattr(kind, "__post_init__")
    assert not hasattr(kind, "__slots__")
    assert all(field.init for field in kind.__dataclass_fields__.values())
