"""Host memory of our own, outside any allocator.

Memory that peers read must never move and must vanish with its process, so it comes straight from
the kernel: private pages, or a memfd whose descriptor can be handed to a peer. Nothing here has a
name in a file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightsync.errors import CapacityError, ConfigError, ProtocolError
from weightsync.types import BUCKET_ALIGNMENT_BYTES, format_bytes, item_bytes

PAGE_BYTES: Final = mmap.PAGESIZE
_HUGE_PAGE_BYTES: Final = 2 * 2**20
#: A peer that maps our memfd must not be able to change its size under us (SIGBUS).
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NEEDED_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class HostMemory:
    """A mapping: its address, its size, and the end of its life.

    ``close`` unmaps at once, or, while somebody holds a pin or an array on it, when the last of
    them lets go: no thread ever finds its memory gone.
    """

    def __init__(self, mapping: mmap.mmap, num_bytes: int) -> None:
        self._map: mmap.mmap | None = mapping
        self.num_bytes = num_bytes
        self.ptr = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        if num_bytes >= _HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def anonymous(cls, num_bytes: int) -> HostMemory:
        """Private zeroed pages. Raises :class:`CapacityError` if they would not fit."""
        check_capacity(num_bytes, "private memory")
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _no_room(num_bytes, "private memory") from error
        return cls(mapping, num_bytes)

    @property
    def is_open(self) -> bool:
        return self._map is not None

    def pin(self) -> memoryview:
        """Keeps the pages mapped until the view is released (or garbage)."""
        if self._map is None:
            raise ValueError(f"memory of {self.num_bytes} B was closed")
        return memoryview(self._map)

    def bytes_view(self) -> npt.NDArray[np.uint8]:
        """All bytes as an array, which keeps them mapped."""
        return np.frombuffer(self.pin(), dtype=np.uint8, count=self.num_bytes)

    def close(self) -> None:
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # pinned: unmapped with the last pin
                mapping.close()

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemfdMemory(HostMemory):
    """Shared pages behind a file descriptor of ours, ``fd``."""

    def __init__(self, mapping: mmap.mmap, num_bytes: int, fd: int) -> None:
        super().__init__(mapping, num_bytes)
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, num_bytes: int, name: str) -> MemfdMemory:
        """New zeroed memory of a fixed size. ``name`` shows up in ``/proc/<pid>/maps`` only."""
        check_capacity(num_bytes, f"shared memory {name!r}")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED), num_bytes, fd)
        except OSError as error:
            os.close(fd)
            raise _no_room(num_bytes, f"shared memory {name!r}") from error

    @classmethod
    def map(cls, fd: int, num_bytes: int) -> MemfdMemory:
        """Map a peer's memfd, for reading only; takes ``fd`` over, also when it raises.

        Raises :class:`ProtocolError` unless the file has that size and can never be made smaller.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size_bytes = os.fstat(fd).st_size
            if seals & _NEEDED_SEALS != _NEEDED_SEALS:
                raise ProtocolError(f"a peer's memory has seals {seals:#x}: it may shrink")
            if not 0 < num_bytes <= size_bytes:
                raise ProtocolError(
                    f"a peer's memory holds {size_bytes} B, but {num_bytes} B were announced"
                )
            mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            return cls(mapping, num_bytes, fd)
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"a peer's memory cannot be mapped: {error}") from error
        except ProtocolError:
            os.close(fd)
            raise

    def read_only_fd(self) -> int:
        """A new descriptor to hand to a peer: whoever holds it can read, never write."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        super().close()
        self._close_fd()


#: numpy's stand-in, by element size, for the dtypes that only torch has.
_BITS: Final = {1: "uint8", 2: "uint16", 4: "uint32"}
_NUMPY_NAMES: Final = frozenset(
    {"bool", "uint8", "int8", "uint16", "int16", "float16", "uint32", "int32", "float32"}
    | {"uint64", "int64", "float64", "complex64", "complex128"}
)
_arenas: weakref.WeakSet[SharedArena] = weakref.WeakSet()
_arenas_lock = threading.Lock()


class SharedArena:
    """Tensors in a memfd of ours: readable by a peer even where it may not read this process.

    A trainer that puts its weights here is read about twice as fast, and also on machines that refuse
    ``process_vm_readv``: the ``ipc`` transport finds the arena by address. An array keeps its arena
    alive.
    """

    def __init__(self, num_bytes: int, name: str = "weightsync-arena") -> None:
        self._memory = MemfdMemory.create(num_bytes, name)
        self._used_bytes = 0
        self._lock = threading.Lock()
        with _arenas_lock:
            _arenas.add(self)

    @property
    def ptr(self) -> int:
        return self._memory.ptr

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    @property
    def free_bytes(self) -> int:
        return self.num_bytes - self._used_bytes

    @property
    def is_open(self) -> bool:
        return self._memory.is_open

    def empty(self, shape: Sequence[int], dtype: str) -> npt.NDArray[Any]:
        """A zeroed array, 256-byte aligned. ``dtype`` is torch's word, e.g. ``bfloat16``.

        A dtype that numpy lacks comes as unsigned integers of its size:
        ``torch.from_numpy(array).view(torch.bfloat16)``. Nothing is ever handed out twice.
        """
        size_bytes = math.prod(shape) * item_bytes(dtype)
        with self._lock:
            offset = -(-self._used_bytes // BUCKET_ALIGNMENT_BYTES) * BUCKET_ALIGNMENT_BYTES
            if offset + size_bytes > self.num_bytes:
                raise CapacityError(
                    f"arena of {self.num_bytes} B: a tensor of {size_bytes} B does not fit, "
                    f"{max(0, self.num_bytes - offset)} B are free"
                )
            self._used_bytes = offset + size_bytes
        name = dtype if dtype in _NUMPY_NAMES else _BITS[item_bytes(dtype)]
        window = _ArenaWindow(self, self._memory.pin(), offset, tuple(shape), np.dtype(name))
        return np.asarray(window)

    def read_only_fd(self) -> int:
        """See :meth:`MemfdMemory.read_only_fd`."""
        return self._memory.read_only_fd()

    def close(self) -> None:
        """No peer can find it any more; its pages live as long as an array on them."""
        with _arenas_lock:
            _arenas.discard(self)
        self._memory.close()


class _ArenaWindow:
    """What an array of an arena stands on; keeps the arena and its pages alive."""

    def __init__(
        self,
        arena: SharedArena,
        pin: memoryview,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._arena = arena
        self._pin = pin
        self.__array_interface__ = {
            "data": (arena.ptr + offset, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }


def find_arena(ptr: int, num_bytes: int) -> SharedArena | None:
    """The arena of this process that holds the whole range, if one does."""
    with _arenas_lock:
        for arena in _arenas:
            if (
                arena.is_open
                and arena.ptr <= ptr
                and ptr + num_bytes <= arena.ptr + arena.num_bytes
            ):
                return arena
    return None


def has_arenas() -> bool:
    """Whether this process has any arena."""
    with _arenas_lock:
        return any(arena.is_open for arena in _arenas)


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its cgroup's if that is less."""
    return min([_machine_available_bytes(), *_cgroup_available_bytes()])


def check_capacity(num_bytes: int, purpose: str) -> None:
    """Refuse before touching: the kernel's own answer to too much memory is a SIGKILL."""
    if num_bytes < 1:
        raise ConfigError(f"{purpose} of {num_bytes} B: at least one byte")
    if num_bytes > available_bytes():
        raise _no_room(num_bytes, purpose)


def _no_room(num_bytes: int, purpose: str) -> CapacityError:
    return CapacityError(
        f"{purpose} needs {num_bytes} B ({format_bytes(num_bytes)}), but only "
        f"{format_bytes(available_bytes())} are available here"
    )


def _machine_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**63 - 1  # a kernel that does not say


def _cgroup_available_bytes() -> Iterator[int]:
    """What each memory cgroup above this process has left; page cache of files counts as free."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, limit, used, cache = "/sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_"
        else:
            continue
        # In a container the path may be of the host's tree: then only the root of ours is there.
        for folder in (path, *map(str, Path(path).parents)):
            base = Path(root + folder)
            with contextlib.suppress(OSError, ValueError):
                left = int((base / limit).read_text()) - int((base / used).read_text())
                stat = dict(row.split() for row in (base / "memory.stat").read_text().splitlines())
                yield max(0, left + int(stat.get(f"{cache}inactive_file", 0)))


def merge_spans(
    spans: Sequence[tuple[int, int]], page_bytes: int = PAGE_BYTES
) -> tuple[list[tuple[int, int]], list[int]]:
    """Round (ptr, num_bytes) spans out to pages and merge those that touch or overlap.

    Returns the merged spans by rising address, and for each input the index of its merged span
    (-1 for a span without a byte, which needs none).
    """
    merged: list[tuple[int, int]] = []
    index = [-1] * len(spans)
    for i in sorted(range(len(spans)), key=lambda k: spans[k]):
        ptr, num_bytes = spans[i]
        if num_bytes <= 0:
            continue
        start = ptr // page_bytes * page_bytes
        stop = -(-(ptr + num_bytes) // page_bytes) * page_bytes
        if merged and start <= sum(merged[-1]):
            first, size = merged[-1]
            merged[-1] = (first, max(first + size, stop) - first)
        else:
            merged.append((start, stop - start))
        index[i] = len(merged) - 1
    return merged, index
