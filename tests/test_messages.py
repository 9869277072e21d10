"""Control messages: typed, versioned JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest

from weightsync.errors import ProtocolError
from weightsync.messages import VERBS, Request, decode, encode, verb_of

SAMPLES: dict[type, Any] = {str: "s", int: 3, float: 1.5, dict: {"a": [1, None]}, list: ["x"]}


def sample(record: type) -> Any:
    hints = {f.name: f.type for f in dataclasses.fields(record)}
    values: dict[str, Any] = {}
    for name, hint in hints.items():
        text = str(hint)
        kind = next(k for k in SAMPLES if text.startswith(k.__name__))
        values[name] = SAMPLES[kind]
    return record(**values)


@pytest.mark.parametrize("verb", VERBS)
def test_every_request_survives_the_wire(verb: str) -> None:
    request = sample(VERBS[verb])
    assert verb_of(request) == verb
    assert decode(VERBS[verb], json.loads(json.dumps(encode(request)))) == request


def test_every_record_has_a_verb() -> None:
    assert set(get_args(Request)) == set(VERBS.values())


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_missing_or_unknown_field_is_named(verb: str) -> None:
    good = encode(sample(VERBS[verb]))
    for name in good:
        with pytest.raises(ProtocolError, match=name):
            decode(VERBS[verb], {k: v for k, v in good.items() if k != name})
        for bad in (object(), True, {1: 2}.keys(), b"x"):
            with pytest.raises(ProtocolError, match=name):
                decode(VERBS[verb], {**good, name: bad})
    with pytest.raises(ProtocolError, match=r"unknown fields.*extra"):
        decode(VERBS[verb], {**good, "extra": 1})


def test_what_is_no_object_or_of_another_protocol_is_refused() -> None:
    for bad in (None, [], "x", 3):
        with pytest.raises(ProtocolError, match="must be a JSON object"):
            decode(VERBS["status"], bad)
    for protocol in (None, 2, "1"):
        with pytest.raises(ProtocolError, match="this side speaks 1: use one version"):
            decode(VERBS["status"], {"protocol": protocol, "session_id": None})


def test_whole_numbers_serve_as_seconds_and_truth_as_nothing() -> None:
    record = VERBS["connect"]
    base = {"protocol": 1, "run_id": "r"}
    assert decode(record, {**base, "lease_s": 3}).lease_s == 3.0  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match="lease_s"):
        decode(record, {**base, "lease_s": True})
