"""Results of steps go to their requests, and what ended goes back to who submitted it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_adapter.core.plan import StepPlan
from engine_adapter.core.request import FinishReason, Request, RequestKind, TokenLogProbs
from engine_adapter.core.scheduler import Scheduler
from engine_adapter.core.submission import Sample, Submission
from weightsync.types import PauseMode


class Ledger:
    """The samples of a scheduler's requests. Used between steps and by their driver only."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._samples: dict[Request, Sample] = {}

    def admit(self, submission: Submission) -> None:
        """Queue all requests of a submission, or none: raises what the scheduler raises."""
        self._scheduler.add_all([sample.request for sample in submission.samples])
        for sample in submission.samples:
            self._samples[sample.request] = sample

    def take(self, plan: StepPlan, results: Sequence[tuple[Request, TokenLogProbs | None]]) -> None:
        """What a step found, in row order."""
        for request, result in results:
            if request.is_finished:  # an earlier row of the same step ended it
                continue
            if result is None:
                self._scheduler.finish(
                    request, FinishReason.FAILED, error=_no_distribution(request, plan)
                )
                continue
            request.add_result(result, plan.version)
            ending = self._samples[request].ending(result.token)
            if ending is not None:
                self._scheduler.finish(request, ending[0], stopped_by=ending[1])
        self._settle(request for request, _ in results)

    def abort(self, requests: Sequence[Request]) -> None:
        """End these; those that have ended stay as they are."""
        for request in requests:
            self._scheduler.abort(request)
        self._settle(requests)

    def fail(self, requests: Sequence[Request], reason: str) -> None:
        """End these, each with its name before ``reason``."""
        for request in requests:
            error = f"request {request.request_id!r}: {reason}"
            self._scheduler.finish(request, FinishReason.FAILED, error=error)
        self._settle(requests)

    def fail_all(self, reason: str) -> None:
        self.fail(list(self._samples), reason)

    def pause(self, mode: PauseMode) -> None:
        self._settle(self._scheduler.pause(mode))

    def _settle(self, requests: Iterable[Request]) -> None:
        for request in dict.fromkeys(requests):
            sample = self._samples.get(request)
            if sample is not None:
                sample.settle()
                if request.is_finished:
                    del self._samples[request]


def _no_distribution(request: Request, plan: StepPlan) -> str:
    is_score = request.kind is RequestKind.SCORE
    position = len(request.results) + 1 if is_score else request.num_tokens
    version = "" if plan.version is None else f", weights of version {plan.version.number}"
    return (
        f"request {request.request_id!r}: the logits for its token {position} hold NaN or infinity "
        f"and no distribution{version}; the weights, or its KV cache, are damaged"
    )
