"""Engines and trainers of several ranks, each rank a thread of this process: helpers for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from updating import LIMIT_S, OPTIONS, Arrays

from engine_adapter.fake import FakeEngine
from weightsync.digest import DigestPart, DigestTable
from weightsync.layout import Layout
from weightsync.receiver import Receiver, ReceiverHooks
from weightsync.sender import Sender
from weightsync.tensors import view_of
from weightsync.types import Box, TensorMeta


class Store:
    """What a store of torch does, for threads."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._values[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def get(self, key: str) -> Any:
        with self._lock:
            return self._values[key]


class FakeRank(FakeEngine):
    """One rank of a fake engine: of each named tensor one box, of the others nothing."""

    def __init__(
        self, whole: Arrays, boxes: Mapping[str, Box], rank: int, world_size: int, **options: Any
    ) -> None:
        self.boxes = dict(boxes)
        held = {n: np.array(whole[n][_slices(box)]) for n, box in self.boxes.items()}
        super().__init__(held, **options)
        own = self._layout
        tensors = []
        for t in own.tensors:
            meta = TensorMeta(t.name, t.wire_forms[0].dtype, whole[t.name].shape)
            (p,) = t.placed
            placed = replace(p, rank=rank, box=self.boxes[t.name])
            tensors.append(replace(t, wire_forms=(meta,), placed=(placed,)))
        regions = tuple(own.regions[0] if r == rank else () for r in range(world_size))
        self._layout = Layout(world_size, tuple(tensors), regions, {})

    def digest(self, names: Sequence[str]) -> Mapping[str, int]:
        metas = {t.name: t.wire_forms[0] for t in self._layout.tensors}
        parts = []
        for name in names:
            view = view_of(self.weights[name], name)
            box = self.boxes[name]
            parts.append(DigestPart(metas[name], box, view.ptr, view.strides_bytes, view.dtype))
        return DigestTable(parts).compute(1)

    def holds(self, whole: Arrays) -> bool:
        """Whether every element is that of these weights."""
        return all(
            np.array_equal(self.weights[n], whole[n][_slices(box)]) for n, box in self.boxes.items()
        )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def split(shape: tuple[int, ...], rank: int, world_size: int, dim: int = 0) -> Box:
    """An uneven slice of one dimension."""
    cuts = [round(shape[dim] * r / world_size) for r in range(world_size + 1)]
    low = tuple(cuts[rank] if d == dim else 0 for d in range(len(shape)))
    high = tuple(cuts[rank + 1] if d == dim else n for d, n in enumerate(shape))
    return Box(low, high)


def engine_ranks(whole: Arrays, world_size: int, **options: Any) -> list[FakeRank]:
    """Matrices are split by columns, vectors are on every rank, the last tensor is on the last."""
    last = list(whole)[-1]
    ranks = []
    for rank in range(world_size):
        boxes = {}
        for name, array in whole.items():
            if name == last:
                if rank == world_size - 1:
                    boxes[name] = Box.whole(array.shape)
            elif array.ndim == 2:
                boxes[name] = split(array.shape, rank, world_size, dim=1)
            else:
                boxes[name] = Box.whole(array.shape)
        ranks.append(FakeRank(whole, boxes, rank, world_size, **options))
    return ranks


@dataclass
class Job:
    """Connected ranks of both sides. ``senders`` is by trainer rank, ``receivers`` by engine and rank."""

    senders: list[Any]
    receivers: list[list[Receiver]]
    pool: ThreadPoolExecutor

    def on_trainer_ranks(self, act: Callable[[int, Any], Any]) -> list[Any]:
        """``act(rank, sender)`` on all at once; what each returned. Raises what one of them raised."""
        futures = [self.pool.submit(act, r, s) for r, s in enumerate(self.senders)]
        return [future.result(timeout=3 * LIMIT_S) for future in futures]

    def attempt(self, version: int, sources: Sequence[Any], scope: Any = None) -> list[Any]:
        """(report, error) of each trainer rank. A source that is an error is raised there."""

        def act(rank: int, sender: Any) -> Any:
            update, error = sender.update(version, scope), None
            try:
                with update:
                    if isinstance(sources[rank], Exception):
                        raise sources[rank]
                    update.send(sources[rank])
            except Exception as raised:
                error = raised
            return update.report, error

        return self.on_trainer_ranks(act)

    def refit(self, version: int, sources: Sequence[Any], scope: Any = None) -> list[Any]:
        """The report of each trainer rank, of an update that must commit."""
        found = self.attempt(version, sources, scope)
        for _, error in found:
            if error is not None:
                raise error
        assert all(report.is_committed for report, _ in found)
        return [report for report, _ in found]


@contextmanager
def job(
    *engines: Sequence[Any],
    num_trainers: int = 1,
    hooks: ReceiverHooks | None = None,
    **options: Any,
) -> Iterator[Job]:
    """Ranks of engines (a list of adapters each) and of a trainer, connected."""
    store = Store()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(16, "test-ranks"))
        receivers = []
        for number, adapters in enumerate(engines):
            made = [
                Receiver(
                    adapter, rank=r, world_size=len(adapters), store=store, hooks=hooks,
                    name=f"engine {number}", join_timeout_s=LIMIT_S,
                )
                for r, adapter in enumerate(adapters)
            ]  # fmt: skip
            for receiver in made:
                stack.callback(receiver.close)
            list(pool.map(Receiver.start, made))
            receivers.append(made)
        urls = [made[0].url for made in receivers]

        def connect(rank: int) -> Any:
            many: Any = {} if num_trainers == 1 else {"store": store}
            return Sender.connect(
                urls, rank=rank, world_size=num_trainers, **many, **{**OPTIONS, **options}
            )

        senders = list(pool.map(connect, range(num_trainers)))
        for sender in senders:
            stack.callback(sender.close)
        yield Job(senders, receivers, pool)
