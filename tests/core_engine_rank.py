"""One rank of an engine in a process of its own, for tests of serving over several ranks."""

from __future__ import annotations

import datetime
import threading
from typing import Any

from processes import Pipe

_SERVED: dict[str, Any] = {}


def serve(pipe: Pipe) -> None:
    """Join the group, load an engine, then answer tasks until told to stop."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    task = pipe.receive()
    dist.init_process_group(
        task.get("backend", "gloo"),
        store=dist.FileStore(task["store"], 2),
        rank=task["rank"],
        world_size=2,
        timeout=datetime.timedelta(seconds=task.get("timeout_s", 20)),
    )
    engine = _engine(task)
    pipe.send("ready")
    while (command := pipe.receive()) != "stop":
        pipe.send(globals()[f"_{command['do']}"](engine, task["rank"], command))
    engine.close()
    dist.destroy_process_group()
    pipe.send("stopped")


def _engine(task: Any) -> Any:
    import torch.distributed as dist
    from core_engines import SMALL

    from engine_adapter.core.engine import Engine
    from engine_adapter.core.parallel import Group
    from engine_adapter.core.shards import Shards

    return Engine.from_pretrained(
        task["directory"],
        shards=Shards(task["rank"], 2, **task.get("split", {"tp_size": 2})),
        group=Group.of(dist.group.WORLD),
        **{**SMALL, **task.get("settings", {})},
    )


def _said(outputs: Any) -> Any:
    return [
        {
            "tokens": list(output.token_ids),
            "log_probs": [result.log_prob for result in output.log_probs],
            "spans": [
                [None if s.version is None else s.version.number, s.first, s.end]
                for s in output.version_spans
            ],
            "reason": str(output.finish_reason),
        }
        for output in outputs
    ]


def _generate(engine: Any, rank: int, command: Any) -> Any:
    from core_engines import params

    return _said(engine.generate(command["prompts"], params(temperature=0.0)))


def _decodes_by(engine: Any, rank: int, command: Any) -> str:
    return "eager" if engine.decode_steps is None else "graphs"


def _sums(engine: Any, rank: int, command: Any) -> Any:
    """How often the sum over ranks was that of the gathered parts, by kind; by mailboxes or by NCCL."""
    import torch

    group = engine._group
    found = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        equal, by_mailbox = 0, 0
        for number in range(40):
            torch.manual_seed(100 * number + rank)
            shape = (1 + 37 * (number % 9), 8 * (1 + number * 5 % 97))
            part = torch.randn(shape, device=engine.model.device).to(dtype)
            total = part.new_zeros(shape, dtype=torch.float32)
            for other in group.gather(part):
                total += other.float()
            by_mailbox += group._peers is not None and group._peers.sum(part) is not None
            equal += bool(torch.equal(group.sum_in_order(part), total.to(dtype)))
        found[str(dtype)] = [equal, by_mailbox]
    return found


def _lone_sum(engine: Any, rank: int, command: Any) -> bool:
    """A sum that the other rank does not take part in; whether all of it is NaN."""
    import torch

    from engine_adapter.core import peer_sum

    peer_sum.LIMIT_S = 2.0  # type: ignore[misc]
    part = torch.ones((3, 64), dtype=torch.bfloat16, device=engine.model.device)
    return bool(torch.isnan(engine._group.sum_in_order(part)).all())


def _release(engine: Any, rank: int, command: Any) -> int:
    return int(engine.release_memory(backups={"weights": "pinned"}))


def _resume(engine: Any, rank: int, command: Any) -> int:
    return int(engine.resume_memory())


def _update(engine: Any, rank: int, command: Any) -> Any:
    """Traffic on the engine's thread; each rank asks for pauses at moments of its own."""
    from core_engines import params

    from weightsync.session import Version
    from weightsync.types import PauseMode

    with engine:
        submission = engine.submit(command["prompts"], params(temperature=0.0, max_tokens=60))
        for number in range(1, 6):
            threading.Event().wait(0.01 * ((number * (rank + 1)) % 3))
            engine.pause(PauseMode.RETRACT if number % 2 else PauseMode.IN_PLACE)
            engine.set_version(Version("run", number))
            engine.resume()
        return _said(engine.wait(submission, limit_s=30))


def _refuse(engine: Any, rank: int, command: Any) -> Any:
    """One rank refuses in the middle; every rank says so."""
    from core_engines import params

    from weightsync.errors import TaintedError

    with engine:
        submission = engine.submit(command["prompts"], params(max_tokens=200))
        if rank == 1:
            engine.refuse("an update failed")
        try:
            engine.wait(submission, limit_s=30)
        except TaintedError as error:
            said = str(error)
        else:
            said = "no error"
        engine.at_boundary(lambda: None)
        engine.refuse(None)
        return said


def _fall(engine: Any, rank: int, command: Any) -> Any:
    """Decode until one rank falls in the middle of a step; what the caller and his streams saw."""
    from contextlib import nullcontext

    from core_engines import params

    from weightsync.errors import WeightSyncError

    if rank == command["rank"]:
        _fall_in_a_step(engine, command["signal"], command["num_steps"])
    raised = []
    asked = [params(temperature=0.0, max_tokens=n) for n in command["max_tokens"]]
    with engine if command["is_started"] else nullcontext():
        submission = engine.submit(command["prompts"], asked, is_stream=True)
        for attempt in (
            lambda: engine.wait(submission, limit_s=30),
            lambda: engine.generate(command["prompts"], params(), limit_s=30),
        ):
            try:
                attempt()
            except WeightSyncError as error:
                raised.append(f"{type(error).__name__}: {error}")
    streamed: dict[str, list[int]] = {}
    while not submission.chunks.empty():
        chunk = submission.chunks.get()
        streamed.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return {
        "raised": raised,
        "outputs": _said(submission.outputs()),
        "errors": [output.error for output in submission.outputs()],
        "streamed": [streamed[sample.request.request_id] for sample in submission.samples],
        "num_held_pages": engine.scheduler.pool.num_held,
    }


def _fall_in_a_step(engine: Any, number: int, num_steps: int) -> None:
    """After so many steps: in the third sum of the next one, while the others wait for its part."""
    import signal

    group, num_sums = engine._group, 0
    whole = group.sum_in_order

    def sum_in_order(tensor: Any) -> Any:
        nonlocal num_sums
        num_sums += engine.num_steps == num_steps
        if num_sums == 3:
            num_sums += 1
            signal.pthread_kill(threading.get_ident(), number)
        return whole(tensor)

    group.sum_in_order = sum_in_order


def _open(engine: Any, rank: int, command: Any) -> Any:
    """Serve on the engine's own thread, behind a receiver; where rank 0 listens."""
    import torch.distributed as dist

    from engine_adapter.bundled import BundledAdapter
    from weightsync.receiver import Receiver

    receiver = Receiver(
        BundledAdapter(engine), rank=rank, world_size=2, group=dist.group.WORLD, join_timeout_s=20
    )
    receiver.start()  # before the engine's thread: they share the group
    engine.start()
    _SERVED["receiver"] = receiver
    return receiver.url if rank == 0 else None


def _traffic(engine: Any, rank: int, command: Any) -> Any:
    """The same requests on every rank, round by round, until one was served by ``until``."""
    from core_engines import params

    said: list[Any] = []
    for _ in range(200):
        outputs = engine.generate(
            command["prompts"], params(temperature=0.0, max_tokens=24), limit_s=30
        )
        said += _said(outputs)
        spans = outputs[0].version_spans
        last = None if spans[-1].version is None else spans[-1].version.number
        if last == command["until"]:
            break
    return said


def _close(engine: Any, rank: int, command: Any) -> Any:
    _SERVED.pop("receiver").close()
    engine.stop(limit_s=20)
    return None


def _weights(engine: Any, rank: int, command: Any) -> Any:
    """Digest of each slot of this rank, and whether anything moved."""
    from weightsync.watch import Look

    slots = engine.model.slots
    adapter = _SERVED["receiver"]._adapter
    names = sorted(slots.slots)
    digests = adapter.digest(names)
    return {
        "digests": {n: f"{d:016x}" for n, d in digests.items()},
        "moved": list(slots.moved(Look.EVERYTHING)),
    }
