"""Lists of objects compared by identity."""

from __future__ import annotations

from typing import Any

from weightsync.native import same_objects


class Loud:
    """Must not be asked anything."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared by value")

    __hash__ = None  # type: ignore[assignment]


def test_only_references_are_compared() -> None:
    a, b = Loud(), Loud()
    assert same_objects([a, b, a], [a, b, a])
    assert same_objects([], [])
    others: list[list[Any]] = [[a, a, b], [a, b], [a, b, a, a], []]
    for other in others:
        assert not same_objects([a, b, a], other)
