"""Orders and reports survive the wire between ranks, whole; anything else is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightsync.errors import DeadlineError, IntegrityError, ProtocolError
from weightsync.session import (
    Discard,
    Open,
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
from weightsync.session_wire import ORDERS, SAYINGS, for_rank, from_json, to_json
from weightsync.types import PauseMode, Placement, VerifyMode

STAMP: Any = {"leader_epoch": "l", "rank_epoch": "r", "seq": 7, "refusal": "why"}
SPEC = SessionSpec(
    "s", "run", 3, Scope(frozenset({"b", "a"})), Placement.IN_PLACE, 20, 2.5,
    VerifyMode.READ, PauseMode.ABORT,
)  # fmt: skip
RECORDS = [
    Welcome(leader_epoch="l", serve=True, nonce=1, challenge=2, rank_epoch="r", seq=7),
    Open(SPEC, **STAMP),
    Open(SessionSpec("s", "run", 3, Scope(), Placement.STAGED, 20.0, 2.5), **STAMP),
    Pull("s", 4, {"plan_digest": "d", "sources": [[0, "e", None]]}, **STAMP),
    Verify("s", {"manifest": {"root": "0"}}, **STAMP),
    Place("s", **STAMP),
    Resume("s", Version("run", 3), **STAMP),
    Discard("s", None, **STAMP),
    Discard("s", "mixed", **STAMP),
    Ping(None, **STAMP),
    RankHello(1, "r", None, 3, 4),
    RankReport(1, "r", "s", Stage.MOVE, 4, None, True, "l", "mixed"),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_survives(record: Any) -> None:
    assert from_json(json.loads(json.dumps(to_json(record))), (*ORDERS, *SAYINGS)) == record


def test_an_error_survives_as_its_kind() -> None:
    report = RankReport(1, "r", "s", Stage.PREPARE, error=IntegrityError("w: digests differ"))
    found = from_json(json.loads(json.dumps(to_json(report))), SAYINGS).error
    assert (type(found), str(found)) == (IntegrityError, "w: digests differ")
    late = RankReport(1, "r", "s", Stage.MOVE, error=DeadlineError("rank 1", "move", 1.0, 1.5))
    assert str(from_json(to_json(late), SAYINGS).error) == str(late.error)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"kind": "Nonsense"},
        {"kind": ["Ping"]},
        {"kind": "RankHello"},
        {**to_json(RECORDS[5]), "more": 1},
        {**to_json(RECORDS[5]), "seq": "7"},
        {**to_json(RECORDS[5]), "seq": True},
        {**to_json(RECORDS[1]), "spec": None},
        {**to_json(RECORDS[1]), "spec": {**to_json(RECORDS[1])["spec"], "scope": [1]}},
        {**to_json(RECORDS[1]), "spec": {**to_json(RECORDS[1])["spec"], "placement": "there"}},
        {**to_json(RECORDS[3]), "payload": []},
    ],
)
def test_what_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        from_json(value, ORDERS)


def test_a_rank_gets_what_is_meant_for_it() -> None:
    order = Pull("s", 0, {"plan_digest": "d", "by_rank": {"0": {"sources": [1]}, "1": {"x": 2}}})
    assert for_rank(order, 0).payload == {"plan_digest": "d", "sources": [1]}  # type: ignore[union-attr]
    assert for_rank(order, 1).payload == {"plan_digest": "d", "x": 2}  # type: ignore[union-attr]
    assert for_rank(order, 2).payload == {"plan_digest": "d"}  # type: ignore[union-attr]
    assert for_rank(Place("s"), 1) == Place("s")
