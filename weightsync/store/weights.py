"""Tensors in host memory, as a store takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightsync.codec.spans import Bytes
from weightsync.device_tables import CPU, bytes_at, synchronize
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


def check_same(kept: Weights, weights: Weights) -> None:
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
