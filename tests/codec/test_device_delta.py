"""Deltas decoded where live weights lie: their twin on the CPU everywhere, a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine_adapter.fake import FakeEngine
from tests.codec.device_cases import BLOCK, Held, stepped, weights
from tests.codec.helpers import flat
from weightsync import native, rank_store
from weightsync.codec import Variant, block_digests, encode_tensor, tensor_digest
from weightsync.codec.spans import Bytes, spans_of
from weightsync.config import DecodePlace, decode_place
from weightsync.device_delta import LiveDelta, LiveDigests, decode_there
from weightsync.device_fold import DecodedTurns
from weightsync.device_patch import DecodedWrite, DevicePatch, DeviceWrite
from weightsync.device_tables import read_bytes
from weightsync.errors import CapacityError, ConfigError, IntegrityError, TransportError
from weightsync.rank_store import RankStore
from weightsync.receiver import Receiver
from weightsync.store import Publisher, Store
from weightsync.store.publish import weights_of
from weightsync.types import TensorMeta

DTYPES = ["bfloat16", "float32", "float8_e4m3fn", "int8", "int64", "float64"]


def meta_of(name: str, data: Bytes, dtype: str) -> TensorMeta:
    size = {"int64": 8, "float64": 8}.get(dtype, weights(dtype, 1, 0).itemsize)
    return TensorMeta(name, dtype, (data.size // size,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_digests_of_live_blocks(dtype: str, device: str) -> None:
    random = np.random.default_rng(1)
    data = [random.integers(0, 256, 8 * n, dtype=np.uint8) for n in (1, 3, BLOCK, BLOCK + 5, 0)]
    metas = [meta_of(f"t{i}", d, dtype) for i, d in enumerate(data)]
    held = [Held(d, device) for d in data]
    table = LiveDigests([(m, h.ptr) for m, h in zip(metas, held, strict=True)], device)
    for _ in range(2):
        found = table.compute(2)
        for meta, bits, digests in zip(metas, data, found, strict=True):
            assert (digests == block_digests(meta, bits)).all()
            digests[:] = 0  # the caller's own
    for memory in held:
        memory.close()


class Weights:
    """Tensors on a device in an old version, and the records that lead to a new one."""

    def __init__(
        self, device: str, news: list[npt.NDArray[Any]], olds: list[npt.NDArray[Any]]
    ) -> None:
        self.device = device
        self.news = [flat(new) for new in news]
        self.olds = [flat(old) for old in olds]
        self.held = [Held(old, device) for old in self.olds]
        self.metas = [meta_of(f"t{i}", old, "bfloat16") for i, old in enumerate(self.olds)]
        self.digests = [block_digests(m, o) for m, o in zip(self.metas, self.olds, strict=True)]

    def deltas(self, variant: Variant = Variant.EXACT) -> list[LiveDelta]:
        found = []
        for meta, old, new, held, digests in zip(
            self.metas, self.olds, self.news, self.held, self.digests, strict=True
        ):
            records = [
                (place, np.frombuffer(record, dtype=np.uint8))
                for place, record in encode_tensor(meta, old, new, digests.copy(), variant=variant)
            ]
            digest = tensor_digest(block_digests(meta, new))
            found.append(LiveDelta(meta, held.ptr, records, digest))
        return found

    def live(self) -> list[bytes]:
        return [
            read_bytes(h.ptr, o.size, self.device)
            for h, o in zip(self.held, self.olds, strict=True)
        ]

    def close(self) -> None:
        for memory in self.held:
            memory.close()


def some(device: str) -> Weights:
    """One changes a little, one not at all, one nearly everywhere, one in a crowd."""
    olds = [weights("bfloat16", n, n) for n in (3 * BLOCK + 7, BLOCK, 2 * BLOCK, BLOCK)]
    crowd = olds[3].copy()
    crowd[:9000:2] += 1
    noise = np.random.default_rng(5).integers(0, 65535, olds[2].size, dtype=np.uint16)
    return Weights(device, [stepped(olds[0], 0.01, 2), olds[1], noise, crowd], olds)


@pytest.mark.parametrize("variant", Variant)
def test_what_is_decoded_is_put_and_taken_back(variant: Variant, device: str) -> None:
    model = some(device)
    found = decode_there(model.deltas(variant), model.digests, device)
    kinds = [{type(write) for write in writes} for writes in found.writes]
    assert kinds[1] == set()
    assert (kinds[0] == {DecodedWrite}) == (variant is Variant.EXACT)
    assert DecodedWrite not in kinds[2] | kinds[3]
    writes = [write for writes in found.writes for write in writes]
    changed = sum(
        int(np.count_nonzero(a.view(np.uint16) != b.view(np.uint16)))
        for a, b in zip(model.olds, model.news, strict=True)
    )
    assert sum(write.count for write in writes) == changed
    patch = DevicePatch(writes, device)
    growth = sum(
        tensor_digest(block_digests(meta, new)) - tensor_digest(digests)
        for meta, new, digests in zip(model.metas, model.news, model.digests, strict=True)
    )
    assert patch.put() == growth % (1 << 64)
    assert model.live() == [new.tobytes() for new in model.news]
    patch.take_back()
    assert model.live() == [old.tobytes() for old in model.olds]
    patch.close()
    found.close()
    model.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_patch_adds_to_digests(dtype: str, device: str) -> None:
    """Of elements of every width, in words of every width, in several spans and blocks."""
    random = np.random.default_rng(7)
    old = random.integers(0, 256, 8 * (BLOCK + 5), dtype=np.uint8)
    new = old.copy()
    new[random.random(old.size) < 0.01] ^= 3
    new[-1] ^= 1
    meta = meta_of("t", old, dtype)
    digests = block_digests(meta, old)
    before, after = Held(old, device), []
    for place in spans_of(meta):
        width = place.kind.element_bytes
        start = place.start_element * width
        a, b = (d[start : start + place.num_bytes].view(f"u{width}") for d in (old, new))
        positions = np.flatnonzero(a != b).astype(np.uint32)
        after.append(DeviceWrite(before.ptr + start, positions, b[positions], place))
    patch = DevicePatch(after, device)
    growth = tensor_digest(block_digests(meta, new)) - tensor_digest(digests)
    assert patch.put() == growth % (1 << 64)
    assert read_bytes(before.ptr, old.size, device) == new.tobytes()
    patch.close()
    before.close()


def test_live_weights_that_are_not_the_base_are_named(device: str) -> None:
    model = some(device)
    deltas = model.deltas()
    changed = model.olds[1].copy()  # of the tensor that does not change
    changed[100] ^= 1
    digests = [*model.digests]
    digests[1] = block_digests(model.metas[1], changed)
    with pytest.raises(IntegrityError, match="'t1' would digest"):
        decode_there(deltas, digests, device)
    digests = [*model.digests]
    digests[0] = digests[0] + np.uint64(1)
    with pytest.raises(IntegrityError, match=r"'t0'.*block 0: the result is not what was sent"):
        decode_there(deltas, digests, device)
    model.close()


@pytest.mark.parametrize("refused", ["", "copies", "tables"])
def test_an_engine_takes_deltas_that_are_decoded_there(
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the CPU, by the twins of the launches, one delta and several at once, which the host folds
    where there is no room for copies."""

    def no_room(*rest: Any, **named: Any) -> DecodedTurns:
        if refused == "copies":
            raise CapacityError("no room for copies")
        cause = native.CudaError("no room for a table")
        cause.error_name = "cudaErrorMemoryAllocation"
        raise TransportError("cuda:0: no room for a table") from cause

    if refused:
        monkeypatch.setattr(rank_store, "decode_in_turn", no_room)
    original = RankStore.__init__

    def init(store: RankStore, *rest: Any) -> None:
        original(store, *rest)
        store._decodes_at = DecodePlace.DEVICE

    monkeypatch.setattr(RankStore, "__init__", init)
    random = np.random.default_rng(3)
    live = {name: random.standard_normal((300, 70)).astype(np.float32) for name in "abc"}
    versions = [{k: v.copy() for k, v in live.items()} for _ in range(4)]
    for number in (1, 2, 3):
        versions[number] = {k: v.copy() for k, v in versions[number - 1].items()}
        versions[number]["a"][number::50] *= 1.001
        versions[number]["b"][0, number] += 1
    publisher = Publisher(Store(tmp_path, "run"))
    publisher.publish(0, weights_of(versions[0].items()))
    engine = FakeEngine(live)
    with Receiver(engine) as receiver:
        follower = receiver.follow(tmp_path, "run")
        follower.pull()
        for number, kinds in ((1, ("delta",)), (3, ("delta", "delta"))):
            for one in range((receiver.version or 0) + 1, number + 1):
                publisher.publish(one, weights_of(versions[one].items()))
            assert follower.pull().kinds == kinds
            for name, value in versions[number].items():
                assert (engine.weights[name] == value).all()
    assert ("folded by the host" in caplog.text) == bool(refused)


def test_where_it_is_decoded_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSYNC_DECODE", raising=False)
    assert decode_place() is DecodePlace.DEVICE
    monkeypatch.setenv("WEIGHTSYNC_DECODE", "host")
    assert decode_place() is DecodePlace.HOST
    monkeypatch.setenv("WEIGHTSYNC_DECODE", "gpu")
    with pytest.raises(ConfigError, match="'gpu'; known: host, device"):
        decode_place()
