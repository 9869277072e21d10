"""``bench`` between several ranks: real shards of real processes, proven against the whole model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightsync.cli.main import main
from weightsync.transports import get_transport

pytest.importorskip("torch")
pytest.importorskip("transformers")

needs_p2p = pytest.mark.skipif(
    not get_transport("p2p").capabilities().is_usable, reason="p2p cannot be used here"
)
MODULE, CORE = ["--engine", "module"], ["--engine", "core"]

#: (options, bytes that each pair of ranks may move as parts of the model, at most)
RUNS = {
    "FSDP2 on 3 ranks to experts on 2": [
        "--model", "tiny-moe", "--trainer-layout", "fsdp=3", "--engine-layout", "ep=2", *CORE,
        "--transport", "ipc", "--direct",
    ],
    "HSDP 2 x 2 to TP 2": [
        "--model", "tiny", "--trainer-layout", "dp=2,fsdp=2", "--engine-layout", "tp=2", *CORE,
        "--transport", "ipc", "--stream", "--bucket", "256KiB",
    ],
    "PP 2 x FSDP2 2 to one rank": [
        "--model", "tiny", "--trainer-layout", "pp=2,fsdp=2", *MODULE,
        "--transport", "ipc", "--direct", "--placement", "in_place",
    ],
    "TP 2 to one rank": [
        "--model", "tiny", "--trainer-layout", "tp=2", *MODULE, "--transport", "ipc", "--stream",
    ],
    "one rank to TP 2": [
        "--model", "tiny", "--engine-layout", "tp=2", *CORE, "--transport", "p2p", "--direct",
    ],
}  # fmt: skip


def run(options: list[str], file: Path) -> Mapping[str, Any]:
    assert main(["bench", *options, "--repeat", "1", "--json", str(file)]) == 0
    found: Mapping[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_p2p if "p2p" in RUNS[n] else ()) for n in RUNS]
)
def test_every_engine_rank_gets_exactly_its_boxes(name: str, tmp_path: Path) -> None:
    found = run(RUNS[name], tmp_path / "bench.json")
    assert found["verified"] is True
    moved = {(a, b): n for a, b, n in found["pairs"]}
    assert sum(moved.values()) == found["total_bytes"]
    assert len({a for a, _ in moved}) == found["num_trainer_ranks"], "every trainer rank gives"
    assert {b for _, b in moved} == set(range(found["num_engine_ranks"]))
    if found["num_engine_ranks"] == 1:
        assert found["total_bytes"] == found["model_bytes"], "each byte once, whoever has replicas"
    else:
        each = [sum(n for (_, b), n in moved.items() if b == r) for r in range(2)]
        assert max(each) < found["model_bytes"], "no rank is sent what it does not hold"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trainer-layout", "fspd=2"], r"did you mean fsdp\?"),
        (["--trainer-layout", "fsdp=0"], "must be fsdp=COUNT"),
        (["--trainer-layout", "fsdp=64"], "64 \\+ 1 ranks are 65 processes here, at most 16"),
        (["--engine-layout", "tp=2"], "add --engine core"),
        (["--engine-layout", "tp=2,ep=4", *CORE], "each span all ranks or are 1"),
        (["--trainer-layout", "fsdp=2", "--updates", "4"], "--updates are for one rank"),
    ],
)
def test_what_cannot_be_is_said(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(["bench", "--model", "tiny", *options]) == 2
    assert re.search(words, capsys.readouterr().err)
