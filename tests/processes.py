"""Real child processes for tests: started on a function, spoken to in JSON lines, never left behind.

A child's function takes its :class:`Pipe` and may wait on it; a parent waits on its :class:`Child`.
Nobody sleeps: an end of a pipe is how either notices that the other is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TESTS = Path(__file__).resolve().parent
_PR_SET_PDEATHSIG = 1


class ChildEnded(Exception):
    """The other end of the pipe is gone."""


class Pipe:
    """JSON lines over two file descriptors."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._buffer = b""

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._write_fd, data) :]
        except BrokenPipeError as error:
            raise ChildEnded("the process ended") from error

    def receive(self, limit_s: float = 30.0) -> Any:
        """The next message; TimeoutError after ``limit_s``, ChildEnded at the end."""
        end_s = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            poll = select.poll()
            poll.register(self._read_fd, select.POLLIN)
            if not poll.poll(max(0.0, end_s - time.monotonic()) * 1e3):
                raise TimeoutError(f"no message from the process within {limit_s} s")
            part = os.read(self._read_fd, 2**16)
            if not part:
                raise ChildEnded(f"the process ended; unread: {self._buffer!r}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class Child(Pipe):
    """A process that runs ``function`` ("module:name") with a pipe to here; killed on exit."""

    def __init__(self, function: str, env: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "processes", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the child has no pipes")
        super().__init__(stdout.fileno(), stdin.fileno())

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(timeout=30)

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self, limit_s: float = 30.0) -> int:
        """Its exit status; minus the signal that ended it."""
        return self._process.wait(timeout=limit_s)

    def wait_stopped(self, limit_s: float = 30.0) -> None:
        """Wait until it stopped itself."""
        end_s = time.monotonic() + limit_s
        while os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"process {self.pid} did not stop within {limit_s} s")
            os.sched_yield()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def open_fds(pid: int | str = "self") -> dict[int, str]:
    """What each descriptor of a process points at."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of this very listing
            found[int(entry.name)] = os.readlink(entry)
    return found


def num_maps() -> int:
    """Mappings of this process."""
    return Path("/proc/self/maps").read_text().count("\n")


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def weightsync_sockets() -> Iterator[str]:
    """Abstract sockets of ours that exist on this machine."""
    for line in Path("/proc/net/unix").read_text().splitlines():
        name = line.split()[-1]
        if name.startswith("@weightsync-"):
            yield name


def _main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    module, _, name = sys.argv[1].partition(":")
    # The pipe gets descriptors of its own, so that a stray print cannot break it.
    read_fd, write_fd = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(ChildEnded):
        getattr(importlib.import_module(module), name)(Pipe(read_fd, write_fd))


if __name__ == "__main__":
    _main()
