"""A serving engine under traffic, refitted by a sender: helpers for tests of updates."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from core_engines import log_probs, params, prompts

from engine_adapter.bundled import BundledAdapter
from engine_adapter.core.engine import Engine
from engine_adapter.core.request import RequestOutput
from weightsync.receiver import Receiver, ReceiverHooks
from weightsync.sender import Sender

LIMIT_S = 60.0
OPTIONS: dict[str, Any] = {"transport": "loopback", "bucket": "64KiB", "deadline_s": LIMIT_S}
#: Within a page, several pages, and the border of one.
LENGTHS = (5, 16, 40, 1)


class Traffic:
    """Threads that ask for the same prompts over and over until told to stop."""

    def __init__(self, engine: Engine, *, max_tokens: int = 24, num_threads: int = 2) -> None:
        self.outputs: list[RequestOutput] = []
        self.errors: list[BaseException] = []
        self._engine, self._params = engine, params(max_tokens=max_tokens, temperature=0.0)
        self._is_stopping = threading.Event()
        self._grown = threading.Condition()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_threads)]

    def _ask(self) -> None:
        while not self._is_stopping.is_set():
            try:
                found = self._engine.generate(prompts(*LENGTHS), self._params, limit_s=LIMIT_S)
            except Exception as error:
                self.errors.append(error)
                return
            with self._grown:
                self.outputs += found
                self._grown.notify_all()

    def wait_for(self, count: int) -> None:
        """Until ``count`` more outputs are there."""
        with self._grown:
            wanted = len(self.outputs) + count
            assert self._grown.wait_for(
                lambda: len(self.outputs) >= wanted or bool(self.errors), timeout=LIMIT_S
            )

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in self._threads)


@contextmanager
def refitted(
    engine: Engine, hooks: ReceiverHooks | None = None, **options: Any
) -> Iterator[Sender]:
    """A sender to an engine that serves on its own thread."""
    with (
        engine,
        Receiver(BundledAdapter(engine), hooks=hooks) as receiver,
        Sender.connect([receiver.url], **{**OPTIONS, **options}) as sender,
    ):
        yield sender


def refit(sender: Sender, version: int, source: Any, scope: Sequence[str] | None = None) -> None:
    with sender.update(version=version, scope=scope) as update:
        update.send(source)


def spans_of(output: RequestOutput) -> list[tuple[int | None, int, int]]:
    """(version number, first token, end) of each version span."""
    return [
        (None if s.version is None else s.version.number, s.first, s.end)
        for s in output.version_spans
    ]


def assert_scored_alike(output: RequestOutput, span: tuple[int, int], engine: Engine) -> None:
    """The log-probs of an output's tokens are those that ``engine`` gives them, bit for bit."""
    first, end = span
    num_prompt = len(output.prompt_token_ids)
    (scored,) = engine.score([[*output.prompt_token_ids, *output.token_ids[:end]]])
    assert log_probs(scored)[num_prompt - 1 + first :] == log_probs(output)[first:end]
