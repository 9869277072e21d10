"""``bench --device cuda``: what is drawn, what is refused; on a GPU, a whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync import native
from weightsync.cli.bench import MIN_UPDATES
from weightsync.cli.bench_cuda import (
    check_device,
    check_device_room,
    count_different,
    drawn_module,
)
from weightsync.cli.bench_growth import WARM_UPDATES, Held, describe, growth, held_here
from weightsync.cli.bench_model import ModelChoice, change_all
from weightsync.errors import CapacityError, ConfigError
from weightsync.presets import get_preset

torch = pytest.importorskip("torch")


def test_the_order_of_allocations_changes_no_value() -> None:
    first, second = (drawn_module("tiny", "cpu", order_seed=seed) for seed in (0, 4))
    names = [n for n, _ in first.named_parameters()]
    assert names == [name for name, _, _ in get_preset("tiny").tensors()]
    for (_, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b)
    values = {p.data.flatten()[:8].sum().item() for p in first.parameters()}
    assert len(values) > 30  # a seed of its own for each


def test_one_wrong_bit_is_found() -> None:
    module = drawn_module("tiny", "cpu", order_seed=0)
    assert count_different(module, "tiny", "cpu", mask=0) == 0
    change_all(module, 3)
    assert count_different(module, "tiny", "cpu", mask=3) == 0
    assert count_different(module, "tiny", "cpu", mask=2) == 46
    list(module.parameters())[7].data.view(torch.int16).flatten()[5] ^= 1
    assert count_different(module, "tiny", "cpu", mask=3) == 1


def test_a_model_that_does_not_fit_the_gpu() -> None:
    choice = ModelChoice("large", 1, 60 * 10**9, "large", None)
    check_device_room(choice, "in_place", 150 * 10**9)
    with pytest.raises(CapacityError, match=r"3 copies of 60\.00 GB.*150000000000.*in_place"):
        check_device_room(choice, "staged", 150 * 10**9)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("built without CUDA", r"WEIGHTSYNC_CUDA=ON"),
        ("no driver", r"driver.*--gpus all"),
        ("no device", r"CUDA_VISIBLE_DEVICES"),
    ],
)
def test_no_cuda_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, reason: str, remedy: str
) -> None:
    monkeypatch.setattr(native, "has_cuda", lambda: False)
    monkeypatch.setattr(native, "cuda_unavailable_reason", lambda: reason)
    with pytest.raises(ConfigError, match=f"{reason}.*{remedy}"):
        check_device("cuda")
    assert check_device("cpu") == "cpu"


def test_growth_is_named_and_breathing_is_not() -> None:
    before = Held(10, 3, 5, 10**9, 10**10)
    assert growth(before, before) == []
    assert growth(before, Held(10, 2, 5, 10**9 + 10**6, 10**10 + 10**6)) == []
    grown = growth(before, Held(11, 3, 6, 2 * 10**9, 10**10 + 2**21 + 1))
    assert [g.split(" 1")[0] for g in grown[:1]] == ["fds"]
    assert len(grown) == 4
    assert "device mappings 5 -> 6" in grown
    assert WARM_UPDATES < MIN_UPDATES


def test_growth_for_people() -> None:
    held = {"fds": 1, "device_allocations": 2, "device_mappings": 3, "host_bytes": 4}
    now = {"engine": {**held, "device_bytes": 0}}
    found: dict[str, Any] = {
        "updates": 5, "median_seconds": 0.01, "before": now, "after": now, "grew": [],
    }  # fmt: skip
    assert describe(found)[0].endswith("nothing grew")
    assert "fds 1 -> 1" in describe(found)[1]


def test_a_file_that_stays_open_shows(tmp_path: Path) -> None:
    before = held_here(device_bytes=0)
    with (tmp_path / "file").open("w"):
        assert growth(before, held_here(device_bytes=0)) == [
            f"fds {before.fds} -> {before.fds + 1}"
        ]
    assert growth(before, held_here(device_bytes=0)) == []


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["staged", "in_place"])
def test_bench_on_a_gpu(tmp_path: Path, placement: str) -> None:
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "weightsync.cli.main", "bench", "--device", "cuda", "--transport",
         "ipc", "--direct", "--model", "tiny-moe", "--placement", placement, "--repeat", "1",
         "--updates", "30", "--json", str(file)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["device"] == "cuda:0"
    assert result["verified"] is True
    assert result["num_tensors_that_differ"] == 0
    assert result["growth"]["grew"] == []
    assert result["phases"]["read_device"] > 0
    assert "by events" in result["ceiling"]
    assert result["device_extra_bytes"] > 0
    assert "drawn anew" in done.stdout
