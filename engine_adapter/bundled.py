"""The bundled inference core behind the adapter contract: refits land in its slots while it serves.

The receiver's thread changes weights only while the engine stands at a step boundary; between
``pause`` and ``resume`` no step runs. Requests in flight stay, or go, as the pause mode says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from engine_adapter.base import Fingerprint, StepGate
from engine_adapter.core.arena import MemoryTag
from engine_adapter.core.engine import Engine
from engine_adapter.core.slots import PlacedView, Slot
from weightsync.deadline import Deadline
from weightsync.device_tables import device_of, synchronize
from weightsync.digest import DigestPart, DigestTable
from weightsync.layout import Layout
from weightsync.session import SessionSpec, Version
from weightsync.tensors import view_of
from weightsync.types import PauseMode, RegionAddress, SlotKind
from weightsync.watch import Look

_DIGEST_THREADS = 2


class BundledAdapter:
    """One rank of the bundled core as an :class:`EngineAdapter`. Seals the model's slots.

    A pause of the user's own is left as it is: an update neither needs nor ends it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.gate = StepGate()
        self._slots, self._memory = engine.model.slots, engine.memory
        if not self._slots.is_sealed:
            self._slots.add_constant("kv_cache.keys", engine.cache.keys)
            self._slots.add_constant("kv_cache.values", engine.cache.values)
            self._slots.seal((engine.model, engine.cache))
        shards = engine.model.shards
        self._layout = self._slots.layout(shards.rank, shards.world_size)
        self._addresses = self._slots.addresses()
        self._device = device_of(self._addresses, "the engine")
        self._scope: frozenset[str] | None = None
        self._digests: dict[tuple[str, ...], DigestTable] = {}

    def step(self, limit_s: float = 600.0) -> AbstractContextManager[None]:
        """Around whatever reads weights outside the engine's own steps. See
        :meth:`StepGate.step`."""
        return self.gate.step(limit_s)

    @property
    def version(self) -> Version | None:
        return self.engine.version

    # --- updating -----------------------------------------------------------------------------------

    def layout(self) -> Layout:
        return self._layout

    def addresses(self) -> Sequence[RegionAddress]:
        return self._addresses

    def fingerprint(self) -> Mapping[str, Fingerprint]:
        """Of every tensor that the model can reach now, by the path to it."""
        return self._slots.fingerprint()

    def moved(self, look: Look) -> Sequence[str]:
        """See :meth:`SlotTable.moved`."""
        return self._slots.moved(look)

    def begin_update(self, spec: SessionSpec) -> None:
        """Raises :class:`ReleasedError` if the weights' memory is gone, or empty and not all of them
        are sent."""
        self._memory.require_there(MemoryTag.WEIGHTS, "an update")
        if spec.scope.names is not None:
            self._memory.require_filled("an update of some weights", [MemoryTag.WEIGHTS])
        self._scope = spec.scope.names

    def write(self, name: str, tensor: Any) -> None:
        found = tensor if isinstance(tensor, torch.Tensor) else torch.from_numpy(tensor)
        self._slots.write(name, found)

    def prepare(self) -> None:
        return None

    def commit(self, version: Version) -> None:
        """Refresh what follows from the weights in scope, and label what is computed from now on."""
        synchronize(self._device)
        self._slots.refresh(self._scope)
        if self._scope is None:
            self._memory.fill(MemoryTag.WEIGHTS)
        self._scope = None
        self.engine.while_held(lambda: self.engine.set_version(version))

    def abort(self) -> None:
        self._scope = None

    def digest(self, names: Sequence[str]) -> Mapping[str, int]:
        """Of what this rank holds, in wire form; the digests of all ranks add up modulo 2^64."""
        synchronize(self._device)
        slots = [self._slots.slot(name) for name in names]
        if any(slot.kind is SlotKind.OPAQUE for slot in slots):
            kept = [(slot, placed) for slot in slots for placed in slot.read()]
            parts = (_part(slot, placed) for slot, placed in kept)
            return DigestTable(parts, self._device).compute(_DIGEST_THREADS)
        key = tuple(slot.name for slot in slots)
        if key not in self._digests:  # one is kept: its addresses never change
            self._digests = {key: DigestTable(_live_parts(slots), self._device)}
        return self._digests[key].compute(_DIGEST_THREADS)

    # --- running ------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """No step is running or will start; requests in flight go as ``mode`` says."""
        self.gate.pause(deadline)
        try:
            self.engine.hold(mode, deadline)
            synchronize(self._device)
        except BaseException:
            self.resume()
            raise

    def resume(self) -> None:
        self.engine.release()
        self.gate.resume()

    def refuse(self, reason: str | None) -> None:
        """Requests fail by name with the reason, new ones are refused."""
        self.gate.refuse(reason)
        self.engine.refuse(reason)

    def flush_cache(self) -> None:
        self.engine.while_held(self.engine.flush_cache)

    def release_memory(self, tags: Sequence[str]) -> int:
        """See :meth:`Engine.release_memory`."""
        return self.engine.release_memory(tags)

    def resume_memory(self, tags: Sequence[str]) -> int:
        """See :meth:`Engine.resume_memory`."""
        return self.engine.resume_memory(tags)


def _live_parts(slots: Sequence[Slot]) -> Iterator[DigestPart]:
    for slot in slots:
        for placed in slot.placed:
            yield _part(slot, placed)


def _part(slot: Slot, placed: PlacedView) -> DigestPart:
    view = view_of(placed.view, slot.name)
    return DigestPart(slot.meta, placed.box, view.ptr, view.strides_bytes, view.dtype)
