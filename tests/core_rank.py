"""One rank of a core engine in a process of its own, for tests of tensor and expert parallel."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any

from processes import Pipe


def serve(pipe: Pipe) -> None:
    """Join the group, then answer ``load`` and ``step`` until told to stop."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    task = pipe.receive()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(task["store"], task["size"]),
        rank=task["rank"],
        world_size=task["size"],
        timeout=datetime.timedelta(seconds=30),
    )
    rank = _Rank(task["rank"], task["size"])
    while (command := pipe.receive()) != "stop":
        pipe.send(rank.load(**command["load"]) if "load" in command else rank.step(command["step"]))
    dist.destroy_process_group()
    pipe.send("stopped")


class _Rank:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._runner: Any = None

    def load(self, directory: str, tp_size: int, ep_size: int) -> Any:
        import torch.distributed as dist
        from core_runner import Runner

        from engine_adapter.core.model import DecoderModel
        from engine_adapter.core.parallel import Group
        from engine_adapter.core.shards import Shards

        shards = Shards(self._rank, self._size, tp_size, ep_size)
        group = Group.of(dist.group.WORLD)
        model = DecoderModel.from_pretrained(directory, shards=shards, group=group)
        self._runner = Runner(model)
        return model.slots.layout(self._rank, self._size).to_json()

    def step(self, rows: Any) -> Any:
        import torch
        from core_runner import prompt_log_probs

        from weightsync.errors import WeightSyncError

        try:
            found = self._runner.step(rows)
        except WeightSyncError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {
            name: {
                "bits": hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest(),
                "greedy": logits.argmax(-1).tolist(),
                "log_probs": prompt_log_probs(logits, rows[name]),
            }
            for name, logits in found.items()
        }
