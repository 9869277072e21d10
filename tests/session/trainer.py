"""Scripted trainers: they update, hesitate, retry, abort, vanish, stall and come back.

A script is a generator. It yields a number of seconds to sleep, or a :class:`Call` whose answer (or
None when the client's patience ended) it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from weightsync.errors import BusyError, EpochError
from weightsync.session import (
    Abort,
    Answer,
    Begin,
    Close,
    Commit,
    Connect,
    Heartbeat,
    LeaderEvent,
    Move,
    Prepare,
    RunLost,
    Scope,
    SessionSpec,
)
from weightsync.session_leader import outcome_of
from weightsync.types import Placement

from .engine import TENSORS, Engine, scope_names
from .world import Process, Violation, World

LEASE_S = 3.0
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    make: Callable[[int], LeaderEvent]
    limit_s: float  # within which the leader owes an answer
    patience_s: float


@dataclass(frozen=True, slots=True)
class Together:
    """Calls in one exchange: the engine makes each when the one before was answered well, whether or not
    the trainer still waits; the last answer, or the first error, is that of the exchange."""

    calls: tuple[Call, ...]

    @property
    def patience_s(self) -> float:
        return self.calls[0].patience_s


Script = Generator["float | Call | Together", "Answer | None", None]
Talk = Generator["float | Call | Together", "Answer | None", "Answer | None"]
Update = Generator["float | Call | Together", "Answer | None", bool]


class Trainer:
    """One trainer process with one run."""

    def __init__(self, world: World, engine: Engine, run_id: str) -> None:
        self.world, self.engine, self.run_id = world, engine, run_id
        self.process = Process(run_id)
        self.epoch: str | None = None
        self.number = world.rng.randrange(1, 4)
        self.num_sessions = 0
        self.done = False
        self.has_committed = False
        self._token: int | None = None
        self._script: Script | None = None

    # --- the process -----------------------------------------------------------------------------

    def start(self, script: Script, *, beats: bool = True) -> None:
        self._script = script
        self.world.after(0.0, self.process, self._go, None)
        if beats:
            self.world.after(HEARTBEAT_S, self.process, self._beat)

    def crash(self, *, is_noticed: bool) -> None:
        self.world.log(self.run_id, "CRASH")
        self.process.alive = False
        self.done = True
        self.engine.sources.difference_update(
            [s for s in self.engine.sources if s.startswith(self.run_id + "-")]
        )
        if is_noticed:
            self.world.seen["trainer's end noticed"] += 1
            lost = RunLost(self.run_id, "its connection ended")
            self.world.send(self.engine.processes[0], self.engine.lead, lost)

    def stall(self, for_s: float) -> None:
        self.world.log(self.run_id, f"STALL {for_s:.1f} s")
        self.process.stalled_until_s = self.world.now_s + for_s

    def _beat(self) -> None:
        if not self.done:
            beat = Heartbeat(self.run_id)
            self.world.send(self.engine.processes[0], self.engine.lead, beat)
            self.world.after(HEARTBEAT_S, self.process, self._beat)

    def _go(self, answer: Answer | None) -> None:
        if self._script is None or self.done:
            return
        try:
            todo = self._script.send(answer)
        except StopIteration:
            self.done = True
            return
        if isinstance(todo, float | int):
            self.world.after(todo, self.process, self._go, None)
        else:
            self._call(todo)

    def _call(self, todo: Call | Together) -> None:
        world, engine = self.world, self.engine
        calls = (todo,) if isinstance(todo, Call) else todo.calls
        engine.num_requests += 1
        request = engine.num_requests
        self._token = request
        world.log(self.run_id, f"asks {request}")
        world.send(engine.processes[0], self._serve, request, request, calls)
        world.after(todo.patience_s, self.process, self._answered, request, None)

    def _serve(self, exchange: int, request: int, calls: tuple[Call, ...]) -> None:
        """In the engine's process: the first of these calls, and the others after it."""
        world, engine = self.world, self.engine
        call, *others = calls

        def reply(answer: Answer) -> None:
            if not others or answer.error is not None:
                world.send(self.process, self._answered, exchange, answer)
                return
            engine.num_requests += 1
            number = engine.num_requests
            world.after(0.0, engine.processes[0], self._serve, exchange, number, tuple(others))

        engine.ask(request, call.make(request), call.limit_s, reply)

    def _answered(self, request: int, answer: Answer | None) -> None:
        if request != self._token:
            if answer is not None:
                self.world.seen["answer after the caller gave up"] += 1
            return
        self._token = None
        if answer is None:
            self.world.seen["caller gave up waiting"] += 1
        self._go(answer)

    # --- talking ---------------------------------------------------------------------------------

    def _retry(self, call: Call | Together, times: int = 3) -> Talk:
        """The same request until it is answered; each try is a connection of its own."""
        for attempt in range(times):
            answer = yield call
            if answer is not None:
                return answer
            if attempt + 1 < times:
                self.world.seen["request repeated"] += 1
        return None

    def connect(self) -> Update:
        run_id = self.run_id
        for _ in range(8):
            answer = yield Call(lambda r: Connect(r, run_id, LEASE_S), 0.0, 1.0)
            if answer is not None and answer.result is not None:
                self.epoch = answer.result["epoch"]
                return True
            if answer is not None and isinstance(answer.error, BusyError):
                self.world.seen["second run refused"] += 1
            yield 0.7
        return False

    def update(self, spec: SessionSpec, *, plan: list[str] | None = None) -> Update:
        """One session, step by step; True when it is known to have committed."""
        engine, rng = self.engine, self.world.rng
        session_id, epoch = spec.session_id, self.epoch or ""
        engine.sources.add(session_id)
        steps = plan if plan is not None else self._steps(spec)
        is_committed = False
        for step in self._joined(steps):
            if step == "vanish":
                self.world.seen["trainer left a session open"] += 1
                return False
            if step == "dawdle":
                yield rng.choice((1.0, 4.0, 9.0))
                continue
            if step == "abort":
                yield from self._abort(spec)
                break
            patience_s = rng.uniform(0.8, 5.0)
            calls = [_call_of(verb, spec, epoch, patience_s) for verb in step.split("; ")]
            call = calls[0] if len(calls) == 1 else Together(tuple(calls))
            answer = yield from self._retry(call)
            if answer is None or answer.error is not None:
                yield from self._failed(spec, answer)
                break
            is_committed = step.endswith("commit")
            if is_committed and len(calls) > 2:
                self.world.seen["update in one exchange"] += 1
            if is_committed and answer.result != {"outcome": "committed"}:
                raise Violation("committed means committed", f"{answer}")
        engine.sources.discard(session_id)
        return is_committed

    def _failed(self, spec: SessionSpec, answer: Answer | None) -> Script:
        if answer is not None and isinstance(answer.error, EpochError):
            self.epoch = None
            return
        if answer is not None and isinstance(answer.error, BusyError):
            self.world.seen["begin while busy"] += 1
            yield 0.5
        if self.world.rng.random() < 0.7:
            yield from self._abort(spec)
        if self.world.rng.random() < 0.5:
            self.ask_status(spec.session_id)

    def _abort(self, spec: SessionSpec) -> Script:
        self.engine.sources.discard(spec.session_id)  # whoever gives up trains on
        limit_s = spec.commit_timeout_s
        yield Call(lambda r: Abort(r, spec.session_id, "gave up"), limit_s, 2.0)

    def ask_status(self, session_id: str) -> None:
        """What a status question would be told now must be what it was told before."""
        ended = outcome_of(self.engine.leader, session_id)
        self.world.seen["status known" if ended else "status unknown"] += 1
        if ended is not None and self.engine.outcomes[session_id] is not ended.outcome:
            raise Violation("outcome stays", f"{ended}")

    # --- what it sets out to do --------------------------------------------------------------------

    def _steps(self, spec: SessionSpec) -> list[str]:
        rng = self.world.rng
        names = scope_names(spec)
        num_moves = rng.randint(1, 3)
        steps = ["begin"]
        for i in range(num_moves):
            steps.append("move " + str(i) + " " + " ".join(names[i::num_moves]))
        steps += ["prepare", "commit"]
        if rng.random() < 0.25:
            what = rng.choice(("vanish", "dawdle", "dawdle", "abort", "abort"))
            steps.insert(rng.randrange(1, len(steps)), what)
        elif rng.random() < 0.08:  # forgets a step, or takes them in a wrong order
            del steps[rng.randrange(len(steps) - 1)]
        return steps

    def _joined(self, steps: list[str]) -> list[str]:
        """Some trainers ask for several steps at once: in pairs, or for everything."""
        is_plain = not {"vanish", "dawdle", "abort"} & set(steps)
        how = self.world.rng.random()
        if not is_plain or how < 0.6:
            return steps
        if how < 0.8:
            return ["; ".join(steps)]
        return ["; ".join(steps[:2]), *steps[2:-2], "; ".join(steps[-2:])]

    def new_spec(self) -> SessionSpec:
        rng = self.world.rng
        self.num_sessions += 1
        scope = Scope()
        if rng.random() < (0.35 if self.has_committed else 0.08):
            scope = Scope(frozenset(rng.sample(TENSORS, rng.randint(1, 2))))
        number = self.number
        if rng.random() < 0.1:
            number -= rng.randint(1, 2)
        return SessionSpec(
            session_id=f"{self.run_id}-{self.num_sessions}",
            run_id=self.run_id,
            version=number,
            scope=scope,
            placement=rng.choice(tuple(Placement)),
            deadline_s=rng.choice((3.0, 6.0)),
            commit_timeout_s=rng.choice((2.0, 3.0)),
        )

    def several_updates(self) -> Script:
        rng = self.world.rng
        for _ in range(rng.randint(1, 6)):
            if self.epoch is None:
                is_connected = yield from self.connect()
                if not is_connected:
                    return
            is_committed = yield from self.update(self.new_spec())
            self.has_committed = self.has_committed or is_committed
            if is_committed or rng.random() < 0.3:
                self.number += rng.randint(1, 2)
            yield rng.choice((0.0, 0.0, 0.2, 0.6))
        if rng.random() < 0.6:
            yield Call(lambda r: Close(r, self.run_id), 0.0, 1.0)

    def until_committed(self) -> Script:
        """The full update that must succeed once nothing is broken any more."""
        while True:
            if self.epoch is None:
                yield from self.connect()
                continue
            self.num_sessions += 1
            spec = SessionSpec(
                f"{self.run_id}-{self.num_sessions}",
                self.run_id,
                self.num_sessions,
                Scope(),
                self.world.rng.choice(tuple(Placement)),
                deadline_s=6.0,
                commit_timeout_s=3.0,
            )
            plan = ["begin", "move 0 a b", "move 1 c", "prepare", "commit"]
            is_committed = yield from self.update(spec, plan=plan)
            if is_committed:
                return


def _call_of(step: str, spec: SessionSpec, epoch: str, patience_s: float) -> Call:
    session_id = spec.session_id
    limit_s = spec.deadline_s + spec.commit_timeout_s
    verb, *rest = step.split()
    match verb:
        case "begin":
            return Call(lambda r: Begin(r, epoch, spec), limit_s, patience_s)
        case "move":
            move_id, names = int(rest[0]), tuple(rest[1:])
            payload = {"names": names}
            return Call(lambda r: Move(r, session_id, move_id, payload), limit_s, patience_s)
        case "prepare":
            return Call(lambda r: Prepare(r, session_id), limit_s, patience_s)
        case _:
            limit_s = 2 * spec.commit_timeout_s
            return Call(lambda r: Commit(r, session_id), limit_s, patience_s)
