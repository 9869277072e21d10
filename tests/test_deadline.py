"""Limits, with a clock of our own."""

from __future__ import annotations

import pytest

from weightsync.deadline import CancelToken, Deadline, poll_until
from weightsync.errors import CancelledError, ConfigError, DeadlineError, PeerLostError


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_deadline_runs_out() -> None:
    clock = Clock()
    deadline = Deadline(2.0, peer="engine e", stage="move", clock=clock)
    assert (deadline.elapsed_s(), deadline.remaining_s()) == (0.0, 2.0)
    assert deadline.slice_s() == pytest.approx(0.05)
    clock.now_s += 1.99
    deadline.check()
    assert deadline.slice_s() == pytest.approx(0.01)
    clock.now_s += 1.0
    assert deadline.remaining_s() == 0.0
    assert deadline.slice_s() == 0.0
    with pytest.raises(DeadlineError, match=r"engine e: .*'move' after 3\.0 s \(limit 2\.0 s\)"):
        deadline.check()


@pytest.mark.parametrize("limit_s", [0, -1.0, float("nan")])
def test_a_limit_that_cannot_be(limit_s: float) -> None:
    with pytest.raises(ConfigError, match="'move'"):
        Deadline(limit_s, peer="p", stage="move")


def test_a_cancelled_token_ends_a_wait_with_its_first_reason() -> None:
    token = CancelToken()
    deadline = Deadline(5.0, peer="p", stage="move", token=token)
    deadline.check()
    assert deadline.cancel_ptr == token.flag_ptr != 0
    token.cancel("first")
    token.cancel("second")
    assert token.is_cancelled
    assert token.native_flag.is_set
    with pytest.raises(CancelledError, match="'move' was given up: first"):
        deadline.check()


def test_without_a_token_there_is_no_flag() -> None:
    assert Deadline(1.0, peer="p", stage="s").cancel_ptr == 0


def test_the_loss_of_a_peer_names_the_stage_once() -> None:
    clock = Clock()
    deadline = Deadline(5.0, peer="p", stage="move", clock=clock)
    outer = Deadline(9.0, peer="p", stage="update", clock=clock)
    clock.now_s += 1.5
    with pytest.raises(PeerLostError) as caught, outer.naming_stage(), deadline.naming_stage():
        raise PeerLostError("engine e: its process 7 ended")
    assert str(caught.value) == "engine e: its process 7 ended (stage 'move', after 1.5 s)"
    assert caught.value.stage == "move"
    with pytest.raises(PeerLostError) as again, outer.naming_stage():
        raise deadline.lost("gone")
    assert str(again.value) == "gone (stage 'move', after 1.5 s)"


def test_another_error_stays_what_it_is() -> None:
    error = ConfigError("x")
    with (
        pytest.raises(ConfigError) as caught,
        Deadline(5.0, peer="p", stage="move").naming_stage(),
    ):
        raise error
    assert caught.value is error


def test_an_event_is_polled_until_it_has_passed() -> None:
    answers = iter([False, False, True])
    assert poll_until(lambda: next(answers), 60.0)
    assert next(answers, None) is None


def test_polling_has_a_limit_and_looks_once_at_least() -> None:
    assert not poll_until(lambda: False, 0.01)
    assert poll_until(lambda: True, 0.0)
    assert not poll_until(lambda: False, 0.0)


def test_what_makes_polling_vain_is_looked_at_now_and_then() -> None:
    looks = 0

    def lost() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise PeerLostError("gone")

    with pytest.raises(PeerLostError, match="gone"):
        poll_until(lambda: False, 60.0, lost, check_every_s=0.001)
    assert not poll_until(lambda: False, 0.01, lost, check_every_s=60.0)
    assert looks == 3
