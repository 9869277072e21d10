"""The bundled core as the engine of ``bench``: it generates while it is refitted."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightsync.cli.bench_model import ModelChoice
from weightsync.errors import ConfigError

_MAX_CONTEXT = 64  # tokens of a request of the traffic
_PROMPT_TOKENS = 16
_NUM_PROMPTS = 8  # at a time
_STOP_LIMIT_S = 60.0


def open_engine(choice: ModelChoice, mask: int) -> Any:
    """The core over the model's directory; a ``mask`` above 0 makes its weights other ones."""
    from engine_adapter.core.engine import Engine

    if choice.directory is None:
        raise ConfigError(
            f"model {choice.name!r} is drawn in memory and has no directory; --engine core loads one"
        )
    engine = Engine.from_pretrained(
        Path(choice.directory),
        kv_cache_tokens=2 * _NUM_PROMPTS * _MAX_CONTEXT,
        max_context=_MAX_CONTEXT,
        max_running=2 * _NUM_PROMPTS,
    )
    if mask:
        flip_bits(engine.model, mask)
    return engine


def flip_bits(model: Any, mask: int) -> None:
    """Other weights in every slot, finite and near."""
    import torch

    bits = {2: torch.int16, 4: torch.int32}
    for storage in model.slots.storages.values():
        storage.view(bits[storage.element_size()]).bitwise_xor_(mask)


@dataclass
class Traffic:
    """One thread that asks for ``_NUM_PROMPTS`` random prompts over and over."""

    engine: Any
    num_tokens: int = 0
    num_requests: int = 0
    versions: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_stopping = threading.Event()
        self._asked: Any = None  # what is in flight
        self._start_s = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from engine_adapter.core.sampling_params import SamplingParams

        asked = 0
        while not self._is_stopping.is_set() and not self.failures:
            params = SamplingParams(
                max_tokens=_MAX_CONTEXT - _PROMPT_TOKENS, ignore_eos=True, seed=asked
            )
            try:
                self._asked = self.engine.submit(self._prompts(asked), params)
                if self._is_stopping.is_set():
                    self.engine.abort(self._asked)
                outputs = self.engine.wait(self._asked)
            except Exception as error:  # shown in the result: what users of the engine would see
                self.failures.append(f"{type(error).__name__}: {error}")
                return
            asked += 1
            self.num_requests += len(outputs)
            self.num_tokens += sum(len(output.token_ids) for output in outputs)
            spans = (span for output in outputs for span in output.version_spans)
            self.versions |= {s.version.number for s in spans if s.version is not None}

    def _prompts(self, seed: int) -> list[list[int]]:
        import torch

        vocab = self.engine.model.config.vocab_size
        generator = torch.Generator().manual_seed(seed)
        shape = (_NUM_PROMPTS, _PROMPT_TOKENS)
        return torch.randint(vocab, shape, generator=generator).tolist()

    def stop(self) -> dict[str, Any]:
        """End the requests in flight; what was seen, under stable names."""
        self._is_stopping.set()
        if self._asked is not None:
            self.engine.abort(self._asked)
        self._thread.join(_STOP_LIMIT_S)
        if self._thread.is_alive():
            self.failures.append(f"requests did not end within {_STOP_LIMIT_S:.0f} s")
        return {
            "num_requests": self.num_requests,
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / (time.perf_counter() - self._start_s),
            "versions": sorted(self.versions),
            "failures": self.failures,
        }
