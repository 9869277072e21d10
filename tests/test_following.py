"""Engines that follow a store: what they hold after every pull, and after everything that goes wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from store.helpers import RUN, contents, metas, published, weights

from engine_adapter.fake import FakeEngine
from weightsync.digest import digest_tensors
from weightsync.errors import (
    ConfigError,
    IntegrityError,
    MissingNameError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.faults import FAULT_POINTS
from weightsync.following import StoreFollower
from weightsync.receiver import Receiver, ReceiverHooks
from weightsync.session import Version
from weightsync.store import Publisher, Store, fold

torch = pytest.importorskip("torch")


def tensors(version: int) -> dict[str, Any]:
    """A version of the small run as torch tensors of their own."""
    return {
        name: torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(metas()[name].shape)
        if data
        else torch.zeros(metas()[name].shape, dtype=torch.bfloat16)
        for name, data in contents(version).items()
    }


def held(engine: FakeEngine) -> dict[str, bytes]:
    """The bytes of every live tensor."""
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        for name, tensor in engine.weights.items()
    }


@contextmanager
def following(
    engine: FakeEngine, directory: Path, run_id: str | None = RUN, **options: Any
) -> Iterator[tuple[Receiver, StoreFollower]]:
    with Receiver(engine) as receiver:
        yield receiver, receiver.follow(directory, run_id, **options)


def check(engine: FakeEngine, version: int) -> None:
    """The engine serves exactly that version, under that label."""
    label, digests = engine.generate()
    assert label == version
    assert held(engine) == contents(version)
    assert digests == digest_tensors(tensors(version).items())


@pytest.mark.parametrize("placement", ["staged", "in_place"])
@pytest.mark.parametrize("verify", ["read", "read_back"])
def test_a_full_version_and_then_deltas(tmp_path: Path, placement: str, verify: str) -> None:
    store, publisher = published(tmp_path, 0)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path, placement=placement, verify=verify) as (receiver, follower):
        assert follower.pull().kinds == ("full",)
        check(engine, 0)
        for version in (1, 2):
            publisher.publish(version, weights(version))
            report = follower.pull()
            assert (report.version, report.kinds) == (version, ("delta",))
            assert report.payload_bytes == store.manifest(version).num_bytes
            assert report.num_changed == store.manifest(version).num_changed
            assert report.bits_per_changed_element is not None
            assert report.root == store.manifest(version).target.root
            assert report.pause_s > 0
            check(engine, version)
        assert follower.pull().kinds == ()
        assert receiver.label == Version(RUN, 2)


def test_an_engine_that_is_behind_takes_all_deltas_in_one_update(tmp_path: Path) -> None:
    store, publisher = published(tmp_path, 1)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        assert follower.pull(0).version == 0
        for version in (2, 3, 4):
            publisher.publish(version, weights(version))
        engine.calls.clear()
        assert follower.pull().kinds == ("delta",) * 4
        assert engine.calls.count("commit") == 1
        check(engine, 4)
    fold(store, 1, 4)
    with following(engine, tmp_path) as (_, follower):
        follower.pull(1)
        assert follower.pull().kinds == ("fold",)
        check(engine, 4)


def test_a_late_joiner_takes_a_full_version_and_the_deltas_on_it(tmp_path: Path) -> None:
    published(tmp_path, 3)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        assert follower.pull().kinds == ("full", "delta", "delta", "delta")
        check(engine, 3)


def strided(version: int) -> dict[str, Any]:
    """The same values in memory of other strides."""
    found = tensors(version)
    found["embed.weight"] = found["embed.weight"].T.contiguous().T
    wide = torch.zeros((48, 400), dtype=torch.bfloat16)
    wide[:, 3:195] = found["layers.1.proj.weight"]
    found["layers.1.proj.weight"] = wide[:, 3:195]
    return found


@pytest.mark.parametrize("first", [0, 2])
def test_slots_of_other_strides(tmp_path: Path, first: int) -> None:
    _, publisher = published(tmp_path, first)
    engine = FakeEngine(strided(9))
    assert engine.weights["embed.weight"].stride() != tensors(0)["embed.weight"].stride()
    with following(engine, tmp_path) as (_, follower):
        follower.pull()
        check(engine, first)
        publisher.publish(first + 1, weights(first + 1))
        assert follower.pull().kinds == ("delta",)
        check(engine, first + 1)


# --- what an engine holds that is not the base -------------------------------------------------------


def test_live_weights_that_are_not_the_base_are_noticed_and_seeded_anew(tmp_path: Path) -> None:
    """One bit of a tensor that the delta does not touch is enough."""
    store, publisher = published(tmp_path, 0)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        follower.pull()
        publisher.publish(1, weights(1))
        untouched = [e.meta.name for e in store.manifest(1).tensors if not e.has_records]
        name = next(n for n in untouched if metas()[n].num_bytes)
        engine.weights[name].view(torch.int16).view(-1)[0] ^= 1
        assert follower.pull().kinds == ("full", "delta")
        check(engine, 1)


def test_another_run_starts_anew(tmp_path: Path) -> None:
    published(tmp_path, 2)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path, None) as (receiver, follower):
        follower.pull()
        shutil.rmtree(tmp_path / RUN)
        published(tmp_path, 1, run="run-2")
        assert follower.pull().kinds[0] == "full"
        check(engine, 1)
        assert receiver.label == Version("run-2", 1)


def test_a_store_that_went_back_is_followed_back(tmp_path: Path) -> None:
    """A lower version of the same run is another lineage to the engine, never done already."""
    published(tmp_path, 3)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (receiver, follower):
        follower.pull()
        shutil.rmtree(tmp_path / RUN)
        _, publisher = published(tmp_path, 1)
        assert follower.pull().kinds == ("full", "delta")
        check(engine, 1)
        assert receiver.label == Version(f"{RUN}~1", 1)
        publisher.publish(2, weights(2))
        assert follower.pull().kinds == ("delta",)
        check(engine, 2)
        assert follower.pull(1).kinds == ("full", "delta")
        check(engine, 1)


def test_a_store_made_anew_with_other_weights_under_one_number(tmp_path: Path) -> None:
    published(tmp_path, 1)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        follower.pull()
        shutil.rmtree(tmp_path / RUN)
        tmp_path.joinpath(RUN).mkdir()
        Publisher(Store(tmp_path, RUN)).publish(1, weights(5))
        assert follower.pull().kinds == ("full",)
        assert held(engine) == contents(5)


def test_an_update_by_somebody_else_is_not_built_upon(tmp_path: Path) -> None:
    _, publisher = published(tmp_path, 0)
    from weightsync.sender import Sender

    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (receiver, follower):
        follower.pull()
        with (
            Sender.connect([receiver], transport="loopback", run_id="other") as sender,
            sender.update(version=7) as update,
        ):
            update.send(tensors(5))
        check_label = engine.generate()[0]
        assert check_label == 7
        publisher.publish(1, weights(1))
        assert follower.pull().kinds == ("full", "delta")
        check(engine, 1)


# --- damage ----------------------------------------------------------------------------------------------


def payload_of(store: Store, version: int, stem: str = "") -> Path:
    folder = store.payload_path(store.manifest(version))
    return next(p for p in sorted(folder.iterdir()) if p.name.startswith(stem))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_delta_is_gone_round_or_refused(tmp_path: Path, damage: str) -> None:
    store, publisher = published(tmp_path, 0)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        follower.pull()
        publisher.publish(1, weights(1))
        path = payload_of(store, 1)
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        elif damage == "truncate":
            path.write_bytes(data[:-9])
        else:
            path.unlink()
        with pytest.raises((IntegrityError, UnavailableError)):
            follower.pull()
        check(engine, 0)
        publisher.publish_full(2, weights(2))
        assert follower.pull().kinds == ("full",)
        check(engine, 2)


def test_every_byte_of_a_delta_counts(tmp_path: Path) -> None:
    store, publisher = published(tmp_path, 0)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        follower.pull()
        publisher.publish(1, weights(1))
        path = payload_of(store, 1)
        whole = path.read_bytes()
        for at in range(0, len(whole), max(len(whole) // 24, 1)):
            data = bytearray(whole)
            data[at] ^= 0x10
            path.write_bytes(data)
            with pytest.raises((IntegrityError, UnavailableError)):
                follower.pull()
            check(engine, 0)
        path.write_bytes(whole)
        assert follower.pull().kinds == ("delta",)
        check(engine, 1)


def test_a_full_version_with_a_changed_byte_is_refused(tmp_path: Path) -> None:
    store, _ = published(tmp_path, 0)
    path = payload_of(store, 0, "model-")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        with pytest.raises(IntegrityError, match="torn or was changed"):
            follower.pull()
        check_old = held(engine)
        assert check_old == contents(9)
        assert engine.generate()[0] is None


# --- failures while a delta is applied ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["begin_update", "prepare", "pause", "commit"])
def test_an_adapter_that_fails_leaves_the_old_version_whole(tmp_path: Path, call: str) -> None:
    _, publisher = published(tmp_path, 0)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (receiver, follower):
        follower.pull()
        publisher.publish(1, weights(1))
        engine.fail_in = call
        with pytest.raises(WeightSyncError, match=f"told to fail in {call}"):
            follower.pull()
        if call == "commit":  # which also takes the label back, and fails in that too
            assert receiver.label is None
            engine.fail_in = ""
            assert follower.pull().kinds == ("full", "delta")
        else:
            check(engine, 0)
            engine.fail_in = ""
            assert follower.pull().kinds == ("delta",)
        check(engine, 1)


def test_a_commit_that_fails_once_is_taken_back(tmp_path: Path) -> None:
    _, publisher = published(tmp_path, 0)

    class Fails(FakeEngine):
        def commit(self, version: Version) -> None:
            if version.number == 1 and self.fail_in == "once":
                self.fail_in = ""
                raise WeightSyncError("commit failed once")
            super().commit(version)

    engine = Fails(tensors(9))
    with following(engine, tmp_path) as (_, follower):
        follower.pull()
        publisher.publish(1, weights(1))
        engine.fail_in = "once"
        with pytest.raises(WeightSyncError, match=r"failed once.*still serves"):
            follower.pull()
        check(engine, 0)
        assert follower.pull().kinds == ("delta",)
        check(engine, 1)


def test_memory_that_does_not_hold_what_was_written_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read back that differs: everything is taken back before anything else is tried."""
    from weightsync import rank_store
    from weightsync.live_tensor import Write

    _, publisher = published(tmp_path, 0)
    engine, seen = FakeEngine(tensors(9)), []
    hooks = ReceiverHooks(on_abort=lambda spec: seen.append(held(engine)))
    with Receiver(engine, hooks=hooks) as receiver:
        follower = receiver.follow(tmp_path, RUN)
        follower.pull()
        publisher.publish(1, weights(1))
        put = Write.put

        def wrong(write: Write) -> None:
            put(write)
            write.view[write.positions[-1]] ^= 1

        monkeypatch.setattr(rank_store.Write, "put", wrong)
        assert follower.pull().kinds == ("full", "delta")
        assert "not what was written; the engine still serves" in caplog.text
        assert seen == [contents(0)]
        check(engine, 1)


# --- engines that deltas do not fit -----------------------------------------------------------------


def test_opaque_slots_take_full_versions_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, publisher = published(tmp_path, 0)

    class Writes(FakeEngine):
        def write(self, name: str, tensor: Any) -> None:
            self.weights[name].copy_(
                torch.from_numpy(tensor.copy()).view(torch.bfloat16)
                if not isinstance(tensor, torch.Tensor)
                else tensor
            )

    engine = Writes(tensors(9), opaque=("bias",))
    with following(engine, tmp_path) as (_, follower):
        follower.pull()
        check(engine, 0)
        publisher.publish(1, weights(1))
        assert follower.pull().kinds == ("full", "delta")
        assert "opaque slot" in caplog.text
        check(engine, 1)


def test_a_store_that_lacks_a_tensor_of_the_engine(tmp_path: Path) -> None:
    published(tmp_path, 0)
    more = {**tensors(9), "extra": torch.zeros(3, dtype=torch.bfloat16)}
    engine = FakeEngine(more)
    with (
        following(engine, tmp_path) as (_, follower),
        pytest.raises(MissingNameError, match="extra"),
    ):
        follower.pull()
    with following(engine, tmp_path / "nowhere") as (_, follower), pytest.raises(UnavailableError):
        follower.pull()
    with (
        pytest.raises(ConfigError, match="placement"),
        following(engine, tmp_path, placement="delta"),
    ):
        pass


# --- following, and plain directories ---------------------------------------------------------------


def test_watching_follows_and_outlives_errors(tmp_path: Path) -> None:
    _, publisher = published(tmp_path, 0)
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path, poll_s=0.01) as (_, follower), follower:
        assert follower.wait_for(0, 20)
        for version in (1, 2):
            publisher.publish(version, weights(version))
            assert follower.wait_for(version, 20)
            check(engine, version)
        follower.stop()
        assert [report.version for report in follower.reports] == [0, 1, 2]


def test_any_checkpoint_directory_goes_into_a_running_engine(tmp_path: Path) -> None:
    published(tmp_path, 2)
    Publisher(Store(tmp_path, "run-3")).publish(0, weights(3))
    folder = Store(tmp_path, "run-3").payload_path(Store(tmp_path, "run-3").manifest(0))
    engine = FakeEngine(tensors(9))
    with following(engine, tmp_path) as (receiver, follower):
        assert receiver.load(folder, 5, "by hand").kinds == ("full",)
        assert held(engine) == contents(3)
        assert receiver.label == Version("by hand", 5)
        with pytest.raises(WeightSyncError, match="already published"):
            receiver.load(folder, 5, "by hand")
        follower.pull()
        check(engine, 2)
        assert FAULT_POINTS["follow.landed"]
