"""Publish, follow, fold, collect; and what a store does when files or people misbehave."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store.helpers import CONFIG, RUN, contents, held, metas, published, weights
from weightsync.cli.main import main
from weightsync.codec import Variant
from weightsync.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    IntegrityError,
    LayoutError,
    UnavailableError,
    UnknownNameError,
    VersionError,
)
from weightsync.store import (
    Lease,
    LocalCheckpoint,
    Publisher,
    Store,
    collect,
    durable,
    fold,
    publish,
)
from weightsync.store.publish import Weight, weights_of
from weightsync.store.version import Identity, VersionKind, VersionManifest, root_of
from weightsync.types import TensorMeta

pytestmark = pytest.mark.usefixtures("record_form")


def check(local: LocalCheckpoint, version: int) -> None:
    """It holds that version, bit for bit, and says so."""
    state = local.state
    assert state is not None
    assert state[1].version == version
    assert held(local.path) == contents(version)
    assert local.verify().version == version


def test_a_follower_gets_every_version(tmp_path: Path) -> None:
    store, publisher = published(tmp_path / "store", 0)
    with LocalCheckpoint(tmp_path / "local") as local:
        for version in range(4):
            if version:
                manifest = publisher.publish(version, weights(version))
                assert manifest.kind is VersionKind.DELTA
                full = store.manifest(0)
                assert 0 < manifest.num_bytes < full.num_bytes / 4
            assert local.pull(store) == store.manifest(version).target
            check(local, version)
            assert local.pull(store).version == version  # and once more does nothing
        assert (local.path / "config.json").read_bytes() == CONFIG


def test_a_full_version_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    store, _ = published(tmp_path / "store", 0)
    folder = store.payload_path(store.manifest(0))
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= dict(safetensors.deserialize(path.read_bytes()))
    assert {name: bytes(t["data"]) for name, t in found.items()} == contents(0)


def test_a_late_follower_takes_one_full_version_and_all_deltas(tmp_path: Path) -> None:
    store, _ = published(tmp_path / "store", 3)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 2)
        check(local, 2)
        local.pull(store)
        check(local, 3)
        with pytest.raises(UnavailableError):
            local.pull(store, 9)
        check(local, 3)
        local.pull(store, 1)  # back: anew, never "done already"
        check(local, 1)


def test_absolute_deltas(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = Store(tmp_path / "store", RUN)
    publisher = Publisher(store, variant=Variant.ABSOLUTE)
    with LocalCheckpoint(tmp_path / "local") as local:
        for version in range(3):
            publisher.publish(version, weights(version))
            local.pull(store)
            check(local, version)


def test_what_does_not_pay_as_a_delta_is_full(tmp_path: Path) -> None:
    store, publisher = published(tmp_path / "store", 0)
    other = weights(1)
    for weight in other.values():
        weight.data[:] = np.frombuffer(os.urandom(weight.data.size), dtype=np.uint8)
    assert publisher.publish(1, other).kind is VersionKind.FULL
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
        assert held(local.path) == {n: w.data.tobytes() for n, w in other.items()}
    assert len(list(store.path.glob("v*1-*"))) == 1  # what was begun as a delta is gone


def test_another_run_means_anew(tmp_path: Path) -> None:
    old, _ = published(tmp_path / "store", 3)
    new, _ = published(tmp_path / "store", 1, run="run-2")
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(old)
        local.pull(new)
        assert local.state == ("run-2", new.manifest(1).target)
        check(local, 1)


def test_a_delta_that_leads_elsewhere_is_given_up_after_one_new_start(tmp_path: Path) -> None:
    """Its files are what it says, but what it says of a tensor is not what its records make."""
    store, _ = published(tmp_path / "store", 1)
    manifest = store.manifest(1)
    first, *rest = manifest.tensors
    tensors = (replace(first, digest=first.digest ^ 1), *rest)
    lie = replace(manifest, tensors=tensors, target=Identity(1, root_of(tensors)))
    (store.path / manifest.file_name).write_bytes(lie.to_bytes())
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        with (
            pytest.warns(UserWarning, match="starting anew"),
            pytest.raises(IntegrityError, match=r"would digest to|than their manifest says"),
        ):
            local.pull(store, 1)
        check(local, 0)


def test_a_local_file_that_was_changed_means_anew(tmp_path: Path) -> None:
    store, publisher = published(tmp_path / "store", 1)
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
        path = next(local.path.glob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1000] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="root"):
            local.verify()
        publisher.publish(2, weights(2))
        with pytest.warns(UserWarning, match="starting anew"):
            local.pull(store)
        check(local, 2)


def test_any_changed_byte_of_any_file_is_detected(tmp_path: Path) -> None:
    """Of the delta: its manifest, its payload. The local checkpoint stays what it was."""
    store, _ = published(tmp_path / "store", 1)
    manifest = store.manifest(1)
    files = [store.path / manifest.file_name]
    files += [store.payload_path(manifest) / file.name for file in manifest.files]
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        for path in files:
            data = path.read_bytes()
            places = range(len(data)) if len(data) < 3000 else range(0, len(data), 7)
            for at in places:
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
                with pytest.raises((IntegrityError, UnavailableError)):
                    store.check_files(store.manifest(1))
            for at in (0, 40, len(data) // 2, len(data) - 1):
                path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
                with pytest.raises((IntegrityError, UnavailableError)):
                    local.pull(store, 1)
                check(local, 0)
                path.write_bytes(data[:at])  # torn
                with pytest.raises((IntegrityError, UnavailableError)):
                    local.pull(store, 1)
            path.unlink()
            with pytest.raises(UnavailableError, match=path.name):
                local.pull(store, 1)
            check(local, 0)
            path.write_bytes(data)
        local.pull(store, 1)
        check(local, 1)


def test_a_broken_delta_is_gone_round(tmp_path: Path) -> None:
    store, publisher = published(tmp_path / "store", 2)
    publisher.publish_full(3, weights(3))
    manifest = store.manifest(2)
    (store.payload_path(manifest) / manifest.files[0].name).unlink()
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 1)
        with pytest.raises(UnavailableError, match=manifest.files[0].name):
            local.pull(store, 2)
        check(local, 1)
        local.pull(store, 3)
        check(local, 3)


def test_two_senders_in_one_directory(tmp_path: Path) -> None:
    store, first = published(tmp_path / "store", 0)
    second = Publisher(Store(tmp_path / "store", RUN))
    second.publish_full(1, weights(1))
    with pytest.raises(VersionError):
        first.publish(1, weights(2))
    race = Publisher(Store(tmp_path / "store", RUN))
    race._check_version = lambda version: None  # type: ignore[method-assign]  # both looked before
    with pytest.raises(BusyError, match="somebody else"):
        race.publish_full(1, weights(2))
    assert len(list(store.path.glob("v000000000001-*"))) == 1  # the loser left nothing
    first.publish(2, weights(2))  # stands on its own version 0
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 1)
        check(local, 1)
        local.pull(store, 2)
        check(local, 2)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, publisher = published(tmp_path / "store", 0)
    real = os.fsync

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(CapacityError, match="free some space"):
        publisher.publish(1, weights(1))
    monkeypatch.setattr(durable.os, "fsync", real)
    assert store.versions() == [0]
    assert len(list(store.path.glob("v000000000001-*"))) == 0
    publisher.publish(1, weights(2))  # the snapshot had not moved
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        monkeypatch.setattr(durable.os, "fsync", full)
        with pytest.raises(CapacityError):
            local.pull(store, 1)
        monkeypatch.setattr(durable.os, "fsync", real)
        check(local, 0)
        local.pull(store, 1)
        assert held(local.path) == contents(2)


def test_versions_rise_and_are_never_given_twice(tmp_path: Path) -> None:
    store, publisher = published(tmp_path / "store", 1)
    for version in (1, 0):
        with pytest.raises(VersionError, match="rise"):
            publisher.publish(version, weights(2))
    publisher.publish_full(5, weights(2))
    collect(store, grace_s=0.0)
    (store.path / "v000000000005.json").rename(store.path / "withdrawn-v000000000005.json")
    collect(store, grace_s=0.0)
    with pytest.raises(VersionError):
        publisher.publish(5, weights(3))


def test_names_and_shapes_must_stay(tmp_path: Path) -> None:
    _, publisher = published(tmp_path / "store", 0)
    fewer = weights(1)
    del fewer["bias"]
    with pytest.raises(UnknownNameError, match="bias"):
        publisher.publish(1, fewer)
    other = weights(1)
    other["bias"] = Weight(TensorMeta("bias", "float16", metas()["bias"].shape), other["bias"].data)
    with pytest.raises(LayoutError, match="bias"):
        publisher.publish(1, other)
    assert publisher.publish(1, weights(1)).kind is VersionKind.DELTA


def test_folds(tmp_path: Path) -> None:
    store, _ = published(tmp_path / "store", 4)
    manifest = fold(store, 0, 4)
    singles = sum(store.manifest(v).num_bytes for v in range(1, 5))
    assert manifest.num_bytes < singles
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 0)
        way = store.route(store.manifest(0).target, 4)
        assert [m.kind for m in way] == [VersionKind.FOLD]
        local.pull(store)
        check(local, 4)
    with pytest.raises(ConfigError, match="nothing to fold"):
        fold(store, 0, 4)
    with pytest.raises(ConfigError, match="nothing to fold"):
        fold(store, 3, 4)


def test_collection_keeps_what_is_needed(tmp_path: Path) -> None:
    store, publisher = published(tmp_path / "store", 2)
    publisher.publish_full(3, weights(3))
    publisher.publish(4, weights(4))
    with Lease(store, 1) as lease:
        assert collect(store, grace_s=0.0).withdrawn == ()
        lease.renew()
    assert collect(store, keep=3, grace_s=0.0).withdrawn == ()
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store, 1)
        first = collect(store, grace_s=3600.0)
        assert len(first.withdrawn) == 3
        assert first.removed == ()
        assert store.versions() == [3, 4]
        assert len(list(store.path.glob("v000000000000-*"))) == 1  # a slow reader may still read it
        assert len(collect(store, grace_s=0.0).removed) == 3  # folders
        assert not list(store.path.glob("v000000000000-*"))
        local.pull(store)  # its base is gone: from the full version
        check(local, 4)


def test_a_lease_that_is_not_renewed_ends(tmp_path: Path) -> None:
    store, publisher = published(tmp_path / "store", 1)
    publisher.publish_full(2, weights(2))
    lease = Lease(store, 0)
    for path in (store.path / "leases").iterdir():
        os.utime(path, (0, 0))
    assert len(collect(store, grace_s=0.0).withdrawn) == 2
    lease.release()


def test_what_an_ended_publisher_left_is_removed(tmp_path: Path) -> None:
    store, _ = published(tmp_path / "store", 0)
    orphan = store.path / "v000000000001-0123456789ab"
    orphan.mkdir()
    (store.path / ".partial-1").touch()
    assert collect(store, grace_s=3600.0).removed == ()
    os.utime(orphan, (0, 0))
    os.utime(store.path / ".partial-1", (0, 0))
    assert sorted(collect(store, grace_s=3600.0).removed) == [".partial-1", orphan.name]
    store.check_files(store.manifest(0))


def test_a_hostile_manifest_is_refused(tmp_path: Path) -> None:
    store, _ = published(tmp_path / "store", 1)
    good = store.manifest(1)
    for change in (
        {"directory": "../elsewhere"},
        {"run_id": ".."},
        {"base": None},
        {"base": good.target},
        {"tensors": (*good.tensors, good.tensors[0])},
        {"tensors": good.tensors[1:]},
        {"files": ()},
    ):
        fields: dict[str, Any] = {f: getattr(good, f) for f in good.__dataclass_fields__}
        forged = VersionManifest(**{**fields, **change}).to_bytes()
        with pytest.raises(IntegrityError):
            VersionManifest.from_bytes(forged, "forged")
    for data in (b"", b"{}", b"[]", b"\xff", b"{" * 10_000, b'{"format": 1}'):
        with pytest.raises(IntegrityError):
            VersionManifest.from_bytes(data, "forged")


def test_a_stale_file_handle_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = published(tmp_path / "store", 0)
    real, failures = Path.open, [errno.ESTALE, errno.ESTALE]

    def stale(path: Path, *args: Any, **options: Any) -> Any:
        if failures:
            raise OSError(failures.pop(), "stale")
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", stale)
    assert store.manifest(0).version == 0
    failures += [errno.ESTALE] * 9
    with pytest.raises(OSError, match="stale"):
        store.manifest(0)


def test_a_follower_one_version_behind_reads_one_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = published(tmp_path / "store", 4)
    have, read = store.manifest(3).target, []
    real = Store.read_manifest

    def counted(self: Store, name: str) -> VersionManifest:
        read.append(name)
        return real(self, name)

    monkeypatch.setattr(Store, "read_manifest", counted)
    assert [m.version for m in store.route(have, 4)] == [4]
    assert set(read) == {"v000000000004.json"}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with LocalCheckpoint(tmp_path / "local"), pytest.raises(BusyError):
        LocalCheckpoint(tmp_path / "local")
    LocalCheckpoint(tmp_path / "local").close()


def test_torch_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "b": torch.ones(3, dtype=torch.float8_e4m3fn),
        "c": torch.zeros((), dtype=torch.int64),
    }
    (tmp_path / "store").mkdir()
    store = Store(tmp_path / "store", RUN)
    publisher = Publisher(store)
    publisher.publish(0, weights_of(tensors.items()))
    tensors["a"][0, 0] = 7
    publisher.publish(1, weights_of(tensors.items()))
    with LocalCheckpoint(tmp_path / "local") as local:
        local.pull(store)
        found = held(local.path)
    for name, tensor in tensors.items():
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert found[name] == expected


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, _ = published(tmp_path / "store", 3)
    directory = str(tmp_path / "store")
    assert main(["delta", "log", directory]) == 0
    assert "delta" in capsys.readouterr().out
    assert main(["delta", "show", directory, "--version", "2"]) == 0
    assert store.manifest(2).target.root in capsys.readouterr().out
    assert main(["delta", "fold", directory, "--from", "0"]) == 0
    assert main(["delta", "verify", directory]) == 0
    assert capsys.readouterr().out.count("good") == 5
    assert main(["delta", "gc", directory]) == 0
    path = next(store.payload_path(store.manifest(1)).iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["delta", "verify", directory]) == 1
    assert "torn" in capsys.readouterr().out
    assert main(["delta", "log", directory, "--run", "none"]) == 2
    assert main(["delta", "log", str(tmp_path / "nowhere")]) == 1


def test_an_anchor_is_of_its_version_whatever_is_encoded_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written behind the next step, which may have to copy everything into the snapshot."""
    store, publisher = published(tmp_path / "store", 1)
    is_writing, is_encoded = threading.Event(), threading.Event()
    original = publish.write_full

    def write_late(*rest: Any) -> Any:
        is_writing.set()
        is_encoded.wait(0.3)  # it must not be: whoever encodes waits for this
        return original(*rest)

    monkeypatch.setattr(publish, "write_full", write_late)
    anchoring = threading.Thread(target=publisher.anchor)
    anchoring.start()
    assert is_writing.wait(20.0)
    publisher.encode_full(2, weights(3))
    is_encoded.set()
    anchoring.join(20.0)
    assert not anchoring.is_alive()
    anchors = store.path.glob("v000000000001-full*")
    (folder,) = (path for path in anchors if path.is_dir())
    assert held(folder) == contents(1)
