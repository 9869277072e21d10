"""What every ring must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from transports.pairs import (
    LIMIT_S,
    SHORT_S,
    Bytes,
    Footprint,
    Pair,
    TransportContract,
    deadline,
    header,
    random_bytes,
)
from weightsync.deadline import CancelToken
from weightsync.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
)
from weightsync.transports.base import (
    RingOptions,
    SlotHeader,
    StreamSource,
    StreamTarget,
)


class StreamContract(TransportContract):
    """The ring."""

    def send(self, source: StreamSource, parts: Sequence[Bytes], session: str = "s1") -> None:
        source.begin_move(session, deadline(stage="begin"))
        for number, part in enumerate(parts):
            slot = source.acquire(deadline(stage="acquire"))
            self.view(slot.ptr, slot.num_bytes)[: len(part)] = part
            last = number == len(parts) - 1
            source.submit(slot, header(len(part), number, session, is_last=last))
        source.flush(deadline(stage="flush"))

    def collect(self, target: StreamTarget, session: str = "s1") -> list[Bytes]:
        target.begin_move(session)
        parts = []
        while True:
            head, slot = target.receive(deadline(stage="receive"))
            assert head.session_id == session
            assert head.sequence == len(parts)
            parts.append(self.view(slot.ptr, slot.num_bytes)[: head.data_bytes].copy())
            target.release(slot)
            if head.is_last:
                return parts

    def exchange(
        self, pair: Pair, ring: tuple[StreamSource, StreamTarget], parts: list[Bytes], session: str
    ) -> None:
        received = pair.start(lambda: self.collect(ring[1], session))
        self.send(ring[0], parts, session)
        got = received.result(LIMIT_S)
        assert [p.tobytes() for p in got] == [p.tobytes() for p in parts]

    @pytest.mark.parametrize("num_parts", [1, 2, 3, 17])
    @pytest.mark.parametrize("num_slots", [1, 2, 4])
    def test_slots_arrive_in_order(self, pair: Pair, num_slots: int, num_parts: int) -> None:
        ring = pair.ring(num_slots, 5000)
        parts = [random_bytes(5000 - 7 * i, i) for i in range(num_parts)]
        self.exchange(pair, ring, parts, "s1")

    def test_tiny_and_empty_slots(self, pair: Pair) -> None:
        ring = pair.ring(2, 1)
        self.exchange(pair, ring, [random_bytes(n, n) for n in (1, 0, 1, 0, 0)], "s1")

    def test_metadata_travels_in_the_slot(self, pair: Pair) -> None:
        source, target = pair.ring(1, 8192)
        target.begin_move("s1")
        received = pair.start(lambda: target.receive(deadline()))
        source.begin_move("s1", deadline())
        slot = source.acquire(deadline())
        self.view(slot.ptr, 8192)[:] = (content := random_bytes(8192))
        sent = SlotHeader("s1", 7, 0, 3000, 8000, 192)
        source.submit(slot, sent)
        head, got = received.result(LIMIT_S)
        assert head == sent
        read = self.view(got.ptr, got.num_bytes)
        assert np.array_equal(np.asarray(read)[:3000], content[:3000])
        assert np.array_equal(np.asarray(read)[8000:8192], content[8000:8192])

    def test_many_sessions_over_one_ring(self, pair: Pair) -> None:
        ring = pair.ring(2, 3000)
        for n in range(30):
            parts = [random_bytes(3000, n + k) for k in range(n % 4 + 1)]
            self.exchange(pair, ring, parts, f"s{n}")

    def test_back_pressure(self, pair: Pair) -> None:
        source, target = pair.ring(2, 64)
        target.begin_move("s1")
        source.begin_move("s1", deadline())
        for n in range(2):
            source.submit(source.acquire(deadline()), header(64, n))
        with pytest.raises(DeadlineError):
            source.acquire(deadline(SHORT_S))
        _, slot = target.receive(deadline())
        target.release(slot)
        waiting = pair.start(lambda: source.acquire(deadline()))
        assert waiting.result(LIMIT_S).num_bytes == 64

    def test_a_slot_holds_until_it_is_released(self, pair: Pair) -> None:
        source, target = pair.ring(2, 100)
        target.begin_move("s1")
        source.begin_move("s1", deadline())
        first = source.acquire(deadline())
        self.view(first.ptr, 100)[:] = 1
        source.submit(first, header(100, 0))
        _, held = target.receive(deadline())
        for n in range(1, 6):
            slot = source.acquire(deadline())
            self.view(slot.ptr, 100)[:] = n + 1
            source.submit(slot, header(100, n))
            target.release(target.receive(deadline())[1])
        assert (np.asarray(self.view(held.ptr, 100)) == 1).all()
        target.release(held)
        source.flush(deadline())

    def test_same_ring_is_handed_out_again(self, pair: Pair) -> None:
        source, target = pair.ring(2, 100)
        assert pair.source.stream(RingOptions(2, 100, pair.source_device), deadline()) is source
        assert pair.target.stream(deadline(), pair.device) is target
        with pytest.raises(ConfigError, match="3"):
            pair.source.stream(RingOptions(3, 100, pair.source_device), deadline())

    @pytest.mark.parametrize("options", [RingOptions(0, 8), RingOptions(1, 0)])
    def test_no_ring_without_bytes(self, pair: Pair, options: RingOptions) -> None:
        with pytest.raises(ConfigError):
            pair.source.stream(options, deadline())

    def test_deadlines_name_peer_stage_and_time(self, pair: Pair) -> None:
        source, target = pair.ring(1, 64)
        target.begin_move("s1")
        source.begin_move("s1", deadline())
        with pytest.raises(DeadlineError, match=r"the peer.*'receive'.*0\.\d s"):
            target.receive(deadline(SHORT_S, "receive"))
        source.submit(source.acquire(deadline()), header(1))
        with pytest.raises(DeadlineError, match=r"the peer.*'acquire'.*0\.\d s"):
            source.acquire(deadline(SHORT_S, "acquire"))
        with pytest.raises(DeadlineError, match=r"the peer.*'flush'.*0\.\d s"):
            source.flush(deadline(SHORT_S, "flush"))

    def test_waits_end_when_cancelled(self, pair: Pair) -> None:
        source, target = pair.ring(1, 64)
        target.begin_move("s1")
        source.submit(source.acquire(deadline()), header(1))
        _, _ = target.receive(deadline())
        token = CancelToken()
        waits: list[Callable[[], Any]] = [
            lambda: target.receive(deadline(token=token)),
            lambda: source.flush(deadline(token=token)),
        ]
        waiting = [pair.start(wait) for wait in waits]
        token.cancel("enough")
        for future in waiting:
            with pytest.raises(CancelledError, match="enough"):
                future.result(LIMIT_S)

    @pytest.mark.parametrize("who", ["source", "target"])
    def test_close_wakes_both_sides(self, pair: Pair, who: str) -> None:
        source, target = pair.ring(1, 64)
        target.begin_move("s1")
        source.submit(source.acquire(deadline()), header(1))
        _, _ = target.receive(deadline())
        waiting: list[Future[Any]] = [
            pair.start(lambda: target.receive(deadline())),
            pair.start(lambda: source.acquire(deadline())),
        ]
        getattr(pair, who).close()
        for future in waiting:
            with pytest.raises(PeerLostError):
                future.result(LIMIT_S)

    def test_an_unclean_end_is_forgotten(self, pair: Pair) -> None:
        ring = source, target = pair.ring(3, 256)
        target.begin_move("s1")
        source.begin_move("s1", deadline())
        for n in range(3):
            source.submit(source.acquire(deadline()), header(256, n))
        _, held = target.receive(deadline())  # one held, two on their way: both sides give up
        self.exchange(pair, ring, [random_bytes(256, n) for n in range(7)], "s2")
        target.release(held)  # late, of a generation that is over
        self.exchange(pair, ring, [random_bytes(256, n) for n in range(7)], "s3")

    def test_an_acquired_slot_is_taken_back(self, pair: Pair) -> None:
        ring = source, _ = pair.ring(1, 64)
        source.begin_move("s1", deadline())
        stale = source.acquire(deadline())
        self.exchange(pair, ring, [random_bytes(64)], "s2")
        with pytest.raises(ConfigError, match="begin_move"):
            source.submit(stale, header(64))

    def test_begin_move_has_a_deadline(self, pair: Pair) -> None:
        ring = source, _ = pair.ring(1, 64)
        source.begin_move("s1", deadline())
        source.submit(source.acquire(deadline()), header(64))
        for _ in range(3):  # nobody receives, so nobody answers
            with pytest.raises(DeadlineError, match="begin"):
                source.begin_move("s2", deadline(SHORT_S, "begin"))
        self.exchange(pair, ring, [random_bytes(64, n) for n in range(3)], "s3")

    def test_slots_of_another_session_are_not_seen(self, pair: Pair) -> None:
        source, target = pair.ring(1, 64)
        target.begin_move("s2")
        received = pair.start(lambda: target.receive(deadline()))
        source.begin_move("s1", deadline())
        for n in range(3):
            source.submit(source.acquire(deadline()), header(64, n, "s1"))
        source.submit(source.acquire(deadline()), header(5, 0, "s2"))
        head, _ = received.result(LIMIT_S)
        assert (head.session_id, head.data_bytes) == ("s2", 5)

    def test_a_header_must_fit_its_slot(self, pair: Pair) -> None:
        source, _ = pair.ring(1, 64)
        source.begin_move("s1", deadline())
        slot = source.acquire(deadline())
        for bad in (header(65), SlotHeader("s1", 1, 0, 1, 60, 5), header(-1)):
            with pytest.raises(ProtocolError, match="outside"):
                source.submit(slot, bad)
        source.submit(slot, header(64))

    def test_nothing_grows_over_a_thousand_moves(self, pair: Pair) -> None:
        ring = pair.ring(2, 4096)
        parts = [random_bytes(4096, n) for n in range(3)]
        for n in range(100):
            self.exchange(pair, ring, parts, f"warm{n}")
        before = Footprint.now()
        for n in range(1000):
            self.exchange(pair, ring, parts, f"s{n}")
        Footprint.now().check_flat(before)
