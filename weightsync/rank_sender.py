"""A trainer's other ranks: they enter the same updates as rank 0 and do what it asks of them there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from weightsync.collector import Collector
from weightsync.control import ControlClient
from weightsync.crew import digests_to_text
from weightsync.deadline import CancelToken, Deadline
from weightsync.digest_shares import digest_shares
from weightsync.errors import (
    ConfigError,
    ProtocolError,
    SessionError,
    UpdateFailedError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.fill import FillSeat
from weightsync.kept import NUM_KEPT, Kept
from weightsync.layout import Layout
from weightsync.naming import Rule
from weightsync.options import SenderOptions
from weightsync.plan import RefitPlan
from weightsync.ranks import Meeting, RankPipe, answer_to, join
from weightsync.report import UpdateReport, report_from_json
from weightsync.source_ends import (
    Bound,
    Publication,
    SourceEnds,
    contracts_to_json,
    digest_sources,
    targets_of,
)
from weightsync.tensors import LocalTensors
from weightsync.transports.base import Transport

#: Beyond the limits that rank 0 keeps: it says how an update ended even when it ran into one.
_GRACE_S: Final = 30.0
#: How long a copy that was given up may still look at what it copies.
_BORROW_S: Final = 60.0


class RankSender:
    """What :meth:`weightsync.Sender.connect` returns on every rank but 0. One thread at a time."""

    def __init__(
        self,
        meeting: Meeting,
        clients: Sequence[ControlClient],
        transport: Transport,
        options: SenderOptions,
        rules: Sequence[Rule] | None,
    ) -> None:
        self.rank, self.options = meeting.rank, options
        self._collector = Collector(
            rules, options.cast, options.bucket_bytes, meeting.rank, meeting.world_size
        )
        self._clients = list(clients)
        hello = {"engines": [client.peer for client in clients]}
        limit = Deadline(options.connect_timeout_s, peer="trainer rank 0", stage="connect")
        channel, welcome = join(meeting, hello, limit)
        self.run_id = str(welcome.get("run_id"))
        self._engines = [
            _Engine(SourceEnds(c, transport, options, self.run_id, meeting.rank, lambda *_: None))
            for c in clients
        ]
        self._num_updates = 0
        self._update: RankUpdate | None = None
        self._lost: str | None = None
        self._last_ended: Mapping[str, Any] | None = None
        self._num_running = 0  # calls that use the tensors on offer
        self.changed = threading.Condition()
        self._pool = ThreadPoolExecutor(2 + 2 * len(clients), "weightsync-rank")
        self._pipe = RankPipe(channel, self._on_frame, self._on_lost)

    def update_weights(
        self, source: Any, *, version: int, scope: Iterable[str] | None = None
    ) -> UpdateReport:
        """This rank's part of a whole update; returns the report that rank 0 has."""
        with self.update(version, scope) as update:
            update.send(source)
        if update.report is None:
            raise SessionError(f"the update to version {version} left no report")
        return update.report

    def update(self, version: int, scope: Iterable[str] | None = None) -> RankUpdate:
        """The update that rank 0 enters, too; the version and scope that count are its own."""
        if self._update is not None:
            raise SessionError("an update is open; leave it first")
        return RankUpdate(self, version)

    def status(self) -> list[dict[str, Any]]:
        """Rank 0 asks the engines."""
        raise ConfigError(f"rank {self.rank} of the trainer: rank 0 asks the engines")

    def close(self) -> None:
        """Part with rank 0 and the engines. Idempotent."""
        self._pipe.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for engine in self._engines:
            engine.ends.close()
        for client in self._clients:
            client.close()
        self._collector.forget()

    def __enter__(self) -> RankSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what rank 0 says ---------------------------------------------------------------------------

    def _on_frame(self, message: dict[str, Any]) -> None:
        match message.get("kind"):
            case "call":
                self._pool.submit(self._answer, message)
            case "cancel":
                engine = self._engines[int(message["engine"])]
                engine.cancel(str(message.get("session_id")), str(message.get("reason")))
            case "moved" | "sent" | "ended":
                with self.changed:
                    self._heard(message)
                    self.changed.notify_all()
            case kind:
                raise ProtocolError(f"trainer rank 0 sent a frame {kind!r}")

    def _heard(self, message: Mapping[str, Any]) -> None:
        update = self._update
        if message["kind"] == "moved":
            moved = {int(index) for index in message["engines"]}
            for index, engine in enumerate(self._engines):
                engine.was_moved(is_told=index in moved)
        if message["kind"] == "ended":
            self._last_ended = message
        if update is not None and update.number == message.get("update"):
            update.heard(message)

    def _on_lost(self, reason: str) -> None:
        with self.changed:
            self._lost = f"trainer rank 0: {reason}"
            self.changed.notify_all()

    def _answer(self, message: Mapping[str, Any]) -> None:
        what = message.get("what", {})
        answer_to(message.get("number"), lambda: self._do(what), self._pipe.put)

    def _do(self, what: Mapping[str, Any]) -> Mapping[str, Any]:
        if what.get("do") == "have":
            return self._wait_in_update(what, lambda u: u.offered_for(int(what["move"])))
        if what.get("do") == "leave":
            return self._wait_in_update(what, RankUpdate.is_left)
        tensors = self._borrow()
        try:
            return self._do_with(what, tensors)
        finally:
            with self.changed:
                self._num_running -= 1
                self.changed.notify_all()

    def _do_with(self, what: Mapping[str, Any], tensors: LocalTensors) -> Mapping[str, Any]:
        if what.get("do") == "layout":
            return {"layout": tensors.layout.to_json()}
        engine = self._engines[int(what["engine"])]
        match what.get("do"):
            case "attach":
                return engine.attach(what)
            case "share":
                return engine.share(what, self.rank)
            case "describe":
                return engine.describe(what, self.rank, tensors, self._taken(), self.options)
            case "fill":
                return engine.fill(what, tensors)
            case do:
                raise ProtocolError(f"trainer rank 0 asks for {do!r}")

    def _wait_in_update(
        self, what: Mapping[str, Any], ask: Callable[[RankUpdate], Mapping[str, Any] | None]
    ) -> Mapping[str, Any]:
        """Until this rank's own code is where ``ask`` has an answer."""
        limit_s = float(what["limit_s"])
        deadline = Deadline(limit_s, peer=f"trainer rank {self.rank}", stage=str(what["do"]))
        with self.changed:
            while True:
                update = self._update
                if update is not None and update.number == what["update"]:
                    found = ask(update)
                    if found is not None:
                        return found
                deadline.check()
                self.changed.wait(deadline.slice_s())

    def _borrow(self) -> LocalTensors:
        """The tensors on offer; `send` does not return while they are in use."""
        with self.changed:
            tensors = None if self._update is None else self._update.tensors
            if tensors is None:
                raise SessionError(f"trainer rank {self.rank} is not in `send`")
            self._num_running += 1
            return tensors

    def wait_for_borrowers(self) -> None:
        """Until nobody reads what was on offer; fills that nobody waits for are given up."""
        deadline = Deadline(_BORROW_S, peer=f"trainer rank {self.rank}", stage="send")
        with self.changed:
            while self._num_running:
                for engine in self._engines:
                    engine.cancel_fills("the move is over")
                deadline.check()
                self.changed.wait(deadline.slice_s())

    def _taken(self) -> Kept[str, Any]:
        if self._update is None:
            raise SessionError(f"trainer rank {self.rank} is not in an update")
        return self._update.taken

    # --- for updates ----------------------------------------------------------------------------------

    def enter(self, update: RankUpdate) -> None:
        """Note the update that is open, and number it. Rank 0 may have ended it already."""
        with self.changed:
            self._num_updates += 1
            update.number = self._num_updates
            self._update = update
            last = self._last_ended
            if last is not None and int(last["update"]) >= update.number:
                update.heard(last)

    def leave(self) -> None:
        """No update is open any more."""
        with self.changed:
            self._update = None

    def wait(self, is_over: Callable[[], bool], deadline: Deadline) -> None:
        """Wait for rank 0. Raises :class:`PeerLostError` if it is gone."""
        with self.changed:
            while not is_over():
                if self._lost is not None:
                    raise deadline.lost(self._lost)
                deadline.check()
                self.changed.wait(deadline.slice_s())

    def collect(self, source: Any) -> Iterable[tuple[LocalTensors, Mapping[str, str]]]:
        return self._collector.collect(source)

    @property
    def used_rules(self) -> frozenset[int] | None:
        """See :attr:`Collector.used_rules`."""
        return self._collector.used_rules


class _Engine:
    """One engine, as a rank that only feeds it sees it."""

    def __init__(self, ends: SourceEnds) -> None:
        self.ends = ends
        self._connection: int | None = None
        self._bound: dict[str, Bound] = {}  # the oldest first, as rank 0 and the engine count
        self._published: Sequence[Publication] = ()
        self._tokens: dict[str, CancelToken] = {}
        self._filling: set[str] = set()  # sessions
        self._lock = threading.Lock()

    def attach(self, what: Mapping[str, Any]) -> Mapping[str, Any]:
        if what["connection"] != self._connection:
            self.ends.drop()
            self._connection = int(what["connection"])
        limit = Deadline(float(what["limit_s"]), peer="the engine", stage="attach")
        targets = [int(target) for target in what["targets"]]
        found = self.ends.attach(targets, Layout.from_json(what["layout"]), limit)
        return {"contracts": contracts_to_json(found)}

    def share(self, what: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
        plan, source = RefitPlan.from_json(what["plan"]), Layout.from_json(what["source"])
        shares = digest_shares(plan, source.world_size, int(what["num_targets"]))
        targets = targets_of(plan).get(rank, ())
        with self._lock:
            self._bound.pop(plan.digest, None)
            self._bound[plan.digest] = Bound(plan, source, shares, targets)
            while len(self._bound) > NUM_KEPT:
                del self._bound[next(iter(self._bound))]
        return {}

    def _plan(self, what: Mapping[str, Any]) -> Bound:
        with self._lock:
            found = self._bound.get(str(what["plan_digest"]))
        if found is None:
            raise ProtocolError("the plan of this move was never shared with this rank")
        return found

    def describe(
        self,
        what: Mapping[str, Any],
        rank: int,
        tensors: LocalTensors,
        taken: Kept[str, Any],
        options: SenderOptions,
    ) -> Mapping[str, Any]:
        bound = self._plan(what)
        self.ends.bind(bound, tensors)
        self._published = self.ends.publish(bound, tensors)
        digests = taken.get(
            bound.plan.digest, lambda: digest_sources(bound, rank, tensors, options.num_threads)
        )
        return {"publications": self._published, "digests": digests_to_text(digests)}

    def fill(self, what: Mapping[str, Any], tensors: LocalTensors) -> Mapping[str, Any]:
        session_id = str(what["session_id"])
        reach("trainer.move")
        with self._lock:
            self._filling.add(session_id)
        try:
            token = self._token(session_id)
            self.ends.fill(
                self._plan(what), session_id, int(what["move_id"]), token, FillSeat.alone()
            )
        finally:
            with self._lock:
                self._filling.discard(session_id)
        return {}

    def _token(self, session_id: str) -> CancelToken:
        """Also for a session that was given up before this rank heard of it."""
        with self._lock:
            token = self._tokens.setdefault(session_id, CancelToken())
            while len(self._tokens) > 8:
                self._tokens.pop(next(iter(self._tokens)))
            return token

    def cancel(self, session_id: str, reason: str) -> None:
        self._token(session_id).cancel(reason)

    def cancel_fills(self, reason: str) -> None:
        """Stop what is being filled now; a session that only waits goes on."""
        with self._lock:
            running = list(self._filling)
        for session_id in running:
            self.cancel(session_id, reason)

    def was_moved(self, *, is_told: bool) -> None:
        """A move is over; of an engine that took it, what was published needs no description again."""
        if is_told:
            self.ends.was_told(self._published)
        self._published = ()


class RankUpdate:
    """One update, on a rank that is not 0. ``report`` is rank 0's, set when it is over."""

    def __init__(self, sender: RankSender, version: int) -> None:
        self._sender = sender
        self.version = version
        self.number = 0
        self.tensors: LocalTensors | None = None
        self.taken: Kept[str, Any] = Kept()
        self._dropped: Mapping[str, str] = {}
        self._used: frozenset[int] | None = None  # see Collector.used_rules
        self._move = 0  # that comes next
        self._is_end = False  # of what this rank has to send in the present call
        self._is_sent = False
        self._is_leaving = False
        self._error: WeightSyncError | None = None
        self._ended: Mapping[str, Any] | None = None
        self.report: UpdateReport | None = None

    def __enter__(self) -> RankUpdate:
        self._sender.enter(self)
        return self

    def send(self, source: Any) -> None:
        """Offer what this rank holds; returns when every rank's part was moved."""
        self._is_sent = False
        for tensors, dropped in self._sender.collect(source):
            self._used = self._sender.used_rules
            self._offer(tensors, dropped, is_end=False)
            del tensors
        while not self._is_sent:
            self._offer(self._nothing(), {}, is_end=True)

    def _nothing(self) -> LocalTensors:
        return LocalTensors(Layout(1, (), ((),)), {}, ())

    def _offer(self, tensors: LocalTensors, dropped: Mapping[str, str], *, is_end: bool) -> None:
        sender, options = self._sender, self._sender.options
        limit_s = options.deadline_s + options.commit_timeout_s + _GRACE_S
        deadline = Deadline(limit_s, peer="trainer rank 0", stage="send")
        with sender.changed:
            move = self._move
            self.tensors, self.taken = tensors, Kept()
            self._dropped, self._is_end = dropped, is_end
            sender.changed.notify_all()
        try:
            sender.wait(lambda: self._move > move or self._is_sent or self._has_ended, deadline)
        finally:
            with sender.changed:
                self.tensors = None
            sender.wait_for_borrowers()
        if self._has_ended:
            self._raise_ended()

    @property
    def _has_ended(self) -> bool:
        return self._ended is not None

    def offered_for(self, move: int) -> Mapping[str, Any] | None:
        """What rank 0 is told of the offer; None while there is none. Called under the lock."""
        if self._error is not None:
            raise self._error
        if self.tensors is None or move != self._move:
            return None
        has_any = bool(self.tensors.layout.tensors)
        return {
            "digest": self.tensors.layout.digest if has_any else "",
            "is_end": self._is_end,
            "dropped": dict(self._dropped),
            "used_rules": None if self._used is None else sorted(self._used),
        }

    def is_left(self) -> Mapping[str, Any] | None:
        """Whether this rank has left the update, in peace. Called under the lock."""
        if self._error is not None:
            raise self._error
        return {} if self._is_leaving else None

    def heard(self, message: Mapping[str, Any]) -> None:
        """Rank 0 went on. Called under the lock."""
        match message["kind"]:
            case "moved":
                self._move = int(message["move"]) + 1
                self.tensors = None  # the next question is about the next offer
            case "sent":
                self._is_sent = True
                self.tensors = None  # the next question is about another call of send
            case "ended":
                self._ended = message

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        sender, options = self._sender, self._sender.options
        try:
            with sender.changed:
                self._is_leaving = True
                if error is not None:
                    self._error = SessionError(
                        f"trainer rank {sender.rank} left the update by {type(error).__name__}: "
                        f"{error}"[:500]
                    )
                sender.changed.notify_all()
            # Rank 0 may need its limits of prepare and of commit, and ask how it ended.
            limit_s = options.deadline_s + 4 * options.commit_timeout_s + _GRACE_S
            deadline = Deadline(limit_s, peer="trainer rank 0", stage="commit")
            if error is None:
                sender.wait(lambda: self._has_ended, deadline)
            else:  # rank 0 ends it as soon as it asks; what was raised here says more
                with suppress(WeightSyncError):
                    sender.wait(lambda: self._has_ended, deadline)
        finally:
            sender.leave()
        if error is None:
            self._raise_ended()

    def _raise_ended(self) -> None:
        ended = self._ended or {}
        if ended.get("report") is not None:
            self.report = report_from_json(ended["report"])
        said = str(ended.get("error") or "")
        if self.report is None or (said and not self.report.is_committed):
            raise SessionError(f"trainer rank 0 ended the update: {said}")
        if not self.report.is_committed:
            raise UpdateFailedError(
                f"version {self.report.version}: not every engine committed", self.report
            )
