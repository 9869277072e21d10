"""What every rank of a trainer that publishes together has: pieces, a snapshot, one version under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

from weightsync import config
from weightsync.errors import ConfigError, SessionError
from weightsync.layout import Layout
from weightsync.placed_weights import placed_weights
from weightsync.store import Store
from weightsync.store.cutting import Cutter
from weightsync.store.lending import FileShare
from weightsync.store.object_path import AnyPath, ObjectPath
from weightsync.store.pieces import Piece
from weightsync.store.snapshot import Encoded
from weightsync.store.together import (
    PartPublisher,
    WrittenPart,
)
from weightsync.store.version import Identity
from weightsync.store_options import StoreOptions
from weightsync.tensors import LocalTensors

CONNECT_S: Final = 120.0
#: What rank 0 may take beyond the limit that it keeps itself.
GRACE_S: Final = 30.0


class Which(Enum):
    """Which version a rank writes."""

    ENCODED = "write"  # the one under way
    LAST = "anchor"  # the one that is visible, once more in full


class StorePart:
    """What every rank has: its pieces, its snapshot, and one version between ``send`` and commit."""

    def __init__(self, publisher: PartPublisher, options: StoreOptions, rank: int) -> None:
        self.publisher, self._options, self.rank = publisher, options, rank
        self._threads = options.num_threads or config.num_threads()
        self._cutter = Cutter(options.cut)
        self._pieces: Sequence[Piece] = ()
        self._weights: Mapping[str, Any] = {}
        self.encoded: Encoded | None = None

    @property
    def base(self) -> list[Any] | None:
        """The version that deltas of this rank would stand on."""
        found = self.publisher.identity
        return None if found is None else [found.version, found.root]

    def own(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    def encode(self, version: int, tensors: LocalTensors, *, is_full: bool) -> tuple[int, int]:
        """Bytes of the records, and of the weights that this rank owns."""
        weights = placed_weights(tensors, self._options, self._threads, self._cutter, self._pieces)
        encode = self.publisher.encode_full if is_full else self.publisher.encode
        self.encoded = encode(version, weights)
        return self.encoded.num_bytes, sum(w.meta.num_bytes for w in weights.values())

    def lend(self, version: int, folder: ObjectPath, share: FileShare, which: Which) -> None:
        """What other ranks need of this one for their files."""
        with self.publisher.snapshot_lock:
            self.publisher.lend(self._found(version, which), folder, self.rank, share)

    def write(
        self,
        version: int,
        folder: AnyPath,
        share: FileShare | None = None,
        which: Which = Which.ENCODED,
    ) -> WrittenPart:
        """Of one version; ``share`` says which files of a full one in object storage are this rank's."""
        with self.publisher.snapshot_lock:
            return self.publisher.write(self._found(version, which), folder, self.rank, share)

    def _found(self, version: int, which: Which) -> Encoded:
        if which is Which.ENCODED:
            return self._the(version)
        whole = self.publisher.whole()
        if whole.version != version:
            raise SessionError(f"rank {self.rank} is at version {whole.version}, not {version}")
        return whole

    def advance(self, version: int, target: Identity) -> None:
        """It is visible."""
        with self.publisher.snapshot_lock:
            self.publisher.advance(self._the(version), target)
        self.encoded = None

    def _the(self, version: int) -> Encoded:
        if self.encoded is None or self.encoded.version != version:
            raise SessionError(f"rank {self.rank} has nothing encoded for version {version}")
        return self.encoded


def shown(directory: str) -> str:
    return str(Store(directory, "x").directory)


def only_part(parts: Sequence[LocalTensors]) -> LocalTensors:
    if len(parts) > 1:
        raise ConfigError("several ranks publish a module, a mapping or a list, in one part")
    return parts[0] if parts else LocalTensors(Layout(1, (), ((),)), {}, ())
