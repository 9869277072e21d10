"""Engines of two ranks over gloo, each rank a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from core_models import make_model, random_tokens, save_model, torch, trained_moe, trained_tiny
from core_runner import Runner, prompt_log_probs
from nursery import fork_with_torch

from engine_adapter.core.model import DecoderModel
from weightsync.layout import Layout, join_layouts
from weightsync.types import Box

LIMIT_S = 60.0


class Ranks:
    """Two processes that hold a rank each."""

    def __init__(self, stack: ExitStack, store: Path) -> None:
        self.children = [stack.enter_context(fork_with_torch("core_rank:serve")) for _ in range(2)]
        for rank, child in enumerate(self.children):
            child.send({"store": str(store), "rank": rank, "size": 2})

    def ask(self, message: Any) -> list[Any]:
        for child in self.children:
            child.send(message)
        return [child.receive(LIMIT_S) for child in self.children]

    def load(self, directory: Path, tp_size: int = 1, ep_size: int = 1) -> list[Layout]:
        task = {"directory": str(directory), "tp_size": tp_size, "ep_size": ep_size}
        return [Layout.from_json(answer) for answer in self.ask({"load": task})]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ExitStack() as stack:
        found = Ranks(stack, tmp_path_factory.mktemp("ranks") / "store")
        yield found
        assert found.ask("stop") == ["stopped"] * 2
        assert [child.wait() for child in found.children] == [0, 0]


CASES = [
    ("dense", 2, 1), ("tied", 2, 1), ("llama", 2, 1), ("mqa", 2, 1), ("moe", 2, 1),
    ("moe-mixed", 1, 2), ("moe", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "tp_size", "ep_size"), CASES)
def test_ranks_compute_what_one_rank_computes(
    ranks: Ranks, variant: str, tp_size: int, ep_size: int, tmp_path: Path
) -> None:
    # fp32, so that what differs is a mistake and not rounding.
    directory = save_model(make_model(variant, torch.float32), tmp_path)
    one = Runner(DecoderModel.from_pretrained(directory))
    layouts = ranks.load(directory, tp_size, ep_size)
    assert_every_element_is_held(layouts, one.model.slots.layout())
    tokens = random_tokens(37)
    for rows in ({"a": tokens[:20], "b": tokens[5:12]}, {"a": tokens[20:]}):
        wanted = one.step(rows)
        first, second = ranks.ask({"step": rows})
        assert first == second
        for name, logits in wanted.items():
            log_probs = prompt_log_probs(logits, rows[name])
            assert first[name]["log_probs"] == pytest.approx(log_probs, abs=1e-3)
            assert first[name]["greedy"] == logits.argmax(-1).tolist()


def assert_every_element_is_held(layouts: list[Layout], whole: Layout) -> None:
    joined = join_layouts(layouts)
    assert set(joined.index) == set(whole.index)
    for tensor in joined.tensors:
        left = [Box.whole(tensor.shape)]
        for placed in tensor.placed:
            left = [rest for box in left for rest in box.subtract(placed.box)]
        assert not left, tensor.name


@pytest.mark.timeout(600)  # trains the model if nobody has yet
@pytest.mark.parametrize("split", ["tp", "ep"])
def test_two_ranks_answer_as_one_on_the_trained_model(
    ranks: Ranks, split: str, tmp_path: Path
) -> None:
    directory = trained_tiny() if split == "tp" else trained_moe(tmp_path)
    one = Runner(DecoderModel.from_pretrained(directory))
    assert one.model.dtype is torch.bfloat16
    problems = {
        "47+85=231": [0, 5, 8, 11, 9, 6, 12, 3, 4, 2],
        "12+34=640": [0, 2, 3, 11, 4, 5, 12, 7, 5, 1],
    }
    wanted = one.step(problems)
    ranks.load(directory, **{f"{split}_size": 2})
    first, second = ranks.ask({"step": problems})
    assert first == second
    for name, tokens in problems.items():
        log_probs = prompt_log_probs(wanted[name], tokens)
        assert first[name]["log_probs"][-3:] == pytest.approx(log_probs[-3:], abs=2e-2)
        assert min(log_probs[-3:]) > -0.5  # it knows the answers
        assert first[name]["greedy"][-4:] == wanted[name].argmax(-1).tolist()[-4:]


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    directory = save_model(make_model("dense", torch.float32), tmp_path / "model")
    with ExitStack() as stack:
        ranks = Ranks(stack, tmp_path / "store")
        ranks.load(directory, tp_size=2)
        ranks.ask({"step": {"a": [1, 2, 3]}})
        ranks.children[1].kill()
        ranks.children[0].send({"step": {"a": [4]}})
        answer = ranks.children[0].receive(LIMIT_S)
    assert answer["error"].startswith("PeerLostError: all_gather over 2 ranks")
    assert "rank 1 of the engine is gone or stuck: restart the engine" in answer["error"]
