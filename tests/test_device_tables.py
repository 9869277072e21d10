"""One seam for both kinds of device; what cannot be is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine_adapter.tensors import TensorEngine, _check_slot
from weightsync import device_tables, native
from weightsync.device_tables import (
    CudaCopy,
    HostBuffer,
    KeptBuffer,
    bytes_at,
    copy_with_digests,
    cuda_index,
    device_of,
    owned_digests,
    private_memory,
    segment_copy,
    synchronize,
)
from weightsync.digest import DigestTable, part_of
from weightsync.errors import CapacityError, ConfigError, TransportError, UnavailableError
from weightsync.layout import Layout, PlacedBox, Region, TensorLayout
from weightsync.plan import make_plan
from weightsync.tables import DigestRows, digest_rows, segment_rows, table
from weightsync.tensors import TensorView
from weightsync.transports.ipc_cuda import CudaSource
from weightsync.types import (
    Availability,
    Box,
    Capabilities,
    Contract,
    ContractChoice,
    CostConstants,
    RegionAddress,
    RegionKind,
    TensorMeta,
)


def test_one_device() -> None:
    regions = [RegionAddress(0, 64, 8, "cuda:1"), RegionAddress(1, 0, 0)]
    assert device_of(regions, "it") == "cuda:1"
    assert device_of(regions[1:], "it") == "cpu"
    with pytest.raises(ConfigError, match=r"it lies on several devices \(cpu, cuda:1\)"):
        device_of([*regions, RegionAddress(2, 128, 8)], "it")


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda", "cuda:x", "xpu:0"])
def test_no_cuda_device(device: str) -> None:
    with pytest.raises(ConfigError, match="only 'cpu' and CUDA"):
        cuda_index(device)


def test_a_build_without_cuda_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_cuda", lambda: False)
    monkeypatch.setattr(native, "cuda_unavailable_reason", lambda: "built without CUDA")
    with pytest.raises(ConfigError, match=r"built without CUDA.*docs/cuda\.md.*WEIGHTSYNC_CUDA=ON"):
        cuda_index("cuda:0")
    synchronize("cpu")


def cuda_view() -> TensorView:
    return TensorView(4096, "uint8", (8,), (1,), "cuda:0", 4096, 8, None)


#: Every way by which CUDA tensors come in, of a trainer and of an engine.
DOORS: dict[str, Callable[[], object]] = {
    "a slot of an engine": lambda: _check_slot("w", cuda_view()),
    "regions that a trainer publishes": lambda: CudaSource().describe([REGION]),
    "digests of what is sent": lambda: DigestTable([part_of(META, cuda_view())], "cuda:0"),
    "staging memory": lambda: private_memory(8, "cuda:0"),
    "a device to wait for": lambda: synchronize("cuda:0"),
}
META = TensorMeta("w", "uint8", (8,))
REGION = RegionAddress(0, 4096, 8, "cuda:0")


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("built without CUDA", r"pip install \. -C cmake\.define\.WEIGHTSYNC_CUDA=ON"),
        ("no driver", "install NVIDIA's driver"),
        ("no device", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_cuda_tensor_without_cuda_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, door: Callable[[], object], reason: str, remedy: str
) -> None:
    monkeypatch.setattr(native, "has_cuda", lambda: False)
    monkeypatch.setattr(native, "cuda_unavailable_reason", lambda: reason)
    with pytest.raises(ConfigError, match=f"{reason}; .*{remedy}"):
        door()


DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_copies_and_digests(device: str) -> None:
    values = np.arange(5000, dtype=np.uint32)
    memories = [private_memory(values.nbytes, device) for _ in range(2)]
    source, target = (m.ptr for m in memories)
    if device == "cpu":
        native.memcpy_bytes(source, values.ctypes.data, values.nbytes)
    else:
        native.extension.cuda_copy(source, values.ctypes.data, values.nbytes, 0)
    rows = table(segment_rows((5000,), source=(source, (4,), 4), target=(target, (4,), 4)), 13)
    copy = segment_copy(rows, device)
    for _ in range(2):
        copy.run(num_threads=1)
    args = {"strides_bytes": (4,), "index_strides": (1,), "start_index": 0, "item": 4, "seed": 7}
    digests = owned_digests(
        digest_rows((5000,), ptr=target, **args) * 2 + digest_rows((100,), ptr=source, **args),
        [0, 0, 1],
        3,
        device,
    )
    here = int(values.ctypes.data)
    whole = native.digest_segments(table(digest_rows((5000,), ptr=here, **args), 15))[0]
    part = native.digest_segments(table(digest_rows((100,), ptr=here, **args), 15))[0]
    for _ in range(2):
        assert digests.run(1).tolist() == [(2 * int(whole)) % 2**64, int(part), 0]
    if device != "cpu":
        assert np.array_equal(bytes_at(target, values.nbytes, device).view(np.uint32), values)
    for memory in memories:
        memory.close()
        memory.close()


def test_memory_is_freed_once_with_its_last_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[tuple[int, int]] = []
    monkeypatch.setattr(native, "has_cuda", lambda: True)
    monkeypatch.setattr(native.extension, "cuda_malloc", lambda num_bytes, device: 4096)
    monkeypatch.setattr(
        native.extension, "cuda_free", lambda ptr, device: freed.append((ptr, device))
    )
    memory = private_memory(100, "cuda:3")
    assert (memory.ptr, memory.num_bytes) == (4096, 100)
    pin = memory.pin()
    memory.close()
    memory.close()
    assert freed == []
    del pin
    assert freed == [(4096, 3)]
    with pytest.raises(ValueError, match="was closed"):
        memory.pin()
    memory = private_memory(100, "cuda:3")
    memory.close()
    assert freed == [(4096, 3)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("with_digests", [False, True])
def test_what_is_done_meanwhile_is_done_before_the_copy_is_waited_for(with_digests: bool) -> None:
    values = np.arange(5000, dtype=np.uint32)
    memories = [private_memory(values.nbytes, "cuda:0") for _ in range(2)]
    source, target = (m.ptr for m in memories)
    native.extension.cuda_copy(source, values.ctypes.data, values.nbytes, 0)
    rows = table(segment_rows((5000,), source=(source, (4,), 4), target=(target, (4,), 4)), 13)
    args = {"strides_bytes": (4,), "index_strides": (1,), "start_index": 0, "item": 4, "seed": 7}
    digested = DigestRows(
        table(digest_rows((5000,), ptr=source, **args), 15), np.zeros(1, dtype=np.int64), 1
    )
    copy = copy_with_digests(rows, digested if with_digests else None, "cuda:0")
    seen: list[str] = []
    found = copy.run(meanwhile=lambda: seen.append("looked"))
    assert seen == ["looked"]
    assert np.array_equal(bytes_at(target, values.nbytes, "cuda:0").view(np.uint32), values)
    if with_digests:
        here = table(digest_rows((5000,), ptr=int(values.ctypes.data), **args), 15)
        assert found.tolist() == native.digest_segments(here).tolist()

    def moved() -> None:
        raise ValueError("it moved")

    other = values[::-1].copy()
    native.extension.cuda_copy(source, other.ctypes.data, values.nbytes, 0)
    with pytest.raises(ValueError, match="it moved"):
        copy.run(meanwhile=moved)
    landed = bytes_at(target, values.nbytes, "cuda:0").view(np.uint32)
    assert np.array_equal(landed, other), "the error came when nothing was under way"
    copy.close()
    for memory in memories:
        memory.close()


@pytest.mark.gpu
def test_digests_that_are_begun_behind_a_copy_are_of_what_it_brought() -> None:
    """A copy that takes the device some time: digests beside it would see what was there before."""
    num_words = 2**27
    values = np.arange(num_words, dtype=np.uint32)
    memories = [private_memory(values.nbytes, "cuda:0") for _ in range(2)]
    source, target = (m.ptr for m in memories)
    native.extension.cuda_copy(source, values.ctypes.data, values.nbytes, 0)
    rows = table(segment_rows((num_words,), source=(source, (4,), 4), target=(target, (4,), 4)), 13)
    args = {"strides_bytes": (4,), "index_strides": (1,), "start_index": 0, "item": 4, "seed": 7}
    of_target = digest_rows((num_words,), ptr=target, **args)
    digests = owned_digests(of_target, [0] * len(of_target), 1, "cuda:0")
    before = digests.run(1)
    copy, waits = segment_copy(rows, "cuda:0"), []
    assert isinstance(copy, CudaCopy)
    with ThreadPoolExecutor(1) as aside:
        copy.run(meanwhile=lambda: waits.append(digests.start(1, aside)))
        assert 0 < copy.device_s < 1
        found = waits[0]()
    here = table(digest_rows((num_words,), ptr=int(values.ctypes.data), **args), 15)
    assert found.tolist() == [int(native.digest_segments(here).sum())]
    assert found.tolist() != before.tolist()
    copy.close()
    for memory in memories:
        memory.close()


@pytest.mark.gpu
def test_pinned_memory_outlives_its_end() -> None:
    free_bytes = native.extension.cuda_free_bytes
    memory = private_memory(2**28, "cuda:0")
    held, pin = free_bytes(0), memory.pin()
    memory.close()
    assert free_bytes(0) < held + 2**27
    del pin
    assert free_bytes(0) >= held + 2**27
    with pytest.raises(ValueError, match="was closed"):
        memory.pin()


@pytest.mark.gpu
def test_more_than_there_is() -> None:
    with pytest.raises(CapacityError, match="are free there"):
        private_memory(2**45, "cuda:0")


# --- what a plan says of devices ------------------------------------------------------------------


def layout_on(*devices: str, kind: RegionKind = RegionKind.PERSISTENT) -> Layout:
    """One tensor of four bytes on each device."""
    tensors = tuple(
        TensorLayout(
            f"t{i}",
            (TensorMeta(f"t{i}", "uint8", (4,)),),
            (PlacedBox(0, Box.whole((4,)), i, 0, (1,), "uint8"),),
        )
        for i in range(len(devices))
    )
    return Layout(1, tensors, (tuple(Region(4, kind, device) for device in devices),), {})


def capabilities(reads_cuda: bool, streams_cuda: bool = False) -> Capabilities:
    refused = Availability(False, "the kernel refuses")
    return Capabilities(
        "some",
        {Contract.STREAM: Availability(True), Contract.DIRECT: refused},
        {c: CostConstants(1e-6, 1e9) for c in Contract},
        reads_cuda=reads_cuda,
        streams_cuda=streams_cuda,
        # A stream is the cheaper one on the host, and the dearer one here.
        cuda_costs={Contract.STREAM: CostConstants(1.0, 1e9)},
    )


def contract_of(
    source: Layout,
    target: Layout,
    *,
    reads_cuda: bool = True,
    streams_cuda: bool = False,
    choice: ContractChoice = ContractChoice.AUTO,
) -> Contract:
    have = capabilities(reads_cuda, streams_cuda)
    return make_plan(source, target, bucket_bytes=256, capabilities=have, choice=choice).contract


def test_between_cuda_devices_only_direct_reads() -> None:
    """Which the kernel's word on reading a process does not touch. Numbers of devices may differ."""
    source, target = layout_on("cuda:1", "cuda:1"), layout_on("cuda:0", "cuda:0")
    assert contract_of(source, target) is Contract.DIRECT
    with pytest.raises(UnavailableError, match="a stream moves host memory only"):
        contract_of(source, target, choice=ContractChoice.STREAM)
    with pytest.raises(UnavailableError, match=r"temporary.*a stream moves host memory only"):
        contract_of(layout_on("cuda:0", "cuda:0", kind=RegionKind.TEMPORARY), target)
    with pytest.raises(UnavailableError, match="transport='ipc'"):
        contract_of(source, target, reads_cuda=False)


def test_between_cuda_devices_a_ring_where_there_is_one() -> None:
    """By the constants of the device; what is temporary can only be streamed."""
    source, target = layout_on("cuda:1", "cuda:1"), layout_on("cuda:0", "cuda:0")
    assert contract_of(source, target, streams_cuda=True) is Contract.DIRECT
    asked = contract_of(source, target, streams_cuda=True, choice=ContractChoice.STREAM)
    assert asked is Contract.STREAM
    temporary = layout_on("cuda:0", "cuda:0", kind=RegionKind.TEMPORARY)
    assert contract_of(temporary, target, streams_cuda=True) is Contract.STREAM


def test_the_host_is_as_it_was() -> None:
    assert contract_of(layout_on("cpu"), layout_on("cpu")) is Contract.STREAM


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (("cpu", "cpu"), ("cuda:0", "cuda:0"), "both must lie on"),
        (("cuda:0", "cuda:0"), ("cpu", "cpu"), "both must lie on"),
        (("cpu", "cuda:0"), ("cuda:0", "cuda:0"), "cpu, cuda:0.*on one device"),
        (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), "on one device"),
        (("xpu:0", "xpu:0"), ("xpu:0", "xpu:0"), "both must lie on"),
    ],
)
def test_devices_that_nothing_joins(
    source: tuple[str, ...], target: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnavailableError, match=message):
        contract_of(layout_on(*source), layout_on(*target))


@pytest.mark.gpu
def test_an_engine_on_two_devices() -> None:
    import torch

    named = {"a": torch.zeros(4, device="cuda:0"), "b": torch.zeros(4)}
    with pytest.raises(ConfigError, match="the engine lies on several devices"):
        TensorEngine(named.items())


def test_memory_that_is_kept_grows_and_may_be_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptBuffer("cpu")
    first = kept.room(100)
    assert first.nbytes == 100
    assert kept.room(120).ctypes.data == first.ctypes.data  # with a little to spare
    assert kept.room(1000).nbytes == 1000
    make = device_tables.HostBuffer

    def refuse(num_bytes: int, device: str) -> HostBuffer:
        if device != "cpu":
            raise TransportError("cuda:0: cudaMallocHost: out of memory")
        return make(num_bytes, device)

    monkeypatch.setattr(device_tables, "HostBuffer", refuse)
    kept = KeptBuffer("cuda:0")
    for size in (5000, 100):  # what was not to be had once may be asked for less
        room = kept.room(size)
        room[:] = 7
        assert room.nbytes == size
    assert "5000 B of pinned memory" in caplog.text
    kept.close()
    assert kept.room(8).nbytes == 8
    buffer = make(64, "cpu")
    buffer.close()
    assert (buffer.num_bytes, buffer.data.size) == (0, 0)
