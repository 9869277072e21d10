"""What giving memory back and taking it again must keep, on any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from core_engines import params, prompts, same, small_engine, small_model

from engine_adapter.bundled import BundledAdapter
from engine_adapter.core.arena import MemoryTag
from engine_adapter.core.backing import Backing
from engine_adapter.core.engine import Engine
from engine_adapter.core.loader import load_weights
from engine_adapter.core.memory import Backup, MemoryState
from weightsync.errors import BusyError, CapacityError, ConfigError, ReleasedError
from weightsync.session import Scope, SessionSpec, Version
from weightsync.types import Placement

LENGTHS = (12, 40, 3)
SAMPLED = params(temperature=0.8)


def update_of(scope: Scope) -> SessionSpec:
    return SessionSpec("s", "run", 1, scope, Placement.IN_PLACE, 60.0, 60.0)


class MemoryContract:
    """Give ``settings``; the model is tiny, the KV cache is what is worth releasing."""

    settings: ClassVar[dict[str, Any]]

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return small_model(tmp_path)

    @pytest.fixture
    def engine(self, directory: Path) -> Engine:
        return small_engine(directory, **{"kv_cache_tokens": 65_536, **self.settings})

    @staticmethod
    def pointers(engine: Engine) -> list[int]:
        tensors = [*engine.model.slots.storages.values(), engine.model.cos, engine.model.sin]
        return [t.data_ptr() for t in [*tensors, engine.cache.keys, engine.cache.values]]

    def test_all_tags_go_and_come_back_in_place(self, engine: Engine) -> None:
        before, expected = self.pointers(engine), engine.generate(prompts(*LENGTHS), SAMPLED)
        for backup in ("pageable", "pinned"):
            freed = engine.release_memory(backups={"weights": backup})
            held = sum(arena.num_bytes for arena in engine.model.arenas)
            assert freed >= 0.99 * engine.cache.arena.num_bytes
            assert freed <= 2 * (held + engine.cache.arena.num_bytes) + (64 << 20)
            assert engine.release_memory() == 0
            assert engine.resume_memory() == pytest.approx(freed, rel=0.05, abs=1 << 20)
            assert engine.resume_memory() == 0
            assert self.pointers(engine) == before
            for output, wanted in zip(
                engine.generate(prompts(*LENGTHS), SAMPLED), expected, strict=True
            ):
                assert same(output, wanted)

    def test_one_tag_at_a_time(self, engine: Engine) -> None:
        expected = engine.generate(prompts(*LENGTHS), SAMPLED)
        engine.release_memory(["kv_cache"])
        assert engine.memory.states[MemoryTag.KV_CACHE] is MemoryState.RELEASED
        assert engine.memory.states[MemoryTag.WEIGHTS] is MemoryState.FILLED
        with pytest.raises(ReleasedError, match=r"'kv_cache' was given back; resume_memory"):
            engine.generate(prompts(5), SAMPLED)
        engine.resume_memory(["weights", "kv_cache"])
        for output, wanted in zip(
            engine.generate(prompts(*LENGTHS), SAMPLED), expected, strict=True
        ):
            assert same(output, wanted)

    def test_empty_weights_want_a_full_update(self, engine: Engine, directory: Path) -> None:
        expected = engine.generate(prompts(*LENGTHS), SAMPLED)
        adapter = BundledAdapter(engine)
        adapter.release_memory(["weights"])
        full = update_of(Scope())
        with pytest.raises(ReleasedError, match=r"an update: memory 'weights' was given back"):
            adapter.begin_update(full)
        adapter.resume_memory(["weights"])
        assert engine.memory.states[MemoryTag.WEIGHTS] is MemoryState.EMPTY
        with pytest.raises(ReleasedError, match=r"generating: memory 'weights' is empty"):
            engine.generate(prompts(5), SAMPLED)
        name = next(iter(engine.model.slots.slots))
        with pytest.raises(ReleasedError, match="some weights"):
            adapter.begin_update(update_of(Scope(frozenset({name}))))
        adapter.begin_update(full)
        load_weights(directory, engine.model.slots, engine.model.config)
        adapter.commit(Version("run", 1))
        for output, wanted in zip(
            engine.generate(prompts(*LENGTHS), SAMPLED), expected, strict=True
        ):
            assert same(output, wanted)

    def test_nothing_goes_while_requests_run(self, engine: Engine) -> None:
        submission = engine.submit(prompts(*LENGTHS), SAMPLED)
        for _ in range(3):
            with pytest.raises(BusyError, match="3 requests run or wait"):
                engine.release_memory(["kv_cache"])
            engine.step()
        assert set(engine.memory.states.values()) == {MemoryState.FILLED}
        engine.wait(submission)
        assert engine.release_memory(["kv_cache"]) > 0

    def test_words_that_are_none(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match=r"tag 'wights'.*weights, kv_cache, static"):
            engine.release_memory(["kv_cache", "wights"])
        with pytest.raises(ConfigError, match=r"backup 'disk'.*none, pageable, pinned"):
            engine.release_memory(backups={"weights": "disk"})
        assert set(engine.memory.states.values()) == {MemoryState.FILLED}

    def test_too_little_memory_to_resume(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = engine.generate(prompts(*LENGTHS), SAMPLED)
        engine.release_memory(backups={"weights": Backup.PAGEABLE})
        epoch, backing = engine.memory.epoch, engine.cache.arena.backing
        resume = type(backing).resume

        def failing(self: Backing) -> int:
            if self is backing:
                raise CapacityError("17 are missing")
            return resume(self)

        with monkeypatch.context() as patched:
            patched.setattr(type(backing), "resume", failing)
            with pytest.raises(CapacityError, match="17 are missing"):
                engine.resume_memory()
        assert set(engine.memory.states.values()) == {MemoryState.RELEASED}
        assert engine.memory.epoch == epoch
        engine.resume_memory()
        for output, wanted in zip(
            engine.generate(prompts(*LENGTHS), SAMPLED), expected, strict=True
        ):
            assert same(output, wanted)
