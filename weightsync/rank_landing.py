"""A full version from a store into the landing of one rank, and the deltas on it on the way.

What is dense there goes straight from files, in pieces on all threads; nothing else of it is in memory.
On a device these bytes are digested where they landed, before anything is placed, and not here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from weightsync.binding import Spot
from weightsync.codec.spans import Bytes
from weightsync.deadline import Deadline
from weightsync.device_tables import CPU, DeviceMemory, HostBuffer, copy_memory, segment_copy
from weightsync.digest import DigestPart, DigestTable
from weightsync.faults import reach
from weightsync.live_tensor import LiveTensor, copy_parts
from weightsync.store.chain import ChainTensor
from weightsync.store.directory import read_exactly
from weightsync.store.object_path import AnyPath
from weightsync.tables import dense_strides, segment_rows, table
from weightsync.types import Box, TensorMeta, item_bytes

#: A thread reads so much of a file at once.
PIECE_BYTES: Final = 16 << 20

Piece = tuple[AnyPath, int, int, int]  # file, offset, address, bytes


class Lander:
    """``touch`` is called before anything is written."""

    def __init__(
        self, device: str, num_threads: int, deadline: Deadline, touch: Callable[[], None]
    ) -> None:
        self._device, self._threads = device, num_threads
        self._deadline, self._touch = deadline, touch
        self._local = threading.local()

    def land(self, tensors: Sequence[tuple[ChainTensor, Sequence[Spot]]]) -> dict[str, int]:
        """By name the digest that what landed must have. Raises :class:`IntegrityError` if bytes are
        not what the manifest says; of what went straight to a device that is seen when it is
        digested."""
        digests: dict[str, int] = {}
        pieces: list[Piece] = []
        for tensor, spots in tensors:
            self._deadline.check()
            direct = self._direct(tensor, spots)
            if direct is not None and tensor.digest is not None:
                pieces += direct
                digests[tensor.meta.name] = tensor.digest
                continue
            digests[tensor.meta.name] = self._through_host(tensor, spots)
        self._touch()
        with ThreadPoolExecutor(self._threads, "weightsync-land") as pool:
            list(pool.map(self._copy, pieces))
        return digests

    def _direct(self, tensor: ChainTensor, spots: Sequence[Spot]) -> list[Piece] | None:
        """The pieces of a tensor whose bytes in its file are those that are to lie on the device."""
        live = LiveTensor(tensor.meta, spots, self._device)
        is_plain = self._device != CPU and live.is_dense and live.is_whole
        if not is_plain or tensor.full is None or tensor.steps:
            return None
        folder, found = tensor.full
        path, size = folder / found.file, tensor.meta.num_bytes
        return [
            (path, found.offset_bytes + at, spots[0].ptr + at, min(PIECE_BYTES, size - at))
            for at in range(0, size, PIECE_BYTES)
        ]

    def _copy(self, piece: Piece) -> None:
        self._deadline.check()
        path, offset, ptr, size = piece
        if not hasattr(self._local, "buffer"):
            self._local.buffer = HostBuffer(PIECE_BYTES, self._device)
        data: Bytes = self._local.buffer.data[:size]
        read_exactly(path, offset, data)
        copy_memory(ptr, data.ctypes.data, size, self._device)
        reach("follow.landed")

    # --- through the host -----------------------------------------------------------------------------

    def _through_host(self, tensor: ChainTensor, spots: Sequence[Spot]) -> int:
        """The digest of what this rank got."""
        target = self._target(tensor.meta, spots)
        self._touch()
        data = tensor.read(target)
        if target is None:
            self._place(tensor.meta, data, spots)
        reach("follow.landed")
        return _digest_of(tensor.meta, data, spots)

    def _target(self, meta: TensorMeta, spots: Sequence[Spot]) -> Bytes | None:
        """Where the whole tensor may be read to directly; None: into a buffer."""
        live = LiveTensor(meta, spots)
        is_direct = self._device == CPU and live.is_dense and live.is_whole
        return live.bytes() if is_direct else None

    def _place(self, meta: TensorMeta, data: Bytes, spots: Sequence[Spot]) -> None:
        """A whole tensor's boxes, from host memory to where they land."""
        if self._device == CPU:
            copy_parts(meta, data.ctypes.data, spots, is_gather=False, num_threads=self._threads)
            return
        if not meta.num_bytes:
            return
        live = LiveTensor(meta, spots, self._device)
        if live.is_dense and live.is_whole:
            self._upload(spots[0].ptr, data)
            return
        memory, item = DeviceMemory(meta.num_bytes, self._device), item_bytes(meta.dtype)
        self._upload(memory.ptr, data)
        strides = dense_strides(meta.shape, item)
        whole = Spot(Box.whole(meta.shape), memory.ptr, strides, meta.dtype)
        rows: list[tuple[int, ...]] = []
        for spot in spots:
            rows += segment_rows(
                spot.box.shape,
                source=(whole.at(spot.box), strides, item),
                target=(spot.ptr, spot.strides_bytes, item),
            )
        segment_copy(table(rows, 13), self._device).run(self._threads)
        memory.close()

    def _upload(self, ptr: int, data: Bytes) -> None:
        copy_memory(ptr, data.ctypes.data, data.size, self._device, self._threads)


def _digest_of(meta: TensorMeta, data: Bytes, spots: Sequence[Spot]) -> int:
    """Of those boxes of a whole tensor in host memory."""
    item = item_bytes(meta.dtype)
    strides = dense_strides(meta.shape, item)
    whole = Spot(Box.whole(meta.shape), data.ctypes.data, strides, meta.dtype)
    parts = [DigestPart(meta, s.box, whole.at(s.box), strides, meta.dtype) for s in spots]
    return DigestTable(parts).compute(1).get(meta.name, 0)


__all__ = ["Lander"]
