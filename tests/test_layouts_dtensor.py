"""Layouts of real trainers: FSDP2, HSDP, tensor parallel plans and both, one fake rank at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed_ranks import Whole, collect, fake_rank
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import LayoutError
from weightsync.layouts import preset_metas, trainer_layout
from weightsync.layouts.dtensor import Trainer
from weightsync.naming import FusedExperts, apply_rules
from weightsync.sources import ModuleSource, NamedSource, chunks
from weightsync.tensors import LocalTensors, local_tensors
from weightsync.types import CastPolicy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Mlp(torch.nn.Module):  # type: ignore[misc]
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(5, 11)
        self.down = torch.nn.Linear(11, 5)
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x)) * self.scale


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 5)
        self.layers = torch.nn.ModuleList([Mlp(), Mlp()])
        self.head = torch.nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def numbered(module: Any) -> Any:
    """Every element of every parameter is another whole number."""
    start = 0
    for parameter in module.parameters():
        stop = start + parameter.numel()
        values = torch.arange(start, stop).reshape(parameter.shape)
        parameter.data.copy_(values.to(parameter.dtype))
        start = stop
    return module


def reference(module: Any) -> dict[str, Any]:
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def shard_all(model: Any, mesh: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params={layer.scale})  # it has no dimension to cut
    fully_shard(model, mesh=mesh, ignored_params={layer.scale for layer in model.layers})


def fsdp(world_size: int) -> Callable[[Any], None]:
    return lambda model: shard_all(model, init_device_mesh("cpu", (world_size,)))


def hsdp(replicas: int, shards: int) -> Callable[[Any], None]:
    def wrap(model: Any) -> None:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp", "fsdp"))
        shard_all(model, mesh)

    return wrap


def tensor_parallel(model: Any, mesh: Any) -> None:
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan, src_data_rank=None)


def tp(size: int) -> Callable[[Any], None]:
    return lambda model: tensor_parallel(model, init_device_mesh("cpu", (size,)))


def fsdp_tp(shards: int, size: int) -> Callable[[Any], None]:
    def wrap(model: Any) -> None:
        mesh = init_device_mesh("cpu", (shards, size), mesh_dim_names=("fsdp", "tp"))
        tensor_parallel(model, mesh["tp"])
        shard_all(model, mesh["fsdp"])

    return wrap


TRAINERS = {
    "plain": (3, lambda model: None),
    "fsdp-2": (2, fsdp(2)),
    "fsdp-4, some shards empty": (4, fsdp(4)),
    "fsdp-8, most shards empty": (8, fsdp(8)),
    "hsdp-2x2": (4, hsdp(2, 2)),
    "tp-2": (2, tp(2)),
    "tp-3": (3, tp(3)),
    "fsdp-2 x tp-2": (4, fsdp_tp(2, 2)),
    "fsdp-3 x tp-2": (6, fsdp_tp(3, 2)),
    "fsdp-2 x tp-4": (8, fsdp_tp(2, 4)),
}


def collected(world_size: int, wrap: Callable[[Any], None]) -> Whole:
    alive = []

    def one(rank: int) -> LocalTensors:
        model = numbered(Model())
        wrap(model)
        alive.append(model)
        local, _ = ModuleSource(None, CastPolicy.STRICT, rank, world_size).collect(model)
        return local

    return collect(world_size, one)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_rank_gives_its_boxes_of_every_tensor(trainer: str) -> None:
    world_size, wrap = TRAINERS[trainer]
    whole = collected(world_size, wrap)
    whole.check(reference(numbered(Model())))
    assert whole.layout.aliases == {"head.weight": "embed.weight"}
    assert whole.layout.world_size == world_size


def test_no_rank_has_more_than_its_shard() -> None:
    whole = collected(4, hsdp(2, 2))
    up = whole.layout.tensors[whole.layout.index["layers.0.up.weight"]]
    assert [(p.rank, p.box.start[0], p.box.stop[0]) for p in up.placed] == [
        (0, 0, 6), (1, 6, 11), (2, 0, 6), (3, 6, 11),
    ]  # fmt: skip


def test_fsdp_over_tensor_parallel_is_not_what_torch_says_of_one_offset() -> None:
    whole = collected(4, fsdp_tp(2, 2))
    up = whole.layout.tensors[whole.layout.index["layers.0.up.weight"]]
    rows = [(p.rank, p.box.start[0], p.box.stop[0]) for p in up.placed]
    assert rows == [(0, 0, 3), (1, 6, 9), (2, 3, 6), (3, 9, 11)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_mesh_and_placements(data: st.DataObject) -> None:
    """Through real DTensors; every element as it was distributed, on as many ranks as it is replicated."""
    from torch.distributed.tensor.placement_types import _StridedShard

    sizes = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()), dims.map(Shard), dims.map(lambda d: _StridedShard(d, split_factor=2))
    )
    placements = [data.draw(kinds) for _ in sizes]
    values = torch.arange(float(np.prod(shape))).reshape(shape)
    world_size, alive, untold = int(np.prod(sizes)), [], []

    def one(rank: int) -> LocalTensors:
        mesh = init_device_mesh("cpu", sizes)
        alive.append(distribute_tensor(values, mesh, placements, src_data_rank=None))
        try:
            return local_tensors([("w", alive[-1])], rank=rank, world_size=world_size)
        except LayoutError as error:
            if "cannot be told" not in str(error):
                raise
            untold.append(rank)
            return local_tensors([], rank=rank, world_size=world_size)

    whole = collect(world_size, one)
    if not untold:
        whole.check({"w": values})


def test_a_declared_order_of_cutting_is_followed() -> None:
    spec_module = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(spec_module, "ShardOrderEntry"):
        pytest.skip("this torch cuts in the order of the mesh alone")
    values, alive = torch.arange(8.0), []

    def one(rank: int) -> LocalTensors:
        mesh = init_device_mesh("cpu", (2, 2))
        outer, inner = divmod(rank, 2)
        local = values.chunk(2)[inner].chunk(2)[outer]  # the second mesh dimension cuts first
        meta = spec_module.TensorMeta(values.shape, values.stride(), values.dtype)
        order = (spec_module.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        spec = spec_module.DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
        alive.append(DTensor(local, spec, requires_grad=False))
        return local_tensors([("w", alive[-1])], rank=rank, world_size=4)

    whole = collect(4, one)
    whole.check({"w": values})
    assert [p.box.start[0] for p in whole.layout.tensors[0].placed] == [0, 4, 2, 6]


# --- experts that transformers keeps fused ------------------------------------------------------------


def tiny_moe() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=12, intermediate_size=16, moe_intermediate_size=6, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=23, num_experts=5,
        num_experts_per_tok=2, tie_word_embeddings=False, dtype=torch.float32,
    )  # fmt: skip
    return numbered(transformers.Qwen3MoeForCausalLM(config))


def separate(model: Any) -> dict[str, Any]:
    """As files have it, by cutting every fused tensor by hand."""
    found = {}
    for name, p in model.named_parameters():
        value = p.detach().numpy()
        prefix, _, part = name.rpartition(".experts.")
        if not prefix:
            found[name] = value
            continue
        for e in range(5):
            stem = f"{prefix}.experts.{e}"
            if part == "down_proj":
                found[f"{stem}.down_proj.weight"] = value[e]
            else:
                found[f"{stem}.gate_proj.weight"] = value[e][:6]
                found[f"{stem}.up_proj.weight"] = value[e][6:]
    return found


@pytest.mark.parametrize(("replicas", "shards"), [(1, 3), (1, 8), (2, 2)])
def test_experts_fused_in_memory_and_sharded_are_separate_tensors(
    replicas: int, shards: int
) -> None:
    alive = []
    world_size = replicas * shards

    def one(rank: int) -> LocalTensors:
        model = tiny_moe()
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp", "fsdp"))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        alive.append(model)
        return ModuleSource(None, CastPolicy.STRICT, rank, world_size).collect(model)[0]

    whole = collect(world_size, one)
    whole.check(separate(tiny_moe()))
    metas = [t.wire_forms[0] for t in whole.layout.tensors]
    described = trainer_layout(metas, fsdp=shards, dp=replicas)
    for tensor in whole.layout.tensors:  # what a description says is what FSDP2 does
        same = described.tensors[described.index[tensor.name]]
        real = {(p.rank, p.box) for p in tensor.placed if p.box.num_elements}
        assert {(p.rank, p.box) for p in same.placed} == real, tensor.name


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_fused_experts_sharded_in_any_dimension(dim: int, part: str, is_transposed: bool) -> None:
    shape = {"gate_up_proj": (5, 8, 3), "down_proj": (5, 3, 4)}[part]
    if is_transposed:
        shape = (shape[0], shape[2], shape[1])
    fused = torch.arange(float(np.prod(shape))).reshape(shape)
    rules, alive = [FusedExperts(is_transposed)], []
    expected = dict(apply_rules([(f"mlp.experts.{part}", fused)], rules).named)

    def one(rank: int) -> LocalTensors:
        mesh = init_device_mesh("cpu", (3,))
        alive.append(distribute_tensor(fused, mesh, [Shard(dim)], src_data_rank=None))
        source = NamedSource(rules, CastPolicy.STRICT, rank, 3)
        return source.collect([(f"mlp.experts.{part}", alive[-1])])[0]

    collect(3, one).check(expected)


# --- casts, generators, kept layouts ------------------------------------------------------------------


def test_fp32_masters_offer_bf16_as_plain_tensors_do() -> None:
    with fake_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)], src_data_rank=None)
        local = local_tensors([("w", tensor)], cast=CastPolicy.FP32_TO_BF16, rank=1, world_size=2)
    (entry,) = local.layout.tensors
    assert [form.dtype for form in entry.wire_forms] == ["float32", "bfloat16"]
    assert entry.placed[0].box.start == (2, 0)
    assert [len(r) for r in local.layout.regions] == [0, 1]


def test_generators_of_all_ranks_are_cut_at_the_same_names() -> None:
    found = []
    for rank in range(2):
        with fake_rank(rank, 2):
            model = numbered(Model())
            shard_all(model, init_device_mesh("cpu", (2,)))
            parts = chunks(model.named_parameters(), (), 300, rank, 2)
            found.append([[n for n, _ in part.named] for part in parts])
    assert found[0] == found[1]
    assert len(found[0]) > 2


def test_a_layout_is_kept_while_shards_stay_where_they_are() -> None:
    with fake_rank(0, 2):
        model = numbered(Model())
        shard_all(model, init_device_mesh("cpu", (2,)))
        source = ModuleSource(None, CastPolicy.STRICT, 0, 2)
        first, _ = source.collect(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
        optimizer.step()
        assert source.collect(model)[0] is first
        parameter = model.layers[0].up.weight
        parameter._local_tensor = parameter._local_tensor.clone()  # the same DTensor, elsewhere
        again, _ = source.collect(model)
        assert again is not first
        assert again.addresses != first.addresses


def test_what_a_forward_pass_left_gathered_is_sharded_again() -> None:
    with fake_rank(0, 2):
        model = numbered(Model())
        shard_all(model, init_device_mesh("cpu", (2,)))
        source = ModuleSource(None, CastPolicy.STRICT, 0, 2)
        first, _ = source.collect(model)
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
        assert not isinstance(model.embed.weight, DTensor)  # the root stays gathered
        again, _ = source.collect(model)
        assert again is first
        assert isinstance(model.embed.weight, DTensor)
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
        fresh, _ = ModuleSource(None, CastPolicy.STRICT, 0, 2).collect(model)
        assert fresh.layout == first.layout


def test_state_dicts_of_one_model_are_one_source() -> None:
    with fake_rank(0, 2):
        model = numbered(Model())
        shard_all(model, init_device_mesh("cpu", (2,)))
        source = NamedSource((), CastPolicy.STRICT, 0, 2)
        first, _ = source.collect(list(model.state_dict().items()))
        assert source.collect(list(model.state_dict().items()))[0].layout is first.layout
        model.layers[0].up.weight = torch.nn.Parameter(model.layers[0].up.weight.clone())
        assert source.collect(list(model.state_dict().items()))[0].layout is not first.layout


def test_the_same_memory_as_another_part_is_another_source() -> None:
    with fake_rank(0, 2):
        mesh, local = init_device_mesh("cpu", (2,)), torch.ones(2, 2)
        source = NamedSource((), CastPolicy.STRICT, 0, 2)
        shapes = []
        for dim in (0, 1):
            tensor = DTensor.from_local(local, mesh, [Shard(dim)])
            shapes.append(source.collect([("w", tensor)])[0].layout.tensors[0].shape)
        assert shapes == [(4, 2), (2, 4)]


# --- refused ------------------------------------------------------------------------------------------


def give(rank: int, size: int, make: Callable[[Any], Any], given: tuple[int, int]) -> None:
    with fake_rank(rank, size):
        mesh = init_device_mesh("cpu", (size,))
        named = [("model.w", make(mesh))]
        local_tensors(named, rank=given[0], world_size=given[1])


def sharded(mesh: Any) -> Any:
    return distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src_data_rank=None)


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (lambda m: DTensor.from_local(torch.ones(2), m, [Partial()]), (1, 2), "redistribute"),
        (sharded, (0, 1), "has rank 1, the trainer was declared with world_size=1"),
        (sharded, (0, 2), r"this process at \[1\]"),
        (sharded, (2, 3), "at no place of its mesh"),
        (sharded, (3, 3), "rank 3 of a trainer of 3 ranks"),
        (
            lambda m: DTensor.from_local(
                torch.ones(2, 2), m, [Shard(0)], shape=(6, 2), stride=(2, 1)
            ),
            (1, 2),
            "expected",
        ),
    ],
)
def test_what_is_no_box_of_this_trainer_is_refused(make: Any, given: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        give(1, 2, make, given)


def test_a_tensor_without_elements_is_a_name_on_every_rank() -> None:
    def one(rank: int) -> LocalTensors:
        mesh = init_device_mesh("cpu", (2,))
        empty = distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)], src_data_rank=None)
        return local_tensors([("w", empty)], rank=rank, world_size=2)

    (tensor,) = collect(2, one).layout.tensors
    assert (tensor.shape, [p.rank for p in tensor.placed]) == ((0, 3), [0, 1])


def test_a_replicated_tensor_is_a_replica_on_every_rank() -> None:
    alive = []

    def one(rank: int) -> LocalTensors:
        mesh = init_device_mesh("cpu", (2,))
        alive.append(distribute_tensor(torch.arange(3.0), mesh, [Replicate()], src_data_rank=None))
        return local_tensors(Trainer(rank, 2).localise([("w", alive[-1])]), rank=rank, world_size=2)

    whole = collect(2, one)
    whole.check({"w": torch.arange(3.0)})
    assert [p.rank for p in whole.layout.tensors[0].placed] == [0, 1]


def test_the_preset_that_tests_use_is_described() -> None:
    assert trainer_layout(preset_metas("tiny-moe"), fsdp=3).world_size == 3
