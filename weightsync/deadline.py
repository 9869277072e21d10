"""Every wait has a deadline, and may be given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from weightsync import native
from weightsync.errors import CancelledError, ConfigError, DeadlineError, PeerLostError

#: Of what nobody can be woken by. Short beside a step of a device, long beside a look.
_LOOK_EVERY_S: Final = 20e-6


class CancelToken:
    """A flag that threads and native copies watch; set once, never cleared.

    ``native_flag`` is what native calls poll.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.native_flag = native.CancelFlag()
        self.reason = ""

    @property
    def flag_ptr(self) -> int:
        return self.native_flag.ptr

    def cancel(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.native_flag.set()
        self._event.set()

    @property
    def is_cancelled(self) -> bool:
        return self._event.is_set()


class Deadline:
    """A limit in seconds on the monotonic clock, with the words its error needs.

    ``check()`` raises :class:`DeadlineError` naming ``peer`` and ``stage``, or
    :class:`CancelledError` when ``token`` was cancelled.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        peer: str,
        stage: str,
        token: CancelToken | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not limit_s > 0:
            raise ConfigError(f"a limit of {limit_s} s for stage {stage!r}: it must be > 0")
        self.limit_s = limit_s
        self.peer = peer
        self.stage = stage
        self.token = token
        self._clock = clock
        self._start_s = clock()

    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.limit_s - self.elapsed_s())

    def slice_s(self, most_s: float = 0.05) -> float:
        """How long to block before looking at the token again: never longer than what is left."""
        return min(most_s, self.remaining_s())

    @property
    def cancel_ptr(self) -> int:
        """Address of the token's native flag, or 0."""
        return 0 if self.token is None else self.token.flag_ptr

    def check(self) -> None:
        if self.token is not None and self.token.is_cancelled:
            raise CancelledError(f"stage {self.stage!r} was given up: {self.token.reason}")
        if self.remaining_s() <= 0:
            raise self.error()

    def lost(self, reason: str) -> PeerLostError:
        """The error for a peer that went while it was waited for."""
        error = PeerLostError(f"{reason} (stage {self.stage!r}, after {self.elapsed_s():.1f} s)")
        error.stage = self.stage
        return error

    @contextmanager
    def naming_stage(self) -> Iterator[None]:
        """A :class:`PeerLostError` from within says the stage, also where it is noticed by what has
        no deadline: a send into a socket that broke, a look at whether the peer lives."""
        try:
            yield
        except PeerLostError as error:
            if error.stage:
                raise
            raise self.lost(str(error)) from error

    def error(self) -> DeadlineError:
        return DeadlineError(self.peer, self.stage, self.limit_s, self.elapsed_s())


def poll_until(
    is_done: Callable[[], bool],
    limit_s: float,
    check: Callable[[], None] | None = None,
    check_every_s: float = 0.01,
) -> bool:
    """Whether ``is_done`` was true within ``limit_s``; for an event of a device, which wakes nobody.

    It is asked once at least. ``check`` costs more, is called every ``check_every_s``, and raises what
    makes waiting vain.
    """
    start_s = checked_s = time.monotonic()
    while not is_done():
        now_s = time.monotonic()
        if check is not None and now_s - checked_s > check_every_s:
            check()
            checked_s = now_s
        if now_s - start_s >= limit_s:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
