"""What this machine lets one process read of another is told apart correctly."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from processes import Child, Pipe

from weightsync.transports import ipc_host
from weightsync.transports.base import Availability
from weightsync.transports.ipc import IpcTransport
from weightsync.transports.ipc_host import (
    has_ptrace_capability,
    host_identity,
    probe_word,
    process_read_here,
    yama_scope,
)
from weightsync.types import Contract


def hold_word(pipe: Pipe) -> None:
    """Child: keep a word until the parent is gone."""
    word = np.array([4711], dtype="<u8")
    pipe.send(int(word.ctypes.data))
    pipe.receive(30.0)


def test_identity_is_stable() -> None:
    assert host_identity() == host_identity()


@pytest.mark.parametrize(("text", "scope"), [("2\n", 2), ("0", 0), ("", 0), ("x", 0)])
def test_yama_scope(tmp_path: Path, text: str, scope: int) -> None:
    path = tmp_path / "ptrace_scope"
    path.write_text(text)
    assert yama_scope(str(path)) == scope
    assert yama_scope(str(tmp_path / "absent")) == 0


@pytest.mark.parametrize(("mask", "expected"), [("0000000000080000", True), ("ff", False)])
def test_capability(tmp_path: Path, mask: str, expected: bool) -> None:
    path = tmp_path / "status"
    path.write_text(f"Name:\tx\nCapEff:\t{mask}\n")
    assert has_ptrace_capability(str(path)) is expected


@pytest.mark.parametrize(
    ("scope", "has_capability", "usable"),
    [(0, False, True), (1, False, True), (2, True, True), (2, False, False), (3, True, False)],
)
def test_scopes(
    monkeypatch: pytest.MonkeyPatch, scope: int, has_capability: bool, usable: bool
) -> None:
    monkeypatch.setattr(ipc_host, "yama_scope", lambda: scope)
    monkeypatch.setattr(ipc_host, "has_ptrace_capability", lambda: has_capability)
    here = process_read_here()
    assert here.is_usable is usable
    if not usable:
        assert f"ptrace_scope is {scope}" in here.reason
        assert "SYS_PTRACE" in here.remedy
    direct = IpcTransport().capabilities().contracts[Contract.DIRECT]
    assert direct.is_usable  # memory in an arena can be read all the same
    assert ("SharedArena" in direct.reason) is not usable


def test_a_refusal_names_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, ptr: int) -> int:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(ipc_host, "read_word", refuse)
    for found in (process_read_here(), probe_word(os.getpid(), 1, 1)):
        assert not found.is_usable
        assert "EPERM" in found.reason
        assert found.remedy


def test_a_known_word_of_another_process() -> None:
    with Child("transports.test_ipc_host:hold_word") as child:
        ptr = child.receive()
        assert probe_word(child.pid, ptr, 4711) == Availability(True)
        wrong = probe_word(child.pid, ptr, 4712)
        assert not wrong.is_usable
        assert "not the trainer" in wrong.reason
        child.kill()
        assert "ESRCH" in probe_word(child.pid, ptr, 4711).reason


def test_no_number_in_this_namespace() -> None:
    assert "pid namespace" in probe_word(0, 1, 1).reason


class TestTracers:
    def test_one_nobody_several(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[int] = []
        tracers = ipc_host._Tracers()
        monkeypatch.setattr(tracers, "_tell_kernel", lambda: told.append(tracers.allowed()))
        for pid in (5, 5, 7):
            tracers.permit(pid)
        for pid in (5, 7, 5):
            tracers.forbid(pid)
        assert told == [5, 5, 2**64 - 1, 2**64 - 1, 5, 0]
