"""Layouts that cannot be, sources that are none, and checkpoint directories as sources."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.checkpoints import write_checkpoint
from weightsync.errors import LayoutError, MissingNameError
from weightsync.layout import Layout, PlacedBox, Region, TensorLayout, join_layouts
from weightsync.layouts import check_layout, checkpoint_layout, trainer_layout
from weightsync.layouts.check import missing_boxes
from weightsync.naming import Drop, Rename, apply_rules, module_tensors
from weightsync.presets import get_preset
from weightsync.types import Box, TensorMeta

SHAPE = (6, 4)


def placed(
    rank: int, start: tuple[int, ...], stop: tuple[int, ...], dtype: str = "float32"
) -> PlacedBox:
    return PlacedBox(rank, Box(start, stop), 0, 0, (16, 4), dtype)


def layout(*boxes: PlacedBox) -> Layout:
    world = 1 + max(p.rank for p in boxes)
    tensor = TensorLayout("w", (TensorMeta("w", "float32", SHAPE),), boxes)
    return Layout(world, (tensor,), ((Region(1000),),) * world)


def test_replicas_and_parts_are_fine() -> None:
    check_layout(
        layout(placed(0, (0, 0), (6, 4)), placed(1, (0, 0), (3, 4)), placed(1, (3, 0), (6, 4)))
    )
    check_layout(
        layout(placed(0, (0, 0), (4, 4)), placed(1, (2, 0), (6, 4)))
    )  # they overlap, and agree


def test_what_no_rank_holds_is_named() -> None:
    with pytest.raises(MissingNameError, match=r"'w' of shape \(6, 4\): 4 elements, the first in box "
                                               r"\(3, 2\):\(5, 4\), .*ranks 0, 1"):  # fmt: skip
        check_layout(
            layout(placed(0, (0, 0), (3, 4)), placed(1, (3, 0), (6, 2)), placed(0, (5, 2), (6, 4)))
        )
    nowhere = TensorLayout("w", (TensorMeta("w", "float32", SHAPE),), ())
    with pytest.raises(MissingNameError, match=r"24 elements.*none"):
        check_layout(Layout(1, (nowhere,), ((Region(1),),)))


def test_what_one_rank_holds_twice_is_named() -> None:
    boxes = [placed(0, (0, 0), (6, 4)), placed(1, (0, 0), (4, 4)), placed(1, (3, 0), (6, 4))]
    with pytest.raises(LayoutError, match="rank 1 of the engine holds boxes"):
        check_layout(layout(*boxes), "engine")


def test_replicas_of_two_dtypes_are_named() -> None:
    with pytest.raises(LayoutError, match=r"rank 0 .* as float32, rank 1 .* as bfloat16"):
        check_layout(layout(placed(0, (0, 0), (6, 4)), placed(1, (0, 0), (1, 4), "bfloat16")))
    check_layout(layout(placed(0, (0, 0), (6, 4)), placed(1, (0, 0), (0, 4), "bfloat16")))


def test_ranks_that_disagree_about_a_shape_are_named() -> None:
    def part(rank: int, shape: tuple[int, ...]) -> Layout:
        box = PlacedBox(rank, Box((0, 0), (1, 1)), 0, 0, (4, 4), "float32")
        tensor = TensorLayout("w", (TensorMeta("w", "float32", shape),), (box,))
        own = ((Region(1000),),)
        return Layout(2, (tensor,), ((), *own) if rank else (*own, ()))

    with pytest.raises(LayoutError, match="'w': ranks 0 and 1 disagree"):
        join_layouts([part(0, (6, 4)), part(1, (6, 5))])


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_missing_boxes_are_what_is_missing(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    boxes = []
    for _ in range(data.draw(st.integers(0, 5))):
        low = [data.draw(st.integers(0, n)) for n in shape]
        boxes.append(
            Box(
                tuple(low),
                tuple(data.draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True)),
            )
        )
    held = np.zeros(shape, int)
    for box in boxes:
        held[tuple(map(slice, box.start, box.stop))] = 1
    missing = missing_boxes(shape, tuple(boxes))
    for box in missing:
        part = tuple(map(slice, box.start, box.stop))
        assert np.all(held[part] == 0)
        held[part] += 2
    assert np.all(held > 0)
    assert sum(b.num_elements for b in missing) + int(np.sum(held == 1)) == math.prod(shape)


def test_described_layouts_stand_the_check() -> None:
    metas = [TensorMeta(*t) for t in get_preset("tiny-moe").tensors()]
    check_layout(trainer_layout(metas, fsdp=3, tp=2, pp=2))


# --- a checkpoint directory ---------------------------------------------------------------------------


def test_a_directory_is_a_layout_of_its_files(tmp_path: Path) -> None:
    preset = get_preset("tiny-moe")
    write_checkpoint(preset, tmp_path / "model", shard_bytes=600_000)
    found = checkpoint_layout(tmp_path / "model")
    check_layout(found)
    assert [(t.name, t.wire_forms[0].dtype, t.shape) for t in found.tensors] == list(
        preset.tensors()
    )
    (regions,) = found.regions
    assert len(regions) > 2
    safetensors = pytest.importorskip("safetensors")
    for tensor in found.tensors[:: len(found.tensors) // 7]:
        (spot,) = tensor.placed
        file = tmp_path / "model" / regions[spot.region].device.removeprefix("file:")
        with safetensors.safe_open(file, "pt") as opened:
            expected = opened.get_tensor(tensor.name)
        size = tensor.wire_forms[0].num_bytes
        data = file.read_bytes()[spot.offset_bytes : spot.offset_bytes + size]
        assert data == expected.view(dtype=__import__("torch").uint8).numpy().tobytes()


# --- what is no source --------------------------------------------------------------------------------

ONE = np.ones(2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_fsdp_wrapped_module.layers.0.weight", "fully_shard"),
        ("layers.0._fsdp_wrapped_module._flat_param", "fully_shard"),
        ("_flat_param", "fully_shard"),
        ("base_model.model.q_proj.lora_A.default.weight", "merge"),
        ("model.q_proj.lora_B.weight", "merge"),
        ("model.q_proj.base_layer.weight", "merge"),
        ("state.0.exp_avg", "optimizer"),
        ("optimizer.state.exp_avg_sq", "optimizer"),
        ("fp32_from_fp16_params.0", "write its fp32 masters back"),
    ],
)
def test_what_is_no_weight_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        apply_rules([("ok", ONE), (name, ONE)], ())


def test_names_that_only_look_alike_are_weights() -> None:
    named = [
        (n, ONE) for n in ("flora_A.weight", "state_proj.weight", "a.optimizer_free", "exp_average")
    ]
    assert len(apply_rules(named, ()).named) == 4


def test_a_merged_adapter_may_be_sent_with_rules() -> None:
    rules = [Drop(r".*\.lora_[AB]\..*", "merged into its base"), Rename(r"\.base_layer\.", ".")]
    named = [("q.base_layer.weight", ONE), ("q.lora_A.default.weight", ONE)]
    found = apply_rules(named, rules)
    assert [n for n, _ in found.named] == ["q.weight"]


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused_whatever_its_names() -> None:
    torch = pytest.importorskip("torch")
    from distributed_ranks import fake_rank

    with fake_rank(0, 2):
        from torch.distributed.fsdp import FullyShardedDataParallel

        inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
        inner[0] = FullyShardedDataParallel(inner[0], device_id=torch.device("cpu"))
        with pytest.raises(LayoutError, match=r"'0' is FullyShardedDataParallel: .*fully_shard"):
            module_tensors(inner, [Rename("_fsdp_wrapped_module.", "")])


def test_zero_3_is_refused_by_its_marks() -> None:
    class Partitioned(np.ndarray[Any, Any]):
        ds_shape = (4, 4)

        def numel(self) -> int:
            return self.size

    with pytest.raises(LayoutError, match="ZeRO-3"):
        apply_rules([("w", np.zeros(0).view(Partitioned))], ())
