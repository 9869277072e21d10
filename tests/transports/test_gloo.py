"""What gloo's own words are taken for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from weightsync.errors import TransportError
from weightsync.transports.collective_gloo import GlooCollective, _GlooPending


class FakeWork:
    """A broadcast that ends while a wait for it runs out: that wait fails, the next one does not."""

    def __init__(self, error: str | None = None) -> None:
        self._error = error
        self._num_waits = 0

    def wait(self, limit: timedelta) -> None:
        self._num_waits += 1
        if self._num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return self._num_waits > 0


def pending(work: Any) -> _GlooPending:
    return _GlooPending(work, GlooCollective(None, frozenset()), None)


def test_a_wait_that_runs_out_as_the_broadcast_ends() -> None:
    assert pending(FakeWork()).wait(0.1) is True


def test_a_wait_that_runs_out_as_the_broadcast_fails() -> None:
    error = "[/some/place.cc:553] Connection closed by peer [127.0.0.1]:51418. This is typical"
    with pytest.raises(
        TransportError, match=r"^gloo: Connection closed by peer \[127.0.0.1\]:51418$"
    ):
        pending(FakeWork(error)).wait(0.1)
