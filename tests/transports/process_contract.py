"""What every transport between processes must do when one of them dies or stands still."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Child, ChildEnded, open_fds, weightsync_sockets

from transports.pairs import (
    LIMIT_S,
    SHORT_S,
    TransportContract,
    addresses,
    deadline,
    header,
    row,
    table,
)
from weightsync.errors import DeadlineError, PeerLostError
from weightsync.transports.base import RingOptions, SourceEndpoint, TargetEndpoint

#: The death of a process is known at once; this is for a busy machine.
FAST_S = 5.0


#: Makes a process that runs a function, in an environment.
Start = Callable[[str, Mapping[str, str]], Child]


class Peers:
    """Two real processes, each an end of one pair."""

    def __init__(self, factory: str, env: Mapping[str, Mapping[str, str]], start: Start) -> None:
        self.source = start("transports.peers:source", env.get("source", {}))
        self.target = start("transports.peers:target", env.get("target", {}))
        for child in (self.source, self.target):
            child.send(factory)
        self.target.send(self.source.receive())

    def move(self, session: str, parts: int, limit_s: float = LIMIT_S) -> None:
        """Start a move on both sides; the answers are still to be received."""
        self.source.send(["move", session, 2, 5000, parts, limit_s])
        self.target.send(["move", session, parts, limit_s])

    def publish(self, num_bytes: int, seed: int) -> Any:
        self.source.send(["publish", num_bytes, seed])
        return self.source.receive()["result"]

    def read(self, descriptor: Any, num_bytes: int, seed: int) -> Any:
        self.target.send(["read", descriptor, num_bytes, seed])
        return self.target.receive()

    def kill(self) -> None:
        self.source.__exit__(None, None, None)
        self.target.__exit__(None, None, None)


class StreamProcessContract(TransportContract):
    """A subclass names a function that makes its transport: ``factory = "module:function"``."""

    factory: str
    has_direct = False
    #: Where a transport needs what takes long to import, one that forks.
    start: Start = Child

    @pytest.fixture
    def peers(self) -> Iterator[Peers]:
        peers = Peers(self.factory, {}, self.start)
        yield peers
        peers.kill()

    @pytest.fixture
    def far_source(self) -> Iterator[tuple[Child, TargetEndpoint]]:
        """The trainer is a process, the engine's end is here."""
        with self.start("transports.peers:source", {}) as child:
            child.send(self.factory)
            transport = self.make_transport()
            with transport.open_target(child.receive(), deadline()) as endpoint:
                yield child, endpoint

    @pytest.fixture
    def far_target(self) -> Iterator[tuple[Child, SourceEndpoint]]:
        """The engine is a process, the trainer's end is here."""
        with self.start("transports.peers:target", {}) as child:
            child.send(self.factory)
            with self.make_transport().open_source() as endpoint:
                child.send(dict(endpoint.descriptor()))
                endpoint.accept(deadline())
                yield child, endpoint

    def test_stream_between_processes(self, peers: Peers) -> None:
        for n, parts in enumerate((1, 2, 9)):
            peers.move(f"s{n}", parts)
            assert "error" not in peers.source.receive()
            assert peers.target.receive()["result"] is True

    @pytest.mark.parametrize("victim", ["source", "target"])
    def test_death_in_a_move_is_known_at_once(self, peers: Peers, victim: str) -> None:
        peers.move("s1", 2)
        peers.source.receive()
        peers.target.receive()
        survivor = peers.target if victim == "source" else peers.source
        # The survivor waits for a slot, or for room: nobody answers.
        survivor.send(
            ["move", "s2", 5, 60.0] if victim == "source" else ["move", "s2", 2, 5000, 5, 60.0]
        )
        getattr(peers, victim).kill()
        answer = survivor.receive()
        assert answer["error"] == "PeerLostError"
        assert answer["seconds"] < FAST_S

    def test_stopped_source(self, far_source: tuple[Child, TargetEndpoint]) -> None:
        child, endpoint = far_source
        child.send(["move", "s1", 2, 5000, 1, LIMIT_S])
        ring = endpoint.stream(deadline())
        ring.begin_move("s1")
        ring.release(ring.receive(deadline())[1])
        assert "error" not in child.receive()
        child.stop()
        ring.begin_move("s2")
        with pytest.raises(DeadlineError, match="receive"):
            ring.receive(deadline(SHORT_S, "receive"))
        assert endpoint.lost() is None
        child.resume()
        child.send(["move", "s2", 2, 5000, 1, LIMIT_S])
        ring.release(ring.receive(deadline())[1])
        assert "error" not in child.receive()

    def test_stopped_target(self, far_target: tuple[Child, SourceEndpoint]) -> None:
        child, endpoint = far_target
        child.send(["lost"])
        child.receive()
        ring = endpoint.stream(RingOptions(1, 64), deadline())
        ring.begin_move("s1", deadline())
        child.stop()
        ring.submit(ring.acquire(deadline()), header(64))
        for wait in (ring.flush, ring.acquire):
            with pytest.raises(DeadlineError, match="stand"):
                wait(deadline(SHORT_S, "stand"))
        with pytest.raises(DeadlineError, match="begin"):
            ring.begin_move("s2", deadline(SHORT_S, "begin"))
        child.kill()
        with pytest.raises(PeerLostError):
            ring.flush(deadline(FAST_S))

    @pytest.mark.parametrize(
        ("victim", "point"),
        [
            ("source", "stream.acquire=kill@2"),
            ("source", "stream.submit=kill"),
            ("source", "stream.submitted=kill@2"),
            ("source", "stream.flush=kill"),
            ("target", "stream.receive=kill"),
            ("target", "stream.received=kill@2"),
            ("target", "stream.release=kill"),
        ],
    )
    def test_death_at_each_point_of_a_move(self, victim: str, point: str) -> None:
        peers = Peers(self.factory, {victim: {"WEIGHTSYNC_FAULT": point}}, self.start)
        try:
            peers.move("s1", 6)
            survivor = peers.target if victim == "source" else peers.source
            answer = survivor.receive()
            # Whoever had everything it needed may have ended well.
            if answer.get("error") is None:
                assert victim == "source"
                assert answer["result"] is True
            else:
                assert answer["error"] == "PeerLostError"
                assert answer["seconds"] < FAST_S
            with pytest.raises(ChildEnded):
                getattr(peers, victim).receive()
        finally:
            peers.kill()

    @pytest.mark.parametrize("victim", ["source", "target"])
    def test_a_kill_leaves_nothing(self, victim: str) -> None:
        before = set(weightsync_sockets()), set(os.listdir("/dev/shm")), set(os.listdir("/tmp"))
        peers = Peers(self.factory, {}, self.start)
        try:
            peers.move("s1", 3)
            peers.source.receive()
            assert peers.target.receive()["result"] is True
            if self.has_direct:
                assert peers.read(peers.publish(5000, 2), 5000, 2)["result"] is True
            getattr(peers, victim).kill()
            survivor = peers.target if victim == "source" else peers.source
            survivor.send(["close"])
            assert "error" not in survivor.receive()
            assert not [p for p in open_fds(survivor.pid).values() if "weightsync-ring" in p]
            maps = Path(f"/proc/{survivor.pid}/maps").read_text()
            assert "weightsync-ring" not in maps
        finally:
            peers.kill()
        after = set(weightsync_sockets()), set(os.listdir("/dev/shm")), set(os.listdir("/tmp"))
        assert after[0] <= before[0]
        assert after[1] <= before[1]
        assert not [name for name in after[2] - before[2] if "weightsync" in name]


class ProcessContract(StreamProcessContract):
    """With direct reads, too."""

    has_direct = True

    def test_direct_between_processes(self, peers: Peers) -> None:
        peers.target.send(["probe"])
        assert peers.target.receive()["result"] is True
        for seed, num_bytes in enumerate((1, 4097, 30_000_000, 4097)):
            descriptor = peers.publish(num_bytes, seed)
            assert peers.read(descriptor, num_bytes, seed)["result"] is True

    def test_withdrawn_between_processes(self, peers: Peers) -> None:
        descriptor = peers.publish(5000, 1)
        assert peers.read(descriptor, 5000, 1)["result"] is True
        peers.source.send(["withdraw"])
        peers.source.receive()
        answers = [peers.read(descriptor, 5000, 1) for _ in range(50)]
        assert answers[-1]["error"] == "TransportError"

    def test_a_dead_source_is_not_read(self, far_source: tuple[Child, TargetEndpoint]) -> None:
        child, endpoint = far_source
        child.send(["publish", 5000, 3])
        local = np.zeros(5000, dtype=np.uint8)
        direct = endpoint.direct()
        descriptor = child.receive()["result"]
        ptr = direct.open(descriptor, addresses([local]), deadline())[0]
        prepared = direct.prepare(table(row(ptr, int(local.ctypes.data), 5000)))
        direct.read(prepared, deadline())
        child.kill()
        local[:] = 0
        with pytest.raises(PeerLostError):
            direct.read(prepared, deadline())
        assert endpoint.lost()
        with pytest.raises(PeerLostError):
            direct.open(descriptor, addresses([local[:10]]), deadline())
