"""The tree of errors, and its one border."""

from __future__ import annotations

import pytest

from weightsync import errors
from weightsync.errors import (
    DeadlineError,
    MissingDependencyError,
    ProtocolError,
    UpdateFailedError,
    WeightSyncError,
    from_wire,
    to_wire,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, WeightSyncError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_error_survives_the_wire(kind: type[WeightSyncError]) -> None:
    error = kind("layer 3 is 'odd': got 1, expected 2")
    back = from_wire(to_wire(error))
    assert type(back) is kind
    assert str(back) == str(error)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    text = errors.__doc__ or ""
    for kind in KINDS:
        assert kind.__name__ in text


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.LayoutError, ValueError),
        (errors.MissingDependencyError, ImportError),
        (errors.PeerLostError, ConnectionError),
        (errors.DeadlineError, TimeoutError),
        (errors.CapacityError, OSError),
    ],
)
def test_errors_are_also_what_python_calls_them(kind: type, builtin: type) -> None:
    assert issubclass(kind, builtin)


def test_a_deadline_error_names_peer_stage_limit_and_elapsed() -> None:
    text = str(DeadlineError("engine a:1", "move", 5.0, 5.25))
    for part in ("engine a:1", "'move'", "5.0 s", "5.2"):
        assert part in text


def test_a_missing_dependency_says_what_to_install() -> None:
    assert "pip install 'weightsync[p2p]'" in str(MissingDependencyError("nixl", "p2p", "too old"))


def test_foreign_errors_travel_as_the_root() -> None:
    back = from_wire(to_wire(KeyError("x")))
    assert type(back) is WeightSyncError
    assert "KeyError" in str(back)


def test_an_unknown_code_becomes_the_root_and_nonsense_a_protocol_error() -> None:
    back = from_wire({"error": "FutureError", "message": "m"})
    assert (type(back), str(back)) == (WeightSyncError, "m")
    assert type(from_wire(["no"])) is ProtocolError
    assert type(from_wire({"error": {"a": 1}})) is WeightSyncError
    # Only names of the tree: nothing else can be constructed from the wire.
    assert type(from_wire({"error": "KeyError", "message": "m"})) is WeightSyncError


def test_an_update_failure_carries_its_report() -> None:
    assert UpdateFailedError("m", report=3).report == 3
    assert UpdateFailedError("m").report is None
