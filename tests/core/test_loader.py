"""Checkpoint directories into slots: sharded, fused, tied, split over ranks, and broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core_models import make_model, save_model, torch

from engine_adapter.core.model import DecoderModel
from engine_adapter.core.slots import SlotTable
from weightsync.errors import (
    CapacityError,
    ConfigError,
    DTypeMismatchError,
    LayoutError,
    MissingNameError,
    ShapeMismatchError,
    UnknownNameError,
)

safetensors = pytest.importorskip("safetensors.torch")
SINGLE = "model.safetensors"


def state_of(model: Any) -> dict[str, Any]:
    """Names of the files -> values, tied names once."""
    from weightsync.naming import module_tensors, rules_for

    return dict(module_tensors(model, rules_for(model)).named)


def assert_holds(slots: SlotTable, wanted: dict[str, Any]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(slots.slot(name).read_whole(), tensor), name
    assert set(slots.slots) == {slots.aliases.get(n, n) for n in wanted}


@pytest.mark.parametrize("variant", ["dense", "tied", "qwen2", "llama", "moe-mixed"])
def test_every_tensor_is_loaded_also_from_shards(variant: str, tmp_path: Path) -> None:
    model = make_model(variant, torch.bfloat16)
    save_model(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_holds(DecoderModel.from_pretrained(tmp_path).slots, state_of(model))


def edited(tmp_path: Path, variant: str, edit: Any) -> Path:
    """A saved model whose tensors are what ``edit`` makes of them."""
    directory = save_model(make_model(variant, torch.bfloat16), tmp_path)
    tensors = safetensors.load_file(directory / SINGLE)
    safetensors.save_file(edit(tensors), directory / SINGLE)
    return directory


def test_fused_experts_are_accepted_as_separate_ones(tmp_path: Path) -> None:
    model = make_model("moe", torch.bfloat16)
    directory = save_model(model, tmp_path)
    tensors = safetensors.load_file(directory / SINGLE)
    kept = {n: t for n, t in tensors.items() if ".experts." not in n}
    fused = {n: p.detach() for n, p in model.named_parameters() if ".experts." in n}
    assert len(fused) == 4
    safetensors.save_file(kept | fused, directory / SINGLE)
    assert_holds(DecoderModel.from_pretrained(directory).slots, state_of(model))


def test_a_tied_head_may_stand_in_the_file_if_it_is_equal(tmp_path: Path) -> None:
    embed = "model.embed_tokens.weight"
    directory = edited(tmp_path, "tied", lambda t: t | {"lm_head.weight": t[embed].clone()})
    DecoderModel.from_pretrained(directory)
    edited(tmp_path, "tied", lambda t: t | {"lm_head.weight": t[embed] + 1})
    with pytest.raises(LayoutError, match=r"'lm_head.weight' differs from 'model\.embed_tokens"):
        DecoderModel.from_pretrained(directory)
    edited(tmp_path, "tied", lambda t: {n if n != embed else "lm_head.weight": x
                                        for n, x in t.items()})  # fmt: skip
    DecoderModel.from_pretrained(directory)


def test_tables_that_follow_from_the_configuration_are_left_out(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    DecoderModel.from_pretrained(edited(tmp_path, "llama", lambda t: t | {name: torch.ones(8)}))


def without(name: str) -> Any:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("edit", "error", "words"),
    [
        (without(NORM), MissingNameError, f"1 tensors of the model are in no file: .*{NORM}"),
        (without("model.layers.1.mlp.experts.7.up_proj.weight"), MissingNameError, "7.up_proj"),
        (
            lambda t: t | {"model.layers.1.input_norm.weight": t[NORM].clone()},
            UnknownNameError,
            rf"'model\.layers\.1\.input_norm\.weight' is not a tensor.*closest: .*'{NORM}'",
        ),
        (
            lambda t: t | {NORM: torch.ones(63, dtype=torch.bfloat16)},
            ShapeMismatchError,
            rf"'{NORM}': got shape \(63,\), the model has \(64,\)",
        ),
        (
            lambda t: t | {NORM: torch.ones(64, dtype=torch.int8)},
            DTypeMismatchError,
            f"'{NORM}' is stored as int8; quantised",
        ),
    ],
)
def test_what_does_not_fit_is_named(edit: Any, error: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        DecoderModel.from_pretrained(edited(tmp_path, "moe", edit))


def test_an_untied_model_without_a_head(tmp_path: Path) -> None:
    with pytest.raises(MissingNameError, match=r"lm_head\.weight"):
        DecoderModel.from_pretrained(edited(tmp_path, "dense", without("lm_head.weight")))


def test_adapters_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    directory = save_model(make_model("dense", torch.bfloat16), tmp_path)
    with pytest.raises(ConfigError, match="dtype 'int8' is not served; known: auto, bfloat16"):
        DecoderModel.from_pretrained(directory, dtype="int8")
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="LoRA adapter"):
        DecoderModel.from_pretrained(directory)


def test_values_are_cast_to_the_dtype_asked_for(tmp_path: Path) -> None:
    model = make_model("dense", torch.bfloat16)
    save_model(model, tmp_path)
    slots = DecoderModel.from_pretrained(tmp_path, dtype="float32").slots
    assert_holds(slots, {n: t.float() for n, t in state_of(model).items()})


def test_too_little_memory_says_how_much_and_which_knob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(make_model("dense", torch.bfloat16), tmp_path)
    monkeypatch.setattr("engine_adapter.core.arena.available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"weights need \d+ bytes .* 1000 bytes .*tp_size"):
        DecoderModel.from_pretrained(tmp_path)


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    save_model(make_model("dense", torch.bfloat16), tmp_path)
    assert DecoderModel.from_pretrained(tmp_path, max_positions=32).cos.shape == (32, 8)
    with pytest.raises(ConfigError, match="max_positions 513: the model has 1 to 512"):
        DecoderModel.from_pretrained(tmp_path, max_positions=513)
