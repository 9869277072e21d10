"""What a p2p source publishes, as it travels: regions and spans in packed rows of integers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from weightsync.device_tables import CPU
from weightsync.errors import ProtocolError
from weightsync.transports.base import Descriptor
from weightsync.transports.link import check_fields
from weightsync.transports.nixl_binding import Span
from weightsync.transports.p2p_cuda import Key, parse_handles
from weightsync.types import PROTOCOL_VERSION, RegionAddress

_DESCRIPTOR_FIELDS: Final = {
    "schema": int, "transport": str, "endpoint": str, "epoch": int, "devices": list,
    "regions": str, "spans": str, "allocations": str, "handles": list, "agent": str,
}  # fmt: skip


def pack(rows: Sequence[Sequence[int]]) -> str:
    """Rows of integers in 32 characters or so each: little-endian int64, base64."""
    return base64.b64encode(np.array(rows, dtype="<i8").tobytes()).decode()


def unpack(text: str, columns: int, what: str) -> list[list[int]]:
    """What :func:`pack` made, checked for shape and sign."""
    raw = unpack_bytes(text, what)
    if len(raw) % (8 * columns):
        raise ProtocolError(f"{what}: {len(raw)} B are no rows of {columns} integers")
    rows = np.frombuffer(raw, dtype="<i8").reshape(-1, columns)
    if (rows < 0).any() or (rows.astype(np.float64).sum(axis=1) >= 2.0**62).any():
        raise ProtocolError(f"{what}: a number is out of range")
    return [[int(n) for n in row] for row in rows]


def unpack_bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"{what}: not base64: {error}") from error


@dataclass(frozen=True, slots=True)
class Published:
    """A parsed descriptor."""

    epoch: int
    regions: tuple[RegionAddress, ...]
    spans: tuple[Span, ...]
    allocations: tuple[int, ...]  # identities, one a span; none on the host
    handles: tuple[str, ...]  # likewise
    metadata: bytes

    @property
    def device(self) -> str:
        """Of the source's spans, by the source's number."""
        return self.spans[0].device if self.spans else CPU

    @property
    def keys(self) -> list[Key]:
        return [Key(i, h) for i, h in zip(self.allocations, self.handles, strict=True)]

    @classmethod
    def parse(cls, descriptor: Descriptor, endpoint: str) -> Published:
        what = "direct descriptor"
        fields = check_fields(descriptor, _DESCRIPTOR_FIELDS, what)
        expected = {"schema": PROTOCOL_VERSION, "transport": "p2p", "endpoint": endpoint}
        for name, value in expected.items():
            if fields[name] != value:
                raise ProtocolError(f"{what}: field {name!r} is {fields[name]!r}, not {value!r}")
        devices = [str(device) for device in fields["devices"]]
        regions = unpack(fields["regions"], 4, f"{what}, 'regions'")
        spans = unpack(fields["spans"], 3, f"{what}, 'spans'")
        if any(row[-1] >= len(devices) for row in (*regions, *spans)):
            raise ProtocolError(f"{what}: a device beyond the {len(devices)} that are listed")
        ids = [row[0] for row in unpack(fields["allocations"], 1, f"{what}, 'allocations'")]
        if len({row[0] for row in regions}) != len(regions):
            raise ProtocolError(f"{what}: a region is listed twice")
        handles = parse_handles(fields["handles"], f"{what}, 'handles'")
        if len(ids) not in (0, len(spans)) or len(handles) != len(ids):
            raise ProtocolError(
                f"{what}: {len(ids)} allocations with {len(handles)} handles for {len(spans)} spans"
            )
        if len({row[-1] for row in spans}) > 1:
            raise ProtocolError(f"{what}: its spans lie on several devices")
        return cls(
            fields["epoch"],
            tuple(RegionAddress(r, ptr, size, devices[d]) for r, ptr, size, d in regions),
            tuple(Span(ptr, size, devices[d]) for ptr, size, d in spans),
            tuple(ids),
            tuple(handles),
            unpack_bytes(fields["agent"], f"{what}, 'agent'"),
        )
