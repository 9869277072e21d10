"""Full versions that several ranks write to object storage, where a file comes from one writer, whole.

Every file has one rank that writes it. Pieces of its tensors that others own lie in an object that those
ranks lend, one each, until the files are written; so a piece that its writer owns never travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from weightsync.errors import IntegrityError, LayoutError, ProtocolError
from weightsync.faults import reach
from weightsync.store.durable import write_durable
from weightsync.store.object_path import ObjectPath
from weightsync.store.payload import shard_chunks, shards_of
from weightsync.store.pieces import Piece
from weightsync.store.version import FileEntry, plain_name
from weightsync.store.weights import DeviceWeight, Joined, LentWeight, Weight
from weightsync.types import Box, TensorMeta


@dataclass(frozen=True)
class PlacedPiece:
    """A piece, the rank that owns it, and where it lies in what that rank lends (-1: it writes it)."""

    piece: Piece
    rank: int
    offset_bytes: int


@dataclass(frozen=True)
class FileShare:
    """What one rank does: lend these pieces, in this order, then write these files."""

    lent: tuple[Piece, ...]
    files: Mapping[str, tuple[PlacedPiece, ...]]

    def to_json(self) -> dict[str, Any]:
        return {
            "lent": [piece_to_json(piece) for piece in self.lent],
            "files": {
                name: [[*piece_to_json(p.piece), p.rank, p.offset_bytes] for p in held]
                for name, held in self.files.items()
            },
        }

    @classmethod
    def from_json(cls, value: Any) -> FileShare:
        """Raises :class:`ProtocolError`."""
        try:
            files = {
                plain_name(name): tuple(
                    PlacedPiece(piece_from_json(piece), int(rank), int(offset))
                    for *piece, rank, offset in held
                )
                for name, held in value["files"].items()
            }
            return cls(tuple(piece_from_json(piece) for piece in value["lent"]), files)
        except (AttributeError, KeyError, TypeError, ValueError, LayoutError) as error:
            raise ProtocolError(f"malformed share of a full version: {error!r}") from error


def piece_to_json(piece: Piece) -> list[Any]:
    tensor, box = piece.tensor, piece.box
    return [tensor.name, tensor.dtype, list(tensor.shape), list(box.start), list(box.stop)]


def piece_from_json(value: Any) -> Piece:
    name, dtype, shape, start, stop = value
    return Piece(TensorMeta(name, dtype, tuple(shape)), Box(tuple(start), tuple(stop)))


# --- who does what ------------------------------------------------------------------------------------


def share_files(
    owned: Sequence[Sequence[Piece]], metas: Sequence[TensorMeta], file_bytes: int
) -> list[FileShare]:
    """By rank, from the pieces that each owns. Files are those that one publisher would write; every
    rank writes about as much as it owns, of what it has most of."""
    holders: dict[TensorMeta, list[tuple[int, Piece]]] = {meta: [] for meta in metas}
    for rank, pieces in enumerate(owned):
        for piece in pieces:
            holders[piece.tensor].append((rank, piece))
    ranks = range(len(owned))
    left = [sum(piece.meta.num_bytes for piece in pieces) for pieces in owned]  # to write
    lent_bytes = [0 for _ in ranks]
    lent: list[list[Piece]] = [[] for _ in ranks]
    files: list[dict[str, tuple[PlacedPiece, ...]]] = [{} for _ in ranks]
    for name, shard in shards_of(metas, file_bytes).items():
        held = [item for meta in shard for item in _in_order(holders[meta])]
        has = [sum(p.meta.num_bytes for owner, p in held if owner == rank) for rank in ranks]
        _, _, writer = max((min(has[rank], left[rank]), left[rank], -rank) for rank in ranks)
        writer = -writer
        left[writer] -= sum(has)
        placed = []
        for owner, piece in held:
            placed.append(PlacedPiece(piece, owner, -1 if owner == writer else lent_bytes[owner]))
            if owner != writer:
                lent[owner].append(piece)
                lent_bytes[owner] += piece.meta.num_bytes
        files[writer][name] = tuple(placed)
    return [FileShare(tuple(lent[rank]), files[rank]) for rank in ranks]


def _in_order(held: Iterable[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
    return sorted(held, key=lambda item: item[1].box.start)


# --- doing it -----------------------------------------------------------------------------------------


def lent_path(folder: ObjectPath, rank: int) -> ObjectPath:
    """The object that a rank lends."""
    return folder / f"lent-{rank:05}"


def lend(
    folder: ObjectPath, rank: int, weights: Mapping[str, Weight | DeviceWeight], share: FileShare
) -> None:
    """Put there what others need of this rank."""
    if share.lent:
        chunks = (weights[piece.meta.name].data.data for piece in share.lent)
        write_durable(lent_path(folder, rank), chunks)


def write_files(
    folder: ObjectPath,
    rank: int,
    weights: Mapping[str, Weight | DeviceWeight],
    share: FileShare,
    num_threads: int,
) -> tuple[FileEntry, ...]:
    """This rank's files, once every rank has lent. Memory: a tensor and what of it is lent, a thread."""

    def part(placed: PlacedPiece) -> Weight | DeviceWeight | LentWeight:
        piece = placed.piece
        if placed.rank != rank:
            return LentWeight(piece, lent_path(folder, placed.rank), placed.offset_bytes)
        found = weights.get(piece.meta.name)
        if found is None:
            raise IntegrityError(f"rank {rank} does not hold {piece.meta.name!r}")
        return found

    def write(item: tuple[str, Sequence[PlacedPiece]]) -> FileEntry:
        name, held = item
        parts: dict[TensorMeta, list[Weight | DeviceWeight | LentWeight]] = {}
        for placed in held:
            parts.setdefault(placed.piece.tensor, []).append(part(placed))
        joined = [Joined(meta, found) for meta, found in parts.items()]
        entry = FileEntry(name, *write_durable(folder / name, shard_chunks(joined)))
        reach("store.payload")
        return entry

    # When this raises, nobody writes any more: what was written is removed then.
    with ThreadPoolExecutor(num_threads, "weightsync-files") as pool:
        return tuple(pool.map(write, share.files.items()))


__all__ = [
    "FileShare",
    "lend",
    "lent_path",
    "piece_from_json",
    "piece_to_json",
    "share_files",
    "write_files",
]
