"""The world of the simulation: a clock, processes that crash and stall, and a bad network.

Everything random comes from one seeded generator, so a seed is a whole history.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

ANY_LIFE = -1


class Violation(AssertionError):
    """A promise was broken; ``rule`` names which."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Process:
    """Something that runs, stalls, dies and comes back."""

    __slots__ = ("alive", "life", "name", "stalled_until_s")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.life = 0
        self.stalled_until_s = 0.0


@dataclass(slots=True)
class Chaos:
    """How bad things are in one run; probabilities are per message or per job."""

    loss: float = 0.0
    copy: float = 0.0
    slow: float = 0.0
    job_fails: float = 0.0
    corrupts: float = 0.0
    job_hangs: float = 0.0


class World:
    """Clock, event queue, processes and network."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()
        self.trace: list[str] | None = [] if trace else None
        self.chaos = Chaos()
        self._queue: list[tuple[float, int, Process | None, int, Callable[..., None], Any]] = []
        self._count = 0

    def log(self, who: str, what: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now_s:8.3f}  {who:10} {what}")

    def after(
        self,
        delay_s: float,
        process: Process | None,
        do: Callable[..., None],
        *args: Any,
        life: int | None = None,
    ) -> None:
        """Do it later, in this life of the process unless ``life`` says otherwise."""
        if life is None:
            life = ANY_LIFE if process is None else process.life
        self._count += 1
        heappush(self._queue, (self.now_s + delay_s, self._count, process, life, do, args))

    def send(self, process: Process, deliver: Callable[..., None], *args: Any) -> None:
        """One message: maybe lost, late or doubled; handed to whichever life is there then."""
        rng, chaos = self.rng, self.chaos
        for i in range(2 if rng.random() < chaos.copy else 1):
            if rng.random() < chaos.loss:
                self.seen["message lost"] += 1
                continue
            delay_s = 0.002 + 0.03 * rng.random()
            if i == 1 and rng.random() < 0.5:  # an echo: long after the first
                delay_s += 4.0 * rng.random()
            if rng.random() < chaos.slow:
                delay_s += rng.choice((0.3, 2.0, 6.0)) * rng.random()
            self.after(delay_s, process, deliver, *args, life=ANY_LIFE)

    def run(self, until_s: float, is_done: Callable[[], bool]) -> None:
        queue = self._queue
        while queue and not is_done():
            if queue[0][0] > until_s:
                self.now_s = until_s
                return
            time_s, _, process, life, do, args = heappop(queue)
            if process is not None:
                if not process.alive or life not in (ANY_LIFE, process.life):
                    continue
                if process.stalled_until_s > time_s:
                    self._count += 1
                    entry = (process.stalled_until_s, self._count, process, life, do, args)
                    heappush(queue, entry)
                    continue
            self.now_s = time_s
            do(*args)
