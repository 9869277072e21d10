"""The bundled core as an adapter: the contract, without and with a running engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from adapter_contract import LIMIT_S, AdapterContract, Subject
from core_models import make_model, torch

from engine_adapter.bundled import BundledAdapter
from engine_adapter.core.config import parse_config
from engine_adapter.core.engine import Engine
from engine_adapter.core.engine_config import EngineConfig
from engine_adapter.core.model import DecoderModel
from weightsync.errors import IntegrityError, TaintedError, UpdateFailedError
from weightsync.receiver import Receiver
from weightsync.sender import Sender

OPTIONS: Mapping[str, Any] = {"transport": "loopback", "bucket": "64KiB", "deadline_s": LIMIT_S}


def random_model(variant: str, seed: int) -> DecoderModel:
    config = parse_config(make_model(variant, torch.bfloat16).config.to_diff_dict())
    model = DecoderModel(config, torch.bfloat16)
    torch.manual_seed(seed)
    for slot in model.slots.slots.values():
        slot.write(torch.randn(slot.shape))
    return model


def idle_engine(model: DecoderModel) -> Engine:
    return Engine(model, EngineConfig(page_size=16, kv_cache_tokens=512))


def tensors_of(model: DecoderModel) -> dict[str, Any]:
    return {n: s.read_whole() for n, s in model.slots.slots.items()}


class TestBundledAdapter(AdapterContract):
    variant = "moe-mixed"

    def make(self) -> Subject:
        model = random_model(self.variant, 0)
        self.prepare_model(model)
        return Subject(BundledAdapter(idle_engine(model)), tensors_of(model))

    def prepare_model(self, model: DecoderModel) -> None:
        """Before it is sealed."""

    def other(self, subject: Subject, seed: int) -> Mapping[str, Any]:
        return tensors_of(random_model(self.variant, seed))


class TestTiedBundledAdapter(TestBundledAdapter):
    variant = "tied"


class TestBundledAdapterWithDerived(TestBundledAdapter):
    variant = "dense"

    def prepare_model(self, model: DecoderModel) -> None:
        plant_derived(model)


# --- what an update does to the model -----------------------------------------------------------------


@contextmanager
def served(model: DecoderModel, **options: Any) -> Iterator[tuple[Sender, Engine]]:
    engine = idle_engine(model)
    with (
        Receiver(BundledAdapter(engine)) as receiver,
        Sender.connect([receiver.url], **{**OPTIONS, **options}) as sender,
    ):
        yield sender, engine


def plant_derived(model: DecoderModel) -> list[str]:
    """A tensor that follows from the last norm, and how often it was computed."""
    calls: list[str] = []
    doubled = torch.empty_like(model.norm)

    def refresh() -> None:
        calls.append("doubled")
        doubled.copy_(model.norm * 2)

    model.doubled = doubled
    model.slots.add_derived("doubled", doubled, ["model.norm.weight"], refresh)
    return calls


@pytest.mark.parametrize("placement", ["staged", "in_place"])
def test_derived_tensors_follow_once_an_update_and_tables_stay(placement: str) -> None:
    model = random_model("dense", 0)
    calls = plant_derived(model)
    tables = model.cos.clone(), model.sin.clone()
    with served(model, placement=placement) as (sender, _):
        for version in (1, 2):
            calls.clear()
            with sender.update(version=version) as update:
                update.send(tensors_of(random_model("dense", version)))
            assert calls == ["doubled"]
            assert torch.equal(model.doubled, model.norm * 2)
    assert torch.equal(model.cos, tables[0])
    assert torch.equal(model.sin, tables[1])


def test_a_partial_update_touches_only_what_it_names() -> None:
    model = random_model("moe", 0)
    calls = plant_derived(model)
    before = {n: t.clone() for n, t in tensors_of(model).items()}
    names = [
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ]
    new = {n: t for n, t in tensors_of(random_model("moe", 1)).items() if n in names}
    with served(model) as (sender, _):
        with sender.update(version=1) as update:  # an engine begins with a full one
            update.send(before)
        calls.clear()
        with sender.update(version=2, scope=names) as update:
            update.send(new)
        assert calls == []
        for name, tensor in tensors_of(model).items():
            wanted = new[name] if name in names else before[name]
            assert torch.equal(tensor, wanted), name


def test_a_tied_head_may_be_sent_under_either_name_or_both() -> None:
    model, other = random_model("tied", 0), random_model("tied", 1)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    tensors = tensors_of(other)
    both = tensors | {head: tensors[embed]}
    only_head = {n: t for n, t in both.items() if n != embed}
    with served(model) as (sender, _):
        for version, sent in enumerate((tensors, both, only_head), start=1):
            model.embed_tokens.zero_()
            with sender.update(version=version) as update:
                update.send(sent)
            assert torch.equal(model.lm_head, tensors[embed])
            assert model.lm_head is model.embed_tokens


def test_an_opaque_slot_is_written_and_verified_through_its_codec() -> None:
    class Negated:
        def __init__(self, like: Any) -> None:
            self.kept = torch.zeros_like(like)
            self.is_broken = False

        def store(self, tensor: Any) -> None:
            self.kept.copy_(-tensor)

        def load(self) -> Any:
            return -self.kept + (1 if self.is_broken else 0)

    model, name = random_model("dense", 0), "model.norm.weight"
    codec = Negated(model.norm)
    model.slots.make_opaque(name, codec)
    new = tensors_of(random_model("dense", 1))
    with served(model) as (sender, engine):
        with sender.update(version=1) as update:
            update.send(new)
        assert torch.equal(codec.kept, -new[name])
        codec.is_broken = True
        with pytest.raises(UpdateFailedError, match=name), sender.update(version=2) as update:
            update.send(new)
        with pytest.raises(TaintedError, match="refuses to generate"):
            engine.generate([[1, 2, 3]])
        codec.is_broken = False
        with sender.update(version=3) as update:
            update.send(new)
        engine.generate([[1, 2, 3]])


def test_a_replaced_tensor_is_found_before_anything_is_published() -> None:
    model = random_model("dense", 0)
    with served(model) as (sender, engine):
        layer = model.layers[1]
        layer.post_norm = layer.post_norm.clone()
        words = r"not where they were.*layers\[1\]\.post_norm"
        with pytest.raises(IntegrityError, match=words), sender.update(version=1) as update:
            update.send(tensors_of(model))
        assert engine.version is None


@pytest.mark.parametrize(("mode", "num_flushed"), [("retract", 2), ("in_place", 0)])
def test_labels_and_flushes_reach_the_engine(
    mode: str, num_flushed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, flushed = random_model("dense", 0), []
    with served(model, pause_mode=mode) as (sender, engine):
        monkeypatch.setattr(engine, "flush_cache", lambda: flushed.append(1))
        for version in (1, 2):
            with sender.update(version=version) as update:
                update.send(tensors_of(model))
            assert engine.version is not None
            assert engine.version.number == version
    assert len(flushed) == num_flushed  # in place keeps what requests have computed
