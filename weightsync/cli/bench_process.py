"""A worker process of ``bench``, as its parent sees it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from weightsync.errors import DeadlineError, PeerLostError, from_wire

#: Longest that a worker may take for one command; a refit's own deadlines are shorter.
_COMMAND_LIMIT_S = 1200.0
_STOP_LIMIT_S = 20.0


class WorkerProcess:
    """A context manager; whatever happens, the process is gone afterwards."""

    def __init__(self, role: str) -> None:
        self.role = role
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightsync.cli.bench_worker", role,
             str(command_read), str(answer_write)],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )  # fmt: skip
        os.close(command_read)
        os.close(answer_write)

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Run one command and wait for its answer; raises the worker's error."""
        self.send(command, **arguments)
        return self.answer(command)

    def send(self, command: str, **arguments: Any) -> None:
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            os.write(self._commands, line.encode())
        except BrokenPipeError as error:
            raise PeerLostError(f"the {self.role} process ended before {command!r}") from error

    def answer(self, command: str, limit_s: float = _COMMAND_LIMIT_S) -> dict[str, Any]:
        start_s = time.monotonic()
        while b"\n" not in self._pending:
            left_s = limit_s - (time.monotonic() - start_s)
            ready, _, _ = select.select([self._answers], [], [], max(0.0, left_s))
            if not ready:
                raise DeadlineError(f"{self.role} process", command, limit_s, limit_s)
            part = os.read(self._answers, 2**20)
            if not part:
                code = self._process.wait(timeout=_STOP_LIMIT_S)
                raise PeerLostError(
                    f"the {self.role} process ended in {command!r} with status {code}; its own "
                    "message stands above"
                )
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "failure" in answer:
            raise from_wire(answer["failure"])
        result: dict[str, Any] = answer["result"]
        return result

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self.send("stop")
            self.answer("stop", _STOP_LIMIT_S)
        os.close(self._commands)
        os.close(self._answers)
        try:
            self._process.wait(timeout=_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
