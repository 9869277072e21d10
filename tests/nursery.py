"""Processes for tests, forked from one that has imported everything: a start takes ~10 ms.

A forked process becomes a child of the process of the tests (which is its subreaper meanwhile), so
that it can be stopped, killed and waited for like any other; it gets an environment of its own, and
:mod:`weightsync.faults` reads ``WEIGHTSYNC_FAULT`` from that. A process that forks never opens a GPU:
each of its children makes a context of its own, and all of that is gone with the child.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from processes import TESTS, Child, ChildEnded, Pipe, open_fds

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ENV = {"WEIGHTSYNC_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class _ForkedProcess:
    """What :class:`processes.Child` needs of a ``subprocess.Popen``."""

    def __init__(self, pid: int, stdin: Any, stdout: Any) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Its exit status; minus the signal that ended it."""
        if self._status is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(timeout * 1e3):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self._status


class ForkedChild(Child):
    """A :class:`processes.Child` that was forked."""

    def __init__(self, process: _ForkedProcess) -> None:
        self._process: Any = process
        Pipe.__init__(self, process.stdout.fileno(), process.stdin.fileno())


class Nursery:
    """Forks processes; a context manager. ``env``: what libraries read when they are loaded."""

    def __init__(self, *preload: str, env: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nursery", str(theirs.fileno()), *preload],
                env={**os.environ, **(_ENV if env is None else env), "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
            )

    def fork(self, function: str, env: Mapping[str, str]) -> Child:
        """A process that runs ``function`` ("module:name")."""
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        order = {"function": function, "env": dict(env)}
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            return self._send(order, (read_in, write_in), (read_out, write_out))
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def _send(self, order: dict[str, Any], into: tuple[int, int], out: tuple[int, int]) -> Child:
        (read_in, write_in), (read_out, write_out) = into, out
        socket.send_fds(self._socket, [json.dumps(order).encode()], [read_in, write_out])
        os.close(read_in)
        os.close(write_out)
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._socket.recv(64)
            if not part:
                raise RuntimeError("the process that forks is gone")
            answer += part
        stdin, stdout = os.fdopen(write_in, "wb", 0), os.fdopen(read_out, "rb", 0)
        return ForkedChild(_ForkedProcess(int(answer), stdin, stdout))

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait(timeout=30)


@functools.cache
def _torch_nursery(env: tuple[tuple[str, str], ...]) -> Nursery:
    nursery = Nursery("torch", "weightsync.sender", "transports.test_ipc_cuda", env=dict(env))
    atexit.register(nursery.__exit__)
    return nursery


def fork_with_torch(function: str, env: Mapping[str, str] | None = None) -> Child:
    """A new process that has imported torch and has no GPU open, in this process's environment.

    ``env`` comes on top of that, and was there when torch was imported.
    """
    own = dict(env or {})
    loaded = {name: value for name, value in own.items() if not name.startswith("WEIGHTSYNC_")}
    return _torch_nursery(tuple(sorted(loaded.items()))).fork(function, {**os.environ, **own})


class Brood:
    """The processes of one test, or of one file; none outlives it."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._children: list[Child] = []

    def start(
        self,
        function: str,
        fault: str | None = None,
        transport: str = "ipc",
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """A process that runs ``function``, armed with ``fault``. What NIXL will run in is not forked."""
        wanted = {**(env or {}), **({} if fault is None else {"WEIGHTSYNC_FAULT": fault})}
        if transport == "p2p":
            child = Child(function, {**_ENV, **wanted})
        else:
            child = self._nursery.fork(function, wanted)
        self._children.append(child)
        return child

    def end(self) -> None:
        """Kill whatever still runs."""
        for child in self._children:
            child.__exit__(None, None, None)
        self._children.clear()


@contextlib.contextmanager
def _closing(fds: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for fd in fds:
            os.close(fd)


def _serve(sock: socket.socket) -> None:
    """Fork for every order, until the other end is gone."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 2**16, 2)
        if not data:
            return
        with _closing(fds):
            order = json.loads(data)
            between = os.fork()
            if between == 0:
                between = os.getpid()
                pid = os.fork()
                if pid == 0:
                    sock.close()
                    _run(order, fds, between)
                sock.send(str(pid).encode())
                os._exit(0)
            os.waitpid(between, 0)
            sock.send(b"\n")  # from here on it is a child of the tests' process


def _run(order: Mapping[str, Any], fds: list[int], between: int) -> None:
    """In the forked process: be what the order says. Does not return."""
    status = 1
    try:
        while os.getppid() == between:  # it is about to end; then the tests' process is our parent
            os.sched_yield()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.environ.update(order["env"])
        from weightsync import faults

        faults._FAULT = faults._armed()  # type: ignore[misc]
        module, _, name = order["function"].partition(":")
        with contextlib.suppress(ChildEnded):
            getattr(importlib.import_module(module), name)(Pipe(*fds))
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(status)


def _main() -> None:
    fd, *preload = sys.argv[1:]
    for module in preload:
        importlib.import_module(module)
    if any("nvidia" in path for path in open_fds().values()):
        raise RuntimeError(f"importing {preload} opened a GPU: what is forked could not use it")
    gc.collect()
    gc.freeze()  # children that collect look at what is theirs
    with socket.socket(fileno=int(fd)) as sock:
        _serve(sock)


if __name__ == "__main__":
    _main()
