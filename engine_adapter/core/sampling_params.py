"""How tokens of a request are chosen, checked when it is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from weightsync.errors import ConfigError

MAX_TOP_LOG_PROBS: Final = 100
GREEDY: Final = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop; raises :class:`ConfigError` naming the field.

    ``temperature`` 0 takes the likeliest token (the lowest id of equal ones). The filters apply in
    the order top_k, top_p, min_p, to probabilities after temperature. Sample i of ``n`` has the
    seed ``seed + i``; without a seed the engine draws one and reports it. ``stop`` strings are cut
    from the text and not from the tokens. ``max_tokens`` None: as many as the context holds.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, relative to the largest
    max_tokens: int | None = 128
    min_tokens: int = 0  # before them neither stop tokens nor strings end the request
    stop: str | Sequence[str] = ()
    stop_token_ids: int | Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    top_log_probs: int = 0  # that many likeliest tokens are reported at each position

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            alone = isinstance(value, str | int)
            object.__setattr__(self, name, (value,) if alone else tuple(value))
        self._check_number("temperature", 0.0, math.inf)
        self._check_number("top_p", 0.0, 1.0, is_open=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_count("top_k", 0)
        self._check_count("min_tokens", 0)
        self._check_count("n", 1)
        self._check_count("top_log_probs", 0, MAX_TOP_LOG_PROBS)
        if self.max_tokens is not None:
            self._check_count("max_tokens", 1)
            if self.min_tokens > self.max_tokens:
                raise _bad("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.seed is not None:
            self._check_count("seed", 0, 2**63 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise _bad("ignore_eos", self.ignore_eos, "true or false")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise _bad("stop", self.stop, "strings that are not empty")
        if not all(_is_count(token) for token in self.stop_tokens):
            raise _bad("stop_token_ids", self.stop_token_ids, "token ids")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From JSON; an unknown name is an error that lists those that are known."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"unknown sampling parameter {name!r}{hint} Known: {', '.join(known)}"
                )
        return cls(**values)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return cast("tuple[int, ...]", self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == GREEDY

    @property
    def has_filter(self) -> bool:
        """Whether some tokens may be ruled out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def _check_number(self, name: str, low: float, high: float, *, is_open: bool = False) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise _bad(name, value, _range(low, high, is_open))
        if is_open and value == low:
            raise _bad(name, value, _range(low, high, is_open))

    def _check_count(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if not _is_count(value) or value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"{low} to {high}"
            raise _bad(name, value, f"an integer, {limit}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _range(low: float, high: float, is_open: bool) -> str:
    if math.isinf(high):
        return f"a finite number, at least {low:g}"
    return f"a number {'above' if is_open else 'from'} {low:g} {'and' if is_open else 'to'} " + (
        f"at most {high:g}" if is_open else f"{high:g}"
    )


def _bad(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"sampling parameter {name}={value!r}: expected {expected}")
