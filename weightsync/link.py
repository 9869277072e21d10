"""One trainer rank's connection to one engine: handshake, plans, and the stages of an update."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync.binding import encode_entries, pack_table
from weightsync.bucket import align
from weightsync.control import ControlClient, wait_for
from weightsync.deadline import CancelToken, Deadline
from weightsync.device_tables import CPU, device_facing, device_of, synchronize
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
from weightsync.kept import NUM_KEPT
from weightsync.layout import Layout
from weightsync.messages import (
    AbortRequest,
    AttachRequest,
    BeginRequest,
    CloseRequest,
    CommitRequest,
    ConnectRequest,
    HeartbeatRequest,
    MoveRequest,
    PlanRequest,
    PrepareRequest,
    StatusRequest,
)
from weightsync.options import SenderOptions
from weightsync.plan import RefitPlan, make_plan, slot_bytes
from weightsync.slot_pack import SlotPack
from weightsync.tensors import LocalTensors
from weightsync.transports.base import (
    Capabilities,
    RingOptions,
    SlotHeader,
    SourceEndpoint,
    StreamSource,
    Transport,
)
from weightsync.types import BUCKET_ALIGNMENT_BYTES, Availability, Contract, Outcome, RegionAddress

_CONNECT_RETRY_S = 0.1
_STATUS_LIMIT_S = 5.0
_NEVER_HEARD = "the engine does not know this session"


@dataclass
class Bound:
    """A plan with everything kept to replay it: what fills each slot."""

    plan: RefitPlan
    packs: list[SlotPack] = field(default_factory=list)
    device: str = CPU  # where the sources lie, and with them the ring
    addresses: tuple[RegionAddress, ...] = ()  # those that the tables were made for


class EngineLink:
    """Used by one thread at a time, except ``heartbeat`` and ``lost``."""

    def __init__(
        self, client: ControlClient, transport: Transport, options: SenderOptions, run_id: str
    ) -> None:
        self.client = client
        self.run_id = run_id
        self._transport = transport
        self._options = options
        self._endpoint: SourceEndpoint | None = None
        self._have: Capabilities | None = None
        self._bound: dict[str, Bound] = {}
        self._bucket_bytes = options.bucket_bytes
        self._told_epoch: str | None = None  # publication the engine was told in full
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="weightsync-link")
        self.layout: Layout | None = None
        self.epoch = ""
        self.path = ""
        self.is_broken = True
        self.phases: dict[str, float] = {}

    @property
    def peer(self) -> str:
        return self.client.peer

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
        self._drop_endpoint()
        self._adopt(answer)
        self._attach(Deadline(max(limit_s, 1.0), peer=self.peer, stage="attach"))
        self.is_broken = False
        reach("trainer.attached")

    def _adopt(self, answer: Mapping[str, Any]) -> None:
        try:
            self.epoch = str(answer["epoch"])
            self.layout = Layout.from_json(answer["layout"])
            digest = answer["layout_digest"]
        except KeyError as error:
            raise ProtocolError(f"{self.peer}: its answer to 'connect' lacks {error}") from error
        if self.layout.digest != digest:
            raise ProtocolError(f"{self.peer}: its layout does not survive the wire")
        # A slot larger than everything would only be memory that nobody uses.
        whole = sum(align(t.wire_forms[0].num_bytes) for t in self.layout.tensors)
        self._bucket_bytes = min(self._options.bucket_bytes, max(whole, BUCKET_ALIGNMENT_BYTES))
        self._bound.clear()
        self._told_epoch = None

    def _attach(self, deadline: Deadline) -> None:
        capabilities = self._transport.capabilities()
        self._endpoint = endpoint = self._transport.open_source(device_facing(self.layout))
        request = AttachRequest(
            self.run_id, self._transport.name, dict(endpoint.descriptor()), deadline.remaining_s()
        )
        # The engine connects back while it answers, so both ends are driven at once.
        asked = self._pool.submit(
            self.client.call, request, limit_s=deadline.remaining_s() + _STATUS_LIMIT_S
        )
        token = deadline.token = CancelToken()
        asked.add_done_callback(lambda f: token.cancel("refused") if f.exception() else None)
        try:
            endpoint.accept(deadline)
        except CancelledError:
            asked.result()  # raises what the engine said
            raise
        answer = asked.result()
        contracts = dict(capabilities.contracts)
        try:
            self.path = str(answer["path"])
            for name, found in answer["contracts"].items():
                theirs = Availability(**found)
                contracts[Contract(name)] = _worse(contracts.get(Contract(name)), theirs)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self.peer}: malformed answer to 'attach': {error!r}") from error
        self._have = replace(capabilities, contracts=contracts)
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
        return None if self._endpoint is None else self._endpoint.lost()

    def heartbeat(self) -> None:
        """Renew the lease; a failure shows in the stage that runs, not here."""
        with suppress(WeightSyncError):
            self.client.call(HeartbeatRequest(self.run_id), limit_s=self._options.lease_s)

    # --- plan ---------------------------------------------------------------------------------------

    def plan(self, tensors: LocalTensors) -> Bound:
        """The plan for these tensors, made and agreed once for each source layout."""
        if self.layout is None:
            raise ConfigError(f"{self.peer}: not connected")
        key = tensors.layout.digest
        bound = self._bound.get(key)
        if bound is None:
            start_s = time.perf_counter()
            plan = make_plan(
                tensors.layout,
                self.layout,
                bucket_bytes=self._bucket_bytes,
                capabilities=self._capabilities(),
                choice=self._options.contract,
            )
            self._agree(plan, tensors.layout)
            self._check_contract(plan)
            bound = self._bound[key] = Bound(plan)
            while len(self._bound) > NUM_KEPT:  # as many as the engine keeps
                self._bound.pop(next(iter(self._bound)))
            self._spent("plan", start_s)
        if bound.plan.contract is Contract.STREAM and bound.addresses != tensors.addresses:
            self._bind(bound, tensors)
            bound.addresses = tensors.addresses
        return bound

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

    def _bind(self, bound: Bound, tensors: LocalTensors) -> None:
        addresses = {a.region: a.ptr for a in tensors.addresses}
        plan, bound.device = bound.plan, device_of(tensors.addresses, "what the trainer sends")
        bound.packs = [
            SlotPack.make(
                pack_table(plan, c, tensors.layout, addresses), encode_entries(c), bound.device
            )
            for c in plan.buckets
        ]

    # --- stages -------------------------------------------------------------------------------------

    def begin(self, session_id: str, version: int, scope: list[str] | None) -> None:
        o = self._options
        self._wait(
            lambda wait_s: BeginRequest(
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
            ),
            o.deadline_s + o.commit_timeout_s,
            "begin",
        )

    def publish(self, bound: Bound, tensors: LocalTensors) -> Mapping[str, Any]:
        """Make what the plan reads directly readable, and what was written to it visible; cheap for
        what was published before. A stream has nothing to publish."""
        if self._endpoint is None:
            raise ConfigError(f"{self.peer}: not connected")
        if bound.plan.contract is not Contract.DIRECT:
            return {}
        start_s = time.perf_counter()
        try:
            return self._endpoint.direct().publish(tensors.addresses)
        finally:
            self._spent("register", start_s)

    def move(
        self,
        session_id: str,
        move_id: int,
        bound: Bound,
        published: Mapping[str, Any],
        token: CancelToken,
    ) -> None:
        """Returns when the engine has read everything: the sources may then change.

        ``published`` is what :meth:`publish` said of the same tensors.
        """
        is_direct = bound.plan.contract is Contract.DIRECT
        epoch = str(published.get("epoch", ""))
        publication = None if not is_direct or epoch == self._told_epoch else dict(published)
        reach("trainer.move")
        ask: Callable[[float], MoveRequest] = lambda wait_s: MoveRequest(  # noqa: E731
            session_id, move_id, bound.plan.digest, epoch, publication, wait_s
        )
        limit_s = self._options.deadline_s + self._options.commit_timeout_s
        if is_direct:
            self._wait(ask, limit_s, "move")
            self._told_epoch = epoch
            return
        asked = self._pool.submit(self._wait, ask, limit_s, "move")
        self._fill(session_id, move_id, bound, asked, token)

    def _fill(
        self,
        session_id: str,
        move_id: int,
        bound: Bound,
        asked: Future[dict[str, Any]],
        token: CancelToken,
    ) -> None:
        """Fill slots while the engine empties them; the engine's own error says more than ours."""
        asked.add_done_callback(
            lambda f: token.cancel("the engine ended") if f.exception() else None
        )
        deadline = Deadline(self._options.deadline_s, peer=self.peer, stage="move", token=token)
        try:
            self._fill_slots(session_id, move_id, bound, deadline)
        except (CancelledError, PeerLostError):
            if asked.done() and asked.exception() is not None:
                asked.result()
            raise
        asked.result()

    def _fill_slots(self, session_id: str, move_id: int, bound: Bound, deadline: Deadline) -> None:
        if self._endpoint is None:
            raise ConfigError(f"{self.peer}: not connected")
        size = slot_bytes(bound.plan.bucket_bytes)
        ring = RingOptions(self._options.num_slots, size, bound.device)
        start_s = time.perf_counter()
        stream = self._endpoint.stream(ring, deadline)
        self._spent("register", start_s)
        synchronize(bound.device)  # with whatever writes the sources
        stream.begin_move(session_id, deadline)
        last = len(bound.packs) - 1
        for i, pack in enumerate(bound.packs):
            self._fill_slot(stream, pack, (session_id, move_id, i, i == last), deadline)
            reach("trainer.bucket")
        stream.flush(deadline)

    def _fill_slot(
        self,
        stream: StreamSource,
        pack: SlotPack,
        place: tuple[str, int, int, bool],
        deadline: Deadline,
    ) -> None:
        session_id, move_id, sequence, is_last = place
        slot = stream.acquire(deadline)
        cancel = None if deadline.token is None else deadline.token.native_flag
        start_s = time.perf_counter()
        pack.fill(slot.ptr, num_threads=self._options.num_threads, cancel=cancel)
        self._spent("pack", start_s)
        deadline.check()
        behind, num_words = pack.words_offset_bytes, len(pack.words)
        header = SlotHeader(
            session_id, move_id, sequence, pack.data_bytes, behind, num_words, is_last
        )
        stream.submit(slot, header)

    def prepare(self, session_id: str, manifest: dict[str, Any]) -> None:
        limit_s = self._options.deadline_s + self._options.commit_timeout_s
        self._wait(lambda w: PrepareRequest(session_id, manifest, w), limit_s, "prepare")

    def commit(self, session_id: str) -> dict[str, Any]:
        """The outcome and the engine's own statistics."""
        limit_s = 2 * self._options.commit_timeout_s + 1.0
        return self._wait(lambda w: CommitRequest(session_id, w), limit_s, "commit")

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
            return wait_for(self.client, make_request, limit_s=limit_s, stage=stage)
        except (PeerLostError, EpochError, DeadlineError, TransportError, ProtocolError):
            self.is_broken = True  # the next update connects again, whatever was half done
            raise
        finally:
            self._spent(stage, start_s)

    def _spent(self, phase: str, start_s: float) -> None:
        spent_s = time.perf_counter() - start_s
        self.phases[phase] = self.phases.get(phase, 0.0) + spent_s

    # --- end ----------------------------------------------------------------------------------------

    def _drop_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def close(self) -> None:
        """Tell the engine, release everything. Idempotent."""
        if not self.is_broken:
            with suppress(WeightSyncError):
                self.client.call(CloseRequest(self.run_id, 2.0), limit_s=_STATUS_LIMIT_S)
        self.is_broken = True
        self._drop_endpoint()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.client.close()


def new_session_id() -> str:
    """Never used before by anyone."""
    return secrets.token_hex(8)


def _worse(ours: Availability | None, theirs: Availability) -> Availability:
    return ours if ours is not None and not ours.is_usable else theirs
