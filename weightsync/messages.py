"""Control messages: typed, versioned, JSON. Payload never travels here.

Each verb of the control protocol has one request record. Fields are checked by their annotations when
a message is decoded; a wrong or missing field is a :class:`ProtocolError` naming it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from weightsync.errors import ProtocolError
from weightsync.types import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """Take the engine for a run. Answer: epoch, layout, version, world_size."""

    run_id: str
    lease_s: float


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """Join a transport, one rank of each side. Answer: what the engine's end can do with this very
    peer."""

    run_id: str
    source_rank: int
    target_rank: int
    transport: str
    descriptor: dict[str, Any]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Hand over a plan and the layout of its source. Answer: the plan's digest as the engine
    computed it."""

    run_id: str
    plan: dict[str, Any]
    source_layout: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BeginRequest:
    """Open a session. Durations are seconds on the engine's clock."""

    run_id: str
    epoch: str
    session_id: str
    version: int
    scope: list[Any] | None  # names; None: everything
    placement: str
    verify: str
    pause_mode: str
    deadline_s: float
    commit_timeout_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Pull what a plan names.

    ``sources`` lists (trainer rank, engine rank, epoch, publication): what that pair's source published
    (direct only, else ``""`` and null). A publication of an epoch that the engine rank was told before
    may be null.
    """

    session_id: str
    move_id: int
    plan_digest: str
    sources: list[Any]
    wait_s: float


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """The manifests of a session whose prepare was asked for without them, in one exchange with what goes
    before. Answered at once."""

    session_id: str
    manifests: list[Any]


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """``manifests`` has one for each engine rank: of what that rank gets. Among ``stages`` there may be none:
    they come by themselves (:class:`ManifestRequest`), while the stages before are at work."""

    session_id: str
    manifests: list[Any]
    wait_s: float


@dataclass(frozen=True, slots=True)
class CommitRequest:
    session_id: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class AbortRequest:
    session_id: str
    reason: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class HeartbeatRequest:
    run_id: str


@dataclass(frozen=True, slots=True)
class CloseRequest:
    run_id: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """What the engine is doing; answered without any lock."""

    session_id: str | None


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Digests of live tensors, read back at a step boundary; None: of all. Answer: ``ranks``, for each
    rank the digests of the boxes that it holds."""

    names: list[Any] | None
    wait_s: float


@dataclass(frozen=True, slots=True)
class StagesRequest:
    """Stages of one session in one exchange, each begun when the one before is over: what fails is
    answered as it would be alone, and nothing follows it. Answer: ``answers`` of as many as there was
    time for, each with the seconds ``took_s``; ``pending`` if more must be asked for.

    ``stages`` are requests of :data:`STAGES`, as :func:`encode_stage` writes them.
    """

    stages: list[Any]
    wait_s: float


Request = (
    StagesRequest | ConnectRequest | AttachRequest | PlanRequest | BeginRequest | MoveRequest
    | ManifestRequest | PrepareRequest | CommitRequest | AbortRequest | HeartbeatRequest | CloseRequest
    | StatusRequest | DigestRequest
)  # fmt: skip

#: verb on the wire -> its request record
VERBS: Final[Mapping[str, type[Request]]] = MappingProxyType(
    {
        "connect": ConnectRequest,
        "attach": AttachRequest,
        "plan": PlanRequest,
        "begin": BeginRequest,
        "move": MoveRequest,
        "manifest": ManifestRequest,
        "prepare": PrepareRequest,
        "commit": CommitRequest,
        "abort": AbortRequest,
        "heartbeat": HeartbeatRequest,
        "close": CloseRequest,
        "status": StatusRequest,
        "digest": DigestRequest,
        "stages": StagesRequest,
    }
)
_VERB_OF = {record: verb for verb, record in VERBS.items()}


def verb_of(request: Request) -> str:
    return _VERB_OF[type(request)]


def name_of(request: Request) -> str:
    """What a request is called in errors."""
    if isinstance(request, StagesRequest):
        return " and ".join(str(entry["verb"]) for entry in request.stages)
    return verb_of(request)


#: Field -> type of each request, in order; evaluating annotations takes longer than all else here.
_HINTS: Final[dict[type, dict[str, Any]]] = {r: get_type_hints(r) for r in VERBS.values()}


def encode(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    # Shallow: a publication or a manifest is large, and nobody changes it on the way.
    return {"protocol": PROTOCOL_VERSION, **{n: getattr(request, n) for n in _HINTS[type(request)]}}


#: Compact JSON; to make an encoder for each message takes longer than most messages do.
to_json: Final = json.JSONEncoder(separators=(",", ":")).encode


class WrittenList(list[Any]):
    """A list that nobody changes any more, and its JSON, written ahead of the request it is for."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__(items)
        self.json = to_json(list(self))


def request_json(request: Request) -> str:
    """The JSON of :func:`encode`."""
    if isinstance(request, StagesRequest):
        stages = ",".join(map(_object_json, request.stages))
        rest = to_json({**encode(request), "stages": None})
        return rest.replace('"stages":null', f'"stages":[{stages}]', 1)
    return _object_json(encode(request))


def _object_json(value: Mapping[str, Any]) -> str:
    written = {name: field for name, field in value.items() if isinstance(field, WrittenList)}
    if not written:
        return to_json(value)
    others = to_json({name: field for name, field in value.items() if name not in written})
    added = "".join(f",{to_json(name)}:{field.json}" for name, field in written.items())
    return f"{others[:-1]}{added}}}"


Stage = BeginRequest | MoveRequest | PrepareRequest | CommitRequest

#: What may be asked for together with others.
STAGES: Final[Mapping[str, type[Stage]]] = MappingProxyType(
    {
        "begin": BeginRequest,
        "move": MoveRequest,
        "prepare": PrepareRequest,
        "commit": CommitRequest,
    }
)


def encode_stage(request: Stage) -> dict[str, Any]:
    """An entry of a :class:`StagesRequest`."""
    return {"verb": verb_of(request), **encode(request)}


def decode_stage(value: Any) -> Stage:
    """The inverse. Raises :class:`ProtocolError`."""
    verb = value.get("verb") if isinstance(value, dict) else None
    record = STAGES.get(verb) if isinstance(verb, str) else None
    if record is None:
        raise ProtocolError(f"stages: {verb!r} is no stage; known: {', '.join(STAGES)}")
    return decode(record, {name: field for name, field in value.items() if name != "verb"})


R = TypeVar("R")


def decode(record: type[R], value: Any) -> R:
    """The request in a JSON object. Raises :class:`ProtocolError` naming the field."""
    if not isinstance(value, dict):
        raise ProtocolError(f"a message must be a JSON object, got {type(value).__name__}")
    protocol = value.get("protocol")
    if protocol != PROTOCOL_VERSION or isinstance(protocol, bool):
        raise ProtocolError(
            f"message of protocol {protocol!r}; this side speaks {PROTOCOL_VERSION}: use one version "
            "of weightsync on both sides"
        )
    hints = _HINTS[record]
    unknown = value.keys() - hints.keys() - {"protocol"}
    if unknown:
        raise ProtocolError(f"{record.__name__}: unknown fields {sorted(unknown)}")
    fields = {name: _checked(record, name, hint, value) for name, hint in hints.items()}
    return record(**fields)


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(kind) or kind for kind in kinds)


#: The classes that each hint allows.
_KINDS: Final = {hint: _kinds_of(hint) for hints in _HINTS.values() for hint in hints.values()}


def _checked(record: type, name: str, hint: Any, value: dict[str, Any]) -> Any:
    if name not in value:
        raise ProtocolError(f"{record.__name__}: field {name!r} is missing")
    found = value[name]
    for plain in _KINDS[hint]:
        if plain is float and isinstance(found, int) and not isinstance(found, bool):
            return float(found)
        if isinstance(found, plain) and not (plain is int and isinstance(found, bool)):
            return found
    raise ProtocolError(
        f"{record.__name__}: field {name!r} must be {hint}, got {type(found).__name__}"
    )
