"""The trainer's end: connects to engines and updates them, each in a transaction of its own."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Literal, TypeVar, overload

import numpy as np

from weightsync import config
from weightsync.collector import Collector
from weightsync.control import ControlClient, HttpClient, LocalClient
from weightsync.crew import Crew, EngineHelpers, nothing
from weightsync.deadline import CancelToken, Deadline
from weightsync.digest_shares import WHOLE, DigestShares
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    EpochError,
    MissingNameError,
    PeerLostError,
    ProtocolError,
    SessionError,
    TransportError,
    UpdateFailedError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.fill import FillMeeting, FillSeat
from weightsync.kept import Kept
from weightsync.layout import Layout
from weightsync.link import EngineLink, new_session_id
from weightsync.manifest import Digests, Manifest, ManifestBasis, manifest_basis
from weightsync.messages import WrittenList
from weightsync.naming import Rule
from weightsync.options import SenderOptions, resolve_options
from weightsync.rank_sender import RankSender
from weightsync.ranks import Meeting
from weightsync.report import EngineReport, UpdateReport, report_to_json
from weightsync.source_ends import Bound, Publication, digest_sources
from weightsync.sources import resolve_bucket
from weightsync.store_sender import StoreSender, store_sender
from weightsync.tensors import LocalTensors
from weightsync.transports import get_transport
from weightsync.types import Contract, Outcome

P = TypeVar("P")


#: Errors after which a request may have been carried out, or may be yet.
_UNANSWERED: Final = (PeerLostError, DeadlineError, TransportError, ProtocolError)


class Ending(Enum):
    """When an update is known to bring nothing more."""

    WHEN_LEFT = "when it is left"
    WITH_SEND = "with its only send"


@dataclass
class _Session:
    """One engine's part of an update while it runs."""

    link: EngineLink
    session_id: str
    is_begun: bool = False
    is_moved: bool = False  # the move that is under way was asked for with the begin
    is_commit_asked: bool = False
    is_committed: bool = False
    error: WeightSyncError | None = None
    moves: list[tuple[DigestShares, Digests]] = field(
        default_factory=list
    )  # and sums of all owners
    ahead: Future[tuple[str, list[dict[str, Any]]]] | None = None  # manifests of the first move
    root: str = ""
    num_bytes: int = 0
    contract: Contract | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    digest_s: float = 0.0
    token: CancelToken = field(default_factory=CancelToken)  # one engine's failure stops its own

    def note_move(self, bound: Bound, digests: Digests) -> None:
        self.moves.append((bound.shares, digests))
        self.num_bytes += bound.plan.total_bytes
        self.contract = bound.plan.contract


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
        crew: Crew | None = None,
    ) -> None:
        self._links = list(links)
        self.run_id = run_id
        self.options = options
        self._crew = crew
        self._num_updates = 0
        world_size = 1 if crew is None else crew.world_size
        self._collector = Collector(rules, options.cast, options.bucket_bytes, 0, world_size)
        self._update: Update | None = None
        self._bases: Kept[tuple[str, ...], dict[int, ManifestBasis]] = Kept(8)
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

    @overload
    @classmethod
    def connect(
        cls, engines: Iterable[Any], *, transport: Literal["disk-delta"], **options: Any
    ) -> StoreSender: ...

    @overload
    @classmethod
    def connect(
        cls, engines: Iterable[Any], *, transport: str = "p2p", **options: Any
    ) -> Sender | RankSender: ...

    @classmethod
    def connect(
        cls,
        engines: Iterable[Any],
        *,
        transport: str = "p2p",
        bucket: str | int = "auto",
        rank: int = 0,
        world_size: int = 1,
        group: Any = None,
        store: Any = None,
        name: str = "trainer",
        token: str | None = None,
        run_id: str | None = None,
        rules: Sequence[Rule] | None = None,
        **options: Any,
    ) -> Sender | RankSender | StoreSender:
        """Connect to engines: ``http://HOST:PORT`` of each, or a ``Receiver`` of this process. With
        transport ``disk-delta`` to a store instead: the one entry is its directory, and ``options``
        are those of :class:`weightsync.store_sender.StoreOptions`.

        Waits up to ``connect_timeout_s`` for engines that do not listen yet. ``bucket`` is the size
        of a stream's slot ("1GB", "512MiB", bytes, "auto"). ``rules`` rename or drop names on the way
        out (None: those that transformers models need). ``options`` are the fields of
        :class:`weightsync.options.SenderOptions`: placement, contract, verify, cast, strict, and the
        timeouts. A trainer of several ranks calls this on each of them, with the same arguments but
        ``rank``, and ``group`` (a ``torch.distributed`` process group of the trainer's ranks) or
        ``store`` (as torch's stores are; ``name`` tells trainers apart that share one) to find rank 0;
        then every rank enters every update and sends what it holds. Raises :class:`ConfigError`,
        :class:`PeerLostError`, :class:`BusyError`, ...
        """
        listed = list(engines)
        if transport == "disk-delta":
            meeting = Meeting(rank, world_size, group, store, "trainer", name)
            published: StoreSender = store_sender(listed, run_id, rules, options, meeting)
            return published
        checked = resolve_options(resolve_bucket(bucket), **options)
        meeting = Meeting(rank, world_size, group, store, "trainer", name)
        if not listed:
            raise ConfigError("no engines given")
        shown = token if token is not None else config.control_token()
        clients = [_client(engine, shown) for engine in listed]
        if rank != 0:
            return RankSender(meeting, clients, get_transport(transport), checked, rules)
        found = run_id if run_id is not None else f"{os.uname().nodename}-{secrets.token_hex(6)}"
        crew = None
        if world_size > 1:
            welcome = {"run_id": found, "engines": [client.peer for client in clients]}
            crew = Crew(meeting, welcome)
        links = [
            EngineLink(
                client,
                get_transport(transport),
                checked,
                found,
                None if crew is None else EngineHelpers(crew, i),
            )
            for i, client in enumerate(clients)
        ]
        sender = cls(links, found, checked, rules, crew)
        try:
            if crew is not None:
                limit_s = checked.connect_timeout_s
                crew.wait(Deadline(limit_s, peer="trainer ranks", stage="connect"))
            sender._on_each(links, EngineLink.connect)
        except BaseException:
            sender.close()
            raise
        return sender

    def update_weights(
        self, source: Any, *, version: int, scope: Iterable[str] | None = None
    ) -> UpdateReport:
        """A whole update: everything that :meth:`Update.send` takes, to ``version``; returns the report.

        The same as ``with sender.update(version, scope) as update: update.send(source)``, and quicker: a
        trainer of one rank, whose only engine reads directly, asks for all of it in one exchange. What
        goes wrong before a session was asked for is raised as itself (a name that the engine does not
        have, an engine that cannot be reached), and after that :class:`UpdateFailedError`.
        """
        update = self._checked_update(version, scope, Ending.WITH_SEND)
        try:
            with update:
                update.send(source)
        except UpdateFailedError:
            raise
        except WeightSyncError as error:
            if update.report is None or not update.is_begun:
                raise
            if not update.report.is_committed:  # else only the answer was lost
                raise update.failure(update.report) from error
        if update.report is None:
            raise SessionError(f"the update to version {version} left no report")
        return update.report

    def update(self, version: int, scope: Iterable[str] | None = None) -> Update:
        """An update to ``version``, as a context manager; leaving it commits.

        ``scope`` names the tensors that will be sent; None promises all of the engine's. An
        exception inside aborts. Leaving raises :class:`UpdateFailedError` if any engine did not
        commit. Engines that were lost since the last update are connected again first.
        """
        return self._checked_update(version, scope, Ending.WHEN_LEFT)

    def _checked_update(self, version: int, scope: Iterable[str] | None, ending: Ending) -> Update:
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise ConfigError(f"version {version!r} must be an integer >= 0")
        if self._closed.is_set():
            raise ConfigError("the sender is closed")
        if isinstance(scope, str | bytes) or not isinstance(scope, Iterable | None):
            raise ConfigError(f"scope {scope!r} must be a list of names, or None for everything")
        return Update(self, version, None if scope is None else list(scope), ending)

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
        if self._crew is not None:
            self._crew.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._collector.forget()
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

    def _basis(self, moves: Sequence[DigestShares], rank: int) -> ManifestBasis:
        """Of what an engine rank gets in these moves; WHOLE: of everything."""

        def make() -> ManifestBasis:
            return manifest_basis(
                (s.plan.digest, s.plan.metas if rank == WHOLE else s.metas(rank)) for s in moves
            )

        plans = tuple(shares.plan.digest for shares in moves)
        of_ranks: dict[int, ManifestBasis] = self._bases.get(plans, dict)
        if rank not in of_ranks:
            of_ranks[rank] = make()
        return of_ranks[rank]


def _client(engine: Any, token: str | None) -> ControlClient:
    if isinstance(engine, str):
        return HttpClient(engine, token)
    if hasattr(engine, "handle"):
        return LocalClient(engine.handle)
    raise ConfigError(f"an engine is a URL or a Receiver, got {type(engine).__name__}")


class Update:
    """One update over all engines of a sender. ``report`` is set when it is over."""

    def __init__(
        self,
        sender: Sender,
        version: int,
        scope: list[str] | None,
        ending: Ending = Ending.WHEN_LEFT,
    ) -> None:
        self._sender = sender
        self.version = version
        self._scope = scope
        self._ending = ending
        self._is_last_move = False
        self._sessions: list[_Session] = []
        self._num_moves = 0
        self._number = 0  # among the updates of this sender
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
        self._sender._num_updates += 1
        self._number = self._sender._num_updates
        try:
            self._connect_lost()
        except BaseException as error:
            self._sender._update = None
            self._tell_end(error)
            raise
        return self

    def _connect_lost(self) -> None:
        """Connect engines again that were lost, or whose transport is of no use any more."""

        def connect(session: _Session) -> None:
            if session.link.needs_connecting:
                session.link.is_broken = True
                session.link.connect()

        for session in self._sessions:
            session.link.phases = {}
        self._on_sessions(connect)
        # Parting with one engine ends what it shared with others, which looked well a moment ago.
        if any(s.link.needs_connecting for s in self._sessions if s.error is None):
            self._on_sessions(connect)

    @property
    def is_begun(self) -> bool:
        """Whether any engine was asked for anything."""
        return any(session.is_begun for session in self._sessions)

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
        crew = self._sender._crew
        is_one_part = self._sender._collector.is_one_part(source)
        self._is_last_move = self._ending is Ending.WITH_SEND and is_one_part
        for tensors, dropped in self._sender._collector.collect(source):
            self._dropped.update(dropped)
            if crew is not None:
                self._move_together(crew, tensors)
            elif tensors.layout.tensors:  # a part of which the rules left nothing is no move
                self._move(tensors, tensors.layout)
            del tensors
        if crew is not None:
            nothing_more = LocalTensors(nothing(crew.world_size), {}, ())
            while self._move_together(crew, nothing_more):
                pass
            crew.tell({"kind": "sent", "update": self._number})

    def _move_together(self, crew: Crew, tensors: LocalTensors) -> bool:
        """One move of all ranks; False if no rank had anything (any more)."""
        move = self._num_moves
        self._num_moves += 1
        replies = crew.have(self._number, move, self._sender.options.deadline_s)
        for reply in replies.values():
            self._dropped.update(reply.get("dropped", {}))
        has_more = bool(tensors.layout.tensors) or not all(r["is_end"] for r in replies.values())
        if not any(r["is_end"] for r in replies.values()):
            theirs = [r["used_rules"] for r in replies.values()]
            self._sender._collector.check_used_together(
                [None if used is None else frozenset(used) for used in theirs]
            )
        source = crew.joint(tensors.layout, replies)
        moved: list[int] = []
        if source.tensors:
            self._move(tensors, source, move)
            moved = [i for i, s in enumerate(self._sessions) if s.error is None]
        crew.tell({"kind": "moved", "update": self._number, "move": move, "engines": moved})
        return has_more

    def _move(self, tensors: LocalTensors, source: Layout, move: int | None = None) -> None:
        """``tensors`` are this rank's, ``source`` is the layout of all ranks."""
        move_id = self._num_moves if move is None else move
        self._num_moves = max(self._num_moves, move_id + 1)
        taken: Kept[str, Digests] = Kept()  # engines of one layout share their plan

        live = [i for i, session in enumerate(self._sessions) if session.error is None]
        meeting = FillMeeting(live)

        def act(session: _Session) -> None:
            seat = FillSeat(meeting, next(i for i, s in enumerate(self._sessions) if s is session))
            try:
                bound, digests = self._describe_and_move(
                    session, lambda: self._describe(session, tensors, source, taken), move_id, seat
                )
            except WeightSyncError:
                # What another rank lost shows here only by its error: all join their transports anew.
                session.link.is_stale |= self._sender._crew is not None
                raise
            finally:
                seat.leave()
            reach("trainer.moved")
            if not session.is_committed:
                session.note_move(bound, digests)

        self._on_sessions(act)

    def _describe_and_move(
        self,
        session: _Session,
        describe: Callable[[], tuple[Bound, Digests, list[Publication]]],
        move_id: int,
        seat: FillSeat,
    ) -> tuple[Bound, Digests]:
        link = session.link

        def make_manifests(bound: Bound, digests: Digests) -> None:
            if not session.moves and bound.plan.contract is Contract.DIRECT:
                session.ahead = self._sender._pool.submit(
                    self._manifests, session, [(bound.shares, digests)]
                )

        def begin(described: tuple[Bound, Digests, list[Publication]]) -> None:
            bound, digests, published = described
            is_joined = self._is_alone(session) and bound.plan.contract is Contract.DIRECT
            if not is_joined:
                self._begin(session)
                return
            if self._is_last_move:
                seat.leave()
                self._begin_to_commit(session, move_id, described)
                return
            reach("trainer.begin")
            session.is_begun = True
            make_manifests(bound, digests)
            seat.leave()
            link.begin_and_move(
                session.session_id, self.version, self._scope, move_id, bound, published
            )
            session.is_moved = True

        session.is_moved = False
        bound, digests, published = self._ready(session, describe, begin)
        if not session.is_moved:
            make_manifests(bound, digests)
            link.move(session.session_id, move_id, bound, published, session.token, seat)
        return bound, digests

    def _begin_to_commit(
        self, session: _Session, move_id: int, described: tuple[Bound, Digests, list[Publication]]
    ) -> None:
        """Nothing follows this move, and all that a manifest says is known before it."""
        bound, digests, published = described
        session.note_move(bound, digests)

        def make_manifests() -> list[dict[str, Any]]:
            session.root, manifests = self._manifests(session, session.moves)
            return manifests

        for point in ("trainer.begin", "trainer.prepare", "trainer.prepared"):
            reach(point)
        session.is_begun = session.is_commit_asked = True
        try:
            answer = session.link.begin_to_commit(
                session.session_id,
                self.version,
                self._scope,
                move_id,
                bound,
                published,
                make_manifests,
            )
        except WeightSyncError as error:
            # What the engine answers with an error it did not go on with; a lost answer says nothing.
            session.is_commit_asked = isinstance(error, _UNANSWERED)
            raise
        session.stats = answer.get("stats", {})
        session.is_moved = session.is_committed = True
        reach("trainer.committed")

    def _is_alone(self, session: _Session) -> bool:
        """Whether nobody else must be heard between two stages: one trainer rank, one engine."""
        is_only = len(self._sessions) == 1 and self._sender._crew is None
        return is_only and session.link.joins_stages

    def _describe(
        self,
        session: _Session,
        tensors: LocalTensors,
        source: Layout,
        taken: Kept[str, Digests],
    ) -> tuple[Bound, Digests, list[Publication]]:
        """Plan, digests and publications, before the engine is asked for anything: it may pause."""
        link, sender = session.link, self._sender
        bound = link.plan(tensors, source)
        published = link.ends.publish(bound, tensors)
        start_s = time.perf_counter()
        num_threads = sender.options.num_threads
        digests = taken.get(
            bound.plan.digest, lambda: digest_sources(bound, 0, tensors, num_threads)
        )
        if sender._crew is not None:
            theirs, sums = sender._crew.describe(
                sender._links.index(link),
                bound.plan,
                bound.shares.num_owners,
                bound.helpers,
                sender.options.deadline_s,
            )
            published, digests = [*published, *theirs], digests + sums
        session.digest_s += time.perf_counter() - start_s
        return bound, digests, published

    def _ready(
        self, session: _Session, make_plan: Callable[[], P], begin: Callable[[P], None]
    ) -> P:
        """What to move, in an open session. An engine that let this run go since the last update
        (its lease ran out, or it was restarted) is connected again."""
        if session.is_begun:
            return make_plan()
        try:
            plan = make_plan()
            begin(plan)
        except EpochError:
            session.link.connect()
            session.session_id, session.is_begun = new_session_id(), False
            session.moves, session.num_bytes = [], 0
            plan = make_plan()
            begin(plan)
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
        crew = self._sender._crew
        try:
            if crew is not None:  # who left it by an error says so, and nothing is decided
                crew.leave(self._number, self._sender.options.deadline_s)
            with suppress(WeightSyncError):  # recorded for each engine; reported below
                self._on_sessions(self._prepare_and_commit)
        except BaseException as raised:  # an interrupt: no session may stay open behind it
            self._give_up(raised)
            raise
        try:
            self._finish()
        finally:
            self._tell_end()
        if self.report is None or self.report.is_committed:
            return  # also where only the answer to a commit was lost
        failure = self.failure(self.report)
        raise failure from failure.__cause__

    def failure(self, report: UpdateReport) -> UpdateFailedError:
        """Of a report in which an engine did not commit; caused by what the first of them met."""
        ended = zip(self._sessions, report.engines, strict=True)
        failed = [s for s, engine in ended if engine.outcome is not Outcome.COMMITTED]
        first = failed[0].error
        error = UpdateFailedError(
            f"version {self.version}: {len(failed)} of {len(self._sessions)} engines did not "
            f"commit; {failed[0].link.peer}: {first}",
            report,
        )
        error.__cause__ = first
        return error

    def _give_up(self, error: BaseException) -> None:
        for session in self._sessions:
            session.token.cancel(f"the update was left by {type(error).__name__}")
            session.error = session.error or SessionError(
                f"left by {type(error).__name__}: {error}"
            )
        try:
            self._finish()
        finally:
            self._tell_end(error)
        error.add_note(str(self.report))

    def _prepare_and_commit(self, session: _Session) -> None:
        if not session.is_begun:
            if self._scope is None or self._scope:
                raise MissingNameError("nothing was sent; call update.send(...) before leaving")
            # A round in which nobody has anything still ends its session.
            self._ready(session, lambda: None, lambda _: self._begin(session))
        if session.is_committed:
            return
        reach("trainer.prepare")
        link, session_id = session.link, session.session_id
        manifests = self._all_manifests(session)
        if self._is_alone(session):
            reach("trainer.prepared")
            session.is_commit_asked = True
            answer = link.prepare_and_commit(session_id, manifests)
        else:
            link.prepare(session_id, manifests)
            reach("trainer.prepared")
            session.is_commit_asked = True
            answer = link.commit(session_id)
        session.stats = answer.get("stats", {})
        reach("trainer.committed")

    def _all_manifests(self, session: _Session) -> list[dict[str, Any]]:
        """Those of what was moved, which for a single move were made while it went on."""
        if session.ahead is None or len(session.moves) != 1:
            session.root, found = self._manifests(session, session.moves)
        else:
            session.root, found = session.ahead.result()
        return found

    def _manifests(
        self, session: _Session, moved: Sequence[tuple[DigestShares, Digests]]
    ) -> tuple[str, list[dict[str, Any]]]:
        """The root of the whole, and for each rank of the engine a manifest of what it gets."""
        moves = [shares for shares, _ in moved]

        def manifest(rank: int, each: Callable[[DigestShares, Digests], Digests]) -> Manifest:
            values = [each(shares, sums) for shares, sums in moved]
            joined: Digests = np.concatenate([np.zeros(0, dtype=np.uint64), *values])
            return Manifest(self._sender._basis(moves, rank), joined)

        root = manifest(WHOLE, DigestShares.whole).root if moves else ""
        found = []
        for rank in range(session.link.world_size):

            def of_rank(shares: DigestShares, sums: Digests, rank: int = rank) -> Digests:
                return shares.for_rank(rank, sums)

            found.append(manifest(rank, of_rank).to_json())
        return root, WrittenList(found)

    def _tell_end(self, error: BaseException | None = None) -> None:
        """The other ranks of the trainer wait for the outcome."""
        if (crew := self._sender._crew) is not None:
            report = None if self.report is None else report_to_json(self.report)
            said = "" if error is None else f"{type(error).__name__}: {error}"[:2000]
            crew.tell({"kind": "ended", "update": self._number, "report": report, "error": said})

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
            num_tensors=sum(len(shares.plan.metas) for shares, _ in session.moves),
            num_bytes=session.num_bytes,
            contract=session.contract,
            path=str(session.stats.get("path") or link.path),
            phases=phases,
            pause_s=float(session.stats.get("pause_s", 0.0)),
            root=session.root,
        )
