"""Memory by tag, given back and taken again: the contract on the CPU and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from core_engines import params, prompts, same, small_engine, small_model
from core_models import make_model, save_model
from core_traffic import refit, refitted
from memory_contract import MemoryContract

from engine_adapter.core import backing
from engine_adapter.core.arena import Arena, MemoryKind, MemoryTag
from engine_adapter.core.backing import HostBacking
from engine_adapter.core.decode_graphs import DecodeGraphs
from engine_adapter.core.engine import Engine
from weightsync import native
from weightsync.errors import CapacityError, ReleasedError, UnavailableError, WeightSyncError

pytestmark = pytest.mark.filterwarnings("ignore:rows of products")  # of tiny models on a GPU


class TestOnCpu(MemoryContract):
    settings: ClassVar[dict[str, Any]] = {}

    def test_what_is_missing_is_said(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        engine.release_memory()
        with monkeypatch.context() as patched:
            patched.setattr(backing, "available_bytes", lambda: 1000)
            with pytest.raises(CapacityError, match=r"1000 are free: \d+ are missing"):
                engine.resume_memory()
        assert engine.resume_memory() > 0


def test_pages_go_back_and_neighbours_stay() -> None:
    memory = torch.empty(1 << 20, dtype=torch.uint8)[100:-100]
    memory.fill_(7)
    held = HostBacking(memory)
    freed = held.release()
    assert (1 << 20) - 3 * 4096 <= freed <= 1 << 20
    assert set(memory.tolist()) == {0, 7}  # whole pages only
    assert held.release() <= 1 << 20
    held.resume()
    assert HostBacking(torch.empty(10, dtype=torch.uint8)).release() == 0


def test_a_sender_fills_what_came_back_empty(tmp_path: Path) -> None:
    model = make_model("dense", torch.float32, 1)
    expected = small_engine(save_model(model, tmp_path / "new")).generate(prompts(5, 40), params())
    engine = small_engine(save_model(make_model("dense", torch.float32, 0), tmp_path / "old"))
    with refitted(engine) as sender:
        engine.release_memory()
        with pytest.raises(WeightSyncError, match="'weights' was given back"):
            refit(sender, 1, model)
        engine.resume_memory(["weights"])
        refit(sender, 2, model)  # the cache may come later
        with pytest.raises(ReleasedError, match="'kv_cache' was given back"):
            engine.generate(prompts(5), params())
        engine.resume_memory()
        assert all(map(same, engine.generate(prompts(5, 40), params()), expected))


@pytest.mark.gpu
class TestOnCuda(MemoryContract):
    settings: ClassVar[dict[str, Any]] = {"device": "cuda:0", "memory": "releasable"}

    def test_graphs_live_in_their_pool(self, engine: Engine) -> None:
        graphs = engine.decode_steps
        assert isinstance(graphs, DecodeGraphs)
        assert graphs.pool is not None
        captured, held = graphs.num_captures, graphs.pool.num_bytes
        assert held > 0
        expected = engine.generate(prompts(12, 40, 3), params(temperature=0.8))
        for _ in range(2):
            assert engine.release_memory(["cuda_graph"]) == held
            assert engine.resume_memory(["cuda_graph"]) == held
            outputs = engine.generate(prompts(12, 40, 3), params(temperature=0.8))
            assert all(map(same, outputs, expected))
        assert graphs.num_captures == captured

    def test_two_engines_one_released_while_the_other_serves(
        self, engine: Engine, directory: Path
    ) -> None:
        other = small_engine(directory, **self.settings)
        expected = other.generate(prompts(12, 40), params())
        engine.release_memory()
        assert all(map(same, other.generate(prompts(12, 40), params()), expected))
        engine.resume_memory()


@pytest.mark.gpu
def test_a_tensor_lies_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "PIECE_BYTES", 2 * backing.UNIT_BYTES)
    sizes = [(1 << 20) + 5, 3 << 20, 100, 9 << 20, 1 << 20, 2 << 20, 3 << 20]
    arena = Arena(
        MemoryTag.WEIGHTS,
        [((size,), torch.uint8) for size in sizes],
        "cuda:0",
        remedy="",
        kind=MemoryKind.RELEASABLE,
    )
    for again in range(2):
        pieces = {}
        for value, tensor in enumerate(arena.tensors()):
            tensor.fill_(value + again)
            ptr = tensor.data_ptr()
            base, num_bytes, *_ = native.extension.cuda_allocation(ptr, 0)
            pieces[base - arena.memory.data_ptr()] = num_bytes
            assert base <= ptr
            assert ptr + tensor.nbytes <= base + num_bytes
        assert len(pieces) == 5
        assert sum(pieces.values()) == arena.num_bytes
        for value, tensor in enumerate(arena.tensors()):
            assert bool((tensor == value + again).all())
        assert arena.backing.release() == arena.num_bytes
        assert arena.backing.resume() == arena.num_bytes


@pytest.mark.gpu
def test_torch_s_memory_stays(tmp_path: Path) -> None:
    engine = small_engine(small_model(tmp_path), device="cuda:0")
    with pytest.raises(UnavailableError, match="memory='releasable'"):
        engine.release_memory(["kv_cache"])
    engine.generate(prompts(5), params())
