"""The sum of ranks' parts, by the maths that the GPU's kernel shares."""

from __future__ import annotations

import pytest
from core_models import torch

from weightsync import native
from weightsync.native_attention import FLOAT_TYPES

DTYPES = {name: getattr(torch, name) for name in FLOAT_TYPES}


def sum_of(parts: list[object]) -> object:
    stacked = torch.stack(parts)
    total = torch.empty_like(stacked[0])
    name = next(n for n, dtype in DTYPES.items() if dtype == stacked.dtype)
    native.extension.add_parts(
        FLOAT_TYPES[name], total.nbytes, len(parts), stacked.data_ptr(), total.data_ptr()
    )
    return total


def bits(tensor: object) -> object:
    return tensor.view(torch.uint8)  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", DTYPES)
def test_parts_are_added_in_rank_order_and_rounded_once(name: str, size: int) -> None:
    torch.manual_seed(size)
    parts = [(torch.randn(4096) * 10.0 ** (i % 3)).to(DTYPES[name]) for i in range(size)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    assert torch.equal(bits(sum_of(parts)), bits(total.to(DTYPES[name])))


@pytest.mark.parametrize("name", DTYPES)
def test_zeros_keep_their_sign_and_what_overflows_is_infinite(name: str) -> None:
    most = torch.finfo(DTYPES[name]).max
    left = torch.tensor([-0.0, 0.0, -0.0, most, -most, 1.0, torch.inf, 2.0] * 2, dtype=DTYPES[name])
    right = torch.tensor(
        [-0.0, -0.0, 0.0, most, -most, -1.0, 1.0, torch.inf] * 2, dtype=DTYPES[name]
    )
    # As torch adds two: so do eager steps of two ranks.
    assert torch.equal(bits(sum_of([left, right])), bits(left + right))


@pytest.mark.parametrize("name", DTYPES)
def test_a_nan_stays_one(name: str) -> None:
    left = torch.full((16,), torch.nan, dtype=DTYPES[name])
    assert torch.isnan(sum_of([left, torch.ones_like(left)])).all()


def test_parts_come_in_vectors_of_16_bytes() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        native.extension.add_parts(0, 8, 2, 0, 0)
