"""How a delta gets into live weights, under a pause, and out of them again if anything fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from weightsync.device_patch import DecodedWrite, DevicePatch, DeviceWrite
from weightsync.errors import IntegrityError
from weightsync.faults import reach
from weightsync.live_tensor import Write
from weightsync.rank_store import Fetched


class DeltaApply:
    """The writes of a delta, put under a pause and taken back if anything fails.

    On a device they are uploaded here, while the engine generates; to put and to read back is a launch
    each, both waited for at once.
    """

    def __init__(self, fetched: Fetched, device: str, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "weightsync-scatter")
        self._is_begun = False
        self._patches: list[DevicePatch] = []  # in turn
        self._put: list[DevicePatch] = []
        self._writes = [w for w in fetched.writes if isinstance(w, Write)]
        if self._writes:  # its threads are there before the engine pauses
            list(self._pool.map(time.sleep, [0.001] * num_threads))
        self._fetched = fetched  # whose memory the patch reads
        on_device = [w for w in fetched.writes if isinstance(w, DeviceWrite | DecodedWrite)]
        start_s = time.perf_counter()
        try:
            for writes in [on_device, *fetched.later]:
                if writes:
                    self._patches.append(DevicePatch(writes, device))
        except BaseException:
            self._close_patches()
            fetched.close()
            raise
        fetched.writes, fetched.later = [], []
        fetched.seconds["fetch_patch"] = time.perf_counter() - start_s

    def put(self) -> None:
        """Write everything, then read every written element back. Raises :class:`IntegrityError`."""
        self._is_begun = True
        half = len(self._writes) // 2
        _all(self._pool, _put_and_check, self._writes[:half])
        reach("engine.half_placed")
        _all(self._pool, _put_and_check, self._writes[half:])
        growth = 0
        for patch in self._patches:
            self._put.append(patch)
            growth += patch.put()
        if self._patches and not self._writes:
            self._check_growth(growth % (1 << 64))

    def take_back(self) -> bool:
        """Restore what was overwritten; whether there was anything. Raises :class:`IntegrityError`
        if live memory does not hold it afterwards."""
        if not self._is_begun:
            return False
        while self._put:
            self._put.pop().take_back()
        for write in reversed(self._writes):
            write.take_back()
        self._is_begun = False
        return True

    def close(self) -> None:
        """Nothing can be taken back any more."""
        self._pool.shutdown(wait=False)
        self._close_patches()
        self._fetched.close()
        self._writes = []

    def _check_growth(self, growth: int) -> None:
        """What was overwritten was the base's, and what is there now is the target's."""
        expected = self._fetched.growth
        if expected is not None and growth != expected:
            raise IntegrityError(
                f"what was written adds {growth:016x} to the digests of the live tensors, expected "
                f"{expected:016x}: they, or what was decoded, were changed since they were looked at"
            )

    def _close_patches(self) -> None:
        for patch in self._patches:
            patch.close()
        self._patches, self._put = [], []


def _put_and_check(write: Write) -> None:
    """At once, while its cache lines are here."""
    write.put()
    write.check()


def _all(pool: ThreadPoolExecutor, act: Callable[[Write], None], writes: Sequence[Write]) -> None:
    """On all of them, in batches: when this returns or raises, none of it runs any more."""
    size = max(1, len(writes) // 64)
    batches = [writes[i : i + size] for i in range(0, len(writes), size)]

    def run(batch: Sequence[Write]) -> None:
        for write in batch:
            act(write)

    futures = [pool.submit(run, batch) for batch in batches]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


__all__ = ["DeltaApply"]
