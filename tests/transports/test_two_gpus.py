"""Between two GPUs of one machine: every transport, whole updates, and what goes wrong in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from nursery import fork_with_torch
from processes import Child

from transports.conformance import ConnectContract, StreamContract
from transports.cuda_memory import OnCuda
from transports.process_contract import FAST_S
from transports.test_ipc_cuda import (
    _FarTrainer,
    _Trainer,
    assert_holds,
    engine,
    far_trainer,
    make_module,
    placements,
    serve,
)
from transports.test_ipc_cuda_memory import EXPANDABLE, visible_name
from transports.wire import deadline
from weightsync import native
from weightsync.errors import UnavailableError
from weightsync.receiver import Receiver
from weightsync.transports.base import Transport
from weightsync.transports.broadcast import BroadcastTransport

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

#: Small slots, so that the largest tensor takes several.
SMALL = {"bucket": "4MiB", "num_slots": 3}

ways = pytest.mark.parametrize(
    ("transport", "contract"),
    [
        ("broadcast", "stream"),
        ("ipc", "direct"),
        ("ipc", "stream"),
        ("p2p", "direct"),
        ("p2p", "stream"),
    ],
)


@pytest.fixture
def two_gpus() -> None:
    if native.extension.cuda_num_devices() < 2:
        pytest.skip("needs two GPUs")


def other_gpu(*, hides_ours: bool = False) -> dict[str, str]:
    """The environment of a trainer whose first device is our second."""
    names = [visible_name(1)] if hides_ours else [visible_name(1), visible_name(0)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


@ways
@placements
def test_refits_are_equal_bit_for_bit(transport: str, contract: str, placement: str) -> None:
    with engine() as (module, receiver), far_trainer(other_gpu()) as far:
        far("make", 1)
        options = {"transport": transport, "contract": contract, "placement": placement, **SMALL}
        far("connect", receiver.url, options)
        for version in range(1, 4):
            assert far("refit", version, 100 + version)["outcome"] == "committed"
            assert_holds(module, 100 + version)
        far("close")


@ways
def test_a_trainer_that_does_not_see_the_engines_gpu(transport: str, contract: str) -> None:
    with engine() as (module, receiver), far_trainer(other_gpu(hides_ours=True)) as far:
        far("make", 1)
        far("connect", receiver.url, {"transport": transport, "contract": contract, **SMALL})
        assert far("refit", 1, 7)["outcome"] == "committed"
        assert_holds(module, 7)


def test_expandable_segments_of_another_gpu() -> None:
    env = {**other_gpu(hides_ours=True), **EXPANDABLE}
    with engine() as (module, receiver), far_trainer(env) as far:
        far("make", 1)
        far("connect", receiver.url, {"transport": "ipc", "contract": "direct"})
        assert far("refit", 1, 7)["outcome"] == "committed"
        assert_holds(module, 7)


# --- broadcast: NCCL ------------------------------------------------------------------------------


class TestPair(OnCuda, ConnectContract, StreamContract):
    """The contract over NCCL, both ends in this process."""

    source_device = "cuda:1"

    def make_transport(self) -> Transport:
        return BroadcastTransport()

    def test_nothing_is_left_open(self, transport: Transport) -> None:
        """In a process of its own: in this one, what others opened ends whenever it does."""
        with fork_with_torch("transports.test_two_gpus:lives") as child:
            assert child.receive(240.0) == []


def lives(pipe: Any) -> None:
    pair = TestPair()
    pipe.send(pair.left_open(pair.make_transport()))


def broadcast(far: _FarTrainer, receiver: Receiver, **more: Any) -> None:
    far("connect", receiver.url, {"transport": "broadcast", **SMALL, **more})


def test_two_ranks_on_one_gpu_are_told_what_to_use() -> None:
    with engine() as (module, receiver), far_trainer() as far:
        far("make", 1)
        broadcast(far, receiver)
        assert "use transport='ipc'" in far.failure("refit", 1, 5)
        far("close")
        far("connect", receiver.url, {"transport": "ipc"})
        assert far("refit", 2, 6)["outcome"] == "committed"
        assert_holds(module, 6)


def test_a_generator() -> None:
    with engine() as (module, receiver), far_trainer(other_gpu()) as far:
        far("make", 1)
        broadcast(far, receiver)
        for version in (1, 2):
            assert far("refit", version, version, "generator")["outcome"] == "committed"
            assert_holds(module, version)


@pytest.mark.parametrize(
    "point",
    [
        "group.invited=kill",
        "stream.announced=kill@2",
        "stream.submitted=kill@2",
        "stream.announced=stop@2",
        "stream.flush=kill",
    ],
)
def test_a_trainer_that_falls_in_a_broadcast(point: str) -> None:
    """The engine lives on and the next trainer's update works, NCCL or no NCCL."""
    with (
        engine() as (module, receiver),
        far_trainer({**other_gpu(), "WEIGHTSYNC_FAULT": point}) as far,
    ):
        far("make", 1)
        broadcast(far, receiver, lease_s=3.0, deadline_s=6.0)
        far.child.send(["refit", 1, 3])
        if "stop" in point:
            far.child.wait_stopped(60.0)
        else:
            assert far.child.wait(60.0) < 0
        with far_trainer(other_gpu()) as after:
            after("make", 1)
            broadcast(after, receiver)
            assert after("refit", 1, 9)["outcome"] == "committed"
            assert_holds(module, 9)


class _NcclTrainer(_Trainer):
    """Uses a default NCCL group of its own while it sends."""

    def join(self) -> None:
        import torch
        import torch.distributed as dist

        store = dist.HashStore()
        dist.init_process_group(
            "nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0")
        )

    def reduce(self) -> float:
        import torch
        import torch.distributed as dist

        value = torch.ones(1000, device="cuda:0")
        dist.all_reduce(value)
        return float(value.sum())


def nccl_trainer(pipe: Any) -> None:
    serve(pipe, _NcclTrainer())


@pytest.fixture
def far_nccl() -> Iterator[_FarTrainer]:
    with Child("transports.test_two_gpus:nccl_trainer", other_gpu()) as child:
        yield _FarTrainer(child)


def test_a_trainer_that_uses_nccl_itself(far_nccl: _FarTrainer) -> None:
    with engine() as (module, receiver):
        far_nccl("make", 1)
        far_nccl("join")
        broadcast(far_nccl, receiver)
        for version in (1, 2, 3):
            assert far_nccl("reduce") == 1000.0
            assert far_nccl("refit", version, version)["outcome"] == "committed"
            assert_holds(module, version)
        far_nccl("close")
        assert far_nccl("reduce") == 1000.0


def engine_child(pipe: Any) -> None:
    """An engine that can be killed."""
    from engine_adapter.module import ModuleAdapter

    module = make_module(None)
    with Receiver(ModuleAdapter(module)) as receiver:
        pipe.send(receiver.url)
        while True:
            pipe.receive(600.0)
            pipe.send(True)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_an_engine_that_falls_in_a_broadcast(action: str) -> None:
    """The trainer hears of it within its deadline, and goes on with another engine."""
    env = {"WEIGHTSYNC_FAULT": f"stream.landing={action}@2"}
    with Child("transports.test_two_gpus:engine_child", env) as fallen:
        url = fallen.receive(120.0)
        with far_trainer(other_gpu()) as far:
            far("make", 1)
            options: Mapping[str, Any] = {"transport": "broadcast", **SMALL}
            limits = {"deadline_s": FAST_S, "commit_timeout_s": FAST_S, "lease_s": 3.0}
            far("connect", url, {**options, **limits})
            answer = far.failure("refit", 1, 3)
            assert (
                "PeerLostError" in answer or "UpdateFailedError" in answer or "Deadline" in answer
            )
            with engine() as (module, receiver):
                far("connect", receiver.url, dict(options))
                assert far("refit", 2, 4)["outcome"] == "committed"
                assert_holds(module, 4)


def test_the_host_and_a_gpu_are_refused_by_name() -> None:
    with BroadcastTransport().open_source("cpu") as source:
        descriptor = source.descriptor()
        with pytest.raises(UnavailableError, match="both on GPUs"):
            BroadcastTransport().open_target(descriptor, deadline(), "cuda:0")
