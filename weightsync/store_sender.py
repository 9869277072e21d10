"""The trainer's end of a store: the same ``update`` and ``send``, with nobody at the other end.

``send`` reads the weights: it compares them with the last version and codes what changed. Writing files,
the commit and all upkeep (folds, anchors, collection) run on a thread of their own, behind the next
training step. There is never more than one version under way: the next ``send`` waits for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from weightsync import config
from weightsync.collector import Collector
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    SessionError,
    WeightSyncError,
)
from weightsync.naming import Rule
from weightsync.placed_weights import placed_weights
from weightsync.ranks import Meeting
from weightsync.store import Publisher, Store, VersionManifest, collect, fold
from weightsync.store.cutting import Cutter
from weightsync.store.snapshot import Encoded
from weightsync.store_options import PublishReport, SnapshotPlace, StoreOptions, publisher_options
from weightsync.tensors import LocalTensors

_LOG = logging.getLogger(__name__)
BUCKET_BYTES: Final = 1 << 40  # a generator is one part: all of it is coded at once


class StoreSender:
    """Publishes what it is sent as versions of one run. A context manager; one thread at a time.

    Memory: a copy of the weights (their size as stored) on the host, where weights of a device are copied
    tensor by tensor to be compared, or with ``snapshot="device"`` on their device; and the coded changes
    of one version.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        run_id: str,
        options: StoreOptions | None = None,
        rules: Sequence[Rule] | None = None,
        world_size: int = 1,
    ) -> None:
        self.run_id = run_id
        self.options = StoreOptions() if options is None else options
        self.store = Store(os.fspath(directory), run_id)
        self._threads = self.options.num_threads or config.num_threads()
        self._publisher = self._made_publisher()
        self._cutter = Cutter(self.options.cut)
        self._collector = Collector(rules, self.options.cast, BUCKET_BYTES, 0, world_size)
        self._worker = ThreadPoolExecutor(1, "weightsync-publish")
        self._pending: Future[PublishReport] | None = None
        self._advanced: Future[None] | None = None
        self._upkeep: Future[None] | None = None
        self._open: StoreUpdate | None = None
        self._closed = False

    def _made_publisher(self) -> Publisher:
        return Publisher(self.store, **publisher_options(self.options, self._threads))

    def update_weights(self, source: Any, *, version: int) -> PublishReport:
        """A whole update; waits until the version is visible, and returns its report. With
        :meth:`update` it is published behind the next training step."""
        with self.update(version) as update:
            update.send(source)
        report = self.wait()  # what it raises is raised once
        if report is None:
            raise SessionError(f"version {version} was given up")
        return report

    def update(self, version: int) -> StoreUpdate:
        """An update to ``version``, as a context manager; leaving it hands the version to the publisher.

        An exception inside publishes nothing. What goes wrong behind the training step is raised by
        the next update, :meth:`wait` or :meth:`close`; that version then does not exist.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise ConfigError(f"version {version!r} must be an integer >= 0")
        if self._closed:
            raise ConfigError("the sender is closed")
        return StoreUpdate(self, version)

    def wait(self, limit_s: float | None = None) -> PublishReport | None:
        """Wait until the version under way is visible; its report, None if there is none.

        Raises what its publishing raised, or :class:`DeadlineError`.
        """
        pending, limit_s = self._pending, limit_s or self.options.commit_timeout_s
        if pending is None:
            return None
        try:
            report = pending.result(timeout=limit_s)
        except FutureTimeout:
            if pending.done():
                raise
            raise DeadlineError(str(self.store.path), "publish", limit_s, limit_s) from None
        except BaseException:
            self._pending = None  # raised once
            raise
        self._pending = None
        return report

    def _wait_until_advanced(self) -> None:
        """Until the copy is the version that is visible: the next one is compared with that."""
        advanced, self._advanced = self._advanced, None
        limit_s = self.options.commit_timeout_s
        if advanced is None:
            return
        try:
            advanced.result(timeout=limit_s)
        except FutureTimeout:
            self._advanced = advanced
            raise DeadlineError(str(self.store.path), "advance", limit_s, limit_s) from None

    def wait_for_upkeep(self, limit_s: float = 600.0) -> None:
        """Wait until folds, anchors and collection of what was published are done."""
        if self._upkeep is not None:
            self._upkeep.result(timeout=limit_s)

    def close(self) -> None:
        """Wait for what is under way and release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._worker.submit(self._release)  # behind the upkeep, which may need it
            self._worker.shutdown(wait=False)
            self._collector.forget()

    def _release(self) -> None:
        self._publisher.close()

    def __enter__(self) -> StoreSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, version: int, parts: Sequence[LocalTensors]) -> tuple[Encoded, int]:
        """What changed, and the bytes of all weights."""
        weights: dict[str, Any] = {}
        for tensors in parts:
            weights |= placed_weights(tensors, self.options, self._threads, self._cutter)
        total_bytes = sum(w.meta.num_bytes for w in weights.values())
        return self._publisher.encode(version, weights), total_bytes

    def _entering(self) -> None:
        """An update is entered."""

    def _give_up(self, version: int, why: str) -> None:
        """The version will not be."""

    def _commit(self, encoded: Encoded) -> VersionManifest:
        """Make it visible."""
        return self._publisher.make_visible(encoded)

    def _advance(self, encoded: Encoded, manifest: VersionManifest) -> None:
        """It is visible whatever happens here; if the copy cannot follow, the next one is full."""
        try:
            self._publisher.advance(encoded, manifest.target)
        except Exception as error:  # too little memory, too
            _LOG.warning("after version %d, which is visible: %s", encoded.version, error)

    # --- behind the training step -------------------------------------------------------------------

    def _publish_later(self, encoded: Encoded, make: Callable[..., PublishReport]) -> None:
        visible: list[VersionManifest] = []

        def publish() -> PublishReport:
            start_s = time.perf_counter()
            visible.append(self._commit(encoded))
            return make(visible[0], time.perf_counter() - start_s)

        def advance() -> None:
            for manifest in visible:
                self._advance(encoded, manifest)

        self._pending = self._worker.submit(publish)
        self._advanced = self._worker.submit(advance)  # readers need not wait for it
        self._upkeep = self._worker.submit(self._keep_up, encoded.version)

    def _keep_up(self, version: int) -> None:
        """A failure here costs nobody a version: it is logged, and tried again the next time."""
        options = self.options
        steps: list[Callable[[], object]] = []
        if self._is_due(version, options.fold_every):
            steps.append(lambda: self._fold(version))
        if self._is_due(version, options.anchor_every):
            steps.append(self._anchor)
        if options.keep:
            steps.append(lambda: collect(self.store, keep=options.keep, grace_s=options.grace_s))
        for step in steps:
            try:
                step()
            except (WeightSyncError, OSError) as error:
                _LOG.warning("upkeep of %s at version %d: %s", self.store.path, version, error)

    def _is_due(self, version: int, every: int) -> bool:
        if not every or self.store.latest() != version:
            return False
        return len(self.store.versions()) % every == 0

    def _fold(self, version: int) -> None:
        """One delta in place of the last ``fold_every``, if those are deltas."""
        versions = self.store.versions()
        base = versions[max(len(versions) - 1 - self.options.fold_every, 0)]
        chain = self.store.route(self.store.manifest(base).target, version)
        if len(chain) > 1 and not any(manifest.is_full for manifest in chain):
            fold(self.store, base, version)

    def _anchor(self) -> None:
        latest = self.store.latest()
        if latest is not None and not self.store.manifest(latest).is_full:
            self._publisher.anchor()


class StoreUpdate:
    """One version being sent. ``report`` waits until it is visible."""

    def __init__(self, sender: StoreSender, version: int) -> None:
        self._sender, self.version = sender, version
        self._encoded: Encoded | None = None
        self._future: Future[PublishReport] | None = None
        self._dropped: dict[str, str] = {}
        self._on_host: Mapping[str, int] = {}
        self._phases: dict[str, float] = {}
        self._waited_s = self._encode_s = 0.0
        self._total_bytes = 0

    def __enter__(self) -> StoreUpdate:
        if self._sender._open is not None:
            raise SessionError(
                f"an update to version {self._sender._open.version} is open; leave it first"
            )
        start_s = time.perf_counter()
        self._sender._entering()
        try:
            self._sender.wait()
            self._sender._wait_until_advanced()
        except BaseException as error:
            self._sender._give_up(self.version, f"{type(error).__name__}: {error}")
            raise
        self._waited_s = time.perf_counter() - start_s
        self._sender._open = self
        return self

    def send(self, source: Any) -> None:
        """Everything of the model, in one call: a module, a mapping, a list, or a generator of (name,
        tensor). Returns when the weights may change. What a generator yields is copied first."""
        if self._sender._open is not self:
            raise SessionError("send is only possible inside `with sender.update(...)`")
        if self._encoded is not None:
            raise SessionError("a version of a store is sent in one call")
        start_s = time.perf_counter()
        parts = []
        for tensors, dropped in self._sender._collector.collect(source):
            self._dropped.update(dropped)
            parts.append(tensors)
        collected_s = time.perf_counter() - start_s
        self._encoded, self._total_bytes = self._sender._encode(self.version, parts)
        self._on_host, self._phases = self._encoded.on_host, self._encoded.phases
        self._phases["collect"] = collected_s
        self._encode_s = time.perf_counter() - start_s

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sender._open = None
        if kind is not None or self._encoded is None:
            why = "nothing was sent" if kind is None else kind.__name__
            self._sender._give_up(self.version, why)
        if kind is not None:
            return
        if self._encoded is None:
            raise SessionError(f"nothing was sent for version {self.version}")
        self._sender._publish_later(self._encoded, self._report)
        self._future, self._encoded = self._sender._pending, None

    @property
    def report(self) -> PublishReport | None:
        """Waits until the version is visible; None if it was given up. Raises as
        :meth:`StoreSender.wait`."""
        if self._future is None:
            return None
        return self._future.result(timeout=self._sender.options.commit_timeout_s)

    @property
    def is_published(self) -> bool:
        """Whether it is visible; never waits."""
        future = self._future
        return future is not None and future.done() and future.exception() is None

    def _report(self, manifest: VersionManifest, publish_s: float) -> PublishReport:
        return PublishReport(
            version=self.version,
            run_id=self._sender.run_id,
            kind=manifest.kind.value,
            root=manifest.target.root,
            payload_bytes=manifest.num_bytes,
            total_bytes=self._total_bytes,
            num_changed=manifest.num_changed,
            waited_s=self._waited_s,
            encode_s=self._encode_s,
            publish_s=publish_s,
            dropped=self._dropped,
            on_host=self._on_host,
            phases=self._phases,
        )


def store_sender(
    places: Sequence[Any],
    run_id: str | None,
    rules: Sequence[Rule] | None,
    options: Mapping[str, Any],
    meeting: Meeting,
) -> Any:
    """What ``Sender.connect(transport="disk-delta")`` gives. Raises :class:`ConfigError`."""
    if len(places) != 1 or not isinstance(places[0], str | os.PathLike):
        raise ConfigError(
            f"transport 'disk-delta' publishes to one store: give its directory, got {places!r:.200}"
        )
    known = StoreOptions.__dataclass_fields__
    if unknown := sorted(options.keys() - set(known)):
        raise ConfigError(f"unknown options {unknown}; known for a store: {', '.join(known)}")
    found = run_id if run_id is not None else f"{os.uname().nodename}-{secrets.token_hex(6)}"
    if meeting.world_size > 1:
        from weightsync.store_ranks import rank_store_sender

        return rank_store_sender(
            os.fspath(places[0]), found, StoreOptions(**options), rules, meeting
        )
    return StoreSender(places[0], found, StoreOptions(**options), rules)


__all__ = [
    "PublishReport",
    "SnapshotPlace",
    "StoreOptions",
    "StoreSender",
    "StoreUpdate",
    "store_sender",
]
