"""``weightsync plan``: its table, its JSON, its picture, and what it says of layouts that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weightsync.checkpoints import write_checkpoint
from weightsync.cli.main import EXIT_USAGE, main
from weightsync.cli.plan import parse_layout, parse_rate
from weightsync.errors import ConfigError
from weightsync.presets import get_preset

MOE = [
    "plan",
    "--model",
    "tiny-moe",
    "--trainer-layout",
    "fsdp=2,ep=2",
    "--engine-layout",
    "tp=2,ep=4",
]


def test_the_table_says_what_moves_and_what_bounds_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MOE, "--engines", "2"]) == 0
    text = capsys.readouterr().out
    for words in (
        "tiny-moe, 231 tensors, 4.21 MB as bf16 travels",
        "2 ranks (fsdp=2, ep=2) on 1 hosts",
        "2 x 4 ranks (tp=2, ep=4) on 1 hosts",
        "50.0 GB/s a card",
        "lower bound",
        "p2p, forwarding",
        "broadcast",
        "bound by",
        "card of trainer rank",
        "published: ",
    ):
        assert words in text


def test_json_holds_every_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*MOE, "--json", str(path), "--wire", "fp8"]) == 0
    found = json.loads(path.read_text())
    assert found["engines"] == {"layout": {"tp": 2, "ep": 4}, "count": 1, "ranks": 4}
    assert sum(found["p2p"]["engine_in"]) == sum(found["p2p"]["trainer_out"])
    assert {e["way"] for e in found["estimates"]} >= {"p2p", "broadcast", "lower bound"}
    for estimate in found["estimates"]:
        assert estimate["seconds"] == pytest.approx(sum(estimate["terms"].values()))
    assert "control_s" in found["constants"]


def test_the_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main([*MOE, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_directory_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(get_preset("tiny"), tmp_path / "tiny", seed=0)
    assert main(["plan", "--model", str(tmp_path / "tiny"), "--engine-layout", "tp=2"]) == 0
    assert "46 tensors, 2.10 MB" in capsys.readouterr().out


def test_a_directory_tells_its_head_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One key head of 64: taken for 128, its rows would be no whole head."""
    preset = replace(
        get_preset("tiny"), name="odd", family="llama", num_heads=2, num_kv_heads=1, is_tied=False
    )
    write_checkpoint(preset, tmp_path / "odd", seed=0)
    assert main(["plan", "--model", str(tmp_path / "odd"), "--engine-layout", "tp=2"]) == 0
    (tmp_path / "odd" / "config.json").unlink()
    arguments = ["plan", "--model", str(tmp_path / "odd"), "--engine-layout", "tp=2"]
    assert main(arguments) == EXIT_USAGE
    assert "no whole heads of size 128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "kimi2"], "unknown model 'kimi2'; closest: kimi-k2"),
        (["--model", "zzz"], "unknown model 'zzz'; known: tiny,"),
        (["--trainer-layout", "fsdp=2,eq=2"], "'eq' is not a kind of parallelism here"),
        (["--engine-layout", "fsdp=2"], "'fsdp' is not a kind of parallelism here"),
        (["--trainer-layout", "ep=3"], "16 experts cannot be dealt evenly over ep=3; closest"),
        (
            ["--model", "tiny", "--trainer-layout", "", "--engine-layout", "ep=2"],
            "the model has no experts; leave ep out",
        ),
        (["--engine-layout", "tp=3"], "heads"),
        (["--trainer-layout", "pp=9"], "the model has 4 layers"),
        (["--trainer-layout", "fsdp=3,ep=2"], "one must divide the other"),
        (["--engines", "0"], "there must be at least one"),
        (
            ["--colocated", "--engines", "9", "--engine-layout", "tp=2"],
            "do not fit on the trainer's",
        ),
        (["--network", "fast"], "400Gbps"),
        (["--gpus-per-host", "0"], "at least one"),
        (["--constants", "/nowhere"], "constants cannot be read"),
    ],
)
def test_what_does_not_fit_is_said(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MOE, *arguments]) == EXIT_USAGE
    assert words in capsys.readouterr().err


def test_layouts_and_rates_are_parsed_strictly() -> None:
    assert parse_layout("pp=8, ep=32", ("pp", "ep"), "x") == {"pp": 8, "ep": 32}
    assert parse_layout("", ("pp",), "x") == {}
    for text in ("pp", "pp=", "pp=0", "pp=-1", "pp=1.5", "pp=2,pp=2", "=2"):
        with pytest.raises(ConfigError):
            parse_layout(text, ("pp", "ep"), "x")
    assert parse_rate("400Gbps") == parse_rate("50 GB/s") == 50e9
    for text in ("400", "Gbps", "0Gbps", "-1Gbps", "400GBit", "1e3Gbps"):
        with pytest.raises(ConfigError):
            parse_rate(text)
