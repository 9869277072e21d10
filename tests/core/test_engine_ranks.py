"""An engine of two ranks: what one rank generates, at step boundaries common to both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from core_engines import params, prompts, small_engine, small_model
from nursery import fork_with_torch

LIMIT_S = 60.0


class Ranks:
    def __init__(self, stack: ExitStack, store: Path, directory: Path) -> None:
        self.children = [
            stack.enter_context(fork_with_torch("core_engine_rank:serve")) for _ in range(2)
        ]
        for rank, child in enumerate(self.children):
            child.send({"store": str(store), "rank": rank, "directory": str(directory)})
        assert self._receive() == ["ready"] * 2

    def ask(self, message: Any) -> list[Any]:
        for child in self.children:
            child.send(message)
        return self._receive()

    def _receive(self) -> list[Any]:
        return [child.receive(LIMIT_S) for child in self.children]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"), "float32")


@pytest.fixture(scope="module")
def ranks(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ExitStack() as stack:
        found = Ranks(stack, tmp_path_factory.mktemp("ranks") / "store", directory)
        yield found
        assert found.ask("stop") == ["stopped"] * 2
        assert [child.wait() for child in found.children] == [0, 0]


def test_two_ranks_generate_what_one_does(ranks: Ranks, directory: Path) -> None:
    asked = prompts(5, 30, 17)
    first, second = ranks.ask({"do": "generate", "prompts": asked})
    assert first == second
    one = small_engine(directory).generate(asked, params(temperature=0.0))
    for found, wanted in zip(first, one, strict=True):
        assert found["tokens"] == list(wanted.token_ids)
        logs = [result.log_prob for result in wanted.log_probs]
        assert found["log_probs"] == pytest.approx(logs, abs=2e-2)


def test_ranks_pause_after_the_same_step(ranks: Ranks, directory: Path) -> None:
    asked = prompts(5, 30, 17)
    for _ in range(3):
        first, second = ranks.ask({"do": "update", "prompts": asked})
        assert first == second
        assert all(found["reason"] == "length" for found in first)


def test_if_one_rank_refuses_all_do_and_can_go_on(ranks: Ranks) -> None:
    first, second = ranks.ask({"do": "refuse", "prompts": prompts(5)})
    assert "rank 1 of the engine refuses" in first
    assert "an update failed" in second
    first, second = ranks.ask({"do": "generate", "prompts": prompts(5)})
    assert first == second
    assert first[0]["reason"] == "length"
