"""Tensors as a store takes them: in host memory, or on a device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync.codec.spans import Bytes
from weightsync.device_tables import CPU, bytes_at, read_bytes, synchronize
from weightsync.errors import LayoutError, UnknownNameError
from weightsync.manifest import name_some
from weightsync.tables import dense_strides
from weightsync.tensors import TensorView, view_of
from weightsync.types import TensorMeta, item_bytes


@dataclass(frozen=True, eq=False)
class Weight:
    """A dense tensor in host memory: its wire form and its bytes, uint8 [meta.num_bytes]."""

    meta: TensorMeta
    data: Bytes
    owner: Any = None


Weights = dict[str, Weight]


@dataclass(frozen=True, eq=False)
class DeviceWeight:
    """A dense tensor where it lies, on a device; whoever looks at ``data`` copies it."""

    meta: TensorMeta
    ptr: int
    device: str
    owner: Any = None

    @property
    def data(self) -> Bytes:
        """A copy on the host, uint8 [meta.num_bytes]."""
        return np.frombuffer(read_bytes(self.ptr, self.meta.num_bytes, self.device), dtype=np.uint8)


AnyWeights = Mapping[str, Weight] | Mapping[str, DeviceWeight]


def on_device(weights: AnyWeights) -> dict[str, DeviceWeight] | None:
    """The weights, if all of them are of one device and on it."""
    found = {name: w for name, w in weights.items() if isinstance(w, DeviceWeight)}
    one = len({weight.device for weight in found.values()}) == 1
    return found if one and len(found) == len(weights) else None


def weights_of(named: Iterable[tuple[str, Any]]) -> Weights:
    """Tensors (torch, NumPy, DLPack) by name, in host memory; without a copy where they are dense there.

    What lies on a device is copied to the host. Raises :class:`LayoutError` for a name that comes twice.
    """
    found: Weights = {}
    for name, tensor in named:
        if name in found:
            raise LayoutError(f"{name!r} comes twice")
        found[name] = weight_of(name, view_of(tensor, name), tensor)
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


def check_same(kept: Weights, weights: AnyWeights) -> None:
    unknown = sorted(weights.keys() - kept.keys())
    missing = sorted(kept.keys() - weights.keys())
    if unknown or missing:
        raise UnknownNameError(
            f"a version must hold the tensors of its run: unknown {name_some(unknown) or 'none'}, "
            f"missing {name_some(missing) or 'none'}; publish a full version, or start a new run"
        )
    for name, weight in weights.items():
        if weight.meta != kept[name].meta:
            raise LayoutError(f"{name!r}: got {weight.meta}, the run has {kept[name].meta}")
