"""A trainer of several ranks that publishes to a store: each codes and writes the pieces that it owns.

Rank 0 leads, through the machinery of :mod:`weightsync.crew`. Within ``send`` every rank says what it holds,
is told which pieces it owns, and codes them, all at once; a version is full if any of them has no base, or
if all deltas together would not pay. Behind the next training step every rank writes its files, rank 0
the manifest when all have answered, and only then the snapshots advance. Whoever fails or is lost before
that makes the version not be, and every rank is told so.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from weightsync import config
from weightsync.collector import Collector
from weightsync.crew import Crew
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, ProtocolError, SessionError, WeightSyncError
from weightsync.layout import Layout
from weightsync.naming import Rule
from weightsync.ranks import Meeting, RankPipe, answer_to, answers_of, join
from weightsync.store import Store, VersionKind, VersionManifest
from weightsync.store.cutting import Cutter, owned
from weightsync.store.object_path import ObjectPath
from weightsync.store.payload import commit, payload_folder
from weightsync.store.pieces import Piece
from weightsync.store.publish import Encoded
from weightsync.store.together import (
    PartPublisher,
    WrittenPart,
    hashed,
    is_dense,
    lay_out,
    together,
)
from weightsync.store.version import Identity, plain_name
from weightsync.store_sender import (
    BUCKET_BYTES,
    PublishReport,
    StoreOptions,
    StoreSender,
    placed_weights,
    publisher_options,
)
from weightsync.tensors import LocalTensors
from weightsync.types import Box, TensorMeta

_LOG = logging.getLogger(__name__)
_CONNECT_S: Final = 120.0
#: What rank 0 may take beyond the limit that it keeps itself.
_GRACE_S: Final = 30.0


class _Part:
    """What every rank has: its pieces, its snapshot, and one version between ``send`` and commit."""

    def __init__(self, publisher: PartPublisher, options: StoreOptions, rank: int) -> None:
        self.publisher, self._options, self.rank = publisher, options, rank
        self._threads = options.num_threads or config.num_threads()
        self._cutter = Cutter(options.cut)
        self._pieces: Sequence[Piece] = ()
        self._weights: Mapping[str, Any] = {}
        self.encoded: Encoded | None = None
        self._lock = threading.Lock()  # between what writes the snapshot and what reads it

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
        if is_full:
            with self._lock:
                self.encoded = self.publisher.encode_full(version, weights)
        else:
            self.encoded = self.publisher.encode(version, weights)
        return self.encoded.num_bytes, sum(w.meta.num_bytes for w in weights.values())

    def write(self, version: int, folder: Path) -> WrittenPart:
        """Of the version that was encoded."""
        with self._lock:
            return self.publisher.write(self._the(version), folder, self.rank)

    def write_again(self, version: int, folder: Path) -> WrittenPart:
        """Of the last version, in full."""
        with self._lock:
            whole = self.publisher.whole()
            if whole.version != version:
                raise SessionError(f"rank {self.rank} is at version {whole.version}, not {version}")
            return self.publisher.write(whole, folder, self.rank)

    def advance(self, version: int, target: Identity) -> None:
        """It is visible."""
        with self._lock:
            self.publisher.advance(self._the(version), target)
        self.encoded = None

    def _the(self, version: int) -> Encoded:
        if self.encoded is None or self.encoded.version != version:
            raise SessionError(f"rank {self.rank} has nothing encoded for version {version}")
        return self.encoded


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
        _check_place(directory)
        super().__init__(directory, run_id, options, rules, meeting.world_size)
        self._part = _Part(self._publisher, options, 0)
        self._joint: Layout | None = None
        self._metas: list[TensorMeta] = []
        self._total_bytes = 0
        self._number = self._encoded_number = (
            0  # of updates that were entered, as every rank counts
        )
        self._crew = Crew(meeting, {"engines": [_shown(directory)], "run_id": run_id})
        try:
            self._crew.wait(Deadline(_CONNECT_S, peer="trainer ranks", stage="connect"))
        except BaseException:
            self.close()
            raise

    def _made_publisher(self) -> PartPublisher:
        return PartPublisher(self.store, **publisher_options(self.options, self._threads))

    @property
    def _limit_s(self) -> float:
        return self.options.commit_timeout_s

    def _all(
        self, what: Mapping[str, Any], own: Callable[[], Any]
    ) -> tuple[Any, dict[int, dict[str, Any]]]:
        """The same on every rank at once: what this one returned, and the answers of the others."""
        ranks = range(1, self._crew.world_size)
        futures = {rank: self._crew.call(rank, what) for rank in ranks}
        mine = own()
        return mine, answers_of(futures, "trainer", str(what["do"]), self._limit_s)

    # --- within send --------------------------------------------------------------------------------

    def _encode(self, version: int, parts: Sequence[LocalTensors]) -> tuple[Encoded, int]:
        tensors = _only(parts)
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
                "pieces": [_piece_to_json(p) for p in theirs],
            }
            for rank, theirs in enumerate(pieces)
            if rank != 0
        }
        self._crew.ask(calls, "send", self._limit_s)
        self._part.own(pieces[0])
        self._joint, self._metas = joint, [t.wire_forms[-1] for t in joint.tensors]

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
            what = {"do": "write", "version": version}
            manifest = self._written(
                kind, encoded.base, what, lambda f: self._part.write(version, f)
            )
        except BaseException as error:
            self._end(self._encoded_number, f"{type(error).__name__}: {error}")
            raise
        self._advance(manifest)
        said = {
            "kind": manifest.kind.value, "root": manifest.target.root,
            "payload_bytes": manifest.num_bytes, "total_bytes": self._total_bytes,
            "num_changed": manifest.num_changed, "publish_s": time.perf_counter() - start_s,
        }  # fmt: skip
        self._end(self._encoded_number, said)
        return manifest

    def _written(
        self,
        kind: VersionKind,
        base: Identity | None,
        what: Mapping[str, Any],
        own: Callable[[Path], WrittenPart],
    ) -> VersionManifest:
        """A version that every rank has written its part of, made visible."""
        version, is_full = int(what["version"]), kind is not VersionKind.DELTA
        stem = f"v{version:012}" + ("-full" if kind is VersionKind.ANCHOR else "")
        with payload_folder(self.store, stem) as folder:
            names: list[str] = []
            if is_full:
                extra = self.options.extra_files
                names = lay_out(folder, self._metas, self.options.file_bytes, extra)
            mine, replies = self._all({**what, "folder": folder.name}, lambda: own(folder))
            parts = [mine, *(WrittenPart.from_json(r["part"]) for r in replies.values())]
            files = hashed(folder, names)
            draft = VersionManifest(
                self.run_id, kind, Identity(version, ""), None if is_full else base, folder.name,
                files, (),
            )  # fmt: skip
            manifest = together(draft, [meta.name for meta in self._metas], parts)
            commit(self.store, manifest)
        return manifest

    def _advance(self, manifest: VersionManifest) -> None:
        """The version is visible whatever happens here; who cannot follow makes the next one full."""
        version, target = manifest.version, manifest.target
        what = {"do": "advance", "version": version, "root": target.root}
        try:
            self._all(what, lambda: self._part.advance(version, target))
        except WeightSyncError as error:
            _LOG.warning("after version %d, which is visible: %s", version, error)

    def _anchor(self) -> None:
        latest = self.store.latest()
        if latest is not None and not self.store.manifest(latest).is_full:
            what = {"do": "anchor", "version": latest}
            self._written(
                VersionKind.ANCHOR, None, what, lambda f: self._part.write_again(latest, f)
            )

    def _entering(self) -> None:
        self._number += 1

    def _give_up(self, version: int, why: str) -> None:
        self._end(self._number, why)

    def _end(self, number: int, said: Mapping[str, Any] | str) -> None:
        """Tell every rank how an update ended: what became visible, or why nothing did."""
        is_visible = not isinstance(said, str)
        message = {"kind": "ended", "number": number, "is_visible": is_visible, "said": said}
        self._crew.tell(message)

    def _release(self) -> None:
        super()._release()
        self._crew.close()


class FollowerStoreSender:
    """What :meth:`weightsync.Sender.connect` returns on every other rank. One thread at a time."""

    def __init__(
        self,
        directory: str,
        options: StoreOptions,
        rules: Sequence[Rule] | None,
        meeting: Meeting,
    ) -> None:
        _check_place(directory)
        limit = Deadline(_CONNECT_S, peer="trainer rank 0", stage="connect")
        channel, welcome = join(meeting, {"engines": [_shown(directory)]}, limit)
        self.run_id, self.options, self.rank = str(welcome.get("run_id")), options, meeting.rank
        self.store = Store(directory, self.run_id)
        threads = options.num_threads or config.num_threads()
        publisher = PartPublisher(self.store, **publisher_options(options, threads))
        self._part = _Part(publisher, options, meeting.rank)
        self.collector = Collector(
            rules, options.cast, BUCKET_BYTES, meeting.rank, meeting.world_size
        )
        self._asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()  # for who sends
        self._worker = ThreadPoolExecutor(1, "weightsync-publish")
        self._changed = threading.Condition()
        self._ended: dict[int, Mapping[str, Any]] = {}
        self._pending: int | None = None  # number of an update, as rank 0 counts them
        self.number = 0
        self._left: tuple[int, str] | None = None
        self._lost: str | None = None
        self._pipe = RankPipe(channel, self._on_frame, self._on_lost)

    def update(self, version: int) -> FollowerUpdate:
        """The update that rank 0 enters, too."""
        return FollowerUpdate(self, version)

    def wait(self, limit_s: float | None = None) -> None:
        """Until the version under way is visible, as rank 0 says. Raises :class:`SessionError` with why
        it will not be, :class:`PeerLostError`, :class:`DeadlineError`."""
        number, self._pending = self._pending, None
        if number is None:
            return
        limit_s = self.options.commit_timeout_s + _GRACE_S if limit_s is None else limit_s
        deadline = Deadline(limit_s, peer="trainer rank 0", stage="publish")
        with self._changed:
            while number not in self._ended:
                if self._lost is not None:
                    raise deadline.lost(self._lost)
                deadline.check()
                self._changed.wait(deadline.slice_s())
            self._raise_ended(number)

    def report_of(self, update: FollowerUpdate) -> PublishReport:
        """Waits until the version of an update is visible. Raises as :meth:`wait`."""
        if self._pending == update.number:
            self.wait()
        self._raise_ended(update.number)
        ended = self._ended.get(update.number)
        if ended is None:
            raise SessionError(
                f"version {update.version} is not known any more to rank {self.rank}"
            )
        return PublishReport(
            version=update.version, run_id=self.run_id, waited_s=update.waited_s,
            encode_s=update.encode_s, **ended["said"],
        )  # fmt: skip

    def _raise_ended(self, number: int) -> None:
        ended = self._ended.get(number)
        if ended is not None and not ended["is_visible"]:
            raise SessionError(f"trainer rank 0 gave the version up: {ended['said']}")

    def close(self) -> None:
        """Wait for what is under way and part with rank 0. Idempotent."""
        try:
            self.wait()
        finally:
            self._worker.submit(self._part.publisher.close)
            self._worker.shutdown(wait=True)
            self._pipe.close()
            self.collector.forget()

    def __enter__(self) -> FollowerStoreSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what rank 0 says ---------------------------------------------------------------------------

    def _on_frame(self, message: dict[str, Any]) -> None:
        match message.get("kind"):
            case "call" if message["what"].get("do") in ("write", "advance", "anchor"):
                self._worker.submit(self._answer, message, self._do)
            case "call":
                with self._changed:
                    left = self._left
                if left is not None and message["what"].get("number") == left[0]:
                    self._answer(message, lambda _: _refuse(left[1]))
                else:
                    self._asked.put(message)
            case "sent":
                self._asked.put(message)
            case "ended":
                with self._changed:
                    self._ended[int(message["number"])] = message
                    while len(self._ended) > 8:
                        del self._ended[next(iter(self._ended))]
                    self._changed.notify_all()
                self._asked.put(message)
            case kind:
                raise ProtocolError(f"trainer rank 0 sent a frame {kind!r}")

    def _on_lost(self, reason: str) -> None:
        with self._changed:
            self._lost = f"trainer rank 0: {reason}"
            self._changed.notify_all()
        self._asked.put({"kind": "lost"})

    def _answer(
        self,
        message: Mapping[str, Any],
        act: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        answer_to(message.get("number"), lambda: act(message["what"]), self._pipe.put)

    def _do(self, what: Mapping[str, Any]) -> Mapping[str, Any]:
        version = int(what["version"])
        if what["do"] == "advance":
            self._part.advance(version, Identity(version, str(what["root"])))
            return {}
        folder = Path(str(self.store.path)) / plain_name(what["folder"])
        write = self._part.write if what["do"] == "write" else self._part.write_again
        return {"part": write(version, folder).to_json()}

    # --- for updates ----------------------------------------------------------------------------------

    def send(self, version: int, number: int, tensors: LocalTensors) -> None:
        """Do what rank 0 asks until every rank has coded its part."""
        limit_s = 3 * self.options.commit_timeout_s + _GRACE_S
        deadline = Deadline(limit_s, peer="trainer rank 0", stage="send")
        while True:
            with self._changed:
                self._raise_ended(number)
                if self._lost is not None:
                    raise deadline.lost(self._lost)
            try:
                message = self._asked.get(timeout=deadline.slice_s())
            except queue.Empty:
                deadline.check()
                continue
            if message["kind"] == "sent" and message["number"] == number:
                self._pending = number
                return
            if message["kind"] == "call":
                self._answer(message, lambda what: self._do_in_send(what, version, tensors))

    def _do_in_send(
        self, what: Mapping[str, Any], version: int, tensors: LocalTensors
    ) -> Mapping[str, Any]:
        if what["do"] == "layout":
            return {"layout": tensors.layout.to_json()}
        if (what["version"], what["number"]) != (version, self.number):
            raise SessionError(
                f"trainer rank {self.rank} sends version {version}, rank 0 {what['version']}"
            )
        match what["do"]:
            case "have":
                layout = tensors.layout
                digest = layout.digest if layout.tensors else ""
                return {"digest": digest, "base": self._part.base}
            case "own":
                self._part.own([_piece_from_json(piece) for piece in what["pieces"]])
                return {}
            case "encode":
                found = self._part.encode(version, tensors, is_full=bool(what["is_full"]))
                return {"num_bytes": found[0], "total": found[1]}
            case do:
                raise ProtocolError(f"trainer rank 0 asks for {do!r}")

    def leave(self, version: int, number: int, why: str) -> None:
        """This rank will not send the version: rank 0 is told so when it asks."""
        reason = f"trainer rank {self.rank} left version {version} by {why}"
        with self._changed:
            self._left = (number, reason)
        while not self._asked.empty():
            message = self._asked.get()
            if message["kind"] == "call" and message["what"].get("number") == number:
                self._answer(message, lambda _: _refuse(reason))


class FollowerUpdate:
    """One version, on a rank that is not 0."""

    def __init__(self, sender: FollowerStoreSender, version: int) -> None:
        self._sender, self.version, self.number = sender, version, 0
        self._is_sent = False
        self.waited_s = self.encode_s = 0.0

    def __enter__(self) -> FollowerUpdate:
        start_s = time.perf_counter()
        self._sender.number += 1
        self.number = self._sender.number
        try:
            self._sender.wait()
        except BaseException as error:
            self._sender.leave(self.version, self.number, f"{type(error).__name__}: {error}")
            raise
        self.waited_s = time.perf_counter() - start_s
        return self

    @property
    def report(self) -> PublishReport | None:
        """Waits until the version is visible; None if this rank gave it up. Sizes are of all ranks."""
        return self._sender.report_of(self) if self._is_sent else None

    def send(self, source: Any) -> None:
        """Everything that this rank holds, in one call. Returns when the weights may change."""
        start_s = time.perf_counter()
        parts = [tensors for tensors, _ in self._sender.collector.collect(source)]
        self._sender.send(self.version, self.number, _only(parts))
        self.encode_s = time.perf_counter() - start_s
        self._is_sent = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_sent:
            why = "no send" if kind is None else kind.__name__
            self._sender.leave(self.version, self.number, why)
            if kind is None:
                raise SessionError(f"nothing was sent for version {self.version}")


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


def _check_place(directory: str) -> None:
    if isinstance(Store(directory, "x").directory, ObjectPath):
        raise ConfigError(
            f"{directory}: several ranks write parts of one file, which object storage cannot; gather on "
            "rank 0 and publish from there, or give a directory of a shared file system"
        )


def _shown(directory: str) -> str:
    return str(Store(directory, "x").directory)


def _only(parts: Sequence[LocalTensors]) -> LocalTensors:
    if len(parts) > 1:
        raise ConfigError("several ranks publish a module, a mapping or a list, in one part")
    return parts[0] if parts else LocalTensors(Layout(1, (), ((),)), {}, ())


def _refuse(why: str) -> Mapping[str, Any]:
    raise SessionError(why)


def _piece_to_json(piece: Piece) -> list[Any]:
    tensor, box = piece.tensor, piece.box
    return [tensor.name, tensor.dtype, list(tensor.shape), list(box.start), list(box.stop)]


def _piece_from_json(value: Any) -> Piece:
    name, dtype, shape, start, stop = value
    return Piece(TensorMeta(name, dtype, tuple(shape)), Box(tuple(start), tuple(stop)))


__all__ = ["FollowerStoreSender", "FollowerUpdate", "LeadStoreSender", "rank_store_sender"]
