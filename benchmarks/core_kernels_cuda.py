"""How near to the memory's and the matrix units' limits are the core's CUDA kernels, each alone?

First the check: attention of a few sequences against torch's in fp32. Then times, by events around a
row of launches: the median of several. Decoding attention is set against the bandwidth at which the
same run reads 4 GiB (bytes of K and V over time); prefill against the rate of a large bf16 product
(4 x head_dim x heads x pairs of tokens); row kernels by bytes read and written; experts, ours and
torch's, by the bytes of those that are hit, or by operations, and the layer around them by both.

    python benchmarks/core_kernels_cuda.py [--only WORD] [--rounds N] [--sweep] [--json FILE]
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_parts.command import command_line, has_gpus, write_figures
from bench_parts.cuda_experts import Experts
from torch import Tensor

from engine_adapter.core.attention import FusedHeads
from engine_adapter.core.batch import StepBatch, StepCounts
from engine_adapter.core.cuda_attention import PagedCudaAttention
from engine_adapter.core.cuda_launch import launch_on
from engine_adapter.core.cuda_products import prepare_cublas
from engine_adapter.core.cuda_rows import cuda_add_norm, cuda_gated
from engine_adapter.core.cuda_sampling import SampleInputs, sample_on_cuda
from engine_adapter.core.kv_cache import KvCache, KvShape
from engine_adapter.core.moe import CudaExpertsMlp, GroupedExpertsMlp
from weightsync import native_cuda_core

DEVICE = torch.device("cuda:0")
PAGE_SIZE = 64
CHUNK = 256
READ_BYTES = 4 << 30
ROUNDS = 7
LAUNCHES = 8


@dataclass(frozen=True)
class Case:
    """Sequences of ``context`` tokens, of which the last ``rows`` are computed."""

    name: str
    batch: int
    context: int
    rows: int
    heads: int
    kv_heads: int
    dim: int = 128

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.kv_heads * self.dim * 2 * 2

    @property
    def flops(self) -> int:
        pairs = self.rows * (self.context - self.rows) + self.rows * (self.rows + 1) // 2
        return 4 * self.dim * self.heads * pairs * self.batch


DECODES = (
    Case("0.6B 256 x 1k", 256, 1024, 1, 16, 8),
    Case("8B 256 x 1k", 256, 1024, 1, 32, 8),
    Case("8B 16 x 16k", 16, 16_384, 1, 32, 8),
    Case("30B-A3B 256 x 1k", 256, 1024, 1, 32, 4),
    Case("8B 64 x 700", 64, 700, 1, 32, 8),
    Case("8B 1 x 512", 1, 512, 1, 32, 8),
    Case("8B 1 x 32k", 1, 32_768, 1, 32, 8),
    Case("D64 256 x 1k", 256, 1024, 1, 32, 8, 64),
)
PREFILLS = (
    Case("8B 4 x 2k", 4, 2048, 2048, 32, 8),
    Case("8B 1 x 8k", 1, 8192, 8192, 32, 8),
    Case("0.6B 4 x 2k", 4, 2048, 2048, 16, 8),
    Case("D64 4 x 2k", 4, 2048, 2048, 32, 8, 64),
)


class Step:
    """A case's tensors: random K and V in shuffled pages, and the batch."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        pages = -(-case.context // PAGE_SIZE)
        shape = KvShape(1, case.kv_heads, case.dim, torch.bfloat16, PAGE_SIZE)
        self.case = case
        self.cache = KvCache(shape, pages * case.batch, DEVICE)
        self.cache.keys.normal_()
        self.cache.values.normal_()
        tables = torch.randperm(pages * case.batch, device=DEVICE).int().view(case.batch, pages)
        rows = case.batch * case.rows
        each = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE)
        fill = torch.full((rows,), -1, dtype=torch.int64, device=DEVICE)  # K and V are there
        self.batch = StepBatch(
            fill, torch.zeros_like(fill), fill, each * case.rows,
            torch.full((case.batch,), case.context, dtype=torch.int32, device=DEVICE), tables, fill,
            StepCounts(rows, case.rows, case.batch * -(-case.context // CHUNK)),
        )  # fmt: skip
        size = (rows, case.heads, case.dim)
        self.query = torch.randn(size, dtype=torch.bfloat16, device=DEVICE)

    def run(self, attention: PagedCudaAttention) -> Tensor:
        return attention._attend(0, self.query, self.batch, self.cache)


def check() -> float:
    """The largest error against fp32; raises if it is large."""
    worst = 0.0
    for rows in (1, 300):
        step = Step(Case("check", 3, 300, rows, 32, 8))
        got = step.run(PagedCudaAttention()).view(3, rows, 32, 128).transpose(1, 2).float()
        pages = step.batch.block_tables.long()
        key, value = (
            t[0][pages].flatten(1, 2)[:, :300].transpose(1, 2).float()
            for t in (step.cache.keys, step.cache.values)
        )
        query = step.query.view(3, rows, 32, 128).transpose(1, 2).float()
        mask = torch.ones(rows, 300, dtype=torch.bool, device=DEVICE).tril(300 - rows)
        wanted = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        worst = max(worst, float((got - wanted).abs().max()))
    if not worst < 0.05:
        raise SystemExit(f"attention is off by {worst}")
    return worst


def seconds(action: Callable[[], Any], rounds: int, launches: int = LAUNCHES) -> float:
    """Of one launch: median over rounds of a row of them."""
    for _ in range(3):
        action()
    found: list[float] = []
    for _ in range(rounds):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(launches):
            action()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) * 1e-3 / launches)
    return statistics.median(found)


def graph_seconds(action: Callable[[], Any], rounds: int, launches: int = LAUNCHES) -> float:
    """As :func:`seconds`, replayed from a graph: small kernels are otherwise the host's time."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # the operands are made there
    with torch.cuda.stream(stream):
        for _ in range(2):
            action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            action()
    return seconds(graph.replay, rounds, 1) / launches


def read_rate(rounds: int) -> float:
    """Bytes a second of a kernel that only reads."""
    memory = torch.zeros(READ_BYTES // 4, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    launch = launch_on(DEVICE)
    args = memory.data_ptr(), READ_BYTES, out.data_ptr(), launch
    return READ_BYTES / seconds(lambda: native_cuda_core.read_bytes(*args), rounds)


def matrix_rate(rounds: int) -> float:
    """Operations a second of a large bf16 product."""
    left, right = torch.randn(2, 8192, 8192, device=DEVICE).bfloat16()
    return 2 * 8192**3 / seconds(lambda: F.linear(left, right), rounds, 2)


def time_decodes(rate: float, rounds: int, is_sweep: bool) -> list[dict[str, Any]]:
    shapes = [(0, 0)]
    if is_sweep:
        shapes += [(s, w) for s in (2, 3, 4) for w in (1, 2, 4) if (s, w) != (4, 4)]
    found = []
    for case in DECODES:
        step = Step(case)
        for stages, warps in shapes:
            attention = PagedCudaAttention(stages, warps)
            try:
                taken = graph_seconds(partial(step.run, attention), rounds)
            except Exception as error:  # a shape that does not fit is no figure
                print(f"decode   {case.name:18} {stages}x{warps}: {error}")
                continue
            share = case.kv_bytes / taken / rate
            found.append({"case": case.name, "shape": [stages, warps], "s": taken, "share": share})
            print(
                f"decode   {case.name:18} {stages}x{warps} {taken * 1e6:8.1f} us "
                f"{case.kv_bytes / taken / 1e12:5.2f} TB/s {share:6.1%} of reading"
            )
    return found


def time_prefills(rate: float, rounds: int) -> list[dict[str, Any]]:
    found = []
    for case in PREFILLS:
        step = Step(case)
        attention = PagedCudaAttention()
        taken = seconds(partial(step.run, attention), rounds, 4)
        share = case.flops / taken / rate
        found.append({"case": case.name, "s": taken, "share": share})
        print(
            f"prefill  {case.name:18} {taken * 1e6:8.1f} us {case.flops / taken / 1e12:5.0f} TFLOP/s "
            f"{share:6.1%} of a product"
        )
    return found


def time_rows(rate: float, rounds: int) -> list[dict[str, Any]]:
    """The other kernels on the rows of a decode step of 256, 8B shapes."""
    rows, hidden, width, vocab = 256, 4096, 12_288, 151_936

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE).bfloat16()

    states, delta, weight, gate_up = (
        draw(rows, hidden),
        draw(rows, hidden),
        draw(hidden),
        draw(rows, 2 * width),
    )
    step = Step(Case("rows", rows, 64, 1, 32, 8))
    heads = draw(rows, 48, 128)
    cos, sin, norm = draw(128, 64), draw(128, 64), draw(128)
    logits = draw(rows, vocab)
    longs = torch.arange(rows, device=DEVICE)
    ones = torch.ones(rows, device=DEVICE)
    drawn = SampleInputs(longs, longs, ones, ones, torch.full_like(longs, -1))
    greedy = drawn._replace(noise_scales=ones * 0)
    place = PagedCudaAttention()
    place._attend = lambda *_: states  # type: ignore[method-assign]
    fused = FusedHeads(heads, norm, norm, cos, sin, 1e-6)
    cases: dict[str, tuple[Callable[[], Any], int]] = {
        "add + norm": (lambda: cuda_add_norm(states, delta, weight, 1e-6), 4 * rows * hidden * 2),
        "gate": (lambda: cuda_gated(gate_up), 3 * rows * width * 2),
        "heads": (
            lambda: place.attend_fused(0, fused, step.batch, step.cache),
            rows * 80 * 128 * 2,
        ),
        "sample greedy": (lambda: sample_on_cuda(logits, greedy, None), rows * vocab * 2),
        "sample drawn": (lambda: sample_on_cuda(logits, drawn, None), rows * vocab * 2),
    }
    found = []
    for name, (action, num_bytes) in cases.items():
        taken = graph_seconds(action, rounds)
        found.append({"case": name, "s": taken, "share": num_bytes / taken / rate})
        print(f"rows     {name:18} {taken * 1e6:8.1f} us {num_bytes / taken / 1e12:5.2f} TB/s")
    return found


def time_experts(read: float, product: float, rounds: int) -> list[dict[str, Any]]:
    experts = Experts(DEVICE)
    found = []
    for batch in (1, 8, 32, 64, 256, 8192):
        picks = [experts.picks(batch) for _ in range(LAUNCHES)]
        hits = [float((p.offsets.diff(prepend=p.offsets[:1] * 0) > 0).sum()) for p in picks]
        cases = experts.products(batch, picks)
        states = torch.randn(batch, experts.hidden, device=DEVICE).bfloat16()
        for name, kind in (("ours", CudaExpertsMlp), ("torch", GroupedExpertsMlp)):
            layer = experts.layer(kind)
            cases[f"layer: {name}"] = (experts.gate_up, partial(layer.forward, states))
        for name, (weights, action) in cases.items():
            share_hit = statistics.mean(hits) / experts.num_experts
            num_weights = weights.numel() * (1.5 if name.startswith("layer") else 1)
            num_bytes = num_weights * 2 * share_hit
            flops = 2 * batch * experts.top_k * num_weights / experts.num_experts
            taken = graph_seconds(action, rounds) if batch < 8192 else seconds(action, rounds, 2)
            share = max(num_bytes / read, flops / product) / taken
            found.append({"case": name, "batch": batch, "s": taken, "share": share})
            print(
                f"experts  {batch:5} {name:16} {taken * 1e6:8.1f} us {num_bytes / taken / 1e12:5.2f} "
                f"TB/s {flops / taken / 1e12:5.0f} TFLOP/s {share:6.1%} of what bounds it"
            )
    return found


def main() -> None:
    parser = command_line(__doc__, "two rounds: does it run?")
    parser.add_argument("--only", default="", help="decode, prefill, rows or experts")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sweep", action="store_true", help="all launch shapes of decoding")
    options = parser.parse_args()
    if not has_gpus():
        return
    if options.tiny:
        options.rounds = 2
    prepare_cublas()
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}; error {check():.4f}")
    reading, product = read_rate(options.rounds), matrix_rate(options.rounds)
    print(f"reading {reading / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s")
    figures: dict[str, Any] = {"read_rate": reading, "matrix_rate": product}
    parts: dict[str, Callable[[], Any]] = {
        "decode": lambda: time_decodes(reading, options.rounds, options.sweep),
        "prefill": lambda: time_prefills(product, options.rounds),
        "rows": lambda: time_rows(reading, options.rounds),
        "experts": lambda: time_experts(reading, product, options.rounds),
    }
    for name, part in parts.items():
        if options.only in ("", name):
            figures[name] = part()
    write_figures(options.json, figures)


if __name__ == "__main__":
    main()
