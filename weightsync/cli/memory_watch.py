"""Peak memory of a process, as the kernel counts it, or of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable

_PERIOD_S = 0.002


def private_bytes() -> int:
    """PssAnon + PssShmem of this process: what it costs beside files and code."""
    found = 0
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                found += int(line.split()[1]) * 1024
    return found


class MemoryWatch:
    """Samples ``read`` (bytes in use) on a thread until the watch is asked for."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self.start_bytes = read()
        self._peak_bytes = self.start_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._peak_bytes = max(self._peak_bytes, self._read())

    def peak_bytes(self) -> int:
        """The most that was in use; ends the watch."""
        self._stop.set()
        self._thread.join()
        self._peak_bytes = max(self._peak_bytes, self._read())
        return self._peak_bytes

    def extra_bytes(self) -> int:
        """The most that was in use above the start; ends the watch."""
        return self.peak_bytes() - self.start_bytes
