"""The fake engine keeps the contract, and fails when it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from adapter_contract import AdapterContract, Subject, spec

from engine_adapter.fake import FakeEngine
from weightsync.errors import LayoutError, WeightSyncError
from weightsync.layout import NO_REGION
from weightsync.types import SlotKind


def arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.standard_normal((30, 20)).astype(np.float32),
        "t": rng.standard_normal((8, 6)).T,
        "c": np.array(rng.standard_normal()),
        "e": np.zeros((0, 3)),
    }


class TestFakeEngine(AdapterContract):
    opaque: tuple[str, ...] = ()

    def make(self) -> Subject:
        engine = FakeEngine(arrays(0), opaque=self.opaque)
        return Subject(engine, engine.weights)

    def other(self, subject: Subject, seed: int) -> Mapping[str, Any]:
        return arrays(seed)


class TestFakeEngineWithOpaqueSlots(TestFakeEngine):
    opaque = ("a", "c", "e")

    def test_opaque_slots_have_no_region(self, subject: Subject) -> None:
        for tensor in subject.adapter.layout().tensors:
            is_opaque = tensor.name in self.opaque
            assert tensor.kind is (SlotKind.OPAQUE if is_opaque else SlotKind.AFFINE)
            assert (tensor.placed[0].region == NO_REGION) is is_opaque


def test_it_answers_with_label_and_digests() -> None:
    engine = FakeEngine(arrays(0))
    version, digests = engine.generate()
    assert version is None
    assert digests == engine.digest(list(engine.weights))


@pytest.mark.parametrize("call", ["begin_update", "prepare", "commit", "abort"])
def test_it_fails_where_it_is_told(call: str) -> None:
    engine = FakeEngine(arrays(0), fail_in=call)
    arguments = {"begin_update": (spec(),), "commit": (spec(),)}.get(call, ())
    with pytest.raises(WeightSyncError, match=f"fail in {call}"):
        getattr(engine, call)(*arguments)
    assert engine.calls == [call]


def test_slots_that_cannot_be_written_are_refused() -> None:
    locked = np.ones(3)
    locked.flags.writeable = False
    for bad in (np.broadcast_to(np.ones(1), (3,)), locked):
        with pytest.raises(LayoutError, match="'w'"):
            FakeEngine({"w": bad})


def test_an_opaque_name_that_is_none_is_refused_with_the_closest() -> None:
    with pytest.raises(
        LayoutError, match="opaque slot 'weigth' is not a tensor; closest: 'weight'"
    ):
        FakeEngine({"weight": np.ones(3)}, opaque=("weigth",))


def test_an_array_that_was_replaced_shows() -> None:
    engine = FakeEngine(arrays(0))
    before = dict(engine.fingerprint())
    engine.weights["a"] = engine.weights["a"].copy()
    assert {n for n, f in engine.fingerprint().items() if f != before[n]} == {"a"}
