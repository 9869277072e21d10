"""Engines whose weights are on a GPU follow a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_adapter.module import ModuleAdapter
from weightsync.device_patch import DevicePatch
from weightsync.errors import IntegrityError
from weightsync.receiver import Receiver
from weightsync.store import Store
from weightsync.store_sender import StoreOptions, StoreSender

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def module(seed: int, device: str) -> Any:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(300, 300) for _ in range(4)]
    net = torch.nn.Sequential(torch.nn.Embedding(5000, 300), *layers)
    return net.to(torch.bfloat16).requires_grad_(False).to(device)


def step(net: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        mask = torch.rand(parameter.shape, generator=generator) < 0.01
        moved = torch.where(mask, parameter.cpu() * 1.01, parameter.cpu())
        parameter.copy_(moved.to(parameter.dtype))


def same(net: Any, other: Any) -> bool:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16)) for a, b in pairs)


@pytest.mark.parametrize(
    ("trainer_device", "snapshot"), [("cpu", "host"), ("cuda", "host"), ("cuda", "device")]
)
@pytest.mark.parametrize("placement", ["staged", "in_place"])
def test_full_versions_and_deltas(
    tmp_path: Path, placement: str, trainer_device: str, snapshot: Any
) -> None:
    net, served = module(0, trainer_device), module(1, "cuda")
    with (
        StoreSender(tmp_path, "run", StoreOptions(snapshot=snapshot)) as sender,
        Receiver(ModuleAdapter(served)) as receiver,
    ):
        follower = receiver.follow(tmp_path, placement=placement)
        for version in range(4):
            with sender.update(version=version) as update:
                update.send(net)
            assert update.report is not None
            report = follower.pull()
            assert update.report.on_host == {}
            assert report.kinds == (("delta",) if version else ("full",))
            assert same(net, served)
            assert receiver.version == version
            step(net, version)


def test_a_check_that_fails_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, served = module(0, "cpu"), module(1, "cuda")
    with (
        StoreSender(tmp_path, "run", StoreOptions()) as sender,
        Receiver(ModuleAdapter(served)) as receiver,
    ):
        follower = receiver.follow(tmp_path)
        with sender.update(version=0) as update:
            update.send(net)
        assert update.report is not None
        follower.pull()
        step(net, 1)
        with sender.update(version=1) as update:
            update.send(net)
        assert update.report is not None
        assert Store(tmp_path, "run").latest() == 1

        put = DevicePatch.put

        def fail(patch: DevicePatch) -> int:
            put(patch)
            raise IntegrityError("as if it were not there")

        before = [p.clone() for p in served.parameters()]
        monkeypatch.setattr(DevicePatch, "put", fail)
        seen = []
        discard = DevicePatch.take_back
        monkeypatch.setattr(
            DevicePatch, "take_back", lambda patch: (discard(patch), seen.append(
                all(torch.equal(a, b) for a, b in zip(before, served.parameters(), strict=True))
            ))[0],
        )  # fmt: skip
        assert follower.pull().kinds == ("full", "delta")
        assert seen == [True]
        assert same(net, served)
