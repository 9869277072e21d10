"""The manifest of an update."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from test_layout import mutations

from weightsync.errors import IntegrityError, ProtocolError
from weightsync.manifest import Manifest, ManifestBasis, manifest_basis, name_some
from weightsync.types import TensorMeta


def basis_of(count: int = 2) -> ManifestBasis:
    metas = [TensorMeta(f"t{i}", "int8", (i,)) for i in range(count)]
    return manifest_basis([("plan a", metas[:1]), ("plan b", metas[1:])])


def manifest(count: int = 2) -> Manifest:
    return Manifest(
        basis_of(count), np.array([2**64 - 1 - i for i in range(count)], dtype=np.uint64)
    )


def through_json(value: Manifest) -> Any:
    return json.loads(json.dumps(value.to_json()))


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_json_is_an_exact_inverse(count: int) -> None:
    sent = manifest(count)
    found = Manifest.from_json(through_json(sent), basis_of(count))
    assert found.digests.tolist() == sent.digests.tolist()
    assert found.root == sent.root


def test_a_name_is_found() -> None:
    assert basis_of(3).places(["t2", "t0"]).tolist() == [2, 0]
    with pytest.raises(KeyError):
        basis_of(3).places(["t3"])


def test_other_moves_are_refused() -> None:
    good = through_json(manifest())
    for plans in ([], ["plan a"], ["plan b", "plan a"], ["plan a", "plan b", "plan b"]):
        with pytest.raises(IntegrityError, match="exactly what arrived"):
            Manifest.from_json({**good, "plans": plans}, basis_of())


def test_what_does_not_fit_its_root_is_refused() -> None:
    good = through_json(manifest())
    other = through_json(Manifest(basis_of(), np.array([1, 2], dtype=np.uint64)))
    with pytest.raises(ProtocolError, match="root"):
        Manifest.from_json({**good, "digests": other["digests"]}, basis_of())
    with pytest.raises(ProtocolError, match="16 B of digests for 3 tensors"):
        Manifest.from_json(good, basis_of(3))
    with pytest.raises(ProtocolError, match="malformed"):
        Manifest.from_json({**good, "digests": "n\u00f6"}, basis_of())


def test_malformed_manifests_raise_only_errors_of_ours() -> None:
    good = through_json(manifest())
    for bad in mutations(good):
        with suppress(ProtocolError, IntegrityError):
            Manifest.from_json(bad, basis_of())


def test_a_difference_is_named() -> None:
    m = manifest(8)
    m.check(m.digests, "live")
    wrong = m.digests.copy()
    wrong[3] = 7
    with pytest.raises(
        IntegrityError, match=r"live: 1 of 8 digests differ: 't3' \(first: got 0{15}7, expected f"
    ):
        m.check(wrong, "live")
    with pytest.raises(IntegrityError, match="and 3 more"):
        m.check(np.zeros(8, dtype=np.uint64), "live")


def test_names_are_listed_up_to_five() -> None:
    assert name_some(["a"]) == "'a'"
    assert name_some(list("abcdefg")) == "'a', 'b', 'c', 'd', 'e' and 2 more"
