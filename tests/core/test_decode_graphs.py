"""How decode graphs end, without a GPU: what stands in for graphs and events does what it is told."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_engines import small_engine, small_model
from core_models import torch

from engine_adapter.core import decode_graphs
from engine_adapter.core.decode_graphs import DecodeGraphs
from engine_adapter.core.memory import MemoryState
from engine_adapter.core.parallel import Group
from weightsync.errors import PeerLostError


class FakeGraph:
    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


class FakeEvent:
    """One that has passed after so many looks; None: never."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks

    def query(self) -> bool:
        if self.looks:
            self.looks -= 1
        return self.looks == 0


class Thing:
    """Something that can be seen to be still there."""


class Made(DecodeGraphs):
    """Rank 1 of two with a graph and three steps behind it; captured nowhere."""

    def __init__(self, *looks: int | None) -> None:
        self.graph = FakeGraph()
        self.pool = Thing()  # type: ignore[assignment]
        self.state = SimpleNamespace(device="cuda:3")  # type: ignore[assignment]
        self._model = Thing()  # type: ignore[assignment]
        self._cache = Thing()  # type: ignore[assignment]
        self._group = Group(object(), rank=1, size=2)  # type: ignore[arg-type]
        self._graphs: dict[int, Any] = {4: self.graph}
        self._found: dict[int, Any] = {4: Thing()}
        self._slots = [(torch.zeros(4), torch.zeros(4, 4), FakeEvent(n)) for n in looks]
        self._in_flight = deque([(4, *self._slots[0])])


def test_graphs_are_destroyed_once_their_steps_have_ended() -> None:
    made = Made(0, 3, 0)
    made.close()
    assert made.graph.is_reset
    assert made._slots[1][2].looks == 0
    assert not made._graphs


def test_graphs_of_a_lost_rank_are_left(caplog: pytest.LogCaptureFixture) -> None:
    """Destroying them would wait for ever, and so would freeing what their kernels write to."""
    made = Made(0, None, 0)
    graph = made.graph
    used = (graph, made._found[4], made._slots[1][2], made.pool, made._model, made._cache)
    left = [weakref.ref(thing) for thing in (*used, made._group)]
    with caplog.at_level(logging.ERROR, decode_graphs.__name__):
        made.close(0.02)
    assert not graph.is_reset
    assert "rank 0 of the engine is gone or stuck" in caplog.text
    assert "1 decode graphs and their memory on cuda:3 are left" in caplog.text
    del made, graph
    gc.collect()
    assert all(thing() is not None for thing in left)


def test_all_steps_together_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def poll(is_done: Any, limit_s: float) -> bool:
        limits.append(limit_s)
        return True

    monkeypatch.setattr(decode_graphs, "poll_until", poll)
    Made(0, 0, 0).close(5.0)
    assert 5.0 >= limits[0] > limits[1] > limits[2] > 0.0


def test_a_step_that_a_lost_rank_keeps_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "_LOST_S", 0.02)
    with pytest.raises(PeerLostError, match=r"did not end within.*rank 0 of the engine.*restart"):
        Made(None, 0, 0).take()


def test_memory_is_not_let_go_under_a_step_that_does_not_end() -> None:
    """Giving it back waits for the device, without a limit."""
    made = Made(0, None, 0)
    with pytest.raises(PeerLostError, match=r"did not end within.*rank 0 of the engine.*restart"):
        made.wait_ended(0.02)
    Made(0, 3, 0).wait_ended(5.0)


def test_an_engine_keeps_its_memory_when_steps_do_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "_LOST_S", 0.02)
    engine = small_engine(small_model(tmp_path))
    engine.decode_steps = Made(0, None, 0)
    with pytest.raises(PeerLostError, match="did not end within"):
        engine.release_memory()
    assert set(engine.memory.states.values()) == {MemoryState.FILLED}
    engine.decode_steps = None
    assert engine.release_memory() > 0
