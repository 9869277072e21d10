"""The trained tiny model's script, with a training of a few steps instead of minutes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_tiny.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("trained") / "model"
    config = script.TrainingConfig(num_steps=12, batch_size=16, num_warmup_steps=2)
    script.make_checkpoint(directory, config)
    return directory


def test_problems_are_right_and_split_cleanly(script: ModuleType) -> None:
    training, held_out = script.split_problems()
    assert (training, held_out) == script.split_problems()
    assert len(held_out) == script.NUM_HELD_OUT
    assert not set(training) & set(held_out)
    for problem in held_out:
        operands, total = problem.split("=")
        left, right = operands.split("+")
        assert int(left) + int(right) == int(total[::-1])


def test_encode_marks_both_ends(script: ModuleType) -> None:
    tokens = script.encode(["47+85=231"])
    assert tokens.dtype == torch.int64
    assert "".join(script.ALPHABET[t] for t in tokens[0]) == "\n47+85=231\n"
    with pytest.raises(ValueError, match="substring not found"):
        script.encode(["47-85"])


def test_a_few_steps_lower_the_loss_and_repeat(script: ModuleType) -> None:
    config = script.TrainingConfig(num_steps=6, batch_size=16, num_warmup_steps=2)
    _, losses = script.train(config)
    assert losses[-1] < losses[0]
    _, again = script.train(config)
    assert losses == again


def test_checkpoint_holds_weights_alphabet_and_metrics(script: ModuleType, made: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert {"config.json", "model.safetensors", "vocab.json", "metrics.json"} <= names
    vocabulary = json.loads((made / "vocab.json").read_text())
    assert vocabulary["\n"] == json.loads((made / "config.json").read_text())["eos_token_id"]
    metrics = json.loads((made / "metrics.json").read_text())
    assert len(metrics["losses"]) == metrics["num_steps"] == 12
    assert 0.0 <= metrics["exact_match"] <= 1.0


def test_checkpoint_has_the_tensors_of_its_preset(script: ModuleType, made: Path) -> None:
    from weightsync.checkpoints import read_index

    assert [entry[:3] for entry in read_index(made)] == list(script.trained_preset().tensors())
    assert 1e6 <= script.trained_preset().total_parameters <= 3e6


def test_mean_log_prob_notices_scrambled_weights(script: ModuleType, made: Path) -> None:
    from weightsync.checkpoints import load_model

    model: Any = load_model(made, "float32")
    problems = script.split_problems()[1][:64]
    before = script.mean_log_prob(model, problems)
    assert before == pytest.approx(script.mean_log_prob(model, problems))
    assert before < 0.0
    with torch.no_grad():
        final_norm = model.model.norm.weight
        final_norm.copy_(final_norm.flip(0) * 4.0)
    assert script.mean_log_prob(model, problems) != pytest.approx(before)


def test_an_existing_checkpoint_is_left_alone(
    script: ModuleType, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (made / "metrics.json").stat().st_mtime_ns
    script.main(["--output", str(made)])
    assert "is there already" in capsys.readouterr().out
    assert (made / "metrics.json").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="--force"):
        script.make_checkpoint(made, script.TrainingConfig(num_steps=1))


def test_trained_tiny_model_makes_it_once(
    script: ModuleType, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = made.parent / "cache"
    calls: list[Path] = []

    def make(directory: Path, config: object) -> None:
        calls.append(directory)
        directory.mkdir(parents=True)

    monkeypatch.setattr(script, "make_checkpoint", make)
    first = script.trained_tiny_model(cache_dir)
    assert script.trained_tiny_model(cache_dir) == first
    assert calls == [first]
    assert first.parent == cache_dir
