"""One trainer rank's ends of the transports to one engine: an endpoint for each rank of it that this one
feeds, what was published through them, and the slots that are filled for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from weightsync.binding import encode_entries, pack_table
from weightsync.control import ControlClient
from weightsync.deadline import CancelToken, Deadline
from weightsync.device_tables import (
    CPU,
    OwnedDigests,
    device_facing,
    device_of,
    owned_digests,
    synchronize,
)
from weightsync.digest import part_rows
from weightsync.digest_shares import DigestShares
from weightsync.errors import CancelledError, ConfigError, ProtocolError
from weightsync.fill import FillJob, FillSeat, fill_all
from weightsync.layout import Layout
from weightsync.manifest import Digests
from weightsync.messages import AttachRequest
from weightsync.options import SenderOptions
from weightsync.pair_plan import pair_plan
from weightsync.plan import RefitPlan, slot_bytes
from weightsync.slot_pack import SlotPack
from weightsync.tensors import LocalTensors
from weightsync.transports.base import RingOptions, SourceEndpoint, Transport
from weightsync.types import Availability, Contract, RegionAddress

_GRACE_S: Final = 5.0

#: (trainer rank, engine rank, epoch, publication or None): one entry of a move.
Publication = tuple[int, int, str, Any]
Contracts = dict[Contract, Availability]


@dataclass
class Bound:
    """A plan with everything that this rank keeps to replay it."""

    plan: RefitPlan
    source: Layout  # of all trainer ranks
    shares: DigestShares
    targets: tuple[int, ...] = ()  # engine ranks that this rank feeds
    helpers: tuple[int, ...] = ()  # on rank 0: the other trainer ranks that have a part in it
    packs: dict[int, list[SlotPack]] = field(default_factory=dict)  # of each, for streams
    device: str = CPU  # where the sources lie, and with them the ring
    addresses: tuple[RegionAddress, ...] = ()  # those that the packs were made for
    digests: OwnedDigests | None = None
    digest_addresses: tuple[RegionAddress, ...] = ()
    digest_device: str = CPU


def targets_of(plan: RefitPlan) -> dict[int, tuple[int, ...]]:
    """The engine ranks that each trainer rank feeds, rising."""
    columns = plan.transfers
    pairs = np.unique(np.stack((columns.source_rank, columns.target_rank), axis=1), axis=0)
    found: dict[int, list[int]] = {}
    for source, target in pairs.tolist():
        found.setdefault(source, []).append(target)
    return {rank: tuple(targets) for rank, targets in found.items()}


class SourceEnds:
    """Used by one thread at a time, except ``lost``. ``spent`` is told the seconds of each phase."""

    def __init__(
        self,
        client: ControlClient,
        transport: Transport,
        options: SenderOptions,
        run_id: str,
        rank: int,
        spent: Callable[[str, float], None],
    ) -> None:
        self._client, self._transport, self._options = client, transport, options
        self._run_id, self._rank, self._spent = run_id, rank, spent
        self._endpoints: dict[int, SourceEndpoint] = {}
        self._told: dict[int, str] = {}  # epoch of the publication that each engine rank was told
        self._paths: dict[int, str] = {}
        self._contracts: dict[int, Contracts] = {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="weightsync-ends")

    @property
    def path(self) -> str:
        """How the bytes go, in words."""
        return ", ".join(dict.fromkeys(self._paths[t] for t in sorted(self._paths)))

    def lost(self) -> str | None:
        """Why a process of the engine is known to be gone."""
        for endpoint in list(self._endpoints.values()):
            if (reason := endpoint.lost()) is not None:
                return reason
        return None

    # --- handshake ----------------------------------------------------------------------------------

    def attach(self, targets: Sequence[int], layout: Layout, deadline: Deadline) -> Contracts:
        """Join the transport with these ranks of the engine, those that have not been; what can be done
        with the worst of them."""
        for target in targets:
            if target not in self._endpoints:
                self._attach(target, layout, deadline)
        found: Contracts = {}
        for target in targets:
            found = worst(found, self._contracts[target])
        return found

    def _attach(self, target: int, layout: Layout, deadline: Deadline) -> None:
        deadline.check()
        endpoint = self._transport.open_source(device_facing(layout))
        if layout.world_size > 1:
            deadline = Deadline(
                max(deadline.remaining_s(), 1e-3),
                peer=f"rank {target} of {self._client.peer}",
                stage=deadline.stage,
                token=deadline.token,
            )
        try:
            with deadline.naming_stage():
                answer = self._introduce(endpoint, target, deadline)
            self._paths[target] = str(answer["path"])
            self._contracts[target] = {
                Contract(name): Availability(**found) for name, found in answer["contracts"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            endpoint.close()
            raise ProtocolError(
                f"{self._client.peer}: malformed answer to 'attach': {error!r}"
            ) from error
        except BaseException:
            endpoint.close()
            raise
        self._endpoints[target] = endpoint

    def _introduce(
        self, endpoint: SourceEndpoint, target: int, deadline: Deadline
    ) -> dict[str, Any]:
        left_s = max(deadline.remaining_s(), 1e-3)
        request = AttachRequest(
            self._run_id, self._rank, target, self._transport.name, dict(endpoint.descriptor()),
            left_s,
        )  # fmt: skip
        # The engine connects back while it answers, so both ends are driven at once.
        asked = self._pool.submit(self._client.call, request, limit_s=left_s + _GRACE_S)
        token = CancelToken()
        both = Deadline(left_s, peer=deadline.peer, stage=deadline.stage, token=token)
        asked.add_done_callback(lambda f: token.cancel("refused") if f.exception() else None)
        try:
            endpoint.accept(both)
        except CancelledError:
            asked.result()  # raises what the engine said
            raise
        return asked.result()

    # --- what a plan needs ----------------------------------------------------------------------------

    def bind(self, bound: Bound, tensors: LocalTensors) -> None:
        """Make what fills the slots of a stream, unless it was made for tensors that lie there."""
        if bound.plan.contract is not Contract.STREAM or not bound.targets:
            return
        if bound.addresses == tensors.addresses:
            return
        addresses = {a.region: a.ptr for a in tensors.addresses}
        bound.device = device_of(tensors.addresses, "what the trainer sends")
        bound.packs = {}
        for target in bound.targets:
            pair = pair_plan(bound.plan, self._rank, target).plan
            bound.packs[target] = [
                SlotPack.make(
                    pack_table(pair, c, bound.source, addresses), encode_entries(c), bound.device
                )
                for c in pair.buckets
            ]
        bound.addresses = tensors.addresses

    def publish(self, bound: Bound, tensors: LocalTensors) -> list[Publication]:
        """Make what the plan reads directly readable, and what was written to it visible; cheap for
        what was published before. A stream has nothing to publish."""
        if bound.plan.contract is not Contract.DIRECT:
            return [(self._rank, target, "", None) for target in bound.targets]
        start_s = time.perf_counter()
        found: list[Publication] = []
        for target in bound.targets:
            said = dict(self._endpoint(target).direct().publish(tensors.addresses))
            epoch = str(said.get("epoch", ""))
            is_told = self._told.get(target) == epoch
            found.append((self._rank, target, epoch, None if is_told else said))
        self._spent("register", time.perf_counter() - start_s)
        return found

    def was_told(self, published: Sequence[Publication]) -> None:
        """The engine took these publications: their epochs need no description any more."""
        for source, target, epoch, _ in published:
            if source == self._rank and epoch:
                self._told[target] = epoch

    def _endpoint(self, target: int) -> SourceEndpoint:
        if target not in self._endpoints:
            raise ConfigError(f"{self._client.peer}: rank {target} is not attached")
        return self._endpoints[target]

    # --- streams ------------------------------------------------------------------------------------

    def fill(
        self, bound: Bound, session_id: str, move_id: int, token: CancelToken, seat: FillSeat
    ) -> None:
        """Fill slots while the engine empties them; returns when it has emptied all."""
        limit_s = self._options.deadline_s
        deadline = Deadline(limit_s, peer=self._client.peer, stage="move", token=token)
        synchronize(bound.device)  # with whatever writes the sources
        size = slot_bytes(bound.plan.bucket_bytes)
        ring = RingOptions(self._options.num_slots, size, bound.device)
        is_shared = self._transport.capabilities().streams_to_many
        jobs = [
            FillJob(
                seat.engine, target, self._endpoint(target), bound.packs[target], ring, session_id,
                move_id, deadline, is_shared,
            )
            for target in bound.targets
        ]  # fmt: skip
        with deadline.naming_stage():
            fill_all(self._transport, seat, jobs, self._options.num_threads, self._spent)

    # --- end ----------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Part with every rank of the engine; :meth:`attach` joins them again."""
        endpoints, self._endpoints = self._endpoints, {}
        self._told.clear()
        self._paths.clear()
        self._contracts.clear()
        for endpoint in endpoints.values():
            endpoint.close()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.drop()
        self._pool.shutdown(wait=False, cancel_futures=True)


def digest_sources(bound: Bound, rank: int, tensors: LocalTensors, num_threads: int) -> Digests:
    """What this rank digests for a plan: uint64, one sum for each owner of ``bound.shares``."""
    if not bound.shares.pieces[rank]:
        return np.zeros(bound.shares.num_owners, dtype=np.uint64)
    if bound.digests is None or bound.digest_addresses != tensors.addresses:
        by_region = {a.region: a.ptr for a in tensors.addresses}
        rows: list[tuple[int, ...]] = []
        owners: list[int] = []
        for part, owner in zip(*bound.shares.parts(rank, bound.source, by_region), strict=True):
            new = part_rows(part)
            rows += new
            owners += [owner] * len(new)
        bound.digest_device = device_of(tensors.addresses, "what the trainer sends")
        bound.digests = owned_digests(rows, owners, bound.shares.num_owners, bound.digest_device)
        bound.digest_addresses = tensors.addresses
    synchronize(bound.digest_device)
    found: Digests = np.array(bound.digests.run(num_threads), dtype=np.uint64)
    return found


def worst(some: Contracts, others: Contracts) -> Contracts:
    """What can be done with all of them."""
    found = dict(some)
    for contract, theirs in others.items():
        ours = found.get(contract)
        keeps = ours is not None and (not ours.is_usable or (theirs.is_usable and ours.is_slow))
        found[contract] = ours if ours is not None and keeps else theirs
    return found


def both_ends(ours: Mapping[Contract, Availability], theirs: Contracts) -> Contracts:
    """What a transport offers here, as far as the engine's end can do it."""
    found = dict(ours)
    for contract, there in theirs.items():
        here = ours.get(contract)
        found[contract] = here if here is not None and not here.is_usable else there
    return found


def contracts_to_json(contracts: Mapping[Contract, Availability]) -> dict[str, Any]:
    """For another rank of the trainer."""
    return {
        contract.value: [a.is_usable, a.reason, a.remedy, a.is_slow]
        for contract, a in contracts.items()
    }


def contracts_from_json(value: Any) -> Contracts:
    """The inverse. Raises :class:`ProtocolError`."""
    try:
        return {Contract(name): Availability(*fields) for name, fields in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ProtocolError(f"malformed capabilities of a trainer rank: {error!r}") from error
