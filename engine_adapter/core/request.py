"""A request on its way through the engine, and what is said about it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine_adapter.core.pages import WeightVersion
from engine_adapter.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    SCORED = "scored"  # all given tokens have their log-probs
    ABORTED = "aborted"
    FAILED = "failed"  # ``error`` says why


class RequestState(StrEnum):
    """Where a request is."""

    WAITING = "waiting"  # holds no pages
    RUNNING = "running"
    FINISHED = "finished"


class RequestKind(StrEnum):
    """What is wanted of a request."""

    GENERATE = "generate"
    SCORE = "score"  # log-probs of the prompt's own tokens


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens ``first`` .. ``end`` - 1, and the version of the weights that made them."""

    version: WeightVersion
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """What is known of one token. Natural logarithms, fp32 log-softmax over the vocabulary.

    ``log_prob`` is before temperature and filters; ``tempered`` after temperature (equal to it
    where the temperature is 0 or 1), before filters. ``top`` lists (token, log_prob), likeliest first.
    """

    token: int
    log_prob: float
    tempered: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One finished sample. Token ranges of spans count output tokens, from 0."""

    request_id: str
    sample_index: int  # of n
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    log_probs: tuple[TokenLogProbs, ...]
    finish_reason: FinishReason
    stopped_by: str | int | None  # the stop string or token
    error: str | None
    seed: int
    version_at_admission: WeightVersion
    version_spans: tuple[VersionSpan, ...]
    has_stale_kv: bool  # a token was made from KV that is older than the weights of its step
    num_cached_tokens: int  # of the prompt, found in the prefix cache at first admission
    num_retracted: int  # times that its KV was dropped and computed again


@dataclass(eq=False)
class Request:
    """State of one sample inside the engine. Only the scheduler moves it; see the verbs there."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    kind: RequestKind = RequestKind.GENERATE
    sample_index: int = 0
    leader: Request | None = None  # the sample whose prefill this one waits for, to share its pages
    eos_token_ids: tuple[int, ...] = ()

    state: RequestState = RequestState.WAITING
    results: list[TokenLogProbs] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV is in the cache
    kv_spans: list[VersionSpan] = field(default_factory=list)  # of those
    chain: list[bytes] = field(default_factory=list)  # keys of its full pages so far
    version_at_admission: WeightVersion = None
    was_admitted: bool = False
    has_stale_kv: bool = False
    num_cached_tokens: int = 0
    num_retracted: int = 0
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to compute; the last of a score is only predicted."""
        if self.kind is RequestKind.SCORE:
            return len(self.prompt_ids) - 1
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Tokens that would end it before ``min_tokens``."""
        if len(self.output_ids) >= self.params.min_tokens:
            return ()
        return self.stop_token_ids

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return (*self.params.stop_tokens, *eos)

    def tokens(self, first: int, end: int) -> list[int]:
        """Tokens ``first`` .. ``end`` - 1 of prompt and output together."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[first:end]
        if first >= num_prompt:
            return self.output_ids[first - num_prompt : end - num_prompt]
        return self.prompt_ids[first:] + self.output_ids[: end - num_prompt]

    def wanted_rows(self, count: int) -> range:
        """Of the next ``count`` tokens, those whose logits are wanted, counted from the first."""
        if self.kind is RequestKind.SCORE:  # row p predicts token p + 1; what is reported stays
            return range(max(0, len(self.results) - self.num_computed), count)
        is_last = count == self.num_uncomputed
        return range(count - 1, count) if is_last else range(0)

    def add_kv(self, count: int, version: WeightVersion) -> None:
        """KV of the next ``count`` tokens is in the cache, computed under ``version``."""
        extend_spans(self.kv_spans, count, version)
        self.num_computed += count

    def add_result(self, result: TokenLogProbs, version: WeightVersion) -> None:
        """A token was made (or scored) by a step under ``version``."""
        self.results.append(result)
        extend_spans(self.spans, 1, version)
        if any(span.version != version for span in self.kv_spans):
            self.has_stale_kv = True
        if self.kind is RequestKind.GENERATE:
            self.output_ids.append(result.token)

    def drop_kv(self) -> None:
        self.pages, self.chain, self.kv_spans, self.num_computed = [], [], [], 0

    def output(self, text: str | None = None) -> RequestOutput:
        """What is said about it; it is finished."""
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.request_id!r} is not finished")
        return RequestOutput(
            request_id=self.request_id,
            sample_index=self.sample_index,
            prompt_token_ids=tuple(self.prompt_ids),
            token_ids=tuple(self.output_ids),
            text=text,
            log_probs=tuple(self.results),
            finish_reason=self.finish_reason,
            stopped_by=self.stopped_by,
            error=self.error,
            seed=self.seed,
            version_at_admission=self.version_at_admission,
            version_spans=tuple(self.spans),
            has_stale_kv=self.has_stale_kv,
            num_cached_tokens=self.num_cached_tokens,
            num_retracted=self.num_retracted,
        )


def extend_spans(spans: list[VersionSpan], count: int, version: WeightVersion) -> None:
    """``count`` more tokens under ``version``: the last span grows, or a new one begins."""
    first = spans[-1].end if spans else 0
    if count < 1:
        return
    if spans and spans[-1].version == version:
        spans[-1] = VersionSpan(version, spans[-1].first, first + count)
    else:
        spans.append(VersionSpan(version, first, first + count))
