"""CUDA memory for NIXL: what is registered is whole allocations, which is what UCX exports.

An allocation has an identity that no later one at the same address has: freed memory that was
allocated anew is registered anew, and its readers learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from weightsync import native
from weightsync.device_tables import cuda_errors, cuda_index
from weightsync.errors import UnavailableError
from weightsync.transports.nixl_binding import Span
from weightsync.types import RegionAddress

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


def check_exportable(allocations: Sequence[Allocation]) -> None:
    """Raise :class:`UnavailableError` for memory that UCX can only send through the host."""
    for allocation in allocations:
        if not allocation.is_exportable:
            span = allocation.span
            raise UnavailableError(_NOT_EXPORTABLE.format(device=span.device, ptr=span.ptr))
