"""The manifest of an update."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_layout import mutations

from weightsync.errors import IntegrityError, MissingNameError, ProtocolError
from weightsync.manifest import Manifest, name_some
from weightsync.types import TensorMeta


def manifest(count: int = 2) -> Manifest:
    metas = tuple(TensorMeta(f"t{i}", "int8", (i,)) for i in range(count))
    return Manifest(metas, {m.name: 2**64 - 1 - i for i, m in enumerate(metas)}, {"tied": "t0"})


def through_json(value: Manifest) -> Any:
    return json.loads(json.dumps(value.to_json()))


def test_json_is_an_exact_inverse() -> None:
    assert Manifest.from_json(through_json(manifest())) == manifest()
    assert Manifest.from_json(through_json(Manifest((), {}))) == Manifest((), {})


def test_what_does_not_fit_its_root_is_refused() -> None:
    good = through_json(manifest())
    for i, column, value in ((0, 0, "x"), (0, 1, "uint8"), (1, 2, [2]), (1, 3, "0")):
        bad = json.loads(json.dumps(good))
        bad["tensors"][i][column] = value
        with pytest.raises(ProtocolError, match="root"):
            Manifest.from_json(bad)
    with pytest.raises(ProtocolError, match="listed twice"):
        Manifest.from_json({**good, "tensors": [*good["tensors"], good["tensors"][0]]})


def test_malformed_manifests_raise_only_protocol_errors() -> None:
    good = through_json(manifest())
    for bad in mutations(good):
        try:
            Manifest.from_json(bad)
        except ProtocolError:
            continue


def test_a_difference_is_named() -> None:
    m = manifest(8)
    m.check(m.digests, "live")
    wrong = dict(m.digests) | {"t3": 7}
    with pytest.raises(
        IntegrityError, match=r"live: 1 of 8 digests differ: 't3' \(first: got 0{15}7, expected f"
    ):
        m.check(wrong, "live")
    with pytest.raises(IntegrityError, match="and 3 more"):
        m.check(dict.fromkeys(m.digests, 0), "live")
    with pytest.raises(MissingNameError, match="'t0'"):
        m.check({n: d for n, d in m.digests.items() if n != "t0"}, "live")


def test_names_are_listed_up_to_five() -> None:
    assert name_some(["a"]) == "'a'"
    assert name_some(list("abcdefg")) == "'a', 'b', 'c', 'd', 'e' and 2 more"
