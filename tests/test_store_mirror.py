"""A publisher that compares where the weights lie: its versions are those of one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightsync.codec import Variant
from weightsync.store import LocalCheckpoint, Publisher, Store, mirror
from weightsync.store.cutting import Cut, Cutter
from weightsync.store.pieces import first_byte
from weightsync.store.weights import DeviceWeight, Weight, pieces_of
from weightsync.types import TensorMeta

SHAPES = {"a": (300, 700), "b": (70_000,), "c": (3,), "e": (0, 4)}


class Placed:
    """Weights whose addresses are those of this process: the device is the CPU, as in its twin."""

    def __init__(self, shift_bytes: int = 0) -> None:
        random = np.random.default_rng(1)
        self.arrays: dict[str, Any] = {}
        self.weights: dict[str, DeviceWeight] = {}
        for name, shape in SHAPES.items():
            meta = TensorMeta(name, "bfloat16", shape)
            memory = np.zeros(meta.num_bytes + 32, dtype=np.uint8)
            at = -memory.ctypes.data % 16 + shift_bytes
            array = memory[at : at + meta.num_bytes].view(np.uint16)
            drawn = random.standard_normal(array.size).astype(np.float32) * 0.02
            array[:] = drawn.view(np.uint32) >> 16
            self.arrays[name] = array
            self.weights[name] = DeviceWeight(meta, array.ctypes.data, "cpu", memory)

    def step(self, share: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        for array in self.arrays.values():
            mask = random.random(array.size) < share
            array[mask] += random.integers(1, 3, int(mask.sum())).astype(np.uint16)

    def scramble(self) -> None:
        random = np.random.default_rng(9)
        self.arrays["b"][:] = random.integers(0, 65535, self.arrays["b"].size)

    @property
    def host(self) -> dict[str, Weight]:
        return {n: Weight(w.meta, w.data.copy()) for n, w in self.weights.items()}


def payload(store: Store, version: int) -> bytes:
    manifest = store.manifest(version)
    folder = store.payload_path(manifest)
    return b"".join((Path(str(folder)) / entry.name).read_bytes() for entry in manifest.files)


@pytest.mark.parametrize(("shift_bytes", "advance_bytes"), [(0, 1 << 30), (0, 1), (2, 1)])
def test_versions_are_those_of_the_host(
    tmp_path: Path, shift_bytes: int, advance_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all tensors advance in one launch, or each in its own."""
    monkeypatch.setattr(mirror, "ADVANCE_BYTES", advance_bytes)
    placed = Placed(shift_bytes)
    there = Publisher(Store(tmp_path, "device"), is_mirrored=True, num_threads=2)
    here = Publisher(Store(tmp_path, "host"), num_threads=2)
    for version in range(5):
        encoded = there.encode(version, placed.weights)
        expected = here.encode(version, placed.host)
        placed.step(0.5, 100 + version)  # the trainer goes on before the commit
        assert there.commit(encoded).target.root == here.commit(expected).target.root
        assert payload(there.store, version) == payload(here.store, version)
        aligned = (
            {} if version == 0 or shift_bytes == 0 else {"its address is no multiple of 16": 3}
        )
        assert encoded.on_host == aligned
        for name, weight in there._snapshot.weights.items():  # type: ignore[union-attr]
            placed.arrays[name][:] = weight.data.view(np.uint16)
        placed.step(0.01, version)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(there.store)
    there.close()
    there.close()


def test_pieces_are_compared_where_they_lie(tmp_path: Path) -> None:
    """Rows in place; a piece that is no rows of its tensor is a copy there, as the sender makes it."""
    placed = Placed()
    cutter = Cutter([Cut("a", dim=0, parts=3), Cut("b", dim=0, parts=2)])

    def there_in_pieces() -> dict[str, DeviceWeight]:
        found = {}
        for weight in placed.weights.values():
            for piece in cutter.pieces(weight.meta):
                at = first_byte(weight.meta, piece.box)
                assert at is not None
                box_of = None if piece.is_whole else piece
                found[piece.meta.name] = DeviceWeight(
                    piece.meta, weight.ptr + at, "cpu", weight, box_of
                )
        return found

    def here_in_pieces() -> dict[str, Weight]:
        parts = [p for w in placed.host.values() for p in pieces_of(w, cutter)]
        return {part.meta.name: part for part in parts}

    there = Publisher(Store(tmp_path, "device"), is_mirrored=True, num_threads=2)
    here = Publisher(Store(tmp_path, "host"), num_threads=2)
    for version in range(3):
        one = there.publish(version, there_in_pieces())
        other = here.publish(version, here_in_pieces())
        assert [e.pieces for e in one.tensors] == [e.pieces for e in other.tensors]
        assert one.target == other.target
        assert payload(there.store, version) == payload(here.store, version)
        placed.step(0.01, version)
    assert any(e.pieces for e in one.tensors)
    there.close()


def test_what_the_device_cannot_is_coded_here(tmp_path: Path) -> None:
    placed = Placed()
    there = Publisher(Store(tmp_path, "device"), is_mirrored=True)
    here = Publisher(Store(tmp_path, "host"))
    there.publish(0, placed.weights)
    here.publish(0, placed.host)
    placed.scramble()
    encoded = there.encode(1, placed.weights)
    assert encoded.on_host == {"a block changed nearly everywhere": 1}
    there.commit(encoded)
    here.publish(1, placed.host)
    assert payload(there.store, 1) == payload(here.store, 1)
    there.close()


def test_a_version_that_was_not_committed_leaves_the_mirror_alone(tmp_path: Path) -> None:
    placed = Placed()
    there = Publisher(Store(tmp_path, "device"), is_mirrored=True)
    here = Publisher(Store(tmp_path, "host"))
    there.publish(0, placed.weights)
    here.publish(0, placed.host)
    placed.step(0.01, 1)
    given_up = there.encode(1, placed.weights)
    kept = {n: [bytes(r) for _, r in rs] for n, rs in (given_up.records or {}).items()}
    placed.step(0.01, 2)
    there.publish(2, placed.weights)
    here.publish(2, placed.host)
    assert payload(there.store, 2) == payload(here.store, 2)
    # Records of the first lie in memory of their own.
    again = {n: [bytes(r) for _, r in rs] for n, rs in (given_up.records or {}).items()}
    assert kept == again
    there.close()


def test_absolute_records_are_coded_on_the_host(tmp_path: Path) -> None:
    placed = Placed()
    store = Store(tmp_path, "device")
    there = Publisher(store, is_mirrored=True, variant=Variant.ABSOLUTE)
    there.publish(0, placed.weights)
    placed.step(0.01, 1)
    there.publish(1, placed.weights)
    here = Publisher(Store(tmp_path, "host"), variant=Variant.ABSOLUTE)
    other = Placed()
    here.publish(0, other.host)
    other.step(0.01, 1)
    here.publish(1, other.host)
    assert payload(store, 1) == payload(here.store, 1)


def test_weights_that_move_to_the_host_and_back(tmp_path: Path) -> None:
    """Their versions go on being deltas, and the snapshot stays where it is."""
    placed = Placed()
    there = Publisher(Store(tmp_path, "device"), is_mirrored=True, num_threads=2)
    here = Publisher(Store(tmp_path, "host"))
    for version in range(4):
        one = there.publish(version, placed.host if version == 2 else placed.weights)
        assert one.kind == ("delta" if version else "full")
        assert one.target.root == here.publish(version, placed.host).target.root
        assert payload(there.store, version) == payload(here.store, version)
        placed.step(0.01, version)
    anchor = there.anchor()
    files = {f.name: f.hash for f in anchor.files}
    assert files == {f.name: f.hash for f in here.anchor().files}
    there.close()
