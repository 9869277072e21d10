"""A rank other than 0 of a trainer that publishes together; see :mod:`weightsync.store_ranks`."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from weightsync import config
from weightsync.collector import Collector
from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, ProtocolError, SessionError
from weightsync.naming import Rule
from weightsync.ranks import Meeting, RankPipe, answer_to, join
from weightsync.store import Store
from weightsync.store.lending import FileShare, piece_from_json
from weightsync.store.together import PartPublisher
from weightsync.store.version import Identity, plain_name
from weightsync.store_options import PublishReport, StoreOptions, publisher_options
from weightsync.store_part import (
    CONNECT_S,
    GRACE_S,
    StorePart,
    Which,
    only_part,
    shown,
)
from weightsync.store_sender import BUCKET_BYTES
from weightsync.tensors import LocalTensors

_LOG = logging.getLogger(__name__)


class FollowerStoreSender:
    """What :meth:`weightsync.Sender.connect` returns on every other rank. One thread at a time."""

    def __init__(
        self,
        directory: str,
        options: StoreOptions,
        rules: Sequence[Rule] | None,
        meeting: Meeting,
    ) -> None:
        limit = Deadline(CONNECT_S, peer="trainer rank 0", stage="connect")
        channel, welcome = join(meeting, {"engines": [shown(directory)]}, limit)
        self.run_id, self.options, self.rank = str(welcome.get("run_id")), options, meeting.rank
        self.store = Store(directory, self.run_id)
        threads = options.num_threads or config.num_threads()
        publisher = PartPublisher(self.store, **publisher_options(options, threads))
        self._part = StorePart(publisher, options, meeting.rank)
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
        self._advanced: Future[None] | None = None
        self._pipe = RankPipe(channel, self._on_frame, self._on_lost)

    def update_weights(self, source: Any, *, version: int) -> PublishReport:
        """This rank's part of a whole update; waits until the version is visible, and returns its report.
        With :meth:`update` it is published behind the next training step."""
        with self.update(version) as update:
            update.send(source)
        report = update.report
        if report is None:
            raise SessionError(f"version {version} was given up")
        return report

    def update(self, version: int) -> FollowerUpdate:
        """The update that rank 0 enters, too."""
        return FollowerUpdate(self, version)

    def wait(self, limit_s: float | None = None) -> None:
        """Until the version under way is visible, as rank 0 says. Raises :class:`SessionError` with why
        it will not be, :class:`PeerLostError`, :class:`DeadlineError`."""
        number, self._pending = self._pending, None
        if number is None:
            return
        limit_s = self.options.commit_timeout_s + GRACE_S if limit_s is None else limit_s
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
            case "call" if message["what"].get("do") in ("lend", "write", "anchor"):
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
                    if message["is_visible"]:
                        self._advanced = self._worker.submit(
                            self._advance, int(message["version"]), str(message["said"]["root"])
                        )
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
        folder = self.store.path / plain_name(what["folder"])
        found = what.get("share")
        share = None if found is None else FileShare.from_json(found)
        if what["do"] == "lend" and share is not None:
            self._part.lend(version, folder, share, Which(what["of"]))
            return {}
        return {"part": self._part.write(version, folder, share, Which(what["do"])).to_json()}

    def _advance(self, version: int, root: str) -> None:
        """The version is visible whatever happens here; a rank that cannot follow makes the next one
        full."""
        try:
            self._part.advance(version, Identity(version, root))
        except Exception as error:  # too little memory, too
            _LOG.warning("after version %d, which is visible: %s", version, error)

    # --- for updates ----------------------------------------------------------------------------------

    def send(self, version: int, number: int, tensors: LocalTensors) -> None:
        """Do what rank 0 asks until every rank has coded its part."""
        limit_s = 3 * self.options.commit_timeout_s + GRACE_S
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
                self._wait_until_advanced()
                layout = tensors.layout
                digest = layout.digest if layout.tensors else ""
                return {"digest": digest, "base": self._part.base}
            case "own":
                self._part.own([piece_from_json(piece) for piece in what["pieces"]])
                return {}
            case "encode":
                found = self._part.encode(version, tensors, is_full=bool(what["is_full"]))
                return {"num_bytes": found[0], "total": found[1]}
            case do:
                raise ProtocolError(f"trainer rank 0 asks for {do!r}")

    def _wait_until_advanced(self) -> None:
        """Until this rank's copy is the version that became visible last."""
        limit_s = self.options.commit_timeout_s
        with self._changed:
            advanced = self._advanced
        if advanced is None:
            return
        try:
            advanced.result(timeout=limit_s)
        except FutureTimeout:
            raise DeadlineError(str(self.store.path), "advance", limit_s, limit_s) from None

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
        self._sender.send(self.version, self.number, only_part(parts))
        self.encode_s = time.perf_counter() - start_s
        self._is_sent = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_sent:
            why = "no send" if kind is None else kind.__name__
            self._sender.leave(self.version, self.number, why)
            if kind is None:
                raise SessionError(f"nothing was sent for version {self.version}")


def _refuse(why: str) -> Mapping[str, Any]:
    raise SessionError(why)


__all__ = ["FollowerStoreSender", "FollowerUpdate"]
