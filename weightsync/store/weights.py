"""Tensors as a store takes them: in host memory, or on a device."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from weightsync.codec.spans import Bytes
from weightsync.device_tables import (
    CPU,
    bytes_at,
    copy_memory,
    owned_digests,
    read_bytes,
    synchronize,
)
from weightsync.digest import DigestPart, part_rows
from weightsync.errors import LayoutError, UnknownNameError
from weightsync.manifest import name_some
from weightsync.store.cutting import Cuts, Cutter
from weightsync.store.object_path import ObjectPath
from weightsync.store.pieces import Piece, check_tiling, put, take
from weightsync.tables import dense_strides
from weightsync.tensors import TensorView, view_of
from weightsync.types import Box, TensorMeta, item_bytes

#: Of a tensor on a device, on its way into a file.
CHUNK_BYTES: Final = 32 << 20


@dataclass(frozen=True, eq=False)
class Weight:
    """A dense tensor in host memory: its wire form and its bytes, uint8 [meta.num_bytes].

    ``box_of`` says which piece of which tensor it is; None: a tensor of its own.
    """

    meta: TensorMeta
    data: Bytes
    owner: Any = None
    box_of: Piece | None = None

    @property
    def piece(self) -> Piece:
        return _piece(self.meta, self.box_of)


Weights = dict[str, Weight]


@dataclass(frozen=True, eq=False)
class DeviceWeight:
    """A dense tensor where it lies, on a device; whoever looks at ``data`` copies it."""

    meta: TensorMeta
    ptr: int
    device: str
    owner: Any = None
    box_of: Piece | None = None

    @property
    def piece(self) -> Piece:
        return _piece(self.meta, self.box_of)

    @property
    def data(self) -> Bytes:
        """A copy on the host, uint8 [meta.num_bytes]."""
        return np.frombuffer(read_bytes(self.ptr, self.meta.num_bytes, self.device), dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class LentWeight:
    """A piece that another rank holds, which has put it into an object for the time being."""

    piece: Piece
    path: ObjectPath
    offset_bytes: int

    @property
    def data(self) -> Bytes:
        """A copy, uint8 [its bytes]."""
        found = self.path.read_at(self.offset_bytes, self.piece.meta.num_bytes)
        return np.frombuffer(found, dtype=np.uint8)


def _piece(meta: TensorMeta, box_of: Piece | None) -> Piece:
    return Piece(meta, Box.whole(meta.shape)) if box_of is None else box_of


AnyWeights = Mapping[str, Weight] | Mapping[str, DeviceWeight]


def on_device(weights: AnyWeights) -> dict[str, DeviceWeight] | None:
    """The weights, if all of them are of one device and on it."""
    found = {name: w for name, w in weights.items() if isinstance(w, DeviceWeight)}
    one = len({weight.device for weight in found.values()}) == 1
    return found if one and len(found) == len(weights) else None


def weights_of(named: Iterable[tuple[str, Any]], cuts: Cuts | None = None) -> Weights:
    """Tensors (torch, NumPy, DLPack) by name, in host memory; without a copy where they are dense there.

    What lies on a device is copied to the host. With ``cuts``: pieces of tensors, by their own names;
    those that are not one run of bytes in their tensor are copied. Raises :class:`LayoutError` for a
    name that comes twice.
    """
    found: Weights = {}
    cutter = Cutter(cuts)
    for name, tensor in named:
        weight = weight_of(name, view_of(tensor, name), tensor)
        for part in pieces_of(weight, cutter):
            if part.meta.name in found:
                raise LayoutError(f"{part.meta.name!r} comes twice")
            found[part.meta.name] = part
    return found


def pieces_of(weight: Weight, cutter: Cutter) -> list[Weight]:
    """A whole tensor as the pieces that it is coded in."""
    found = []
    for piece in cutter.pieces(weight.meta):
        data = take(weight.meta, piece.box, weight.data)
        found.append(weight if piece.is_whole else Weight(piece.meta, data, weight.owner, piece))
    return found


Part = TypeVar("Part", bound=Weight | DeviceWeight | LentWeight, covariant=True)
Held = Weight | DeviceWeight


@dataclass(frozen=True, eq=False)
class Joined(Generic[Part]):
    """A whole tensor from its pieces; whoever looks at ``data`` copies it."""

    meta: TensorMeta
    parts: Sequence[Part]

    @property
    def data(self) -> Bytes:
        """uint8 [meta.num_bytes]."""
        if len(self.parts) == 1 and self.parts[0].piece.is_whole:
            return self.parts[0].data
        found: Bytes = np.empty(self.meta.num_bytes, dtype=np.uint8)
        for part in self.parts:
            put(self.meta, part.piece.box, found, part.data)
        return found

    @property
    def device(self) -> str:
        """Of a whole tensor on one; else the host."""
        (first, *others) = self.parts
        is_there = not others and first.piece.is_whole and isinstance(first, DeviceWeight)
        return first.device if is_there and isinstance(first, DeviceWeight) else CPU

    def chunks(self, buffer: Bytes | None = None) -> Iterator[memoryview]:
        """The same bytes in turn; each holds until the next is asked for. A whole tensor on a device
        comes to the host piece by piece, in ``buffer``."""
        (first, *others) = self.parts
        if others or not first.piece.is_whole or not isinstance(first, DeviceWeight):
            yield self.data.data
            return
        if buffer is None:
            buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
        for start in range(0, self.meta.num_bytes, buffer.size):
            size = min(buffer.size, self.meta.num_bytes - start)
            copy_memory(buffer.ctypes.data, first.ptr + start, size, first.device)
            yield buffer.data[:size]


def by_tensor(weights: AnyWeights) -> list[Joined[Held]]:
    """The tensors that pieces are of, in order."""
    found: dict[TensorMeta, list[Held]] = {}
    for weight in weights.values():
        found.setdefault(weight.piece.tensor, []).append(weight)
    return [Joined(meta, parts) for meta, parts in found.items()]


def check_whole(weights: AnyWeights) -> None:
    """Raises :class:`LayoutError` if pieces do not make up a tensor."""
    boxes: dict[TensorMeta, list[Box]] = {}
    for weight in weights.values():
        boxes.setdefault(weight.piece.tensor, []).append(weight.piece.box)
    for meta, held in boxes.items():
        try:
            if held != [Box.whole(meta.shape)]:
                check_tiling(meta, held)
        except ValueError as error:
            raise LayoutError(f"cannot publish: {error}") from error


def shares_of(weights: AnyWeights, names: Collection[str], num_threads: int) -> dict[str, int]:
    """What these pieces have in the digests of their tensors, by their own names; of whole tensors
    nothing, as that is their digest."""
    parts: dict[str, list[tuple[str, DigestPart]]] = {}  # by device
    for name in names:
        weight = weights[name]
        if weight.piece.is_whole:
            continue
        tensor, box = weight.piece.tensor, weight.piece.box
        if isinstance(weight, Weight):
            ptr, device = weight.data.ctypes.data, CPU
        else:
            ptr, device = weight.ptr, weight.device
        strides = dense_strides(box.shape, item_bytes(tensor.dtype))
        part = DigestPart(tensor, box, ptr, strides, tensor.dtype)
        parts.setdefault(device, []).append((name, part))
    found: dict[str, int] = {}
    for device, here in parts.items():
        rows: list[tuple[int, ...]] = []
        owners: list[int] = []
        for i, (_, part) in enumerate(here):
            new = part_rows(part)
            rows += new
            owners += [i] * len(new)
        digests = owned_digests(rows, owners, len(here), device).run(num_threads).tolist()
        found |= {name: digest for (name, _), digest in zip(here, digests, strict=True)}
    return found


def weight_of(name: str, view: TensorView, tensor: Any) -> Weight:
    """One of them."""
    meta = TensorMeta(name, view.dtype, view.shape)
    if view.strides_bytes != dense_strides(view.shape, item_bytes(view.dtype)):
        dense = (
            tensor.contiguous() if hasattr(tensor, "contiguous") else np.ascontiguousarray(tensor)
        )
        view = view_of(dense, name)
    if view.device != CPU:
        synchronize(view.device)
        return Weight(meta, bytes_at(view.ptr, meta.num_bytes, view.device))
    memory: Any = b""
    if meta.num_bytes:
        memory = (ctypes.c_uint8 * meta.num_bytes).from_address(view.ptr)
    return Weight(meta, np.frombuffer(memory, dtype=np.uint8), view.owner)


def check_same(kept: AnyWeights, weights: AnyWeights) -> None:
    unknown = sorted(weights.keys() - kept.keys())
    missing = sorted(kept.keys() - weights.keys())
    if unknown or missing:
        raise UnknownNameError(
            f"a version must hold the tensors of its run: unknown {name_some(unknown) or 'none'}, "
            f"missing {name_some(missing) or 'none'}; publish a full version, or start a new run"
        )
    for name, weight in weights.items():
        if weight.meta != kept[name].meta or weight.piece != kept[name].piece:
            raise LayoutError(f"{name!r}: got {weight.meta}, the run has {kept[name].meta}")
