"""After a SIGKILL in the middle of an update nothing of the dead process is left on the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nursery import Brood
from processes import Child, open_fds

from faults.skips import NEEDS_NIXL
from faults.worker import LIMIT_S, ask

pytestmark = pytest.mark.timeout(300)

#: (victim, contract): where it is stopped, to be looked at and then killed.
POINTS = {
    ("trainer", "stream"): "stream.submit@4",
    ("trainer", "direct"): "trainer.move",
    ("engine", "stream"): "stream.received@4",
    ("engine", "direct"): "direct.read",
}


def in_memory_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def in_temporary_files() -> set[str]:
    words = ("weightsync", "nixl", "ucx")
    return {name for name in os.listdir("/tmp") if any(w in name.lower() for w in words)}


def sysv_segments(pids: set[int]) -> list[str]:
    """System V segments that these processes made."""
    rows = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return [row for row in rows if int(row.split()[4]) in pids]


def processes() -> Iterator[Path]:
    return (p for p in Path("/proc").iterdir() if p.name.isdecimal())


def children_of(pid: int) -> list[str]:
    found = []
    for process in processes():
        with suppress(OSError):  # it ended meanwhile
            stat = (process / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(stat[:80])
    return found


def used(names: set[str], folder: str) -> set[str]:
    """Those that a living process has mapped or open: they are somebody else's, and in use."""
    found: set[str] = set()
    for process in processes():
        with suppress(OSError):
            text = (process / "maps").read_text() + "\n".join(open_fds(process.name).values())
            found |= {name for name in names if f"{folder}/{name}" in text}
    return found


def memory_files(pid: int) -> set[str]:
    """The memfds that a process has open or mapped, by inode."""
    found = set()
    for fd, link in open_fds(pid).items():
        if link.startswith("/memfd:"):
            with suppress(OSError):
                found.add(f"{os.stat(f'/proc/{pid}/fd/{fd}').st_ino} {link}")
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:" in line:
            found.add(f"{line.split()[4]} /memfd:{line.rpartition('/memfd:')[2]}")
    return found


def socket_names(pid: int) -> set[str]:
    """The abstract sockets that a process has open."""
    inodes = {link[8:-1] for link in open_fds(pid).values() if link.startswith("socket:[")}
    return {
        row.split()[7]
        for row in Path("/proc/net/unix").read_text().splitlines()[1:]
        if len(row.split()) > 7 and row.split()[7].startswith("@") and row.split()[6] in inodes
    }


def every_socket_name() -> set[str]:
    rows = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {row.split()[7] for row in rows if len(row.split()) > 7}


@pytest.mark.parametrize("victim", ["trainer", "engine"])
@pytest.mark.parametrize("contract", ["stream", "direct"])
@pytest.mark.parametrize("transport", ["ipc", pytest.param("p2p", marks=NEEDS_NIXL)])
def test_nothing_is_left_behind(
    brood: Brood, tmp_path: Path, transport: str, contract: str, victim: str
) -> None:
    shared, temporary = in_memory_files(), in_temporary_files()
    env = {"TMPDIR": str(tmp_path)}
    engine = brood.start("faults.worker:engine", transport=transport, env=env)
    engine.send(0)
    url = engine.receive(LIMIT_S)
    trainer = brood.start("faults.worker:trainer", transport=transport, env=env)
    options: dict[str, Any] = {"transport": transport, "contract": contract, "lease_s": 3600.0}
    ask(trainer, "connect", url, options)
    ask(trainer, "update", 1)
    dying, survivor = (trainer, engine) if victim == "trainer" else (engine, trainer)
    point, _, times = POINTS[victim, contract].partition("@")
    ask(dying, "arm", f"{point}=stop@{times or 1}")
    trainer.send(["update", 2])
    dying.wait_stopped(LIMIT_S)

    pid = dying.pid
    names = socket_names(pid)
    assert children_of(pid) == []
    if (transport, contract) == ("ipc", "stream"):
        assert memory_files(pid)  # so this test can see what it says is gone
    dying.kill()

    settle(survivor, victim, trainer)
    assert memory_files(survivor.pid) == set()
    assert children_of(survivor.pid) == []
    assert not names & every_socket_name()
    assert sysv_segments({pid, survivor.pid}) == []
    assert list(tmp_path.iterdir()) == []
    fresh = in_memory_files() - shared
    assert fresh - used(fresh, "/dev/shm") == set()
    fresh = in_temporary_files() - temporary
    assert fresh - used(fresh, "/tmp") == set()


def settle(survivor: Child, victim: str, trainer: Child) -> None:
    """The survivor notices, and lets go of what it shared with the dead."""
    if victim == "trainer":
        ask(survivor, "settle", LIMIT_S)
        ask(survivor, "released", LIMIT_S)
        return
    answer = trainer.receive(LIMIT_S)
    assert answer["error"] in ("PeerLostError", "UpdateFailedError")
    ask(trainer, "close")
