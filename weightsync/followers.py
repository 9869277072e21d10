"""The ranks of an engine beside its leader: how orders, reports and calls travel between them.

Only rank 0 listens for trainers; what they ask of another rank goes through it. Frames may be lost with a
channel: the machines of :mod:`weightsync.session` repeat what was not reported, and a call that is not
answered ends at its caller's deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, Final

from weightsync.deadline import Deadline
from weightsync.errors import (
    ConfigError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TooLargeError,
)
from weightsync.layout import Layout, join_layouts
from weightsync.messages import VERBS, Request, decode, encode, verb_of
from weightsync.ranks import (
    Hub,
    Meeting,
    PendingCalls,
    RankPipe,
    answer_of,
    answer_to,
    join,
)
from weightsync.session import Order, RankHello, RankReport
from weightsync.session_wire import ORDERS, SAYINGS, for_rank, from_json, to_json
from weightsync.transports.channel import Channel

_LOG = logging.getLogger(__name__)
_NUM_CALLERS: Final = 4


class Followers:
    """The leader's end. ``hear`` takes what ranks say; ``lost_run`` (tag, why) what they saw of a
    trainer's process. Both are called on threads of ours."""

    def __init__(
        self,
        meeting: Meeting,
        layout: Layout,
        hear: Callable[[RankHello | RankReport], None],
        lost_run: Callable[[str, str], None],
    ) -> None:
        self._meeting, self._hear, self._lost_run = meeting, hear, lost_run
        self._layouts: dict[int, Layout] = {0: layout}
        self._pipes: dict[int, RankPipe] = {}
        self._channels: dict[int, Channel] = {}  # the newest of each rank
        self._leaving: set[int] = set()  # that said so
        self._calls = PendingCalls()
        self._changed = threading.Condition()
        self._joint: Layout | None = None
        self._tag: str | None = None
        self.stats: dict[int, Mapping[str, Any]] = {}  # of each rank's last session
        self._hub = Hub(meeting, self._joined)

    # --- who is there -------------------------------------------------------------------------------

    def wait(self, deadline: Deadline) -> Layout:
        """The engine's whole layout, once every rank has come. Raises :class:`DeadlineError`."""
        with self._changed:
            while self._joint is None:
                if deadline.remaining_s() <= 0:
                    late = ", ".join(map(str, self._absent()))
                    raise DeadlineError(
                        f"rank {late} of the engine", deadline.stage, deadline.limit_s,
                        deadline.elapsed_s(),
                    )  # fmt: skip
                self._changed.wait(deadline.slice_s())
            return self._joint

    def _absent(self) -> list[int]:
        return [rank for rank in range(self._meeting.world_size) if rank not in self._layouts]

    def _joined(self, rank: int, channel: Channel, hello: Mapping[str, Any]) -> None:
        layout = Layout.from_json(hello.get("layout"))
        with self._changed:
            known = self._layouts.get(rank)
            if known is not None and known.digest != layout.digest:
                raise ConfigError(
                    f"rank {rank} came back with another layout than it had; restart the engine"
                )
            parts = {**self._layouts, rank: layout}
            joint = self._joint
            if len(parts) == self._meeting.world_size:
                joint = joint or join_layouts([parts[r] for r in range(len(parts))])
            channel.send({"kind": "joined"})
            former = self._pipes.pop(rank, None)
            self._leaving.discard(rank)
            pipe = RankPipe(
                channel,
                lambda message: self._on_frame(rank, message),
                lambda reason: self._on_lost(rank, channel, reason),
            )
            self._pipes[rank], self._layouts = pipe, parts
            self._channels[rank] = channel
            pipe.put({"kind": "run", "tag": self._tag})
            newly = list(self._pipes.values()) if self._joint is None else [pipe]
            self._joint = joint
            if joint is not None:
                body = joint.to_json()
                for each in newly:
                    each.put({"kind": "layout", "layout": body})
            self._changed.notify_all()
        if former is not None:
            former.close()

    def _on_lost(self, rank: int, channel: Channel, reason: str) -> None:
        with self._changed:
            level = logging.INFO if rank in self._leaving else logging.WARNING
            _LOG.log(level, "rank %d of the engine is gone: %s", rank, reason)
            gone = None
            if self._channels.get(rank) is channel:  # else it has come back
                gone = self._pipes.pop(rank, None)
        self._calls.lose(rank, f"rank {rank} of the engine: {reason}")
        if gone is not None:
            gone.close()

    # --- what is said -------------------------------------------------------------------------------

    def tell(self, rank: int, order: Order) -> None:
        """Send an order, or lose it if the rank is not there. Never waits."""
        with self._changed:
            pipe = self._pipes.get(rank)
        if pipe is None:
            return
        try:
            pipe.put({"kind": "order", "order": to_json(for_rank(order, rank))})
        except (TooLargeError, TypeError):  # then the rank does not report, and is named for it
            _LOG.exception("rank %d of the engine was not told %s", rank, type(order).__name__)

    def set_tag(self, tag: str | None) -> None:
        """Which connection of which run holds the engine now."""
        with self._changed:
            if tag == self._tag:
                return
            self._tag = tag
            for pipe in self._pipes.values():
                pipe.put({"kind": "run", "tag": tag})

    def call(self, rank: int, request: Request, tag: str) -> Future[dict[str, Any]]:
        """Ask a rank; the answer, or what it raised."""
        if tag:
            self.set_tag(tag)  # before the call: what it attaches must not look like another run's
        number, future = self._calls.new(rank)
        with self._changed:
            pipe = self._pipes.get(rank)
        if pipe is None:
            future.set_exception(PeerLostError(f"rank {rank} of the engine is not there"))
        else:
            asked = {"verb": verb_of(request), "request": encode(request)}
            pipe.put({"kind": "call", "number": number, "tag": tag, **asked})
        return future

    def ask(self, rank: int, request: Request, tag: str, limit_s: float) -> dict[str, Any]:
        """:meth:`call`, and wait. Raises :class:`DeadlineError` naming the rank."""
        future = self.call(rank, request, tag)
        return answer_of(future, f"rank {rank} of the engine", verb_of(request), limit_s)

    def _on_frame(self, rank: int, message: dict[str, Any]) -> None:
        match message.get("kind"):
            case "say":
                said = from_json(message.get("what"), SAYINGS)
                if said.rank != rank:
                    raise ProtocolError(f"rank {rank} speaks for rank {said.rank}")
                if isinstance(stats := message.get("stats"), dict):
                    self.stats[rank] = stats
                self._hear(said)
            case "answer":
                self._calls.answered(rank, message)
            case "bye":
                with self._changed:
                    self._leaving.add(rank)
            case "run_lost":
                self._lost_run(str(message.get("tag")), f"rank {rank}: {message.get('reason')}")
            case kind:
                raise ProtocolError(f"rank {rank} of the engine sent a frame {kind!r}")

    def close(self) -> None:
        """Part with every rank."""
        self._hub.close()
        with self._changed:
            pipes, self._pipes = list(self._pipes.values()), {}
        for pipe in pipes:
            pipe.close()


class Uplink:
    """Another rank's end. ``hear`` takes orders, ``serve`` (request, tag) answers calls, ``lost`` is told
    when the leader is gone."""

    def __init__(
        self,
        meeting: Meeting,
        layout: Layout,
        hear: Callable[[Order], None],
        serve: Callable[[Request, str], dict[str, Any]],
        lost: Callable[[str], None],
    ) -> None:
        self._meeting, self._layout = meeting, layout
        self._hear, self._serve, self._lost = hear, serve, lost
        self._pool = ThreadPoolExecutor(_NUM_CALLERS, "weightsync-rank-calls")
        self._pipe: RankPipe | None = None
        self._whole: Future[Layout] = Future()
        self.tag: str | None = None

    def join(self, deadline: Deadline) -> Layout:
        """Find the leader; the engine's whole layout, once every rank has come."""
        hello = {"layout": self._layout.to_json()}
        channel, _ = join(self._meeting, hello, deadline)
        self._pipe = RankPipe(channel, self._on_frame, self._on_lost)
        try:
            return self._whole.result(timeout=max(deadline.remaining_s(), 1e-3))
        except FutureTimeout:
            if self._whole.done():
                raise
            raise DeadlineError(
                "the other ranks of the engine", deadline.stage, deadline.limit_s,
                deadline.elapsed_s(),
            ) from None  # fmt: skip

    def say(self, record: RankHello | RankReport, stats: Mapping[str, Any] | None = None) -> None:
        """Tell the leader, or lose it if the leader is gone. Never waits."""
        self._put({"kind": "say", "what": to_json(record), "stats": stats})

    def say_run_lost(self, tag: str, reason: str) -> None:
        """The process of a trainer rank ended."""
        self._put({"kind": "run_lost", "tag": tag, "reason": reason})

    def _put(self, message: Mapping[str, Any]) -> None:
        if self._pipe is not None:
            self._pipe.put(message)

    def _on_frame(self, message: dict[str, Any]) -> None:
        match message.get("kind"):
            case "order":
                self._hear(from_json(message.get("order"), ORDERS))
            case "call":
                self._pool.submit(self._answer, message)
            case "run":
                self.tag = message.get("tag")
            case "layout":
                with suppress(InvalidStateError):
                    self._whole.set_result(Layout.from_json(message.get("layout")))
            case kind:
                raise ProtocolError(f"the leader sent a frame {kind!r}")

    def _answer(self, message: Mapping[str, Any]) -> None:
        def act() -> dict[str, Any]:
            record = VERBS.get(str(message.get("verb")))
            if record is None:
                raise ProtocolError(f"no such call {message.get('verb')!r}")
            request: Any = decode(record, message.get("request"))
            return self._serve(request, str(message.get("tag")))

        answer_to(message.get("number"), act, self._put)

    def _on_lost(self, reason: str) -> None:
        with suppress(InvalidStateError):
            self._whole.set_exception(PeerLostError(f"rank 0 of the engine: {reason}"))
        self._lost(reason)

    def close(self) -> None:
        """Say so and part with the leader."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._put({"kind": "bye"})
        if self._pipe is not None:
            self._pipe.close()
