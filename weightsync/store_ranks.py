"""A trainer of several ranks that publishes to a store: each codes and writes the pieces that it owns.

Rank 0 leads, through the machinery of :mod:`weightsync.crew`. Within ``send`` every rank says what it holds,
is told which pieces it owns, and codes them, all at once; a version is full if any of them has no base, or
if all deltas together would not pay. Behind the next training step every rank writes its files, rank 0
the manifest when all have answered; every rank is told, and its snapshot advances. Whoever fails or is lost
before that makes the version not be, and every rank is told so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from weightsync.checkpoints import INDEX_FILE
from weightsync.crew import Crew
from weightsync.deadline import Deadline
from weightsync.errors import SessionError
from weightsync.layout import Layout
from weightsync.naming import Rule
from weightsync.ranks import Meeting, answers_of
from weightsync.store import VersionKind, VersionManifest
from weightsync.store.cutting import owned
from weightsync.store.durable import write_durable
from weightsync.store.lending import FileShare, lent_path, piece_to_json, share_files
from weightsync.store.object_path import AnyPath, ObjectPath
from weightsync.store.payload import commit, index_of, payload_folder, shards_of
from weightsync.store.pieces import Piece
from weightsync.store.snapshot import Encoded
from weightsync.store.together import (
    PartPublisher,
    WrittenPart,
    hashed,
    is_dense,
    lay_out,
    together,
)
from weightsync.store.version import FileEntry, Identity
from weightsync.store_options import StoreOptions, publisher_options
from weightsync.store_part import (
    CONNECT_S,
    StorePart,
    Which,
    only_part,
    shown,
)
from weightsync.store_rank_sender import FollowerStoreSender, FollowerUpdate
from weightsync.store_sender import StoreSender
from weightsync.tensors import LocalTensors
from weightsync.types import TensorMeta

_LOG = logging.getLogger(__name__)


class LeadStoreSender(StoreSender):
    """Rank 0 of such a trainer."""

    _publisher: PartPublisher

    def __init__(
        self,
        directory: str,
        run_id: str,
        options: StoreOptions,
        rules: Sequence[Rule] | None,
        meeting: Meeting,
    ) -> None:
        super().__init__(directory, run_id, options, rules, meeting.world_size)
        self._part = StorePart(self._publisher, options, 0)
        self._joint: Layout | None = None
        self._metas: list[TensorMeta] = []
        self._owned: list[list[Piece]] = []
        self._total_bytes = 0
        self._number = 0  # of updates that were entered, as every rank counts
        self._encoded_number = 0
        self._crew = Crew(meeting, {"engines": [shown(directory)], "run_id": run_id})
        try:
            self._crew.wait(Deadline(CONNECT_S, peer="trainer ranks", stage="connect"))
        except BaseException:
            self.close()
            raise

    def _made_publisher(self) -> PartPublisher:
        return PartPublisher(self.store, **publisher_options(self.options, self._threads))

    @property
    def _limit_s(self) -> float:
        return self.options.commit_timeout_s

    def _all(
        self,
        what: Mapping[str, Any],
        own: Callable[[], Any],
        shares: Sequence[FileShare] | None = None,
    ) -> tuple[Any, dict[int, dict[str, Any]]]:
        """The same on every rank at once, with its ``share`` if there are some: what this one returned, and
        the answers of the others."""
        futures = {}
        try:
            for rank in range(1, self._crew.world_size):
                extra = {} if shares is None else {"share": shares[rank].to_json()}
                futures[rank] = self._crew.call(rank, {**what, **extra})
            mine = own()
        finally:
            # Whoever fails, nobody is still at it when this ends: what was written is removed then.
            wait(futures.values(), timeout=self._limit_s)
        return mine, answers_of(futures, "trainer", str(what["do"]), self._limit_s)

    # --- within send --------------------------------------------------------------------------------

    def _encode(self, version: int, parts: Sequence[LocalTensors]) -> tuple[Encoded, int]:
        tensors = only_part(parts)
        self._encoded_number = self._number
        what = {"do": "have", "version": version, "number": self._number}
        replies = self._crew.ask_all(what, "send", self._limit_s)
        joint = self._crew.joint(tensors.layout, replies)
        bases = [self._part.base, *(reply["base"] for reply in replies.values())]
        is_full = bases[0] is None or any(base != bases[0] for base in bases)
        if self._joint is None or joint.digest != self._joint.digest:
            self._share_out(version, joint)
            is_full = True
        sizes = self._encode_on_all(version, tensors, is_full=is_full)
        if not is_full and is_dense(*zip(*sizes, strict=True)):
            sizes = self._encode_on_all(version, tensors, is_full=True)
        self._crew.tell({"kind": "sent", "number": self._number})
        if self._part.encoded is None:
            raise SessionError(f"nothing was encoded for version {version}")
        self._total_bytes = sum(total for _, total in sizes)
        return self._part.encoded, self._total_bytes

    def _share_out(self, version: int, joint: Layout) -> None:
        """Tell every rank which pieces it owns."""
        self._joint = None
        pieces = owned(joint, self._cutter)
        calls = {
            rank: {
                "do": "own",
                "version": version,
                "number": self._number,
                "pieces": [piece_to_json(p) for p in theirs],
            }
            for rank, theirs in enumerate(pieces)
            if rank != 0
        }
        self._crew.ask(calls, "send", self._limit_s)
        self._part.own(pieces[0])
        self._joint, self._metas = joint, [t.wire_forms[-1] for t in joint.tensors]
        self._owned = pieces

    def _encode_on_all(
        self, version: int, tensors: LocalTensors, *, is_full: bool
    ) -> list[tuple[int, int]]:
        what = {
            "do": "encode", "version": version, "number": self._number, "is_full": is_full,
        }  # fmt: skip
        mine, replies = self._all(
            what, lambda: self._part.encode(version, tensors, is_full=is_full)
        )
        return [mine, *((int(r["num_bytes"]), int(r["total"])) for r in replies.values())]

    # --- behind the training step -------------------------------------------------------------------

    def _commit(self, encoded: Encoded) -> VersionManifest:
        version, start_s = encoded.version, time.perf_counter()
        try:
            kind = VersionKind.FULL if encoded.records is None else VersionKind.DELTA
            manifest = self._written(kind, version, encoded.base, Which.ENCODED)
        except BaseException as error:
            self._end(self._encoded_number, version, f"{type(error).__name__}: {error}")
            raise
        said = {
            "kind": manifest.kind.value, "root": manifest.target.root,
            "payload_bytes": manifest.num_bytes, "total_bytes": self._total_bytes,
            "num_changed": manifest.num_changed, "publish_s": time.perf_counter() - start_s,
        }  # fmt: skip
        self._end(self._encoded_number, version, said)
        return manifest

    def _written(
        self,
        kind: VersionKind,
        version: int,
        base: Identity | None,
        which: Which,
    ) -> VersionManifest:
        """A version that every rank has written its part of, made visible."""
        is_full = kind is not VersionKind.DELTA
        metas, owned = self._metas, self._owned  # a next send may share out another layout
        stem = f"v{version:012}" + ("-full" if kind is VersionKind.ANCHOR else "")
        with payload_folder(self.store, stem) as folder:
            files: tuple[FileEntry, ...] = ()
            if not is_full:
                parts = self._parts(version, folder, which)
            elif isinstance(folder, ObjectPath):
                files, parts = self._full_in_objects(version, folder, which, metas, owned)
            else:
                extra = self.options.extra_files
                names = lay_out(folder, metas, self.options.file_bytes, extra)
                parts = self._parts(version, folder, which)
                files = hashed(folder, names)
            draft = VersionManifest(
                self.run_id, kind, Identity(version, ""), None if is_full else base, folder.name,
                files, (),
            )  # fmt: skip
            manifest = together(draft, [meta.name for meta in metas], parts)
            commit(self.store, manifest)
        return manifest

    def _parts(
        self,
        version: int,
        folder: AnyPath,
        which: Which,
        shares: Sequence[FileShare] | None = None,
    ) -> list[WrittenPart]:
        what = {"do": which.value, "version": version, "folder": folder.name}
        mine, replies = self._all(
            what,
            lambda: self._part.write(version, folder, None if shares is None else shares[0], which),
            shares,
        )
        return [mine, *(WrittenPart.from_json(r["part"]) for r in replies.values())]

    def _full_in_objects(
        self,
        version: int,
        folder: ObjectPath,
        which: Which,
        metas: list[TensorMeta],
        owned: list[list[Piece]],
    ) -> tuple[tuple[FileEntry, ...], list[WrittenPart]]:
        """Every rank writes whole files, of pieces that others have lent it where it does not own them."""
        shares = share_files(owned, metas, self.options.file_bytes)
        what = {"do": "lend", "of": which.value, "version": version, "folder": folder.name}
        self._all(what, lambda: self._part.lend(version, folder, shares[0], which), shares)
        parts = self._parts(version, folder, which, shares)
        for rank, share in enumerate(shares):
            if share.lent:
                lent_path(folder, rank).unlink(missing_ok=True)
        index = index_of(shards_of(metas, self.options.file_bytes))
        extra = {**self.options.extra_files, INDEX_FILE: index}
        return tuple(
            FileEntry(name, *write_durable(folder / name, [data])) for name, data in extra.items()
        ), parts

    def _advance(self, encoded: Encoded, manifest: VersionManifest) -> None:
        """Every other rank does once it hears that the version is visible, and says when asked what it
        has whether it could."""
        try:
            self._part.advance(manifest.version, manifest.target)
        except Exception as error:  # too little memory, too
            _LOG.warning("after version %d, which is visible: %s", manifest.version, error)

    def _anchor(self) -> None:
        latest = self.store.latest()
        if latest is not None and not self.store.manifest(latest).is_full:
            self._written(VersionKind.ANCHOR, latest, None, Which.LAST)

    def _entering(self) -> None:
        self._number += 1

    def _give_up(self, version: int, why: str) -> None:
        self._end(self._number, version, why)

    def _end(self, number: int, version: int, said: Mapping[str, Any] | str) -> None:
        """Tell every rank how an update ended: what became visible, or why nothing did."""
        is_visible = not isinstance(said, str)
        message = {
            "kind": "ended", "number": number, "version": version, "is_visible": is_visible,
            "said": said,
        }  # fmt: skip
        self._crew.tell(message)

    def _release(self) -> None:
        super()._release()
        self._crew.close()


def rank_store_sender(
    directory: str,
    run_id: str,
    options: StoreOptions,
    rules: Sequence[Rule] | None,
    meeting: Meeting,
) -> LeadStoreSender | FollowerStoreSender:
    """What ``Sender.connect(transport="disk-delta", world_size=...)`` gives on each rank."""
    if meeting.rank == 0:
        return LeadStoreSender(directory, run_id, options, rules, meeting)
    return FollowerStoreSender(directory, options, rules, meeting)


__all__ = ["FollowerStoreSender", "FollowerUpdate", "LeadStoreSender", "rank_store_sender"]
