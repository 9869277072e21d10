"""``weightsync bench`` and ``doctor`` as a user runs them, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

#: Stable names of the result; scripts of users read them.
RESULT_NAMES = {
    "transport", "device", "model", "num_tensors", "total_bytes", "bucket_bytes", "placement",
    "contract", "repeat", "seconds", "phases", "gb_per_s", "ceiling_gb_per_s",
    "fraction_of_ceiling", "begin_to_commit_seconds", "pause_seconds",
    "peak_extra_bytes", "verified", "versions",
}  # fmt: skip


def _weightsync(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightsync.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "WEIGHTSYNC_CACHE": str(cache)},
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "how", "placement"),
    [("ipc", "--stream", "staged"), ("ipc", "--direct", "in_place"), ("p2p", "--direct", "staged")],
)
def test_bench_proves_and_reports(
    cache: Path, tmp_path: Path, transport: str, how: str, placement: str
) -> None:
    if transport == "p2p":
        pytest.importorskip("nixl_cu13")
    json_file, plot_file = tmp_path / "bench.json", tmp_path / "bench.png"
    done = _weightsync(
        cache, "bench", "--transport", transport, "--model", "tiny", "--bucket", "256KiB", how,
        "--placement", placement, "--repeat", "1", "--json", str(json_file),
        "--plot", str(plot_file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(json_file.read_text())
    assert result.keys() >= RESULT_NAMES
    assert result["seconds"].keys() >= {"median", "min", "p99"}
    assert result["phases"].keys() >= {"connect", "plan", "register", "move", "verify", "commit"}
    assert ("pack" in result["phases"]) == (how == "--stream")
    assert ("place" in result["phases"]) == (placement == "staged")
    assert result["verified"] is True
    assert 0 < result["begin_to_commit_seconds"] < result["seconds"]["median"]
    assert f"--{result['contract']}" == how
    assert result["num_tensors"] == 46
    assert plot_file.read_bytes().startswith(b"\x89PNG")
    assert "verified" in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_the_core_is_refitted_while_it_generates(cache: Path, tmp_path: Path, model: str) -> None:
    json_file = tmp_path / "bench.json"
    done = _weightsync(
        cache, "bench", "--engine", "core", "--transport", "ipc", "--model", model,
        "--repeat", "2", "--json", str(json_file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(json_file.read_text())
    assert result["engine"] == "core"
    assert result["verified"] is True
    traffic = result["traffic"]
    assert traffic["failures"] == []
    assert 48 * traffic["num_requests"] >= traffic["num_tokens"] > 0
    assert set(traffic["versions"]) & {1, 2, 3}
    assert "none failed" in done.stdout


@pytest.mark.timeout(120)
def test_doctor_says_what_works() -> None:
    done = _weightsync(Path("/nonexistent"), "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = {f["what"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["ipc stream"]["verdict"] == "ok"
    assert {"ptrace scope", "memlock", "/dev/shm", "ipc direct", "p2p direct"} <= found.keys()
    assert "GB/s by" in found["ipc direct"]["detail"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bench", "--bucket", "0"], "at least one byte"),
        (["bench", "--bucket", "7 parsecs"], "units"),
        (["bench", "--model", "qwen9"], "qwen3-0.6b"),
        (["bench", "--repeat", "0"], "count >= 1"),
        (["bench", "--transport", "pigeon"], "invalid choice"),
    ],
)
def test_bad_arguments_end_with_status_2(cache: Path, arguments: list[str], text: str) -> None:
    done = _weightsync(cache, *arguments)
    assert done.returncode == 2
    assert text in done.stderr
