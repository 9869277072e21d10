"""The trainer's end: connects to engines and updates them, each in a transaction of its own."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from weightsync import config
from weightsync.binding import source_parts
from weightsync.control import ControlClient, HttpClient, LocalClient
from weightsync.deadline import CancelToken
from weightsync.device_tables import device_of, synchronize
from weightsync.digest import DigestTable
from weightsync.errors import (
    ConfigError,
    EpochError,
    MissingNameError,
    SessionError,
    UpdateFailedError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.kept import NUM_KEPT, Kept
from weightsync.link import Bound, EngineLink, new_session_id
from weightsync.manifest import Digests, Manifest, ManifestBasis, manifest_basis
from weightsync.naming import Rule
from weightsync.options import SenderOptions, resolve_options
from weightsync.plan import RefitPlan
from weightsync.report import EngineReport, UpdateReport
from weightsync.sources import ModuleSource, NamedSource, chunks, pairs, resolve_bucket
from weightsync.tensors import LocalTensors, local_tensors
from weightsync.transports import get_transport
from weightsync.types import Contract, Outcome, RegionAddress, RegionKind

P = TypeVar("P")


@dataclass
class _Session:
    """One engine's part of an update while it runs."""

    link: EngineLink
    session_id: str
    is_begun: bool = False
    is_commit_asked: bool = False
    error: WeightSyncError | None = None
    moves: list[tuple[RefitPlan, Digests]] = field(default_factory=list)
    manifest: Manifest | None = None
    num_bytes: int = 0
    contract: Contract | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    digest_s: float = 0.0
    token: CancelToken = field(default_factory=CancelToken)  # one engine's failure stops its own


class Sender:
    """Connects with :meth:`connect`; use as a context manager or ``close()`` it.

    One thread at a time. A heartbeat thread renews the engines' leases.
    """

    def __init__(
        self,
        links: Sequence[EngineLink],
        run_id: str,
        options: SenderOptions,
        rules: Sequence[Rule] | None,
    ) -> None:
        self._links = list(links)
        self.run_id = run_id
        self.options = options
        self._rules = rules
        self._module_source = ModuleSource(rules, options.cast)
        self._named_source = NamedSource(rules or (), options.cast)
        self._update: Update | None = None
        self._digest_tables: dict[str, _SourceDigests] = {}
        self._bases: Kept[tuple[str, ...], ManifestBasis] = Kept(8)
        self._closed = threading.Event()
        # Two a link: giving up must not queue behind what is being given up.
        self._pool = ThreadPoolExecutor(2 * max(1, len(self._links)), "weightsync-sender")
        # One thread a link: an engine that does not answer must not cost another its lease.
        self._hearts = [
            threading.Thread(
                target=self._heartbeat_loop, args=(link,), name="weightsync-heartbeat", daemon=True
            )
            for link in self._links
        ]
        for heart in self._hearts:
            heart.start()

    @classmethod
    def connect(
        cls,
        engines: Iterable[Any],
        *,
        transport: str = "p2p",
        bucket: str | int = "auto",
        rank: int = 0,
        world_size: int = 1,
        token: str | None = None,
        run_id: str | None = None,
        rules: Sequence[Rule] | None = None,
        **options: Any,
    ) -> Sender:
        """Connect to engines: ``http://HOST:PORT`` of each, or a ``Receiver`` of this process.

        Waits up to ``connect_timeout_s`` for engines that do not listen yet. ``bucket`` is the size
        of a stream's slot ("1GB", "512MiB", bytes, "auto"). ``rules`` rename or drop names on the way
        out (None: those that transformers models need). ``options`` are the fields of
        :class:`weightsync.options.SenderOptions`: placement, contract, verify, cast, strict, and the
        timeouts. Raises :class:`ConfigError`, :class:`PeerLostError`, :class:`BusyError`, ...
        """
        if (rank, world_size) != (0, 1):
            raise ConfigError(
                f"rank {rank} of {world_size}: trainers of several ranks are not supported yet; "
                "gather on rank 0, or use rank=0, world_size=1"
            )
        checked = resolve_options(resolve_bucket(bucket), **options)
        name = run_id if run_id is not None else f"{os.uname().nodename}-{secrets.token_hex(6)}"
        shown = token if token is not None else config.control_token()
        links = [
            EngineLink(_client(e, shown), get_transport(transport), checked, name) for e in engines
        ]
        if not links:
            raise ConfigError("no engines given")
        sender = cls(links, name, checked, rules)
        try:
            sender._on_each(links, EngineLink.connect)
        except BaseException:
            sender.close()
            raise
        return sender

    def update(self, version: int, scope: Iterable[str] | None = None) -> Update:
        """An update to ``version``, as a context manager; leaving it commits.

        ``scope`` names the tensors that will be sent; None promises all of the engine's. An
        exception inside aborts. Leaving raises :class:`UpdateFailedError` if any engine did not
        commit. Engines that were lost since the last update are connected again first.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise ConfigError(f"version {version!r} must be an integer >= 0")
        if self._closed.is_set():
            raise ConfigError("the sender is closed")
        if isinstance(scope, str | bytes) or not isinstance(scope, Iterable | None):
            raise ConfigError(f"scope {scope!r} must be a list of names, or None for everything")
        return Update(self, version, None if scope is None else list(scope))

    def status(self) -> list[dict[str, Any]]:
        """What each engine says of itself; ``{"error": ...}`` for one that does not answer."""
        found: list[dict[str, Any]] = []
        for link in self._links:
            try:
                found.append(link.status())
            except WeightSyncError as error:
                found.append({"error": str(error)})
        return found

    def resolve(self, report: UpdateReport) -> UpdateReport:
        """Ask again about engines whose outcome was unknown."""
        engines = []
        for link, engine in zip(self._links, report.engines, strict=True):
            if engine.outcome is Outcome.UNKNOWN:
                outcome, detail = link.outcome(engine.session_id)
                engine = replace(engine, outcome=outcome, detail=detail)
            engines.append(engine)
        return replace(report, engines=tuple(engines))

    def close(self) -> None:
        """Release the engines for other runs and everything held here. Idempotent."""
        self._closed.set()
        for link in self._links:
            link.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._module_source.forget()
        self._named_source.forget()
        for heart in self._hearts:
            heart.join(timeout=5.0)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _heartbeat_loop(self, link: EngineLink) -> None:
        while not self._closed.wait(self.options.lease_s / 3):
            if not link.is_broken:
                link.heartbeat()

    def _on_each(self, items: Sequence[Any], act: Callable[[Any], None]) -> None:
        """``act`` on every item, in parallel when there are several; raises the first error."""
        if len(items) == 1:
            act(items[0])
            return
        futures = [self._pool.submit(act, item) for item in items]
        errors = [f.exception() for f in futures]
        for error in errors:
            if error is not None:
                raise error

    def _digest(self, bound: Bound, tensors: LocalTensors) -> Digests:
        """Digests of ``bound.plan.metas``."""
        kept = self._digest_tables.get(bound.plan.digest)
        if kept is None or kept.addresses != tensors.addresses:
            kept = _SourceDigests(tensors.addresses, *_source_digests(bound.plan, tensors))
            self._digest_tables[bound.plan.digest] = kept
            while len(self._digest_tables) > NUM_KEPT:
                self._digest_tables.pop(next(iter(self._digest_tables)))
        synchronize(kept.device)
        found: Digests = np.zeros(len(bound.plan.metas), dtype=np.uint64)
        found[kept.places] = kept.table.values(self.options.num_threads)
        return found

    def _basis(self, plans: Sequence[RefitPlan]) -> ManifestBasis:
        key = tuple(plan.digest for plan in plans)
        return self._bases.get(
            key, lambda: manifest_basis((plan.digest, plan.metas) for plan in plans)
        )


@dataclass(frozen=True)
class _SourceDigests:
    """A digest table of a plan's sources, and the place of each of its names in the plan."""

    addresses: tuple[RegionAddress, ...]  # those that it was made for
    device: str
    table: DigestTable
    places: Any  # int64 [names]


def _source_digests(plan: RefitPlan, tensors: LocalTensors) -> tuple[str, DigestTable, Any]:
    by_region = {a.region: a.ptr for a in tensors.addresses}
    device = device_of(tensors.addresses, "what the trainer sends")
    table = DigestTable(source_parts(plan, tensors.layout, by_region), device)
    place = {meta.name: i for i, meta in enumerate(plan.metas)}
    return device, table, np.array([place[n] for n in table.names], dtype=np.int64)


def _client(engine: Any, token: str | None) -> ControlClient:
    if isinstance(engine, str):
        return HttpClient(engine, token)
    if hasattr(engine, "handle"):
        return LocalClient(engine.handle)
    raise ConfigError(f"an engine is a URL or a Receiver, got {type(engine).__name__}")


class Update:
    """One update over all engines of a sender. ``report`` is set when it is over."""

    def __init__(self, sender: Sender, version: int, scope: list[str] | None) -> None:
        self._sender = sender
        self.version = version
        self._scope = scope
        self._sessions: list[_Session] = []
        self._num_moves = 0
        self._dropped: dict[str, str] = {}
        self._start_s = 0.0
        self.report: UpdateReport | None = None

    def __enter__(self) -> Update:
        if self._sender._update is not None:
            raise SessionError(
                f"an update to version {self._sender._update.version} is open; leave it first"
            )
        self._start_s = time.perf_counter()
        self._sessions = [_Session(link, new_session_id()) for link in self._sender._links]
        self._sender._update = self
        try:
            self._on_sessions(self._connect_again)
        except BaseException:
            self._sender._update = None
            raise
        return self

    def _connect_again(self, session: _Session) -> None:
        link = session.link
        link.phases = {}
        if link.is_broken or link.lost() is not None:
            link.is_broken = True
            link.connect()

    def _on_sessions(self, act: Callable[[_Session], None]) -> None:
        """``act`` on every engine that has not failed; one that fails is fenced off, and when none is
        left its error is raised."""

        def guarded(session: _Session) -> None:
            try:
                act(session)
            except WeightSyncError as error:
                session.error = error

        live = [s for s in self._sessions if s.error is None]
        if live:
            self._sender._on_each(live, guarded)
        errors = [s.error for s in self._sessions]
        if all(errors) and errors[0] is not None:
            raise errors[0]

    # --- sending --------------------------------------------------------------------------------------

    def send(self, source: Any) -> None:
        """Send a module, a mapping, a list, or a generator of (name, tensor).

        Returns when every engine has finished reading and the digests are taken: the sources may
        change. Modules, mappings and lists are read where they lie; tensors of a generator are
        gathered up to a bucket at a time and streamed. Several calls add up to one update.
        """
        if self._sender._update is not self:
            raise SessionError("send is only possible inside `with sender.update(...)`")
        for tensors, dropped in self._collect(source):
            self._dropped.update(dropped)
            if tensors.layout.tensors:  # a part of which the rules left nothing is no move
                self._move(tensors)
            del tensors

    def _collect(self, source: Any) -> Iterator[tuple[LocalTensors, Mapping[str, str]]]:
        sender = self._sender
        cast, rules = sender.options.cast, sender._rules
        if hasattr(source, "named_parameters"):
            yield sender._module_source.collect(source)
            return
        if hasattr(source, "items") or isinstance(source, list | tuple):
            named = source.items() if hasattr(source, "items") else source
            listed = list(pairs(named))  # kept alive here until they were sent
            yield sender._named_source.collect(listed)
            return
        for ruled in chunks(source, rules or (), sender.options.bucket_bytes):
            gathered = local_tensors(ruled.named, cast=cast, kind=RegionKind.TEMPORARY)
            yield gathered, ruled.dropped
            del gathered, ruled  # before the next part is gathered

    def _move(self, tensors: LocalTensors) -> None:
        move_id = self._num_moves
        self._num_moves += 1

        def act(session: _Session) -> None:
            bound, digests, publication = self._ready(
                session, lambda: self._describe(session, tensors)
            )
            link, session_id = session.link, session.session_id
            link.move(session_id, move_id, bound, publication, session.token)
            reach("trainer.moved")
            session.moves.append((bound.plan, digests))
            session.num_bytes += bound.plan.total_bytes
            session.contract = bound.plan.contract

        self._on_sessions(act)

    def _describe(
        self, session: _Session, tensors: LocalTensors
    ) -> tuple[Bound, Digests, Mapping[str, Any]]:
        """Plan, digests and publication, before the engine is asked for anything: it may pause."""
        bound = session.link.plan(tensors)
        publication = session.link.publish(bound, tensors)
        start_s = time.perf_counter()
        digests = self._sender._digest(bound, tensors)
        session.digest_s += time.perf_counter() - start_s
        return bound, digests, publication

    def _ready(self, session: _Session, make_plan: Callable[[], P]) -> P:
        """What to move, in an open session. An engine that let this run go since the last update
        (its lease ran out, or it was restarted) is connected again."""
        if session.is_begun:
            return make_plan()
        try:
            plan = make_plan()
            self._begin(session)
        except EpochError:
            session.link.connect()
            session.session_id, session.is_begun = new_session_id(), False
            plan = make_plan()
            self._begin(session)
        return plan

    def _begin(self, session: _Session) -> None:
        if session.is_begun:
            return
        reach("trainer.begin")
        session.is_begun = True  # even if the answer is lost: the engine may have opened it
        session.link.begin(session.session_id, self.version, self._scope)
        reach("trainer.begun")

    # --- ending ---------------------------------------------------------------------------------------

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._sender._update = None
        if error is not None:
            self._give_up(error)
            return
        try:
            with suppress(WeightSyncError):  # recorded for each engine; reported below
                self._on_sessions(self._prepare_and_commit)
        except BaseException as raised:  # an interrupt: no session may stay open behind it
            self._give_up(raised)
            raise
        self._finish()

        if self.report is None or self.report.is_committed:
            return  # also where only the answer to a commit was lost
        ended = zip(self._sessions, self.report.engines, strict=True)
        failed = [s for s, engine in ended if engine.outcome is not Outcome.COMMITTED]
        first = failed[0].error
        raise UpdateFailedError(
            f"version {self.version}: {len(failed)} of {len(self._sessions)} engines did not "
            f"commit; {failed[0].link.peer}: {first}",
            self.report,
        ) from first

    def _give_up(self, error: BaseException) -> None:
        for session in self._sessions:
            session.token.cancel(f"the update was left by {type(error).__name__}")
            session.error = session.error or SessionError(
                f"left by {type(error).__name__}: {error}"
            )
        self._finish()
        error.add_note(str(self.report))

    def _prepare_and_commit(self, session: _Session) -> None:
        if not session.is_begun:
            if self._scope is None or self._scope:
                raise MissingNameError("nothing was sent; call update.send(...) before leaving")
            # A round in which nobody has anything still ends its session.
            self._ready(session, lambda: None)
        plans = [plan for plan, _ in session.moves]
        taken = [digests for _, digests in session.moves]
        values = np.concatenate(taken) if taken else np.zeros(0, dtype=np.uint64)
        manifest = session.manifest = Manifest(self._sender._basis(plans), values)
        reach("trainer.prepare")
        session.link.prepare(session.session_id, manifest.to_json())
        reach("trainer.prepared")
        session.is_commit_asked = True
        session.stats = session.link.commit(session.session_id).get("stats", {})
        reach("trainer.committed")

    def _finish(self) -> None:
        engines: list[EngineReport] = [None] * len(self._sessions)  # type: ignore[list-item]

        def settle(index: int) -> None:
            engines[index] = self._settle(self._sessions[index])

        self._sender._on_each(list(range(len(self._sessions))), settle)
        self.report = UpdateReport(
            self.version,
            self._sender.run_id,
            tuple(engines),
            time.perf_counter() - self._start_s,
            dict(self._dropped),
        )

    def _settle(self, session: _Session) -> EngineReport:
        """How it ended on this engine; gives an open session up."""
        link, detail = session.link, ""
        if session.error is None:
            outcome = Outcome.COMMITTED
        elif not session.is_begun:
            outcome, detail = Outcome.ABORTED, str(session.error)
        else:
            outcome, detail = link.outcome(session.session_id)
            if outcome is Outcome.UNKNOWN:
                outcome, detail = link.abort(session.session_id, str(session.error)[:500])
            detail = detail or str(session.error)
            if outcome is Outcome.UNKNOWN and not session.is_commit_asked and link.forgot(detail):
                outcome, detail = Outcome.ABORTED, str(session.error)
        phases = dict(link.phases) | {"digest": session.digest_s}
        phases |= {f"engine_{k}": v for k, v in session.stats.get("phases", {}).items()}
        return EngineReport(
            url=link.peer,
            session_id=session.session_id,
            outcome=outcome,
            detail=detail,
            version=self.version if outcome is Outcome.COMMITTED else None,
            num_tensors=sum(len(plan.metas) for plan, _ in session.moves),
            num_bytes=session.num_bytes,
            contract=session.contract,
            path=str(session.stats.get("path") or link.path),
            phases=phases,
            pause_s=float(session.stats.get("pause_s", 0.0)),
            root=session.manifest.root if session.manifest and session.moves else "",
        )
