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
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

import numpy as np

from weightsync import config
from weightsync.binding import Spot, spot_of
from weightsync.codec.spans import Bytes
from weightsync.collector import Collector
from weightsync.device_tables import CPU, DeviceMemory, bytes_at, segment_copy, synchronize
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    LayoutError,
    SessionError,
    WeightSyncError,
)
from weightsync.layout import PlacedBox, TensorLayout
from weightsync.live_tensor import LiveTensor
from weightsync.naming import Rule
from weightsync.ranks import Meeting
from weightsync.store import Publisher, Store, VersionManifest, collect, fold
from weightsync.store.cutting import Cuts, Cutter
from weightsync.store.pieces import Piece
from weightsync.store.publish import Encoded
from weightsync.store.weights import DeviceWeight, Weight
from weightsync.tables import dense_strides, segment_rows, table
from weightsync.tensors import LocalTensors
from weightsync.types import Box, CastPolicy, Convert, TensorMeta, item_bytes

_LOG = logging.getLogger(__name__)
BUCKET_BYTES: Final = 1 << 40  # a generator is one part: all of it is coded at once


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
    ``snapshot``: where weights of a GPU are compared with the last version. On the host they are copied
    there first; on the device a second copy of them is kept there (their size), and only what is
    published leaves it.
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
    because the device could not, by reason."""

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


class StoreSender:
    """Publishes what it is sent as versions of one run. A context manager; one thread at a time.

    Memory: a copy of the weights on the host (their size as stored), and the coded changes of one
    version. Weights on a device are copied to the host tensor by tensor, to be compared there, or with
    ``snapshot="device"`` kept there once more.
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
        self._upkeep: Future[None] | None = None
        self._open: StoreUpdate | None = None
        self._closed = False

    def _made_publisher(self) -> Publisher:
        return Publisher(self.store, **publisher_options(self.options, self._threads))

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
        return self._publisher.commit(encoded)

    # --- behind the training step -------------------------------------------------------------------

    def _publish_later(self, encoded: Encoded, make: Callable[..., PublishReport]) -> None:
        def publish() -> PublishReport:
            start_s = time.perf_counter()
            manifest = self._commit(encoded)
            return make(manifest, time.perf_counter() - start_s)

        self._pending = self._worker.submit(publish)
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
        self._encoded, self._total_bytes = self._sender._encode(self.version, parts)
        self._on_host = self._encoded.on_host
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


# --- tensors of a trainer, dense ----------------------------------------------------------------------


def placed_weights(
    tensors: LocalTensors,
    options: StoreOptions,
    num_threads: int,
    cutter: Cutter,
    owned: Sequence[Piece] | None = None,
) -> dict[str, Weight] | dict[str, DeviceWeight]:
    """Each piece of each tensor in the form that is stored: where it lies if it is dense there and keeps
    its dtype, else a copy; ``owned`` are this rank's, if there are several. On the host, or if the
    snapshot is to be on the one device of all, on that.

    Raises :class:`ConfigError` for a part of a tensor, and for weights of several devices then.
    """
    by_region = {a.region: a.ptr for a in tensors.addresses}
    devices = {a.region: a.device for a in tensors.addresses}
    used = {p.region for entry in tensors.layout.tensors for p in entry.placed}
    kinds = sorted({devices[region] for region in used})
    is_on_device = options.snapshot is SnapshotPlace.DEVICE and kinds != [CPU]
    if is_on_device and len(kinds) > 1:
        raise ConfigError(
            f"snapshot='device' needs all weights on one device, they lie on {', '.join(kinds)}; "
            "snapshot='host' takes them all"
        )
    by_name: dict[str, list[Piece]] = {}
    for piece in owned or ():
        by_name.setdefault(piece.tensor.name, []).append(piece)
    found: dict[str, Any] = {}
    for device in kinds:
        synchronize(device)
    for entry in tensors.layout.tensors:
        meta = entry.wire_forms[-1]  # the cast one, where there is one
        pieces: Sequence[Piece]
        if owned is not None:
            pieces = by_name.get(entry.name, ())
        elif len(entry.placed) != 1 or entry.placed[0].box != Box.whole(entry.shape):
            raise ConfigError(f"{entry.name!r} is cut over ranks; gather it before it is sent")
        else:
            pieces = cutter.pieces(meta)
        for piece in pieces:
            placed = _holder(entry, piece)
            whole = spot_of(placed, by_region)
            device = devices[placed.region]
            spot = replace(whole, box=Box.whole(piece.box.shape), ptr=whole.at(piece.box))
            found[piece.meta.name] = _placed(
                piece, spot, device, (tensors, is_on_device, num_threads)
            )
    return found


def _holder(entry: TensorLayout, piece: Piece) -> PlacedBox:
    """What holds the piece here."""
    for placed in entry.placed:
        if placed.box == piece.box or placed.box.intersect(piece.box) == piece.box:
            return placed
    raise LayoutError(f"{piece.meta.name!r} lies in no box of this rank")


def _placed(
    piece: Piece, spot: Spot, device: str, how: tuple[LocalTensors, bool, int]
) -> Weight | DeviceWeight:
    owner, is_on_device, num_threads = how
    box_of = None if piece.is_whole else piece
    if is_on_device:
        ptr, memory = _dense_there(piece.meta, spot, device, num_threads)
        return DeviceWeight(piece.meta, ptr, device, (owner, memory), box_of)
    return Weight(piece.meta, _dense(piece.meta, spot, device, num_threads), owner, box_of)


def _dense(meta: TensorMeta, spot: Spot, device: str, num_threads: int) -> Bytes:
    """The wire form of one tensor in host memory, uint8 [meta.num_bytes]."""
    live = LiveTensor(meta, [spot])
    if spot.dtype == meta.dtype and live.is_dense and device == CPU:
        return live.bytes()
    ptr, memory = _dense_there(meta, spot, device, num_threads)
    if device == CPU:
        return memory  # type: ignore[no-any-return]
    data = bytes_at(ptr, meta.num_bytes, device)
    if isinstance(memory, DeviceMemory):
        memory.close()
    return data


def _dense_there(meta: TensorMeta, spot: Spot, device: str, num_threads: int) -> tuple[int, Any]:
    """The address of the wire form of one tensor on its device, and the memory of a copy, if one had
    to be made."""
    if spot.dtype == meta.dtype and LiveTensor(meta, [spot]).is_dense:
        return spot.ptr, None
    convert = Convert.NONE if spot.dtype == meta.dtype else Convert.FP32_TO_BF16
    memory: Any = np.empty(meta.num_bytes, dtype=np.uint8)
    if device != CPU and meta.num_bytes:
        memory = DeviceMemory(meta.num_bytes, device)
    ptr = memory.ptr if isinstance(memory, DeviceMemory) else memory.ctypes.data
    item = item_bytes(meta.dtype)
    rows = segment_rows(
        meta.shape,
        source=(spot.ptr, spot.strides_bytes, item_bytes(spot.dtype)),
        target=(ptr, dense_strides(meta.shape, item), item),
        convert=convert,
    )
    where = device if isinstance(memory, DeviceMemory) else CPU
    segment_copy(table(rows, 13), where).run(num_threads)
    return ptr, memory


__all__ = [
    "PublishReport",
    "SnapshotPlace",
    "StoreOptions",
    "StoreSender",
    "StoreUpdate",
    "store_sender",
]
