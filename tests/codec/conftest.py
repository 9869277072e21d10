"""Both devices for what runs on one: the CPU's twin everywhere, a GPU where there is one."""

from __future__ import annotations

import pytest

from weightsync import native
from weightsync.device_tables import CPU


@pytest.fixture(params=[CPU, pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param != CPU and not native.has_cuda():
        pytest.skip("no CUDA device, or a build without CUDA")
    return str(request.param)
