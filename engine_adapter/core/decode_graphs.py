"""Decode steps as CUDA graphs: one for each number of rows, from embedding to the next step's state.

A graph places its rows' keys and values, runs the model, draws tokens and writes them where the next
step reads them, so that a steady step copies nothing to the device. Results are copied to pinned
memory behind each replay. Of several ranks each has graphs of its own with NCCL's kernels inside, and all
replay the same sizes; the kernels of a rank that another has left wait for ever, which is noticed here.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from engine_adapter.core.arena import MemoryKind
from engine_adapter.core.attention import Attention
from engine_adapter.core.cuda_attention import PagedCudaAttention
from engine_adapter.core.cuda_sampling import Sampled, sample_on_cuda
from engine_adapter.core.decode_state import DecodeRow, DecodeState, DecodeSteps, PageTables
from engine_adapter.core.engine_config import DecodeKind, EngineConfig
from engine_adapter.core.graph_pool import GraphPool
from engine_adapter.core.kv_cache import KvCache
from engine_adapter.core.model import DecoderModel
from engine_adapter.core.parallel import ALONE, Group
from weightsync.config import library_setting
from weightsync.deadline import poll_until
from weightsync.errors import CapacityError, ConfigError
from weightsync.native_attention import ATTENTION_CHUNK

_RESULT_SLOTS = 3  # steps whose results may lie in pinned memory at a time
#: A step takes milliseconds; one that takes this long waits for a rank that is gone.
_LOST_S: Final = 60.0

_log = logging.getLogger(__name__)


def _leave(*things: object) -> None:
    """Never destroy them, not even when the interpreter ends: a count too many keeps them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


def bucket_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, then every 32: ascending, the last one ``max_rows`` or above."""
    sizes = [1, 2, 4, 8, 16, 32]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + 32)
    return [size for size in sizes if size < max_rows] + [
        next(size for size in sizes if size >= max_rows)
    ]


class DecodeGraphs:
    """:class:`DecodeSteps` on a CUDA device; captured when made, the largest first.

    ``pool`` is where graphs keep what passes between their kernels (None: one of torch's). Ranks of a
    ``group`` make theirs together. Raises :class:`CapacityError` if there is too little memory.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        max_rows: int,
        pool: GraphPool | None = None,
        group: Group = ALONE,
    ) -> None:
        self.pool, self._group = pool, group
        least_rows = int(group.largest([model.least_rows])[0])
        self.sizes = [s for s in bucket_sizes(max_rows) if s >= least_rows] or [least_rows]
        self.max_rows = self.sizes[-1]
        tables_width = -(-model.max_positions // cache.page_size)
        self.state = DecodeState(self.max_rows, tables_width, cache.page_size, model.device)
        held_chunks = cache.num_pages * cache.page_size // ATTENTION_CHUNK + self.max_rows
        self.max_chunks = max(
            min(held_chunks, self.max_rows * -(-model.max_positions // ATTENTION_CHUNK)),
            self.max_rows,
        )
        self._model, self._cache = model, cache
        self._attention = PagedCudaAttention()
        self._tables = PageTables(self.state)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._found: dict[int, Sampled] = {}
        self._size = self.sizes[0]
        self._in_flight: deque[tuple[int, Tensor, Tensor, Any]] = deque()
        self._slots = [self._result_slot() for _ in range(_RESULT_SLOTS)]
        self.num_captures = 0
        start = time.monotonic()
        with nullcontext() if pool is None else pool.owning():
            self._capture_all(torch.cuda.graph_pool_handle() if pool is None else pool.id)
        #: Rows of the graph that is used, by the size that would do.
        self.choice = self._faster_sizes()
        self.capture_s = time.monotonic() - start

    def rows_for(self, count: int) -> int:
        return self.choice[next(size for size in self.sizes if size >= count)]

    def load(self, rows: Sequence[DecodeRow]) -> None:
        self._size = self.rows_for(len(rows))
        self.state.load(rows)
        self._tables.clear()
        for place, row in enumerate(rows):
            self._tables.put(place, row.pages)
        self._tables.copy(self._size)

    def set_pages(self, changed: Mapping[int, Sequence[int]]) -> None:
        for row, pages in changed.items():
            self._tables.put(row, pages)
        self._tables.copy(self._size)

    def launch(self) -> None:
        if len(self._in_flight) == _RESULT_SLOTS:
            raise RuntimeError("more decode steps in flight than there is room for their results")
        tokens, numbers, event = self._slots[0]
        self._slots.append(self._slots.pop(0))
        self._graphs[self._size].replay()
        found = self._found[self._size]
        tokens[: self._size].copy_(found.tokens, non_blocking=True)
        numbers[: self._size].copy_(found.numbers, non_blocking=True)
        event.record()
        self._in_flight.append((self._size, tokens, numbers, event))

    def give_up(self) -> None:
        self._in_flight.clear()

    def take(self) -> list[tuple[int, float, float]]:
        size, tokens, numbers, event = self._in_flight.popleft()
        self._wait(event)
        drawn, after = numbers[:size, 0].tolist(), numbers[:size, 1].tolist()
        return list(zip(tokens[:size].tolist(), drawn, after, strict=True))

    def _wait(self, event: Any) -> None:
        """Raises :class:`PeerLostError` if another rank keeps a step from ending."""
        if self._group.size == 1:
            event.synchronize()
            return
        if not poll_until(event.query, _LOST_S):
            raise self._group.lost(f"a decode step did not end within {_LOST_S:.0f} s")

    def close(self, limit_s: float = _LOST_S) -> None:
        """Destroy the graphs, once the device is done with them.

        Of several ranks, steps that do not end within ``limit_s`` wait for a rank that is gone. Whoever
        destroys their graphs, or frees memory of the device (weights, cache, mailboxes), waits with
        them, so that these are left as they are until the process ends.
        """
        self.give_up()
        if self._have_ended(limit_s):
            for graph in self._graphs.values():
                graph.reset()
        else:
            _leave(
                self._graphs, self._found, self._slots, self.pool, self.state,
                self._model, self._cache, self._group,
            )  # fmt: skip
            _log.error(
                "%s; %d decode graphs and their memory on %s are left until this process ends",
                self._group.lost(f"decode steps did not end within {limit_s:.0f} s"),
                len(self._graphs), self.state.device,
            )  # fmt: skip
        self._graphs, self._found = {}, {}

    def wait_ended(self, limit_s: float | None = None) -> None:
        """Before memory that steps use goes: raises :class:`PeerLostError` if one does not end within
        ``limit_s`` (default: 60), since another rank is gone."""
        limit_s = _LOST_S if limit_s is None else limit_s
        if not self._have_ended(limit_s):
            raise self._group.lost(f"decode steps did not end within {limit_s:.0f} s")

    def _have_ended(self, limit_s: float) -> bool:
        if self._group.size == 1:
            torch.cuda.synchronize(self.state.device)
            return True
        end_s = time.monotonic() + limit_s
        # One of them was recorded behind the last replay; one that never was has passed.
        return all(
            poll_until(event.query, max(0.0, end_s - time.monotonic()))
            for _, _, event in self._slots
        )

    # --- capturing ------------------------------------------------------------------------------------

    def _result_slot(self) -> tuple[Tensor, Tensor, Any]:
        tokens = torch.empty(self.max_rows, dtype=torch.int64, pin_memory=True)
        numbers = torch.empty((self.max_rows, 4), dtype=torch.float32, pin_memory=True)
        return tokens, numbers, torch.cuda.Event()  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def _step(self, size: int) -> Sampled:
        """What a graph of ``size`` rows does."""
        self.state.place(size)
        self._attention.forget()
        batch = self.state.batch(size, self.max_chunks)
        logits = self._model.forward(batch, self._cache, self._attention)
        found = sample_on_cuda(logits, self.state.inputs(size), None)
        self.state.advance(found.tokens)
        return found

    def _faster_sizes(self) -> dict[int, int]:
        """Of each size, itself or a larger one that takes less time: libraries have kernels that are
        poor at very few rows. The bits are the same."""
        measured = self._group.largest([self._replay_s(size) for size in self.sizes])
        times = dict(zip(self.sizes, measured, strict=True))
        return {
            size: min((s for s in self.sizes if s >= size), key=times.__getitem__)
            for size in self.sizes
        }

    def _replay_s(self, size: int) -> float:
        """The least of a few steps without a request, by the device's clock."""
        found = []
        for _ in range(4):
            start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            self._graphs[size].replay()
            stop.record()
            stop.synchronize()
            found.append(float(start.elapsed_time(stop)) * 1e-3)
        return min(found)

    def _capture_all(self, pool: Any) -> None:
        stream = torch.cuda.Stream(self.state.device)  # type: ignore[no-untyped-call]
        try:
            for size in reversed(self.sizes):
                self._capture(size, stream, pool)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.state.device)
            raise CapacityError(
                f"capturing decode graphs of {self.sizes} rows ran out of memory, with {free} of "
                f"{total} bytes free; lower max_running or kv_cache_tokens, or use "
                "decode='eager'"
            ) from error

    def _capture(self, size: int, stream: Any, pool: Any) -> None:
        # Once as it is, so that libraries and workspaces are ready on this very stream.
        stream.wait_stream(torch.cuda.current_stream(self.state.device))
        with torch.cuda.stream(stream):
            self._step(size)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's own threads go on calling CUDA meanwhile.
        mode = "global" if self._group.size == 1 else "thread_local"
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            self._found[size] = self._step(size)
        self._graphs[size] = graph
        self.num_captures += 1


def build_decode_steps(
    config: EngineConfig,
    model: DecoderModel,
    cache: KvCache,
    attention: Attention,
    group: Group,
) -> DecodeSteps | None:
    """Graphs, if that is what the engine is to decode by. Raises :class:`ConfigError` if they are asked
    for and cannot be."""
    if config.decode is DecodeKind.EAGER:
        return None
    reason = _no_graphs_reason(config, model, attention, group)
    if not reason:
        is_releasable = config.memory is MemoryKind.RELEASABLE
        pool = GraphPool(model.device) if is_releasable else None
        return DecodeGraphs(model, cache, config.max_running, pool, group)
    if config.decode is DecodeKind.GRAPHS:
        raise ConfigError(f"decode='graphs': {reason}; use decode='auto'")
    return None


def _no_graphs_reason(
    config: EngineConfig, model: DecoderModel, attention: Attention, group: Group
) -> str:
    if not isinstance(attention, PagedCudaAttention):
        return f"there are none for {type(attention).__name__} on {model.device.type}"
    if group.size > 1 and not group.is_nccl(model.device):
        return f"the {group.size} ranks of the engine add parts on {model.device} without NCCL"
    # Otherwise NCCL registers what graphs use, and may hang once that was released and came back.
    is_registering = library_setting("NCCL_GRAPH_REGISTER") != "0"
    if group.size > 1 and config.memory is MemoryKind.RELEASABLE and is_registering:
        return (
            "memory='releasable' with several ranks needs NCCL_GRAPH_REGISTER=0 in the environment"
        )
    if model.asks_device:
        return f"experts of {model.dtype} are picked on the host; with bfloat16 they are not"
    return ""
