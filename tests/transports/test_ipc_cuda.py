"""``ipc`` between two processes of one CUDA device."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from nursery import fork_with_torch
from processes import Child, Pipe, open_fds

from engine_adapter.module import ModuleAdapter
from weightsync import native
from weightsync.errors import (
    CapacityError,
    PeerLostError,
    ProtocolError,
    TransportError,
    UnavailableError,
    WeightSyncError,
)
from weightsync.receiver import Receiver
from weightsync.sender import Sender
from weightsync.transports.cuda_allocations import (
    Allocation,
    Found,
    Sharing,
    as_allocations,
    find_allocations,
    parse_device,
)
from weightsync.transports.ipc_cuda import CudaPath, CudaSource
from weightsync.transports.published import Publisher
from weightsync.types import RegionAddress

# --- pure parts: they run everywhere --------------------------------------------------------------

UUID = "ab" * 16
HANDLE = "0c" * 64
GOOD = {
    "uuid": UUID,
    "allocations": [{"ptr": 4096, "num_bytes": 8192, "id": "1f", "handle": HANDLE}],
}


PIECED = {
    "uuid": UUID,
    "allocations": [{"ptr": 4096, "num_bytes": 96, "pieces": [["1f", 32], ["2f", 64]]}],
}


def pieced(**changes: Any) -> dict[str, Any]:
    return {"uuid": UUID, "allocations": [{**PIECED["allocations"][0], **changes}]}  # type: ignore[dict-item]


def described(**changes: Any) -> dict[str, Any]:
    return {"uuid": UUID, "allocations": [{**GOOD["allocations"][0], **changes}]}  # type: ignore[dict-item]


def test_a_descriptor_survives_the_wire() -> None:
    uuid, allocations = parse_device(json.loads(json.dumps(GOOD)))
    assert uuid == UUID
    assert allocations == (Allocation(4096, 8192, "1f", HANDLE),)
    assert [a.to_json() for a in allocations] == GOOD["allocations"]
    assert parse_device({"uuid": UUID, "allocations": []}) == (UUID, ())
    _, allocations = parse_device(json.loads(json.dumps(PIECED)))
    assert allocations == (Allocation(4096, 96, pieces=(("1f", 32), ("2f", 64))),)
    assert [a.to_json() for a in allocations] == PIECED["allocations"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected an object"),
        ({"uuid": UUID}, "'allocations' is missing"),
        ({**GOOD, "surplus": 1}, "surplus"),
        ({**GOOD, "uuid": "ab"}, "'uuid' must be 16 bytes"),
        ({**GOOD, "uuid": "zz" * 16}, "'uuid' must be 16 bytes"),
        (described(handle="0c" * 63), "'handle' must be 64 bytes"),
        (described(handle=5), "'handle' must be str"),
        (described(ptr=-1), "'ptr' is -1"),
        (described(num_bytes=0), "out of range"),
        (described(ptr=2**63 - 1), "out of range"),
        (described(surplus=1), "surplus"),
        ({**GOOD, "allocations": described()["allocations"] * 2}, "overlap"),
        (pieced(pieces=[]), "sizes in field 'pieces'"),
        (pieced(pieces=[["1f", 32], ["2f", 65]]), "sizes in field 'pieces'"),
        (pieced(pieces=[["1f", 97], ["2f", -1]]), "sizes in field 'pieces'"),
        (pieced(pieces=[["1f"]]), "'pieces' holds"),
        (pieced(pieces=["1f"]), "'pieces' holds"),
        (pieced(pieces=[[1, 96]]), "'pieces' holds"),
        (pieced(pieces=[["1f", True]]), "'pieces' holds"),
        (pieced(handle=HANDLE), "unknown field 'handle'"),
    ],
)
def test_a_descriptor_that_cannot_be(value: object, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_device(value)


def look_up(asked: list[int], sharing: Sharing = Sharing.HANDLE) -> Callable[[int], Any]:
    """Allocations of 1000 bytes at each multiple of 1000, numbered."""

    def ask(ptr: int) -> tuple[int, int, int, int]:
        asked.append(ptr)
        return ptr // 1000 * 1000, 1000, ptr // 1000, sharing

    return ask


def on_cuda(*spans: tuple[int, int]) -> list[RegionAddress]:
    return [RegionAddress(i, *span, "cuda:0") for i, span in enumerate(spans)]


def test_an_allocation_is_found_once() -> None:
    asked: list[int] = []
    regions = on_cuda((3500, 500), (1000, 10), (1500, 500), (3000, 1), (0, 0))
    found = find_allocations(regions, look_up(asked))
    assert found == [
        Found(1000, 1000, 1, Sharing.HANDLE),
        Found(3000, 1000, 3, Sharing.HANDLE),
    ]
    assert asked == [1000, 3000]


def test_regions_outside_one_allocation() -> None:
    with pytest.raises(UnavailableError, match="reaches over the end of its allocation"):
        find_allocations(on_cuda((1500, 501)), look_up([]))


def test_a_region_may_lie_in_several_pieces() -> None:
    asked: list[int] = []
    regions = on_cuda((1500, 1700), (3500, 100), (6000, 1000))
    found = find_allocations(regions, look_up(asked, Sharing.FD))
    assert [f.ptr for f in found] == [1000, 2000, 3000, 6000]
    assert asked == [1500, 2000, 3000, 6000]
    assert as_allocations(found, export=lambda ptr: b"") == [
        Allocation(1000, 3000, pieces=(("1", 1000), ("2", 1000), ("3", 1000))),
        Allocation(6000, 1000, pieces=(("6", 1000),)),
    ]


def test_pieces_and_allocations_side_by_side() -> None:
    kinds = [Sharing.FD, Sharing.HANDLE, Sharing.FD, Sharing.FD]
    found = [Found(1000 * i, 1000, i, kind) for i, kind in enumerate(kinds)]
    made = as_allocations(found, export=lambda ptr: bytes([ptr // 1000]) * 64)
    assert made == [
        Allocation(0, 1000, pieces=(("0", 1000),)),
        Allocation(1000, 1000, "1", "01" * 64),
        Allocation(2000, 2000, pieces=(("2", 1000), ("3", 1000))),
    ]


def test_memory_that_has_no_handle() -> None:
    with pytest.raises(UnavailableError, match=r"POSIX_FILE_DESCRIPTOR.*expandable_segments"):
        find_allocations(on_cuda((1500, 5)), look_up([], Sharing.NONE))


def cuda_error(name: str) -> Exception:
    error = native.CudaError(f"a call: {name}")
    error.error_name = name
    return error


def test_memory_that_was_freed_or_released() -> None:
    def nothing(ptr: int) -> Any:
        raise cuda_error("cudaErrorInvalidValue")

    with pytest.raises(TransportError, match=r"region 0 .* at 0x5dc on cuda:0.*freed, or released"):
        find_allocations(on_cuda((1500, 5)), nothing)


# --- two processes --------------------------------------------------------------------------------

DEVICE = "cuda:0"
#: Of a module's largest tensor. What kernels take when they are first loaded is less.
MODULE_BYTES = 3000 * 4096 * 2
STAGING_BYTES = MODULE_BYTES + 2 * 2**20
SLACK_BYTES = 16 * 2**20
LIMITS = {"deadline_s": 60.0, "commit_timeout_s": 60.0, "connect_timeout_s": 60.0}


def make_module(seed: int | None, dtype_of_a: str = "bfloat16") -> Any:
    """Odd, strided, tiny, tied, empty and large tensors; zeros without a seed."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = {
                "a": ((513, 1031), getattr(torch, dtype_of_a)),
                "b": ((7,), torch.float32),
                "c": ((), torch.float32),
                "d": ((3000, 4096), torch.bfloat16),
                "e": ((0, 3), torch.bfloat16),
                "f": ((129, 65), torch.float16),
            }
            for name, (shape, dtype) in shapes.items():
                value = torch.zeros(shape, dtype=dtype, device=DEVICE)
                self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
            turned = torch.zeros((64, 200), dtype=torch.bfloat16, device=DEVICE).T
            self.turned = torch.nn.Parameter(turned, requires_grad=False)
            self.many = torch.nn.ParameterList(
                torch.nn.Parameter(torch.zeros(33, dtype=torch.bfloat16, device=DEVICE), False)
                for _ in range(200)
            )
            self.tied = self.d

    module = Model()
    if seed is not None:
        fill(module, seed)
    return module


def fill(module: Any, seed: int) -> None:
    """Random bits of every kind; enqueued, not waited for."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)


def assert_holds(module: Any, seed: int) -> None:
    import torch

    expected = make_module(seed)
    for (name, found), wanted in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found.data, wanted.data.to(found.dtype)), name


def trainer(pipe: Pipe) -> None:
    """Child: a trainer that does as it is told."""
    serve(pipe, _Trainer())


def serve(pipe: Pipe, state: _Trainer) -> None:
    """Calls its methods by name until the parent has enough."""
    import torch

    while True:
        verb, *arguments = pipe.receive(300.0)
        try:
            result: Any = getattr(state, verb)(*arguments)
            pipe.send({"result": result})
        except WeightSyncError as error:
            pipe.send({"error": type(error).__name__, "message": str(error)})
        gc.collect()
        torch.cuda.synchronize()


class _Trainer:
    def __init__(self) -> None:
        self.module: Any = None
        self.sender: Sender | None = None

    def make(self, seed: int, dtype_of_a: str = "bfloat16") -> None:
        self.module = make_module(seed, dtype_of_a)

    def make_on_host(self, seed: int) -> None:
        self.module = make_module(seed).to("cpu")

    def connect(self, url: str, options: dict[str, Any]) -> None:
        self.sender = Sender.connect([url], **{"transport": "ipc", **LIMITS, **options})

    def refit(self, version: int, seed: int, way: str = "module") -> dict[str, Any]:
        assert self.sender is not None
        fill(self.module, seed)  # nobody waits for this here
        source: Any = self.module
        if way == "generator":
            source = ((n, p) for n, p in self.module.named_parameters())
        with self.sender.update(version=version) as update:
            update.send(source)
        assert update.report is not None
        return {"outcome": update.report.engines[0].outcome.value, "fds": len(open_fds())}

    def refit_held(self, version: int) -> None:
        assert self.sender is not None
        with self.sender.update(version=version) as update:
            update.send(self.module)

    def close(self) -> None:
        assert self.sender is not None
        self.sender.close()
        self.sender = None

    def free(self) -> None:
        import torch

        self.module = None
        gc.collect()
        torch.cuda.empty_cache()


class _FarTrainer:
    """Calls of a child, by name."""

    def __init__(self, child: Child) -> None:
        self.child = child

    def __call__(self, verb: str, *arguments: Any) -> Any:
        self.child.send([verb, *arguments])
        answer = self.child.receive(120.0)
        assert "error" not in answer, answer
        return answer["result"]

    def failure(self, verb: str, *arguments: Any) -> str:
        self.child.send([verb, *arguments])
        answer = self.child.receive(120.0)
        assert "error" in answer, answer
        return f"{answer['error']}: {answer['message']}"


@contextmanager
def far_trainer(env: Mapping[str, str] | None = None) -> Iterator[_FarTrainer]:
    with fork_with_torch("transports.test_ipc_cuda:trainer", env) as child:
        yield _FarTrainer(child)


@contextmanager
def engine(**options: Any) -> Iterator[tuple[Any, Receiver]]:
    module = make_module(None)
    receiver = Receiver(ModuleAdapter(module, **options)).start()
    try:
        yield module, receiver
    finally:
        receiver.close()


def free_bytes() -> int:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])


def wait_for_free(num_bytes: int) -> None:
    """The engine lets go on a thread of its own."""
    end_s = time.monotonic() + 20.0
    while (found := free_bytes()) < num_bytes:
        assert time.monotonic() < end_s, f"{num_bytes - found} B too little are free"
        time.sleep(0.05)


placements = pytest.mark.parametrize("placement", ["staged", "in_place"])


@pytest.mark.gpu
@placements
@pytest.mark.parametrize("verify", ["read", "read_back"])
def test_refits_are_equal_bit_for_bit(placement: str, verify: str) -> None:
    with engine() as (module, receiver), far_trainer() as far:
        far("make", 1)
        far("connect", receiver.url, {"placement": placement, "verify": verify})
        for version in range(1, 5):
            assert far("refit", version, 100 + version)["outcome"] == "committed"
            assert_holds(module, 100 + version)
        far("close")


@pytest.mark.gpu
@placements
def test_opaque_slots_and_a_cast(placement: str) -> None:
    with engine(opaque=("b", "turned")) as (module, receiver), far_trainer() as far:
        far("make", 1, "float32")
        far("connect", receiver.url, {"placement": placement, "cast": "fp32_to_bf16"})
        assert far("refit", 1, 5)["outcome"] == "committed"
        import torch

        expected = make_module(5, "float32")
        for name in ("a", "b", "turned"):
            wanted = getattr(expected, name).data.to(getattr(module, name).dtype)
            assert torch.equal(getattr(module, name).data, wanted), name


@pytest.mark.gpu
def test_memory_that_was_allocated_again() -> None:
    """Perhaps at the same address: never what was there before."""
    with engine() as (module, receiver), far_trainer() as far:
        far("make", 1)
        far("connect", receiver.url, {"placement": "in_place"})
        for version in range(1, 6):
            far("free")
            far("make", version)
            assert far("refit", version, version)["outcome"] == "committed"
            assert_holds(module, version)


@pytest.mark.gpu
@placements
def test_a_trainer_that_is_killed(placement: str) -> None:
    with engine() as (module, receiver):
        before = free_bytes()
        for seed in range(3):
            with far_trainer() as far:
                far("make", seed)
                far("connect", receiver.url, {"placement": placement, "lease_s": 2.0})
                assert far("refit", 1, seed)["outcome"] == "committed"
                far.child.kill()
            assert_holds(module, seed)
            wait_for_free(before - STAGING_BYTES - SLACK_BYTES)  # while the engine lives
        receiver.close()
        wait_for_free(before - SLACK_BYTES)


@pytest.mark.gpu
@placements
def test_the_trainers_memory_is_free_after_it_closed(placement: str) -> None:
    """Before the engine did. The first round is for what both sides keep."""
    with engine() as (_, receiver), far_trainer() as far:
        for seed in range(3):
            far("make", seed)
            held = free_bytes()
            far("connect", receiver.url, {"placement": placement})
            far("refit", 1, seed)
            far("close")
            far("free")
            if seed:
                wait_for_free(held + MODULE_BYTES - 2**21)


@pytest.mark.gpu
@placements
def test_nothing_grows(placement: str) -> None:
    with engine() as (module, receiver), far_trainer() as far:
        far("make", 1)
        # No heartbeat on the way: its connection is a file of its own on either side.
        far("connect", receiver.url, {"placement": placement, "lease_s": 3600.0})
        for version in range(1, 11):
            fds_there = far("refit", version, version)["fds"]
        fds_here, before = len(open_fds()), free_bytes()
        for version in range(11, 211):
            answer = far("refit", version, version)
        assert_holds(module, 210)
        assert (len(open_fds()), answer["fds"]) == (fds_here, fds_there)
        assert free_bytes() >= before - 2**21


@pytest.mark.gpu
def test_what_cannot_be_sent_is_refused() -> None:
    with engine() as (module, receiver), far_trainer() as far:
        far("make", 1)
        far("connect", receiver.url, {})
        assert far("refit", 2, 2)["outcome"] == "committed"
        assert_holds(module, 2)
        far("make_on_host", 1)
        assert "both must lie on" in far.failure("refit_held", 3)


@pytest.mark.gpu
@placements
def test_within_one_process(placement: str) -> None:
    source = make_module(3)
    with engine() as (module, receiver):
        options = {"transport": "ipc", "placement": placement, **LIMITS}
        with Sender.connect([receiver], **options) as sender:
            for version in (1, 2):
                fill(source, version)
                with sender.update(version=version) as update:
                    update.send(source)
                assert_holds(module, version)


# --- the engine's end, over a CUDA that only counts -----------------------------------------------


class FakeCuda:
    """Maps handles to addresses of its own; knows what is mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mapped: dict[int, bytes] = {}
        self._next = 2**40
        monkeypatch.setattr(native, "has_cuda", lambda: True)
        monkeypatch.setattr(native.extension, "cuda_map", self._map)
        monkeypatch.setattr(native.extension, "cuda_unmap", self._unmap)
        uuid = bytes.fromhex(UUID)
        monkeypatch.setattr(native.extension, "cuda_device_uuid", lambda device: uuid)

    def _map(self, handle: bytes, device: int) -> int:
        assert device == 1
        self._next += 2**30
        self.mapped[self._next] = handle
        return self._next

    def _unmap(self, ptr: int, device: int) -> None:
        del self.mapped[ptr]  # twice is an error


def allocations(*numbers: int) -> dict[str, Any]:
    rows = [Allocation(n * 10_000, 5000, f"{n:x}", f"{n:02x}" * 64).to_json() for n in numbers]
    return {"uuid": UUID, "allocations": rows}


LOCAL = [RegionAddress(0, 64, 64, "cuda:1")]


def test_allocations_are_mapped_once_and_unmapped_when_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, path = FakeCuda(monkeypatch), CudaPath(is_own_process=False)
    regions = {0: (10_000, 100), 1: (14_000, 1000), 2: (20_007, 1), 3: (0, 0)}
    first = path.map_device(allocations(2, 1), regions, LOCAL, 1)
    one, two = sorted(cuda.mapped, key=cuda.mapped.__getitem__)
    assert first == {0: one, 1: one + 4000, 2: two + 7, 3: 0}
    second = path.map_device(allocations(2, 3), {0: (20_000, 5000), 1: (30_000, 1)}, LOCAL, 1)
    assert second[0] == two
    assert cuda.mapped.keys() == {two, second[1]}
    path.release()
    assert not cuda.mapped
    path.map_device(allocations(1), {0: (10_000, 1)}, LOCAL, 1)
    assert len(cuda.mapped) == 1
    path.close()
    path.close()
    assert not cuda.mapped
    with pytest.raises(PeerLostError):
        path.map_device(allocations(1), {0: (10_000, 1)}, LOCAL, 1)


@pytest.mark.parametrize("span", [(9_999, 1), (14_999, 2), (15_000, 1), (30_000, 1)])
def test_a_region_outside_every_allocation(
    monkeypatch: pytest.MonkeyPatch, span: tuple[int, int]
) -> None:
    FakeCuda(monkeypatch)
    for device in (allocations(1, 2), allocations()):
        with pytest.raises(ProtocolError, match="region 5 lies in no allocation"):
            CudaPath(is_own_process=False).map_device(device, {5: span}, LOCAL, 1)


def test_another_gpu_or_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, path = FakeCuda(monkeypatch), CudaPath(is_own_process=False)
    foreign = {**allocations(1), "uuid": "cd" * 16}
    with pytest.raises(
        UnavailableError, match=f"UUID {'cd' * 16}, the engine's on cuda:1 with UUID"
    ):
        CudaPath(is_own_process=True).map_device(foreign, {0: (10_000, 1)}, LOCAL, 1)
    with pytest.raises(UnavailableError, match="the engine's on the host"):
        path.map_device(allocations(1), {0: (10_000, 1)}, [RegionAddress(0, 64, 64)], 1)
    assert not cuda.mapped
    path.map_device(foreign, {0: (10_000, 1)}, LOCAL, 1)
    assert (len(cuda.mapped), path.name) == (1, "cuda ipc, between GPUs")
    path.map_device(allocations(1), {0: (10_000, 1)}, LOCAL, 2)
    assert path.name == "cuda ipc"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("cudaErrorNotSupported", UnavailableError, r"CUDA IPC is refused here.*MIG.*doctor"),
        ("cudaErrorInvalidResourceHandle", UnavailableError, r"CUDA IPC is refused here"),
        ("cudaErrorMemoryAllocation", CapacityError, r"no room to map"),
    ],
)
def test_what_cuda_refuses_is_explained(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception], message: str
) -> None:
    def refuse(handle: bytes, device: int) -> int:
        raise cuda_error(name)

    FakeCuda(monkeypatch)
    monkeypatch.setattr(native.extension, "cuda_map", refuse)
    path = CudaPath(is_own_process=False)
    with pytest.raises(kind, match=message):
        path.map_device(allocations(1), {0: (10_000, 1)}, LOCAL, 1)
    path.close()


def test_the_own_process_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, path = FakeCuda(monkeypatch), CudaPath(is_own_process=True)
    assert path.map_device(allocations(1), {0: (10_001, 1)}, LOCAL, 1) == {0: 10_001}
    path.close()
    assert not cuda.mapped


def test_another_allocation_at_the_same_address_is_a_new_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCuda(monkeypatch)
    waited: list[int] = []
    identity = {10_000: 7, 20_000: 8}

    def look_up(ptr: int, device: int) -> tuple[int, int, int, int]:
        base = ptr // 10_000 * 10_000
        return base, 5000, identity[base], Sharing.HANDLE

    monkeypatch.setattr(native.extension, "cuda_synchronize", waited.append)
    monkeypatch.setattr(native.extension, "cuda_allocation", look_up)
    monkeypatch.setattr(
        native.extension, "cuda_export", lambda base, device: bytes([identity[base]]) * 64
    )
    publisher = Publisher("ipc", "end", device_source=CudaSource())
    regions = on_cuda((10_000, 10), (20_000, 10), (10_100, 10))
    first = publisher.publish(regions)
    assert publisher.publish(regions) == first
    assert [a["id"] for a in first["device"]["allocations"]] == ["7", "8"]
    identity[20_000] = 9
    second = publisher.publish(regions)
    assert second["epoch"] == first["epoch"] + 1
    assert [a["id"] for a in second["device"]["allocations"]] == ["7", "9"]
    assert waited == [0, 0, 0]  # each time: the regions were written since
    on_host = publisher.publish([RegionAddress(0, 64, 64)])
    assert "device" not in on_host
    assert on_host["epoch"] == second["epoch"] + 1
