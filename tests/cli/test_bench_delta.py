"""``weightsync bench --transport disk-delta`` as a user runs it, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightsync.cli.bench_delta import table
from weightsync.cli.main import main

pytest.importorskip("transformers")

#: Stable names of the result; scripts of users read them.
RESULT_NAMES = {
    "transport", "device", "model", "num_tensors", "total_bytes", "placement", "contract", "repeat",
    "encode_seconds", "publish_seconds", "fetch_seconds", "pause_seconds", "payload_bytes", "num_changed",
    "bits_per_changed_element", "publish_to_served_seconds", "full_version", "reload_pause_seconds",
    "baselines", "verified", "versions",
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["module", "core"])
def test_it_proves_and_compares(cache: Path, tmp_path: Path, engine: str) -> None:
    json_file = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "weightsync.cli.main", "bench", "--transport", "disk-delta",
         "--model", "tiny", "--engine", engine, "--repeat", "2", "--json", str(json_file),
         "--store", str(tmp_path)],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "WEIGHTSYNC_CACHE": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(json_file.read_text())
    assert result.keys() >= RESULT_NAMES
    assert result["verified"] is True
    assert result["kinds"] == ["full", "delta", "delta"]
    ours, *others = result["baselines"]
    assert ours["name"] == "weightsync"
    assert {"int32 + bf16", "XOR + zstd-1"} <= {r["name"] for r in others}
    assert all(r["is_same"] and r["payload_bytes"] > ours["payload_bytes"] for r in others)
    for word in (
        "pause of the engine",
        "payload",
        "bits a changed element",
        "int32 + bf16",
        "verified",
    ):
        assert word in done.stdout
    assert ("traffic" in result) == (engine == "core")
    assert not list(tmp_path.glob("weightsync-store-*")), "the store is removed again"
    result["verified"] = False
    assert "NO: digests differ" in table(result)


def test_what_it_does_not_take_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for extra in (["--stream"], ["--trainer-layout", "fsdp=2"]):
        assert main(["bench", "--transport", "disk-delta", "--model", "tiny", *extra]) == 2
        assert "disk-delta takes no" in capsys.readouterr().err
