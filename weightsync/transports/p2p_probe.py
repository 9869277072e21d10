"""Whether reads of a p2p peer's host memory work, how fast, and by which path: found out by reading
known bytes. :mod:`weightsync.transports.p2p_cuda_probe` does the same for CUDA devices."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.memory import HostMemory
from weightsync.native import read_process_segments
from weightsync.transports.base import Availability
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import Span
from weightsync.transports.nixl_reads import Reads

PROBE_BYTES: Final = 2**20
_ROUNDS: Final = 8
#: On one machine a read is one copy by the kernel (CMA): 6 to 9 GB/s for the probe, which stays in
#: the cache; by messages it is 0.4 to 1.1.
_FLOOR_BYTES_PER_S: Final = 1.5e9


def host_id() -> str:
    """Equal where two processes can see each other's memory: one kernel, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{socket.gethostname()}"


def probe_pattern(endpoint: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Known bytes, different for each endpoint. ValueError or OverflowError if it is no such name."""
    words = np.arange(PROBE_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(int(endpoint, 16))).view(np.uint8)


class Probe:
    """A prepared read of the peer's known bytes."""

    def __init__(
        self, agent: Agent, endpoint: str, source_ptr: int, host: str, source_pid: int
    ) -> None:
        self._agent = agent
        self._expected = probe_pattern(endpoint)
        self._source_ptr = source_ptr
        self._source_pid = source_pid
        self._is_one_host = host == host_id()
        self._rate_bytes_per_s = 0.0
        self._scratch = HostMemory.anonymous(PROBE_BYTES)

    def load(self, metadata: bytes) -> None:
        """Learn of the peer, and prepare."""
        self._agent.load_peer(metadata, [Span(self._source_ptr, PROBE_BYTES, "cpu")])
        self._agent.register([Span(self._scratch.ptr, PROBE_BYTES, "cpu")])
        row = [np.array([n]) for n in (self._source_ptr, self._scratch.ptr, PROBE_BYTES)]
        self._transfer = self._agent.prepare(Reads(*row), "cpu", "cpu")

    def run(self, deadline: Deadline, lost: Callable[[], str | None]) -> Availability:
        """Read once, which also opens the path, and then several times for the rate."""
        landed = self._scratch.bytes_view()
        landed[:] = 0
        self._agent.read(self._transfer, deadline, lost)
        if not np.array_equal(landed, self._expected):
            return Availability(
                False,
                "a p2p read of known bytes brought others",
                "check that both ends run the same NIXL release, and UCX_TLS",
            )
        best_s = float("inf")
        for _ in range(_ROUNDS):
            start_s = time.perf_counter()
            self._agent.read(self._transfer, deadline, lost)
            best_s = min(best_s, time.perf_counter() - start_s)
        self._rate_bytes_per_s = PROBE_BYTES / best_s
        if self._is_fast or not self._is_one_host:
            return Availability(True)
        return Availability(True, *self._why_slow(), is_slow=True)

    @property
    def path(self) -> str:
        if not self._is_one_host:
            return "ucx (network)"
        if self._is_fast and self._can_read_process():
            return "ucx (shared memory, cma)"
        return "ucx (shared memory or tcp, by messages)"

    @property
    def _is_fast(self) -> bool:
        return self._rate_bytes_per_s >= _FLOOR_BYTES_PER_S

    def _why_slow(self) -> tuple[str, str]:
        rate = f"p2p reads on one machine run at {self._rate_bytes_per_s / 1e9:.2f} GB/s"
        if not self._can_read_process():
            return (
                f"{rate}: this process may not read the trainer's memory, so UCX has it sent in "
                "messages",
                "give the engine ptrace rights: the trainer's user, or --cap-add SYS_PTRACE",
            )
        return (
            f"{rate}, below {_FLOOR_BYTES_PER_S / 1e9:.1f}: UCX does not read process memory (CMA), "
            "or the machine is busy",
            "keep 'cma' and 'sm' in UCX_TLS",
        )

    def _can_read_process(self) -> bool:
        """Whether the kernel lets us read the source's memory, which is what CMA needs.

        Where Yama restricts that to declared readers, UCX itself declares any at the source.
        """
        word = np.zeros(8, dtype=np.uint8)
        row = [self._source_ptr, int(word.ctypes.data), 8, 0, *(1, 0, 0) * 3]
        try:
            read_process_segments(self._source_pid, np.array([row], dtype=np.int64))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """After the agent."""
        self._scratch.close()
