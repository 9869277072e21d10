"""Orders, hellos and reports as JSON, for ranks of an engine that are processes of their own.

``{"kind": "Pull", ...}`` with the record's fields; see :mod:`weightsync.session` for what must hold of
whoever carries them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, get_type_hints

from weightsync.errors import ProtocolError, WeightSyncError, from_wire, to_wire
from weightsync.records import evolve
from weightsync.session import (
    Discard,
    Open,
    Order,
    Payload,
    Ping,
    Place,
    Pull,
    RankHello,
    RankReport,
    Resume,
    Scope,
    SessionSpec,
    Stage,
    Verify,
    Version,
    Welcome,
)
from weightsync.types import PauseMode, Placement, VerifyMode

ORDERS: Final = (Welcome, Open, Pull, Verify, Place, Resume, Discard, Ping)
SAYINGS: Final = (RankHello, RankReport)
_RECORDS: Final = {record.__name__: record for record in (*ORDERS, *SAYINGS)}
_HINTS: Final = {r: get_type_hints(r) for r in (*_RECORDS.values(), SessionSpec, Version)}

#: In a payload: what is meant for one rank alone, by its number.
BY_RANK: Final = "by_rank"


def for_rank(order: Order, rank: int) -> Order:
    """The order with what of its payload is meant for this rank, and nothing of the others'."""
    if not isinstance(order, Pull | Verify):
        return order
    return evolve(order, payload=payload_for(order.payload, rank))


def payload_for(payload: Payload, rank: int) -> Payload:
    """What a payload says to one rank."""
    if BY_RANK not in payload:
        return payload
    common = {key: value for key, value in payload.items() if key != BY_RANK}
    return {**common, **payload[BY_RANK].get(str(rank), {})}


def to_json(record: Order | RankHello | RankReport) -> dict[str, Any]:
    """Plain JSON; :func:`from_json` is its inverse."""
    return {"kind": type(record).__name__, **_fields_of(record)}


def _fields_of(record: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(record, f.name)) for f in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, Scope):
        return None if value.names is None else sorted(value.names)
    if isinstance(value, SessionSpec | Version):
        return _fields_of(value)
    if isinstance(value, WeightSyncError):
        return to_wire(value)
    return value


def from_json(value: Any, kinds: tuple[type, ...]) -> Any:
    """The record of one of these kinds. Raises :class:`ProtocolError` for anything else."""
    record = _RECORDS.get(str(value.get("kind"))) if isinstance(value, Mapping) else None
    if record not in kinds or record is None:
        raise ProtocolError(f"expected one of {', '.join(k.__name__ for k in kinds)}")
    return _parsed(record, {k: v for k, v in value.items() if k != "kind"})


def _parsed(record: Any, value: Any) -> Any:
    hints = _HINTS[record]
    if not isinstance(value, Mapping) or value.keys() != hints.keys():
        raise ProtocolError(f"{record.__name__}: expected the fields {', '.join(hints)}")
    try:
        return record(**{name: _READ[hint](value[name]) for name, hint in hints.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"{record.__name__}: {error!r}") from error


def _exactly(kind: type) -> Any:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return read


def _seconds(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return float(value)


def _or_none(read: Any) -> Any:
    return lambda value: None if value is None else read(value)


def _scope(value: Any) -> Scope:
    if value is None:
        return Scope()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError("a scope is a list of names, or null")
    return Scope(frozenset(value))


def _payload(value: Any) -> Payload:
    if not isinstance(value, dict):
        raise TypeError("a payload is an object")
    return value


_READ: Final[Mapping[Any, Any]] = {
    str: _exactly(str),
    int: _exactly(int),
    bool: _exactly(bool),
    float: _seconds,
    str | None: _or_none(_exactly(str)),
    Payload: _payload,
    Scope: _scope,
    Stage: Stage,
    Placement: Placement,
    VerifyMode: VerifyMode,
    PauseMode: PauseMode,
    SessionSpec: lambda value: _parsed(SessionSpec, value),
    Version: lambda value: _parsed(Version, value),
    WeightSyncError | None: _or_none(from_wire),
}
