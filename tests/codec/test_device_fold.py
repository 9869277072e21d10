"""Several deltas of tensors on a device, decoded in turn: the twin on the CPU, a GPU where there is one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.codec.device_cases import BLOCK, Held, stepped, weights
from tests.codec.helpers import flat
from weightsync import native, rank_store
from weightsync.codec import block_digests, encode_tensor, tensor_digest
from weightsync.codec.spans import Bytes
from weightsync.device_fold import DecodedTurns, LiveChain, bytes_in_turn, decode_in_turn
from weightsync.device_patch import DecodedWrite, DevicePatch
from weightsync.device_tables import CPU, read_bytes, write_bytes
from weightsync.errors import CapacityError, IntegrityError
from weightsync.live_tensor import Write
from weightsync.rank_apply import DeltaApply
from weightsync.rank_store import Fetched
from weightsync.types import TensorMeta


class Model:
    """Tensors on a device, each in several versions."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.versions: list[list[Bytes]] = []  # by tensor
        for number, (size, steps) in enumerate([(3 * BLOCK + 7, 3), (BLOCK, 1), (BLOCK + 8, 2)]):
            now = weights("bfloat16", size, number)
            versions = [flat(now)]
            for step in range(steps):
                now = stepped(now, 0.02, 10 * number + step)
                versions.append(flat(now))
            self.versions.append(versions)
        noise = np.random.default_rng(5).integers(0, 65535, BLOCK + 8, dtype=np.uint16)
        self.versions[2][1] = flat(noise)  # what a device does not decode
        self.held = [Held(versions[0], device) for versions in self.versions]
        self.metas = [
            TensorMeta(f"t{i}", "bfloat16", (v[0].size // 2,)) for i, v in enumerate(self.versions)
        ]
        self.digests = [
            block_digests(m, v[0]) for m, v in zip(self.metas, self.versions, strict=True)
        ]

    def chains(self) -> list[LiveChain]:
        found = []
        for meta, versions, held in zip(self.metas, self.versions, self.held, strict=True):
            steps = []
            for old, new in pairwise(versions):
                records = [
                    (place, np.frombuffer(record, dtype=np.uint8))
                    for place, record in encode_tensor(meta, old, new, block_digests(meta, old))
                ]
                steps.append((records, tensor_digest(block_digests(meta, new))))
            found.append(LiveChain(meta, held.ptr, steps))
        return found

    def decode(self, chains: list[LiveChain] | None = None, copies_bytes: int = 1) -> DecodedTurns:
        chains = self.chains() if chains is None else chains
        return decode_in_turn(chains, self.digests, self.device, copies_bytes=copies_bytes)

    def is_version(self, which: int) -> bool:
        """The first (0) or the last one (-1)."""
        return all(
            read_bytes(held.ptr, versions[0].size, self.device) == versions[which].tobytes()
            for held, versions in zip(self.held, self.versions, strict=True)
        )

    def close(self) -> None:
        for memory in self.held:
            memory.close()


@pytest.mark.parametrize("copies_bytes", [1, 1 << 30])
def test_turns_are_put_and_taken_back(copies_bytes: int, device: str) -> None:
    model = Model(device)
    found = model.decode(copies_bytes=copies_bytes)
    assert model.is_version(0)
    assert [sum(isinstance(w, DecodedWrite) for w in turn) for turn in found.turns] == [2, 1, 1]
    patches = [DevicePatch(writes, device) for writes in found.turns]
    for patch in patches:
        patch.put()
    assert model.is_version(-1)
    for patch in reversed(patches):
        patch.take_back()
    assert model.is_version(0)
    for patch in patches:
        patch.close()
    found.close()
    found.close()
    model.close()


def test_what_turns_take_is_known_before(device: str) -> None:
    model = Model(device)
    found = model.decode()
    writes = [write for turn in found.turns for write in turn]
    taken = sum(write.count * (4 + 2 * write.item_bytes) for write in writes)
    assert bytes_in_turn(model.chains()) == taken > 0
    found.close()
    model.close()


def test_they_take_at_most_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "cuda_index", lambda device: 1)
    monkeypatch.setattr(native.extension, "cuda_free_bytes", lambda index: 1000 + index)
    rank_store._check_room(500, "cuda:1")
    with pytest.raises(CapacityError, match="cuda:1: they take"):
        rank_store._check_room(501, "cuda:1")
    rank_store._check_room(501, CPU)


def test_a_version_on_the_way_that_is_not_what_it_says_is_named(device: str) -> None:
    model = Model(device)
    chains = model.chains()
    records, digest = chains[0].steps[1]
    assert digest is not None
    steps = [chains[0].steps[0], (records, digest ^ 1), chains[0].steps[2]]
    chains[0] = LiveChain(chains[0].meta, chains[0].ptr, steps)
    with pytest.raises(IntegrityError, match=r"'t0' would digest to"):
        model.decode(chains)
    assert model.is_version(0)
    model.close()


def test_a_record_that_stands_on_another_version_is_refused(device: str) -> None:
    model = Model(device)
    chains = model.chains()
    steps = [chains[0].steps[0], chains[0].steps[2], chains[0].steps[1]]
    chains[0] = LiveChain(chains[0].meta, chains[0].ptr, steps)
    with pytest.raises(IntegrityError, match=r"'t0'.*block 0"):
        model.decode(chains)
    assert model.is_version(0)
    model.close()


def test_what_ends_it_is_raised(device: str) -> None:
    model = Model(device)

    def end() -> None:
        raise TimeoutError("too late")

    with pytest.raises(TimeoutError, match="too late"):
        decode_in_turn(model.chains(), model.digests, device, check=end)
    model.close()


def test_a_turn_that_fails_is_taken_back_with_those_before_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(device)
    turns = model.decode()
    fetched = Fetched({}, later=turns.turns, decoded=[turns])
    delta = DeltaApply(fetched, device, 1)
    put, puts = DevicePatch.put, []

    def second_fails(patch: DevicePatch) -> int:
        growth = put(patch)
        puts.append(patch)
        if len(puts) == 2:
            raise IntegrityError("as if it were not there")
        return growth

    monkeypatch.setattr(DevicePatch, "put", second_fails)
    with pytest.raises(IntegrityError, match="as if"):
        delta.put()
    assert delta.take_back()
    assert model.is_version(0)
    delta.close()
    model.close()


def test_live_weights_that_were_changed_since_they_were_looked_at_are_noticed(device: str) -> None:
    """Every element then holds its new value, so that reading back alone would not see it."""
    model = Model(device)
    turns = model.decode()
    fetched = Fetched({}, later=turns.turns, decoded=[turns])
    growth = 0
    for chain, digests in zip(model.chains(), model.digests, strict=True):
        growth += (chain.steps[-1][1] or 0) - tensor_digest(digests)
    fetched.growth = growth % (1 << 64)
    delta = DeltaApply(fetched, device, 1)
    delta.put()
    assert model.is_version(-1)
    assert delta.take_back()
    place = int(np.flatnonzero(model.versions[0][0] != model.versions[0][1])[0])
    former = read_bytes(model.held[0].ptr + place, 1, device)
    write_bytes(model.held[0].ptr + place, bytes([former[0] ^ 0x40]), device)
    with pytest.raises(IntegrityError, match="to the digests of the live tensors, expected"):
        delta.put()
    assert model.is_version(-1)
    assert delta.take_back()
    write_bytes(model.held[0].ptr + place, former, device)
    assert model.is_version(0)
    delta.close()
    model.close()


def test_writes_of_the_host_and_none_at_all() -> None:
    memory = np.zeros(4, dtype=np.uint16)
    write = Write(memory, np.array([2], dtype=np.uint32), np.array([7], dtype=np.uint16))
    for writes in ([write], []):
        delta = DeltaApply(Fetched({}, writes=[*writes]), "cpu", 1)
        delta.put()
        assert memory[2] == (7 if writes else 0)
        assert delta.take_back()
        assert memory[2] == 0
        delta.close()
