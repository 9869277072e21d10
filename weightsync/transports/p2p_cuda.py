"""CUDA memory for NIXL: what is registered is whole allocations, which is what UCX exports.

An allocation has an identity that no later one at the same address has: freed memory that was
allocated anew is registered anew, and its readers learn of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from weightsync import native
from weightsync.device_tables import CudaCopy, CudaCopyDigest, cuda_errors, cuda_index
from weightsync.errors import PeerLostError, ProtocolError, UnavailableError
from weightsync.transports.cuda_allocations import Sharing
from weightsync.transports.nixl_binding import Span
from weightsync.transports.published import DeviceCopied
from weightsync.types import RegionAddress

_LOG = logging.getLogger(__name__)

_HANDLE_BYTES: Final = 64

_NOT_EXPORTABLE: Final = (
    "{device}: the memory at {ptr:#x} cannot be read by another process through UCX, as memory of "
    "'expandable_segments:True' cannot (or only through the host, a thousand times slower): move it "
    "through a ring (contract='stream'), or take that out of PYTORCH_CUDA_ALLOC_CONF (or "
    "PYTORCH_ALLOC_CONF) of the trainer"
)


class Key(NamedTuple):
    """What names an allocation of a peer for good: its identity there, and its handle."""

    id: int
    handle: str


class Allocation(NamedTuple):
    """One allocation of this process; ``id`` is never used again."""

    span: Span
    id: int
    is_exportable: bool


def allocations_of(regions: Sequence[RegionAddress], device: str) -> list[Allocation]:
    """The allocations that hold these regions, each once, by rising address.

    Raises :class:`UnavailableError` for a region that reaches over the end of its allocation.
    """
    index = cuda_index(device)
    found: list[Allocation] = []
    stop = 0
    with cuda_errors(f"memory on {device}"):
        for region in sorted(regions, key=lambda r: r.ptr):
            if not region.num_bytes:
                continue
            if region.ptr >= stop:
                ptr, num_bytes, identity, sharing = native.extension.cuda_allocation(
                    region.ptr, index
                )
                span, has_handle = Span(ptr, num_bytes, device), sharing == Sharing.HANDLE
                found.append(Allocation(span, identity, has_handle))
                stop = ptr + num_bytes
            if region.ptr + region.num_bytes > stop and found[-1].is_exportable:
                raise UnavailableError(
                    f"region {region.region} on {device} reaches over the end of its allocation "
                    f"at {found[-1].span.ptr:#x}"
                )
    return found


def are_current(allocations: Sequence[Allocation]) -> bool:
    """Whether each is still the allocation that it was, and not another in its place."""
    try:
        return all(
            native.extension.cuda_allocation(a.span.ptr, cuda_index(a.span.device))[2] == a.id
            for a in allocations
        )
    except native.CudaError:
        return False


def export_at(ptr: int, device: str) -> str:
    """The handle of the allocation at an address for :class:`PeerMemory` on the other end."""
    with cuda_errors(f"memory on {device}"):
        return native.extension.cuda_export(ptr, cuda_index(device)).hex()


def export(allocations: Sequence[Allocation]) -> list[str]:
    """Likewise of each."""
    return [export_at(a.span.ptr, a.span.device) for a in allocations]


class DeviceWay(StrEnum):
    """How device memory of a trainer of this machine is reached."""

    AUTO = "auto"  # mapped, and copied by one launch; where it cannot be mapped, NIXL
    NIXL = "nixl"  # as between machines


class PeerMemory:
    """A peer's allocations, mapped for as long as they are read.

    What is mapped can be copied by one launch, whatever its number of tensors. It also makes NIXL's own
    reads cheap: UCX maps what it reads for each read anew, or (with its cache) until the process ends;
    while we hold a mapping, its mapping is a count. When we let go, the memory is the trainer's alone.

    Nothing is unmapped under a copy of :meth:`run`.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._mapped: dict[Key, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def replace(self, wanted: Sequence[Key]) -> bool:
        """Map these, unmap all others; False if one cannot be mapped."""
        index = cuda_index(self._device)
        keys = set(wanted)
        with self._lock:
            if self._is_closed:
                raise PeerLostError("this end was closed")
            # First: another allocation at the same address may have the same handle.
            self._unmap([key for key in self._mapped if key not in keys])
            for key in wanted:
                if key in self._mapped:
                    continue
                try:
                    self._mapped[key] = native.extension.cuda_map(bytes.fromhex(key.handle), index)
                except native.CudaError as error:
                    _LOG.info("p2p: the trainer's memory cannot be mapped here: %s", error)
                    return False
        return True

    def address_of(self, key: Key) -> int:
        """Where an allocation is mapped."""
        return self._mapped[key]

    def run(
        self, copy: CudaCopy | CudaCopyDigest, meanwhile: Callable[[], None] | None = None
    ) -> DeviceCopied:
        """A copy out of what is mapped."""
        with self._lock:
            if self._is_closed:
                raise PeerLostError("this end was closed")
            found = copy.run(meanwhile=meanwhile)
            return DeviceCopied(copy.device_s, None if isinstance(found, int) else found)

    def _unmap(self, keys: Sequence[Key]) -> None:
        index = cuda_index(self._device)
        for key in keys:
            try:
                native.extension.cuda_unmap(self._mapped.pop(key), index)
            except native.CudaError:  # of an earlier kernel: the device is of no use any more
                _LOG.exception("the trainer's memory was not unmapped")

    def close(self) -> None:
        """Unmap everything, after a copy that runs. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._unmap(list(self._mapped))


def parse_handles(texts: Sequence[object], what: str) -> list[str]:
    """Raises :class:`ProtocolError` for what is no list of handles."""
    for text in texts:
        try:
            if not isinstance(text, str) or len(bytes.fromhex(text)) != _HANDLE_BYTES:
                raise ValueError
        except ValueError:
            raise ProtocolError(
                f"{what}: expected handles of {_HANDLE_BYTES} bytes in hexadecimal"
            ) from None
    return [str(text) for text in texts]


def check_exportable(allocations: Sequence[Allocation]) -> None:
    """Raise :class:`UnavailableError` for memory that UCX can only send through the host."""
    for allocation in allocations:
        if not allocation.is_exportable:
            span = allocation.span
            raise UnavailableError(_NOT_EXPORTABLE.format(device=span.device, ptr=span.ptr))
