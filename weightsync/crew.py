"""The ranks of a trainer beside rank 0: how it asks them for their part of an update.

Rank 0 leads: it collects layouts, makes the plans, speaks to the engines. The others answer its calls while
their own code is inside ``send``; a rank that is late, lost or failing is named in the error.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, DeadlineError, PeerLostError, ProtocolError
from weightsync.kept import Kept
from weightsync.layout import Layout, join_layouts
from weightsync.layouts.check import check_layout
from weightsync.manifest import Digests
from weightsync.plan import RefitPlan
from weightsync.ranks import Hub, Meeting, PendingCalls, RankPipe, answers_of
from weightsync.source_ends import (
    Contracts,
    Publication,
    contracts_from_json,
    targets_of,
    worst,
)
from weightsync.transports.channel import Channel

#: What one rank may take to answer what needs no waiting for anybody.
_ANSWER_S: Final = 60.0
_GRACE_S: Final = 2.0

Replies = dict[int, dict[str, Any]]


def nothing(world_size: int) -> Layout:
    """The layout of a rank that has nothing to send."""
    return Layout(world_size, (), ((),) * world_size)


class Crew:
    """Rank 0's end. Calls may come from any thread."""

    def __init__(self, meeting: Meeting, welcome: Mapping[str, Any]) -> None:
        self.world_size = meeting.world_size
        self._meeting, self._welcome = meeting, dict(welcome)
        self._pipes: dict[int, RankPipe] = {}
        self._gone: dict[int, str] = {}
        self._channels: dict[int, Channel] = {}
        self._is_complete = False
        self._calls = PendingCalls()
        self._changed = threading.Condition()
        self._layouts: Kept[tuple[int, str], Layout] = Kept(256)
        self._joints: Kept[tuple[str, ...], Layout] = Kept(64)
        self._hub = Hub(meeting, self._joined)

    def _joined(self, rank: int, channel: Channel, hello: Mapping[str, Any]) -> None:
        theirs, ours = hello.get("engines"), self._welcome["engines"]
        if theirs != ours:
            raise ConfigError(
                f"rank {rank} connects to the engines {theirs}, rank 0 to {ours}: give every rank "
                "the same list"
            )
        with self._changed:
            if self._is_complete:
                raise ConfigError(
                    f"trainer rank {rank} has joined already: a rank that was restarted cannot take its "
                    "place in a running trainer; restart all of them, or give another trainer another "
                    "name="
                )
        channel.send({"kind": "joined", **self._welcome})
        with self._changed:
            former = self._pipes.get(rank)
            self._channels[rank] = channel
            self._pipes[rank] = RankPipe(
                channel,
                lambda message: self._calls.answered(rank, message),
                lambda reason: self._on_lost(rank, channel, reason),
            )
            self._gone.pop(rank, None)
            self._changed.notify_all()
        if former is not None:
            former.close()

    def _on_lost(self, rank: int, channel: Channel, reason: str) -> None:
        with self._changed:
            if self._channels.get(rank) is not channel:
                return  # of a channel that was replaced
            self._gone[rank] = reason
        self._calls.lose(rank, f"trainer rank {rank}: {reason}")

    def wait(self, deadline: Deadline) -> None:
        """Until every rank has come. Raises :class:`DeadlineError` naming those that did not."""
        with self._changed:
            while len(self._pipes) < self.world_size - 1:
                if deadline.remaining_s() <= 0:
                    late = [r for r in range(1, self.world_size) if r not in self._pipes]
                    raise DeadlineError(
                        f"trainer rank {', '.join(map(str, late))}", deadline.stage,
                        deadline.limit_s, deadline.elapsed_s(),
                    )  # fmt: skip
                self._changed.wait(deadline.slice_s())
            self._is_complete = True

    # --- calls --------------------------------------------------------------------------------------

    def call(self, rank: int, what: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Ask one rank; its answer, or what it raised."""
        number, future = self._calls.new(rank)
        with self._changed:
            pipe, gone = self._pipes.get(rank), self._gone.get(rank)
        if pipe is None or gone is not None:
            future.set_exception(
                PeerLostError(f"trainer rank {rank} is gone ({gone}); restart the trainer")
            )
        else:
            pipe.put({"kind": "call", "number": number, "what": dict(what)})
        return future

    def ask(self, calls: Mapping[int, Mapping[str, Any]], stage: str, limit_s: float) -> Replies:
        """Ask ranks at once and wait for all. Raises the first error, naming the rank."""
        futures = {rank: self.call(rank, what) for rank, what in calls.items()}
        return answers_of(futures, "trainer", stage, limit_s)

    def ask_all(self, what: Mapping[str, Any], stage: str, limit_s: float) -> Replies:
        """The same question to every rank."""
        return self.ask(dict.fromkeys(range(1, self.world_size), what), stage, limit_s)

    def tell(self, message: Mapping[str, Any]) -> None:
        """To every rank that is there, without waiting."""
        with self._changed:
            pipes = [p for rank, p in self._pipes.items() if rank not in self._gone]
        for pipe in pipes:
            pipe.put(message)

    # --- layouts ------------------------------------------------------------------------------------

    def have(self, update: int, move: int, limit_s: float) -> Replies:
        """What every rank is about to send in this move of this update."""
        what = {"do": "have", "update": update, "move": move, "limit_s": limit_s}
        return self.ask_all(what, "send", limit_s + _GRACE_S)

    def leave(self, update: int, limit_s: float) -> None:
        """Until every rank has left the update. Raises what one of them left it by."""
        what = {"do": "leave", "update": update, "limit_s": limit_s}
        self.ask_all(what, "leave", limit_s + _GRACE_S)

    def joint(self, own: Layout, replies: Replies) -> Layout:
        """The layout of all ranks, from rank 0's own and what the others :meth:`have`."""
        digests = {rank: str(reply["digest"]) for rank, reply in replies.items()}
        key = (own.digest, *(digests[rank] for rank in sorted(digests)))

        def make() -> Layout:
            parts = [own]  # its collector speaks of all ranks already
            parts += [self._layout(rank, digests[rank]) for rank in sorted(digests)]
            joined = join_layouts(parts)
            check_layout(joined)
            return joined

        return self._joints.get(key, make)

    def _layout(self, rank: int, digest: str) -> Layout:
        if not digest:
            return nothing(self.world_size)

        def fetch() -> Layout:
            answer = self.ask({rank: {"do": "layout"}}, "layout", _ANSWER_S)[rank]
            found = Layout.from_json(answer.get("layout"))
            if found.digest != digest:
                raise ProtocolError(f"trainer rank {rank}: its layout does not survive the wire")
            return found

        return self._layouts.get((rank, digest), fetch)

    def describe(
        self, engine: int, plan: RefitPlan, num_owners: int, ranks: Sequence[int], limit_s: float
    ) -> tuple[list[Publication], Digests]:
        """What these ranks publish for a plan, and the sum of their digests."""
        what = {"do": "describe", "engine": engine, "plan_digest": plan.digest}
        replies = self.ask(dict.fromkeys(ranks, what), "digest", limit_s)
        total: Digests = np.zeros(num_owners, dtype=np.uint64)
        published: list[Publication] = []
        for rank in sorted(replies):
            total += digests_from_text(replies[rank]["digests"], num_owners, rank)
            published += [tuple(entry) for entry in replies[rank]["publications"]]
        return published, total

    def close(self) -> None:
        """Part with every rank."""
        self._hub.close()
        with self._changed:
            pipes, self._pipes = list(self._pipes.values()), {}
        for pipe in pipes:
            pipe.close()


class EngineHelpers:
    """The crew in what concerns one engine; see :class:`weightsync.link.Helpers`."""

    def __init__(self, crew: Crew, engine: int) -> None:
        self._crew, self._engine = crew, engine

    def attach(
        self,
        connection: int,
        layout: Layout,
        targets: Mapping[int, Sequence[int]],
        deadline: Deadline,
    ) -> Contracts:
        body = layout.to_json()
        calls = {
            rank: {
                "do": "attach", "engine": self._engine, "connection": connection,
                "targets": list(wanted), "layout": body, "limit_s": deadline.remaining_s(),
            }
            for rank, wanted in targets.items()
        }  # fmt: skip
        found: Contracts = {}
        replies = self._crew.ask(calls, "attach", deadline.remaining_s() + _GRACE_S)
        for reply in replies.values():
            found = worst(found, contracts_from_json(reply["contracts"]))
        return found

    def share(self, plan: RefitPlan, source: Layout, num_targets: int) -> None:
        what = {
            "do": "share", "engine": self._engine, "plan": plan.to_json(),
            "source": source.to_json(), "num_targets": num_targets,
        }  # fmt: skip
        ranks = [rank for rank in targets_of(plan) if rank != 0]
        self._crew.ask(dict.fromkeys(ranks, what), "share", _ANSWER_S)

    def fill(
        self, plan: RefitPlan, ranks: Sequence[int], session_id: str, move_id: int
    ) -> Sequence[Future[Any]]:
        what = {
            "do": "fill", "engine": self._engine, "plan_digest": plan.digest,
            "session_id": session_id, "move_id": move_id,
        }  # fmt: skip
        return [self._crew.call(rank, what) for rank in ranks]

    def cancel(self, session_id: str, reason: str) -> None:
        self._crew.tell(
            {
                "kind": "cancel", "engine": self._engine, "session_id": session_id,
                "reason": reason,
            }
        )  # fmt: skip


def digests_to_text(digests: Digests) -> str:
    """Little-endian 64-bit words, base64."""
    return base64.b64encode(digests.astype("<u8").tobytes()).decode()


def digests_from_text(text: Any, num_owners: int, rank: int) -> Digests:
    """The inverse. Raises :class:`ProtocolError` naming the rank."""
    try:
        body = base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"trainer rank {rank}: malformed digests: {error}") from error
    if len(body) != 8 * num_owners:
        raise ProtocolError(
            f"trainer rank {rank}: {len(body)} B of digests for {num_owners} sums; use one version of "
            "weightsync on all ranks"
        )
    return np.frombuffer(body, dtype="<u8").astype(np.uint64)
