"""What a rank of an engine knows of the session that is open, and of what it keeps for placements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weightsync.binding import Spot
from weightsync.coverage import Coverage, PlanShare
from weightsync.device_tables import Memory
from weightsync.manifest import Digests, Manifest
from weightsync.session import SessionSpec, Version
from weightsync.types import Placement, RegionAddress, VerifyMode


@dataclass(frozen=True)
class ReceiverHooks:
    """Called on whichever thread runs the job; each may wait until the engine's loop is ready.

    Raising in ``on_begin`` or ``on_prepare`` aborts the update. ``on_commit`` runs after the decision,
    before the engine parks: raising there taints the engine. What ``on_abort`` raises is logged.
    """

    on_begin: Callable[[SessionSpec], None] = lambda spec: None
    on_prepare: Callable[[SessionSpec], None] = lambda spec: None
    on_commit: Callable[[SessionSpec], None] = lambda spec: None
    on_abort: Callable[[SessionSpec], None] = lambda spec: None


@dataclass
class SessionStats:
    """Where the time of a session went on this rank (seconds), for reports and benchmarks."""

    phases: dict[str, float] = field(default_factory=dict)
    buckets: list[tuple[int, int, float]] = field(default_factory=list)  # bytes, entries, seconds
    num_bytes: int = 0
    num_changed: int = 0  # elements that a delta changed
    pause_s: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start_s)

    def add(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds


Landing = dict[tuple[int, int], Spot]


@dataclass(frozen=True)
class Staging:
    """What a placement needs, made once."""

    memory: Memory | None
    landing: Landing
    regions: tuple[RegionAddress, ...]  # where reads land, under numbers of their own


@dataclass
class OpenSession:
    """The open session of this rank."""

    spec: SessionSpec
    staging: Staging
    pin: object | None  # keeps the staging copy mapped while a job may use it
    coverage: Coverage
    fetched: Any = None  # what was taken from a store instead of from a trainer
    delta: Any = None  # what of it must be written, or taken back
    moves: list[PlanShare] = field(default_factory=list)  # that ended, in order
    read_digests: list[Digests | None] = field(default_factory=list)  # of each, taken while reading
    early: Any = None  # digests of what landed that were begun before prepare
    awaited: list[PlanShare] = field(
        default_factory=list
    )  # all moves, once nothing can follow them
    #: What a manifest was read from while bytes moved, and it.
    manifest_ahead: tuple[Any, Manifest | None] = (None, None)
    manifest: Manifest | None = None
    paused_s: float | None = None  # when the pause began
    touched: bool = False
    is_labelled: bool = False  # the adapter was told to take the new version's label
    former_version: Version | None = None
    stats: SessionStats = field(default_factory=SessionStats)

    @property
    def is_in_place(self) -> bool:
        return self.spec.placement is Placement.IN_PLACE

    @property
    def is_read_back(self) -> bool:
        return self.spec.verify is VerifyMode.READ_BACK

    def touch(self) -> None:
        """In place: from here on an abort leaves live weights that nobody sent whole."""
        if self.is_in_place:
            self.touched = True
