"""Many tensors at once: records read side by side, files written side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.helpers import RUN, contents, weights
from weightsync.codec.device_decode import PADDING_BYTES
from weightsync.errors import DeadlineError, IntegrityError, UnavailableError, WeightSyncError
from weightsync.store import LocalCheckpoint, Publisher, Store, bulk, payload
from weightsync.store.bulk import Step, read_records
from weightsync.store.weights import DeviceWeight, Joined, Weight
from weightsync.types import TensorMeta

pytestmark = pytest.mark.usefixtures("record_form")


def delta(directory: Path, **options: Any) -> tuple[Store, list[Step]]:
    """A store with a delta, and what of it has records."""
    store = Store(directory, RUN)
    publisher = Publisher(store, **options)
    for version in (0, 1):
        publisher.publish(version, weights(version))
    manifest = store.manifest(1)
    return store, [(store, manifest, entry) for entry in manifest.tensors if entry.has_records]


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("file_bytes", [200, 1 << 30])
def test_records_are_those_that_are_read_one_by_one(
    tmp_path: Path, file_bytes: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "READ_BYTES", 100)
    store, steps = delta(tmp_path, file_bytes=file_bytes)
    assert (len(store.manifest(1).files) > 1) == (file_bytes == 200)
    for order in (steps, steps[::-1]):
        data, found = read_records(order, num_threads)
        expected = [list(store.records(manifest, entry)) for _, manifest, entry in order]
        assert [[place for place, _ in one] for one in found] == [
            [place for place, _ in one] for one in expected
        ]
        joined = b"".join(record.tobytes() for one in expected for _, record in one)
        assert data.tobytes() == joined + bytes(PADDING_BYTES)
        assert b"".join(r.tobytes() for one in found for _, r in one) == joined
    data, found = read_records([], num_threads)
    assert (data.size, found) == (PADDING_BYTES, [])


@pytest.mark.parametrize("num_threads", [1, 4])
def test_reading_ends_when_its_time_does(
    tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow file system must not keep a rank past its deadline."""
    monkeypatch.setattr(bulk, "READ_BYTES", 64)
    _, steps = delta(tmp_path)
    looks, reads = [0], [0]
    read = bulk.read_exactly

    def check() -> None:
        looks[0] += 1
        if looks[0] > 3:
            raise DeadlineError("the store", "fetch", 1.0, 1.0)

    def counted(*args: Any) -> None:
        reads[0] += 1
        read(*args)

    monkeypatch.setattr(bulk, "read_exactly", counted)
    with pytest.raises(DeadlineError):
        read_records(steps, num_threads, check=check)
    assert reads[0] == 3
    reads[0] = 0
    read_records(steps, num_threads, check=lambda: None)
    assert reads[0] > 10


def test_room_that_is_too_small_is_no_room(tmp_path: Path) -> None:
    _, steps = delta(tmp_path)
    with pytest.raises(ValueError, match="room"):
        read_records(steps, 1, lambda num_bytes: np.empty(num_bytes - 1, dtype=np.uint8))


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, record_form: str) -> None:
    store, steps = delta(tmp_path)
    path = store.payload_path(store.manifest(1)) / store.manifest(1).files[0].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(IntegrityError, match="ends early"):
        read_records(steps, 2)
    message = "packed records" if record_form == "packed" else "has a record out of place"
    path.write_bytes(whole[:8] + bytes([whole[8] ^ 8]) + whole[9:])  # the first element of a span
    with pytest.raises(IntegrityError, match=message):
        read_records(steps, 2)
    path.write_bytes(whole[:32] + (1 << 20).to_bytes(4, "little") + whole[36:])  # its bytes
    with pytest.raises(IntegrityError, match=message):
        read_records(steps, 2)
    path.unlink()
    with pytest.raises(UnavailableError, match="is not there"):
        read_records(steps, 2)


def test_files_that_are_written_at_once_make_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "PART_BYTES", 200)
    store, _ = delta(tmp_path / "store", num_threads=4, file_bytes=6000)
    assert [len(store.manifest(v).files) > 2 for v in (0, 1)] == [True, True]
    store.check_files(store.manifest(1))
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
        held = {t.name: t for t in store.manifest(1).metas}
        assert held.keys() == contents(1).keys()


@pytest.mark.parametrize("version", [0, 1])
def test_a_file_that_fails_leaves_nothing(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload, "PART_BYTES", 200)
    store = Store(tmp_path, RUN)
    publisher = Publisher(store, num_threads=4, file_bytes=6000)
    if version == 1:
        publisher.publish(0, weights(0))
    before = sorted(store.path.iterdir())
    calls: list[str] = []

    def reach(point: str) -> None:
        calls.append(point)
        if len(calls) == 2:
            raise WeightSyncError("as if the disk were gone")

    monkeypatch.setattr(payload, "reach", reach)
    with pytest.raises(WeightSyncError, match="as if"):
        publisher.publish(version, weights(version))
    assert sorted(store.path.iterdir()) == before
    publisher.publish(version, weights(version))
    store.check_files(store.manifest(version))


def test_a_tensor_of_a_device_comes_in_chunks() -> None:
    held = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)
    meta = TensorMeta("w", "uint8", (1000,))
    there = Joined(meta, [DeviceWeight(meta, held.ctypes.data, "cpu")])
    chunks = [bytes(chunk) for chunk in there.chunks(np.empty(300, dtype=np.uint8))]
    assert [len(chunk) for chunk in chunks] == [300, 300, 300, 100]
    assert b"".join(chunks) == held.tobytes()
    assert b"".join(there.chunks()) == held.tobytes()
    assert b"".join(Joined(meta, [Weight(meta, held)]).chunks()) == held.tobytes()
