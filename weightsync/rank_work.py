"""The work of one engine rank on bytes: what each job of the session does.

Runs on one thread at a time. Bytes land in a :class:`Landing`: the staging copy, or (in place) the
live slots, with opaque slots always staged. Everything costly is kept between refits: staging
memory, opened publications, prepared reads, unpack and digest tables.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from weightsync.binding import (
    Spot,
    Table,
    cuts_of,
    decode_entries,
    direct_table,
    landed_parts,
    place_table,
    plan_staging,
    read_digest_rows,
    slot_spots,
    unpack_table,
)
from weightsync.bucket import as_dtype
from weightsync.coverage import Coverage, PlanShare, SlotIndex, plan_share
from weightsync.deadline import CancelToken, Deadline
from weightsync.device_tables import (
    CPU,
    Memory,
    SegmentCopy,
    bytes_at,
    device_of,
    private_memory,
    read_bytes,
    segment_copy,
)
from weightsync.digest import DigestTable
from weightsync.engine import EngineAdapter
from weightsync.errors import (
    CancelledError,
    IntegrityError,
    PeerLostError,
    ProtocolError,
    SessionError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.layout import Layout
from weightsync.manifest import Digests, Manifest, ManifestBasis, manifest_basis
from weightsync.plan import RefitPlan, check_plan
from weightsync.session import Job, JobDone, SessionSpec, StartJob, Version
from weightsync.transports.base import PreparedRead, TargetEndpoint
from weightsync.types import (
    Contract,
    PauseMode,
    Placement,
    RegionAddress,
    TensorMeta,
    VerifyMode,
)
from weightsync.watch import Look

_LOG = logging.getLogger(__name__)
_NUM_KEPT = 64
#: So many tensors are looked at closely within a fraction of a millisecond.
_FEW_TENSORS = 2048

K = TypeVar("K")
V = TypeVar("V")


class Kept(Generic[K, V]):
    """A small cache, least recently used out first."""

    def __init__(self, num_kept: int = _NUM_KEPT) -> None:
        self._items: OrderedDict[K, V] = OrderedDict()
        self._num_kept = num_kept

    def get(self, key: K, make: Callable[[], V]) -> V:
        if key in self._items:
            self._items.move_to_end(key)
            return self._items[key]
        value = self._items[key] = make()
        while len(self._items) > self._num_kept:
            self._items.popitem(last=False)
        return value

    def clear(self) -> None:
        self._items.clear()


@dataclass(frozen=True)
class ReceiverHooks:
    """Called on the thread that runs jobs; each may wait until the engine's loop is ready.

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
class _Staging:
    """What a placement needs, made once."""

    memory: Memory | None
    landing: Landing
    regions: tuple[RegionAddress, ...]  # where reads land, under numbers of their own


@dataclass
class _Open:
    """The open session of this rank."""

    spec: SessionSpec
    landing: Landing
    pin: object | None  # keeps the staging copy mapped while a job may use it
    coverage: Coverage
    moves: list[RefitPlan] = field(default_factory=list)  # that ended, in order
    read_digests: list[Digests | None] = field(default_factory=list)  # of each, taken while reading
    manifest: Manifest | None = None
    paused_s: float | None = None  # when the pause began
    touched: bool = False
    stats: SessionStats = field(default_factory=SessionStats)


@dataclass(frozen=True)
class _PlacedDigests:
    """A digest table and the place of each of its names in the manifest."""

    table: DigestTable
    places: Any  # int64 [names]


class RankWork:
    """Carries out jobs against one adapter and one transport endpoint."""

    def __init__(
        self,
        adapter: EngineAdapter,
        rank: int,
        num_threads: int,
        hooks: ReceiverHooks | None = None,
    ) -> None:
        self._adapter = adapter
        self._hooks = ReceiverHooks() if hooks is None else hooks
        self._rank = rank
        self._threads = num_threads
        self.layout: Layout = adapter.layout()
        self._addresses = list(adapter.addresses())
        self._device = device_of(self._addresses, "the engine")
        by_region = {a.region: a.ptr for a in self._addresses}
        self._slots = slot_spots(self.layout, rank, by_region)
        self._index = SlotIndex(self.layout, rank)
        is_small = len(self._index) <= _FEW_TENSORS
        self._look = Look.EVERYTHING if is_small else Look.IDENTITY
        self._looker = ThreadPoolExecutor(1, "weightsync-look")
        self._staging: dict[Placement, _Staging] = {}
        self._reads: Kept[tuple[str, str, Placement, bool], PreparedRead] = Kept()
        self._unpacks: Kept[tuple[str, bytes, int, Placement], tuple[Table, SegmentCopy]] = Kept(
            1024
        )
        self._bases: Kept[tuple[str, ...], ManifestBasis] = Kept(8)
        self._digests: Kept[tuple[Any, ...], _PlacedDigests] = Kept(8)
        self._places: Kept[tuple[Any, ...], tuple[SegmentCopy, SegmentCopy]] = Kept(8)
        self.plans: dict[str, RefitPlan] = {}
        self._shares: dict[str, PlanShare] = {}
        self._sources: dict[str, Layout] = {}
        self._published: tuple[str, dict[str, Any]] | None = None
        self.endpoint: TargetEndpoint | None = None
        self._open: _Open | None = None
        self.stats = SessionStats()

    @property
    def device(self) -> str:
        """Where the engine's tensors lie."""
        return self._device

    # --- set-up, between sessions -----------------------------------------------------------------

    def add_plan(self, plan: RefitPlan, source: Layout) -> None:
        """Accept a plan after checking it against both layouts."""
        check_plan(plan, source, self.layout)
        # The newest last, as the sender counts: both sides must forget the same one first.
        self.plans.pop(plan.digest, None)
        self.plans[plan.digest] = plan
        self._sources[plan.digest] = source
        self._shares[plan.digest] = plan_share(plan, self._index)
        while len(self.plans) > _NUM_KEPT:
            oldest = next(iter(self.plans))
            del self.plans[oldest], self._sources[oldest], self._shares[oldest]

    def set_endpoint(self, endpoint: TargetEndpoint | None) -> None:
        """Another peer: what was opened of the former one is worth nothing."""
        former, self.endpoint = self.endpoint, endpoint
        if former is not None and former is not endpoint:
            former.close()
        self._reads.clear()  # after that: what they hold is the endpoint's, which now is at rest
        self._published = None

    def ready_staging(self, placement: Placement) -> None:
        """Make the staging memory now, so that no refit pays for it. Raises CapacityError."""
        if placement in self._staging:
            return
        plan = plan_staging(self.layout, self._rank, placement)
        memory = private_memory(plan.num_bytes, self._device) if plan.num_bytes else None
        landing = dict(self._slots) if placement is Placement.IN_PLACE else {}
        regions: list[RegionAddress] = []
        if memory is not None:
            landing |= plan.spots(self.layout, memory.ptr)
            regions.append(RegionAddress(0, memory.ptr, memory.num_bytes, self._device))
        if placement is Placement.IN_PLACE:
            shift = len(regions)
            regions += [replace(a, region=a.region + shift) for a in self._addresses]
        self._staging[placement] = _Staging(memory, landing, tuple(regions))

    def close(self) -> None:
        """Let go of everything; what a job still works on stays mapped for it."""
        self.set_endpoint(None)
        self._looker.shutdown(wait=False)
        if self._open is None:  # else a job may look into them
            self._digests.clear()
            self._places.clear()
        for staging in self._staging.values():
            if staging.memory is not None:
                staging.memory.close()
        self._staging.clear()

    # --- jobs ---------------------------------------------------------------------------------------

    def run(self, job: StartJob, token: CancelToken) -> JobDone:
        """Do one job; an error of any kind becomes part of the result."""
        error: WeightSyncError | None = None
        try:
            _JOBS[job.job](self, job, token)
        except WeightSyncError as raised:
            error = raised
        except Exception as raised:  # the border: adapters and hooks are foreign code
            error = WeightSyncError(f"{job.job.value}: {type(raised).__name__}: {raised}")
        touched = self._open is not None and self._open.touched
        return JobDone(job.job, job.spec.session_id, error=error, touched=touched)

    def _deadline(self, spec: SessionSpec, limit_s: float, stage: str, token: Any) -> Deadline:
        return Deadline(limit_s, peer=f"trainer run {spec.run_id}", stage=stage, token=token)

    def _session(self, job: StartJob) -> _Open:
        if self._open is None or self._open.spec.session_id != job.spec.session_id:
            raise SessionError(f"session {job.spec.session_id!r} is not open on rank {self._rank}")
        return self._open

    def _do_open(self, job: StartJob, token: CancelToken) -> None:
        reach("engine.open")
        spec = job.spec
        self._hooks.on_begin(spec)
        self.ready_staging(spec.placement)
        staging = self._staging[spec.placement]
        pin = None if staging.memory is None else staging.memory.pin()
        coverage = Coverage(self._index)
        self._open = opened = _Open(spec, staging.landing, pin, coverage)
        self.stats = opened.stats
        if spec.placement is Placement.IN_PLACE:
            self._pause(opened, spec.deadline_s, token)
        self._check_fingerprint("at the beginning of an update", self._look)
        self._adapter.begin_update(spec)
        reach("engine.opened")

    def _do_move(self, job: StartJob, token: CancelToken) -> None:
        opened = self._session(job)
        reach("engine.move")
        plan = self.plans.get(str(job.payload.get("plan_digest")))
        if plan is None:
            raise ProtocolError("the plan of this move was never handed over; connect again")
        if self.endpoint is None:
            raise PeerLostError("the transport of this run is not attached; connect again")
        opened.coverage.expect(job.move_id, self._shares[plan.digest])
        deadline = self._deadline(opened.spec, opened.spec.deadline_s, "move", token)
        digests: Digests | None = None
        with opened.stats.timed("move"), self._looking("while reading"):
            if plan.contract is Contract.DIRECT:
                digests = self._read_direct(opened, job, plan, deadline)
            else:
                self._receive_stream(opened, job, plan, deadline)
        opened.coverage.settle()
        opened.moves.append(plan)
        opened.read_digests.append(digests)
        opened.stats.num_bytes += plan.total_bytes
        reach("engine.moved")

    def _read_direct(
        self, opened: _Open, job: StartJob, plan: RefitPlan, deadline: Deadline
    ) -> Digests | None:
        """Returns the digests of ``plan.metas`` if they were taken on the way."""
        if self.endpoint is None:
            raise PeerLostError("the transport of this run is not attached; connect again")
        direct = self.endpoint.direct()
        epoch, placement = str(job.payload.get("epoch")), opened.spec.placement
        descriptor = self._publication(epoch, job.payload.get("publication"))
        with opened.stats.timed("register"):
            addresses = direct.open(descriptor, self._staging[placement].regions, deadline)
        # What is read back in place need not be digested twice.
        is_read_back = (
            opened.spec.verify is VerifyMode.READ_BACK and placement is Placement.IN_PLACE
        )
        has_digests = direct.digests_reads and not is_read_back

        def prepare() -> PreparedRead:
            source = self._sources[plan.digest]
            rows = direct_table(plan, source, addresses, opened.landing, self._rank)
            digested = None
            if has_digests:
                digested = read_digest_rows(plan, source, addresses, self._rank)
            return direct.prepare(rows, digested)

        with opened.stats.timed("register"):
            key = (plan.digest, epoch, placement, has_digests)
            prepared = self._reads.get(key, prepare)
        self._touch(opened)
        start_s = time.perf_counter()
        direct.read(prepared, deadline)
        spent_s = time.perf_counter() - start_s
        if prepared.device_s is not None:
            opened.stats.add("read_device", prepared.device_s)
        opened.stats.buckets.append((prepared.num_bytes, len(plan.transfers), spent_s))
        opened.coverage.all_arrived(job.move_id)
        return prepared.digests

    def _publication(self, epoch: str, descriptor: Any) -> dict[str, Any]:
        if isinstance(descriptor, dict):
            self._published = (epoch, descriptor)
        if self._published is None or self._published[0] != epoch:
            raise ProtocolError(f"publication {epoch!r} was never described here; publish again")
        return self._published[1]

    def _touch(self, opened: _Open) -> None:
        """From here on an abort leaves live weights that nobody sent whole."""
        if opened.spec.placement is Placement.IN_PLACE:
            opened.touched = True

    def _receive_stream(
        self, opened: _Open, job: StartJob, plan: RefitPlan, deadline: Deadline
    ) -> None:
        if self.endpoint is None:
            raise PeerLostError("the transport of this run is not attached; connect again")
        if not any(t.target_rank == self._rank for t in plan.transfers):
            return  # nobody fills a slot for this rank
        stream = self.endpoint.stream(deadline, self._device)
        stream.begin_move(opened.spec.session_id)
        while True:
            header, slot = stream.receive(deadline)
            if header.move_id != job.move_id:
                stream.release(slot)
                continue
            start_s = time.perf_counter()
            words_ptr = slot.ptr + header.metadata_offset_bytes
            blob = read_bytes(words_ptr, header.metadata_bytes, self._device)
            # With the size: words that fit one slot may point outside another.
            key = (plan.digest, blob, header.data_bytes, opened.spec.placement)

            def make(
                blob: bytes = blob, data: int = header.data_bytes
            ) -> tuple[Table, SegmentCopy]:
                entries = decode_entries(blob, plan, data)
                rows = unpack_table(plan, cuts_of(entries), opened.landing)
                return entries, segment_copy(rows, self._device)

            entries, unpack = self._unpacks.get(key, make)
            opened.coverage.arrived(job.move_id, entries)
            self._touch(opened)
            self._copy(unpack, slot.ptr, deadline)
            stream.release(slot)
            spent_s = time.perf_counter() - start_s
            opened.stats.buckets.append((header.data_bytes, len(entries), spent_s))
            reach("engine.bucket")
            if header.is_last:
                return

    def _copy(self, unpack: SegmentCopy, slot_ptr: int, deadline: Deadline) -> None:
        cancel = None if deadline.token is None else deadline.token.native_flag
        done = unpack.run(self._threads, source_base=slot_ptr, cancel=cancel)
        if done != unpack.num_bytes:
            deadline.check()
            raise CancelledError("a copy was given up")

    def _do_prepare(self, job: StartJob, token: CancelToken) -> None:
        opened = self._session(job)
        reach("engine.prepare")
        manifest = Manifest.from_json(job.payload.get("manifest"), self._basis(opened))
        names = opened.spec.scope.names
        if names is not None:
            names = frozenset(self.layout.resolve(names, "engine"))
        opened.coverage.check_scope(names)
        with opened.stats.timed("verify"):
            manifest.check(self._digest_landed(opened, manifest), "what landed")
        opened.manifest = manifest
        token_check = self._deadline(opened.spec, opened.spec.deadline_s, "prepare", token)
        token_check.check()
        self._adapter.prepare()
        self._hooks.on_prepare(opened.spec)
        reach("engine.prepared")

    def _basis(self, opened: _Open) -> ManifestBasis:
        """Of the moves so far."""

        def make() -> ManifestBasis:
            return manifest_basis((plan.digest, plan.metas) for plan in opened.moves)

        return self._bases.get(tuple(plan.digest for plan in opened.moves), make)

    def _digest_landed(self, opened: _Open, manifest: Manifest) -> Digests:
        taken = [d for d in opened.read_digests if d is not None]
        if len(taken) == len(opened.moves):
            return np.concatenate(taken) if taken else manifest.digests
        found = np.zeros_like(manifest.digests)
        self._digest_at(opened, opened.landing, "landed", found)
        return found

    def _digest_at(self, opened: _Open, spots: Landing, what: str, found: Digests) -> None:
        """Digests of what lies at ``spots``, into their places of the manifest."""
        basis = self._basis(opened)

        def make() -> _PlacedDigests:
            parts = []
            for plan in opened.moves:
                here = [
                    t
                    for t in plan.transfers
                    if t.target_rank == self._rank
                    and (plan.tensors[t.tensor].target, t.target_placed) in spots
                ]
                parts += landed_parts(plan, spots, here)
            table = DigestTable(parts, self._device)
            return _PlacedDigests(table, basis.places(table.names))

        placed = self._digests.get((what, opened.spec.placement, *basis.plans), make)
        found[placed.places] = placed.table.values(self._threads)

    def _do_place(self, job: StartJob, token: CancelToken) -> None:
        opened = self._session(job)
        spec = opened.spec
        reach("engine.place")
        self._hooks.on_commit(spec)
        # Decided: nothing cancels from here on, only the limit of the commit ends it.
        if spec.placement is Placement.STAGED:
            self._pause(opened, spec.commit_timeout_s, None)
            with opened.stats.timed("place"):
                self._place_staged(opened)
        self._write_opaque(opened)
        self._adapter.commit(Version(spec.run_id, spec.version))
        if spec.pause_mode is not PauseMode.IN_PLACE:  # which keeps what requests have computed
            self._adapter.flush_cache()
        self._check_fingerprint("after an update", self._look)
        if spec.verify is VerifyMode.READ_BACK:
            with opened.stats.timed("read_back"):
                self._read_back(opened)
        reach("engine.placed")

    def _place_staged(self, opened: _Open) -> None:
        digests = (opened.spec.placement, *(plan.digest for plan in opened.moves))

        def make() -> tuple[SegmentCopy, SegmentCopy]:
            arrived = (self._index.keys[n] for n in opened.coverage.complete.tolist())
            keys = [key for key in arrived if key in self._slots]
            rows = place_table(self.layout, keys, opened.landing, self._slots)
            half = len(rows) // 2
            return (
                segment_copy(rows[:half], self._device),
                segment_copy(rows[half:], self._device),
            )

        first, second = self._places.get(digests, make)
        opened.touched = True
        with self._looking("while placing"):
            first.run(self._threads)
        reach("engine.half_placed")
        second.run(self._threads)

    def _write_opaque(self, opened: _Open) -> None:
        for i, j in self._opaque_keys(opened):
            name = self.layout.tensors[i].name
            spot = opened.landing[i, j]
            meta = TensorMeta(name, spot.dtype, spot.box.shape)
            opened.touched = True
            landed = (
                _bytes_at(spot.ptr, meta.num_bytes)
                if self._device == CPU
                else bytes_at(spot.ptr, meta.num_bytes, self._device)
            )
            self._adapter.write(name, as_dtype(landed, meta))

    def _read_back(self, opened: _Open) -> None:
        """Digest the live tensors, unless (affine, in place) that is what was verified already."""
        if opened.manifest is None:
            raise SessionError("a session without a manifest cannot be read back")
        manifest = opened.manifest
        found = manifest.digests.copy()  # in place these are what was read back already
        if opened.spec.placement is Placement.STAGED:
            self._digest_at(opened, self._slots, "live", found)
        opaque = [self.layout.tensors[i].name for i, _ in self._opaque_keys(opened)]
        if opaque:
            live = self._adapter.digest(opaque)
            found[manifest.basis.places(live)] = list(live.values())
        manifest.check(found, "live tensors after the update")

    def _opaque_keys(self, opened: _Open) -> list[tuple[int, int]]:
        arrived = opened.coverage.complete
        return [self._index.keys[n] for n in arrived[self._index.is_opaque[arrived]].tolist()]

    def _do_resume(self, job: StartJob, token: CancelToken) -> None:
        reach("engine.resume")
        self._unpause()
        self._open = None
        reach("engine.resumed")

    def _do_discard(self, job: StartJob, token: CancelToken) -> None:
        reach("engine.discard")
        taint = job.taint
        try:
            if self._open is not None:
                self._adapter.abort()
        except BaseException as error:
            taint = taint or f"an update could not be given up: {error}"
            raise
        finally:
            if taint is not None:  # before a step can start
                self._adapter.refuse(taint)
            self._call_on_abort(job.spec)
            self._unpause()
            self._open = None

    def _call_on_abort(self, spec: SessionSpec) -> None:
        if self._open is None:
            return
        try:
            self._hooks.on_abort(spec)
        except Exception:  # fencing must not depend on foreign code
            _LOG.exception("on_abort of session %s raised", spec.session_id)

    def digest_live(self, names: Sequence[str]) -> dict[str, int]:
        """Digests of live tensors, read back at a step boundary."""
        is_paused = self._open is not None and self._open.paused_s is not None
        if not is_paused:
            deadline = Deadline(30.0, peer="the engine's own loop", stage="pause")
            self._adapter.pause(PauseMode.IN_PLACE, deadline)
        try:
            wanted = dict.fromkeys(self.layout.resolve(names, "engine"))  # tied names are one
            return dict(self._adapter.digest(list(wanted)))
        finally:
            if not is_paused:
                self._adapter.resume()

    # --- small parts --------------------------------------------------------------------------------

    def _pause(self, opened: _Open, limit_s: float, token: CancelToken | None) -> None:
        deadline = Deadline(limit_s, peer="the engine's own loop", stage="pause", token=token)
        self._adapter.pause(opened.spec.pause_mode, deadline)
        opened.paused_s = time.perf_counter()

    def _unpause(self) -> None:
        opened = self._open
        self._adapter.resume()
        if opened is not None and opened.paused_s is not None:
            opened.stats.pause_s = time.perf_counter() - opened.paused_s
            opened.paused_s = None

    def _check_fingerprint(self, when: str, look: Look) -> None:
        """Nothing that a captured graph can see may ever move."""
        moved = list(self._adapter.moved(look))
        if moved:
            raise IntegrityError(
                f"{when}, {len(moved)} tensors of the engine are not where they were: {moved[:5]}; "
                "they must never be re-allocated while a receiver serves the engine"
            )

    @contextmanager
    def _looking(self, when: str) -> Iterator[None]:
        """A close look at many tensors takes milliseconds, so it is taken while bytes move."""
        if self._look is Look.EVERYTHING:  # they are few: it is taken before and after
            yield
            return
        looked = self._looker.submit(self._check_fingerprint, when, Look.EVERYTHING)
        try:
            yield
        finally:
            wait([looked])
        looked.result()


def _bytes_at(ptr: int, num_bytes: int) -> Any:
    """Memory as a NumPy array without a copy; valid while the memory is."""
    if not num_bytes:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(ptr))


_JOBS: dict[Job, Callable[[RankWork, StartJob, CancelToken], None]] = {
    Job.OPEN: RankWork._do_open,
    Job.MOVE: RankWork._do_move,
    Job.PREPARE: RankWork._do_prepare,
    Job.PLACE: RankWork._do_place,
    Job.RESUME: RankWork._do_resume,
    Job.DISCARD: RankWork._do_discard,
}
