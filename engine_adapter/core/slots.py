"""Weight slots: every parameter at a fixed address, spoken of in checkpoint names and boxes.

A slot is what one rank holds of one checkpoint tensor: boxes, each a view into a storage. *Affine*
slots hold wire-form bytes, so that a segment copy may place them; an *opaque* one is filled by its
codec. Tensors that a forward pass can reach and that are no slot are registered: *derived* ones with
their sources, refreshed once an update, and *constants*. :meth:`SlotTable.seal` finds any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from engine_adapter.base import Fingerprint
from engine_adapter.core.reach import Held, reachable_tensors
from engine_adapter.core.weights import StorageSpec
from weightsync.errors import ConfigError, LayoutError, ShapeMismatchError
from weightsync.layout import NO_REGION, Layout, PlacedBox, Region, TensorLayout
from weightsync.tensors import view_of
from weightsync.types import Box, RegionAddress, SlotKind, TensorMeta
from weightsync.watch import Look


class SlotCodec(Protocol):
    """How an opaque slot is kept: ``load`` gives back exactly what ``store`` was given."""

    def store(self, tensor: Tensor) -> None:
        """Take the wire-form tensor (whole, valid during the call) into fixed memory."""
        ...

    def load(self) -> Tensor:
        """The wire-form tensor."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedView:
    """A box of a checkpoint tensor and the storage's view of it, of the box's shape."""

    box: Box
    view: Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """What this rank holds of one checkpoint tensor of ``shape``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placed: tuple[PlacedView, ...]
    codec: SlotCodec | None = None

    @property
    def kind(self) -> SlotKind:
        return SlotKind.AFFINE if self.codec is None else SlotKind.OPAQUE

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.name, str(self.dtype).removeprefix("torch."), self.shape)

    def write(self, tensor: Tensor) -> None:
        """Load this rank's boxes from the whole checkpoint tensor, casting to the slot's dtype.

        Raises :class:`ShapeMismatchError`.
        """
        if tuple(tensor.shape) != self.shape:
            raise ShapeMismatchError(
                f"{self.name!r}: got shape {tuple(tensor.shape)}, the model has {self.shape}"
            )
        if self.codec is not None:
            self.codec.store(tensor)
            return
        for placed in self.placed:
            placed.view.copy_(_cut(tensor, placed.box))

    def read(self) -> list[PlacedView]:
        """Exactly what was written, as boxes; affine boxes are the live memory, not copies."""
        if self.codec is not None:
            return [PlacedView(Box.whole(self.shape), self.codec.load())]
        return list(self.placed)

    def read_whole(self) -> Tensor:
        """The whole tensor. Raises :class:`LayoutError` on a rank that holds only a part."""
        (first, *rest) = self.read()
        if rest or first.box != Box.whole(self.shape):
            raise LayoutError(f"{self.name!r}: this rank holds only a part of it")
        return first.view


def _cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor computed from slots: ``refresh`` writes into ``tensor``, never replaces it."""

    name: str
    tensor: Tensor
    sources: tuple[str, ...]
    refresh: Callable[[], None]


class SlotTable:
    """Every tensor of one rank that a forward pass may touch."""

    def __init__(
        self,
        storages: Mapping[str, Tensor],
        specs: Sequence[StorageSpec],
        aliases: Mapping[str, str],
    ) -> None:
        self.storages: Mapping[str, Tensor] = MappingProxyType(dict(storages))
        self.aliases: Mapping[str, str] = MappingProxyType(dict(aliases))
        self.slots: Mapping[str, Slot] = MappingProxyType(_slots(storages, specs))
        self._constants: dict[str, Tensor] = {}
        self._derived: dict[str, Derived] = {}
        self._root: Any = None
        self._held: list[tuple[Held, int]] = []  # when sealed: tensors and their addresses
        self._sealed: dict[str, Fingerprint] | None = None

    # --- registration, before seal ------------------------------------------------------------------

    def add_constant(self, name: str, tensor: Tensor) -> None:
        """A tensor that no update changes, e.g. a table made from the configuration."""
        self._check_open(name)
        self._constants[name] = tensor

    def add_derived(
        self, name: str, tensor: Tensor, sources: Iterable[str], refresh: Callable[[], None]
    ) -> None:
        """A tensor that follows from the slots ``sources``; computed now and once an update."""
        self._check_open(name)
        found = tuple(self.slot(source).name for source in sources)
        if not found:
            raise ConfigError(f"derived tensor {name!r} has no source; it would be a constant")
        self._derived[name] = Derived(name, tensor, found, refresh)
        refresh()

    def make_opaque(self, name: str, codec: SlotCodec) -> None:
        """Keep a slot through ``codec``; its former memory is no longer spoken of."""
        self._check_open(name)
        slot = self.slot(name)
        changed = dict(self.slots)
        changed[slot.name] = replace(slot, placed=(), codec=codec)
        self.slots = MappingProxyType(changed)

    def _check_open(self, name: str) -> None:
        if self._sealed is not None:
            raise ConfigError(f"{name!r} comes too late: the slots are sealed")
        if name in self._constants or name in self._derived:
            raise ConfigError(f"{name!r} is registered already")

    # --- sealing ------------------------------------------------------------------------------------

    @property
    def is_sealed(self) -> bool:
        return self._sealed is not None

    def seal(self, root: Any) -> None:
        """From now on nothing moves. Raises :class:`LayoutError` naming any tensor that can be
        reached from ``root`` and lies in no registered memory."""
        known = self._spans()
        stray = []
        held = list(reachable_tensors(root, skip=(SlotTable,)))
        for path, tensor, *_ in held:
            ptr = tensor.untyped_storage().data_ptr()
            if tensor.numel() and not any(a <= ptr < b for a, b in known):
                stray.append(f"{path} {tuple(tensor.shape)}")
        if stray:
            raise LayoutError(
                f"{len(stray)} tensors can be reached and are registered nowhere: "
                f"{', '.join(stray[:5])}; an update could leave them stale: add_derived or "
                "add_constant them"
            )
        self._root = root
        self._held = [(h, h.value.data_ptr()) for h in held]
        self._sealed = self.fingerprint()

    def _spans(self) -> set[tuple[int, int]]:
        derived = [d.tensor for d in self._derived.values()]
        tensors = [*self.storages.values(), *self._constants.values(), *derived]
        storages = [t.untyped_storage() for t in tensors]
        return {(s.data_ptr(), s.data_ptr() + max(1, s.nbytes())) for s in storages}

    def fingerprint(self) -> dict[str, Fingerprint]:
        """Of what the sealed model holds *now*, by the path to it, and of registered tensors."""
        reached = reachable_tensors(self._root, skip=(SlotTable,))
        found = {held.path: _fingerprint(held.value) for held in reached}
        derived = [(d.name, d.tensor) for d in self._derived.values()]
        registered = [*self.storages.items(), *self._constants.items(), *derived]
        return found | {f"slots:{name}": _fingerprint(t) for name, t in registered}

    def moved(self, look: Look) -> list[str]:
        """Paths of tensors that are not what or where they were when sealed.

        ``Look.IDENTITY`` sees tensors that were replaced or moved, some microseconds for a hundred;
        an object between the root and a tensor that was replaced only shows to ``EVERYTHING``.
        """
        if self._sealed is None:
            raise ConfigError("the slots are not sealed")
        if look is Look.IDENTITY:
            return [
                held.path
                for held, ptr in self._held
                if not held.is_still_held() or held.value.data_ptr() != ptr
            ]
        now = self.fingerprint()
        names = now.keys() | self._sealed.keys()
        return sorted(n for n in names if now.get(n) != self._sealed.get(n))

    # --- access by checkpoint name ------------------------------------------------------------------

    def slot(self, name: str) -> Slot:
        """By name or alias. Raises :class:`LayoutError` with the closest names."""
        found = self.slots.get(self.aliases.get(name, name))
        if found is None:
            raise LayoutError(
                f"{name!r} is not a tensor of the model; {self.layout().closest(name)}"
            )
        return found

    def write(self, name: str, tensor: Tensor) -> None:
        """See :meth:`Slot.write`. Derived tensors are refreshed by :meth:`refresh`, not here."""
        self.slot(name).write(tensor)

    def refresh(self, names: Collection[str] | None = None) -> list[str]:
        """Recompute the derived tensors that follow from ``names`` (None: all); returns which."""
        changed = None if names is None else {self.aliases.get(n, n) for n in names}
        due = [
            d for d in self._derived.values() if changed is None or changed.intersection(d.sources)
        ]
        for derived in due:
            derived.refresh()
        return [d.name for d in due]

    # --- what the transport library sees --------------------------------------------------------------

    def layout(self, rank: int = 0, world_size: int = 1) -> Layout:
        """This rank's boxes alone, as part of an engine of ``world_size`` ranks."""
        regions, tensors = self._regions(), []
        for slot in self.slots.values():
            boxes = tuple(_placed_box(slot, p, rank, regions) for p in slot.placed)
            if slot.codec is not None:
                dense = (0,) * len(slot.shape)
                whole = Box.whole(slot.shape)
                boxes = (PlacedBox(rank, whole, NO_REGION, 0, dense, slot.meta.dtype),)
            tensors.append(TensorLayout(slot.name, (slot.meta,), boxes, slot.kind))
        own = tuple(Region(a.num_bytes, device=a.device) for a in regions.values())
        listed = tuple(own if r == rank else () for r in range(world_size))
        return Layout(world_size, tuple(tensors), listed, dict(self.aliases))

    def addresses(self) -> list[RegionAddress]:
        """Where this rank's regions lie; one region an allocation."""
        return list(self._regions().values())

    def _regions(self) -> dict[int, RegionAddress]:
        found: dict[int, RegionAddress] = {}
        for slot in self.slots.values():
            for placed in slot.placed:
                storage = placed.view.untyped_storage()
                ptr = storage.data_ptr()
                if placed.view.numel() and ptr not in found:
                    device = str(placed.view.device)
                    found[ptr] = RegionAddress(len(found), ptr, storage.nbytes(), device)
        return found


def _slots(storages: Mapping[str, Tensor], specs: Sequence[StorageSpec]) -> dict[str, Slot]:
    placed: dict[str, list[PlacedView]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for spec in specs:
        storage = storages[spec.name]
        for part in spec.parts:
            lead = len(part.start) - len(part.box.shape)
            view = storage[part.start[:lead]]
            for d, (start, extent) in enumerate(
                zip(part.start[lead:], part.box.shape, strict=True)
            ):
                view = view.narrow(d, start, extent)
            placed.setdefault(part.name, []).append(PlacedView(part.box, view))
            shapes[part.name], dtypes[part.name] = part.shape, storage.dtype
    return {n: Slot(n, shapes[n], dtypes[n], tuple(placed[n])) for n in placed}


def _placed_box(
    slot: Slot, placed: PlacedView, rank: int, regions: Mapping[int, RegionAddress]
) -> PlacedBox:
    view = view_of(placed.view, slot.name)
    region = regions.get(view.storage_ptr)
    offset = view.ptr - view.storage_ptr if region is not None else 0
    index = 0 if region is None else region.region
    return PlacedBox(rank, placed.box, index, offset, view.strides_bytes, view.dtype)


def _fingerprint(tensor: Tensor) -> Fingerprint:
    item = tensor.element_size()
    return (
        tensor.data_ptr(),
        tensor.numel() * item,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tuple(stride * item for stride in tensor.stride()),
    )
