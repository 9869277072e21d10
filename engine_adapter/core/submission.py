"""What a caller holds of the requests that it submitted together."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

from engine_adapter.core.request import (
    FinishReason,
    Request,
    RequestKind,
    RequestOutput,
    TokenLogProbs,
)
from engine_adapter.core.text import TextStream, Tokenizer

#: Why a request ends now, and by which stop string or token; None: it goes on.
Ending = tuple[FinishReason, str | int | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """What one step added to a sample; the last chunk of a sample carries its whole output."""

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    text: str  # new text that no stop string can cut any more; empty without a tokenizer
    log_probs: tuple[TokenLogProbs, ...]
    output: RequestOutput | None = None


@dataclass(eq=False)
class Submission:
    """Samples of one call; ``is_done`` is set when all have ended."""

    samples: list[Sample] = field(default_factory=list)
    chunks: SimpleQueue[StreamChunk] | None = None  # of a stream
    is_done: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(
        cls, requests: list[Request], tokenizer: Tokenizer | None, *, is_stream: bool
    ) -> Submission:
        """For new requests; a stream gets a chunk a step."""
        submission = cls(chunks=SimpleQueue() if is_stream else None)
        for request in requests:
            needs_text = is_stream or request.params.stop_strings
            text = None
            if tokenizer is not None and needs_text and request.kind is RequestKind.GENERATE:
                text = TextStream(tokenizer, request.params.stop_strings)
            submission.samples.append(Sample(request, submission, tokenizer, text))
        if not requests:
            submission.is_done.set()
        return submission

    def outputs(self) -> list[RequestOutput]:
        """Of all samples, in the order of submission; all have ended."""
        return [sample.output for sample in self.samples if sample.output is not None]


@dataclass(eq=False)
class Sample:
    """A request, and what its caller has seen of it."""

    request: Request
    submission: Submission
    tokenizer: Tokenizer | None
    text: TextStream | None  # kept token by token only where a stop string or a stream needs it
    output: RequestOutput | None = None
    _num_sent: int = 0  # results
    _num_sent_characters: int = 0

    def ending(self, token: int) -> Ending:
        """Whether the request ends with its newest ``token``."""
        request, params = self.request, self.request.params
        if request.kind is RequestKind.SCORE:
            is_last = len(request.results) == request.num_tokens
            return (FinishReason.SCORED, None) if is_last else None
        may_stop = len(request.output_ids) > params.min_tokens
        if may_stop and token in request.stop_token_ids:
            return FinishReason.STOP_TOKEN, token
        if self.text is not None:
            stop = self.text.push(token, may_stop=len(request.output_ids) >= params.min_tokens)
            if stop is not None:
                return FinishReason.STOP_STRING, stop
        if len(request.output_ids) >= request.max_tokens:
            return FinishReason.LENGTH, None
        return None

    def settle(self) -> None:
        """After a step: make the output if it ended, and send what is new into a stream."""
        if self.output is not None:
            return
        if self.request.is_finished:
            self.output = self.request.output(self._whole_text())
        if self.submission.chunks is not None:
            self.submission.chunks.put(self._next_chunk())
        if self.output is not None and all(s.output for s in self.submission.samples):
            self.submission.is_done.set()

    def _whole_text(self) -> str | None:
        request = self.request
        if self.tokenizer is None or request.kind is RequestKind.SCORE:
            return None
        if self.text is not None:
            return self.text.finish()
        has_stop_token = request.finish_reason is FinishReason.STOP_TOKEN
        return self.tokenizer.decode(request.output_ids[: -1 if has_stop_token else None])

    def _next_chunk(self) -> StreamChunk:
        results = self.request.results[self._num_sent :]
        text = ""
        if self.text is not None:
            settled = self.text.text if self.output is not None else self.text.settled
            text = settled[self._num_sent_characters :]
        self._num_sent += len(results)
        self._num_sent_characters += len(text)
        return StreamChunk(
            request_id=self.request.request_id,
            sample_index=self.request.sample_index,
            token_ids=tuple(result.token for result in results),
            text=text,
            log_probs=tuple(results),
            output=self.output,
        )
