"""Numbers of rows in which products are proven: what does not take a GPU to see."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine_adapter.core import cuda_products, grouped_products
from engine_adapter.core.cuda_products import (
    ANCHOR_ROWS,
    RowRange,
    cancelling_operands,
    product_within,
    prove_shape,
    tried_rows,
)
from engine_adapter.core.grouped_products import OWN_PRODUCTS, grouped_rows_are_their_own

CPU = torch.device("cpu")


@pytest.mark.parametrize("inner", [64, 65, 4096])
def test_what_comes_out_is_nothing_but_rounding(inner: int) -> None:
    states, weight = cancelling_operands(9, (33, inner), torch.bfloat16, CPU)
    assert not (states.double() @ weight.double().T).any()
    ways = [states.float() @ weight.float().T, states.float().flip(1) @ weight.float().flip(1).T]
    assert (ways[0].bfloat16() != ways[1].bfloat16()).float().mean() > 0.5


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the calls that are made."""
    seen: list[int] = []
    linear = F.linear

    def counting(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(len(states))
        return linear(states, weight, bias)

    monkeypatch.setattr(F, "linear", counting)
    return seen


@pytest.mark.parametrize(
    ("rows", "calls"),
    [(1, [17]), (17, [17]), (100, [100]), (101, [100, 17]), (250, [100, 100, 50])],
)
def test_calls_are_padded_and_split_into_the_range(
    rows: int, calls: list[int], counts: list[int]
) -> None:
    torch.manual_seed(rows)
    states, weight, bias = torch.randn(rows, 24), torch.randn(7, 24), torch.randn(7)
    found = product_within(RowRange(17, 100), states, weight, bias)
    assert counts == calls
    torch.testing.assert_close(found, states @ weight.T + bias)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [((), (1, 2048)), ((1, 16), (17, 2048)), ((600, 800), (1, 513)), ((3, 3), (4, 2048))],
)
def test_the_range_is_around_the_anchor(
    bad: tuple[int, ...], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of ``bad`` numbers of rows sum in another order."""

    def linear(states: Tensor, weight: Tensor) -> Tensor:
        if bad and bad[0] <= len(states) <= bad[1]:
            return (states.flip(1).float() @ weight.flip(1).float().T).bfloat16()
        rows = [(row.float() @ weight.float().T).bfloat16() for row in torch.split(states, 1)]
        return torch.cat(rows)

    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(
        cuda_products, "_ROW_COUNTS", (1, 2, 3, 4, 16, 17, 64, 100, 513, 640, 1000, 2048)
    )
    verdict = prove_shape((5, 256), torch.bfloat16, CPU)
    assert verdict.rows == RowRange(*expected)
    assert not verdict.has_few  # our kernel is a GPU's


@pytest.mark.parametrize(("bad", "has_few"), [(None, True), (1, False), (3, False), (4, False)])
def test_our_kernel_is_used_where_it_has_the_bits_of_the_libraries(
    bad: int | None, has_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sums ``bad`` rows in another order."""

    def few(states: Tensor, weight: Tensor) -> Tensor:
        if len(states) == bad:
            return (states.flip(1).float() @ weight.flip(1).float().T).bfloat16()
        return F.linear(states, weight)

    def by_row(states: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([(r.float() @ weight.float().T).bfloat16() for r in states.split(1)])

    monkeypatch.setattr(F, "linear", by_row)
    monkeypatch.setattr(cuda_products, "takes", lambda *_, **__: True)
    monkeypatch.setattr(cuda_products, "multiply_few", few)
    monkeypatch.setattr(cuda_products, "_ROW_COUNTS", (1, 2, 64, 100))
    assert prove_shape((5, 256), torch.bfloat16, CPU).has_few is has_few


@pytest.mark.parametrize("bad", [(), (1, 1), (100, 128), (2048, 2048)])
def test_groups_of_other_sums_are_seen(
    bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert with ``bad`` numbers of rows sums in another order."""

    def grouped(states: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        found, start = [torch.zeros(0, weights.shape[1]).bfloat16()], 0
        for weight, end in zip(weights, offsets.tolist(), strict=True):
            rows = states[start:end]
            if bad and bad[0] <= len(rows) <= bad[1]:
                rows, weight = rows.flip(1), weight.flip(1)
            found += [(row.float() @ weight.float().T).bfloat16() for row in torch.split(rows, 1)]
            start = end
        return torch.cat(found)

    monkeypatch.setattr(grouped_products, "_proven", {})
    shapes = [(3, 5, 256)]
    with nullcontext() if not bad else pytest.warns(RuntimeWarning, match=r"\[3, 5, 256\]"):
        assert grouped_rows_are_their_own(shapes, torch.bfloat16, CPU, (grouped,)) is not bool(bad)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 64, 64), (128, 1536, 2048), (128, 2048, 768)])
def test_grouped_rows_are_their_own_on_a_gpu(shape: tuple[int, int, int]) -> None:
    device = torch.device("cuda:0")
    assert grouped_rows_are_their_own([shape], torch.bfloat16, device)
    assert grouped_rows_are_their_own([shape], torch.bfloat16, device, OWN_PRODUCTS)


def test_no_more_rows_are_tried_than_memory_allows() -> None:
    assert tried_rows(1024) == 8192
    assert 512 <= tried_rows(151_936) < 2048
    assert tried_rows(1 << 30) == ANCHOR_ROWS
