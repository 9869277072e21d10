"""What do products of one to four rows cost by our kernel, and by cuBLASLt without split sums?

First the check: both have the same bits on operands whose exact product is zero, so that nothing but
the order of summing shows. Then times: every call of a graph has another weight, of at least a
gigabyte in all, so that weights come from memory; and all products of a decode step in their order.
The limit is the bytes of the weights at the rate at which the same run reads 4 GiB.

    python benchmarks/core_few_rows_cuda.py [--models NAME ..] [--rounds N] [--json FILE]
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from bench_parts.command import command_line, has_gpus, write_figures
from core_kernels_cuda import DEVICE, graph_seconds, read_rate
from torch import Tensor

from engine_adapter.core.cuda_products import cancelling_operands, prepare_cublas
from engine_adapter.core.few_rows import multiply_few, takes
from weightsync.native_few_rows import MOST_FEW_ROWS

Shape = tuple[int, int]
Multiply = Callable[[Tensor, Tensor], Tensor]

LEAST_BYTES = 1 << 30
#: By model: layers, and weights [out, in] of one: qkv, o, gate and up, down; then the head.
MODELS: dict[str, tuple[int, tuple[Shape, ...], Shape]] = {
    "qwen3-0.6b": (28, ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), (151_936, 1024)),
    "qwen3-8b": (36, ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)), (151_936, 4096)),
}


def own(states: Tensor, weight: Tensor) -> Tensor:
    """As the core multiplies: by the libraries what the kernel does not take."""
    return multiply_few(states, weight) if takes(states, weight) else F.linear(states, weight)


WAYS: dict[str, Multiply] = {"cuBLASLt": F.linear, "own": own}


def check(shape: Shape) -> None:
    """Raises if a row's bits are not those that it has among 64."""
    states, weight = cancelling_operands(64, shape, torch.bfloat16, DEVICE)
    expected = F.linear(states, weight)
    for rows in range(1, MOST_FEW_ROWS + 1):
        found = multiply_few(states[rows : 2 * rows], weight)
        if not torch.equal(found, expected[rows : 2 * rows]):
            raise SystemExit(f"{rows} rows by a weight {shape}: not the bits of 64 rows")


def draw(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=DEVICE)


def time_shape(shape: Shape, rows: int, rounds: int) -> dict[str, float]:
    """Seconds of a call, by way."""
    count = max(2, -(-LEAST_BYTES // (2 * shape[0] * shape[1])))
    weights, states = [draw(*shape) for _ in range(count)], draw(rows, shape[1])

    def calls(multiply: Multiply) -> None:
        for weight in weights:
            multiply(states, weight)

    return {
        name: graph_seconds(lambda w=way: calls(w), rounds, 1) / count for name, way in WAYS.items()
    }


def time_step(
    layers: int, shapes: Sequence[Shape], head: Shape, rows: int, rounds: int
) -> dict[str, float]:
    """Seconds of all products of a step, by way."""
    weights = [draw(*shape) for _ in range(layers) for shape in shapes] + [draw(*head)]
    states = [draw(rows, weight.shape[1]) for weight in weights]

    def calls(multiply: Multiply) -> None:
        for state, weight in zip(states, weights, strict=True):
            multiply(state, weight)

    return {name: graph_seconds(lambda w=way: calls(w), rounds, 1) for name, way in WAYS.items()}


def show(what: str, num_bytes: int, rate: float, taken: dict[str, float]) -> dict[str, Any]:
    times = ", ".join(f"{name} {s * 1e6:8.2f}" for name, s in taken.items())
    print(f"{what:40} limit {num_bytes / rate * 1e6:8.2f} us, {times}")
    return {"what": what, "num_bytes": num_bytes, "s": taken}


def main() -> None:
    parser = command_line(__doc__, "the smallest model, two rounds: does it run?")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not has_gpus():
        return
    if options.tiny:
        options.models, options.rounds = ["qwen3-0.6b"], 2
    prepare_cublas()
    rate = read_rate(options.rounds)
    print(
        f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}: reading {rate / 1e12:.2f} TB/s"
    )
    figures: list[dict[str, Any]] = []
    for name in options.models:
        layers, shapes, head = MODELS[name]
        for shape in (*shapes, head):
            check(shape)
        for rows in (1, MOST_FEW_ROWS):
            for shape in (*shapes, head):
                taken = time_shape(shape, rows, options.rounds)
                what = f"{name} {shape[0]} x {shape[1]}, rows {rows}"
                figures.append(show(what, 2 * shape[0] * shape[1], rate, taken))
            num_bytes = 2 * sum(n * k for n, k in [*(shapes * layers), head])
            taken = time_step(layers, shapes, head, rows, options.rounds)
            figures.append(show(f"{name} a step, rows {rows}", num_bytes, rate, taken))
    write_figures(options.json, {"read_rate": rate, "products": figures})


if __name__ == "__main__":
    main()
