"""An engine of two ranks on two GPUs: NCCL for sums and gathers, in graphs too, and gloo for agreeing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from core_engines import params, prompts, small_engine, small_model
from core_models import trained_moe, trained_tiny
from processes import Child
from transports.test_ipc_cuda_memory import visible_name

from engine_adapter.core.text import load_tokenizer
from weightsync import native

pytestmark = pytest.mark.gpu

LIMIT_S = 60.0
#: Each process shows its own GPU alone.
ON_CUDA = {"device": "cuda:0", "attention": "paged", "kv_cache_tokens": 8192}

Start = Callable[..., "Ranks"]


class Ranks:
    """Two processes that hold a rank each."""

    def __init__(
        self, stack: ExitStack, store: Path, directory: Path, split: Any, **settings: Any
    ) -> None:
        env = {"NCCL_GRAPH_REGISTER": "0"}
        self.children = [
            stack.enter_context(
                Child("core_engine_rank:serve", {**env, "CUDA_VISIBLE_DEVICES": visible_name(rank)})
            )
            for rank in range(2)
        ]
        for rank, child in enumerate(self.children):
            task = {"store": str(store), "rank": rank, "directory": str(directory), "split": split}
            child.send(
                {**task, "backend": "cpu:gloo,cuda:nccl", "settings": {**ON_CUDA, **settings}}
            )
        assert self._receive() == ["ready"] * 2

    def ask(self, message: Any) -> list[Any]:
        for child in self.children:
            child.send(message)
        return self._receive()

    def _receive(self) -> list[Any]:
        return [child.receive(LIMIT_S) for child in self.children]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    if native.extension.cuda_num_devices() < 2:
        pytest.skip("needs two GPUs")
    with ExitStack() as stack:

        def begin(directory: Path, split: dict[str, int], **settings: Any) -> Ranks:
            store = tmp_path / f"store-{len(list(tmp_path.glob('store-*')))}"
            return Ranks(stack, store, directory, split, **settings)

        yield begin


TP, EP = {"tp_size": 2}, {"ep_size": 2}


@pytest.mark.parametrize(
    ("variant", "split"),
    [("dense", TP), ("tied", TP), ("mqa", TP), ("moe", EP), ("moe", {**TP, **EP})],
)
def test_two_gpus_generate_what_one_does(
    start: Start, variant: str, split: dict[str, int], tmp_path: Path
) -> None:
    # fp32, so that what differs is a mistake and not rounding.
    directory = small_model(tmp_path / "model", "float32", variant)
    ranks = start(directory, split)
    asked = prompts(5, 30, 17)
    first, second = ranks.ask({"do": "generate", "prompts": asked})
    assert first == second
    one = small_engine(directory, **ON_CUDA).generate(asked, params(temperature=0.0))
    for found, wanted in zip(first, one, strict=True):
        assert found["tokens"] == list(wanted.token_ids)
        logs = [result.log_prob for result in wanted.log_probs]
        assert found["log_probs"] == pytest.approx(logs, abs=1e-3)
    assert ranks.ask("stop") == ["stopped"] * 2


def test_ranks_pause_after_the_same_step(start: Start, tmp_path: Path) -> None:
    ranks = start(small_model(tmp_path / "model"), TP)
    first, second = ranks.ask({"do": "update", "prompts": prompts(5, 30, 17)})
    assert first == second
    assert all(found["reason"] == "length" for found in first)
    assert ranks.ask("stop") == ["stopped"] * 2


@pytest.mark.parametrize("split", [TP, EP], ids=str)
def test_a_trained_model_answers_the_same(
    start: Start, split: dict[str, int], tmp_path: Path
) -> None:
    directory = trained_tiny() if split is TP else trained_moe(tmp_path / "model")
    one = small_engine(directory, **ON_CUDA)
    tokenizer = load_tokenizer(trained_tiny())
    assert tokenizer is not None
    asked = [
        tokenizer.encode(f"{left:02}+{right:02}=") for left in (3, 29, 68) for right in (1, 58)
    ]
    first, second = start(directory, split).ask({"do": "generate", "prompts": asked})
    assert first == second
    wanted = one.generate(asked, params(temperature=0.0))
    # The answer; what comes after an end that is ignored was never trained.
    assert [o["tokens"][:3] for o in first] == [list(o.token_ids)[:3] for o in wanted]


@pytest.mark.parametrize(("variant", "split"), [("dense", TP), ("moe", EP)])
def test_graphs_give_the_bits_of_eager_steps(
    start: Start, variant: str, split: dict[str, int], tmp_path: Path
) -> None:
    directory = small_model(tmp_path / "model", variant=variant)
    asked = {"do": "generate", "prompts": prompts(5, 30, 17, 9, 3)}
    said = {}
    for decode in ("graphs", "eager"):
        ranks = start(directory, split, decode=decode)
        assert ranks.ask({"do": "decodes_by"}) == [decode] * 2
        said[decode] = ranks.ask(asked)
        assert ranks.ask("stop") == ["stopped"] * 2
    assert said["graphs"] == said["eager"]
    assert said["graphs"][0] == said["graphs"][1]


def test_memory_goes_and_comes_back_under_graphs(start: Start, tmp_path: Path) -> None:
    ranks = start(small_model(tmp_path / "model"), TP, memory="releasable", decode="graphs")
    asked = {"do": "generate", "prompts": prompts(5, 30, 17)}
    before = ranks.ask(asked)
    assert all(freed > 0 for freed in ranks.ask({"do": "release"}))
    assert all(taken > 0 for taken in ranks.ask({"do": "resume"}))
    assert ranks.ask(asked) == before
    assert ranks.ask("stop") == ["stopped"] * 2


def test_sums_by_mailboxes_are_those_of_gathered_parts(start: Start, tmp_path: Path) -> None:
    ranks = start(small_model(tmp_path / "model"), TP)
    for found in ranks.ask({"do": "sums"}):
        assert found.keys() == {"torch.bfloat16", "torch.float32", "torch.float16"}
        assert all(equal == by_mailbox == 40 for equal, by_mailbox in found.values())
    assert ranks.ask("stop") == ["stopped"] * 2


def test_a_sum_without_the_other_rank_is_nan_for_both(start: Start, tmp_path: Path) -> None:
    first, second = start(small_model(tmp_path / "model"), TP).children
    for child in (first, second):  # one after the other
        child.send({"do": "lone_sum"})
        assert child.receive(LIMIT_S) is True
