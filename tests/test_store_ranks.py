"""Several ranks of a trainer publish one run: each its own pieces, and a version of all or of none."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_engines import Store as MeetingStore
from rank_engines import engine_ranks, split
from test_following_ranks import served, serving, whole

from weightsync.errors import (
    IntegrityError,
    LayoutError,
    ProtocolError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.layouts import ShardRule
from weightsync.sender import Sender
from weightsync.store import LocalCheckpoint, Publisher, Store, VersionKind
from weightsync.store.lending import FileShare, share_files
from weightsync.store.object_path import place_of
from weightsync.store.pieces import Piece
from weightsync.store.weights import weights_of
from weightsync.types import Box, TensorMeta

LIMIT_S = 30.0


class Trainer:
    """Ranks as threads; rank r holds part r of matrices along ``dim``, and a copy of the last one."""

    def __init__(
        self, directory: Path | str, pool: Any, size: int, dim: int, **options: Any
    ) -> None:
        meeting = MeetingStore()
        self.pool, self.size, self.dim = pool, size, dim

        def connect(rank: int) -> Any:
            rules = [ShardRule(r"layer\.[0-4]", dim=dim, index=rank, count=size)]
            return Sender.connect(
                [directory], transport="disk-delta", run_id="run", rank=rank, world_size=size,
                store=meeting, rules=rules, commit_timeout_s=LIMIT_S, **options,
            )  # fmt: skip

        self.senders = list(pool.map(connect, range(size)))

    def parts(self, version: int, rank: int) -> dict[str, Any]:
        found = {}
        for name, array in whole(version).items():
            length = array.shape[self.dim] // self.size
            low, high = rank * length, (rank + 1) * length
            cut = array[low:high] if self.dim == 0 else array[:, low:high]
            found[name] = array if name == "layer.5" else np.ascontiguousarray(cut)
        return found

    def attempt(self, version: int, sources: Sequence[Any]) -> list[BaseException | None]:
        """What each rank ended by, after the version was visible or was given up."""

        def act(rank: int) -> BaseException | None:
            try:
                with self.senders[rank].update(version=version) as update:
                    if isinstance(sources[rank], Exception):
                        raise sources[rank]
                    update.send(sources[rank])
                report = update.report
                assert report is not None
                assert report.root == self.senders[0].store.manifest(version).target.root
                assert report.total_bytes == sum(a.nbytes for a in whole(version).values())
            except Exception as error:
                return error
            return None

        return list(self.pool.map(act, range(self.size)))

    def publish(self, version: int) -> None:
        found = self.attempt(version, [self.parts(version, r) for r in range(self.size)])
        assert found == [None] * self.size


@contextmanager
def trainer(
    directory: Path | str, size: int = 2, dim: int = 0, **options: Any
) -> Iterator[Trainer]:
    with ThreadPoolExecutor(size) as pool:
        made = Trainer(directory, pool, size, dim, **options)
        try:
            yield made
        finally:
            list(pool.map(lambda sender: sender.close(), made.senders))


def check(directory: Path | str, local: Path, version: int) -> None:
    """The store's version, bit for bit, and its identity is that of one publisher."""
    store = Store(directory, "run")
    with LocalCheckpoint(local) as checkpoint:
        assert checkpoint.pull(store, version) == store.manifest(version).target
    from store.helpers import held

    assert held(local / "current") == {n: a.tobytes() for n, a in whole(version).items()}


@pytest.mark.parametrize(("size", "dim"), [(2, 0), (2, 1), (4, 1), (4, 0)])
def test_ranks_publish_what_one_publisher_would(tmp_path: Path, size: int, dim: int) -> None:
    alone = Publisher(Store(tmp_path / "alone", "run"))
    with trainer(tmp_path / "store", size, dim, anchor_every=3) as ranks:
        for version in range(4):
            ranks.publish(version)
            expected = alone.publish(version, weights_of(whole(version).items()))
            manifest = ranks.senders[0].store.manifest(version)
            assert manifest.target == expected.target
            assert manifest.kind == (VersionKind.DELTA if version else VersionKind.FULL)
            check(tmp_path / "store", tmp_path / "local", version)
        ranks.senders[0].wait_for_upkeep(LIMIT_S)
        anchor = ranks.senders[0].store.read_manifest("v000000000002-full.json")
        assert anchor.target == ranks.senders[0].store.manifest(2).target
        check(tmp_path / "store", tmp_path / "late", 2)
    held = sum(len(s._part._pieces) for s in ranks.senders)
    assert held == 5 * size + 1  # the last matrix is rank 0's alone


def test_ranks_of_a_trainer_and_ranks_of_an_engine_meet_in_pieces(tmp_path: Path) -> None:
    engine = engine_ranks(whole(9), 2)
    assert engine[0].boxes["layer.0"] == split((40, 48), 0, 2, dim=1)
    with trainer(tmp_path, 2, 1) as ranks, serving(engine) as receiver:
        follower = receiver.follow(tmp_path)
        for version in range(3):
            ranks.publish(version)
            assert follower.pull().kinds == (("delta",) if version else ("full",))
            served(engine, version, version)


def test_ranks_publish_in_one_call(tmp_path: Path) -> None:
    with trainer(tmp_path / "store", 2) as ranks:
        for version in range(2):

            def publish(rank: int, version: int = version) -> Any:
                return ranks.senders[rank].update_weights(
                    ranks.parts(version, rank), version=version
                )

            first, second = ranks.pool.map(publish, range(2))
            assert first.version == second.version == version
            assert first.root == ranks.senders[0].store.manifest(version).target.root
        check(tmp_path / "store", tmp_path / "local", 1)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_leaves_makes_the_version_not_be(tmp_path: Path, failing: int) -> None:
    with trainer(tmp_path / "store") as ranks:
        ranks.publish(0)
        sources: list[Any] = [ranks.parts(1, r) for r in range(2)]
        sources[failing] = ValueError("no")
        found = ranks.attempt(1, sources)
        assert isinstance(found[failing], ValueError)
        assert isinstance(found[1 - failing], WeightSyncError)
        assert ranks.senders[0].store.versions() == [0]
        ranks.publish(2)
        assert ranks.senders[0].store.manifest(2).kind is VersionKind.DELTA
        check(tmp_path / "store", tmp_path / "local", 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_makes_the_version_not_be(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(tmp_path / "store") as ranks:
        ranks.publish(0)
        part = ranks.senders[failing]._part

        def fail(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(part, "write", fail)
            found = ranks.attempt(1, [ranks.parts(1, r) for r in range(2)])
        assert all(error is not None and "No space" in str(error) for error in found)
        store = ranks.senders[0].store
        assert store.versions() == [0]
        assert len([p for p in store.path.iterdir() if p.is_dir()]) == 1
        again = ranks.attempt(2, [ranks.parts(2, r) for r in range(2)])
        assert "No space" in str(again[0])  # raised once more on rank 0, and every rank hears it
        assert "gave the version up" in str(again[1])
        ranks.publish(2)
        assert store.manifest(2).kind is VersionKind.DELTA
        check(tmp_path / "store", tmp_path / "local", 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_was_written_is_removed_when_nobody_writes_any_more(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank fails at once, the other takes its time."""
    with trainer(tmp_path / "store") as ranks:
        ranks.publish(0)
        parts = [sender._part for sender in ranks.senders]
        write_late = parts[1 - failing].write
        has_failed, is_over = threading.Event(), threading.Event()

        def fail(*_: Any) -> Any:
            has_failed.set()
            raise OSError(28, "No space left on device")

        def late(*rest: Any) -> Any:
            assert has_failed.wait(20.0)
            threading.Event().wait(0.3)  # time to remove what this is about to write to
            try:
                return write_late(*rest)
            finally:
                is_over.set()

        with monkeypatch.context() as patch:
            patch.setattr(parts[failing], "write", fail)
            patch.setattr(parts[1 - failing], "write", late)
            found = ranks.attempt(1, [ranks.parts(1, r) for r in range(2)])
            assert is_over.is_set()
        assert all(error is not None and "No space" in str(error) for error in found)
        store = ranks.senders[0].store
        assert len([p for p in store.path.iterdir() if p.is_dir()]) == 1
        assert not list(store.path.rglob("*.wsd"))
        ranks.attempt(2, [ranks.parts(2, r) for r in range(2)])  # the failure is raised once more
        ranks.publish(2)


def test_a_tensor_that_the_ranks_do_not_hold_whole_is_refused(tmp_path: Path) -> None:
    with trainer(tmp_path) as ranks:
        sources = [ranks.parts(0, r) for r in range(2)]
        del sources[1]["layer.1"]
        found = ranks.attempt(0, sources)
        assert isinstance(found[0], LayoutError)
        assert all(error is not None for error in found)
        assert ranks.senders[0].store.versions() == []


def test_a_version_is_reported_before_the_copies_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank, as with one rank; the next version waits for the copies of all."""
    with trainer(tmp_path / "store") as ranks:
        ranks.publish(0)
        may_advance, advanced = threading.Event(), list[int]()
        for rank, sender in enumerate(ranks.senders):
            advance = sender._part.advance

            def late(*rest: Any, rank: int = rank, advance: Any = advance) -> None:
                assert may_advance.wait(20.0)
                advance(*rest)
                advanced.append(rank)

            monkeypatch.setattr(sender._part, "advance", late)
        ranks.publish(1)  # waits for the reports of all ranks
        assert advanced == []
        threading.Timer(0.2, may_advance.set).start()
        ranks.publish(2)
        assert ranks.senders[0].store.manifest(2).kind is VersionKind.DELTA
        assert sorted(advanced[:2]) == [0, 1]
        check(tmp_path / "store", tmp_path / "local", 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_copy_that_cannot_advance_makes_the_next_version_full(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(tmp_path / "store") as ranks:
        ranks.publish(0)

        def fail(*_: Any) -> None:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(ranks.senders[failing]._part.publisher, "advance", fail)
            ranks.publish(1)
            for sender in ranks.senders:
                sender._worker.submit(lambda: None).result(timeout=LIMIT_S)
        ranks.senders[failing]._part.publisher._snapshot = None  # as a copy that failed half way
        for version, kind in ((2, VersionKind.FULL), (3, VersionKind.DELTA)):
            ranks.publish(version)
            assert ranks.senders[0].store.manifest(version).kind is kind
            check(tmp_path / "store", tmp_path / "local", version)


# --- object storage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dim"), [(2, 0), (3, 1)])
def test_ranks_publish_to_object_storage(
    object_url: str, tmp_path: Path, size: int, dim: int
) -> None:
    """The files of full versions are those of one publisher, byte for byte, and every rank writes some."""
    alone = Publisher(
        Store(tmp_path / "alone", "run"), file_bytes=8000, extra_files={"config.json": b"{}"}
    )
    options = {"file_bytes": 8000, "extra_files": {"config.json": b"{}"}, "anchor_every": 3}
    with trainer(object_url, size, dim, **options) as ranks:
        store = ranks.senders[0].store
        for version in range(3):
            ranks.publish(version)
            expected = alone.publish(version, weights_of(whole(version).items()))
            assert store.manifest(version).target == expected.target
            check(object_url, tmp_path / "local", version)
            if version:
                assert store.manifest(version).kind is VersionKind.DELTA
        ranks.senders[0].wait_for_upkeep(LIMIT_S)
    first = store.manifest(0)
    expected = alone.store.manifest(0)
    assert sorted(f.name for f in first.files) == sorted(f.name for f in expected.files)
    assert {f.name: f.hash for f in first.files} == {f.name: f.hash for f in expected.files}
    assert len(first.files) == 5  # three of weights
    anchor = store.read_manifest("v000000000002-full.json")
    assert anchor.target == store.manifest(2).target
    for manifest in (first, anchor):
        found = {path.name for path in store.payload_path(manifest).iterdir()}
        assert found == {file.name for file in manifest.files}, "nothing lent is left"


@pytest.mark.parametrize("what", ["lend", "write"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_to_object_storage_leaves_nothing(
    object_url: str, tmp_path: Path, failing: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(object_url) as ranks:

        def fail(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(ranks.senders[failing]._part, what, fail)
            found = ranks.attempt(0, [ranks.parts(0, r) for r in range(2)])
        assert all(error is not None and "No space" in str(error) for error in found)
        store = ranks.senders[0].store
        assert store.versions() == []
        assert not list(store.path.iterdir())
        ranks.attempt(1, [ranks.parts(1, r) for r in range(2)])  # the failure is raised once more
        ranks.publish(1)
        check(object_url, tmp_path / "local", 1)


def test_what_is_lent_and_ends_early_is_found(object_url: str, tmp_path: Path) -> None:
    path = place_of(object_url) / "lent-00000"
    path.put(b"abcdef")
    assert path.read_at(2, 4) == b"cdef"
    assert path.read_at(6, 0) == b""
    with pytest.raises((IntegrityError, UnavailableError)):
        path.read_at(2, 5)
    with pytest.raises(FileNotFoundError):
        place_of(f"{object_url}/none").read_at(0, 4)


def pieces_of_ranks(size: int, names: Sequence[str], is_cut: bool) -> list[list[Piece]]:
    """Matrices of 8 kB cut over all ranks, or each whole on one of them in turn."""
    found: list[list[Piece]] = [[] for _ in range(size)]
    for i, name in enumerate(names):
        meta = TensorMeta(name, "bfloat16", (size, 4096 // size))
        if is_cut:
            for rank in range(size):
                box = Box((rank, 0), (rank + 1, 4096 // size))
                found[rank].append(Piece(meta, box))
        else:
            found[i * size // len(names)].append(Piece(meta, Box.whole(meta.shape)))
    return found


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_files_are_shared_out_evenly_and_what_one_has_does_not_travel(
    size: int, is_cut: bool
) -> None:
    names = [f"w{i}" for i in range(16)]
    owned = pieces_of_ranks(size, names, is_cut)
    metas = list(dict.fromkeys(piece.tensor for pieces in owned for piece in pieces))
    shares = share_files(owned, metas, file_bytes=16384)
    assert [FileShare.from_json(share.to_json()) for share in shares] == shares
    files = [name for share in shares for name in share.files]
    assert len(set(files)) == len(files) == 8
    assert {len(share.files) for share in shares} == {8 // size}
    for rank, share in enumerate(shares):
        if not is_cut:
            assert share.lent == ()
        for held in share.files.values():
            for placed in held:
                assert (placed.offset_bytes == -1) == (placed.rank == rank)
                assert placed.piece in owned[placed.rank]
    for rank, share in enumerate(shares):  # where others read is where it lies
        at, there = 0, {}
        for piece in share.lent:
            there[piece] = at
            at += piece.meta.num_bytes
        read = {
            placed.piece: placed.offset_bytes
            for other in shares
            for held in other.files.values()
            for placed in held
            if placed.rank == rank and placed.offset_bytes >= 0
        }
        assert read == there


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"lent": [], "files": []},
        {"lent": [["w", "bfloat16", [2], [0]]], "files": {}},
        {"lent": [], "files": {"../x": []}},
        {"lent": [], "files": {"x": [["w", "bfloat16", [2], [0], [2], 0]]}},
    ],
)
def test_a_malformed_share_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed share"):
        FileShare.from_json(value)
