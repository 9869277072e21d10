"""What an engine must offer, in two protocols.

*Updating* is about weights, *running* about generation. The receiver makes one call at a time, each from
any of its threads (or all from the engine's loop, with ``Receiver.poll``), and touches slots only
between ``pause`` and ``resume``. What belongs to a thread, such as a lock that only its owner may
release, cannot be held from one call to another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from weightsync.deadline import Deadline
from weightsync.layout import Layout
from weightsync.session import SessionSpec, Version
from weightsync.types import PauseMode, RegionAddress
from weightsync.watch import Look

#: What must never change over an update: pointer, bytes, dtype, shape and strides of a tensor.
Fingerprint = tuple[int, int, str, tuple[int, ...], tuple[int, ...]]


@runtime_checkable
class UpdatingEngine(Protocol):
    """The weights of one rank of an engine."""

    def layout(self) -> Layout:
        """Slots in checkpoint names. Constant over the adapter's life."""
        ...

    def addresses(self) -> Sequence[RegionAddress]:
        """Where the layout's regions lie. Constant over the adapter's life."""
        ...

    def fingerprint(self) -> Mapping[str, Fingerprint]:
        """Of everything that an update may touch, as it is now."""
        ...

    def moved(self, look: Look) -> Sequence[str]:
        """Names whose fingerprint is not what it was when the adapter was made.

        Asked several times an update: an engine of many tensors answers ``Look.IDENTITY`` in well
        under a millisecond, and may leave to ``Look.EVERYTHING`` what that cannot see. Called from
        another thread than the rest while a copy runs.
        """
        ...

    def begin_update(self, spec: SessionSpec) -> None:
        """An update opens. In place, the engine is paused: restore what must be restored."""
        ...

    def write(self, name: str, tensor: Any) -> None:
        """Load one opaque tensor (wire form, NumPy or torch) into its slot; paused.

        The tensor is only valid during the call.
        """
        ...

    def prepare(self) -> None:
        """The bytes are there and verified: do now whatever can fail. Raising aborts the update."""
        ...

    def commit(self, version: Version) -> None:
        """The bytes are in the slots; paused. Refresh derived tensors, take the version's label."""
        ...

    def abort(self) -> None:
        """The update is given up; what ``begin_update`` and ``prepare`` did is undone."""
        ...

    def digest(self, names: Sequence[str]) -> Mapping[str, int]:
        """Digests of live tensors in wire form, read back from the slots."""
        ...


@runtime_checkable
class RunningEngine(Protocol):
    """The generating side of one rank of an engine."""

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Return once the engine stands at a step boundary and will not read a weight.

        Raises :class:`DeadlineError`; the engine then runs on.
        """
        ...

    def resume(self) -> None:
        """Leave the pause. Resuming an engine that runs is harmless."""
        ...

    def refuse(self, reason: str | None) -> None:
        """Refuse to generate with :class:`TaintedError` saying ``reason``; None lifts it.

        Callable from any thread at any time; takes effect at the next step.
        """
        ...

    def flush_cache(self) -> None:
        """Drop what was computed from the old weights (prefix and KV cache)."""
        ...

    def release_memory(self, tags: Sequence[str]) -> int:
        """Give memory back; returns bytes. Raises :class:`UnavailableError` if it cannot."""
        ...

    def resume_memory(self, tags: Sequence[str]) -> int:
        """Take memory again, at the same addresses; returns bytes."""
        ...


@runtime_checkable
class EngineAdapter(UpdatingEngine, RunningEngine, Protocol):
    """Both sides; what a :class:`weightsync.Receiver` takes."""
