"""The bundled engine: prompts in, tokens with log-probs out, new weights between two steps.

Two ways to run it. *Embedded*: ``generate``, ``score`` and ``stream`` drive the steps on the
caller's thread; in a trainer's process every rank of the engine makes the same calls in the same
order. *Serving*: ``start`` gives it a thread of its own, and any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from engine_adapter.core.arena import MemoryTag
from engine_adapter.core.boundary import StepBoundary
from engine_adapter.core.decode_graphs import DecodeGraphs, build_decode_steps
from engine_adapter.core.engine_config import AttentionKind, EngineConfig, build_attention
from engine_adapter.core.hold import Hold
from engine_adapter.core.kv_cache import KvCache, KvShape
from engine_adapter.core.ledger import Ledger
from engine_adapter.core.loop import IDLE_S, POLL_S, EngineLoop
from engine_adapter.core.memory import Backup, EngineMemory, MemoryState, arena_parts
from engine_adapter.core.model import DecoderModel
from engine_adapter.core.pages import WeightVersion
from engine_adapter.core.parallel import ALONE, Group
from engine_adapter.core.plan import StepPlan
from engine_adapter.core.products import Products
from engine_adapter.core.request import FinishReason, Request, RequestOutput
from engine_adapter.core.request_builder import Prompt, RequestBuilder
from engine_adapter.core.run_ahead import DecodeRun
from engine_adapter.core.runner import ModelRunner
from engine_adapter.core.sampling_params import SamplingParams
from engine_adapter.core.scheduler import Scheduler
from engine_adapter.core.shards import Shards
from engine_adapter.core.submission import StreamChunk, Submission
from engine_adapter.core.text import Tokenizer, load_tokenizer
from weightsync.deadline import Deadline
from weightsync.errors import (
    BusyError,
    PeerLostError,
    RequestFailedError,
    TaintedError,
)
from weightsync.types import PauseMode

Result = TypeVar("Result")


class Engine:
    """One rank of an engine over ``model``; :meth:`from_pretrained` is the usual way to make one."""

    def __init__(
        self,
        model: DecoderModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        group: Group = ALONE,
    ) -> None:
        self.model = model
        self.config = EngineConfig() if config is None else config
        self.tokenizer = tokenizer
        limits = self.config.limits(model.max_positions)
        shape = KvShape(
            num_layers=model.config.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            page_size=limits.page_size,
        )
        self.cache = KvCache(shape, limits.num_pages, model.device, self.config.memory)
        self.scheduler = Scheduler(limits, prefix_reuse=self.config.prefix_reuse)
        attention = build_attention(self.config.attention, model.device)
        self.runner = ModelRunner(model, self.cache, attention, model.device)
        self.num_steps = 0
        self._group = group
        self._boundary = StepBoundary(None if group.size == 1 else self._agree, self._drain)
        self._builder = RequestBuilder(
            limits, model.config.vocab_size, model.config.eos_token_ids, tokenizer, self.config.seed
        )
        self._ledger = Ledger(self.scheduler)
        if group.size > 1 and model.device.type == "cuda":
            group.open_mailboxes(model.device)
        #: Steps of decoding that the device makes by itself, if there are any.
        self.decode_steps = steps = build_decode_steps(
            self.config, model, self.cache, attention, group
        )
        self._decode = None if steps is None else DecodeRun(steps, self.scheduler, self._ledger)
        parts = arena_parts([*model.arenas, self.cache.arena])
        if isinstance(steps, DecodeGraphs) and steps.pool is not None:
            parts[MemoryTag.CUDA_GRAPH] = steps.pool
        #: What the engine holds, by tag.
        self.memory = EngineMemory(parts)
        self._refusal: str | None = None
        self._agreed_refusal: str | None = None  # of any rank, as of this step
        self._hold = Hold(self._stand_still)
        idle_s = IDLE_S if group.size == 1 else POLL_S
        self._loop = EngineLoop(self.step, self._boundary, self._lose, idle_s)

    @classmethod
    def from_pretrained(
        cls,
        directory: Path | str,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        shards: Shards | None = None,
        group: Group = ALONE,
        **settings: Any,
    ) -> Engine:
        """An engine of a Hugging Face model directory; ``settings`` are those of :class:`EngineConfig`.

        ``dtype`` auto is that of the checkpoint. Raises :class:`ConfigError`, a
        :class:`LayoutError` naming the tensor, or :class:`CapacityError` saying how much memory is
        missing and what to lower.
        """
        config = EngineConfig.parse(settings)
        path = Path(directory).expanduser()
        model = DecoderModel.from_pretrained(
            path,
            dtype=dtype,
            device=device,
            max_positions=config.max_context,
            shards=shards,
            group=group,
            products=_products_for(config.attention),
            memory=config.memory,
        )
        tokenizer = load_tokenizer(path, model.config.bos_token_id)
        return cls(model, config, tokenizer=tokenizer, group=group)

    # --- generating -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        limit_s: float = 3600.0,
    ) -> list[RequestOutput]:
        """Outputs of every sample of every prompt (text or token ids), in order.

        A request that cannot be raises :class:`ConfigError` or :class:`CapacityError` before any of
        them starts. Raises :class:`RequestFailedError`, with all outputs, once all ended and some
        failed; :class:`TaintedError` while the engine refuses; :class:`DeadlineError`.
        """
        submission = self.submit(prompts, params)
        return self.wait(submission, limit_s=limit_s)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        limit_s: float = 3600.0,
    ) -> Iterator[StreamChunk]:
        """Chunks of all samples as steps make them; closing the iterator aborts what still runs.

        Failed requests end with a chunk whose output says so. Raises as :meth:`generate` does.
        """
        submission = self.submit(prompts, params, is_stream=True)
        return self._chunks(submission, Deadline(limit_s, peer="the engine", stage="stream"))

    def score(
        self,
        sequences: Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        limit_s: float = 3600.0,
    ) -> list[RequestOutput]:
        """Log-probs of given tokens, each from those before it, by the kernels that generate.

        ``log_probs[i]`` of an output is that of token i + 1. ``params`` may name a temperature and
        ``top_log_probs``. A generated token scores the bits that ``generate`` reported.
        """
        submission = self._submit(self._builder.build_scores(sequences, params), is_stream=False)
        return self.wait(submission, limit_s=limit_s)

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        is_stream: bool = False,
    ) -> Submission:
        """Queue requests and return at once; hand the result to :meth:`wait`."""
        return self._submit(self._builder.build(prompts, params), is_stream=is_stream)

    def wait(self, submission: Submission, *, limit_s: float = 3600.0) -> list[RequestOutput]:
        """Outputs of a submission; drives the engine unless it has its own thread."""
        deadline = Deadline(limit_s, peer="the engine", stage="generate")
        try:
            while not submission.is_done.is_set():
                self._advance(submission, deadline)
        except BaseException:
            self.abort(submission)
            raise
        outputs = submission.outputs()
        failed = [output for output in outputs if output.finish_reason is FinishReason.FAILED]
        if failed:
            if self._active_refusal is not None:
                raise TaintedError(_refused(self._active_refusal))
            raise RequestFailedError(
                f"{len(failed)} of {len(outputs)} requests failed: {failed[0].error}", outputs
            )
        return outputs

    def abort(self, submission: Submission) -> None:
        """End what still runs of a submission."""
        requests = [sample.request for sample in submission.samples]
        self.at_boundary(lambda: self._ledger.abort(requests))

    # --- updates --------------------------------------------------------------------------------------

    def at_boundary(self, function: Callable[[], Result], *, limit_s: float = 60.0) -> Result:
        """Run ``function`` between two steps, from any thread, and return its result."""
        deadline = Deadline(limit_s, peer="the engine", stage="step boundary")
        return self._boundary.call(function, deadline)

    def pause(self, mode: PauseMode, *, limit_s: float = 60.0) -> None:
        """On return no step runs or will start; requests are dealt with as ``mode`` says.

        Raises :class:`DeadlineError` if the step in progress did not end; the engine then runs on.
        """
        self.at_boundary(lambda: self._ledger.pause(mode), limit_s=limit_s)

    def resume(self) -> None:
        """Leave the pause; harmless when there is none."""
        self.at_boundary(self.scheduler.resume)
        self._boundary.wake()

    def hold(self, mode: PauseMode, deadline: Deadline) -> None:
        """As :meth:`pause`, for whoever changes weights: only :meth:`release` ends it.

        A pause of the user's own is another matter: it may come and go meanwhile, and stays. Of several
        ranks each calls it when it likes; it returns once all have.
        """
        self._hold.wanted = mode
        self._boundary.wake()
        try:
            if self._group.size == 1:
                self._boundary.call(lambda: self._hold.settle(mode, [True]), deadline)
            else:
                self._boundary.until(lambda: self._hold.is_on, deadline)
        except BaseException:
            self.release()
            raise

    def _stand_still(self, mode: PauseMode) -> None:
        was_paused = self.scheduler.is_paused
        self._ledger.pause(mode)
        self.scheduler.is_paused = was_paused

    def while_held(self, function: Callable[[], Result], *, limit_s: float = 60.0) -> Result:
        """Run ``function`` between :meth:`hold` and :meth:`release`; of several ranks each does so by
        itself, and no step sees it before all have released."""
        deadline = Deadline(limit_s, peer="the engine", stage="step boundary")
        return self._boundary.alone(function, deadline)

    def release(self) -> None:
        """End :meth:`hold`, of several ranks once all have; harmless when nothing is held."""
        self._hold.wanted = None
        if self._group.size == 1:
            # At once: a step that hangs must not keep an update from being given up.
            self._hold.settle(None, [False])
        self._boundary.wake()

    def flush_cache(self) -> int:
        """Forget cached prefixes; returns their pages. Refused while requests hold KV."""
        return self.at_boundary(self.scheduler.flush_cache)

    def release_memory(
        self, tags: Sequence[str] = (), backups: Mapping[str, Backup | str] | None = None
    ) -> int:
        """Give the memory of these tags (``weights``, ``kv_cache``, ``static``, ``cuda_graph``; default:
        all) back to the device or the system; returns the bytes that this freed, as measured.

        Addresses stay. ``backups`` says of tags what the host keeps (see :class:`Backup`); what has none
        is empty after :meth:`resume_memory`, and weights then want a full update. What is gone already
        stays gone. Raises :class:`BusyError` while there are requests, :class:`ConfigError` for an
        unknown tag, :class:`UnavailableError` if memory on a GPU is torch's (``memory="plain"``),
        :class:`PeerLostError` if a step on a GPU never ends because another rank is gone.
        """
        return self.at_boundary(lambda: self._release(tags, backups))

    def _release(self, tags: Sequence[str], backups: Mapping[str, Backup | str] | None) -> int:
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        if requests:
            raise BusyError(
                f"release_memory: {len(requests)} requests run or wait (the first: "
                f"{requests[0].request_id!r}); let them end, or pause with abort"
            )
        if isinstance(self.decode_steps, DecodeGraphs):
            self.decode_steps.wait_ended()
        found = self.memory.release(tags, backups)
        if self.memory.states[MemoryTag.KV_CACHE] is MemoryState.RELEASED:
            self.scheduler.flush_cache()
        return found

    def resume_memory(self, tags: Sequence[str] = ()) -> int:
        """Take the memory of these tags (default: all) again, at the same addresses; returns measured
        bytes, 0 for what is there.

        Raises :class:`CapacityError` saying how much is missing; everything is then as it was.
        """
        return self.at_boundary(lambda: self.memory.resume(tags))

    def set_version(self, version: WeightVersion) -> None:
        """What is generated from now on is labelled ``version``; no request is ended by it."""
        self.at_boundary(lambda: self.scheduler.set_version(version))

    @property
    def version(self) -> WeightVersion:
        return self.scheduler.version

    @property
    def is_paused(self) -> bool:
        return self.scheduler.is_paused

    def refuse(self, reason: str | None) -> None:
        """Fail every request with ``reason``, and refuse new ones; None lifts it. From any thread."""
        self._refusal = reason
        self._boundary.wake()

    # --- running --------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step; False if there was nothing to do. One thread at a time."""
        with self._boundary.step():
            refusal = self._active_refusal
            if refusal is not None:
                self._drain()
                self._ledger.fail_all(_refused(refusal))
                return False
            if self._decode is not None and self._decode.is_on:
                if self._goes_on(self._decode):
                    return True
                self._drain()
            plan = None if self._hold.is_on else self.scheduler.plan()
            if plan is None:
                return False
            self._run(plan)
            return True

    def start(self) -> None:
        """Give the engine its own thread; :meth:`stop` ends it."""
        self._loop.start()

    def stop(self, *, limit_s: float = 60.0) -> None:
        """End the engine's thread after its step; requests that still run stay where they are."""
        self._loop.stop(limit_s)

    def close(self, *, limit_s: float = 60.0) -> None:
        """Stop for good: requests fail, and decode graphs go. Idempotent.

        Of several ranks each calls it, before it destroys their process group: NCCL waits for graphs
        that hold its kernels. Graphs that a lost rank keeps from ending are left, and logged.
        """
        self.stop(limit_s=limit_s)
        deadline = Deadline(limit_s, peer="the engine", stage="close")
        self._boundary.alone(lambda: self._let_go(deadline), deadline)

    def _let_go(self, deadline: Deadline) -> None:
        self._refusal = self._agreed_refusal = "it was closed"
        if self._decode is not None:
            self._decode.give_up()
        self._ledger.fail_all(_refused(self._refusal))
        if isinstance(self.decode_steps, DecodeGraphs):
            self.decode_steps.close(deadline.remaining_s())
        self.decode_steps = self._decode = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- parts ----------------------------------------------------------------------------------------

    def _agree(self, num_calls: int) -> int:
        """The smallest number over the ranks: calls that every rank has seen. If one rank refuses,
        all do, from the same step on; they are held, or go on, once all want it."""
        refusal, wanted = self._refusal, self._hold.wanted
        words = [num_calls, int(refusal is not None), int(wanted is not None)]
        mine = torch.tensor(words, dtype=torch.int64)
        found = [part.tolist() for part in self._group.gather(mine)]
        self._hold.settle(wanted, [bool(is_wanted) for _, _, is_wanted in found])
        refusing = [rank for rank, (_, is_refusing, _) in enumerate(found) if is_refusing]
        if refusing and refusal is None:
            refusal = f"rank {refusing[0]} of the engine refuses"
        self._agreed_refusal = refusal
        return min(int(count) for count, _, _ in found)

    @property
    def _active_refusal(self) -> str | None:
        """Why nothing is generated; the same on every rank during a step."""
        return self._refusal if self._group.size == 1 else self._agreed_refusal

    def _submit(self, requests: list[Request], *, is_stream: bool) -> Submission:
        submission = Submission.of(requests, self.tokenizer, is_stream=is_stream)

        def admit() -> None:
            if self._active_refusal is not None:
                raise TaintedError(_refused(self._active_refusal))
            self.memory.require_filled("generating")
            self._ledger.admit(submission)

        self.at_boundary(admit)
        return submission

    def _advance(self, submission: Submission, deadline: Deadline) -> None:
        """Get on with it: a step of ours, or a moment of waiting for the engine's thread."""
        deadline.check()
        if self._boundary.has_driver:
            slice_s = IDLE_S if submission.chunks is None else POLL_S
            submission.is_done.wait(deadline.slice_s(slice_s))
        elif not self.step() and not submission.is_done.is_set():
            self._boundary.wait_for_work(self._loop.idle_s)

    def _lose(self, error: PeerLostError) -> None:
        """A rank is gone: nobody may wait for it."""
        self.refuse(str(error))
        self._ledger.fail_all(_refused(str(error)))

    def _chunks(self, submission: Submission, deadline: Deadline) -> Iterator[StreamChunk]:
        chunks = submission.chunks
        if chunks is None:
            raise RuntimeError("a submission that was not made as a stream has no chunks")
        try:
            while not (submission.is_done.is_set() and chunks.empty()):
                try:
                    yield chunks.get_nowait()
                except Empty:
                    self._advance(submission, deadline)
        finally:
            if not submission.is_done.is_set():
                self.abort(submission)

    def _run(self, plan: StepPlan) -> None:
        with self._failing([chunk.request for chunk in plan.chunks]):
            if self._decode is not None and self._decode.suits(plan):
                self._decode.begin(plan)
                return
            results = self.runner.run(plan)
        self.scheduler.complete(plan)
        self._ledger.take(plan, results)
        self.num_steps += 1

    def _goes_on(self, run: DecodeRun) -> bool:
        """Whether the device makes another step of a run, before which one is booked."""
        if self._hold.is_on or self.scheduler.is_paused:
            return False
        with self._failing(run.requests):
            if not run.go_on():
                return False
        self.num_steps += 1
        return True

    def _drain(self) -> None:
        """Book what the device has made ahead; whatever happens next finds nothing in flight."""
        if self._decode is not None and self._decode.is_on:
            with self._failing(self._decode.requests):
                self.num_steps += self._decode.drain()

    @contextmanager
    def _failing(self, requests: Sequence[Request]) -> Iterator[None]:
        """An error ends these requests with its text, and is raised."""
        try:
            yield
        except BaseException as error:
            if self._decode is not None:
                self._decode.give_up()
            reason = f"its step failed: {type(error).__name__}: {error}"
            self._ledger.fail(requests, reason)
            raise


def _products_for(attention: AttentionKind) -> Products:
    """The oracle's bits are transformers' only if torch computes the products as well."""
    return Products.TORCH if attention is AttentionKind.REFERENCE else Products.AUTO


def _refused(reason: str) -> str:
    return f"the engine refuses to generate: {reason}"
