"""A checkpoint directory as a source: who holds what, in which file, at which byte."""

from __future__ import annotations

from pathlib import Path

from weightsync.checkpoints import read_tensors
from weightsync.layout import Layout, PlacedBox, Region, TensorLayout
from weightsync.tables import dense_strides
from weightsync.types import Box, item_bytes


def checkpoint_layout(directory: Path | str) -> Layout:
    """The layout of a safetensors directory, of one rank; headers alone are read.

    Region i is a file, its ``device`` is ``file:NAME``, and a box's ``offset_bytes`` counts from the start
    of the file. Files are in order of their names. Raises what
    :func:`weightsync.checkpoints.read_index` raises.
    """
    path = Path(directory).expanduser()
    tensors = read_tensors(path)
    files = {name: i for i, name in enumerate(sorted({t.file for t in tensors}))}
    entries = []
    for tensor in tensors:
        meta = tensor.meta
        strides = tuple(dense_strides(meta.shape, item_bytes(meta.dtype)))
        box = Box.whole(meta.shape)
        placed = PlacedBox(0, box, files[tensor.file], tensor.offset_bytes, strides, meta.dtype)
        entries.append(TensorLayout(meta.name, (meta,), (placed,)))
    regions = tuple(Region((path / f).stat().st_size, device=f"file:{f}") for f in files)
    return Layout(1, tuple(entries), (regions,))
