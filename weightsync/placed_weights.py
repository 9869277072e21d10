"""Tensors of a trainer in the form that a store has, dense: where they lie, or copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weightsync.binding import Spot, spot_of
from weightsync.codec.spans import Bytes
from weightsync.device_tables import CPU, DeviceMemory, bytes_at, segment_copy, synchronize
from weightsync.errors import ConfigError, LayoutError
from weightsync.layout import PlacedBox, TensorLayout
from weightsync.live_tensor import LiveTensor
from weightsync.store.cutting import Cutter
from weightsync.store.pieces import Piece
from weightsync.store.weights import DeviceWeight, Weight
from weightsync.store_options import SnapshotPlace, StoreOptions
from weightsync.tables import dense_strides, segment_rows, table
from weightsync.tensors import LocalTensors
from weightsync.types import Box, Convert, TensorMeta, item_bytes


def placed_weights(
    tensors: LocalTensors,
    options: StoreOptions,
    num_threads: int,
    cutter: Cutter,
    owned: Sequence[Piece] | None = None,
) -> dict[str, Weight] | dict[str, DeviceWeight]:
    """Each piece of each tensor in the form that is stored: where it lies if it is dense there and keeps
    its dtype, else a copy; ``owned`` are this rank's, if there are several. On the host, or if the
    snapshot is to be on the one device of all, on that.

    Raises :class:`ConfigError` for a part of a tensor, and for weights of several devices then.
    """
    by_region = {a.region: a.ptr for a in tensors.addresses}
    devices = {a.region: a.device for a in tensors.addresses}
    used = {p.region for entry in tensors.layout.tensors for p in entry.placed}
    kinds = sorted({devices[region] for region in used})
    is_on_device = options.snapshot is SnapshotPlace.DEVICE and kinds != [CPU]
    if is_on_device and len(kinds) > 1:
        raise ConfigError(
            f"snapshot='device' needs all weights on one device, they lie on {', '.join(kinds)}; "
            "snapshot='host' takes them all"
        )
    by_name: dict[str, list[Piece]] = {}
    for piece in owned or ():
        by_name.setdefault(piece.tensor.name, []).append(piece)
    found: dict[str, Any] = {}
    for device in kinds:
        synchronize(device)
    for entry in tensors.layout.tensors:
        meta = entry.wire_forms[-1]  # the cast one, where there is one
        pieces: Sequence[Piece]
        if owned is not None:
            pieces = by_name.get(entry.name, ())
        elif len(entry.placed) != 1 or entry.placed[0].box != Box.whole(entry.shape):
            raise ConfigError(f"{entry.name!r} is cut over ranks; gather it before it is sent")
        else:
            pieces = cutter.pieces(meta)
        for piece in pieces:
            placed = _holder(entry, piece)
            whole = spot_of(placed, by_region)
            device = devices[placed.region]
            spot = replace(whole, box=Box.whole(piece.box.shape), ptr=whole.at(piece.box))
            found[piece.meta.name] = _placed(
                piece, spot, device, (tensors, is_on_device, num_threads)
            )
    return found


def _holder(entry: TensorLayout, piece: Piece) -> PlacedBox:
    """What holds the piece here."""
    for placed in entry.placed:
        if placed.box == piece.box or placed.box.intersect(piece.box) == piece.box:
            return placed
    raise LayoutError(f"{piece.meta.name!r} lies in no box of this rank")


def _placed(
    piece: Piece, spot: Spot, device: str, how: tuple[LocalTensors, bool, int]
) -> Weight | DeviceWeight:
    owner, is_on_device, num_threads = how
    box_of = None if piece.is_whole else piece
    if is_on_device:
        ptr, memory = _dense_there(piece.meta, spot, device, num_threads)
        return DeviceWeight(piece.meta, ptr, device, (owner, memory), box_of)
    return Weight(piece.meta, _dense(piece.meta, spot, device, num_threads), owner, box_of)


def _dense(meta: TensorMeta, spot: Spot, device: str, num_threads: int) -> Bytes:
    """The wire form of one tensor in host memory, uint8 [meta.num_bytes]."""
    live = LiveTensor(meta, [spot])
    if spot.dtype == meta.dtype and live.is_dense and device == CPU:
        return live.bytes()
    ptr, memory = _dense_there(meta, spot, device, num_threads)
    if device == CPU:
        return memory  # type: ignore[no-any-return]
    data = bytes_at(ptr, meta.num_bytes, device)
    if isinstance(memory, DeviceMemory):
        memory.close()
    return data


def _dense_there(meta: TensorMeta, spot: Spot, device: str, num_threads: int) -> tuple[int, Any]:
    """The address of the wire form of one tensor on its device, and the memory of a copy, if one had
    to be made."""
    if spot.dtype == meta.dtype and LiveTensor(meta, [spot]).is_dense:
        return spot.ptr, None
    convert = Convert.NONE if spot.dtype == meta.dtype else Convert.FP32_TO_BF16
    memory: Any = np.empty(meta.num_bytes, dtype=np.uint8)
    if device != CPU and meta.num_bytes:
        memory = DeviceMemory(meta.num_bytes, device)
    ptr = memory.ptr if isinstance(memory, DeviceMemory) else memory.ctypes.data
    item = item_bytes(meta.dtype)
    rows = segment_rows(
        meta.shape,
        source=(spot.ptr, spot.strides_bytes, item_bytes(spot.dtype)),
        target=(ptr, dense_strides(meta.shape, item), item),
        convert=convert,
    )
    where = device if isinstance(memory, DeviceMemory) else CPU
    segment_copy(table(rows, 13), where).run(num_threads)
    return ptr, memory


__all__ = ["placed_weights"]
