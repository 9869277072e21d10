"""The trainer's connection to one engine: handshake, plans, and the stages of an update.

Rank 0 of a trainer has one for each engine. The other ranks take part through a :class:`Helpers`: they
join transports of their own, publish, fill slots.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from weightsync.bucket import align
from weightsync.control import ControlClient, wait_for, wait_for_stages
from weightsync.deadline import CancelToken, Deadline
from weightsync.digest_shares import digest_shares
from weightsync.errors import (
    BusyError,
    CancelledError,
    ConfigError,
    DeadlineError,
    EpochError,
    IntegrityError,
    PeerLostError,
    ProtocolError,
    TransportError,
    WeightSyncError,
)
from weightsync.faults import reach
from weightsync.fill import FillSeat
from weightsync.kept import NUM_KEPT
from weightsync.layout import Layout
from weightsync.messages import (
    AbortRequest,
    BeginRequest,
    CloseRequest,
    CommitRequest,
    ConnectRequest,
    HeartbeatRequest,
    ManifestRequest,
    MoveRequest,
    PlanRequest,
    PrepareRequest,
    Stage,
    StatusRequest,
)
from weightsync.options import SenderOptions
from weightsync.plan import RefitPlan, make_plan
from weightsync.source_ends import (
    Bound,
    Contracts,
    Publication,
    SourceEnds,
    both_ends,
    targets_of,
    worst,
)
from weightsync.tensors import LocalTensors
from weightsync.transports.base import Capabilities, Transport
from weightsync.types import BUCKET_ALIGNMENT_BYTES, Contract, Outcome

_CONNECT_RETRY_S = 0.1
_STATUS_LIMIT_S = 5.0
_LATE_S = 1.0
#: Manifests of so many tensors are a matter of microseconds.
_FEW_TENSORS = 2048
#: How long those of more may take to arrive by themselves; later they come with the exchange.
_APART_LIMIT_S = 5.0
_NEVER_HEARD = "the engine does not know this session"


class Helpers(Protocol):
    """The other ranks of a trainer, in what concerns one engine."""

    def attach(
        self,
        connection: int,
        layout: Layout,
        targets: Mapping[int, Sequence[int]],
        deadline: Deadline,
    ) -> Contracts:
        """Each named rank joins the transport with these ranks of an engine of that layout; what the
        worst can do. Whatever was joined in another ``connection`` is over."""
        ...

    def share(self, plan: RefitPlan, source: Layout, num_targets: int) -> None:
        """Hand the plan for an engine of so many ranks to every rank that has a part in it."""
        ...

    def fill(
        self, plan: RefitPlan, ranks: Sequence[int], session_id: str, move_id: int
    ) -> Sequence[Future[Any]]:
        """Those ranks begin to fill their slots."""
        ...

    def cancel(self, session_id: str, reason: str) -> None:
        """Stop filling for a session."""
        ...


class EngineLink:
    """Used by one thread at a time, except ``heartbeat`` and ``lost``."""

    def __init__(
        self,
        client: ControlClient,
        transport: Transport,
        options: SenderOptions,
        run_id: str,
        helpers: Helpers | None = None,
    ) -> None:
        self.client = client
        self.run_id = run_id
        self._transport = transport
        self._options = options
        self._helpers = helpers  # None: this rank is the trainer's only one
        self.ends = SourceEnds(client, transport, options, run_id, 0, self._add_phase)
        self._have: Capabilities | None = None
        self._bound: dict[str, Bound] = {}
        self._bucket_bytes = options.bucket_bytes
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="weightsync-link")
        self.layout: Layout | None = None
        self.epoch = ""
        self.is_broken = True
        self.joins_stages = False  # an engine that can be asked for several stages at once
        self.takes_manifests = False  # and to which what prepare needs may come apart
        self.is_stale = False  # like broken, but the engine still hears us
        self._num_connections = 0
        self._begun_s = 0.0  # when the open session was asked for
        self.phases: dict[str, float] = {}

    @property
    def peer(self) -> str:
        return self.client.peer

    @property
    def _stage_limit_s(self) -> float:
        """An engine answers within its own two limits; what it says of the second must be heard."""
        return self._options.deadline_s + self._options.commit_timeout_s + _LATE_S

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return 1 if self.layout is None else self.layout.world_size

    @property
    def path(self) -> str:
        """How the bytes of this rank go, in words."""
        return self.ends.path

    # --- handshake ----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Handshake with the engine; waits for one that does not listen yet, or that another run
        holds, up to ``connect_timeout_s``. Raises what the last attempt met."""
        limit_s = self._options.connect_timeout_s
        start_s = time.monotonic()
        while True:
            left_s = limit_s - (time.monotonic() - start_s)
            try:
                answer = self.client.call(
                    ConnectRequest(self.run_id, self._options.lease_s), limit_s=max(left_s, 0.5)
                )
                break
            except (PeerLostError, BusyError) as error:
                if left_s <= _CONNECT_RETRY_S:
                    kind = type(error)
                    raise kind(
                        f"{self.peer}: not connected after {limit_s:.1f} s: {error}"
                    ) from error
                threading.Event().wait(_CONNECT_RETRY_S)
        reach("trainer.connected")
        self.ends.drop()
        self._num_connections += 1
        layout = self._adopt(answer)
        if self._helpers is None:  # else it shows with the first plan who feeds whom
            everyone = {0: tuple(range(layout.world_size))}
            self._attach(everyone, Deadline(max(limit_s, 1.0), peer=self.peer, stage="attach"))
        self.is_broken = self.is_stale = False
        reach("trainer.attached")

    def _adopt(self, answer: Mapping[str, Any]) -> Layout:
        try:
            self.epoch = str(answer["epoch"])
            self.layout = Layout.from_json(answer["layout"])
            digest = answer["layout_digest"]
            self.joins_stages = self.client.is_remote and bool(answer.get("joins_stages"))
            self.takes_manifests = bool(answer.get("takes_manifests"))
        except KeyError as error:
            raise ProtocolError(f"{self.peer}: its answer to 'connect' lacks {error}") from error
        if self.layout.digest != digest:
            raise ProtocolError(f"{self.peer}: its layout does not survive the wire")
        # A slot larger than everything would only be memory that nobody uses.
        whole = sum(align(t.wire_forms[0].num_bytes) for t in self.layout.tensors)
        self._bucket_bytes = min(self._options.bucket_bytes, max(whole, BUCKET_ALIGNMENT_BYTES))
        self._bound.clear()
        return self.layout

    def _attach(self, targets: Mapping[int, Sequence[int]], deadline: Deadline) -> None:
        """Every rank joins the transport with the engine ranks that it feeds."""
        if self.layout is None:
            raise ConfigError(f"{self.peer}: not connected")
        contracts: Contracts = {}
        others = {rank: targets[rank] for rank in targets if rank != 0}
        if others and self._helpers is not None:
            contracts = self._helpers.attach(self._num_connections, self.layout, others, deadline)
        if 0 in targets:
            contracts = worst(contracts, self.ends.attach(targets[0], self.layout, deadline))
        have = self._transport.capabilities()
        self._have = replace(have, contracts=both_ends(have.contracts, contracts))
        self._check_speed()

    def _check_speed(self) -> None:
        direct = self._capabilities().contracts.get(Contract.DIRECT)
        if direct is None or (direct.is_usable and not direct.is_slow):
            return
        what = "slow" if direct.is_usable else "not usable"
        self._options.warn_slow(
            f"{self._transport.name} to {self.peer}: direct reads are {what} ({self.path}): "
            f"{direct.reason}. {direct.remedy}"
        )

    def _capabilities(self) -> Capabilities:
        if self._have is None:
            raise ConfigError(f"{self.peer}: not connected")
        return self._have

    def lost(self) -> str | None:
        """Why the engine's process is known to be gone."""
        return self.ends.lost()

    @property
    def needs_connecting(self) -> bool:
        """Whether the engine, or the transport to it, was lost since it was connected."""
        return self.is_broken or self.is_stale or self.lost() is not None

    def heartbeat(self) -> None:
        """Renew the lease; a failure shows in the stage that runs, not here."""
        with suppress(WeightSyncError):
            self.client.call(HeartbeatRequest(self.run_id), limit_s=self._options.lease_s)

    # --- plan ---------------------------------------------------------------------------------------

    def plan(self, tensors: LocalTensors, source: Layout) -> Bound:
        """The plan for these tensors, made and agreed once for each layout of the trainer's ranks;
        ``tensors`` are this rank's."""
        if self.layout is None:
            raise ConfigError(f"{self.peer}: not connected")
        key = source.digest
        bound = self._bound.get(key)
        if bound is None:
            start_s = time.perf_counter()
            bound = self._bound[key] = self._new_plan(self.layout, source)
            while len(self._bound) > NUM_KEPT:  # as many as the engine keeps
                self._bound.pop(next(iter(self._bound)))
            self._spent("plan", start_s)
        self.ends.bind(bound, tensors)
        return bound

    def _new_plan(self, target: Layout, source: Layout) -> Bound:
        def make(have: Capabilities) -> RefitPlan:
            return make_plan(
                source,
                target,
                bucket_bytes=self._bucket_bytes,
                capabilities=have,
                choice=self._options.contract,
            )

        if self._helpers is not None:
            who = targets_of(make(self._transport.capabilities()))
            limit_s = self._options.connect_timeout_s
            self._attach(who, Deadline(limit_s, peer=self.peer, stage="attach"))
        plan = make(self._capabilities())
        self._agree(plan, source)
        self._check_contract(plan)
        if self._helpers is not None:
            self._helpers.share(plan, source, target.world_size)
        shares = digest_shares(plan, source.world_size, target.world_size)
        feeds = targets_of(plan)
        others = tuple(rank for rank in feeds if rank != 0)
        return Bound(plan, source, shares, feeds.get(0, ()), others)

    def _check_contract(self, plan: RefitPlan) -> None:
        """A stream where the transport would read directly, were it not for a conversion."""
        direct = self._capabilities().contracts.get(Contract.DIRECT)
        is_direct_usable = direct is not None and direct.is_usable
        if (
            plan.contract is Contract.STREAM
            and is_direct_usable
            and "converted" in plan.contract_reason
        ):
            self._options.warn_slow(
                f"{self._transport.name} to {self.peer}: streaming instead of direct reads: "
                f"{plan.contract_reason}. Send the engine's dtype, or ask for contract='stream'"
            )

    def _agree(self, plan: RefitPlan, source: Layout) -> None:
        request = PlanRequest(self.run_id, plan.to_json(), source.to_json())
        answer = self.client.call(request, limit_s=self._options.request_timeout_s)
        if answer.get("digest") != plan.digest:
            raise IntegrityError(
                f"{self.peer}: understood another plan ({answer.get('digest')!r}, ours is "
                f"{plan.digest!r}); use one version of weightsync on both sides"
            )
        reach("trainer.planned")

    # --- stages -------------------------------------------------------------------------------------

    def begin(self, session_id: str, version: int, scope: list[str] | None) -> None:
        self._wait(self._begin_request(session_id, version, scope), self._stage_limit_s, "begin")

    def _begin_request(
        self, session_id: str, version: int, scope: list[str] | None
    ) -> Callable[[float], BeginRequest]:
        o = self._options
        self._begun_s = time.perf_counter()
        return lambda wait_s: BeginRequest(
            self.run_id,
            self.epoch,
            session_id,
            version,
            scope,
            o.placement.value,
            o.verify.value,
            o.pause_mode.value,
            o.deadline_s,
            o.commit_timeout_s,
            wait_s,
        )

    def _move_request(
        self, session_id: str, move_id: int, bound: Bound, published: Sequence[Publication]
    ) -> Callable[[float], MoveRequest]:
        reach("trainer.move")
        sources = [list(entry) for entry in published]
        return lambda wait_s: MoveRequest(session_id, move_id, bound.plan.digest, sources, wait_s)

    def _opening(
        self,
        session_id: str,
        version: int,
        scope: list[str] | None,
        move_id: int,
        bound: Bound,
        published: Sequence[Publication],
    ) -> dict[str, Callable[[float], Stage]]:
        return {
            "begin": self._begin_request(session_id, version, scope),
            "move": self._move_request(session_id, move_id, bound, published),
        }

    def begin_and_move(
        self,
        session_id: str,
        version: int,
        scope: list[str] | None,
        move_id: int,
        bound: Bound,
        published: Sequence[Publication],
    ) -> None:
        """The first move of a session, read directly, asked for together with its begin."""
        opening = self._opening(session_id, version, scope, move_id, bound, published)
        self._wait_for_stages(opening, self._stage_limit_s)
        self.ends.was_told(published)

    def begin_to_commit(
        self,
        session_id: str,
        version: int,
        scope: list[str] | None,
        move_id: int,
        bound: Bound,
        published: Sequence[Publication],
        make_manifests: Callable[[], list[dict[str, Any]]],
    ) -> dict[str, Any]:
        """A whole session of one move that is read directly, in one exchange; answered as ``commit``.

        What long manifests take, to make, to send and to read, they take while the engine works.
        """
        is_apart = self.takes_manifests and len(bound.plan.metas) > _FEW_TENSORS
        is_first = True
        have_come = False

        def send_manifests() -> None:
            nonlocal have_come
            reach("trainer.manifest")
            request = ManifestRequest(session_id, make_manifests())
            # Where they are lost they come with the next exchange.
            with suppress(PeerLostError, DeadlineError, TransportError):
                self.client.aside().call(request, limit_s=_APART_LIMIT_S)
                have_come = True

        def prepare(wait_s: float) -> PrepareRequest:
            nonlocal is_first
            come_apart = is_apart and (is_first or have_come)
            is_first = False
            manifests = [] if come_apart else make_manifests()
            return self._prepare_request(session_id, manifests)(wait_s)

        stages: Mapping[str, Callable[[float], Stage]] = {
            **self._opening(session_id, version, scope, move_id, bound, published),
            "prepare": prepare,
            "commit": lambda wait_s: CommitRequest(session_id, wait_s),
        }
        limit_s = self._stage_limit_s + self._commit_limit_s
        meanwhile = send_manifests if is_apart else None
        answer = self._wait_for_stages(stages, limit_s, meanwhile)[-1]
        self._spent("session", self._begun_s)
        self.ends.was_told(published)
        return answer

    def move(
        self,
        session_id: str,
        move_id: int,
        bound: Bound,
        published: Sequence[Publication],
        token: CancelToken,
        seat: FillSeat,
    ) -> None:
        """Returns when the engine has read everything: the sources may then change.

        ``published`` is what all ranks said of the same tensors; ``seat`` is this engine's among those
        that may be sent the same slots.
        """
        ask = self._move_request(session_id, move_id, bound, published)
        limit_s = self._stage_limit_s
        if bound.plan.contract is Contract.DIRECT:
            seat.leave()
            self._wait(ask, limit_s, "move")
            self.ends.was_told(published)
            return
        asked = self._pool.submit(self._wait, ask, limit_s, "move")
        self._fill(session_id, move_id, bound, asked, token, seat)

    def _fill(
        self,
        session_id: str,
        move_id: int,
        bound: Bound,
        asked: Future[dict[str, Any]],
        token: CancelToken,
        seat: FillSeat,
    ) -> None:
        """Fill slots while the engine empties them; the engine's own error says more than ours."""
        asked.add_done_callback(
            lambda f: token.cancel("the engine ended") if f.exception() else None
        )
        others: Sequence[Future[Any]] = ()
        try:
            if self._helpers is not None:
                others = self._helpers.fill(bound.plan, bound.helpers, session_id, move_id)
                for future in others:
                    future.add_done_callback(
                        lambda f: token.cancel("a trainer rank failed") if f.exception() else None
                    )
            self.ends.fill(bound, session_id, move_id, token, seat)
            self._wait_for_all([asked, *others])
        except BaseException as error:
            self._give_fill_up(session_id, error, others)
            if not isinstance(error, CancelledError | PeerLostError):
                raise
            for future in (asked, *others):
                if future.done() and future.exception() is not None:
                    future.result()
            raise

    def _wait_for_all(self, futures: Sequence[Future[Any]]) -> None:
        """Until all have ended well; raises what the first that failed raised."""
        limit_s = self._stage_limit_s
        done, pending = wait(futures, timeout=limit_s, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending:
            raise DeadlineError(f"{self.peer} or a trainer rank", "move", limit_s, limit_s)

    def _give_fill_up(
        self, session_id: str, error: BaseException, others: Sequence[Future[Any]]
    ) -> None:
        """No other rank may fill slots any more when this returns, or the transports are joined anew."""
        if self._helpers is None:
            return
        self._helpers.cancel(session_id, f"{type(error).__name__}: {error}"[:200])
        _, pending = wait(others, timeout=_STATUS_LIMIT_S)
        self.is_stale |= bool(pending)

    def prepare(self, session_id: str, manifests: list[dict[str, Any]]) -> None:
        """``manifests`` has one for each rank of the engine."""
        self._wait(self._prepare_request(session_id, manifests), self._stage_limit_s, "prepare")

    @staticmethod
    def _prepare_request(
        session_id: str, manifests: list[dict[str, Any]]
    ) -> Callable[[float], PrepareRequest]:
        return lambda wait_s: PrepareRequest(session_id, manifests, wait_s)

    @property
    def _commit_limit_s(self) -> float:
        return 2 * self._options.commit_timeout_s + 1.0

    def commit(self, session_id: str) -> dict[str, Any]:
        """The outcome and the engine's own statistics."""
        limit_s = self._commit_limit_s
        answer = self._wait(lambda w: CommitRequest(session_id, w), limit_s, "commit")
        self._spent("session", self._begun_s)
        return answer

    def prepare_and_commit(
        self, session_id: str, manifests: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Both, asked for together: for a trainer with nobody else to wait for between them."""
        stages: Mapping[str, Callable[[float], Stage]] = {
            "prepare": self._prepare_request(session_id, manifests),
            "commit": lambda wait_s: CommitRequest(session_id, wait_s),
        }
        answers = self._wait_for_stages(stages, self._stage_limit_s + self._commit_limit_s)
        self._spent("session", self._begun_s)
        return answers[-1]

    def abort(self, session_id: str, reason: str) -> tuple[Outcome, str]:
        """Give a session up, whatever its state; says how it ended."""
        limit_s = self._options.commit_timeout_s + 1.0
        try:
            answer = self._wait(lambda w: AbortRequest(session_id, reason, w), limit_s, "abort")
        except WeightSyncError:
            return self.outcome(session_id)
        return Outcome(answer["outcome"]), str(answer.get("detail", ""))

    def outcome(self, session_id: str) -> tuple[Outcome, str]:
        """Ask how a session ended; ``UNKNOWN`` while it cannot be said."""
        try:
            answer = self.status(session_id)
        except WeightSyncError as error:
            return Outcome.UNKNOWN, str(error)
        if answer["epoch"] != self.epoch:
            return Outcome.UNKNOWN, "the engine was restarted; it holds the weights it starts with"
        if answer["outcome"] in ("open", "unknown"):
            return Outcome.UNKNOWN, _NEVER_HEARD if answer["outcome"] == "unknown" else "still open"
        return Outcome(answer["outcome"]), str(answer["detail"])

    @staticmethod
    def forgot(detail: str) -> bool:
        """Whether the engine, in the same life, does not know the session of an outcome: if it was
        never asked to commit it, it never will."""
        return detail == _NEVER_HEARD

    def status(self, session_id: str | None = None) -> dict[str, Any]:
        return self.client.call(StatusRequest(session_id), limit_s=_STATUS_LIMIT_S)

    def _wait(
        self, make_request: Callable[[float], Any], limit_s: float, stage: str
    ) -> dict[str, Any]:
        start_s = time.perf_counter()
        try:
            with self._noting_loss():
                return wait_for(self.client, make_request, limit_s=limit_s, stage=stage)
        finally:
            self._spent(stage, start_s)

    def _wait_for_stages(
        self,
        stages: Mapping[str, Callable[[float], Stage]],
        limit_s: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[dict[str, Any]]:
        """What the engine took for each but the last is its phase; the last has all the rest."""
        start_s = time.perf_counter()
        first_s = 0.0
        *firsts, last = stages
        try:
            with self._noting_loss():
                answers = wait_for_stages(
                    self.client,
                    list(stages.values()),
                    limit_s=limit_s,
                    stage=" and ".join(stages),
                    meanwhile=meanwhile,
                )
            for stage, answer in zip(firsts, answers, strict=False):
                took_s = float(answer.get("took_s", 0.0))
                self._add_phase(stage, took_s)
                first_s += took_s
            return answers
        finally:
            self._add_phase(last, time.perf_counter() - start_s - first_s)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except (PeerLostError, EpochError, DeadlineError, TransportError, ProtocolError):
            self.is_broken = True  # the next update connects again, whatever was half done
            raise

    def _spent(self, phase: str, start_s: float) -> None:
        self._add_phase(phase, time.perf_counter() - start_s)

    def _add_phase(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    # --- end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tell the engine, release everything. Idempotent."""
        if not self.is_broken:
            with suppress(WeightSyncError):
                self.client.call(CloseRequest(self.run_id, 2.0), limit_s=_STATUS_LIMIT_S)
        self.is_broken = True
        self.ends.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def new_session_id() -> str:
    """Never used before by anyone."""
    return secrets.token_hex(8)
