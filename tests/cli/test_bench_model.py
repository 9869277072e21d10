"""Models of the benchmark: drawn ones are real shapes, changes change everything, too large is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightsync.cli import bench_model
from weightsync.cli.bench_model import (
    ENGINE_MASK,
    ModelChoice,
    change_all,
    check_room,
    choose_model,
    drawn_module,
    mask_of,
)
from weightsync.digest import digest_tensors
from weightsync.errors import CapacityError, ConfigError
from weightsync.presets import get_preset

torch = pytest.importorskip("torch")


def _digests(module: Any) -> dict[str, int]:
    return digest_tensors((n, p.detach()) for n, p in module.named_parameters())


def test_a_drawn_module_has_the_names_shapes_and_dtypes_of_its_preset() -> None:
    module = drawn_module("tiny-moe")
    drawn = {
        n: (str(p.dtype).removeprefix("torch."), tuple(p.shape))
        for n, p in module.named_parameters()
    }
    assert drawn == {
        name: (dtype, shape) for name, dtype, shape in get_preset("tiny-moe").tensors()
    }


def test_a_change_changes_every_tensor_and_never_into_the_engine_s() -> None:
    engine, trainer = drawn_module("tiny"), drawn_module("tiny")
    change_all(engine, ENGINE_MASK)
    before = _digests(engine)
    for version in range(8):
        change_all(trainer, mask_of(version))
        now = _digests(trainer)
        assert all(now[n] != before[n] for n in before)
    for parameter in trainer.parameters():
        assert bool(torch.isfinite(parameter).all())


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "available_bytes", lambda: 10**9)
    choice = ModelChoice("large", 1, 10**9, "large", None)
    with pytest.raises(CapacityError, match=r"needs \d+ bytes .* and 1000000000 bytes"):
        check_room(choice, "staged", "64MiB")


def test_a_small_model_fits() -> None:
    check_room(ModelChoice("small", 1, 10**6, "small", None), "staged", "1MiB")


def test_a_directory_is_looked_up_by_its_headers(tmp_path: Path) -> None:
    from weightsync.checkpoints import write_checkpoint

    write_checkpoint(get_preset("tiny"), tmp_path / "model", 0)
    choice = choose_model(str(tmp_path / "model"))
    assert choice.total_bytes == get_preset("tiny").total_bytes
    assert choice.directory == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["qwen9-1b", "./nowhere", "/nowhere/at/all"])
def test_an_unknown_model_is_a_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        choose_model(name)
