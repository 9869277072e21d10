"""What a publisher keeps of the version that it published last, and a version that it has coded on that."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from weightsync.codec import apply_changes, block_digests, decode_record, tensor_digest
from weightsync.codec.spans import Bytes, Digests, span_bytes, span_digests
from weightsync.errors import VersionError
from weightsync.native_delta import Place
from weightsync.store.mirror import Mirror, Records
from weightsync.store.version import Identity
from weightsync.store.weights import AnyWeights, DeviceWeight, Weight, Weights


@dataclass(eq=False)
class Encoded:
    """A version that is not published yet; the weights it was made of may change.

    ``records`` are those of a delta on ``base``; None: a full version, whose bytes are the
    publisher's snapshot by now. ``on_host``: spans that the host coded because the device could not,
    by reason. ``payload``: what records of a device lie in. ``phases``: seconds of each part of it.
    """

    version: int
    base: Identity | None
    records: Records | None
    digests: dict[str, Digests]
    shares: dict[str, int]
    on_host: Mapping[str, int] = field(default_factory=dict)
    payload: list[Bytes] | None = None
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of the records."""
        return sum(len(r) for rs in (self.records or {}).values() for _, r in rs)


@dataclass(eq=False)
class Snapshot:
    """Copies of weights in this process's memory, or on the device that trains, which ``mirror`` has then;
    ``identity`` is the version of the store that they are, None while they are none that is visible."""

    identity: Identity | None
    weights: AnyWeights
    digests: dict[str, Digests]
    shares: dict[str, int]  # of pieces, in the digests of their tensors
    mirror: Mirror | None = None

    def advance(self, encoded: Encoded, num_threads: int) -> None:
        """Become what was encoded on it. By its records: the weights may be others by now. Raises
        :class:`IntegrityError` if they do not lead there; it is neither version then."""
        records = encoded.records or {}
        if self.mirror is not None:
            self.mirror.advance(records, self.digests, encoded.digests, num_threads)
            if encoded.payload is not None:  # nobody looks at the records any more
                self.mirror.recycle(encoded.payload)
            return
        with ThreadPoolExecutor(num_threads, "weightsync-advance") as pool:
            list(pool.map(lambda item: self._advance(*item), records.items()))

    def _advance(self, name: str, records: list[tuple[Place, bytes | memoryview]]) -> None:
        data, digests = self.weights[name].data, self.digests[name].copy()
        for place, record in records:
            changes = decode_record(
                place,
                np.frombuffer(record, dtype=np.uint8),
                span_bytes(data, place),
                span_digests(digests, place),
                are_digests_known=True,
            )
            apply_changes(data, changes)

    def close(self) -> None:
        """Free what lies on a device. Idempotent."""
        if self.mirror is not None:
            self.mirror.close()


def copied(
    weights: AnyWeights, former: AnyWeights, num_threads: int
) -> tuple[Weights, dict[str, Digests]]:
    """Copies in host memory, in that of ``former`` where it fits, and their block digests."""

    def one(item: tuple[str, Weight | DeviceWeight]) -> tuple[Weight, Digests]:
        name, weight = item
        kept = former.get(name)
        if isinstance(kept, Weight) and (kept.meta, kept.piece) == (weight.meta, weight.piece):
            kept.data[:] = weight.data
        else:
            kept = Weight(weight.meta, weight.data.copy(), None, weight.box_of)
        return kept, block_digests(kept.meta, kept.data)

    with ThreadPoolExecutor(num_threads, "weightsync-copy") as pool:
        found = dict(zip(weights, pool.map(one, weights.items()), strict=True))
    return {name: w for name, (w, _) in found.items()}, {name: d for name, (_, d) in found.items()}


def share_in(encoded: Encoded, weight: Weight | DeviceWeight) -> int:
    """Of a piece in the digest of its tensor; of a whole tensor its digest."""
    name = weight.meta.name
    return tensor_digest(encoded.digests[name]) if weight.piece.is_whole else encoded.shares[name]


def base_of(snapshot: Snapshot | None, encoded: Encoded) -> Snapshot:
    """Raises :class:`VersionError` if it was encoded on another than this."""
    if snapshot is None or (encoded.records is not None and snapshot.identity != encoded.base):
        raise VersionError(
            f"version {encoded.version} was encoded on {encoded.base}, which is not this "
            "publisher's last version any more; encode it again"
        )
    return snapshot


__all__ = ["Encoded", "Snapshot", "base_of", "copied", "share_in"]
