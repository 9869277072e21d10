"""A child process that publishes memory, for ``doctor`` to read.

As a program (``python -m weightsync.cli.doctor_peer TRANSPORT BYTES``) it prints its descriptor, then its
publication, one JSON line each, and ends when its standard input does.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import PeerLostError
from weightsync.types import RegionAddress

_LIMIT_S = 20.0


class PeerProcess:
    """The child, as the doctor sees it; gone at the end of ``with``."""

    def __init__(self, transport: str, num_bytes: int) -> None:
        command = [sys.executable, "-m", "weightsync.cli.doctor_peer", transport, str(num_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.descriptor: dict[str, Any] = {}

    def __enter__(self) -> PeerProcess:
        try:
            self.descriptor = self._line(
                Deadline(_LIMIT_S, peer="the doctor's peer", stage="start")
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def publication(self, deadline: Deadline) -> dict[str, Any]:
        """What it published, once it saw us attach."""
        return self._line(deadline)

    def _line(self, deadline: Deadline) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise PeerLostError("the doctor's peer has no output")
        while not select.select([stdout], [], [], deadline.slice_s())[0]:
            deadline.check()
        line = stdout.readline()
        if not line:
            raise PeerLostError("the doctor's peer ended; this transport cannot be opened here")
        found: dict[str, Any] = json.loads(line)
        return found

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def main(argv: list[str]) -> int:
    """Publish, and stay until the parent closes our input."""
    from weightsync import native
    from weightsync.memory import HostMemory
    from weightsync.transports import get_transport

    name, size = argv[0], int(argv[1])
    memory = HostMemory.anonymous(size)
    native.prefault(memory.ptr, size)
    deadline = Deadline(_LIMIT_S, peer="the doctor", stage="attach")
    with get_transport(name).open_source() as endpoint:
        print(json.dumps(dict(endpoint.descriptor())), flush=True)
        endpoint.accept(deadline)
        publication = endpoint.direct().publish([RegionAddress(0, memory.ptr, size)])
        print(json.dumps(dict(publication)), flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
