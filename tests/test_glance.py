"""A look at tensors is taken once, where it is asked for, and never outlives what it belongs to."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightsync.glance import Glance

LIMIT_S = 10.0


class Looked:
    """Where the look was taken."""

    def __init__(self, error: Exception | None = None) -> None:
        self.threads: list[str] = []
        self.error = error

    def __call__(self) -> None:
        self.threads.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error


@pytest.fixture
def aside() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "aside")


def here() -> str:
    return threading.current_thread().name


def test_the_first_to_say_how_decides(aside: ThreadPoolExecutor) -> None:
    look = Looked()
    with Glance(look, aside).around() as glance:
        glance.take_here()
        assert look.threads == [here()]
        glance.take_aside()
    with Glance(look, aside).around() as glance:
        glance.take_aside()
        glance.take_here()
    assert look.threads == [here(), "aside_0"]


def test_a_look_that_nobody_took_is_taken_at_the_end(aside: ThreadPoolExecutor) -> None:
    look = Looked()
    with Glance(look, aside).around():
        assert look.threads == []
    assert look.threads == [here()]


def test_without_a_look_nothing_is_done(aside: ThreadPoolExecutor) -> None:
    with Glance(None, aside).around() as glance:
        glance.take_here()
        glance.take_aside()
    assert not aside._threads


@pytest.mark.parametrize("way", ["take_here", "take_aside"])
def test_what_was_found_is_raised_at_the_end(way: str, aside: ThreadPoolExecutor) -> None:
    ended: list[str] = []

    def look_and_end() -> None:
        with Glance(Looked(ValueError("it moved")), aside).around() as glance:
            getattr(glance, way)()
            ended.append(way)

    with pytest.raises(ValueError, match="it moved"):
        look_and_end()
    assert ended == [way], "bytes that move are not stopped by it"


def test_the_error_of_the_block_comes_first_and_the_look_has_ended(
    aside: ThreadPoolExecutor,
) -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def look() -> None:
        began.set()
        assert go.wait(LIMIT_S)
        ended.set()
        raise ValueError("it moved")

    def fail() -> None:
        with Glance(look, aside).around() as glance:
            glance.take_aside()
            assert began.wait(LIMIT_S)
            threading.Timer(0.01, go.set).start()
            raise OSError("the read failed")

    with pytest.raises(OSError, match="the read failed"):
        fail()
    assert ended.is_set()
