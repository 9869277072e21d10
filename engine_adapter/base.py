"""The adapter contract, handed on from :mod:`weightsync.engine`, and the gate that adapters share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.deadline import Deadline
from weightsync.engine import EngineAdapter, Fingerprint, RunningEngine, UpdatingEngine
from weightsync.errors import TaintedError


class StepGate:
    """Lets steps of an engine through, one update's pause or refusal at a time.

    For engines without a loop of their own: whoever runs a forward pass does it inside ``step()``;
    whoever changes weights pauses first. Steps may overlap each other, a pause overlaps none.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_steps = 0
        self._is_paused = False
        self._refusal: str | None = None

    @contextmanager
    def step(self, limit_s: float = 600.0) -> Iterator[None]:
        """Around one step: waits while paused. Raises :class:`TaintedError` when refusing and
        :class:`DeadlineError` after ``limit_s`` seconds of pause."""
        deadline = Deadline(limit_s, peer="the engine", stage="step (paused by an update)")
        with self._changed:
            while self._is_paused and self._refusal is None:
                deadline.check()
                self._changed.wait(timeout=deadline.slice_s(0.5))
            if self._refusal is not None:
                raise TaintedError(f"the engine refuses to generate: {self._refusal}")
            self._num_steps += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_steps -= 1
                self._changed.notify_all()

    def pause(self, deadline: Deadline) -> None:
        """Return when no step is running and none will start; on a raised error steps go on."""
        with self._changed:
            self._is_paused = True
            try:
                while self._num_steps:
                    deadline.check()
                    self._changed.wait(timeout=deadline.slice_s())
            except BaseException:
                self._is_paused = False
                self._changed.notify_all()
                raise

    def resume(self) -> None:
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def refuse(self, reason: str | None) -> None:
        with self._changed:
            self._refusal = reason
            self._changed.notify_all()

    @property
    def refusal(self) -> str | None:
        return self._refusal

    @property
    def is_paused(self) -> bool:
        return self._is_paused


__all__ = ["EngineAdapter", "Fingerprint", "RunningEngine", "StepGate", "UpdatingEngine"]
