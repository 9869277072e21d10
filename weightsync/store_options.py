"""How a trainer publishes to a store, and what it is told of a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from weightsync.errors import (
    ConfigError,
)
from weightsync.store.cutting import Cuts
from weightsync.types import CastPolicy


class SnapshotPlace(Enum):
    """Where weights are compared with the last version."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True)
class StoreOptions:
    """Counts are versions, 0: never. Times are seconds.

    ``fold_every`` and ``anchor_every``: one delta in place of so many, and the version in full beside
    its delta. ``keep``: forget what neither the newest so many versions nor a reader's lease needs.
    ``cast``: fp32 weights are stored as bf16, rounded to nearest even, or as they are.
    ``cut``: code tensors in pieces, by rules (:class:`weightsync.store.Cut`) or by the layout of an
    engine, so that ranks which hold parts of tensors can take deltas. Pieces that are not rows of their
    tensor are copied (their size) while it is sent.
    ``snapshot``: where the last version is kept (the size of the weights), and weights of a GPU compared
    with it. On the host they are copied there first; on the device only what is published leaves it.
    ``commit_timeout_s``: how long the next ``send``, and ``close``, wait for the version under way.
    """

    fold_every: int = 8
    anchor_every: int = 64
    keep: int = 0
    grace_s: float = 3600.0
    cast: CastPolicy = CastPolicy.STRICT
    snapshot: SnapshotPlace = SnapshotPlace.HOST
    cut: Cuts | None = None
    commit_timeout_s: float = 600.0
    num_threads: int = 0  # 0: $WEIGHTSYNC_NUM_THREADS, or the CPUs of this process
    file_bytes: int = 1 << 30
    extra_files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cast", CastPolicy(self.cast))
        object.__setattr__(self, "snapshot", SnapshotPlace(self.snapshot))
        for name in ("fold_every", "anchor_every", "keep", "num_threads"):
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                raise ConfigError(f"{name}={count!r}: it must be a count of at least 0")
        if not self.commit_timeout_s > 0 or self.grace_s < 0 or self.file_bytes < 1:
            raise ConfigError(f"limits and sizes must be positive: {self}")


def publisher_options(options: StoreOptions, num_threads: int) -> dict[str, Any]:
    """What a :class:`Publisher` is made with."""
    return {
        "file_bytes": options.file_bytes,
        "extra_files": options.extra_files,
        "num_threads": num_threads,
        "is_mirrored": options.snapshot is SnapshotPlace.DEVICE,
    }


@dataclass(frozen=True)
class PublishReport:
    """One version. ``waited_s``: for the version before; ``encode_s``: while ``send`` kept the weights;
    ``publish_s``: behind the next step, until it was visible. ``on_host``: spans that the host coded
    because the device could not, by reason. ``phases``: seconds of the parts of both (``collect``,
    ``copy`` or ``code``, ``write``, ``manifest``; ``code_*`` is part of ``code``)."""

    version: int
    run_id: str
    kind: str
    root: str
    payload_bytes: int
    total_bytes: int
    num_changed: int
    waited_s: float
    encode_s: float
    publish_s: float
    dropped: Mapping[str, str] = field(default_factory=dict)
    on_host: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def bits_per_changed_element(self) -> float | None:
        """Of a delta with changes."""
        return 8 * self.payload_bytes / self.num_changed if self.num_changed else None

    def __str__(self) -> str:
        bits = self.bits_per_changed_element
        changed = "" if bits is None else f", {self.num_changed:,} changed at {bits:.2f} bits each"
        return (
            f"version {self.version}: {self.kind}, {self.payload_bytes:,} B of {self.total_bytes:,}"
            f"{changed}; encoded in {self.encode_s:.3f} s, published in {self.publish_s:.3f} s"
        )


__all__ = ["PublishReport", "SnapshotPlace", "StoreOptions", "publisher_options"]
