"""The work of one engine rank on bytes: what each job of the session does.

Runs on one thread at a time. Bytes land in a :class:`Landing`: the staging copy, or (in place) the
live slots, with opaque slots always staged. Everything costly is kept between refits: staging
memory, opened publications, prepared reads, unpack and digest tables.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import numpy as np

from weightsync.binding import place_table, plan_staging, slot_spots
from weightsync.bucket import as_dtype
from weightsync.coverage import Coverage, PlanShare, SlotIndex
from weightsync.deadline import CancelToken, Deadline
from weightsync.device_tables import (
    CPU,
    SegmentCopy,
    bytes_at,
    device_of,
    private_memory,
    segment_copy,
)
from weightsync.engine import EngineAdapter
from weightsync.errors import (
    IntegrityError,
    SessionError,
    UnknownNameError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.glance import Glance
from weightsync.kept import Kept
from weightsync.layout import Layout
from weightsync.manifest import Manifest
from weightsync.plan import RefitPlan
from weightsync.rank_apply import DeltaApply
from weightsync.rank_digests import RankDigests
from weightsync.rank_moves import Beside, RankMoves
from weightsync.rank_session import OpenSession, ReceiverHooks, SessionStats, Staging
from weightsync.rank_store import RankStore
from weightsync.session import Job, JobDone, SessionSpec, StartJob, Version
from weightsync.transports.base import TargetEndpoint
from weightsync.types import PauseMode, Placement, RegionAddress, TensorMeta, VerifyMode
from weightsync.watch import Look

_LOG = logging.getLogger(__name__)
#: So many tensors are looked at closely within a fraction of a millisecond.
_FEW_TENSORS: Final = 2048


class RankWork:
    """Carries out jobs against one adapter and one transport endpoint."""

    def __init__(
        self,
        adapter: EngineAdapter,
        rank: int,
        num_threads: int,
        hooks: ReceiverHooks | None = None,
        layout: Layout | None = None,
    ) -> None:
        """``layout`` is the whole engine's; None: the adapter's is, for its one rank."""
        self._adapter = adapter
        self._hooks = ReceiverHooks() if hooks is None else hooks
        self._rank = rank
        self._threads = num_threads
        self.layout: Layout = adapter.layout() if layout is None else layout
        self._addresses = list(adapter.addresses())
        self._device = device_of(self._addresses, "the engine")
        by_region = {a.region: a.ptr for a in self._addresses}
        self._slots = slot_spots(self.layout, rank, by_region)
        self._index = SlotIndex(self.layout, rank)
        is_small = len(self._index) <= _FEW_TENSORS
        self._look = Look.EVERYTHING if is_small else Look.IDENTITY
        self._looker = ThreadPoolExecutor(1, "weightsync-look")
        self._staging: dict[Placement, Staging] = {}
        self._moves = RankMoves(self._index, self._device, num_threads)
        self._digests = RankDigests(self._device, num_threads)
        self._store = RankStore(self.layout, self._index, self._slots, self._device, num_threads)
        self._places: Kept[tuple[Any, ...], tuple[SegmentCopy, SegmentCopy]] = Kept(8)
        self._open: OpenSession | None = None
        self._foreseen: tuple[str, Any] = ("", None)
        self._version: Version | None = None  # that this rank resumed with
        self.stats = SessionStats()

    @property
    def device(self) -> str:
        """Where the engine's tensors lie."""
        return self._device

    # --- set-up, between sessions -----------------------------------------------------------------

    @property
    def endpoints(self) -> Sequence[TargetEndpoint]:
        """The ends of the transports that are attached, by trainer rank."""
        return [self._moves.endpoints[rank] for rank in sorted(self._moves.endpoints)]

    def add_plan(self, plan: RefitPlan, source: Layout) -> None:
        """See :meth:`RankMoves.add_plan`."""
        self._moves.add_plan(plan, source)

    def set_endpoint(self, endpoint: TargetEndpoint | None, source_rank: int = 0) -> None:
        """See :meth:`RankMoves.set_endpoint`."""
        self._moves.set_endpoint(endpoint, source_rank)

    def drop_endpoints(self) -> None:
        """See :meth:`RankMoves.drop_endpoints`."""
        self._moves.drop_endpoints()

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
        self._staging[placement] = Staging(memory, landing, tuple(regions))

    def close(self) -> None:
        """Let go of everything; what a job still works on stays mapped for it."""
        self.drop_endpoints()
        self._looker.shutdown(wait=False)
        self._digests.close()
        if self._open is None:  # else a job may look into them
            self._digests.clear()
            self._places.clear()
            self._store.close()
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

    def _session(self, job: StartJob) -> OpenSession:
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
        self._open = opened = OpenSession(spec, staging, pin, coverage)
        self.stats = opened.stats
        if spec.placement is Placement.IN_PLACE:
            self._pause(opened, spec.deadline_s, token)
        self._check_fingerprint("at the beginning of an update", self._look)
        self._adapter.begin_update(spec)
        reach("engine.opened")

    def _do_move(self, job: StartJob, token: CancelToken) -> None:
        opened = self._session(job)
        reach("engine.move")
        if job.payload.get("store") is not None:
            self._fetch(opened, job.payload["store"], token)
            return
        self._digests.drop_early(opened)  # more is about to land
        share = self._moves.expect(opened, job)
        deadline = self._deadline(opened.spec, opened.spec.deadline_s, "move", token)

        moves = [*opened.moves, share]
        opened.awaited = moves if self._is_whole(opened) else []

        def behind() -> None:
            if opened.awaited:
                self._digests.start_landed(opened, moves)

        with opened.stats.timed("move"), self._glance("while reading").around() as glance:
            beside = Beside(glance, behind, lambda: self._read_ahead(opened, opened.awaited))
            digests = self._moves.move(opened, job, share, deadline, beside)
        opened.coverage.settle()
        opened.moves.append(share)
        opened.read_digests.append(digests)
        if opened.awaited and opened.early is None and any(d is None for d in opened.read_digests):
            self._digests.start_landed(opened, opened.moves)
        opened.stats.num_bytes += int(share.num_bytes.sum())
        reach("engine.moved")

    def foresee(self, session_id: str, manifest: Any) -> None:
        """What the prepare of a session will bring, where its exchange says so ahead."""
        self._foreseen = (session_id, manifest)
        opened = self._open
        # Where moves are awaited the device is at work already, and its thread waits.
        if opened is not None and opened.awaited:
            self._read_ahead(opened, opened.awaited)

    def _read_ahead(self, opened: OpenSession, moves: Sequence[PlanShare]) -> None:
        session_id, value = self._foreseen
        if session_id != opened.spec.session_id or not moves:
            return
        with suppress(WeightSyncError):  # what is wrong with it is said in prepare
            manifest = Manifest.from_json(value, self._digests.basis(moves))
            opened.manifest_ahead = (value, manifest)

    def _manifest(self, opened: OpenSession, value: Any) -> Manifest:
        basis = self._digests.basis(opened.moves)
        read_from, ahead = opened.manifest_ahead
        if ahead is not None and read_from is value and ahead.basis.plans == basis.plans:
            return ahead
        return Manifest.from_json(value, basis)

    def _is_whole(self, opened: OpenSession) -> bool:
        """Whether nothing more can come in this session once the moves under way have ended."""
        try:
            return opened.coverage.is_whole_with_expected(self._scope_names(opened))
        except UnknownNameError:  # said in prepare, as of any scope
            return False

    def _scope_names(self, opened: OpenSession) -> frozenset[str] | None:
        names = opened.spec.scope.names
        return None if names is None else frozenset(self.layout.resolve(names, "engine"))

    def _fetch(self, opened: OpenSession, source: Mapping[str, Any], token: CancelToken) -> None:
        """Instead of a trainer's move: everything there is to take from a store."""
        if opened.fetched is not None:
            raise SessionError("a session takes one version from a store")
        deadline = self._deadline(opened.spec, opened.spec.deadline_s, "fetch", token)
        is_delta = opened.spec.placement is Placement.DELTA
        with opened.stats.timed("fetch"), self._looking("while reading"):
            if is_delta:
                opened.fetched = self._store.decode(source, deadline)
                opened.delta = DeltaApply(opened.fetched, self._device, self._threads)
            else:
                opened.fetched = self._store.land(opened, source, deadline)
                opened.coverage.brought_whole()
        for part, spent_s in opened.fetched.seconds.items():
            opened.stats.add(part, spent_s)
        opened.stats.num_bytes += opened.fetched.num_payload_bytes
        opened.stats.num_changed += opened.fetched.num_changed
        reach("engine.moved")

    def _do_prepare(self, job: StartJob, token: CancelToken) -> None:
        opened = self._session(job)
        reach("engine.prepare")
        if opened.fetched is not None:
            self._prepare_fetched(opened)
            return
        if opened.spec.placement is Placement.DELTA:
            raise SessionError(
                "a delta comes from a store; a trainer's update is staged or in place"
            )
        manifest = self._manifest(opened, job.payload.get("manifest"))
        opened.coverage.check_scope(self._scope_names(opened))
        with opened.stats.timed("verify"):
            manifest.check(self._digests.landed(opened, manifest), "what landed")
        opened.manifest = manifest
        token_check = self._deadline(opened.spec, opened.spec.deadline_s, "prepare", token)
        token_check.check()
        self._adapter.prepare()
        self._hooks.on_prepare(opened.spec)
        reach("engine.prepared")

    def _prepare_fetched(self, opened: OpenSession) -> None:
        """Of a delta all digests were compared while it was decoded, and what it writes is read back
        element by element: nothing else of the live tensors is looked at under the pause."""
        if opened.delta is None:
            with opened.stats.timed("verify"):
                landed = self._store.digest_table(opened.fetched, opened.staging.landing)
                self._store.check(opened.fetched, landed, "what landed")
            if opened.is_read_back and not opened.is_in_place:
                opened.fetched.read_back = self._store.live_table(opened.fetched)
        self._adapter.prepare()
        self._hooks.on_prepare(opened.spec)
        reach("engine.prepared")

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
        elif opened.delta is not None:
            self._place_delta(opened, opened.delta)
            return
        self._write_opaque(opened)
        self._finish_placing(opened)

    def _place_delta(self, opened: OpenSession, delta: DeltaApply) -> None:
        """Until the leader says to resume, what was overwritten is kept (see :meth:`_do_discard`)."""
        self._pause(opened, opened.spec.commit_timeout_s, None)
        with opened.stats.timed("place"), self._looking("while placing"):
            delta.put()
        opened.former_version = self._version
        self._finish_placing(opened)

    def _finish_placing(self, opened: OpenSession) -> None:
        spec = opened.spec
        opened.is_labelled = True
        self._adapter.commit(Version(spec.run_id, spec.version))
        if spec.pause_mode is not PauseMode.IN_PLACE:  # which keeps what requests have computed
            self._adapter.flush_cache()
        self._check_fingerprint("after an update", self._look)
        if spec.verify is VerifyMode.READ_BACK:
            with opened.stats.timed("read_back"):
                self._read_back(opened)
        reach("engine.placed")

    def _place_staged(self, opened: OpenSession) -> None:
        digests = (opened.spec.placement, *(share.plan.digest for share in opened.moves))

        def make() -> tuple[SegmentCopy, SegmentCopy]:
            arrived = (self._index.keys[n] for n in opened.coverage.complete.tolist())
            keys = [key for key in arrived if key in self._slots]
            rows = place_table(self.layout, keys, opened.staging.landing, self._slots)
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

    def _write_opaque(self, opened: OpenSession) -> None:
        for i, j in self._opaque_keys(opened):
            name = self.layout.tensors[i].name
            spot = opened.staging.landing[i, j]
            meta = TensorMeta(name, spot.dtype, spot.box.shape)
            opened.touched = True
            landed = (
                _bytes_at(spot.ptr, meta.num_bytes)
                if self._device == CPU
                else bytes_at(spot.ptr, meta.num_bytes, self._device)
            )
            self._adapter.write(name, as_dtype(landed, meta))

    def _read_back(self, opened: OpenSession) -> None:
        """Digest the live tensors, unless (affine, in place) that is what was verified already."""
        if opened.fetched is not None:
            self._read_back_fetched(opened)
            return
        if opened.manifest is None:
            raise SessionError("a session without a manifest cannot be read back")
        manifest = opened.manifest
        if opened.is_in_place and not self._index.has_opaque:
            return
        found = manifest.digests.copy()  # in place these are what was read back already
        if opened.spec.placement is Placement.STAGED:
            self._digests.at(opened, self._slots, "live", found)
        opaque = [self.layout.tensors[i].name for i, _ in self._opaque_keys(opened)]
        if opaque:
            live = self._adapter.digest(opaque)
            found[manifest.basis.places(live)] = list(live.values())
        manifest.check(found, "live tensors after the update")

    def _read_back_fetched(self, opened: OpenSession) -> None:
        """Digest the live tensors, where a table of them was made."""
        what, fetched = "live tensors after the update", opened.fetched
        if fetched.read_back is not None:
            self._store.check(fetched, fetched.read_back, what)
        opaque = self._store.opaque(fetched)
        if opaque:
            live = self._adapter.digest(list(opaque))
            self._store.compare(fetched, {opaque[name]: d for name, d in live.items()}, what)

    def _opaque_keys(self, opened: OpenSession) -> list[tuple[int, int]]:
        if not self._index.has_opaque:
            return []
        arrived = opened.coverage.complete
        return [self._index.keys[n] for n in arrived[self._index.is_opaque[arrived]].tolist()]

    def _do_resume(self, job: StartJob, token: CancelToken) -> None:
        reach("engine.resume")
        self._version = job.version
        self._unpause()
        if self._open is not None and self._open.delta is not None:
            self._open.delta.close()
        self._open = None
        reach("engine.resumed")

    def _do_discard(self, job: StartJob, token: CancelToken) -> None:
        reach("engine.discard")
        taint = job.taint
        try:
            if self._open is not None:
                self._digests.drop_early(self._open)
                self._take_back(self._open)
                self._adapter.abort()
        except BaseException as error:
            taint = taint or f"an update could not be given up: {error}"
            raise
        finally:
            if taint is not None:  # before a step can start
                self._adapter.refuse(taint)
            self._call_on_abort(job.spec)
            self._unpause()
            if self._open is not None and self._open.delta is not None:
                self._open.delta.close()
            self._open = None

    def _take_back(self, opened: OpenSession) -> None:
        """Undo what of a delta was written; from here on a failure leaves a mix."""
        delta = opened.delta
        if delta is None:
            return
        opened.touched = True
        is_undone = delta.take_back()
        if is_undone and opened.is_labelled:
            if opened.former_version is None:
                raise SessionError("the version before this delta is not known here")
            self._adapter.commit(opened.former_version)
            self._adapter.flush_cache()
        opened.touched = False

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
            held = self._index.held
            return dict(self._adapter.digest([name for name in wanted if name in held]))
        finally:
            if not is_paused:
                self._adapter.resume()

    # --- small parts --------------------------------------------------------------------------------

    def _pause(self, opened: OpenSession, limit_s: float, token: CancelToken | None) -> None:
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

    def _glance(self, when: str) -> Glance:
        """A close look at many tensors takes milliseconds, so it is taken while bytes move."""
        if self._look is Look.EVERYTHING:  # they are few: it is taken before and after
            return Glance(None, self._looker)
        return Glance(lambda: self._check_fingerprint(when, Look.EVERYTHING), self._looker)

    @contextmanager
    def _looking(self, when: str) -> Iterator[None]:
        with self._glance(when).around() as glance:
            glance.take_aside()
            yield


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
