"""A trainer rank's ends of its transports to one engine."""

from __future__ import annotations

from typing import Any

import pytest
from layouts import build, whole

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError
from weightsync.options import resolve_options
from weightsync.source_ends import SourceEnds
from weightsync.transports.loopback import LoopbackTransport


class NeverAsked:
    """An engine's control end that nobody may call."""

    peer = "engine nowhere"

    def call(self, request: Any, *, limit_s: float) -> dict[str, Any]:
        raise AssertionError(f"asked {request} within {limit_s} s")

    def close(self) -> None: ...


@pytest.mark.parametrize("world", [1, 2])
def test_a_limit_that_has_passed_is_a_deadline_before_anything_is_asked(world: int) -> None:
    layout = build(world, {"a": ("int8", (4,), [whole((4,), r) for r in range(world)])}).layout
    now = [0.0]
    deadline = Deadline(2.0, peer="engine nowhere", stage="attach", clock=lambda: now[0])
    now[0] = 2.5
    ends = SourceEnds(
        NeverAsked(), LoopbackTransport(), resolve_options(2**20), "run", 0, lambda phase, s: None
    )
    with pytest.raises(DeadlineError, match="stage 'attach'"):
        ends.attach(range(world), layout, deadline)
    ends.close()
