"""The safetensors of a folder on a local disk, mapped, by tensor."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from weightsync.checkpoints import read_tensors
from weightsync.codec.spans import Bytes
from weightsync.store.durable import named_errors
from weightsync.types import TensorMeta


class MappedFiles:
    """A context manager; views of tensors must not outlive it."""

    def __init__(self, folder: Path, *, is_writable: bool) -> None:
        self.folder = folder
        self._writable = is_writable
        self._tensors = {t.meta.name: t for t in read_tensors(folder)}
        self._maps: dict[str, mmap.mmap] = {}
        self._fds: dict[str, int] = {}

    @property
    def metas(self) -> list[TensorMeta]:
        return [self._tensors[name].meta for name in sorted(self._tensors)]

    def data(self, name: str) -> Bytes:
        """The bytes of one tensor, uint8 [num_bytes]."""
        tensor = self._tensors[name]
        if tensor.meta.num_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(
            self._map(tensor.file), np.uint8, tensor.meta.num_bytes, tensor.offset_bytes
        )

    def forget(self, name: str) -> None:
        """Let the kernel drop the pages of a tensor's file that were read."""
        mapped = self._maps.get(self._tensors[name].file)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)

    def sync(self) -> None:
        """Makes everything that was written durable."""
        with named_errors("writing", self.folder):
            for name, mapped in self._maps.items():
                mapped.flush()
                os.fsync(self._fds[name])

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            flags = os.O_RDWR if self._writable else os.O_RDONLY
            access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_READ
            fd = os.open(self.folder / file, flags)
            self._fds[file] = fd
            self._maps[file] = mmap.mmap(fd, 0, access=access)
        return self._maps[file]

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(self, *_: Any) -> None:
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # a view in a traceback still looks at it
                mapped.close()
        for fd in self._fds.values():
            os.close(fd)
