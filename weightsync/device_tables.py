"""Memory, segment copies and digests on the device where tensors are: the host or one CUDA device.

A device is torch's word: ``cpu``, ``cuda:0``. Tables are made once for a device and run again and
again. On CUDA they run on a stream of our own, which waits for nobody: whoever wrote the memory
before has called :func:`synchronize`, and on return the work is done.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from weightsync import native
from weightsync.errors import CapacityError, ConfigError, TransportError
from weightsync.layout import Layout
from weightsync.memory import HostMemory
from weightsync.tables import DigestRows
from weightsync.types import RegionAddress, format_bytes

_LOG = logging.getLogger(__name__)

CPU: Final = "cpu"
#: A thread copies so much between a device and the host at once.
COPY_BYTES: Final = 8 << 20

Table = npt.NDArray[np.int64]


def cuda_index(device: str) -> int:
    """The number of a CUDA device in this process. Raises :class:`ConfigError` if there is none."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(
            f"memory of device {device!r}: only 'cpu' and CUDA devices are understood"
        )
    if not native.has_cuda():
        raise ConfigError(
            f"memory of device {device!r} cannot be touched: {native.cuda_unavailable_reason()}; "
            f"{cuda_remedy()}"
        )
    return int(index)


_REMEDIES: Final = {
    "built without CUDA": "build the extension with CUDA, with a toolkit or the package "
    "nvidia-cuda-nvcc at hand (docs/cuda.md): "
    "pip install . -C cmake.define.WEIGHTSYNC_CUDA=ON",
    "no driver": "this build has the CUDA code; install NVIDIA's driver, or start the container with "
    "the GPU (docker run --gpus all)",
    "no device": "the driver shows no GPU; look at CUDA_VISIBLE_DEVICES and nvidia-smi",
}


def cuda_remedy() -> str:
    """What to do where ``native.has_cuda()`` is false."""
    reason = native.cuda_unavailable_reason()
    return _REMEDIES.get(str(reason), "look at nvidia-smi")


def device_of(regions: Iterable[RegionAddress], what: str) -> str:
    """The one device that holds all regions with a byte. Raises :class:`ConfigError` for several."""
    found = sorted({region.device for region in regions if region.num_bytes})
    if len(found) > 1:
        raise ConfigError(
            f"{what} lies on several devices ({', '.join(found)}); it must lie on one"
        )
    return found[0] if found else CPU


def device_facing(layout: Layout | None) -> str:
    """The device of this process where tensors for a peer of this layout are to be expected.

    CUDA faces CUDA: the current device of this thread. Everything else is of the host.
    """
    kinds = {
        region.device.partition(":")[0]
        for regions in (() if layout is None else layout.regions)
        for region in regions
        if region.num_bytes
    }
    if kinds != {"cuda"} or not native.has_cuda():
        return CPU
    return f"cuda:{native.extension.cuda_current_device()}"


@contextmanager
def cuda_errors(what: str) -> Iterator[None]:
    """What CUDA refuses becomes :class:`TransportError`."""
    try:
        yield
    except native.CudaError as error:
        raise TransportError(f"{what}: {error}") from error


def synchronize(device: str) -> None:
    """Wait for all work of this process on a CUDA device; nothing on the host."""
    if device != CPU:
        with cuda_errors(device):
            native.extension.cuda_synchronize(cuda_index(device))


_streams: dict[tuple[int, int], int] = {}
_streams_lock = threading.Lock()


def stream_of(index: int, lane: int = 0, priority: int = 0) -> int:
    """A stream that our work on a device runs on, made once a process; lanes wait for nobody.

    ``priority`` counts when it is made: below 0 goes before other work that is ready.
    """
    with _streams_lock:
        if (index, lane) not in _streams:
            _streams[index, lane] = native.extension.cuda_create_stream(index, priority)
        return _streams[index, lane]


def wait_lane(device: str, lane: int) -> None:
    """Wait until all that was launched on a lane of a CUDA device is done."""
    index = cuda_index(device)
    with cuda_errors(device):
        native.extension.cuda_wait_stream(stream_of(index, lane), index)


class StreamTimer:
    """How long the device works on what a ``with`` block enqueues on one of our streams.

    ``seconds()`` is known once that was waited for.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        create = native.extension.cuda_create_event
        self._events = (create(index), create(index))
        finalizer = weakref.finalize(self, _destroy_events, self._events, index)
        finalizer.atexit = False  # the process takes them along

    @contextmanager
    def on(self, stream: int) -> Iterator[int]:
        """Times what the block enqueues on a stream."""
        native.extension.cuda_record_event(self._events[0], stream, self._index)
        yield stream
        native.extension.cuda_record_event(self._events[1], stream, self._index)

    def wait(self) -> None:
        """Until the device has done that, whatever was enqueued behind it."""
        native.extension.cuda_wait_event(self._events[1], self._index)

    def seconds(self) -> float:
        return native.extension.cuda_elapsed_s(*self._events, self._index)


def _destroy_events(events: tuple[int, int], index: int) -> None:
    for event in events:
        try:
            native.extension.cuda_destroy_event(event, index)
        except native.CudaError:  # of an earlier kernel: the device is of no use any more
            _LOG.exception("an event was not destroyed")


# --- memory ---------------------------------------------------------------------------------------


class Memory(Protocol):
    """Memory of our own."""

    ptr: int
    num_bytes: int

    def pin(self) -> Pin:
        """Keeps the memory, also when it is closed, until the pin is released or garbage."""
        ...

    def close(self) -> None: ...


class Pin(Protocol):
    """Keeps memory until it is released, or garbage."""

    def release(self) -> None: ...


class _BlockPin:
    """A reference that can be given back by name."""

    def __init__(self, block: object) -> None:
        self._block: object | None = block

    def release(self) -> None:
        self._block = None


class _Block:
    """What is freed with its last reference: CUDA itself waits for work that uses it."""

    def __init__(self, ptr: int, index: int) -> None:
        self._free = weakref.finalize(self, _free, ptr, index)
        self._free.atexit = False  # the process takes it along


def _free(ptr: int, index: int) -> None:
    try:
        native.extension.cuda_free(ptr, index)
    except native.CudaError:  # of an earlier kernel: the device is of no use any more
        _LOG.exception("device memory was not freed")


class DeviceMemory:
    """An allocation on a CUDA device, outside the caches of every framework."""

    def __init__(self, num_bytes: int, device: str) -> None:
        index = cuda_index(device)
        try:
            self.ptr = native.extension.cuda_malloc(num_bytes, index)
        except native.CudaError as error:
            if error.error_name != "cudaErrorMemoryAllocation":
                raise TransportError(f"memory on {device}: {error}") from error
            free_bytes = native.extension.cuda_free_bytes(index)
            raise CapacityError(
                f"{device}: {num_bytes} B ({format_bytes(num_bytes)}) are needed, but only "
                f"{format_bytes(free_bytes)} are free there"
            ) from error
        self.num_bytes = num_bytes
        self._block: _Block | None = _Block(self.ptr, index)

    def pin(self) -> Pin:
        if self._block is None:
            raise ValueError(f"device memory of {self.num_bytes} B was closed")
        return _BlockPin(self._block)

    def close(self) -> None:
        """Free it, or, while somebody holds a pin, when the last of them lets go. Idempotent."""
        self._block = None


class HostBuffer:
    """``data`` (uint8) is memory of the host that ``device`` copies to and from at full speed; nothing
    may look at it once this is closed, or garbage."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes
        self._free: weakref.finalize[..., HostBuffer] | None = None
        if device == CPU or not num_bytes:
            self.data: npt.NDArray[np.uint8] = np.empty(num_bytes, dtype=np.uint8)
            return
        index = cuda_index(device)
        with cuda_errors(device):
            ptr = native.extension.cuda_malloc_host(num_bytes, index)
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(ptr))
        self._free = weakref.finalize(self, _free_host, ptr, index)
        self._free.atexit = False  # the process takes it along

    def close(self) -> None:
        """Free it. Idempotent."""
        self.num_bytes, self.data = 0, np.empty(0, dtype=np.uint8)
        if self._free is not None:
            self._free()


class KeptBuffer:
    """Such memory for what comes again and again: to pin it takes longer than to fill it. What cannot be
    pinned is ordinary memory. Used by one thread at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffer = HostBuffer(0, CPU)

    def room(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """uint8 of this size, until the next call; what it holds is anything."""
        if self._buffer.num_bytes < num_bytes:
            self._buffer.close()
            self._buffer = self._made(num_bytes + num_bytes // 4, num_bytes)
        return self._buffer.data[:num_bytes]

    def _made(self, num_bytes: int, needed: int) -> HostBuffer:
        try:
            return HostBuffer(num_bytes, self._device)
        except TransportError as error:
            _LOG.warning(
                "%d B of pinned memory could not be had, copies are slower: %s", needed, error
            )
            return HostBuffer(num_bytes, CPU)

    def close(self) -> None:
        """Free it. Idempotent."""
        self._buffer.close()


def _free_host(ptr: int, index: int) -> None:
    try:
        native.extension.cuda_free_host(ptr, index)
    except native.CudaError:  # of an earlier kernel: the device is of no use any more
        _LOG.exception("pinned memory was not freed")


def private_memory(num_bytes: int, device: str) -> Memory:
    """Memory on a device that is there already: no first use pays. Raises CapacityError."""
    if device != CPU:
        return DeviceMemory(num_bytes, device)
    memory = HostMemory.anonymous(num_bytes)
    native.prefault(memory.ptr, num_bytes)
    return memory


def read_bytes(ptr: int, num_bytes: int, device: str) -> bytes:
    """A copy of memory of any device."""
    if device == CPU:
        return ctypes.string_at(ptr, num_bytes)
    return bytes_at(ptr, num_bytes, device).tobytes()


def write_bytes(ptr: int, data: bytes, device: str) -> None:
    """Put bytes into memory of any device; on return they are there."""
    if device == CPU:
        ctypes.memmove(ptr, data, len(data))
    elif data:
        here: npt.NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8)
        with cuda_errors(device):
            native.extension.cuda_copy(ptr, here.ctypes.data, len(data), cuda_index(device))


def copy_memory(
    target_ptr: int, source_ptr: int, num_bytes: int, device: str, num_threads: int = 1
) -> None:
    """Between memory of this process and of ``device``, either way; on return it is there.

    In pieces on several threads: what is not pinned goes through the driver's staging buffers, at the
    pace of one core each.
    """
    if device == CPU:
        ctypes.memmove(target_ptr, source_ptr, num_bytes)
        return
    index, copy = cuda_index(device), native.extension.cuda_copy

    def one(start: int) -> None:
        with cuda_errors(device):
            copy(target_ptr + start, source_ptr + start, min(COPY_BYTES, num_bytes - start), index)

    starts = range(0, num_bytes, COPY_BYTES)
    if num_threads <= 1 or len(starts) <= 1:
        for start in starts:
            one(start)
        return
    with ThreadPoolExecutor(min(num_threads, len(starts)), "weightsync-copy") as pool:
        list(pool.map(one, starts))


def bytes_at(ptr: int, num_bytes: int, device: str) -> npt.NDArray[np.uint8]:
    """A copy of memory of a CUDA device, on the host."""
    found = np.empty(num_bytes, dtype=np.uint8)
    if num_bytes:
        with cuda_errors(device):
            native.extension.cuda_copy(found.ctypes.data, ptr, num_bytes, cuda_index(device))
    return found


# --- tables ---------------------------------------------------------------------------------------


class SegmentCopy(ABC):
    """Segments that are copied again and again; ``num_bytes`` counts source bytes."""

    num_bytes: int

    @abstractmethod
    def run(
        self,
        num_threads: int,
        *,
        source_base: int = 0,
        target_base: int = 0,
        max_blocks: int = 0,
        cancel: native.CancelFlag | None = None,
    ) -> int:
        """Copy them all, the bases added to their pointers; on return they are there.

        ``max_blocks``: how much of a device to take (see :class:`native.SegmentTableCuda`); 0 for all.
        Returns the source bytes copied: fewer than all only on the host, when ``cancel`` was set.
        """


class _HostCopy(SegmentCopy):
    def __init__(self, rows: Table) -> None:
        self._rows = rows
        self.num_bytes = int(np.prod(rows[:, [2, 4, 7, 10]], axis=1).sum()) if len(rows) else 0

    def run(
        self,
        num_threads: int,
        *,
        source_base: int = 0,
        target_base: int = 0,
        max_blocks: int = 0,
        cancel: native.CancelFlag | None = None,
    ) -> int:
        rows = self._rows
        if source_base or target_base:
            rows = rows.copy()
            rows[:, 0] += source_base
            rows[:, 1] += target_base
        return native.copy_segments(rows, num_threads=num_threads, cancel=cancel)


class _Launched:
    """A table on a device whose runs are timed."""

    _table: Any

    def __init__(self, device: str) -> None:
        self._index = cuda_index(device)
        self._device = device
        with cuda_errors(device):
            self._timer = StreamTimer(self._index)

    def _launch(self, lane: int = 0, *how: int) -> None:
        with self._timer.on(stream_of(self._index, lane)) as stream:
            self._table.launch(stream, *how)

    @property
    def device_s(self) -> float:
        """Seconds of the device in the last run."""
        with cuda_errors(self._device):
            return self._timer.seconds()

    def close(self) -> None:
        """Free the table. Idempotent."""
        with cuda_errors(self._device):
            self._table.close()


class CudaCopy(_Launched, SegmentCopy):
    """One launch a run; cannot be stopped, and need not: it is short."""

    def __init__(self, rows: Table, device: str) -> None:
        super().__init__(device)
        with cuda_errors(device):
            self._table = native.SegmentTableCuda(rows, self._index)
        self.num_bytes = self._table.num_bytes

    def run(
        self,
        num_threads: int = 1,
        *,
        source_base: int = 0,
        target_base: int = 0,
        max_blocks: int = 0,
        cancel: native.CancelFlag | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> int:
        """``meanwhile`` is called while the device is at work. What it enqueues on lane 0 runs when
        everything is copied, and is not waited for."""
        self.launch(0, source_base, target_base, max_blocks)
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            with cuda_errors(self._device):
                self._timer.wait()
        return self.num_bytes

    def launch(
        self, lane: int, source_base: int = 0, target_base: int = 0, max_blocks: int = 0
    ) -> None:
        """Start on a lane, without waiting; see :func:`wait_lane`."""
        with cuda_errors(self._device):
            self._launch(lane, source_base, target_base, max_blocks)


class CudaCopyDigest(_Launched):
    """One launch a run that copies and digests what it reads."""

    def __init__(self, rows: Table, digests: DigestRows, device: str) -> None:
        """Raises ``ValueError`` if the digest rows are not, row by row, what ``rows`` reads."""
        super().__init__(device)
        with cuda_errors(device):
            self._table = native.CopyDigestTableCuda(
                rows, digests.rows, self._index,
                owners=digests.owners, num_owners=digests.num_owners,
            )  # fmt: skip

    def run(self, meanwhile: Callable[[], None] | None = None) -> npt.NDArray[np.uint64]:
        """The digest of each owner; ``meanwhile`` is called while the device is at work."""
        with cuda_errors(self._device):
            self._launch()
            try:
                if meanwhile is not None:
                    meanwhile()
            finally:
                found: npt.NDArray[np.uint64] = self._table.result()
        return found


def copy_with_digests(
    rows: Table, digests: DigestRows | None, device: str
) -> CudaCopy | CudaCopyDigest:
    """A copy that also digests what it reads, if that is wanted and rows of both are the same."""
    if digests is not None and len(digests.rows) == len(rows):
        try:
            return CudaCopyDigest(rows, digests, device)
        except ValueError:
            _LOG.debug("digests are taken apart: some tensor is not dense on both sides")
    return CudaCopy(rows, device)


def segment_copy(rows: Table, device: str) -> SegmentCopy:
    """``rows`` (of memory of ``device``) made ready to be copied."""
    return _HostCopy(rows) if device == CPU else CudaCopy(rows, device)


#: Waits for digests that are being taken.
Digesting = Callable[[], npt.NDArray[np.uint64]]


class OwnedDigests(ABC):
    """Rows that are digested again and again, each for one of several owners."""

    @abstractmethod
    def run(self, num_threads: int) -> npt.NDArray[np.uint64]:
        """The digest of each owner."""

    @abstractmethod
    def start(self, num_threads: int, aside: Executor) -> Digesting:
        """Begin the same: on the host on another thread, on a device on lane 0, behind what is enqueued
        there. To be called and waited for by one thread, with no other run between."""


class _HostDigests(OwnedDigests):
    def __init__(self, rows: Table, owners: Table, num_owners: int) -> None:
        self._rows, self._owners, self._num_owners = rows, owners, num_owners

    def run(self, num_threads: int) -> npt.NDArray[np.uint64]:
        sums: npt.NDArray[np.uint64] = np.zeros(self._num_owners, dtype=np.uint64)
        if len(self._rows):
            found = native.digest_segments(self._rows, num_threads=num_threads)
            np.add.at(sums, self._owners, found)  # wraps modulo 2^64, as it must
        return sums

    def start(self, num_threads: int, aside: Executor) -> Digesting:
        return aside.submit(self.run, num_threads).result


class _CudaDigests(OwnedDigests):
    def __init__(self, rows: Table, owners: Table, num_owners: int, device: str) -> None:
        self._device = device
        self._lock = threading.Lock()  # engines of one plan are served in parallel
        index = cuda_index(device)
        with cuda_errors(device):
            self._stream = stream_of(index)
            self._table = native.DigestTableCuda(rows, index, owners=owners, num_owners=num_owners)

    def run(self, num_threads: int) -> npt.NDArray[np.uint64]:
        with self._lock, cuda_errors(self._device):
            self._table.launch(self._stream)
            return self._table.result()

    def start(self, num_threads: int, aside: Executor) -> Digesting:
        with self._lock, cuda_errors(self._device):
            self._table.launch(self._stream)
        return self._taken

    def _taken(self) -> npt.NDArray[np.uint64]:
        with self._lock, cuda_errors(self._device):
            return self._table.result()


def owned_digests(
    rows: Sequence[tuple[int, ...]], owners: Sequence[int], num_owners: int, device: str
) -> OwnedDigests:
    """Digest rows of memory of ``device`` made ready; row i counts for ``owners[i]``."""
    table: Any = np.array(rows, dtype=np.int64).reshape(-1, len(native.DIGEST_COLUMNS))
    whose: Any = np.array(owners, dtype=np.int64)
    if device == CPU:
        return _HostDigests(table, whose, num_owners)
    return _CudaDigests(table, whose, num_owners, device)
