"""The example of training and following, as a user runs it, on a model trained for a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tiny") / "model"
    subprocess.run(
        [sys.executable, EXAMPLES / "train_tiny.py", "--steps", "4", "--output", directory],
        check=True,
        capture_output=True,
        timeout=200,
    )
    return directory


@pytest.mark.timeout(400)
def test_a_second_process_follows_the_training(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "follow_tiny.py", "--model", model, "--steps", "4",
         "--store", store],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "verified: yes, every live tensor"
    assert "trainer: version 4: delta" in lines[0]
    shown = [line for line in lines if line.startswith("engine: version")]
    assert shown[-1].startswith("engine: version 4 by ")
    assert "bits a changed element" in shown[-1]
    manifests = sorted(p.name for p in (store / "tiny").glob("v*.json"))
    assert len(manifests) == 5
    assert json.loads((store / "tiny" / manifests[-1]).read_bytes())["kind"] == "delta"
