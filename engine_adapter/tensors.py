"""What adapters of engines made of named tensors have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from engine_adapter.base import Fingerprint, StepGate
from weightsync.deadline import Deadline
from weightsync.device_tables import CPU, cuda_index, device_of, synchronize
from weightsync.digest import DigestTable, part_of
from weightsync.errors import ConfigError, LayoutError, UnavailableError
from weightsync.layout import NO_REGION, Layout, TensorLayout
from weightsync.session import SessionSpec, Version
from weightsync.tensors import LocalTensors, TensorView, check_writable, local_tensors, view_of
from weightsync.types import PauseMode, RegionAddress, SlotKind
from weightsync.watch import Look, where


class TensorEngine:
    """An :class:`EngineAdapter` over named tensors of this process, behind a :class:`StepGate`.

    ``opaque`` names slots that only ``write`` may fill. Subclasses say what a write does and which
    tensors are fingerprinted.
    """

    def __init__(self, named: Iterable[tuple[str, Any]], opaque: Sequence[str] = ()) -> None:
        self.gate = StepGate()
        self.version: Version | None = None
        self._local = local_tensors(named)
        for name, view in self._local.views.items():
            _check_slot(name, view)
        self._layout = _with_opaque(self._local, opaque)
        self._device = device_of(self._local.addresses, "the engine")
        self._tables: dict[tuple[str, ...], DigestTable] = {}
        self._first = dict(self.fingerprint())
        owners = [view.owner for view in self._local.views.values()]
        self._tensors = owners if all(hasattr(t, "data_ptr") for t in owners) else None
        self._where = None if self._tensors is None else where(self._tensors)

    @contextmanager
    def step(self, limit_s: float = 600.0) -> Iterator[None]:
        """Around every forward pass: no weight changes within. See :meth:`StepGate.step`."""
        with self.gate.step(limit_s):
            yield

    # --- updating -----------------------------------------------------------------------------------

    def layout(self) -> Layout:
        return self._layout

    def addresses(self) -> Sequence[RegionAddress]:
        return self._local.addresses

    def fingerprint(self) -> Mapping[str, Fingerprint]:
        views = self._local.views
        return {name: fingerprint_of(view_of(view.owner, name)) for name, view in views.items()}

    def moved(self, look: Look) -> Sequence[str]:
        """Of the tensors that were given; what holds them is not known here."""
        if look is Look.IDENTITY or self._tensors is None:
            return []
        return [] if where(self._tensors) == self._where else self._moved_by_fingerprint()

    def _moved_by_fingerprint(self) -> Sequence[str]:
        now = dict(self.fingerprint())
        if now == self._first:
            return []
        changed = [n for n, was in self._first.items() if now.get(n) != was]
        return [*changed, *(n for n in now if n not in self._first)]

    def begin_update(self, spec: SessionSpec) -> None:
        return None

    def write(self, name: str, tensor: Any) -> None:
        raise LayoutError(f"{name!r}: this engine has no opaque slots")

    def prepare(self) -> None:
        return None

    def commit(self, version: Version) -> None:
        synchronize(self._device)
        self.version = version

    def abort(self) -> None:
        return None

    def digest(self, names: Sequence[str]) -> Mapping[str, int]:
        key = tuple(names)
        if key not in self._tables:
            forms = {t.name: t.wire_forms[0] for t in self._layout.tensors}
            views = self._local.views
            parts = (part_of(forms[n], views[n]) for n in key)
            self._tables = {key: DigestTable(parts, self._device)}
        synchronize(self._device)  # opaque tensors were written by the engine's own code
        return self._tables[key].compute(num_threads=2)

    # --- running ------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """No step is running or will start, and what steps left on the device is done."""
        self.gate.pause(deadline)
        try:
            synchronize(self._device)
        except BaseException:
            self.gate.resume()
            raise

    def resume(self) -> None:
        self.gate.resume()

    def refuse(self, reason: str | None) -> None:
        self.gate.refuse(reason)

    def flush_cache(self) -> None:
        return None

    def release_memory(self, tags: Sequence[str]) -> int:
        raise UnavailableError(f"this engine cannot give back {', '.join(tags)}: no arenas")

    def resume_memory(self, tags: Sequence[str]) -> int:
        raise UnavailableError(f"this engine never gave back {', '.join(tags)}")


def fingerprint_of(view: TensorView) -> Fingerprint:
    """Where and what a tensor is."""
    return (view.ptr, view.num_bytes, view.dtype, view.shape, view.strides_bytes)


def _check_slot(name: str, view: TensorView) -> None:
    if view.device != CPU:
        try:
            cuda_index(view.device)
        except ConfigError as error:
            raise ConfigError(f"{name!r}: {error}") from error
    check_writable(view, name)


def _with_opaque(local: LocalTensors, opaque: Sequence[str]) -> Layout:
    layout = local.layout
    for name in opaque:
        if name not in layout.index:
            raise LayoutError(f"opaque slot {name!r} is not a tensor; {layout.closest(name)}")

    def entry(tensor: TensorLayout) -> TensorLayout:
        if tensor.name not in opaque:
            return tensor
        placed = tuple(replace(p, region=NO_REGION) for p in tensor.placed)
        return replace(tensor, placed=placed, kind=SlotKind.OPAQUE)

    tensors = tuple(entry(t) for t in layout.tensors)
    return Layout(layout.world_size, tensors, layout.regions, layout.aliases)
