"""New weights for an engine of two processes under traffic: each rank gets its boxes, and all of them turn
at the same step."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from core_engines import log_probs, params, prompts, small_engine
from core_models import make_model, save_model, torch
from nursery import fork_with_torch

from weightsync.digest import digest_tensors
from weightsync.errors import UpdateFailedError
from weightsync.naming import module_tensors, rules_for
from weightsync.sender import Sender
from weightsync.transports import get_transport

LIMIT_S = 60.0
SPLITS = {"tp": ("dense", {"tp_size": 2}), "ep": ("moe", {"ep_size": 2})}
OPTIONS: dict[str, Any] = {"bucket": "64KiB", "deadline_s": LIMIT_S, "commit_timeout_s": LIMIT_S}
TRANSPORTS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not get_transport(name).capabilities().is_usable, reason=f"{name} cannot be used here"
        ),
    )
    for name in ("ipc", "p2p")
]


class Engine:
    """Two ranks in processes of their own, behind a receiver."""

    def __init__(self, stack: ExitStack, root: Path, split: str) -> None:
        variant, sizes = SPLITS[split]
        self.models = {
            n: make_model(variant, torch.float32, seed) for n, seed in (("A", 0), ("B", 1))
        }
        self.directories = {n: save_model(m, root / n) for n, m in self.models.items()}
        self.children = [
            stack.enter_context(fork_with_torch("core_engine_rank:serve")) for _ in range(2)
        ]
        for rank, child in enumerate(self.children):
            child.send(
                {
                    "store": str(root / "store"), "rank": rank,
                    "directory": str(self.directories["A"]), "split": sizes,
                }
            )  # fmt: skip
        assert self._receive() == ["ready"] * 2
        self.version = 0

    def ask(self, **message: Any) -> list[Any]:
        for child in self.children:
            child.send(message)
        return self._receive()

    def _receive(self) -> list[Any]:
        return [child.receive(LIMIT_S) for child in self.children]

    def expected(self, name: str) -> Mapping[str, int]:
        model = self.models[name]
        return digest_tensors(module_tensors(model, rules_for(model)).named)


@pytest.fixture(scope="module", params=list(SPLITS))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with ExitStack() as stack:
        found = Engine(stack, tmp_path_factory.mktemp(request.param), request.param)
        yield found
        for child in found.children:
            child.send("stop")
        assert [child.receive(LIMIT_S) for child in found.children] == ["stopped"] * 2


def assert_holds(engine: Engine, name: str) -> None:
    """Each tensor is whole on every rank that has it, or its parts add up."""
    looked = engine.ask(do="weights")
    assert [found["moved"] for found in looked] == [[], []]
    for tensor, whole in engine.expected(name).items():
        parts = [int(f["digests"][tensor], 16) for f in looked if tensor in f["digests"]]
        assert parts, tensor
        assert set(parts) == {whole} or sum(parts) % 2**64 == whole, tensor


@pytest.mark.parametrize("placement", ["staged", "in_place"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_there_and_back_under_traffic(engine: Engine, transport: str, placement: str) -> None:
    asked = prompts(5, 30)
    url, _ = engine.ask(do="open")
    first = engine.version
    with Sender.connect([url], transport=transport, placement=placement, **OPTIONS) as sender:
        for child in engine.children:
            child.send({"do": "traffic", "prompts": asked, "until": first + 4})
        for step, name in enumerate(("A", "B", "A", "B"), start=1):
            with sender.update(version=first + step) as update:
                update.send(engine.models[name])
            threading.Event().wait(0.1)  # so that something is generated in between
        said, other = engine._receive()
        assert said == other, "both ranks say the same"
        versions = {span[0] for output in said for span in output["spans"]}
        assert len(versions) > 1, "nothing was generated while weights changed"
        assert_holds(engine, "B")
        now, other = engine.ask(do="generate", prompts=asked)
        assert now == other
        with sender.update(version=first + 5) as update:
            update.send(engine.models["A"])
        assert_holds(engine, "A")
    engine.ask(do="close")
    engine.version = first + 5
    fresh = small_engine(engine.directories["B"]).generate(asked, params(temperature=0.0))
    for found, wanted in zip(now, fresh, strict=True):
        assert found["tokens"] == list(wanted.token_ids)
        assert found["spans"] == [[first + 4, 0, len(found["tokens"])]]
        assert found["log_probs"] == pytest.approx(log_probs(wanted), abs=2e-2)


def test_a_rank_that_fails_leaves_both_as_they_were(engine: Engine) -> None:
    """A tensor of a wrong shape for one rank only cannot be; a scope that is not sent can."""
    url, _ = engine.ask(do="open")
    with Sender.connect([url], transport="ipc", **OPTIONS) as sender:
        named = dict(module_tensors(engine.models["B"], rules_for(engine.models["B"])).named)
        missing = next(n for n in named if "down_proj" in n)
        del named[missing]
        with pytest.raises(UpdateFailedError, match="were not sent"), sender.update(50) as update:
            update.send(named)
        assert_holds(engine, "A")
        with sender.update(version=51) as update:
            update.send(engine.models["A"])
        first, second = engine.ask(do="traffic", prompts=prompts(5), until=51)
        assert first == second
    engine.ask(do="close")
