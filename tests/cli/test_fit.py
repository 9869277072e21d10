"""The two-term fit recovers what a movement was made to cost."""

from __future__ import annotations

import pytest

from weightsync.cli.bench_fit import Sample, fit

SIZES = [(1, 10, 10**9), (4, 10, 10**9), (1, 400, 10**8), (2, 50, 5 * 10**8), (7, 3, 10**7)]


@pytest.mark.parametrize(
    ("bucket_s", "tensor_s", "gb_per_s"), [(2e-3, 5e-6, 4.0), (0.0, 5e-6, 4.0), (2e-3, 0.0, 10.0)]
)
def test_costs_come_apart(bucket_s: float, tensor_s: float, gb_per_s: float) -> None:
    samples = [
        Sample(b, t, n, b * bucket_s + t * tensor_s + n / (gb_per_s * 1e9)) for b, t, n in SIZES
    ]
    found = fit(samples)
    assert found["bucket_s"] == pytest.approx(bucket_s, abs=1e-9)
    assert found["tensor_s"] == pytest.approx(tensor_s, abs=1e-9)
    assert found["gb_per_s"] == pytest.approx(gb_per_s)
    assert found["relative_error"] == pytest.approx(0.0, abs=1e-6)


def test_no_cost_is_negative() -> None:
    samples = [Sample(1, t, n, max(1e-4, n / 1e9 - t * 1e-4)) for _, t, n in SIZES]
    found = fit(samples)
    assert found["bucket_s"] is not None
    assert found["bucket_s"] >= 0
    assert found["tensor_s"] is not None
    assert found["tensor_s"] >= 0


def test_bytes_that_cost_nothing_have_no_bandwidth() -> None:
    assert fit([Sample(b, t, n, 1e-3 * b) for b, t, n in SIZES])["gb_per_s"] is None
