"""Processes that every fault test may start; none outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nursery import Brood, Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    preload = ("faults.worker", "weightsync.transports.ipc", "weightsync.transports.loopback")
    with Nursery(*preload) as nursery:
        yield nursery


@pytest.fixture
def brood(nursery: Nursery) -> Iterator[Brood]:
    """Processes for one test."""
    brood = Brood(nursery)
    yield brood
    brood.end()


@pytest.fixture(scope="module")
def keeper(nursery: Nursery) -> Iterator[Brood]:
    """Processes that live on through the tests of a file."""
    brood = Brood(nursery)
    yield brood
    brood.end()
