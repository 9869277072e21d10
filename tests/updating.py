"""One trainer and its engines in this process, over real HTTP: helpers for tests of whole updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from engine_adapter.fake import FakeEngine
from weightsync.digest import digest_tensors
from weightsync.errors import UpdateFailedError
from weightsync.receiver import Receiver, ReceiverHooks
from weightsync.report import EngineReport, UpdateReport
from weightsync.sender import Sender, Update
from weightsync.transports.loopback import LoopbackFaults, LoopbackTransport
from weightsync.types import Outcome

LIMIT_S = 20.0
#: Options of a test's sender: limits that no good run reaches.
OPTIONS: Mapping[str, Any] = {
    "transport": "loopback",
    "bucket": "4KiB",
    "lease_s": 20.0,
    "connect_timeout_s": LIMIT_S,
    "deadline_s": LIMIT_S,
    "commit_timeout_s": LIMIT_S,
}
WAYS = [(p, c) for p in ("staged", "in_place") for c in ("stream", "direct")]
ways = pytest.mark.parametrize(("placement", "contract"), WAYS)
placements = pytest.mark.parametrize("placement", ["staged", "in_place"])
Arrays = dict[str, Any]


def weights(seed: int) -> Arrays:
    """Large, odd, opaque, strided, scalar and empty tensors."""
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((60, 50)).astype(np.float32),
        "b": rng.integers(-99, 99, (7,)).astype(np.int8),
        "c": np.array(rng.standard_normal()),
        "empty": np.zeros((0, 4), np.float32),
        "t": rng.standard_normal((24, 16)).T,
    }


def engine_of(seed: int = 0, **options: Any) -> FakeEngine:
    options.setdefault("opaque", ("b",))
    return FakeEngine(weights(seed), **options)


def digests(arrays: Mapping[str, Any]) -> dict[str, int]:
    return digest_tensors(arrays.items())


@contextmanager
def connected(*engines: Any, hooks: ReceiverHooks | None = None, **options: Any) -> Iterator[Any]:
    """(sender, receivers) of these adapters."""
    receivers = [Receiver(engine, hooks=hooks).start() for engine in engines]
    sender: Sender | None = None
    try:
        sender = Sender.connect([r.url for r in receivers], **{**OPTIONS, **options})
        yield sender, receivers
    finally:
        if sender is not None:
            sender.close()
        for receiver in receivers:
            receiver.close()


def refit(sender: Sender, version: int, source: Any, scope: Any = None) -> UpdateReport:
    with sender.update(version=version, scope=scope) as update:
        update.send(source)
    assert update.report is not None
    return update.report


def failed_refit(sender: Sender, version: int, source: Any, scope: Any = None) -> UpdateFailedError:
    """The error of an update that must not commit."""
    with pytest.raises(UpdateFailedError) as caught:
        refit(sender, version, source, scope)
    return caught.value


def failing(act: Callable[[], Any]) -> BaseException:
    """Whatever an update raises, be it at once or when it is left."""
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def outcomes(report: UpdateReport) -> list[Outcome]:
    return [e.outcome for e in report.engines]


def only(report: UpdateReport | None) -> EngineReport:
    assert report is not None
    (engine,) = report.engines
    return engine


def attempt(sender: Sender, version: int, source: Any) -> tuple[UpdateReport, BaseException | None]:
    """An update that may fail; its report in any case."""
    update: Update = sender.update(version=version)
    error: BaseException | None = None
    try:
        with update:
            update.send(source)
    except Exception as raised:
        error = raised
    assert update.report is not None
    return update.report, error


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put faults in the way of every loopback that is opened from now on."""

    def arm(**faults: Any) -> None:
        transport = LoopbackTransport(LoopbackFaults(**faults))
        monkeypatch.setattr("weightsync.sender.get_transport", lambda name: transport)

    return arm


class Gate:
    """Stops whoever comes here until it is opened, and says when somebody is here."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *_: Any) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)

    def wait(self) -> None:
        assert self.reached.wait(LIMIT_S)
