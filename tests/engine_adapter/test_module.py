"""Any torch module as an engine, and real transformers models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from adapter_contract import LIMIT_S, AdapterContract, Subject

from engine_adapter.module import ModuleAdapter
from weightsync.digest import digest_tensors
from weightsync.errors import IntegrityError, LayoutError, UnknownNameError, WeightSyncError
from weightsync.naming import Drop, Include, Rename
from weightsync.presets import get_preset
from weightsync.receiver import Receiver
from weightsync.sender import Sender

torch = pytest.importorskip("torch")
OPTIONS: Mapping[str, Any] = {"transport": "loopback", "bucket": "256KiB", "deadline_s": LIMIT_S}


def small(seed: int) -> Any:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 6)
    )
    module.embed = torch.nn.Embedding(7, 6)
    module.head = torch.nn.Linear(6, 7, bias=False)
    module.head.weight = module.embed.weight
    module.odd = torch.nn.Parameter(torch.randn(4, 3).to(torch.bfloat16).t())
    with torch.no_grad():
        for b in module.buffers():
            if b.is_floating_point():
                b.copy_(torch.randn(b.shape))
    return module


def tensors_of(adapter: ModuleAdapter) -> Mapping[str, Any]:
    names = adapter.layout().index
    return {n: t for n, t in adapter._named.items() if n in names}


class TestModuleAdapter(AdapterContract):
    rules: tuple[Any, ...] | None = None
    opaque: tuple[str, ...] = ()

    def make(self) -> Subject:
        adapter = ModuleAdapter(small(0), rules=self.rules, opaque=self.opaque)
        return Subject(adapter, tensors_of(adapter))

    def other(self, subject: Subject, seed: int) -> Mapping[str, Any]:
        torch.manual_seed(seed)
        new = ModuleAdapter(small(seed), rules=self.rules)
        return tensors_of(new)


class TestOpaqueModuleAdapter(TestModuleAdapter):
    opaque = ("0.weight", "odd", "embed.weight")


class TestModuleAdapterWithRules(TestModuleAdapter):
    rules = (
        Include(r".*running_.*"),
        Rename(r"^(\d)\.", r"layers.\1."),
        Drop("odd", "not served"),
    )

    def test_rules_are_followed_and_what_they_drop_is_listed(self, subject: Subject) -> None:
        names = set(subject.tensors)
        assert {"layers.0.weight", "layers.1.running_mean", "embed.weight"} <= names
        assert not names & {"odd", "0.weight", "1.running_mean"}
        assert subject.adapter.dropped == {
            "odd": "not served",
            "1.num_batches_tracked": "a buffer that no Include rule names",
        }
        assert dict(subject.adapter.layout().aliases) == {"head.weight": "embed.weight"}


# --- what changes under an adapter ------------------------------------------------------------------


def replace_parameter(module: Any) -> None:
    module[0].weight = torch.nn.Parameter(torch.ones(5, 6))


def move_storage(module: Any) -> None:
    module[0].weight.data = module[0].weight.data.clone()


def to_double(module: Any) -> None:
    module.double()


def replace_buffer(module: Any) -> None:
    module[1].running_mean = torch.zeros(5)


def untie(module: Any) -> None:
    module.head.weight = torch.nn.Parameter(torch.zeros(7, 6))


def remove(module: Any) -> None:
    del module.odd


@pytest.mark.parametrize(
    "change", [replace_parameter, move_storage, to_double, replace_buffer, untie, remove]
)
def test_a_module_that_was_moved_is_an_error(change: Callable[[Any], None]) -> None:
    module = small(0)
    rules = [Include(r".*running_.*")]
    adapter = ModuleAdapter(module, rules=rules)
    with (
        Receiver(adapter) as receiver,
        Sender.connect([receiver.url], rules=rules, **OPTIONS) as sender,
    ):
        with sender.update(version=1) as update:
            update.send(small(1))
        change(module)
        words = "not where they were"
        with pytest.raises(IntegrityError, match=words), sender.update(version=2) as update:
            update.send(small(2))
        assert receiver.version == 1


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(LayoutError, match="meta"):
        ModuleAdapter(torch.nn.Linear(3, 3, device="meta"))
    shared = torch.nn.Module()
    shared.w = torch.nn.Parameter(torch.ones(1).expand(4), requires_grad=False)
    with pytest.raises(LayoutError, match="'w'"):
        ModuleAdapter(shared)
    adapter = ModuleAdapter(torch.nn.Linear(3, 3), opaque=("weight",))
    with pytest.raises(LayoutError, match=r"'weight': got shape"):
        adapter.write("weight", torch.ones(3))


def test_prefixes_that_differ_are_joined_by_rules_and_shown_otherwise() -> None:
    def model(root: str, *, vision: bool) -> Any:
        top = torch.nn.Module()
        inner = torch.nn.Module()
        inner.text = torch.nn.Linear(4, 4)
        if vision:
            inner.vision = torch.nn.Linear(3, 3)
        setattr(top, root, inner)
        return top

    engine = model("language_model", vision=False)
    adapter = ModuleAdapter(engine)
    with Receiver(adapter) as receiver:
        rules = [Drop(r"model\.vision\..*", "text only"), Rename(r"^model\.", "language_model.")]
        with Sender.connect([receiver.url], rules=rules, **OPTIONS) as sender:
            for version, vision in ((1, False), (2, True)):
                source = model("model", vision=vision)
                with sender.update(version=version) as update:
                    update.send(source)
                assert torch.equal(engine.language_model.text.weight, source.model.text.weight)
        with Sender.connect([receiver.url], **OPTIONS) as sender:
            words = "'model.text.weight'.*closest: 'language_model.text.weight'"
            with pytest.raises(UnknownNameError, match=words), sender.update(version=3) as update:
                update.send(model("model", vision=False))


# --- real models ------------------------------------------------------------------------------------


def real(name: str, seed: int, **sizes: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**get_preset(name).config() | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


#: Enough layers and experts to go wrong in, and quick to make.
SMALL = {"num_hidden_layers": 2, "vocab_size": 64}


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_names_are_those_of_the_files(name: str) -> None:
    adapter = ModuleAdapter(real(name, 0))
    found = {(t.name, t.wire_forms[0].dtype, t.shape) for t in adapter.layout().tensors}
    assert found == {tuple(entry[:3]) for entry in get_preset(name).tensors()}


@pytest.mark.parametrize("placement", ["staged", "in_place"])
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_refitted_model_answers_as_a_freshly_loaded_one(name: str, placement: str) -> None:
    serving = real(name, 0, **SMALL)
    adapter = ModuleAdapter(serving)
    before = logits(serving)
    options = {**OPTIONS, "placement": placement}
    with Receiver(adapter) as receiver, Sender.connect([receiver.url], **options) as sender:
        for version in (1, 2, 3):
            training = real(name, version, **SMALL)
            with sender.update(version=version) as update:
                update.send(training)
            assert dict(update.report.dropped).keys() == dict(adapter.dropped).keys()
            with adapter.step():
                after = logits(serving)
            assert torch.equal(after, logits(training))
            assert not torch.equal(after, before)
            sent = dict(training.named_parameters(remove_duplicate=False))
            live = dict(serving.named_parameters(remove_duplicate=False))
            assert digest_tensors(live.items()) == digest_tensors(sent.items())
            before = after


def test_a_tied_head_stays_tied_and_is_updated() -> None:
    serving, training = real("tiny", 0, **SMALL), real("tiny", 1, **SMALL)
    if not serving.config.tie_word_embeddings:
        pytest.skip("this preset is not tied")
    adapter = ModuleAdapter(serving)
    with (
        Receiver(adapter) as receiver,
        Sender.connect([receiver.url], **OPTIONS) as sender,
        sender.update(version=1) as update,
    ):
        update.send(training)
    embed = serving.get_input_embeddings().weight
    assert serving.lm_head.weight is embed
    assert torch.equal(embed, training.lm_head.weight)


def test_a_state_dict_of_files_names_fits_fused_experts() -> None:
    serving, training = real("tiny-moe", 0, **SMALL), real("tiny-moe", 1, **SMALL)
    adapter = ModuleAdapter(serving)
    files = tensors_of(ModuleAdapter(training))
    with Receiver(adapter) as receiver, Sender.connect([receiver.url], **OPTIONS) as sender:
        with sender.update(version=1) as update:
            update.send({n: t.clone() for n, t in files.items()})
        assert torch.equal(logits(serving), logits(training))
        name = next(n for n in files if ".experts.1.up_proj" in n)
        with sender.update(version=2, scope=[name]) as update:
            update.send({name: torch.zeros_like(files[name])})
        live = tensors_of(adapter)
        assert not live[name].any()
        assert torch.equal(live[name.replace(".1.", ".0.")], files[name.replace(".1.", ".0.")])
    assert issubclass(IntegrityError, WeightSyncError)
