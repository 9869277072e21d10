"""Fault points end or stop a process where they say."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from processes import Child, ChildEnded, Pipe

import weightsync
from weightsync import faults
from weightsync.errors import ConfigError


def walk(pipe: Pipe) -> None:
    """Child: reach a point again and again, and say so."""
    for n in range(5):
        faults.reach("direct.read")
        pipe.send(n)
    pipe.receive(30.0)


def test_unarmed_points_do_nothing() -> None:
    faults.reach("direct.read")
    faults.reach("no such point, and nobody pays to find out")


@pytest.mark.parametrize(("text", "count"), [("direct.read=kill", 0), ("direct.read=kill@3", 2)])
def test_kill(text: str, count: int) -> None:
    with Child("test_faults:walk", {"WEIGHTSYNC_FAULT": text}) as child:
        assert [child.receive() for _ in range(count)] == list(range(count))
        with pytest.raises(ChildEnded):
            child.receive()
        assert child.wait() == -signal.SIGKILL


def test_stop() -> None:
    with Child("test_faults:walk", {"WEIGHTSYNC_FAULT": "direct.read=stop@2"}) as child:
        assert child.receive() == 0
        child.wait_stopped()
        child.resume()
        assert [child.receive() for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "text", ["nowhere=kill", "direct.read", "direct.read=run", "direct.read=kill@0", "=kill@x"]
)
def test_a_misspelt_fault_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="WEIGHTSYNC_FAULT"):
        faults._Fault(text)


def test_an_armed_process_refuses_unknown_points() -> None:
    with pytest.raises(ConfigError, match="not in FAULT_POINTS"):
        faults._Fault("direct.read=kill").hit("nowhere")


def test_every_point_is_placed_and_known() -> None:
    package = Path(weightsync.__file__).parent
    placed = set()
    for file in package.rglob("*.py"):
        placed |= set(re.findall(r'\breach\(\s*"([^"]+)"', file.read_text()))
    assert placed == set(faults.FAULT_POINTS)
