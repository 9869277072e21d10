"""What a tensor is to us: an address, a dtype, a shape and strides, whoever made it.

Accepts torch tensors and parameters, NumPy arrays and anything with DLPack (CuPy arrays too). Torch
is used when it has been imported already and never imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weightsync.errors import LayoutError
from weightsync.layout import Layout, PlacedBox, Region, TensorLayout
from weightsync.layouts.dtensor import Trainer, is_dtensor
from weightsync.layouts.sharded import Sharded, join_pieces
from weightsync.tables import dense_strides
from weightsync.types import (
    ITEM_BYTES,
    Box,
    CastPolicy,
    RegionAddress,
    RegionKind,
    TensorMeta,
    item_bytes,
)


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor in memory of this process; ``owner`` keeps that memory alive.

    ``strides_bytes`` may be 0 or negative. ``storage_ptr`` and ``storage_bytes`` are the allocation
    that the view lies in.
    """

    ptr: int
    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    device: str
    storage_ptr: int
    storage_bytes: int
    owner: Any

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense wire form."""
        return TensorMeta("", self.dtype, self.shape).num_bytes

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two views of the very same elements in the same order."""
        return (self.ptr, self.dtype, self.shape, self.strides_bytes, self.device)


def view_of(tensor: Any, name: str = "tensor") -> TensorView:
    """The view of anything that is a tensor. Raises :class:`LayoutError` naming ``name``.

    Refused: sparse, quantised, meta and distributed tensors and unknown subclasses (their bytes are
    not their values). Lazy conjugates and negatives are resolved into a copy.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_view(torch, tensor, name)
    if isinstance(tensor, np.ndarray):
        return _numpy_view(tensor, name)
    if hasattr(tensor, "__dlpack__"):
        if torch is not None:
            return _torch_view(torch, torch.from_dlpack(tensor), name)
        return _numpy_view(np.from_dlpack(tensor), name)
    raise LayoutError(
        f"{name!r}: {type(tensor).__module__}.{type(tensor).__qualname__} is not a tensor (torch, "
        "NumPy, or anything with __dlpack__)"
    )


def _torch_view(torch: Any, tensor: Any, name: str) -> TensorView:
    kind = type(tensor)
    if is_dtensor(tensor):
        raise LayoutError(
            f"{name!r}: a DTensor has no one address: this rank's part of it belongs to a layout of "
            "several ranks (rank=, world_size=)"
        )
    if kind is not torch.Tensor and kind is not torch.nn.Parameter and kind is not torch.nn.Buffer:
        raise LayoutError(
            f"{name!r}: tensors of type {kind.__module__}.{kind.__qualname__} are not understood; "
            "give plain tensors or DTensors"
        )
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    if not is_strided or tensor.is_quantized or tensor.device.type == "meta":
        raise LayoutError(
            f"{name!r}: {tensor.layout} tensor on {tensor.device} (nested: {tensor.is_nested}, "
            f"quantised: {tensor.is_quantized}) has no plain bytes to send"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise LayoutError(f"{name!r}: dtype {dtype!r} is not known; known: {', '.join(ITEM_BYTES)}")
    storage = tensor.untyped_storage()
    if tensor.numel() and not storage.nbytes():
        raise LayoutError(
            f"{name!r}: its storage was freed (as sharding and offloading do); gather it first"
        )
    return TensorView(
        tensor.data_ptr(),
        dtype,
        tuple(tensor.shape),
        tuple(s * size for s in tensor.stride()),
        str(tensor.device),
        storage.data_ptr(),
        storage.nbytes(),
        tensor,
    )


def _numpy_view(array: np.ndarray[Any, Any], name: str) -> TensorView:
    dtype = array.dtype.name
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutError(f"{name!r}: a masked array has no plain bytes to send; fill it first")
    if dtype not in ITEM_BYTES or not array.dtype.isnative:
        raise LayoutError(f"{name!r}: NumPy dtype {array.dtype!r} is not known")
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root) if root.size else (array.ctypes.data,) * 2
    ptr = int(array.ctypes.data)
    if array.size and not low <= ptr < high:  # as_strided outside its base: trust the view alone
        low, high = np.lib.array_utils.byte_bounds(array)
    return TensorView(
        ptr, dtype, array.shape, array.strides, "cpu", int(low), int(high - low), array
    )


def check_writable(view: TensorView, name: str) -> None:
    """Raise :class:`LayoutError` for memory that must not or cannot be written."""
    if isinstance(view.owner, np.ndarray) and not view.owner.flags.writeable:
        raise LayoutError(f"{name!r}: read-only memory cannot be written")
    for extent, stride in zip(view.shape, view.strides_bytes, strict=True):
        if view.num_bytes and extent > 1 and stride == 0:
            raise LayoutError(f"{name!r}: elements that share memory (stride 0) cannot be written")


@dataclass(frozen=True)
class LocalTensors:
    """One rank's tensors: the layout that others see and the addresses that only we see."""

    layout: Layout
    views: Mapping[str, TensorView]  # of tensors that this rank holds whole, by canonical name
    addresses: tuple[RegionAddress, ...]
    shards: Mapping[str, tuple[TensorView, ...]] = field(default_factory=dict)  # of all others


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank holds of one tensor: views, each with the index of its first element."""

    shape: tuple[int, ...]
    dtype: str
    placed: tuple[tuple[tuple[int, ...], TensorView], ...]

    @property
    def is_whole(self) -> bool:
        return len(self.placed) == 1 and self.placed[0][1].shape == self.shape

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two that are the very same elements of tensors of equal shape."""
        return (self.shape, *((start, view.identity) for start, view in self.placed))


def local_tensors(
    named: Iterable[tuple[str, Any]],
    *,
    cast: CastPolicy = CastPolicy.STRICT,
    kind: RegionKind = RegionKind.PERSISTENT,
    rank: int = 0,
    world_size: int = 1,
) -> LocalTensors:
    """The layout of what rank ``rank`` of ``world_size`` holds; all other ranks' regions are empty.

    A DTensor or :class:`Sharded` adds the boxes that lie here (none: it is left out), any other tensor
    is held whole, a replica on every rank that gives it. Several ``Sharded`` of one name are one tensor.
    Names that show the very same elements become aliases of the first. With
    ``CastPolicy.FP32_TO_BF16`` an fp32 tensor also offers the wire form bf16.
    """
    views: dict[str, TensorView] = {}
    shards: dict[str, tuple[TensorView, ...]] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    held: dict[str, _Held] = {}
    for name, tensor in _gathered(Trainer(rank, world_size).localise(named)).items():
        found = _held(name, tensor)
        if not found.placed:
            continue
        has_bytes = any(view.num_bytes for _, view in found.placed)
        same = first.setdefault(found.identity, name) if has_bytes else name
        if same != name:
            aliases[name] = same
            continue
        held[name] = found
        if found.is_whole:
            views[name] = found.placed[0][1]
        else:
            shards[name] = tuple(view for _, view in found.placed)
    listed = [view for h in held.values() for _, view in h.placed]
    regions, addresses, spans = _regions(listed, kind)
    tensors = tuple(_entry(name, h, spans, cast, rank) for name, h in held.items())
    by_rank = tuple(regions if r == rank else () for r in range(world_size))
    layout = Layout(world_size, tensors, by_rank, aliases)
    return LocalTensors(layout, views, addresses, shards)


def _gathered(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """By name; parts of one tensor joined. Raises :class:`LayoutError` for a name given twice."""
    found: dict[str, Any] = {}
    for name, tensor in named:
        known = found.get(name)
        if known is None:
            found[name] = tensor
        elif isinstance(known, Sharded) and isinstance(tensor, Sharded):
            found[name] = join_pieces([known, tensor], name)
        else:
            raise LayoutError(f"{name!r} was given twice")
    return found


def _held(name: str, tensor: Any) -> _Held:
    if not isinstance(tensor, Sharded):
        view = view_of(tensor, name)
        return _Held(view.shape, view.dtype, (((0,) * len(view.shape), view),))
    if 0 in tensor.shape:  # a name without bytes, which travels nevertheless
        strides = dense_strides(tensor.shape, item_bytes(tensor.dtype))
        nothing = TensorView(0, tensor.dtype, tensor.shape, strides, "cpu", 0, 0, None)
        return _Held(tensor.shape, tensor.dtype, (((0,) * tensor.ndim, nothing),))
    placed = tuple((p.start, view_of(p.tensor, name)) for p in tensor.pieces)
    dtypes = {view.dtype for _, view in placed}
    if len(dtypes) > 1:
        raise LayoutError(f"{name!r}: its parts have dtypes {sorted(dtypes)}")
    return _Held(tensor.shape, tensor.dtype, placed)


Span = tuple[int, int]


def _regions(
    views: Sequence[TensorView], kind: RegionKind
) -> tuple[tuple[Region, ...], tuple[RegionAddress, ...], dict[Span, int]]:
    """One region a storage, in order of first use."""
    spans: dict[Span, int] = {}
    regions: list[Region] = []
    addresses: list[RegionAddress] = []
    for view in views:
        span = (view.storage_ptr, view.storage_bytes)
        if not view.num_bytes or span in spans:
            continue
        spans[span] = len(regions)
        regions.append(Region(view.storage_bytes, kind, view.device))
        addresses.append(RegionAddress(spans[span], *span, view.device))
    if not regions:  # only empty tensors: their placements still name a region
        regions, addresses = [Region(0, kind)], [RegionAddress(0, 0, 0)]
    return tuple(regions), tuple(addresses), spans


def _entry(
    name: str, held: _Held, spans: Mapping[Span, int], cast: CastPolicy, rank: int
) -> TensorLayout:
    forms = [TensorMeta(name, held.dtype, held.shape)]
    if cast is CastPolicy.FP32_TO_BF16 and held.dtype == "float32":
        forms.append(TensorMeta(name, "bfloat16", held.shape))
    placed = []
    for start, view in held.placed:
        region = spans.get((view.storage_ptr, view.storage_bytes), 0)
        offset = view.ptr - view.storage_ptr if view.num_bytes else 0
        stop = tuple(a + n for a, n in zip(start, view.shape, strict=True))
        box = Box(start, stop)
        placed.append(PlacedBox(rank, box, region, offset, view.strides_bytes, view.dtype))
    return TensorLayout(name, tuple(forms), tuple(placed))
