"""The two processes of ``bench --transport disk-delta``: one trains and publishes, one serves and follows."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weightsync import config
from weightsync.cli.bench_worker import EngineWorker, TrainerWorker

#: Of a model, what the baselines code as well; they are slow.
_BASELINE_ELEMENTS = 96 << 20
RUN = "bench"


class DeltaTrainer(TrainerWorker):
    """Changes its weights as a step of AdamW would, and publishes them."""

    def __init__(self) -> None:
        super().__init__()
        self._store_sender: Any = None
        self._update: Any = None
        self._before: dict[str, Any] = {}

    def publish_to(self, directory: str) -> dict[str, Any]:
        from weightsync.store_sender import StoreOptions, StoreSender

        options = StoreOptions(fold_every=0, anchor_every=0)
        self._store_sender = StoreSender(directory, RUN, options)
        return {}

    def change_sparsely(self, seed: int) -> dict[str, Any]:
        """A steady-state step at a learning rate of 1e-6 (:func:`weightsync.workloads.quick_change`)."""
        from weightsync.workloads import quick_change

        def move(item: tuple[int, Any]) -> None:
            i, bits = item
            bits[:] = quick_change(bits, seed * 100_003 + i)

        with ThreadPoolExecutor(config.num_threads()) as pool:
            list(pool.map(move, enumerate(self._bits().values())))
        return {}

    def keep(self) -> dict[str, Any]:
        """A copy of some tensors, for the baselines."""
        left = _BASELINE_ELEMENTS
        self._before = {}
        for name, bits in self._bits().items():
            if bits.size <= left:
                self._before[name] = bits.copy()
                left -= bits.size
        return {"num_elements": sum(bits.size for bits in self._before.values())}

    def publish(self, version: int) -> dict[str, Any]:
        """Handed over; ``published`` waits."""
        with self._store_sender.update(version=version) as self._update:
            self._update.send(self.module)
        return {}

    def published(self) -> dict[str, Any]:
        report = self._update.report
        return {
            "kind": report.kind,
            "payload_bytes": report.payload_bytes,
            "num_changed": report.num_changed,
            "total_bytes": report.total_bytes,
            "encode_s": report.encode_s,
            "publish_s": report.publish_s,
        }

    def baselines(self, directory: str, version: int) -> dict[str, Any]:
        """Payloads of the kept tensors by published formats, each decoded and compared; and ours."""
        import numpy as np

        from weightsync.cli.delta_baselines import BASELINES
        from weightsync.store import Store

        manifest = Store(Path(directory), RUN).manifest(version)
        ours = sum(e.num_bytes for e in manifest.tensors if e.meta.name in self._before)
        now = self._bits()
        changed = sum(int(np.count_nonzero(now[n] != old)) for n, old in self._before.items())
        rows = [{"name": "weightsync", "payload_bytes": ours, "is_same": True, "encode_s": None}]
        for kind in BASELINES:
            candidate, size, spent_s, is_same = kind(), 0, 0.0, True
            for name, old in self._before.items():
                start_s = time.perf_counter()
                payload = candidate.encode(old, now[name])
                spent_s += time.perf_counter() - start_s
                size += candidate.size(payload)
                is_same = is_same and bool(
                    (candidate.decode(payload, old.copy()) == now[name]).all()
                )
            rows.append(
                {
                    "name": candidate.name,
                    "payload_bytes": size,
                    "is_same": is_same,
                    "encode_s": spent_s,
                }
            )
        num_bytes = sum(old.nbytes for old in self._before.values())
        return {"rows": rows, "num_changed": changed, "num_bytes": num_bytes}

    def _bits(self) -> dict[str, Any]:
        """Every bf16 parameter as 16-bit words of its memory."""
        import torch

        return {
            name: p.detach().view(torch.int16).numpy().view("u2").reshape(-1)
            for name, p in self.module.named_parameters()
            if p.dtype is torch.bfloat16 and p.is_contiguous()
        }

    def stop(self) -> dict[str, Any]:
        if self._store_sender is not None:
            self._store_sender.close()
        return super().stop()


class DeltaEngine(EngineWorker):
    """Follows the store."""

    def __init__(self) -> None:
        super().__init__()
        self._follower: Any = None

    def follow(self, directory: str, placement: str, verify: str) -> dict[str, Any]:
        self._follower = self._receiver.follow(directory, RUN, placement=placement, verify=verify)
        return {}

    def pull(self) -> dict[str, Any]:
        report = self._follower.pull()
        return {
            "kinds": list(report.kinds),
            "payload_bytes": report.payload_bytes,
            "num_changed": report.num_changed,
            "seconds": report.seconds,
            "pause_s": report.pause_s,
            "phases": dict(report.phases),
        }

    def reload(self, directory: str, version: int) -> dict[str, Any]:
        """The same weights once more as a whole checkpoint, the way that needs no second copy."""
        report = self._receiver.load(directory, version, "reload", placement="in_place")
        return {"seconds": report.seconds, "pause_s": report.pause_s}
