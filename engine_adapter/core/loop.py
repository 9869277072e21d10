"""The engine's own thread: step after step, and a nap where there is nothing to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engine_adapter.core.boundary import StepBoundary
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, DeadlineError, PeerLostError

_log = logging.getLogger(__name__)

IDLE_S = 0.05  # a thread with nothing to do looks again after this, or when woken
POLL_S = 0.002  # streams, and ranks that wait for each other, look more often


class EngineLoop:
    """Calls ``step`` (True: there was work) until it is stopped.

    A step that raises has failed its requests; the loop goes on with the others. A rank that is lost
    ends it: ``on_lost`` says so to everybody who waits.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        boundary: StepBoundary,
        on_lost: Callable[[PeerLostError], None],
        idle_s: float = IDLE_S,
    ) -> None:
        self._step, self._boundary, self._on_lost = step, boundary, on_lost
        self.idle_s = idle_s
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Raises :class:`ConfigError` if it runs already."""
        if self._thread is not None:
            raise ConfigError("the engine has been started already")
        self._is_stopping = False
        self._boundary.has_driver = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """End the thread after its step; harmless when there is none. Raises :class:`DeadlineError`."""
        if self._thread is None:
            return
        if self._thread.is_alive():  # at a boundary, so that ranks stop after the same step
            deadline = Deadline(limit_s, peer="the engine", stage="stop")
            self._boundary.call(self._note_stop, deadline)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise DeadlineError("the engine", "stop", limit_s, limit_s)
        self._thread = None

    def _note_stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    is_busy = self._step()
                except PeerLostError as error:
                    _log.exception("the engine stops")
                    self._on_lost(error)
                    return
                except Exception:  # its requests have failed by name
                    _log.exception("a step of the engine failed")
                    continue
                if not is_busy and not self._is_stopping:
                    self._boundary.wait_for_work(self.idle_s)
        finally:
            self._boundary.has_driver = False
