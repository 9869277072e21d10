"""Who holds which slice of which tensor.

A layout speaks checkpoint (Hugging Face) names. For each tensor it lists the *wire forms* that this
side can give or take, and for each rank the boxes it holds: where in which region, with one stride a
dimension. Tied tensors are one entry and any number of aliases. Pure values: no device, no socket.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weightsync.errors import LayoutError, ProtocolError, UnknownNameError
from weightsync.types import Box, RegionKind, SlotKind, TensorMeta, item_bytes

#: The region of an opaque slot: it has no address that a segment copy may write.
NO_REGION = -1


@dataclass(frozen=True, slots=True)
class Region:
    """A range of memory of one rank that placements point into."""

    num_bytes: int
    kind: RegionKind = RegionKind.PERSISTENT
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a tensor in one rank's memory.

    Element ``index`` (of the whole tensor) lies at byte ``offset_bytes + sum((index[d] -
    box.start[d]) * strides_bytes[d])`` of ``region``, stored as ``dtype``. Strides may be 0 or
    negative on a source.
    """

    rank: int
    box: Box
    region: int
    offset_bytes: int
    strides_bytes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor: its wire forms, the most natural first, and where its boxes lie."""

    name: str
    wire_forms: tuple[TensorMeta, ...]
    placed: tuple[PlacedBox, ...]
    kind: SlotKind = SlotKind.AFFINE

    def __post_init__(self) -> None:
        if not self.wire_forms:
            raise LayoutError(f"{self.name!r}: no wire form")
        shape = self.wire_forms[0].shape
        for form in self.wire_forms:
            if (form.name, form.shape) != (self.name, shape):
                raise LayoutError(
                    f"{self.name!r}: wire form {form} differs from {shape} in more than its dtype"
                )
        for p in self.placed:
            fits = len(p.box.start) == len(shape) == len(p.strides_bytes)
            if not fits or any(b > n for b, n in zip(p.box.stop, shape, strict=True)):
                raise LayoutError(f"{self.name!r}: box {p.box} does not fit shape {shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.wire_forms[0].shape


@dataclass(frozen=True)
class Layout:
    """One side's whole layout. ``regions[rank][i]`` is the region that ``PlacedBox.region`` i names."""

    world_size: int
    tensors: tuple[TensorLayout, ...]
    regions: tuple[tuple[Region, ...], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)  # alias -> name of a tensor

    def __post_init__(self) -> None:
        if len(self.regions) != self.world_size:
            raise LayoutError(f"{len(self.regions)} lists of regions for {self.world_size} ranks")
        if len(self.index) != len(self.tensors):
            raise LayoutError("a tensor is listed twice")
        for alias, name in self.aliases.items():
            if name not in self.index or alias in self.index:
                raise LayoutError(f"alias {alias!r} of {name!r} is not an alias of a tensor")
        for tensor in self.tensors:
            for p in tensor.placed:
                self._check_placed(tensor, p)

    def _check_placed(self, tensor: TensorLayout, p: PlacedBox) -> None:
        if not 0 <= p.rank < self.world_size:
            raise LayoutError(f"{tensor.name!r}: rank {p.rank} of {self.world_size}")
        if p.region == NO_REGION and tensor.kind is SlotKind.OPAQUE:
            return
        if not 0 <= p.region < len(self.regions[p.rank]):
            raise LayoutError(f"{tensor.name!r}: no region {p.region} on rank {p.rank}")
        if not p.box.num_elements:
            return
        reach = [(n - 1) * s for n, s in zip(p.box.shape, p.strides_bytes, strict=True)]
        low = p.offset_bytes + sum(r for r in reach if r < 0)
        high = p.offset_bytes + sum(r for r in reach if r > 0) + item_bytes(p.dtype)
        size = self.regions[p.rank][p.region].num_bytes
        if low < 0 or high > size:
            raise LayoutError(
                f"{tensor.name!r}: bytes {low}:{high} lie outside region {p.region} of {size} B"
            )

    @cached_property
    def index(self) -> dict[str, int]:
        """Name of a tensor (not of an alias) -> its place in ``tensors``."""
        return {t.name: i for i, t in enumerate(self.tensors)}

    def canonical(self, name: str) -> str | None:
        """The tensor that ``name`` names, through aliases; None if there is none."""
        found = self.aliases.get(name, name)
        return found if found in self.index else None

    def resolve(self, names: Iterable[str], side: str) -> list[str]:
        """Canonical names of ``names``; an unknown one raises with the closest that exist."""
        found = []
        for name in names:
            canonical = self.canonical(name)
            if canonical is None:
                raise UnknownNameError(
                    f"{name!r} is not a tensor of the {side}; {self.closest(name)}"
                )
            found.append(canonical)
        return found

    def closest(self, name: str) -> str:
        """A hint for people: the names most like ``name``."""
        names = [*self.index, *self.aliases]
        near = difflib.get_close_matches(name, names[:20_000], n=3, cutoff=0.4)
        return f"closest: {', '.join(map(repr, near))}" if near else f"it has {len(names)} names"

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the layout (sha256 of its JSON), without any address."""
        body = json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; :meth:`from_json` is its exact inverse."""
        return {
            "world_size": self.world_size,
            "tensors": [_tensor_to_json(t) for t in self.tensors],
            "regions": [[[r.num_bytes, r.kind.value, r.device] for r in rs] for rs in self.regions],
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_json(cls, value: Any) -> Layout:
        """Parse and check. Raises :class:`ProtocolError` or :class:`LayoutError`."""
        try:
            regions = tuple(
                tuple(Region(int(n), RegionKind(kind), str(device)) for n, kind, device in rs)
                for rs in value["regions"]
            )
            tensors = tuple(_tensor_from_json(t) for t in value["tensors"])
            aliases = {str(k): str(v) for k, v in value["aliases"].items()}
            return cls(int(value["world_size"]), tensors, regions, aliases)
        except LayoutError:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ProtocolError(f"malformed layout: {error!r}") from error


def join_layouts(parts: Sequence[Layout]) -> Layout:
    """One layout from what each rank declares of itself (part i: of rank i, of ``len(parts)``).

    Raises :class:`LayoutError` naming the ranks if they disagree about a tensor or its aliases.
    """
    tensors: dict[str, TensorLayout] = {}
    placed: dict[str, list[PlacedBox]] = {}
    first: dict[str, int] = {}
    aliases: dict[str, str] = {}
    for rank, part in enumerate(parts):
        if part.world_size != len(parts):
            raise LayoutError(
                f"rank {rank} declares a layout of {part.world_size} ranks, there are {len(parts)}"
            )
        for tensor in part.tensors:
            if any(p.rank != rank for p in tensor.placed):
                raise LayoutError(f"{tensor.name!r}: rank {rank} declares boxes of other ranks")
            known = tensors.setdefault(tensor.name, tensor)
            if (known.wire_forms, known.kind) != (tensor.wire_forms, tensor.kind):
                raise LayoutError(
                    f"{tensor.name!r}: ranks {first[tensor.name]} and {rank} disagree about its form: "
                    f"{known.kind} {list(known.wire_forms)} and {tensor.kind} "
                    f"{list(tensor.wire_forms)}"
                )
            first.setdefault(tensor.name, rank)
            placed.setdefault(tensor.name, []).extend(tensor.placed)
        for alias, name in part.aliases.items():
            if aliases.setdefault(alias, name) != name:
                raise LayoutError(
                    f"rank {rank} ties {alias!r} to {name!r}, another one to {aliases[alias]!r}"
                )
    joined = (replace(t, placed=tuple(placed[t.name])) for t in tensors.values())
    regions = tuple(part.regions[rank] for rank, part in enumerate(parts))
    return Layout(len(parts), tuple(joined), regions, aliases)


def _tensor_to_json(tensor: TensorLayout) -> list[Any]:
    placed = [
        [p.rank, p.box.start, p.box.stop, p.region, p.offset_bytes, p.strides_bytes, p.dtype]
        for p in tensor.placed
    ]
    forms = [[w.dtype, w.shape] for w in tensor.wire_forms]
    return [tensor.name, tensor.kind.value, forms, placed]


def _tensor_from_json(value: Any) -> TensorLayout:
    name, kind, forms, placed = value
    name = str(name)
    wire_forms = tuple(TensorMeta(name, str(d), tuple(map(int, s))) for d, s in forms)
    boxes = tuple(
        PlacedBox(
            int(rank),
            Box(tuple(map(int, start)), tuple(map(int, stop))),
            int(region),
            int(offset),
            tuple(map(int, strides)),
            str(dtype),
        )
        for rank, start, stop, region, offset, strides, dtype in placed
    )
    for box in boxes:
        item_bytes(box.dtype)
    return TensorLayout(name, wire_forms, boxes, SlotKind(kind))
