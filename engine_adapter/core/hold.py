"""Whether the engine stands still for whoever changes its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightsync.types import PauseMode


class Hold:
    """Of several ranks each says by itself that it wants to be held, and when no longer.

    What holds changes at a step boundary that is common to them, and only once they all want the same:
    a rank that gives up before the others, or never asked, leaves the engine as it was. ``act`` deals
    with the requests in flight when it begins.
    """

    def __init__(self, act: Callable[[PauseMode], None]) -> None:
        self._act = act
        self.wanted: PauseMode | None = None
        self.is_on = False

    def settle(self, wanted: PauseMode | None, wanting: Sequence[bool]) -> None:
        """At a boundary: what this rank wanted when ``wanting``, what each rank wants, was told; the same
        is told on every rank, so the same is decided."""
        if wanted is not None and all(wanting) and not self.is_on:
            self._act(wanted)
            self.is_on = True
        elif not any(wanting):
            self.is_on = False
