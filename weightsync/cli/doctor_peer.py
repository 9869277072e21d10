"""A child process that serves an engine of one tensor, for ``doctor`` to update.

As a program (``python -m weightsync.cli.doctor_peer DEVICE BYTES``) it prints its address, one JSON line,
and ends when its standard input does.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from typing import Any

from weightsync.deadline import Deadline
from weightsync.device_tables import CPU
from weightsync.errors import ConfigError, PeerLostError, WeightSyncError

NAME = "weight"


class PeerProcess:
    """The child, as the doctor sees it; gone at the end of ``with``."""

    def __init__(self, device: str, num_bytes: int, limit_s: float) -> None:
        command = [sys.executable, "-m", "weightsync.cli.doctor_peer", device, str(num_bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._limit_s = limit_s
        self.url = ""

    def __enter__(self) -> PeerProcess:
        try:
            answer = self._line(Deadline(self._limit_s, peer="the doctor's peer", stage="start"))
            if "error" in answer:
                raise ConfigError(answer["error"])
            self.url = answer["url"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def _line(self, deadline: Deadline) -> dict[str, Any]:
        stdout = self._process.stdout
        if stdout is None:
            raise PeerLostError("the doctor's peer has no output")
        while not select.select([stdout], [], [], deadline.slice_s())[0]:
            deadline.check()
        line = stdout.readline()
        if not line:
            raise PeerLostError("the doctor's peer ended; an engine cannot be started here")
        found: dict[str, Any] = json.loads(line)
        return found

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def make_tensor(device: str, num_bytes: int, seed: int | None) -> Any:
    """``num_bytes`` bytes on a device: random ones, or zeros without a seed."""
    if device == CPU:
        import numpy as np

        if seed is None:
            return np.zeros(num_bytes, dtype=np.uint8)
        return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    import torch

    if seed is None:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator
    )


def main(argv: list[str]) -> int:
    """Serve, until the parent closes our input."""
    from engine_adapter.tensors import TensorEngine
    from weightsync.receiver import Receiver

    device, size = argv[0], int(argv[1])
    try:
        receiver = Receiver(TensorEngine([(NAME, make_tensor(device, size, seed=None))]))
        receiver.start()
    except (WeightSyncError, RuntimeError) as error:  # of torch: no room on the device, say
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    with receiver:
        print(json.dumps({"url": receiver.url}), flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
