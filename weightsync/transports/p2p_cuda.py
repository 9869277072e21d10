"""CUDA memory for NIXL: what is registered is whole allocations, which is what UCX exports.

An allocation has an identity that no later one at the same address has: freed memory that was
allocated anew is registered anew, and its readers learn of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple

from weightsync import native
from weightsync.device_tables import cuda_errors, cuda_index
from weightsync.errors import ProtocolError, UnavailableError
from weightsync.transports.nixl_binding import Span
from weightsync.types import RegionAddress

_LOG = logging.getLogger(__name__)

_HANDLE_BYTES: Final = 64

_NOT_EXPORTABLE: Final = (
    "{device}: the memory at {ptr:#x} cannot be read by another process through UCX, as memory of "
    "'expandable_segments:True' cannot (or only through the host, a thousand times slower): move it "
    "through a ring (contract='stream'), or take that out of PYTORCH_CUDA_ALLOC_CONF (or "
    "PYTORCH_ALLOC_CONF) of the trainer"
)


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
                ptr, num_bytes, identity, is_exportable = native.extension.cuda_allocation(
                    region.ptr, index
                )
                found.append(Allocation(Span(ptr, num_bytes, device), identity, is_exportable))
                stop = ptr + num_bytes
            if region.ptr + region.num_bytes > stop:
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
    """The handle of the allocation at an address for :class:`KeptMappings` on the other end."""
    with cuda_errors(f"memory on {device}"):
        return native.extension.cuda_export(ptr, cuda_index(device)).hex()


def export(allocations: Sequence[Allocation]) -> list[str]:
    """Likewise of each."""
    return [export_at(a.span.ptr, a.span.device) for a in allocations]


class KeptMappings:
    """A peer's allocations, mapped for as long as they are read.

    UCX maps what it reads for each read anew, or (with its cache) for ever. While we hold a mapping of
    our own, its mapping is a count; when we let go, the memory is the trainer's alone again.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._mapped: dict[str, int] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def replace(self, handles: Sequence[str]) -> None:
        """Map these, unmap all others. What cannot be mapped is read all the same, only slower."""
        index = cuda_index(self._device)
        wanted = set(handles)
        with self._lock:
            if self._is_closed:
                return
            self._unmap([h for h in self._mapped if h not in wanted])
            for handle in wanted - self._mapped.keys():
                try:
                    mapped = native.extension.cuda_map(bytes.fromhex(handle), index)
                except native.CudaError as error:
                    _LOG.info("p2p: %s of the trainer is not kept mapped: %s", self._device, error)
                    return
                self._mapped[handle] = mapped

    def _unmap(self, handles: Sequence[str]) -> None:
        index = cuda_index(self._device)
        for handle in handles:
            try:
                native.extension.cuda_unmap(self._mapped.pop(handle), index)
            except native.CudaError:  # of an earlier kernel: the device is of no use any more
                _LOG.exception("the trainer's memory was not unmapped")

    def close(self) -> None:
        """Unmap everything. Idempotent."""
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
