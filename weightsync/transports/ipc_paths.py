"""The two ways to read a trainer's host memory: its process, or the memory it shares."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from weightsync import config
from weightsync.errors import PeerLostError, TransportError, UnavailableError
from weightsync.memory import MemfdMemory
from weightsync.native import CancelFlag, copy_segments, read_process_segments
from weightsync.transports.base import Table
from weightsync.transports.converting import ConvertingRead, Scratch
from weightsync.transports.ipc_host import REMEDY, refusal
from weightsync.transports.published import EpochBoard, ReadPath, Span


class DirectPath(Enum):
    """Which way is taken; ``AUTO`` maps shared memory where all is in it, else reads the process."""

    AUTO = "auto"
    PROCESS_READ = "process_read"
    MEMFD = "memfd"


class ProcessReadPath(ReadPath):
    """``process_vm_readv``: addresses are the trainer's."""

    @property
    def name(self) -> str:
        return "process_vm_readv"

    def __init__(self, pid: int, lost: Callable[[], str | None]) -> None:
        self._pid = pid
        self._lost = lost
        self._scratch = Scratch()

    def map(self, regions: Mapping[int, Span], board: EpochBoard) -> dict[int, int]:
        return {region: ptr for region, (ptr, _) in regions.items()}

    def prepare(self, rows: Table) -> ConvertingRead:
        return ConvertingRead(rows, self._scratch)

    def copy(self, prepared: ConvertingRead, flag: CancelFlag) -> int:
        try:
            return prepared.run(self._read, flag)
        except OSError as error:
            if error.errno == errno.ESRCH or (reason := self._lost()) is not None:
                reason = self._lost() or f"process {self._pid} ended"
                raise PeerLostError(reason) from error
            if error.errno in (errno.EPERM, errno.ENOSYS):
                raise UnavailableError(f"{refusal(self._pid, error)}; {REMEDY}") from error
            raise TransportError(f"a published region cannot be read: {error}") from error

    def _read(self, rows: Table, flag: CancelFlag) -> int:
        return read_process_segments(self._pid, rows, num_threads=config.num_threads(), cancel=flag)

    def close(self) -> None:
        self._scratch.close()


class AutoPath(ReadPath):
    """Shared memory if every region lies in it, for it is several times faster; else the process."""

    def __init__(self, process: ProcessReadPath, memfd: MemfdPath) -> None:
        self._process = process
        self._memfd = memfd
        self._taken: ProcessReadPath | MemfdPath = process

    @property
    def name(self) -> str:
        return self._taken.name

    def map(self, regions: Mapping[int, Span], board: EpochBoard) -> dict[int, int]:
        self._taken = self._memfd if board.arenas else self._process
        if not board.arenas:
            self._memfd.close()
        return self._taken.map(regions, board)

    def prepare(self, rows: Table) -> Any:
        return self._taken.prepare(rows)

    def copy(self, prepared: Any, flag: CancelFlag) -> int:
        return self._taken.copy(prepared, flag)

    def close(self) -> None:
        self._process.close()
        self._memfd.close()


class MemfdPath(ReadPath):
    """The trainer's arenas, mapped here for reading; addresses are ours."""

    @property
    def name(self) -> str:
        return "memfd"

    def __init__(self, why_not_process: str) -> None:
        self._why_not_process = why_not_process
        self._epoch = 0
        self._arenas: list[tuple[Span, MemfdMemory]] = []

    def map(self, regions: Mapping[int, Span], board: EpochBoard) -> dict[int, int]:
        if self._epoch != board.epoch or not all(m.is_open for _, m in self._arenas):
            self.close()
            self._arenas, self._epoch = [], board.epoch
            fds = board.take_fds()
            if len(fds) != len(board.arenas):  # an earlier attempt to map this epoch failed
                raise TransportError(f"the shared memory of epoch {board.epoch} cannot be mapped")
            for span, fd in zip(board.arenas, fds, strict=True):
                self._arenas.append((span, MemfdMemory.map(fd, span[1])))
        return {region: self._address(region, *span) for region, span in regions.items()}

    def _address(self, region: int, ptr: int, num_bytes: int) -> int:
        for (arena_ptr, arena_bytes), memory in self._arenas:
            if arena_ptr <= ptr and ptr + num_bytes <= arena_ptr + arena_bytes:
                return memory.ptr + ptr - arena_ptr
        if num_bytes == 0:
            return ptr
        raise UnavailableError(
            f"region {region} cannot be read directly: {self._why_not_process}, and not every "
            f"published region lies in a SharedArena; {REMEDY}"
        )

    def copy(self, rows: Table, flag: CancelFlag) -> int:
        try:
            pins = [memory.pin() for _, memory in self._arenas]
        except ValueError as error:
            raise PeerLostError("this end was closed") from error
        try:
            return copy_segments(rows, num_threads=config.num_threads(), cancel=flag)
        finally:
            for pin in pins:
                pin.release()

    def close(self) -> None:
        for _, memory in self._arenas:  # the list stays: a copy that starts now must find it closed
            memory.close()
