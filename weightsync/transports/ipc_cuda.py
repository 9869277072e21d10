"""CUDA memory of a trainer on the same machine: its allocations, mapped into the engine's device.

A handle names a whole allocation, so allocations are what travels: once each, with the device's UUID
(its number differs between processes) and an identity that no later allocation at the same address
has. Memory of virtual memory management has no handles: its mapped pieces travel as file descriptors
(:mod:`weightsync.transports.cuda_pieces`), and neighbours are mapped side by side, as they lie in the
trainer. Mappings are closed explicitly, for a mapped allocation is not free even when its owner freed it.
Memory of another GPU is mapped where the two can reach each other's: a read is then a pull.
"""

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from weightsync import native
from weightsync.device_tables import (
    CudaCopy,
    CudaCopyDigest,
    copy_with_digests,
    cuda_errors,
    cuda_index,
    device_of,
    synchronize,
)
from weightsync.errors import (
    CapacityError,
    PeerLostError,
    ProtocolError,
    TransportError,
    UnavailableError,
)
from weightsync.tables import DigestRows
from weightsync.transports.base import Table
from weightsync.transports.cuda_allocations import (
    Allocation,
    Found,
    Sharing,
    as_allocations,
    find_allocations,
    parse_device,
)
from weightsync.transports.cuda_pieces import PieceBoard, release_handles, send_pieces
from weightsync.transports.link import Link
from weightsync.transports.published import DeviceCopied, DevicePath, DeviceSource, Span
from weightsync.types import RegionAddress

_LOG = logging.getLogger(__name__)

_REFUSED: Final = (
    "CUDA IPC is refused here ({error}). Trainer and engine need the same driver on one kernel; MIG slices, "
    "sandboxes such as gVisor and containers that hide each other's GPU refuse it, and so do two GPUs "
    "that cannot reach each other's memory (nvidia-smi topo -p2p r). `weightsync doctor "
    "--device cuda` tries it; transport 'p2p' needs none of it"
)


def uuid_of(index: int) -> str:
    """The UUID of a device of this process, hexadecimal."""
    with cuda_errors(f"cuda:{index}"):
        return native.extension.cuda_device_uuid(index).hex()


class CudaSource(DeviceSource):
    """The trainer's end."""

    def __init__(self) -> None:
        self._regions: tuple[RegionAddress, ...] = ()
        self._known: list[Found] = []
        self._described: dict[str, Any] = {}
        self._index = 0

    def describe(self, regions: Sequence[RegionAddress]) -> dict[str, Any]:
        """For the descriptor; waits until the work that writes the regions is done."""
        device = device_of(regions, "what the trainer publishes")
        index = cuda_index(device)
        synchronize(device)
        wanted = tuple(regions)
        if wanted != self._regions or not self._is_current(index):
            self._regions = ()
            self._known = find_allocations(wanted, lambda ptr: _look_up(ptr, index))
            with _sharing():
                made = as_allocations(
                    self._known, lambda ptr: native.extension.cuda_export(ptr, index)
                )
            self._index = index
            self._described = {
                "uuid": uuid_of(index), "allocations": [row.to_json() for row in made],
            }  # fmt: skip
            self._regions = wanted
        return self._described

    def announce(self, link: Link, epoch: int) -> None:
        pieces = [(p.ptr, f"{p.id:x}") for p in self._known if p.sharing is Sharing.FD]
        if pieces:
            with _sharing():
                send_pieces(link, epoch, self._described["uuid"], pieces, self._index)

    def withdraw(self, link: Link, epoch: int) -> None:
        if any(p.sharing is Sharing.FD for p in self._known):
            send_pieces(link, epoch, self._described["uuid"], [], self._index)

    def _is_current(self, index: int) -> bool:
        """Whether every allocation is still the one that was exported, not another in its place."""
        try:
            return all(_look_up(f.ptr, index)[2] == f.id for f in self._known)
        except native.CudaError:
            return False


@contextmanager
def _sharing() -> Iterator[None]:
    """Around exporting and opening: what CUDA refuses then has causes of its own."""
    try:
        yield
    except native.CudaError as error:
        if error.error_name == "cudaErrorMemoryAllocation":
            raise CapacityError(f"no room to map the trainer's memory: {error}") from error
        raise UnavailableError(_REFUSED.format(error=error)) from error


def _look_up(ptr: int, index: int) -> tuple[int, int, int, int]:
    return native.extension.cuda_allocation(ptr, index)


class CudaPath(DevicePath):
    """The engine's end: the trainer's allocations, mapped; addresses are ours."""

    @property
    def name(self) -> str:
        return "cuda ipc, between GPUs" if self._is_peer else "cuda ipc"

    def __init__(self, is_own_process: bool, pieces: PieceBoard | None = None) -> None:
        self._is_own = is_own_process  # whose memory needs, and allows, no mapping
        self._pieces = PieceBoard() if pieces is None else pieces
        self._index = 0
        self._device = ""
        self._is_peer = False  # the trainer's memory lies on another GPU, read over NVLink or PCIe
        self._mapped: dict[Allocation, int] = {}
        self._copies: weakref.WeakSet[CudaCopy | CudaCopyDigest] = weakref.WeakSet()
        self._lock = threading.Lock()  # nothing is unmapped under a copy
        self._is_closed = False

    def map_device(
        self,
        device: object,
        regions: Mapping[int, Span],
        local: Sequence[RegionAddress],
        epoch: int,
    ) -> dict[int, int]:
        uuid, allocations = parse_device(device)
        ours = device_of(local, "the engine")
        if local and ours != "cpu":
            self._check_device(uuid, ours)
        elif allocations:
            raise UnavailableError(
                "the trainer's tensors lie on a CUDA device, the engine's on the host; hold both on "
                "one device"
            )
        with self._lock:
            if self._is_closed:
                raise PeerLostError("this end was closed")
            self._drop_copies()
            wanted = frozenset(allocations)
            self._unmap([a for a in self._mapped if a not in wanted])
            try:
                for allocation in allocations:
                    self._map(allocation)
            finally:
                self._pieces.drop(epoch)
        starts = [a.ptr for a in allocations]
        found = {}
        for region, (ptr, num_bytes) in regions.items():
            found[region] = ptr
            if num_bytes:
                i = bisect.bisect_right(starts, ptr) - 1
                a = allocations[max(i, 0)] if allocations else None
                if a is None or not a.ptr <= ptr <= ptr + num_bytes <= a.ptr + a.num_bytes:
                    raise ProtocolError(
                        f"region {region} lies in no allocation of the direct descriptor"
                    )
                found[region] = self._mapped[a] + ptr - a.ptr
        return found

    def _check_device(self, uuid: str, ours: str) -> None:
        index = cuda_index(ours)
        own = uuid_of(index)
        if self._is_own and own != uuid:
            raise UnavailableError(
                f"ipc: the trainer's tensors lie on the GPU with UUID {uuid}, the engine's on "
                f"{ours} with UUID {own}; between two GPUs ipc needs two processes"
            )
        self._is_peer = own != uuid
        if self._mapped and index != self._index:
            self._unmap(list(self._mapped))
        self._index, self._device = index, ours

    def _map(self, allocation: Allocation) -> None:
        if allocation in self._mapped:
            return
        if self._is_own:
            self._mapped[allocation] = allocation.ptr
            return
        if not allocation.pieces:
            with _sharing():
                handle = bytes.fromhex(allocation.handle)
                self._mapped[allocation] = native.extension.cuda_map(handle, self._index)
            return
        handles = self._pieces.claim([identity for identity, _ in allocation.pieces])
        try:
            with _sharing():
                sizes = [size for _, size in allocation.pieces]
                self._mapped[allocation] = native.extension.cuda_map_handles(
                    handles, sizes, self._index
                )
        finally:
            release_handles(handles, self._index)  # the mapping needs them no longer

    def prepare(self, rows: Table, digests: DigestRows | None) -> CudaCopy | CudaCopyDigest:
        copy = copy_with_digests(rows, digests, self._device)
        self._copies.add(copy)
        return copy

    def copy(
        self,
        prepared: CudaCopy | CudaCopyDigest,
        meanwhile: Callable[[], None] | None = None,
    ) -> DeviceCopied:
        with self._lock:
            if self._is_closed:
                raise PeerLostError("this end was closed")
            try:
                found = prepared.run(meanwhile=meanwhile)
            except ValueError as error:  # made for what is no longer mapped
                raise TransportError(str(error)) from error
            return DeviceCopied(prepared.device_s, None if isinstance(found, int) else found)

    def _drop_copies(self) -> None:
        for copy in list(self._copies):
            copy.close()
        self._copies.clear()

    def _unmap(self, allocations: Sequence[Allocation]) -> None:
        """All of them, also when CUDA refuses one."""
        refused: native.CudaError | None = None
        for allocation in allocations:
            mapped = self._mapped.pop(allocation)
            try:
                if self._is_own:
                    continue
                if allocation.pieces:
                    sizes = [size for _, size in allocation.pieces]
                    native.extension.cuda_unmap_handles(mapped, sizes, self._index)
                else:
                    native.extension.cuda_unmap(mapped, self._index)
            except native.CudaError as error:
                refused = error
        if refused is not None:
            raise TransportError(f"the trainer's memory was not unmapped: {refused}") from refused

    def release(self) -> None:
        """Unmap everything; it can be mapped again."""
        with self._lock:
            self._drop_copies()
            self._unmap(list(self._mapped))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        try:
            self.release()
        except TransportError:  # nothing more can be done, and others must be closed too
            _LOG.exception("closing what was mapped of the trainer")
        self._pieces.close()
