"""Host memory of our own."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import itertools
import mmap
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from processes import num_maps, open_fds

from weightsync import memory
from weightsync.errors import CapacityError, ConfigError, ProtocolError
from weightsync.memory import (
    PAGE_BYTES,
    HostMemory,
    MemfdMemory,
    SharedArena,
    available_bytes,
    find_arena,
    has_arenas,
    merge_spans,
)
from weightsync.types import ITEM_BYTES


def is_mapped(ptr: int) -> bool:
    with open("/proc/self/maps") as lines:
        spans = [line.split()[0].split("-") for line in lines]
    return any(int(a, 16) <= ptr < int(b, 16) for a, b in spans)


class TestHostMemory:
    @pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 3 * 2**20 + 1])
    def test_zeroed_aligned_and_writable(self, num_bytes: int) -> None:
        with HostMemory.anonymous(num_bytes) as found:
            assert found.num_bytes == num_bytes
            assert found.ptr % PAGE_BYTES == 0
            view = found.bytes_view()
            assert view.shape == (num_bytes,)
            assert not view.any()
            view[:] = 7
            assert ctypes.c_uint8.from_address(found.ptr + num_bytes - 1).value == 7

    def test_close_unmaps_once(self) -> None:
        found = HostMemory.anonymous(2**20)
        assert found.is_open
        assert is_mapped(found.ptr)
        found.close()
        found.close()
        assert not found.is_open
        with pytest.raises(ValueError, match="closed"):
            found.pin()

    def test_a_pin_keeps_it_mapped(self) -> None:
        found = HostMemory.anonymous(64 * 2**20)
        pin = found.pin()
        ctypes.c_uint8.from_address(found.ptr).value = 3
        found.close()
        assert ctypes.c_uint8.from_address(found.ptr).value == 3
        before = num_maps()
        pin.release()
        assert num_maps() < before

    @pytest.mark.parametrize("num_bytes", [0, -1])
    def test_at_least_a_byte(self, num_bytes: int) -> None:
        with pytest.raises(ConfigError):
            HostMemory.anonymous(num_bytes)

    def test_too_much_names_both_sizes(self) -> None:
        with pytest.raises(CapacityError, match=r"needs 1125899906842624 B.*available"):
            HostMemory.anonymous(2**50)
        with pytest.raises(CapacityError, match=r"'w' needs 1125899906842624 B.*available"):
            MemfdMemory.create(2**50, "w")

    def test_a_cgroup_may_be_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "_cgroup_available_bytes", lambda: iter([5000]))
        assert available_bytes() == 5000
        with pytest.raises(CapacityError, match="5001 B"):
            HostMemory.anonymous(5001)

    def test_available_is_plausible(self) -> None:
        total = os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES
        assert 0 < available_bytes() <= total


class TestMemfdMemory:
    def test_a_peer_sees_the_bytes_and_cannot_write(self) -> None:
        with MemfdMemory.create(5000, "weightsync-test") as ours:
            ours.bytes_view()[:] = np.arange(5000) % 251
            with MemfdMemory.map(ours.read_only_fd(), 5000) as theirs:
                assert theirs.ptr != ours.ptr
                view = theirs.bytes_view()
                assert np.array_equal(view, np.arange(5000) % 251)
                assert not view.flags.writeable
                with pytest.raises(PermissionError):
                    mmap.mmap(theirs.fd, 5000, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(OSError, match=r"."):
                    os.write(theirs.fd, b"x")
                del view

    def test_its_size_is_sealed(self) -> None:
        with MemfdMemory.create(5000, "weightsync-test") as ours:
            for size in (0, 4999, 5001):
                with pytest.raises(PermissionError):
                    os.ftruncate(ours.fd, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(ours.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    def test_unsealed_memory_is_refused(self) -> None:
        before = open_fds()
        fd = os.memfd_create("weightsync-test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 5000)
        with pytest.raises(ProtocolError, match="seals"):
            MemfdMemory.map(fd, 5000)
        assert open_fds() == before

    def test_a_plain_file_is_refused(self) -> None:
        before = open_fds()
        with pytest.raises(ProtocolError):
            MemfdMemory.map(os.open("/proc/self/status", os.O_RDONLY), 10)
        assert open_fds() == before

    @pytest.mark.parametrize("announced", [0, -1, 5001, 2**60])
    def test_a_wrong_size_is_refused(self, announced: int) -> None:
        with MemfdMemory.create(5000, "weightsync-test") as ours:
            before = open_fds()
            with pytest.raises(ProtocolError, match="5000"):
                MemfdMemory.map(ours.read_only_fd(), announced)
            assert open_fds() == before

    def test_nothing_stays_open(self) -> None:
        gc.collect()  # what other tests dropped
        before = open_fds()
        for _ in range(50):
            with MemfdMemory.create(2**20, "weightsync-test") as ours:
                MemfdMemory.map(ours.read_only_fd(), 2**20).close()
        MemfdMemory.create(2**20, "weightsync-test")  # dropped, not closed
        gc.collect()
        assert open_fds() == before


class TestSharedArena:
    @pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
    def test_every_dtype(self, dtype: str) -> None:
        with_arena = SharedArena(2**16)
        for shape in ((), (3,), (2, 0, 5), (4, 7)):
            array = with_arena.empty(shape, dtype)
            assert array.shape == shape
            assert array.itemsize == ITEM_BYTES[dtype]
            assert array.ctypes.data % 256 == 0
            array[...] = 1
            assert find_arena(array.ctypes.data, array.nbytes) is with_arena
        with_arena.close()

    def test_torch_takes_it(self) -> None:
        torch = pytest.importorskip("torch")
        arena = SharedArena(2**16)
        tensor = torch.from_numpy(arena.empty((8, 8), "bfloat16")).view(torch.bfloat16)
        tensor.fill_(1.5)
        assert find_arena(tensor.data_ptr(), tensor.nbytes) is arena
        arena.close()
        assert tensor.sum() == 96

    def test_nothing_is_handed_out_twice(self) -> None:
        arena = SharedArena(10_000)
        spans = []
        for _ in range(13):
            array = arena.empty((700,), "uint8")
            spans.append((array.ctypes.data, array.nbytes))
        with pytest.raises(CapacityError, match=r"10000 B.*700 B.*\d+ B are free"):
            arena.empty((700,), "uint8")
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        arena.close()

    def test_an_array_keeps_its_arena(self) -> None:
        array = SharedArena(10_000).empty((5,), "int64")
        gc.collect()
        assert find_arena(array.ctypes.data, array.nbytes) is not None
        ptr = array.ctypes.data
        del array
        gc.collect()
        assert find_arena(ptr, 8) is None

    def test_a_closed_arena_is_not_found_but_stays_mapped(self) -> None:
        arena = SharedArena(10_000)
        array = arena.empty((5,), "int64")
        array[:] = 4
        arena.close()
        assert find_arena(array.ctypes.data, array.nbytes) is None
        assert array.sum() == 20

    def test_find_needs_the_whole_range(self) -> None:
        arena = SharedArena(8192)
        assert find_arena(arena.ptr, 8192) is arena
        assert find_arena(arena.ptr + 8191, 1) is arena
        assert find_arena(arena.ptr + 1, 8192) is None
        assert find_arena(arena.ptr - 1, 2) is None
        assert has_arenas()
        arena.close()
        assert find_arena(arena.ptr, 1) is None


class TestMergeSpans:
    def test_touching_pages_are_one(self) -> None:
        spans = [(9000, 10), (0, 1), (4097, 100), (40_960, 4096), (5, 0)]
        merged, index = merge_spans(spans, 4096)
        assert merged == [(0, 12288), (40_960, 4096)]
        assert index == [0, 0, 0, 1, -1]

    def test_nothing(self) -> None:
        assert merge_spans([]) == ([], [])

    @hypothesis.given(
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=12),
        st.sampled_from([1, 4, 16]),
    )
    def test_against_sets_of_pages(self, spans: list[tuple[int, int]], page: int) -> None:
        merged, index = merge_spans(spans, page)
        pages = {k // page for ptr, size in spans for k in range(ptr, ptr + size)}
        assert {k // page for ptr, size in merged for k in range(ptr, ptr + size)} == pages
        assert all(ptr % page == 0 and size % page == 0 and size > 0 for ptr, size in merged)
        assert all(sum(a) < b[0] for a, b in itertools.pairwise(merged))
        for (ptr, size), at in zip(spans, index, strict=True):
            assert (at == -1) == (size == 0)
            if size:
                assert merged[at][0] <= ptr
                assert ptr + size <= sum(merged[at])
