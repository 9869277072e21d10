"""The ranks of one side as a star: rank 0 hears every other rank, and they hear only rank 0.

They find each other through what a job has anyway: a ``torch.distributed`` group, or a store (anything
with ``set``, ``get`` and ``check``, as torch's stores are). Through it goes one address with a secret;
everything after that goes over channels of our own, where each wait has a deadline and a rank that
ended is noticed at once. A collective would do neither.
"""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from weightsync import config
from weightsync.deadline import CancelToken, Deadline
from weightsync.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    UnavailableError,
    WeightSyncError,
    from_wire,
    to_wire,
)
from weightsync.transports.channel import Channel, Listener, close_fds, connect
from weightsync.transports.frames import encode_frame

_LOG = logging.getLogger(__name__)

_RETRY_S: Final = 0.05
_ACCEPT_S: Final = 3600.0
_HELLO_S: Final = 10.0
_KEY: Final = "weightsync/{side}/{name}"


@dataclass(frozen=True)
class Meeting:
    """How the ranks of one side find rank 0. Exactly one of ``group`` and ``store`` for several ranks.

    ``side`` and ``name`` keep apart what meets in one store.
    """

    rank: int
    world_size: int
    group: Any = None
    store: Any = None
    side: str = "trainer"
    name: str = "0"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} of {self.world_size} cannot be")
        if self.world_size == 1:
            return
        if (self.group is None) == (self.store is None):
            raise ConfigError(
                f"{self.side} of {self.world_size} ranks: give a torch.distributed group=..., or a "
                "store=..., through which its ranks find rank 0"
            )
        if self.group is not None and _size_of(self.group) != self.world_size:
            raise ConfigError(
                f"{self.side}: world_size={self.world_size}, but its group has "
                f"{_size_of(self.group)} ranks"
            )

    @property
    def can_meet_again(self) -> bool:
        """Whether a rank that comes later, or again, still finds the address."""
        return self.store is not None

    @property
    def _key(self) -> str:
        return _KEY.format(side=self.side, name=self.name)

    def announce(self, address: Mapping[str, Any]) -> None:
        """On rank 0: say where it listens."""
        if self.store is not None:
            self.store.set(self._key, json.dumps(address))
        else:
            _broadcast(self.group, json.dumps(address).encode())

    def find(self, deadline: Deadline) -> Mapping[str, Any]:
        """On the others: where rank 0 listens. Raises :class:`DeadlineError`."""
        if self.store is None:
            return _parsed(_broadcast(self.group, b""))
        while not self.store.check([self._key]):
            deadline.check()
            time.sleep(deadline.slice_s(_RETRY_S))
        return _parsed(self.store.get(self._key))


def _size_of(group: Any) -> int:
    import torch.distributed as dist

    return int(dist.get_world_size(group))


def _broadcast(group: Any, body: bytes) -> bytes:
    """Rank 0's bytes on every rank, without pickling anything."""
    import torch
    import torch.distributed as dist

    root = dist.get_global_rank(group, 0)
    on_gpu = str(dist.get_backend(group)) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    size = torch.tensor([len(body)], dtype=torch.int64, device=device)
    dist.broadcast(size, root, group=group)
    words = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if body:
        words.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    dist.broadcast(words, root, group=group)
    return bytes(words.cpu().numpy().tobytes())


def _parsed(body: bytes | str) -> Mapping[str, Any]:
    try:
        address = json.loads(body)
        if not isinstance(address, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ProtocolError(f"the address of rank 0 is malformed: {error}") from error
    return address


class PendingCalls:
    """Calls to other ranks that were not answered yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._calls: dict[int, tuple[int, Future[dict[str, Any]]]] = {}

    def new(self, rank: int) -> tuple[int, Future[dict[str, Any]]]:
        """A number for the call to travel with, and its answer."""
        number, future = next(self._numbers), Future[dict[str, Any]]()
        self._calls[number] = (rank, future)
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        return number, future

    def answered(self, rank: int, message: Mapping[str, Any]) -> None:
        """An answer came: ``{"number": ..., "result": ...}`` or with ``"error"``."""
        of, future = self._calls.get(int(message["number"]), (rank, None))
        if future is None or of != rank:
            return  # its caller is gone
        with suppress(InvalidStateError):
            if "error" in message:
                future.set_exception(from_wire(message["error"]))
            else:
                future.set_result(dict(message["result"]))

    def lose(self, rank: int, reason: str) -> None:
        """No more answers of that rank will come."""
        for of, future in list(self._calls.values()):
            if of == rank:
                with suppress(InvalidStateError):
                    future.set_exception(PeerLostError(reason))


def answer_to(
    number: object, act: Callable[[], Mapping[str, Any]], put: Callable[[Mapping[str, Any]], None]
) -> None:
    """Carry out a call of another rank, and answer it whatever happens."""
    answer = {"kind": "answer", "number": number}
    try:
        put({**answer, "result": dict(act())})
    except WeightSyncError as error:
        put({**answer, "error": to_wire(error)})
    except Exception as error:  # the border: a fault of ours must reach the other end by name
        _LOG.exception("a call of another rank failed")
        put({**answer, "error": to_wire(error)})


def answer_of(
    future: Future[dict[str, Any]], peer: str, stage: str, limit_s: float
) -> dict[str, Any]:
    """Wait for a rank's answer. Raises what it raised, or :class:`DeadlineError` naming it."""
    try:
        return future.result(timeout=max(limit_s, 1e-3))
    except FutureTimeout:
        if future.done():  # a deadline of its own, which is what it answers
            raise
        raise DeadlineError(peer, stage, limit_s, limit_s) from None


def answers_of(
    futures: Mapping[int, Future[dict[str, Any]]], whose: str, stage: str, limit_s: float
) -> dict[int, dict[str, Any]]:
    """Wait for the answers of several ranks. Raises what the first that failed raised, at once, or
    :class:`DeadlineError` naming those that did not answer; ``whose`` says of what they are ranks."""
    done, pending = wait(futures.values(), timeout=max(limit_s, 1e-3), return_when=FIRST_EXCEPTION)
    for future in done:
        if (error := future.exception()) is not None:
            raise error
    if pending:
        late = ", ".join(str(rank) for rank, future in futures.items() if future in pending)
        raise DeadlineError(f"{whose} rank {late}", stage, limit_s, limit_s)
    return {rank: future.result() for rank, future in futures.items()}


class RankPipe:
    """A channel whose two directions have a thread each: ``put`` never waits, frames come to
    ``on_frame`` in order, and ``on_lost`` is told once why nothing more will come."""

    def __init__(
        self,
        channel: Channel,
        on_frame: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._channel, self._on_frame, self._on_lost = channel, on_frame, on_lost
        self._outgoing: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._token = CancelToken()
        self._threads = [
            threading.Thread(target=target, name=f"weightsync-rank-{name}", daemon=True)
            for name, target in (("send", self._send), ("hear", self._hear))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, message: Mapping[str, Any]) -> None:
        """Send a frame soon, or never if the other end is lost. Raises :class:`TooLargeError`, or
        ``TypeError`` for what is no JSON."""
        self._outgoing.put(encode_frame(message))

    def close(self) -> None:
        """End both directions; what was put is sent first, if the other end takes it."""
        self._outgoing.put(None)
        if threading.current_thread() is not self._threads[0]:
            self._threads[0].join(timeout=2.0)
        self._token.cancel("closed")
        self._channel.close()
        if threading.current_thread() is not self._threads[1]:
            self._threads[1].join(timeout=5.0)

    def _send(self) -> None:
        while (data := self._outgoing.get()) is not None:
            try:
                self._channel.send_encoded(data)
            except WeightSyncError as error:
                # A frame that is missing may be the one that others wait for: the end must be seen.
                _LOG.info("ranks: %s", error)
                self._channel.close()
                return

    def _hear(self) -> None:
        reason = "closed"
        while not self._token.is_cancelled:
            deadline = Deadline(_ACCEPT_S, peer="a rank", stage="hear", token=self._token)
            try:
                message, fds = self._channel.receive(deadline)
            except DeadlineError:
                continue
            except WeightSyncError as error:
                reason = str(error)
                break
            close_fds(fds)
            try:
                self._on_frame(message)
            except Exception:  # one bad frame must not end what all others need
                _LOG.exception("ranks: a frame could not be taken: %s", message.get("kind"))
        if not self._token.is_cancelled:
            self._on_lost(reason)


#: Takes over the channel of a rank that joined, and what it said of itself.
OnJoin = Callable[[int, Channel, Mapping[str, Any]], None]


class Hub:
    """Rank 0's end: accepts the other ranks, at any time, on a thread of its own."""

    def __init__(self, meeting: Meeting, on_join: OnJoin) -> None:
        self._meeting, self._on_join = meeting, on_join
        self._listener = Listener("tcp", config.rank_host() or "127.0.0.1")
        self._token = CancelToken()
        self._thread = threading.Thread(target=self._accept, name="weightsync-ranks", daemon=True)
        self._thread.start()
        try:
            meeting.announce(self._listener.address())
        except BaseException:
            self.close()
            raise

    def _accept(self) -> None:
        what = f"ranks of the {self._meeting.side}"
        while not self._token.is_cancelled:
            deadline = Deadline(_ACCEPT_S, peer=what, stage="join", token=self._token)
            try:
                channel = self._listener.accept(deadline)
            except DeadlineError:
                continue
            except (CancelledError, PeerLostError):
                return
            self._welcome(channel)

    def _welcome(self, channel: Channel) -> None:
        deadline = Deadline(_HELLO_S, peer="a rank that joins", stage="join", token=self._token)
        try:
            hello, _ = channel.receive_kind("join", deadline)
            rank = _rank_in(hello, self._meeting)
            self._on_join(rank, channel, hello)
        except WeightSyncError as error:
            with suppress(WeightSyncError):
                channel.send({"kind": "refused", "reason": str(error)})
            channel.close()

    def close(self) -> None:
        """Accept nobody any more; channels are their owners'."""
        self._token.cancel("closed")
        self._listener.close()
        self._thread.join(timeout=5.0)


def _rank_in(hello: Mapping[str, Any], meeting: Meeting) -> int:
    rank, size = hello.get("rank"), hello.get("world_size")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank < meeting.world_size:
        raise ProtocolError(f"rank {rank!r} cannot join {meeting.world_size} ranks")
    if size != meeting.world_size:
        raise ConfigError(
            f"rank {rank} was started for {size} ranks, rank 0 for {meeting.world_size}"
        )
    return rank


def join(
    meeting: Meeting, hello: Mapping[str, Any], deadline: Deadline
) -> tuple[Channel, Mapping[str, Any]]:
    """Another rank's end: a channel to rank 0, which has taken it over, and what it says to that. Tries
    until the deadline. Raises :class:`ConfigError` with what rank 0 objects to.
    """
    message = {
        **hello, "kind": "join", "rank": meeting.rank, "world_size": meeting.world_size,
    }  # fmt: skip
    found = meeting.find(deadline)
    while True:
        try:
            return _try_join(meeting, found, message, deadline)
        except (PeerLostError, UnavailableError) as error:
            # Another rank was accepted at the same moment, or rank 0 is not there yet (any more).
            if deadline.remaining_s() <= _RETRY_S:
                raise DeadlineError(
                    f"rank 0 of the {meeting.side} ({error})",
                    deadline.stage,
                    deadline.limit_s,
                    deadline.elapsed_s(),
                ) from error
        deadline.check()
        time.sleep(_RETRY_S)
        if meeting.can_meet_again:
            found = meeting.find(deadline)


def _try_join(
    meeting: Meeting, address: Mapping[str, Any], message: Mapping[str, Any], deadline: Deadline
) -> tuple[Channel, Mapping[str, Any]]:
    channel = connect(address, deadline)
    try:
        channel.send(message, deadline=deadline)
        answer, fds = channel.receive(deadline)
        close_fds(fds)
        if answer.get("kind") != "joined":
            raise ConfigError(
                f"rank 0 of the {meeting.side} refused rank {meeting.rank}: {answer.get('reason')}"
            )
    except BaseException:
        channel.close()
        raise
    return channel, answer
