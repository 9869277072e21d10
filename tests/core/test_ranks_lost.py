"""A rank that is killed or stopped in the middle of a decode step of an engine of two, over gloo."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from core_engines import params, prompts, small_engine, small_model
from nursery import fork_with_torch
from processes import Child

#: The group's own limit, by which a rank that stands still is lost.
GROUP_S = 3.0
NOTICED_S = 4 * GROUP_S
LIMIT_S = 60.0
NUM_STEPS = 6
MAX_TOKENS = [3, 40, 40]  # the first has ended by then

drivers = pytest.mark.parametrize("is_started", [True, False], ids=["thread", "caller"])


class Ranks:
    def __init__(self, stack: ExitStack, store: Path, directory: Path) -> None:
        self.children: list[Child] = []
        for rank in range(2):
            child = stack.enter_context(fork_with_torch("core_engine_rank:serve"))
            task = {"store": str(store), "rank": rank, "directory": str(directory)}
            child.send({**task, "timeout_s": GROUP_S})
            self.children.append(child)
        assert [child.receive(LIMIT_S) for child in self.children] == ["ready"] * 2

    def fall(self, rank: int, number: int, is_started: bool) -> Child:
        """All decode until one falls; the other."""
        command = {
            "do": "fall", "rank": rank, "signal": number, "num_steps": NUM_STEPS,
            "prompts": prompts(5, 30, 17), "max_tokens": MAX_TOKENS, "is_started": is_started,
        }  # fmt: skip
        for child in self.children:
            child.send(command)
        return self.children[1 - rank]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"), "float32")


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    asked = [params(temperature=0.0, max_tokens=n) for n in MAX_TOKENS]
    outputs = small_engine(directory).generate(prompts(5, 30, 17), asked)
    return [list(output.token_ids) for output in outputs]


@pytest.fixture
def ranks(directory: Path, tmp_path: Path) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack, tmp_path / "store", directory)


def assert_said(answer: Any, expected: list[list[int]], lost: int) -> None:
    """What there was is right, the rest has failed, and both calls named the rank."""
    tokens = [output["tokens"] for output in answer["outputs"]]
    assert tokens[0] == expected[0]
    for found, wanted in zip(tokens[1:], expected[1:], strict=True):
        assert found == wanted[:NUM_STEPS]
    assert answer["streamed"] == tokens
    assert [output["reason"] for output in answer["outputs"]] == ["length", "failed", "failed"]
    assert answer["errors"][0] is None
    assert len(answer["raised"]) == 2
    for text in (*answer["errors"][1:], *answer["raised"]):
        assert f"rank {lost} of the engine is gone or stuck: restart the engine" in text
    assert answer["num_held_pages"] == 0


def assert_ends(child: Child) -> None:
    child.send("stop")
    assert child.receive(LIMIT_S) == "stopped"
    assert child.wait() == 0


@drivers
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_decode_step(
    ranks: Ranks, expected: list[list[int]], rank: int, is_started: bool
) -> None:
    other = ranks.fall(rank, signal.SIGKILL, is_started)
    assert ranks.children[rank].wait() == -signal.SIGKILL
    assert_said(other.receive(NOTICED_S), expected, rank)
    assert_ends(other)


@drivers
def test_a_rank_that_stands_still_in_a_decode_step(
    ranks: Ranks, expected: list[list[int]], is_started: bool
) -> None:
    """It is lost once the group's limit is over; when it wakes, the other is what it has lost."""
    stopped = ranks.children[1]
    other = ranks.fall(1, signal.SIGSTOP, is_started)
    stopped.wait_stopped(LIMIT_S)
    assert_said(other.receive(NOTICED_S), expected, 1)
    assert_ends(other)
    stopped.resume()
    assert_said(stopped.receive(NOTICED_S), expected, 0)
    assert_ends(stopped)
