"""Allocations of a CUDA device as they travel to another process: found, described, and read again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from weightsync import native
from weightsync.errors import ProtocolError, TransportError, UnavailableError
from weightsync.transports.link import check_fields
from weightsync.types import RegionAddress

_DEVICE_FIELDS: Final = {"uuid": str, "allocations": list}
_ALLOCATION_FIELDS: Final = {"ptr": int, "num_bytes": int, "id": str, "handle": str}
_PIECED_FIELDS: Final = {"ptr": int, "num_bytes": int, "pieces": list}
_HANDLE_BYTES: Final = 64
_UUID_BYTES: Final = 16

_NOT_SHAREABLE: Final = (
    "{device}: the memory at {ptr:#x} cannot be opened by another process: it was made by virtual memory "
    "management without a shareable handle type, as some memory savers and sleep modes make it. Send "
    "clones from torch's own allocator, or ask that allocator for handles of type POSIX_FILE_DESCRIPTOR "
    "(torch does so by itself with 'expandable_segments:True' in PYTORCH_CUDA_ALLOC_CONF)"
)
_NOT_MAPPED: Final = (
    "region {region} of what the trainer publishes lies at {ptr:#x} on {device}, where no memory is mapped "
    "now ({error}): it was freed, or released (memory saver, sleep mode) and not resumed. Resume it before "
    "the update, or send the tensors that hold the weights now"
)


class Sharing(IntEnum):
    """How memory can be opened by another process; as the extension numbers it."""

    NONE = 0
    HANDLE = 1
    FD = 2


@dataclass(frozen=True, slots=True)
class Found:
    """An allocation of this process, or a mapped piece of one."""

    ptr: int
    num_bytes: int
    id: int
    sharing: Sharing

    @property
    def stop(self) -> int:
        return self.ptr + self.num_bytes


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the trainer; ``id`` and ``handle`` are hexadecimal.

    One without a handle is made of ``pieces`` (id, num_bytes) that lie side by side.
    """

    ptr: int
    num_bytes: int
    id: str = ""
    handle: str = ""
    pieces: tuple[tuple[str, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        where = {"ptr": self.ptr, "num_bytes": self.num_bytes}
        if self.pieces:
            return {**where, "pieces": [list(piece) for piece in self.pieces]}
        return {**where, "id": self.id, "handle": self.handle}


def parse_device(value: object) -> tuple[str, tuple[Allocation, ...]]:
    """UUID and allocations of a descriptor. Raises :class:`ProtocolError` naming the field."""
    what = "direct descriptor, 'device'"
    fields = check_fields(value, _DEVICE_FIELDS, what)
    _check_hex(fields["uuid"], _UUID_BYTES, what, "uuid")
    found = [_parse_allocation(entry, what) for entry in fields["allocations"]]
    found.sort(key=lambda a: a.ptr)
    for a, b in itertools.pairwise(found):
        if a.ptr + a.num_bytes > b.ptr:
            raise ProtocolError(f"{what}: two allocations overlap at {b.ptr:#x}")
    return fields["uuid"], tuple(found)


def _parse_allocation(entry: object, what: str) -> Allocation:
    is_pieced = isinstance(entry, Mapping) and "pieces" in entry
    row = check_fields(
        entry, _PIECED_FIELDS if is_pieced else _ALLOCATION_FIELDS, f"{what}, 'allocations'"
    )
    if not row["num_bytes"] or row["ptr"] + row["num_bytes"] >= 2**63:
        raise ProtocolError(f"{what}: field 'num_bytes' of an allocation is out of range")
    if not is_pieced:
        _check_hex(row["handle"], _HANDLE_BYTES, what, "handle")
        return Allocation(row["ptr"], row["num_bytes"], row["id"], row["handle"])
    pieces = []
    for piece in row["pieces"]:
        if not (isinstance(piece, list) and [type(p) for p in piece] == [str, int]):
            raise ProtocolError(f"{what}: field 'pieces' holds {str(piece)[:80]!r}")
        pieces.append((piece[0], piece[1]))
    sizes = [size for _, size in pieces]
    if not sizes or min(sizes) <= 0 or sum(sizes) != row["num_bytes"]:
        raise ProtocolError(f"{what}: the sizes in field 'pieces' are not those of 'num_bytes'")
    return Allocation(row["ptr"], row["num_bytes"], pieces=tuple(pieces))


def _check_hex(text: str, num_bytes: int, what: str, name: str) -> None:
    try:
        is_right = len(bytes.fromhex(text)) == num_bytes
    except ValueError:
        is_right = False
    if not is_right:
        raise ProtocolError(f"{what}: field {name!r} must be {num_bytes} bytes in hexadecimal")


def find_allocations(
    regions: Sequence[RegionAddress], look_up: Callable[[int], tuple[int, int, int, int]]
) -> list[Found]:
    """The allocations and pieces that hold the regions, each once, by rising address.

    ``look_up`` tells of an address: ptr, num_bytes, id, and how it can be shared.
    """
    found: list[Found] = []
    for region in sorted(regions, key=lambda r: r.ptr):
        if not region.num_bytes:
            continue
        if not found or region.ptr >= found[-1].stop:
            found.append(_find(region, region.ptr, look_up))
        while region.ptr + region.num_bytes > found[-1].stop:
            if found[-1].sharing is not Sharing.FD:
                raise UnavailableError(
                    f"region {region.region} on {region.device} reaches over the end of its "
                    f"allocation at {found[-1].ptr:#x}"
                )
            found.append(_find(region, found[-1].stop, look_up))
    return found


def _find(
    region: RegionAddress, ptr: int, look_up: Callable[[int], tuple[int, int, int, int]]
) -> Found:
    try:
        start, num_bytes, identity, sharing = look_up(ptr)
    except native.CudaError as error:
        raise TransportError(
            _NOT_MAPPED.format(region=region.region, ptr=ptr, device=region.device, error=error)
        ) from error
    found = Found(start, num_bytes, identity, Sharing(sharing))
    if found.sharing is Sharing.NONE:
        raise UnavailableError(_NOT_SHAREABLE.format(device=region.device, ptr=ptr))
    return found


def as_allocations(found: Sequence[Found], export: Callable[[int], bytes]) -> list[Allocation]:
    """What travels: handles of allocations, and neighbouring pieces as one."""
    made: list[Allocation] = []
    pieces: list[Found] = []
    for item, following in itertools.zip_longest(found, found[1:]):
        if item.sharing is Sharing.HANDLE:
            handle = export(item.ptr).hex()
            made.append(Allocation(item.ptr, item.num_bytes, f"{item.id:x}", handle))
            continue
        pieces.append(item)
        is_last = following is None or following.sharing is not Sharing.FD
        if is_last or following.ptr != item.stop:
            ids = tuple((f"{p.id:x}", p.num_bytes) for p in pieces)
            made.append(Allocation(pieces[0].ptr, item.stop - pieces[0].ptr, pieces=ids))
            pieces = []
    return made
