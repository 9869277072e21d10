"""One rank of ``bench`` between several ranks: a trainer with real shards, or an engine with its boxes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync.cli.bench_model import ENGINE_MASK, ModelChoice, bits_of, load
from weightsync.errors import ConfigError

_GROUP_LIMIT_S = 120


class _RankWorker:
    """What ranks of both sides answer."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._store: Any = None

    def join(self, store: str, rank: int, size: int) -> dict[str, Any]:
        """Meet the other ranks of this side; one thread each, for they share a machine."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.rank, self.size = rank, size
        files: Any = getattr(dist, "FileStore")  # noqa: B009  (its stubs do not export it)
        self._store = files(store + ".weightsync", size)
        dist.init_process_group(
            "gloo",
            store=files(store, size),
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=_GROUP_LIMIT_S),
        )
        return {}

    def _meeting(self) -> dict[str, Any]:
        several = {} if self.size == 1 else {"store": self._store}
        return {"rank": self.rank, "world_size": self.size, **several}

    def stop(self) -> dict[str, Any]:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        return {}


class EngineRank(_RankWorker):
    """A rank of the bundled core, or the one rank of a module."""

    def __init__(self) -> None:
        super().__init__()
        self._adapter: Any = None
        self._receiver: Any = None
        self._core: Any = None

    def load(
        self, choice: Mapping[str, Any], engine: str, split: Mapping[str, int]
    ) -> dict[str, Any]:
        model = ModelChoice(**choice)
        if engine == "module":
            from engine_adapter.module import ModuleAdapter

            self._adapter = ModuleAdapter(load(model, ENGINE_MASK))
            return {}
        import torch.distributed as dist

        from engine_adapter.bundled import BundledAdapter
        from engine_adapter.core.engine import Engine
        from engine_adapter.core.parallel import ALONE, Group
        from engine_adapter.core.shards import Shards
        from weightsync.cli.bench_core import flip_bits

        shards = Shards(self.rank, self.size, split.get("tp", 1), split.get("ep", 1))
        world: Any = dist.group.WORLD
        group = ALONE if self.size == 1 else Group.of(world)
        self._core = Engine.from_pretrained(
            Path(str(model.directory)), shards=shards, group=group, kv_cache_tokens=1024,
            max_context=64, max_running=8,
        )  # fmt: skip
        flip_bits(self._core.model, ENGINE_MASK)
        self._adapter = BundledAdapter(self._core)
        return {}

    def serve(self) -> dict[str, Any]:
        from weightsync.receiver import Receiver

        self._receiver = Receiver(self._adapter, **self._meeting()).start()
        if self._core is not None:
            self._core.start()
        return {"url": self._receiver.url if self.rank == 0 else None}

    def layout(self) -> dict[str, Any]:
        return {"layout": self._adapter.layout().to_json()}

    def digest(self) -> dict[str, Any]:
        """Of this rank's live boxes."""
        names = sorted({t.name for t in self._adapter.layout().tensors if t.placed})
        return {n: f"{d:016x}" for n, d in self._adapter.digest(names).items()}

    def halt(self) -> dict[str, Any]:
        """Stop serving; all ranks at once, for they end after the same step."""
        if self._receiver is not None:
            self._receiver.close()
        if self._core is not None:
            self._core.stop()
        self._receiver = self._core = None
        return {}


class TrainerRank(_RankWorker):
    """A rank of a trainer: FSDP2, HSDP, tensor and expert parallel DTensors, pipeline stages."""

    def __init__(self) -> None:
        super().__init__()
        self._source: Any = None
        self._sender: Any = None

    def load(self, choice: Mapping[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
        from weightsync.cli.bench_shard import shard

        self._source = shard(load(ModelChoice(**choice), 0), layout, self.rank)
        held = sum(_local(p).numel() * p.element_size() for p in self._parameters())
        return {"held_bytes": held}

    def _parameters(self) -> list[Any]:
        if isinstance(self._source, dict):
            return list(self._source.values())
        return list(self._source.parameters())

    def connect(self, url: str, options: Mapping[str, Any]) -> dict[str, Any]:
        from weightsync.sender import Sender

        start_s = time.perf_counter()
        self._sender = Sender.connect([url], **self._meeting(), **options)
        return {"connect_s": time.perf_counter() - start_s}

    def change(self, mask: int) -> dict[str, Any]:
        """Flip bits of what this rank holds."""
        seen = set()
        for parameter in self._parameters():
            local = _local(parameter)
            if local.numel() and local.data_ptr() not in seen:
                seen.add(local.data_ptr())
                local.data.view(bits_of(local)).bitwise_xor_(mask)
        return {}

    def refit(self, version: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        with self._sender.update(version=version) as update:
            update.send(self._source)
        seconds = time.perf_counter() - start_s
        engine = update.report.engines[0]
        return {
            "seconds": seconds,
            "phases": dict(engine.phases),
            "pause_s": engine.pause_s,
            "num_bytes": engine.num_bytes,
            "num_tensors": engine.num_tensors,
            "contract": engine.contract,
            "path": engine.path,
        }

    def pairs(self) -> dict[str, Any]:
        """Bytes from each trainer rank to each engine rank, by the plan that was last used."""
        if self.rank != 0:
            raise ConfigError("rank 0 makes the plans")
        plan = list(self._sender._links[0]._bound.values())[-1].plan
        return {"pairs": [[a, b, n] for (a, b), n in sorted(plan.bytes_by_pair().items())]}

    def leave(self) -> dict[str, Any]:
        """Part with the engine and the other ranks."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None
        return {}


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
