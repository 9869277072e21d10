"""A seeded simulation of updates under faults: ``python -m tests.session.simulation --help``.

One seed is one history of one engine. Some seconds of faults, then peace: then a full update by a
fresh trainer must succeed within a bound. A failing seed prints how to replay it with a trace.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from weightsync.session_leader import Phase

from .engine import Engine
from .trainer import Trainer
from .world import Chaos, Violation, World

#: Within this time after the last fault a full update has succeeded: a dead trainer's lease, the
#: longest session that it left open, a job that hangs, and the update itself.
PEACE_S = 30.0
#: Within this time after the last fault whatever was open has ended.
IDLE_S = 22.0

FAULTS = (
    "crash rank", "crash rank", "crash leader", "crash leader", "stall rank", "stall leader",
    "cut rank", "cut rank", "crash trainer", "stall trainer",
)  # fmt: skip


class Simulation:
    """One seed."""

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.world = World(seed, trace=trace)
        rng = self.world.rng
        self.world.chaos = _chaos(rng)
        self.engine = Engine(self.world, rng.choice((1, 2, 2, 2, 3, 4)))
        self.trainers: list[Trainer] = []
        self.faults_end_s = rng.uniform(3.0, 8.0)
        self._armed: dict[Phase, str] = {}

    def run(self) -> None:
        world, rng = self.world, self.world.rng
        for i in range(rng.choice((1, 1, 1, 2, 3))):
            at_s = 0.0 if i == 0 else self.faults_end_s * rng.random()
            world.after(at_s, None, self._new_trainer)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            fault = rng.choice(FAULTS)
            if rng.random() < 0.6:
                self._armed[rng.choice(list(Phase)[1:])] = fault
            else:
                world.after(self.faults_end_s * rng.random(), None, self._break, fault)
        self.engine.on_phase = self._phase_entered
        world.run(self.faults_end_s, lambda: False)
        self._make_peace()
        if rng.random() < 0.06:
            self._wait_until_idle()
        self._update_at_last()

    # --- faults ------------------------------------------------------------------------------------

    def _new_trainer(self) -> None:
        if self.world.now_s >= self.faults_end_s:
            return  # one that comes back in peace could hold the engine for as long as it likes
        rng = self.world.rng
        trainer = Trainer(self.world, self.engine, f"run{len(self.trainers)}")
        self.trainers.append(trainer)
        trainer.start(trainer.several_updates(), beats=rng.random() < 0.9)

    def _phase_entered(self, phase: Phase) -> None:
        fault = self._armed.pop(phase, None)
        if fault is not None:
            self.world.after(0.15 * self.world.rng.random(), None, self._break, fault)

    def _break(self, fault: str) -> None:
        world, rng, engine = self.world, self.world.rng, self.engine
        if world.now_s >= self.faults_end_s:
            return
        verb, whom = fault.split()
        phase = engine.leader.phase
        if whom == "trainer":
            self._break_trainer(verb, phase)
            return
        rank = 0
        if whom == "rank":
            if len(engine.ranks) == 1:
                return
            rank = rng.randrange(1, len(engine.ranks))
        if not engine.processes[rank].alive:
            return
        world.seen[f"{verb} {whom} while {phase}"] += 1
        world.seen[f"{verb} {whom}"] += 1
        for_s = rng.choice((0.2, 1.0, 3.0, 6.0)) * rng.random()
        if verb == "crash":
            engine.crash(rank)
            world.after(for_s, None, self._restart, rank)
        elif verb == "stall":
            engine.stall(rank, for_s)
        else:
            engine.cut.add(rank)
            world.log(f"rank{rank}", "CUT OFF")
            world.after(for_s, None, engine.cut.discard, rank)

    def _restart(self, rank: int) -> None:
        if not self.engine.processes[rank].alive:
            self.engine.start(rank)

    def _break_trainer(self, verb: str, phase: Phase) -> None:
        world, rng = self.world, self.world.rng
        alive = [t for t in self.trainers if not t.done]
        if not alive:
            return
        trainer = rng.choice(alive)
        world.seen[f"{verb} trainer while {phase}"] += 1
        world.seen[f"{verb} trainer"] += 1
        if verb == "stall":
            trainer.stall(rng.uniform(1.0, 7.0))
        else:
            trainer.crash(is_noticed=rng.random() < 0.5)
            world.after(rng.random(), None, self._new_trainer)  # restarted: a new run

    # --- after the faults --------------------------------------------------------------------------

    def _make_peace(self) -> None:
        world, engine = self.world, self.engine
        world.chaos = Chaos()
        world.log("world", "PEACE")
        engine.cut.clear()
        for rank, process in enumerate(engine.processes):
            process.stalled_until_s = min(process.stalled_until_s, world.now_s)
            self._restart(rank)
        for trainer in self.trainers:
            if not trainer.done:
                trainer.crash(is_noticed=False)

    def _wait_until_idle(self) -> None:
        world, engine = self.world, self.engine
        world.run(self.faults_end_s + IDLE_S, lambda: False)
        engine.check()
        if engine.leader.phase is not Phase.IDLE or engine.leader.run is not None:
            raise Violation(
                "idle within a bound", f"still {engine.leader.phase} {engine.leader.run}"
            )
        if engine.pending:
            raise Violation("answered in time", f"{engine.pending}")
        if not engine.can_generate and not engine.refusals():
            raise Violation("never a hang", "nobody generates and nobody says why")
        generates = "serves" if engine.can_generate else "refuses"
        world.seen[f"idle at last and {generates}"] += 1

    def _update_at_last(self) -> None:
        world, engine = self.world, self.engine
        trainer = Trainer(world, engine, "last9")
        trainer.start(trainer.until_committed())
        world.run(world.now_s + PEACE_S, lambda: trainer.done)
        if not trainer.done:
            raise Violation("an update succeeds at last", f"{engine.leader}")
        world.run(world.now_s + 0.05, lambda: False)
        engine.check()
        if not engine.can_generate:
            raise Violation("committed means serving", f"{engine.refusals()}")


def _chaos(rng: random.Random) -> Chaos:
    """Most runs are bad in one or two ways only: what is bad in every way never gets far."""

    def some(chance: float, *values: float) -> float:
        return rng.choice(values) if rng.random() < chance else 0.0

    return Chaos(
        loss=some(0.3, 0.03, 0.2),
        copy=some(0.3, 0.05, 0.3),
        slow=some(0.3, 0.02, 0.15),
        job_fails=some(0.2, 0.02, 0.1),
        corrupts=some(0.12, 0.03, 0.1),
        job_hangs=some(0.15, 0.02, 0.1),
    )


class SeedFailed(AssertionError):
    """A seed broke a promise; ``rule`` names which, the message says how to replay it."""

    def __init__(self, seed: int, rule: str, text: str) -> None:
        super().__init__(seed, rule, text)
        self.seed, self.rule, self.text = seed, rule, text

    def __str__(self) -> str:
        replay = f"python -m tests.session.simulation --replay {self.seed}"
        return f"seed {self.seed}: {self.text}\nreplay with a trace: {replay}"


def run_seed(seed: int) -> Counter[str]:
    """Run one seed; what it came across. Raises :class:`SeedFailed`."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:  # a machine that raises breaks a promise as well
        rule = error.rule if isinstance(error, Violation) else "a step never raises"
        raise SeedFailed(seed, rule, f"{type(error).__name__}: {error}") from error
    return simulation.world.seen


def trace_seed(seed: int) -> list[str]:
    """The same history again, written down; the violation, if any, is its last line."""
    simulation = Simulation(seed, trace=True)
    lines = simulation.world.trace or []
    try:
        simulation.run()
    except Exception as error:
        lines = simulation.world.trace or lines
        lines.append(f"{simulation.world.now_s:8.3f}  {type(error).__name__}: {error}")
    return simulation.world.trace or lines


def run_seeds(seeds: Iterable[int]) -> Counter[str]:
    total: Counter[str] = Counter()
    gc.disable()  # worlds are cyclic; one sweep for the lot is much cheaper
    try:
        for seed in seeds:
            total.update(run_seed(seed))
            total["seeds"] += 1
    finally:
        gc.enable()
        gc.collect()
    return total


def first_failure(seeds: Iterable[int]) -> SeedFailed | None:
    for seed in seeds:
        try:
            run_seed(seed)
        except SeedFailed as failure:
            return failure
    return None


def run_parallel(first: int, num_seeds: int, num_processes: int = 2) -> Counter[str]:
    """Many seeds over some processes; raises the first failure found."""
    chunk = max(1, min(250, num_seeds // num_processes))
    stop = first + num_seeds
    ranges = [range(a, min(a + chunk, stop)) for a in range(first, stop, chunk)]
    total: Counter[str] = Counter()
    # Spawned, not forked: the test process may hold threads and native libraries.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for seen in pool.map(run_seeds, ranges):
            total.update(seen)
    return total


def report(total: Counter[str]) -> str:
    return "\n".join(f"{count:9,}  {name}" for name, count in sorted(total.items()))


def main(
    arguments: list[str] | None = None, write: Callable[[str], object] = sys.stdout.write
) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--replay", type=int, help="run this one seed and print its trace")
    chosen = parser.parse_args(arguments)
    if chosen.replay is not None:
        write("\n".join(trace_seed(chosen.replay)) + "\n")
        return 0
    start_s = time.monotonic()
    try:
        total = run_parallel(chosen.first, chosen.seeds, chosen.processes)
    except SeedFailed as failure:
        write(f"{failure}\n")
        return 1
    write(f"{report(total)}\n{time.monotonic() - start_s:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
