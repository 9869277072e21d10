"""Control requests as events of the leader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.errors import ProtocolError
from weightsync.messages import (
    AbortRequest,
    BeginRequest,
    CloseRequest,
    CommitRequest,
    ConnectRequest,
    MoveRequest,
    PrepareRequest,
    Request,
    verb_of,
)
from weightsync.session import (
    Abort,
    Begin,
    Close,
    Commit,
    Connect,
    LeaderEvent,
    Move,
    Payload,
    Prepare,
    Scope,
    SessionSpec,
)
from weightsync.session_wire import BY_RANK
from weightsync.types import PauseMode, Placement, VerifyMode


def event_of(request: Request, number: int, world_size: int) -> LeaderEvent:
    """The event of a request of a session; ``number`` names whoever waits for its answer.

    Raises :class:`ProtocolError` for a malformed one.
    """
    match request:
        case ConnectRequest():
            return Connect(number, request.run_id, request.lease_s)
        case BeginRequest():
            return Begin(number, request.epoch, _spec_of(request))
        case MoveRequest():
            payload = _move_payload(request, world_size)
            return Move(number, request.session_id, request.move_id, payload)
        case PrepareRequest():
            return Prepare(number, request.session_id, _manifests(request, world_size))
        case CommitRequest():
            return Commit(number, request.session_id)
        case AbortRequest():
            return Abort(number, request.session_id, request.reason)
        case CloseRequest():
            return Close(number, request.run_id)
        case _:
            raise ProtocolError(f"{verb_of(request)} is not a request of a session")


def _move_payload(request: MoveRequest, world_size: int) -> Payload:
    by_rank: dict[str, Any] = {str(rank): {"sources": []} for rank in range(world_size)}
    for entry in request.sources:
        if not isinstance(entry, list) or len(entry) != 4 or str(entry[1]) not in by_rank:
            raise ProtocolError(
                f"move: {entry!r:.80} is no (trainer rank, engine rank, epoch, publication) of an "
                f"engine of {world_size} ranks"
            )
        source, target, epoch, publication = entry
        by_rank[str(target)]["sources"].append([source, epoch, publication])
    return {"plan_digest": request.plan_digest, BY_RANK: by_rank}


def _manifests(request: PrepareRequest, world_size: int) -> Payload:
    if len(request.manifests) != world_size:
        raise ProtocolError(
            f"prepare: {len(request.manifests)} manifests for an engine of {world_size} ranks"
        )
    listed: Mapping[str, Any] = {
        str(rank): {"manifest": manifest} for rank, manifest in enumerate(request.manifests)
    }
    return {BY_RANK: listed}


def _spec_of(request: BeginRequest) -> SessionSpec:
    names = None if request.scope is None else frozenset(map(str, request.scope))
    try:
        return SessionSpec(
            request.session_id,
            request.run_id,
            request.version,
            Scope(names),
            Placement(request.placement),
            request.deadline_s,
            request.commit_timeout_s,
            VerifyMode(request.verify),
            PauseMode(request.pause_mode),
        )
    except ValueError as error:
        raise ProtocolError(f"begin: {error}") from error
