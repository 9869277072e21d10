"""Work inside the engine's own loop: an interrupted job is reported, and the next update succeeds."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from engine_adapter.fake import FakeEngine
from weightsync.errors import UpdateFailedError
from weightsync.receiver import JobsBy, Receiver
from weightsync.sender import Sender


class Interrupted(FakeEngine):
    """Its loop is interrupted once, in the middle of ``prepare``."""

    is_armed = True

    def prepare(self) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt
        super().prepare()


@pytest.mark.timeout(60)
def test_an_interrupted_poll_ends_the_update_and_not_the_engine() -> None:
    engine = Interrupted({"w": np.zeros(100, np.float32)})
    receiver = Receiver(engine).start(JobsBy.POLL)
    source = {"w": np.ones(100, np.float32)}
    failures: list[BaseException] = []

    def train() -> None:
        with Sender.connect([receiver.url], transport="loopback", bucket=4096) as sender:
            for version in (1, 2):
                try:
                    with sender.update(version=version) as update:
                        update.send(source)
                except UpdateFailedError as error:
                    failures.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    num_interrupts = 0
    while trainer.is_alive():
        try:
            receiver.poll(timeout_s=0.05)
        except KeyboardInterrupt:
            num_interrupts += 1
    trainer.join()
    report: Any = getattr(failures[0], "report", None)
    assert (num_interrupts, len(failures)) == (1, 1)
    assert "interrupted" in str(failures[0])
    assert not report.is_committed
    assert receiver.version == 2
    np.testing.assert_array_equal(engine.weights["w"], source["w"])
    receiver.close()
