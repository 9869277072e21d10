"""A prepared read between CUDA devices: NIXL requests, and what unpacks the chunks that they land."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.device_tables import CudaCopy, DeviceMemory, wait_lane
from weightsync.errors import PeerLostError, TransportError
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import Span
from weightsync.transports.nixl_reads import Reads
from weightsync.transports.p2p_windows import Piece, PieceLimits

#: Requests under way. More landing slots than that: one is being emptied meanwhile.
NUM_IN_FLIGHT: Final = 3
_NUM_SLOTS: Final = NUM_IN_FLIGHT + 1
_MIN_CHUNK_BYTES: Final = 16 * 2**20
_MAX_CHUNK_BYTES: Final = 256 * 2**20
_CHUNKS: Final = 32
_STRAIGHT_READS: Final = 64


def limits_for(num_bytes: int) -> PieceLimits:
    """Requests small enough that work overlaps, and large enough that their number is nothing."""
    chunk = min(max(num_bytes // _CHUNKS, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    chunk = -(-chunk // 2**20) * 2**20
    return PieceLimits(chunk, straight_bytes=_MAX_CHUNK_BYTES, straight_reads=_STRAIGHT_READS)


class LandingChunks:
    """Device memory that windows land in, registered for as long as the endpoint lives."""

    def __init__(self, agent: Agent, device: str, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._memory = DeviceMemory(_NUM_SLOTS * chunk_bytes, device)
        try:
            agent.register([Span(self._memory.ptr, self._memory.num_bytes, device)])
        except BaseException:
            self._memory.close()
            raise
        self._pin = self._memory.pin()  # reads land here until the agent is quiet

    def ptr_of(self, slot: int) -> int:
        return self._memory.ptr + slot * self.chunk_bytes

    def close(self) -> None:
        """After the agent: nothing may land any more."""
        self._pin.release()
        self._memory.close()


class DeviceRead:
    """Pieces (see :mod:`weightsync.transports.p2p_windows`), ready to run again and again.

    Chunk k lands in slot k modulo their number; the kernel that empties a slot runs on a lane of its
    own, and is waited for before the slot is filled again. Used by one thread at a time.
    """

    def __init__(
        self,
        agent: Agent,
        pieces: Sequence[Piece],
        landing: LandingChunks | None,
        source_device: str,
        target_device: str,
    ) -> None:
        self._agent = agent
        self._device = target_device
        self._landing = landing
        self._lanes: list[int] = []  # of each piece: its slot, -1 for a straight one
        self._copies: list[CudaCopy | None] = []
        parts: list[Reads] = []
        num_chunks = 0
        for piece in pieces:
            slot = -1
            reads, copy = piece.reads, None
            if piece.unpack is not None and landing is not None:
                slot, num_chunks = num_chunks % _NUM_SLOTS, num_chunks + 1
                base = landing.ptr_of(slot)
                reads = Reads(reads.source_ptr, reads.target_ptr + base, reads.num_bytes)
                rows = piece.unpack.copy()
                rows[:, 0] += base
                copy = CudaCopy(rows, target_device)
            parts.append(reads)
            self._lanes.append(slot)
            self._copies.append(copy)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        self.num_reads: int = ends[-1] if ends else 0
        columns = ("source_ptr", "target_ptr", "num_bytes")
        joined = Reads(
            *(
                np.concatenate([getattr(p, c) for p in parts] or [np.empty(0, dtype=np.int64)])
                for c in columns
            )
        )
        ranges = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
        self._transfer = None
        if ranges:
            self._transfer = agent.prepare_pieces(
                joined, ranges, source_device, target_device, NUM_IN_FLIGHT
            )

    def run(self, deadline: Deadline, lost: Callable[[], str | None]) -> None:
        """Read everything; when it raises, nothing lands and nothing is unpacked any more."""
        if self._transfer is None:
            return
        try:
            self._agent.read(self._transfer, deadline, lost, self)
            self._wait_all()
        except ValueError as error:  # a table that was closed meanwhile
            raise PeerLostError(self._agent.lost() or str(error)) from error
        except BaseException:
            with suppress(TransportError):
                self._wait_all()
            raise

    # --- between pieces: see PieceSteps ---------------------------------------------------------

    def before(self, piece: int) -> None:
        if self._lanes[piece] >= 0:
            wait_lane(self._device, self._lanes[piece])

    def landed(self, piece: int) -> None:
        copy = self._copies[piece]
        if copy is not None:
            copy.launch(self._lanes[piece])

    def _wait_all(self) -> None:
        for lane in sorted({lane for lane in self._lanes if lane >= 0}):
            wait_lane(self._device, lane)
