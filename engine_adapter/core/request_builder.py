"""From what a caller passes to requests that the scheduler takes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

from engine_adapter.core.plan import SchedulerLimits
from engine_adapter.core.request import Request, RequestKind
from engine_adapter.core.sampling_params import SamplingParams
from engine_adapter.core.text import Tokenizer
from weightsync.errors import ConfigError

#: Text, or token ids.
Prompt = str | Sequence[int]

_NUM_SEEDS = 2**63
_SEED_STRIDE = 0x5851F42D4C957F2D  # odd: seeds that are drawn repeat after 2^63 of them


class RequestBuilder:
    """Names requests, turns text into tokens, draws seeds; the same on every rank of an engine."""

    def __init__(
        self,
        limits: SchedulerLimits,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        seed: int,
    ) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._seed = seed
        self._numbers = itertools.count(1)  # one step of it is atomic: several threads submit

    def build(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """``n`` requests a prompt, in order. Raises :class:`ConfigError` naming the prompt."""
        listed = _prompts(prompts)
        chosen = _params(params, len(listed))
        ids = [self._tokens(prompt, index) for index, prompt in enumerate(listed)]
        requests: list[Request] = []
        for tokens, choice in zip(ids, chosen, strict=True):
            requests.extend(self._samples(tokens, choice))
        return requests

    def build_scores(
        self,
        sequences: Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | None,
    ) -> list[Request]:
        """A request a sequence. Raises :class:`ConfigError` naming the sequence."""
        choice = SamplingParams() if params is None else params
        requests = []
        for index, sequence in enumerate(_prompts(sequences)):
            tokens = self._tokens(sequence, index)
            if len(tokens) < 2:
                raise ConfigError(f"sequence {index} has one token: there is nothing to score")
            name = f"r{next(self._numbers)}"
            requests.append(Request(name, tokens, choice, 0, kind=RequestKind.SCORE))
        return requests

    def _samples(self, tokens: list[int], params: SamplingParams) -> list[Request]:
        self._check_params(params)
        number = next(self._numbers)
        drawn = self._seed + number * _SEED_STRIDE
        seed = drawn if params.seed is None else params.seed
        max_tokens = params.max_tokens
        if max_tokens is None:
            room = min(self._limits.max_context, self._limits.cache_tokens) - len(tokens)
            max_tokens = max(1, room)
        samples: list[Request] = []
        for index in range(params.n):
            samples.append(
                Request(
                    f"r{number}",
                    tokens,
                    params,
                    max_tokens,
                    seed=(seed + index) % _NUM_SEEDS,
                    sample_index=index,
                    leader=samples[0] if samples else None,
                    eos_token_ids=self._eos_token_ids,
                )
            )
        return samples

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop_strings and self._tokenizer is None:
            raise ConfigError(
                f"stop={params.stop_strings}: the model's directory has no tokenizer, so there is "
                "no text; use stop_token_ids"
            )
        for token in params.stop_tokens:
            self._check_token(token, "stop_token_ids")

    def _tokens(self, prompt: Prompt, index: int) -> list[int]:
        if len(prompt) == 0:
            raise ConfigError(f"prompt {index} is empty; give it at least one token")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ConfigError(
                    f"prompt {index} is text and the model's directory has no tokenizer; "
                    "pass token ids"
                )
            return self._tokenizer.encode(prompt)
        for token in prompt:
            self._check_token(token, f"prompt {index}")
        return [int(token) for token in prompt]

    def _check_token(self, token: object, where: str) -> None:
        is_integer = hasattr(token, "__index__") and not isinstance(token, bool)
        if not is_integer or not 0 <= int(cast("int", token)) < self._vocab_size:
            raise ConfigError(
                f"{where}: {token!r} is no token id; the model has 0 to {self._vocab_size - 1}"
            )


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt counts as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(hasattr(item, "__index__") for item in listed):
        return [cast("Prompt", listed)]
    return cast("list[Prompt]", listed)


def _params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts and {len(params)} sampling parameters")
    return list(params)
