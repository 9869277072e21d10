"""Ranks of a trainer without processes: torch's fake process group, one rank after another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from weightsync.layout import Layout, join_layouts
from weightsync.tensors import LocalTensors

Array = np.ndarray[Any, Any]


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """A default process group in which this process is ``rank``; collectives do nothing."""
    import torch.distributed as dist
    import torch.distributed.tensor.debug as debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # What torch keeps hands out meshes equal to this rank's, of ranks before it.
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def memory_of(local: LocalTensors, name: str, j: int) -> Array:
    """Placement ``j`` of a tensor, read at its address, copied; two-byte floats as uint16."""
    placed = local.layout.tensors[local.layout.index[name]].placed[j]
    address = {a.region: a for a in local.addresses}[placed.region]
    memory = (ctypes.c_char * max(1, address.num_bytes)).from_address(address.ptr)
    dtype = {"bfloat16": "uint16"}.get(placed.dtype, placed.dtype)
    view: Array = np.ndarray(
        placed.box.shape, dtype, memory, placed.offset_bytes, placed.strides_bytes
    )
    return view.copy()


class Whole:
    """Tensors put together from what every rank holds; equal where ranks hold the same element."""

    def __init__(self) -> None:
        self.layouts: list[Layout] = []
        self._parts: list[tuple[str, tuple[slice, ...], Array]] = []

    def add(self, local: LocalTensors) -> None:
        self.layouts.append(local.layout)
        for tensor in local.layout.tensors:
            for j, placed in enumerate(tensor.placed):
                box = tuple(map(slice, placed.box.start, placed.box.stop))
                self._parts.append((tensor.name, box, memory_of(local, tensor.name, j)))

    @property
    def layout(self) -> Layout:
        return join_layouts(self.layouts)

    def check(self, reference: Mapping[str, Any]) -> None:
        """Names, shapes and every element equal ``reference``, of NumPy arrays or CPU tensors."""
        layout = self.layout
        expected = {name: np.asarray(value) for name, value in reference.items()}
        assert {t.name: t.shape for t in layout.tensors} == {
            n: v.shape for n, v in expected.items()
        }
        seen = {n: np.zeros(v.shape, bool) for n, v in expected.items()}
        for name, box, value in self._parts:
            np.testing.assert_array_equal(value, expected[name][box], err_msg=name)
            seen[name][box] = True
        assert [n for n, s in seen.items() if not s.all()] == []


def collect(
    world_size: int, collect_rank: Callable[[int], LocalTensors], ranks: Sequence[int] | None = None
) -> Whole:
    """Every rank in turn under a fake process group."""
    whole = Whole()
    for rank in range(world_size) if ranks is None else ranks:
        with fake_rank(rank, world_size):
            whole.add(collect_rank(rank))
    return whole
