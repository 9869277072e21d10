"""What this machine lets one process read of another."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np

from weightsync.native import read_process_segments
from weightsync.transports.base import Availability

_PR_SET_PTRACER: Final = 0x59616D61  # "Yama"
_PTRACER_ANY: Final = 2**64 - 1
_CAP_SYS_PTRACE: Final = 19

REMEDY: Final = (
    "set kernel.yama.ptrace_scope to 0 or 1, or give the container --cap-add SYS_PTRACE, or hold the "
    "trainer's weights in a weightsync.memory.SharedArena"
)


def host_identity() -> dict[str, Any]:
    """What two processes must share for ``ipc``: one kernel, and one network namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {
        "boot_id": boot_id,
        "net_namespace": os.stat("/proc/self/ns/net").st_ino,
        "pid_namespace": os.stat("/proc/self/ns/pid").st_ino,
    }


def yama_scope(path: str = "/proc/sys/kernel/yama/ptrace_scope") -> int:
    """Who may read whom: 0 same user, 1 who was permitted, 2 only root, 3 nobody."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # a kernel without yama
        return 0


def has_ptrace_capability(path: str = "/proc/self/status") -> bool:
    """Whether this process holds CAP_SYS_PTRACE."""
    for line in Path(path).read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return False


def read_word(pid: int, ptr: int) -> int:
    """Eight bytes of another process, as a little-endian number. Raises OSError."""
    word = np.zeros(1, dtype="<u8")
    row = [ptr, word.ctypes.data, 8, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    read_process_segments(pid, np.array([row], dtype=np.int64), num_threads=1)
    return int(word[0])


def process_read_here() -> Availability:
    """Whether a process of this machine can read another one, as far as one alone can tell."""
    scope = yama_scope()
    if scope >= 3 or (scope == 2 and not has_ptrace_capability()):
        return Availability(False, f"kernel.yama.ptrace_scope is {scope}", REMEDY)
    word = np.array([0x5EED], dtype="<u8")
    try:
        read_word(os.getpid(), int(word.ctypes.data))
    except OSError as error:
        return Availability(False, refusal(os.getpid(), error), REMEDY)
    return Availability(True)


def probe_word(pid: int, ptr: int, value: int) -> Availability:
    """Whether process ``pid`` can be read, and is the one that holds ``value`` at ``ptr``."""
    if pid <= 0:
        reason = "the trainer's process has no number in this pid namespace"
        return Availability(False, reason, "share the pid namespace (--pid), or " + REMEDY)
    try:
        found = read_word(pid, ptr)
    except OSError as error:
        return Availability(False, refusal(pid, error), REMEDY)
    if found != value:
        return Availability(
            False, f"process {pid} is not the trainer: a known word differs", REMEDY
        )
    return Availability(True)


def refusal(pid: int, error: OSError) -> str:
    """Why the kernel did not let us read."""
    word = errno.errorcode.get(error.errno or 0, str(error.errno))
    return (
        f"process_vm_readv of process {pid} was refused with {word} "
        f"(kernel.yama.ptrace_scope is {yama_scope()})"
    )


class _Tracers:
    """Which processes may read this one under yama scope 1; the kernel keeps a single answer."""

    def __init__(self) -> None:
        self._pids: Counter[int] = Counter()
        self._lock = threading.Lock()

    def permit(self, pid: int) -> None:
        with self._lock:
            self._pids[pid] += 1
            self._tell_kernel()

    def forbid(self, pid: int) -> None:
        with self._lock:
            self._pids -= Counter((pid,))
            self._tell_kernel()

    def allowed(self) -> int:
        """The one process; nobody (0); or, for want of a list, anybody of the same user."""
        if len(self._pids) > 1:
            return _PTRACER_ANY
        return next(iter(self._pids), 0)

    def _tell_kernel(self) -> None:
        # Without yama the kernel says EINVAL, and permits anyway.
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PTRACER, ctypes.c_ulong(self.allowed()), 0, 0, 0)


TRACERS: Final = _Tracers()
