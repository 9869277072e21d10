"""Ranks exchange mailboxes, or all go on without: threads for ranks, on a device made of host memory."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from core_models import torch
from transports.fake_device import FakeDevice

from engine_adapter.core import peer_sum
from engine_adapter.core.parallel import Group
from engine_adapter.core.peer_sum import PeerSum, open_mailboxes
from weightsync import native

SIZE = 2
DEVICE = torch.device("cuda:0")


class Meeting:
    """Where the ranks gather."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=30.0)
        self.told: list[Any] = [None] * SIZE


class ThreadGroup(Group):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(object(), rank, SIZE)  # type: ignore[arg-type]
        self._meeting = meeting

    def gather(self, tensor: Any) -> list[Any]:
        self._meeting.told[self.rank] = tensor
        self._meeting.barrier.wait()
        told = list(self._meeting.told)
        self._meeting.barrier.wait()
        return told


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def open_all() -> list[PeerSum | None]:
    meeting = Meeting()
    with ThreadPoolExecutor(SIZE) as pool:
        groups = [ThreadGroup(meeting, rank) for rank in range(SIZE)]
        return list(pool.map(lambda group: open_mailboxes(group, DEVICE), groups))


def refuse_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One rank, whichever comes first, cannot."""
    function: Callable[..., Any] = getattr(native.extension, name)
    lock, refused = threading.Lock(), False

    def first_refuses(*arguments: Any) -> Any:
        nonlocal refused
        with lock:
            is_first, refused = not refused, True
        if is_first:
            raise native.CudaError(f"no {name} here")
        return function(*arguments)

    monkeypatch.setattr(native.extension, name, first_refuses)


def test_every_rank_maps_the_others(fake: FakeDevice) -> None:
    found = open_all()
    assert all(found)
    assert (len(fake.allocated), len(fake.mapped)) == (SIZE, SIZE * (SIZE - 1))
    del found
    gc.collect()
    assert (fake.allocated, fake.mapped) == ({}, {})


@pytest.mark.parametrize("name", ["cuda_malloc", "cuda_export", "cuda_copy", "cuda_map"])
def test_if_one_cannot_all_go_on_without(
    fake: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    refuse_once(monkeypatch, name)
    with caplog.at_level(logging.INFO, peer_sum.__name__):
        assert open_all() == [None, None]
    assert (fake.allocated, fake.mapped) == ({}, {})
    reasons = sorted(record.getMessage() for record in caplog.records)
    assert "another rank could not map a mailbox" in reasons[0]
    assert f"no {name} here" in reasons[1]
