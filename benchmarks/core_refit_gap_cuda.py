"""How long do running requests wait for their next token while a refit by ``ipc`` goes on?

An engine with decode graphs serves 64 requests; a trainer, a process of its own on the same GPU, sends
it all weights, in place and staged, with requests that keep their KV (``in_place`` pause) and that
compute it again (``retract``). Stated is the longest time between two tokens of any request that ends
while an update runs or just after it, beside the median between two tokens before.

The two processes share the GPU by turns: a step beside a trainer at work is longer than one alone.

    python benchmarks/core_refit_gap_cuda.py [--model qwen3-8b] [--json FILE]
"""

import multiprocessing
import statistics
import threading
import time
from itertools import pairwise
from typing import Any

import torch
from bench_parts.command import command_line, has_gpus, write_figures
from core_decode_cuda import make_engine

from engine_adapter.bundled import BundledAdapter
from engine_adapter.core.arena import MemoryKind
from engine_adapter.core.request import Request
from engine_adapter.core.sampling_params import SamplingParams
from weightsync.cli.bench_cuda import drawn_module
from weightsync.receiver import Receiver
from weightsync.sender import Sender

REQUESTS = 64
CONTEXT = 256
KV_CACHE_TOKENS = 260_000
BEFORE_S = 0.6
#: Contexts are computed again within the second.
AFTER_S = {"in_place": 0.6, "retract": 2.0}
UPDATES = 3  # of each kind; the first one opens memory
KINDS = tuple(
    (place, pause) for place in ("in_place", "staged") for pause in ("in_place", "retract")
)
LIMIT_S = 120.0


def train(pipe: Any, url: str, model: str) -> None:
    """The trainer's process: answers each order with when its update began and ended."""
    module = drawn_module(model, "cuda:0", 1)
    limits = {"deadline_s": LIMIT_S, "commit_timeout_s": LIMIT_S, "request_timeout_s": LIMIT_S}
    senders: dict[tuple[str, str], Any] = {}
    version = 0
    try:
        while (kind := pipe.recv()) is not None:
            for other in [other for other in senders if other != kind]:
                senders.pop(other).close()
            if kind not in senders:
                place, pause = kind
                senders[kind] = Sender.connect(
                    [url], transport="ipc", placement=place, pause_mode=pause, **limits
                )
            version += 1
            start = time.perf_counter()
            with senders[kind].update(version=version) as update:
                update.send(module)
            pipe.send((start, time.perf_counter()))
    finally:
        for sender in senders.values():
            sender.close()


class TokenTimes:
    """When each request got each of its tokens."""

    def __init__(self) -> None:
        self.of: dict[int, list[float]] = {}
        self._add = Request.add_result
        self._lock = threading.Lock()

    def __enter__(self) -> "TokenTimes":
        def added(request: Request, *args: Any) -> None:
            self._add(request, *args)
            with self._lock:
                self.of.setdefault(id(request), []).append(time.perf_counter())

        Request.add_result = added  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Request.add_result = self._add  # type: ignore[method-assign]

    def gaps(self, start: float, end: float) -> list[float]:
        """Of all requests, those that end between these moments."""
        with self._lock:
            times = [list(found) for found in self.of.values()]
        return [b - a for each in times for a, b in pairwise(each) if start <= b <= end]


def measure(engine: Any, pipe: Any, times: TokenTimes) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind in KINDS:
        rounds = []
        for _ in range(UPDATES):
            time.sleep(BEFORE_S)
            asked = time.perf_counter()
            pipe.send(kind)
            if not pipe.poll(LIMIT_S):
                raise SystemExit(f"no answer to an update {kind} within {LIMIT_S} s")
            start, end = pipe.recv()
            time.sleep(AFTER_S[kind[1]])
            normal = statistics.median(times.gaps(asked - BEFORE_S / 2, asked))
            longest = max(times.gaps(start, end + AFTER_S[kind[1]]))
            rounds.append({"update_s": end - start, "normal_s": normal, "longest_s": longest})
        name = f"{kind[0]}, pause {kind[1]}"
        figures[name] = rounds
        for index, found in enumerate(rounds):
            print(
                f"  {name:26} {index}: update {found['update_s'] * 1e3:7.1f} ms, longest gap "
                f"{found['longest_s'] * 1e3:7.1f} ms, a normal one {found['normal_s'] * 1e3:.2f} ms"
            )
    return figures


def main() -> None:
    parser = command_line(__doc__, "the smallest model: does it run?")
    parser.add_argument("--model", default="qwen3-8b")
    options = parser.parse_args()
    if not has_gpus():
        return
    model = "qwen3-0.6b" if options.tiny else options.model
    engine = make_engine(model, KV_CACHE_TOKENS, "graphs", MemoryKind.PLAIN)
    prompts = [[(i * 131 + j * 7) % 10_000 for j in range(CONTEXT)] for i in range(REQUESTS)]
    params = SamplingParams(temperature=0.6, max_tokens=3700, ignore_eos=True, seed=1)
    print(f"{model}, {REQUESTS} requests, {torch.cuda.get_device_name(0)}")
    context = multiprocessing.get_context("spawn")
    with engine, Receiver(BundledAdapter(engine)) as receiver, TokenTimes() as times:
        pipe, theirs = context.Pipe()
        trainer = context.Process(target=train, args=(theirs, receiver.url, model), daemon=True)
        trainer.start()
        submission = engine.submit(prompts, params)
        figures = measure(engine, pipe, times)
        engine.abort(submission)
        pipe.send(None)
        trainer.join(LIMIT_S)
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
