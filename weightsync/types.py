"""Domain words: records and enums that everything else is built from.

No I/O, no torch, no numpy; imports nothing of ours but the errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Final

from weightsync.errors import ConfigError, LayoutError

PROTOCOL_VERSION: Final = 1

#: Offsets within a bucket are multiples of this many bytes: one cache line pair, the natural unit of
#: a GPU memory transaction, and a multiple of every element size.
BUCKET_ALIGNMENT_BYTES: Final = 256

#: Element size in bytes of each dtype, by torch's name (without the ``torch.`` prefix).
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
        "uint16": 2,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "uint32": 4,
        "int32": 4,
        "float32": 4,
        "complex32": 4,
        "uint64": 8,
        "int64": 8,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)


def item_bytes(dtype: str) -> int:
    """Element size in bytes. Raises :class:`LayoutError` for a dtype that is not known."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise LayoutError(f"unknown dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}") from None


class Placement(StrEnum):
    """Where an update lands, and with that what an abort means."""

    STAGED = "staged"  # a second copy, in wire form; commit copies it under a pause
    IN_PLACE = "in_place"  # straight into the engine's slots, paused from the start
    DELTA = "delta"  # changes are decoded aside; commit scatters them, and can take them back


class Contract(StrEnum):
    """How bytes move between two ranks."""

    STREAM = "stream"  # a ring of slots that the source fills and the target empties
    DIRECT = "direct"  # the target reads the source's memory
    STORE = "store"  # versions in a place that both reach, with no live peer


class ContractChoice(StrEnum):
    """What a user may ask for; ``auto`` is resolved once, at plan time, with a reason."""

    AUTO = "auto"
    STREAM = "stream"
    DIRECT = "direct"


class VerifyMode(StrEnum):
    """What the engine digests."""

    READ = "read"  # the bytes as they were read from the wire
    READ_BACK = "read_back"  # the live tensors, after everything landed


class CastPolicy(StrEnum):
    """What may happen to an element on the way."""

    STRICT = "strict"  # bytes only; another dtype is an error
    FP32_TO_BF16 = "fp32_to_bf16"  # fp32 masters are rounded once, to nearest even


class PauseMode(StrEnum):
    """What a pause does to requests in flight."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class Outcome(StrEnum):
    """How a session ended, as far as the one who says it knows."""

    COMMITTED = "committed"
    ABORTED = "aborted"  # the old version is whole and serves
    TAINTED = "tainted"  # the engine refuses to generate until a full update succeeds
    UNKNOWN = "unknown"  # the engine could not be asked; ask again later


class SlotKind(StrEnum):
    """What an engine's slot accepts."""

    AFFINE = "affine"  # wire-form bytes may be placed by a segment copy
    OPAQUE = "opaque"  # lands first, then the adapter's ``write``


class RegionKind(StrEnum):
    """How long an address lives."""

    PERSISTENT = "persistent"  # fixed over refits
    TEMPORARY = "temporary"  # a gathered tensor; may only be streamed


class Convert(Enum):
    """What a segment copy does to each element; the value is the native code."""

    NONE = 0
    FP32_TO_BF16 = 1


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of a tensor: ``start[d] <= index[d] < stop[d]`` for each dimension.

    A 0-dim tensor has the box ``Box((), ())`` with one element.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise LayoutError(f"box with {len(self.start)} starts and {len(self.stop)} stops")
        if any(a < 0 or b < a for a, b in zip(self.start, self.stop, strict=True)):
            raise LayoutError(f"box {self.start}:{self.stop} has a negative start or extent")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it has no element."""
        if len(self.start) != len(other.start):
            raise LayoutError(f"boxes {self} and {other} have different numbers of dimensions")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def subtract(self, other: Box) -> list[Box]:
        """This box without ``other``, as disjoint boxes (at most two a dimension)."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.num_elements else []
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for d, (a, b) in enumerate(zip(common.start, common.stop, strict=True)):
            if start[d] < a:
                rest.append(Box(tuple(start), (*stop[:d], a, *stop[d + 1 :])))
            if b < stop[d]:
                rest.append(Box((*start[:d], b, *start[d + 1 :]), tuple(stop)))
            start[d], stop[d] = a, b
        return rest


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype (torch's word, e.g. ``bfloat16``) and shape of one tensor in wire form."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        if any(n < 0 for n in self.shape):
            raise LayoutError(f"{self.name!r}: negative extent in shape {self.shape}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class RegionAddress:
    """A region bound to memory of this process; never serialised."""

    region: int
    ptr: int
    num_bytes: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether something works here; if not (or slowly), why and what to do."""

    is_usable: bool
    reason: str = ""
    remedy: str = ""
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Two terms of a movement: ``num_ops * op_s + num_bytes / bytes_per_s``."""

    op_s: float
    bytes_per_s: float

    def seconds(self, num_ops: int, num_bytes: int) -> float:
        return num_ops * self.op_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do on this machine, by contract."""

    name: str
    contracts: Mapping[Contract, Availability]
    costs: Mapping[Contract, CostConstants]
    direct_converts: bool = False  # a direct read may apply ``Convert`` on the way
    reads_cuda: bool = False  # a direct read also reaches memory of a CUDA device
    streams_cuda: bool = False  # a ring may lie in memory of a CUDA device
    cuda_converts: bool = False  # like direct_converts, between CUDA devices
    streams_to_many: bool = False  # one ring may serve several targets, each slot sent once
    #: ``costs`` between CUDA devices, where they are known.
    cuda_costs: Mapping[Contract, CostConstants] = field(default_factory=dict)

    @property
    def is_usable(self) -> bool:
        return any(a.is_usable for a in self.contracts.values())


_UNITS: Final = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"1GB"`` (10^9), ``"512MiB"`` (2^20 each) or a plain count; must be positive."""
    if isinstance(text, int) and not isinstance(text, bool):
        value: float = text
    elif not isinstance(text, str):
        raise ConfigError(f"size {text!r} is neither text nor a whole number of bytes")
    else:
        body = text.strip().lower().replace("_", "")
        digits = body.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = body[len(digits) :].strip()
        try:
            value = float(digits) * _UNITS[unit]
        except (KeyError, ValueError):
            known = "B, KB, MB, GB, KiB, MiB, GiB"
            raise ConfigError(
                f"size {text!r} is not a number with one of the units {known}"
            ) from None
    if (isinstance(value, float) and not math.isfinite(value)) or value < 1:
        raise ConfigError(f"size {text!r} must be at least one byte")
    return int(value)


def format_bytes(num_bytes: int) -> str:
    """A count of bytes for people, in decimal units (GB = 10^9)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Disjoint boxes, in order, that cover the row-major element range ``[start, stop)``.

    At most ``2 * len(shape) - 1`` of them. Elements, not bytes.
    """
    if stop <= start:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head, tail = start - first * row, stop - last * row
    rest = tuple(shape[1:])
    if first == last and (head, tail) != (0, row):
        yield from (_under(first, b) for b in range_boxes(rest, head, tail))
        return
    if head:
        yield from (_under(first, b) for b in range_boxes(rest, head, row))
        first += 1
    end = last + 1 if tail == row else last
    if end > first:
        yield Box((first, *(0,) * len(rest)), (end, *rest))
    if tail != row:
        yield from (_under(last, b) for b in range_boxes(rest, 0, tail))


def _under(index: int, box: Box) -> Box:
    return Box((index, *box.start), (index + 1, *box.stop))
