"""What every direct read must do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest

from transports.pairs import (
    LIMIT_S,
    SHORT_S,
    Footprint,
    Pair,
    TransportContract,
    addresses,
    deadline,
    random_bytes,
    row,
    table,
)
from weightsync import native
from weightsync.deadline import CancelToken, Deadline
from weightsync.errors import (
    CancelledError,
    DeadlineError,
    PeerLostError,
    TransportError,
    WeightSyncError,
)
from weightsync.transports.base import Transport


@st.composite
def segment_lists(draw: st.DrawFn, source_bytes: int) -> list[tuple[int, int, list[Any]]]:
    """(source offset, run bytes, dims of (count, source stride)) within ``source_bytes``."""
    found = []
    for _ in range(draw(st.integers(0, 8))):
        dims = [
            (draw(st.integers(0, 5)), draw(st.integers(-300, 300)))
            for _ in range(draw(st.integers(0, 3)))
        ]
        run = draw(st.one_of(st.integers(0, 4), st.integers(0, 3000)))
        low = sum(min(0, (n - 1) * s) for n, s in dims if n)
        high = sum(max(0, (n - 1) * s) for n, s in dims if n)
        start = draw(st.integers(-low, source_bytes - high - run))
        found.append((start, run, dims))
    return found


class DirectContract(TransportContract):
    """Published regions and reads of them."""

    def converts(self, transport: Transport) -> bool:
        return transport.capabilities().direct_converts

    def slow_table(self, source: int, target: int) -> npt.NDArray[np.int64]:
        """A read of 4096 bytes that takes long: one page onto one page, over and over."""
        return table(row(source, target, 4096, (4000, 0, 0), (1000, 0, 0)))

    def test_probe_says_that_it_works(self, pair: Pair) -> None:
        availability = pair.target.probe_direct(deadline())
        assert availability.is_usable, availability.reason

    @pytest.mark.parametrize("num_bytes", [1, 7, 4096, 1_000_003, 40_000_000])
    def test_whole_region(self, pair: Pair, num_bytes: int) -> None:
        remote, local = pair.published(num_bytes), self.landing(num_bytes)
        ptr = pair.open([remote], [local])[0]
        pair.read(row(ptr, local.ctypes.data, num_bytes))
        assert np.array_equal(local, remote)

    def test_several_regions_and_an_empty_one(self, pair: Pair) -> None:
        remote = [pair.published(n, n) for n in (300, 0, 5000)]
        local = self.landing(5300)
        at = pair.open(remote, [local])
        assert sorted(at) == [0, 1, 2]
        target = int(local.ctypes.data)
        pair.read(row(at[0], target, 300), row(at[1], target, 0), row(at[2], target + 300, 5000))
        assert np.array_equal(local, np.concatenate([np.asarray(r) for r in remote]))

    def test_nothing_at_all(self, pair: Pair) -> None:
        pair.open([], [])
        pair.read()

    def test_any_segments(self, pair: Pair) -> None:
        pair.published(20_000)

        @hypothesis.settings(max_examples=60, deadline=None)
        @hypothesis.given(data=st.data())
        def read_any(data: st.DataObject) -> None:
            self._read_any(pair, data)

        read_any()

    def _read_any(self, pair: Pair, data: st.DataObject) -> None:
        remote = pair.kept[0]
        here = np.asarray(remote)
        segments = data.draw(segment_lists(remote.nbytes))
        sizes = [run * int(np.prod([n for n, _ in dims])) for _, run, dims in segments]
        local = self.landing(sum(sizes) + 16)
        base = pair.open([remote], [local])[0]
        rows, expected, at = [], [], 3  # targets are unaligned too
        for (start, run, dims), size in zip(segments, sizes, strict=True):
            strides, inner = [], run
            for count, _ in reversed(dims):
                strides.insert(0, inner)
                inner *= count
            full = [(n, s, t) for (n, s), t in zip(dims, strides, strict=True)]
            rows.append(row(base + start, int(local.ctypes.data) + at, run, *full))
            shape = (*(n for n, _ in dims), run)
            steps = (*(s for _, s in dims), 1)
            if size:
                part = np.lib.stride_tricks.as_strided(here[start:], shape, steps)
                expected.append(part.ravel())
            at += size
        pair.read(*rows)
        whole = np.concatenate([np.zeros(3, np.uint8), *expected, np.zeros(13, np.uint8)])
        assert np.array_equal(local, whole)

    def test_conversion_on_the_way(self, pair: Pair, transport: Transport) -> None:
        if not self.converts(transport):
            return  # then it happens when a slot is filled
        remote = pair.published(44_000_000)
        local, expected = self.landing(44_000_000), np.zeros(44_000_000, dtype=np.uint8)
        base, at = pair.open([remote], [local])[0], int(local.ctypes.data)

        def rows(source: int, target: int) -> npt.NDArray[np.int64]:
            found = [
                row(source, target, 40_000_000),  # one long run
                row(source, target + 20_000_000, 400, (300, 2000, 200), (3, 600_000, 60_000)),
                row(source + 4, target + 20_200_000, 4, (1000, 40_000, 2)),
                row(source, target + 30_000_000, 1000),
            ]
            for converting in found[:3]:
                converting[3] = native.CONVERT_FP32_TO_BF16
            return table(*found)

        here = np.asarray(remote)
        native.copy_segments(rows(int(here.ctypes.data), int(expected.ctypes.data)))
        pair.read(*rows(base, at).tolist())
        assert np.array_equal(local, expected)

    def test_a_read_sees_what_is_there_now(self, pair: Pair) -> None:
        remote, local = pair.published(100_000), self.landing(100_000)
        ptr = pair.open([remote], [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(table(row(ptr, local.ctypes.data, 100_000)))
        assert prepared.num_bytes == 100_000
        for n in range(3):
            remote[:] = random_bytes(100_000, n)
            direct.read(prepared, deadline())
            assert np.array_equal(local, remote)

    def test_nothing_grows_over_a_thousand_reads(self, pair: Pair) -> None:
        remote, local = pair.published(50_000), self.landing(50_000)
        ptr = pair.open([remote], [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(table(row(ptr, local.ctypes.data, 50_000)))

        def refit() -> None:
            assert pair.open([remote], [local])[0] == ptr
            direct.read(prepared, deadline())

        for _ in range(100):
            refit()
        before = Footprint.now()
        for _ in range(1000):
            refit()
        Footprint.now().check_flat(before)

    def test_nothing_grows_when_regions_change(self, pair: Pair) -> None:
        remotes, local = [pair.published(9000, n) for n in range(2)], self.landing(9000)

        def refit(n: int) -> None:
            ptr = pair.open([remotes[n % 2]], [local])[0]
            pair.read(row(ptr, local.ctypes.data, 9000))
            assert np.array_equal(local, remotes[n % 2])

        for n in range(20):
            refit(n)
        before = Footprint.now()
        for n in range(100):
            refit(n)
        Footprint.now().check_flat(before)

    def test_same_regions_keep_their_epoch(self, pair: Pair) -> None:
        one, two = pair.published(100), pair.published(100)
        direct = pair.source.direct()
        first = direct.publish(addresses([one]))
        assert direct.publish(addresses([one])) == first
        second = direct.publish(addresses([two]))
        assert second != first
        assert json.loads(json.dumps(second)) == second

    def test_a_stale_epoch_is_refused(self, pair: Pair) -> None:
        one, two, local = pair.published(64), pair.published(64, 2), self.landing(64)
        old = json.loads(json.dumps(pair.source.direct().publish(addresses([one]))))
        ptr = pair.open_descriptor(old, [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(table(row(ptr, local.ctypes.data, 64)))
        new_ptr = pair.open([two], [local])[0]
        for _ in range(2):
            with pytest.raises(WeightSyncError):
                direct.read(prepared, deadline())
            with pytest.raises(WeightSyncError, match=r"stale|epoch"):
                pair.open_descriptor(old, [local])
        assert not local.any()
        assert pair.open([two], [local])[0] == new_ptr
        pair.read(row(new_ptr, local.ctypes.data, 64))
        assert np.array_equal(local, two)

    def test_withdrawn_regions_are_refused(self, pair: Pair) -> None:
        remote, local = pair.published(64), self.landing(64)
        ptr = pair.open([remote], [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(table(row(ptr, local.ctypes.data, 64)))
        pair.source.direct().withdraw()
        pair.source.direct().withdraw()
        self._until_refused(lambda: direct.read(prepared, deadline()))
        ptr = pair.open([remote], [local])[0]
        local[:] = 0
        pair.read(row(ptr, local.ctypes.data, 64))
        assert np.array_equal(local, remote)

    @staticmethod
    def _until_refused(read: Callable[[], None]) -> None:
        """The word of a withdrawal travels; it is here soon, and reads before it are good ones."""
        end = deadline(5.0)

        def read_on() -> None:
            while True:
                end.check()
                read()

        with pytest.raises(TransportError, match=r"stale|withdrawn"):
            read_on()

    @pytest.mark.parametrize("shift", [-1, 1, 10**6, -(10**6)])
    def test_sources_outside_are_refused(self, pair: Pair, shift: int) -> None:
        remote, local = pair.published(4096), self.landing(4096)
        ptr = pair.open([remote], [local])[0]
        with pytest.raises(WeightSyncError, match=r"outside|source"):
            pair.read(row(ptr + shift, local.ctypes.data, 4096))
        assert not local.any()

    @pytest.mark.parametrize(
        "dims", [[(2, 4000, 8)], [(3, -8, 8)], [(2, 0, 0), (1, 0, 0), (600, 8, 8)]]
    )
    def test_strides_that_leave_are_refused(self, pair: Pair, dims: list[Any]) -> None:
        remote, local = pair.published(4096), self.landing(4096)
        ptr = pair.open([remote], [local])[0]
        with pytest.raises(WeightSyncError, match=r"outside|source"):
            pair.read(row(ptr, local.ctypes.data, 200, *dims))
        assert not local.any()

    def test_targets_outside_are_refused(self, pair: Pair) -> None:
        remote, local = pair.published(4096), self.landing(8192)
        ptr = pair.open([remote], [local[:4096]])[0]
        with pytest.raises(WeightSyncError, match=r"outside|target"):
            pair.read(row(ptr, int(local.ctypes.data) + 1, 4096))
        assert not local.any()

    @pytest.mark.parametrize("value", [2**62, -(2**62), 2**63 - 1])
    @pytest.mark.parametrize("column", [0, 2, 4, 5])
    def test_overflowing_tables_are_refused(self, pair: Pair, column: int, value: int) -> None:
        remote, local = pair.published(4096), self.landing(4096)
        ptr = pair.open([remote], [local])[0]
        bad = row(ptr, local.ctypes.data, 8, (2, 8, 8), (2, 16, 16), (2, 32, 32))
        bad[column] = value
        with pytest.raises(WeightSyncError):
            pair.read(bad)
        assert not local.any()

    def test_garbage_direct_descriptors_are_refused(self, pair: Pair) -> None:
        remote, local = pair.published(64), self.landing(64)
        good = json.loads(json.dumps(pair.source.direct().publish(addresses([remote]))))
        for name in good:
            rest = {k: v for k, v in good.items() if k != name}
            for bad in (rest, {**good, name: None}, {**good, name: {"x": 1}}):
                with pytest.raises(WeightSyncError):
                    pair.target.direct().open(bad, addresses([local]), deadline(SHORT_S))
        ptr = pair.open_descriptor(good, [local])[0]
        pair.read(row(ptr, local.ctypes.data, 64))
        assert np.array_equal(local, remote)

    def test_a_read_ends_at_its_deadline(self, pair: Pair) -> None:
        remote, local = pair.published(4096), self.landing(4096)
        ptr = pair.open([remote], [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(self.slow_table(ptr, int(local.ctypes.data)))
        with pytest.raises(DeadlineError, match=r"the peer.*'read'"):
            direct.read(prepared, deadline(SHORT_S, "read"))
        landed = local.copy()
        remote[:] = ~remote
        assert np.array_equal(local, landed)  # quiet since

    def test_a_read_can_be_cancelled(self, pair: Pair) -> None:
        remote, local = pair.published(4096), self.landing(4096)
        ptr = pair.open([remote], [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(self.slow_table(ptr, int(local.ctypes.data)))
        token = CancelToken()
        reading = pair.start(lambda: direct.read(prepared, deadline(token=token)))
        token.cancel("aborted")
        with pytest.raises(CancelledError, match="aborted"):
            reading.result(LIMIT_S)

    @pytest.mark.parametrize("who", ["source", "target"])
    def test_close_ends_a_read(self, pair: Pair, who: str) -> None:
        remote, local = pair.published(4096), self.landing(4096)
        ptr = pair.open([remote], [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(self.slow_table(ptr, int(local.ctypes.data)))
        reading = pair.start(lambda: direct.read(prepared, deadline()))
        getattr(pair, who).close()
        with pytest.raises(PeerLostError):
            reading.result(LIMIT_S)

    def test_an_expired_deadline_reads_nothing(self, pair: Pair) -> None:
        remote, local = pair.published(4096), self.landing(4096)
        ptr = pair.open([remote], [local])[0]
        direct = pair.target.direct()
        prepared = direct.prepare(table(row(ptr, local.ctypes.data, 4096)))
        times = iter([0.0])
        late = Deadline(1.0, peer="p", stage="s", clock=lambda: next(times, 9.0))
        with pytest.raises(DeadlineError):
            direct.read(prepared, late)
        assert not local.any()
