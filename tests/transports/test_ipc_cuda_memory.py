"""``ipc`` on a GPU, by kinds of memory: expandable segments, released memory, none left, other numbers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda_vmm import VmmBlock
from nursery import fork_with_torch
from processes import Pipe, open_fds

from engine_adapter.module import ModuleAdapter
from transports import test_ipc_cuda as base
from transports.test_ipc_cuda import (
    LIMITS,
    MODULE_BYTES,
    SLACK_BYTES,
    assert_holds,
    engine,
    free_bytes,
    placements,
    wait_for_free,
)
from weightsync import native
from weightsync.receiver import Receiver
from weightsync.sender import Sender

pytestmark = pytest.mark.gpu

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def trainer(pipe: Pipe) -> None:
    """Child: as the other trainer, with memory of other kinds."""
    base.serve(pipe, _Trainer())


class _Trainer(base._Trainer):
    def use(self, device: str) -> None:
        base.DEVICE = device

    def memory_kind(self) -> int:
        return int(native.extension.cuda_allocation(self.module.d.data_ptr(), 0)[3])

    def make_block(self, num_pieces: int, is_shareable: bool) -> None:
        import torch

        torch.zeros(1, device="cuda:0")
        self.block = VmmBlock(num_pieces, is_shareable)
        self.tensor = torch.as_tensor(self.block, device="cuda:0")

    def release(self) -> None:
        self.block.release()

    def resume(self) -> None:
        self.block.resume()

    def fill_block(self, value: int) -> None:
        import torch

        self.tensor.fill_(value)
        torch.cuda.synchronize()

    def refit_block(self, version: int) -> str:
        assert self.sender is not None
        with self.sender.update(version=version) as update:
            update.send({"block": self.tensor})
        assert update.report is not None
        return update.report.engines[0].outcome.value

    def held(self) -> list[int]:
        return [*native.extension.cuda_held(), len(open_fds())]


@contextmanager
def far_trainer(env: dict[str, str] | None = None) -> Iterator[base._FarTrainer]:
    with fork_with_torch("transports.test_ipc_cuda_memory:trainer", env) as child:
        yield base._FarTrainer(child)


@contextmanager
def block_engine(num_bytes: int) -> Iterator[tuple[Any, Receiver]]:
    import torch

    module = torch.nn.Module()
    value = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    module.block = torch.nn.Parameter(value, requires_grad=False)
    receiver = Receiver(ModuleAdapter(module)).start()
    try:
        yield module, receiver
    finally:
        receiver.close()


# --- expandable segments --------------------------------------------------------------------------


@placements
def test_expandable_segments(placement: str) -> None:
    with engine() as (module, receiver), far_trainer(EXPANDABLE) as far:
        far("make", 1)
        assert far("memory_kind") == 2  # pieces, so that this tests what it says
        far("connect", receiver.url, {"placement": placement, "verify": "read_back"})
        for version in range(1, 4):
            assert far("refit", version, 100 + version)["outcome"] == "committed"
            assert_holds(module, 100 + version)
        far("close")


def test_expandable_segments_that_are_taken_apart_and_grow_again() -> None:
    """Never what was there before, though addresses come back; nothing is kept of it either."""
    with engine() as (module, receiver), far_trainer(EXPANDABLE) as far:
        far("make", 0)
        far("connect", receiver.url, {"placement": "in_place", "lease_s": 3600.0})
        counts = []
        for version in range(1, 25):
            far("free")
            far("make", version)
            assert far("refit", version, version)["outcome"] == "committed"
            assert_holds(module, version)
            if version in (3, 24):
                here = (*native.extension.cuda_held(), len(open_fds()))
                counts.append((far("held"), here, free_bytes()))
        (there, here, free), (there_now, here_now, free_now) = counts
        assert (there_now, here_now) == (there, here)
        assert free_now >= free - 2**21


@placements
def test_expandable_memory_is_free_after_its_trainer_closed(placement: str) -> None:
    with engine() as (_, receiver), far_trainer(EXPANDABLE) as far:
        for seed in range(3):
            far("make", seed)
            held = free_bytes()
            far("connect", receiver.url, {"placement": placement})
            far("refit", 1, seed)
            far("close")
            far("free")
            if seed:
                wait_for_free(held + MODULE_BYTES - 2**21)


# --- memory that is released and resumed ------------------------------------------------------------

NUM_PIECES = 5


def test_released_memory_is_refused_and_resumed_memory_is_new() -> None:
    with block_engine(NUM_PIECES * 2**21) as (module, receiver), far_trainer() as far:
        far("make_block", NUM_PIECES, True)
        far("fill_block", 1)
        far("connect", receiver.url, {"placement": "in_place"})
        assert far("refit_block", 1) == "committed"
        assert bool((module.block == 1).all())
        for version in range(2, 6):
            far("release")
            assert "freed, or released" in far.failure("refit_block", 10 * version)
            assert bool((module.block == version - 1).all())
            far("resume")
            far("fill_block", version)
            assert far("refit_block", 10 * version + 1) == "committed"
            assert bool((module.block == version).all())
        far("close")


def test_a_peer_that_maps_it_does_not_keep_what_was_released_forever() -> None:
    """Until its trainer publishes again, or closes."""
    with block_engine(64 * 2**21) as (_, receiver), far_trainer() as far:
        far("make_block", 64, True)
        far("fill_block", 1)
        far("connect", receiver.url, {"placement": "in_place"})
        far("refit_block", 1)
        held = free_bytes()
        far("release")
        far("close")
        wait_for_free(held + 60 * 2**21)
        far("resume")


def test_memory_without_a_handle_type_is_refused_by_name() -> None:
    with block_engine(2**21) as (_, receiver), far_trainer() as far:
        far("make_block", 1, False)
        far("fill_block", 1)
        far("connect", receiver.url, {})
        assert "POSIX_FILE_DESCRIPTOR" in far.failure("refit_block", 1)


# --- staging --------------------------------------------------------------------------------------


def test_staging_is_no_memory_of_torch() -> None:
    import torch

    source = base.make_module(3)
    with engine() as (module, receiver):
        options = {"transport": "ipc", "placement": "staged", **LIMITS}
        gc.collect()
        torch.cuda.empty_cache()
        before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
        free = int(torch.cuda.mem_get_info(0)[0])
        with Sender.connect([receiver], **options) as sender:
            with sender.update(version=1) as update:
                update.send(source)
            assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
            assert free - int(torch.cuda.mem_get_info(0)[0]) >= MODULE_BYTES
        assert_holds(module, 3)


def test_no_room_to_stage() -> None:
    """The update is given up, what is there stays served, and the next one goes through."""
    with engine() as (module, receiver), far_trainer() as far:
        far("make", 1)
        far("connect", receiver.url, {"placement": "in_place"})
        assert far("refit", 1, 1)["outcome"] == "committed"
        far("close")
        far("connect", receiver.url, {"placement": "staged"})
        blocks = take_all_but(SLACK_BYTES)
        try:
            text = far.failure("refit", 2, 2)
            assert "are needed, but only" in text
            assert "free there" in text
            assert receiver.version == 1
        finally:
            for ptr in blocks:
                native.extension.cuda_free(ptr, 0)
        assert_holds(module, 1)
        assert far("refit", 3, 3)["outcome"] == "committed"
        assert_holds(module, 3)


def take_all_but(num_bytes: int) -> list[int]:
    blocks: list[int] = []
    size = 2**36
    while size >= 2**21:
        room = free_bytes() - num_bytes
        if room < size:
            size //= 2
            continue
        try:
            blocks.append(native.extension.cuda_malloc(size, 0))
        except native.CudaError:
            size //= 2
    return blocks


# --- numbers of devices ---------------------------------------------------------------------------


def visible_name(index: int) -> str:
    """What CUDA_VISIBLE_DEVICES calls a device of this process."""
    raw = native.extension.cuda_device_uuid(index).hex()
    return f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


def test_a_device_by_its_uuid_and_by_its_number() -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible_name(0), **EXPANDABLE}
    with engine() as (module, receiver), far_trainer(env) as far:
        far("make", 1)
        far("connect", receiver.url, {})
        assert far("refit", 1, 7)["outcome"] == "committed"
        assert_holds(module, 7)


@pytest.fixture
def two_devices() -> None:
    if native.extension.cuda_num_devices() < 2:
        pytest.skip("needs two GPUs")


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("env", [{}, EXPANDABLE])
def test_two_devices_in_another_order(env: dict[str, str]) -> None:
    order = f"{visible_name(1)},{visible_name(0)}"
    with engine() as (module, receiver):
        with far_trainer({"CUDA_VISIBLE_DEVICES": order, **env}) as far:
            far("use", "cuda:1")
            far("make", 1)
            far("connect", receiver.url, {})
            assert far("refit", 1, 7)["outcome"] == "committed"
            assert_holds(module, 7)
        with far_trainer({"CUDA_VISIBLE_DEVICES": order, **env}) as far:
            far("make", 1)  # on its first device, which is the other one
            far("connect", receiver.url, {})
            assert far("refit", 1, 8)["outcome"] == "committed"
            assert_holds(module, 8)
