"""CUDA memory of a trainer on the same device: its allocations, mapped into the engine.

A handle names a whole allocation, so allocations are what travels: once each, with the device's UUID
(its number differs between processes) and an identity that no later allocation at the same address
has. Mappings are closed explicitly, for a mapped allocation is not free even when its owner freed it.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from weightsync import native
from weightsync.device_tables import CudaCopy, cuda_errors, cuda_index, device_of, synchronize
from weightsync.errors import PeerLostError, ProtocolError, TransportError, UnavailableError
from weightsync.transports.base import Table
from weightsync.transports.link import check_fields
from weightsync.transports.published import DevicePath, DeviceSource, Span
from weightsync.types import RegionAddress

_LOG = logging.getLogger(__name__)

_DEVICE_FIELDS: Final = {"uuid": str, "allocations": list}
_ALLOCATION_FIELDS: Final = {"ptr": int, "num_bytes": int, "id": str, "handle": str}
_HANDLE_BYTES: Final = 64
_UUID_BYTES: Final = 16

_NOT_SHAREABLE: Final = (
    "{device}: the memory at {ptr:#x} cannot be opened by another process, as memory of "
    "'expandable_segments:True' cannot; take that out of PYTORCH_CUDA_ALLOC_CONF (or "
    "PYTORCH_ALLOC_CONF) of the trainer, or clone the tensors after "
    "torch.cuda.memory._set_allocator_settings('expandable_segments:False')"
)


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the trainer; ``id`` and ``handle`` are hexadecimal."""

    ptr: int
    num_bytes: int
    id: str
    handle: str

    def to_json(self) -> dict[str, Any]:
        return {
            "ptr": self.ptr, "num_bytes": self.num_bytes, "id": self.id, "handle": self.handle,
        }  # fmt: skip


def uuid_of(index: int) -> str:
    """The UUID of a device of this process, hexadecimal."""
    with cuda_errors(f"cuda:{index}"):
        return native.extension.cuda_device_uuid(index).hex()


def parse_device(value: object) -> tuple[str, tuple[Allocation, ...]]:
    """UUID and allocations of a descriptor. Raises :class:`ProtocolError` naming the field."""
    what = "direct descriptor, 'device'"
    fields = check_fields(value, _DEVICE_FIELDS, what)
    _check_hex(fields["uuid"], _UUID_BYTES, what, "uuid")
    found = []
    for entry in fields["allocations"]:
        row = check_fields(entry, _ALLOCATION_FIELDS, f"{what}, 'allocations'")
        _check_hex(row["handle"], _HANDLE_BYTES, what, "handle")
        if not row["num_bytes"] or row["ptr"] + row["num_bytes"] >= 2**63:
            raise ProtocolError(f"{what}: field 'num_bytes' of an allocation is out of range")
        found.append(Allocation(row["ptr"], row["num_bytes"], row["id"], row["handle"]))
    found.sort(key=lambda a: a.ptr)
    for a, b in itertools.pairwise(found):
        if a.ptr + a.num_bytes > b.ptr:
            raise ProtocolError(f"{what}: two allocations overlap at {b.ptr:#x}")
    return fields["uuid"], tuple(found)


def _check_hex(text: str, num_bytes: int, what: str, name: str) -> None:
    try:
        is_right = len(bytes.fromhex(text)) == num_bytes
    except ValueError:
        is_right = False
    if not is_right:
        raise ProtocolError(f"{what}: field {name!r} must be {num_bytes} bytes in hexadecimal")


def find_allocations(
    regions: Sequence[RegionAddress], look_up: Callable[[int], tuple[int, int, int, bool]]
) -> list[tuple[int, int, int]]:
    """The allocations (ptr, num_bytes, id) that hold the regions, each once, by rising address.

    ``look_up`` tells of an address: ptr, num_bytes, id, and whether it can be shared.
    """
    found: list[tuple[int, int, int]] = []
    for region in sorted(regions, key=lambda r: r.ptr):
        if not region.num_bytes:
            continue
        if not found or region.ptr >= sum(found[-1][:2]):
            ptr, num_bytes, identity, is_shareable = look_up(region.ptr)
            if not is_shareable:
                raise UnavailableError(_NOT_SHAREABLE.format(device=region.device, ptr=region.ptr))
            found.append((ptr, num_bytes, identity))
        if region.ptr + region.num_bytes > sum(found[-1][:2]):
            raise UnavailableError(
                f"region {region.region} on {region.device} reaches over the end of its "
                f"allocation at {found[-1][0]:#x}"
            )
    return found


class CudaSource(DeviceSource):
    """The trainer's end."""

    def __init__(self) -> None:
        self._regions: tuple[RegionAddress, ...] = ()
        self._known: list[tuple[int, int, int]] = []
        self._described: dict[str, Any] = {}

    def describe(self, regions: Sequence[RegionAddress]) -> dict[str, Any]:
        """For the descriptor; waits until the work that writes the regions is done."""
        device = device_of(regions, "what the trainer publishes")
        index = cuda_index(device)
        synchronize(device)
        with cuda_errors(f"the trainer's memory on {device}"):
            wanted = tuple(regions)
            if wanted != self._regions or not self._is_current(index):
                self._regions = ()
                self._known = find_allocations(wanted, lambda ptr: _look_up(ptr, index))
                rows = [
                    Allocation(p, n, f"{i:x}", native.extension.cuda_export(p, index).hex())
                    for p, n, i in self._known
                ]
                self._described = {
                    "uuid": uuid_of(index), "allocations": [row.to_json() for row in rows],
                }  # fmt: skip
                self._regions = wanted
        return self._described

    def _is_current(self, index: int) -> bool:
        """Whether every allocation is still the one that was exported, not another in its place."""
        try:
            return all(_look_up(ptr, index)[2] == identity for ptr, _, identity in self._known)
        except native.CudaError:
            return False


def _look_up(ptr: int, index: int) -> tuple[int, int, int, bool]:
    return native.extension.cuda_allocation(ptr, index)


class CudaPath(DevicePath):
    """The engine's end: the trainer's allocations, mapped; addresses are ours."""

    @property
    def name(self) -> str:
        return "cuda ipc"

    def __init__(self, is_own_process: bool) -> None:
        self._is_own = is_own_process  # whose memory needs, and allows, no mapping
        self._index = 0
        self._device = ""
        self._mapped: dict[Allocation, int] = {}
        self._copies: weakref.WeakSet[CudaCopy] = weakref.WeakSet()
        self._lock = threading.Lock()  # nothing is unmapped under a copy
        self._is_closed = False

    def map_device(
        self, device: object, regions: Mapping[int, Span], local: Sequence[RegionAddress]
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
            for allocation in allocations:
                self._map(allocation)
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
        if (own := uuid_of(index)) != uuid:
            raise UnavailableError(
                f"ipc: the trainer's tensors lie on the GPU with UUID {uuid}, the engine's on "
                f"{ours} with UUID {own}; ipc reads within one GPU only"
            )
        if self._mapped and index != self._index:
            self._unmap(list(self._mapped))
        self._index, self._device = index, ours

    def _map(self, allocation: Allocation) -> None:
        if allocation in self._mapped:
            return
        if self._is_own:
            self._mapped[allocation] = allocation.ptr
            return
        with cuda_errors(f"{allocation.num_bytes} B of the trainer on {self._device}"):
            handle = bytes.fromhex(allocation.handle)
            self._mapped[allocation] = native.extension.cuda_map(handle, self._index)

    def prepare(self, rows: Table) -> CudaCopy:
        copy = CudaCopy(rows, self._device)
        self._copies.add(copy)
        return copy

    def copy(self, prepared: CudaCopy) -> float:
        with self._lock:
            if self._is_closed:
                raise PeerLostError("this end was closed")
            try:
                prepared.run()
            except ValueError as error:  # made for what is no longer mapped
                raise TransportError(str(error)) from error
            return prepared.device_s

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
                if not self._is_own:
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
