"""Plans with real memory behind them: bytes of several ranks moved in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import Array, Held, Model, build, fill, partitions, replicated, shards, whole
from test_plan import can

from weightsync import native
from weightsync.binding import (
    Spot,
    cuts_of,
    decode_entries,
    direct_table,
    encode_entries,
    landed_parts,
    pack_table,
    place_table,
    plan_staging,
    rebased,
    slot_spots,
    source_parts,
    unpack_table,
)
from weightsync.bucket import Cut
from weightsync.digest import DigestTable, digest_tensors
from weightsync.errors import ProtocolError
from weightsync.plan import RefitPlan, make_plan
from weightsync.types import Box, Contract, ContractChoice, Placement

Reference = dict[str, Array]


def make(source: Model, target: Model, contract: Contract, bucket_bytes: int = 512) -> RefitPlan:
    choice = ContractChoice(contract.value)
    return make_plan(
        source.layout, target.layout, bucket_bytes=bucket_bytes, capabilities=can(), choice=choice
    )


def all_addresses(model: Model) -> list[dict[int, int]]:
    return [model.addresses(r) for r in range(model.layout.world_size)]


def one_rank_of(plan: RefitPlan, rank: int) -> list[int]:
    return [i for i, t in enumerate(plan.transfers) if t.source_rank == rank]


def move_direct(plan: RefitPlan, source: Model, target: Model) -> None:
    """Every target rank reads; each source rank's transfers under that rank's addresses."""
    for rank in range(target.layout.world_size):
        landing = slot_spots(target.layout, rank, target.addresses(rank))
        for origin in range(source.layout.world_size):
            kept = [t for t in plan.transfers if t.source_rank == origin]
            part = _only(plan, kept)
            rows = direct_table(part, source.layout, source.addresses(origin), landing, rank)
            native.copy_segments(rows)


def _only(plan: RefitPlan, transfers: Any) -> RefitPlan:
    return RefitPlan(
        plan.source_digest, plan.target_digest, plan.tensors, tuple(transfers), plan.contract,
        plan.contract_reason, plan.bucket_bytes, plan.aliases,
    )  # fmt: skip


def move_stream(plan: RefitPlan, source: Model, target: Model, *, staged: bool) -> None:
    """Each pair of ranks has slots of its own; entries travel as bytes and are parsed again."""
    for rank in range(target.layout.world_size):
        slots = slot_spots(target.layout, rank, target.addresses(rank))
        landing, memory = slots, None
        if staged:
            staging = plan_staging(target.layout, rank, Placement.STAGED)
            memory = np.zeros(max(staging.num_bytes, 1), np.uint8)
            landing = staging.spots(target.layout, memory.ctypes.data)
        for origin in range(source.layout.world_size):
            mine = [t for t in plan.transfers if (t.source_rank, t.target_rank) == (origin, rank)]
            part = _only(plan, mine)
            for cuts in part.buckets:
                slot = np.full(part.bucket_bytes, 0xEE, np.uint8)
                rows = pack_table(part, cuts, source.layout, source.addresses(origin))
                native.copy_segments(rebased(rows, target=slot.ctypes.data))
                again = cuts_of(decode_entries(encode_entries(cuts), part, slot.nbytes))
                assert tuple(again) == cuts
                rows = unpack_table(part, again, landing)
                native.copy_segments(rebased(rows, source=slot.ctypes.data))
        if staged:
            native.copy_segments(place_table(target.layout, sorted(slots), landing, slots))


def check(target: Model, reference: Reference) -> None:
    for t in target.layout.tensors:
        for j, p in enumerate(t.placed):
            expected = reference[t.name][tuple(map(slice, p.box.start, p.box.stop))]
            got = target.view(t.name, j)
            assert got.tobytes() == np.ascontiguousarray(expected).tobytes(), (t.name, j)


def move_all_ways(source: Model, target: Model, reference: Reference) -> None:
    fill(source, reference)
    for contract, staged in (
        (Contract.DIRECT, False),
        (Contract.STREAM, False),
        (Contract.STREAM, True),
    ):
        for memory in target.memory:
            memory[:] = 0xAA
        plan = make(source, target, contract)
        if contract is Contract.DIRECT:
            move_direct(plan, source, target)
        else:
            move_stream(plan, source, target, staged=staged)
        check(target, reference)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, Model, Reference]:
    worlds = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source, target, reference = {}, {}, {}
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        dtype = draw(st.sampled_from(["int8", "uint16", "float32", "complex128"]))
        box, name = Box.whole(shape), f"t{i}"
        source[name] = (dtype, shape, draw(replicated(box, worlds[0])))
        target[name] = (dtype, shape, draw(partitions(box, worlds[1])))
        reference[name] = rng.integers(0, 100, shape).astype(dtype)
    return build(worlds[0], source), build(worlds[1], target), reference


@given(cases())
def test_any_layout_reaches_any_layout(case: tuple[Model, Model, Reference]) -> None:
    move_all_ways(*case)


def halves(shape: tuple[int, ...], rank: int, world: int) -> list[Held]:
    """A fused gate-and-up tensor under tensor parallelism: a slice of each half."""
    order = tuple(range(len(shape)))
    width = shape[-2] // 2
    cut = width // world
    found = []
    for start in (0, width):
        low = [0] * len(shape)
        high = list(shape)
        low[-2], high[-2] = start + rank * cut, start + (rank + 1) * cut
        found.append(Held(rank, Box(tuple(low), tuple(high)), order))
    return found


def interleaved(shape: tuple[int, ...], world: int, group: int) -> list[Held]:
    """Rows dealt to ranks in groups, as query, key and value heads of grouped attention are."""
    found = []
    for i, start in enumerate(range(0, shape[0], group)):
        box = Box((start, *(0,) * (len(shape) - 1)), (min(start + group, shape[0]), *shape[1:]))
        found.append(Held(i % world, box, tuple(range(len(shape)))))
    return found


SHAPE3 = (2, 8, 3)
REAL: dict[str, tuple[int, int, tuple[int, ...], list[Held], list[Held]]] = {
    "experts 5 over 2 ranks": (2, 1, (5, 4, 3), shards((5, 4, 3), 0, [3, 5]), [whole((5, 4, 3))]),
    "to experts 5 over 2": (1, 2, (5, 4, 3), [whole((5, 4, 3))], shards((5, 4, 3), 0, [3, 5])),
    "rows to columns": (2, 3, (6, 9), shards((6, 9), 0, [3, 6]), shards((6, 9), 1, [3, 6, 9])),
    "gate and up": (
        2,
        1,
        SHAPE3,
        [h for r in (0, 1) for h in halves(SHAPE3, r, 2)],
        [whole(SHAPE3)],
    ),
    "to gate and up": (
        1,
        4,
        (16, 3),
        [whole((16, 3))],
        [h for r in range(4) for h in halves((16, 3), r, 4)],
    ),
    "interleaved": (3, 2, (24, 2), interleaved((24, 2), 3, 2), interleaved((24, 2), 2, 4)),
    "transposed": (1, 1, (5, 7), [Held(0, Box.whole((5, 7)), (1, 0))], [whole((5, 7))]),
    "onto transposed": (1, 1, (5, 7), [whole((5, 7))], [Held(0, Box.whole((5, 7)), (1, 0))]),
    "replicated engine": (
        2,
        2,
        (4, 4),
        shards((4, 4), 0, [2, 4]),
        [whole((4, 4), 0), whole((4, 4), 1)],
    ),
    "pipeline": (3, 1, (6,), shards((6,), 0, [1, 1, 6]), [whole((6,))]),
}


@pytest.mark.parametrize("name", REAL)
def test_layouts_of_real_models(name: str) -> None:
    sources, targets, shape, held, wanted = REAL[name]
    reference = {"w": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)}
    source = build(sources, {"w": ("float32", shape, held)})
    target = build(targets, {"w": ("float32", shape, wanted)})
    move_all_ways(source, target, reference)


def test_many_small_slots_carry_one_large_tensor() -> None:
    shape = (37, 41)
    source = build(1, {"w": ("int8", shape, [Held(0, Box.whole(shape), (1, 0))])})
    target = build(1, {"w": ("int8", shape, [whole(shape)])})
    assert len(make(source, target, Contract.STREAM, 256).buckets) == 6
    move_all_ways(
        source, target, {"w": np.random.default_rng(1).integers(0, 99, shape).astype(np.int8)}
    )


def test_fp32_is_rounded_as_torch_rounds() -> None:
    torch = pytest.importorskip("torch")
    special = [0.0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 2**-9, 1e-45, -1e-40, 3.39e38, 65504.1]
    values = np.concatenate(
        [
            np.array(special, np.float32),
            np.random.default_rng(0).integers(0, 2**32, 3990, np.uint32).view(np.float32),
        ]
    )
    values = values[~np.isnan(values)]
    size = len(values) // 8 * 8
    shape = (8, size // 8)
    grid = values[:size].reshape(shape)
    wire = {"w": ["float32", "bfloat16"]}
    source = build(1, {"w": ("float32", shape, [Held(0, Box.whole(shape), (1, 0))])}, wire=wire)
    fill(source, {"w": grid})
    expected = torch.from_numpy(grid.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    from weightsync.layout import Layout, PlacedBox, Region, TensorLayout
    from weightsync.types import TensorMeta

    memory = np.zeros(size * 2, np.uint8)
    placed = PlacedBox(0, Box.whole(shape), 0, 0, (shape[1] * 2, 2), "bfloat16")
    entry = TensorLayout("w", (TensorMeta("w", "bfloat16", shape),), (placed,))
    target = Model(Layout(1, (entry,), ((Region(size * 2),),)), [memory])
    for contract in (Contract.STREAM, Contract.DIRECT):
        memory[:] = 0
        plan = make(source, target, contract)
        if contract is Contract.DIRECT:
            move_direct(plan, source, target)
        else:
            move_stream(plan, source, target, staged=False)
        assert (memory.view(np.int16).reshape(shape) == expected).all()
        landed = landed_parts(
            plan, slot_spots(target.layout, 0, target.addresses(0)), plan.transfers
        )
        sent = source_parts(plan, source.layout, source.addresses(0))
        assert DigestTable(landed).compute(1) == DigestTable(sent).compute(1)


# --- digests of what was sent and what landed -------------------------------------------------------


@given(st.data())
def test_the_source_digests_each_element_once_however_often_it_is_sent(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    box = Box.whole(shape)
    source = build(1, {"w": ("int8", shape, data.draw(replicated(box, 1)))})
    target = build(3, {"w": ("int8", shape, data.draw(replicated(box, 3)))})
    reference = {"w": np.random.default_rng(0).integers(-99, 99, shape).astype(np.int8)}
    fill(source, reference)
    plan = make(source, target, Contract.DIRECT)
    parts = source_parts(plan, source.layout, source.addresses(0))
    assert DigestTable(parts).compute(1) == digest_tensors(reference.items())


def test_a_digest_of_what_landed_sees_one_wrong_bit() -> None:
    shape = (4, 6)
    source = build(1, {"w": ("int8", shape, [whole(shape)])})
    target = build(
        1, {"w": ("int8", shape, [*shards(shape, 1, [3]), Held(0, Box((0, 3), shape), (1, 0))])}
    )
    reference = {"w": np.arange(24, dtype=np.int8).reshape(shape)}
    fill(source, reference)
    plan = make(source, target, Contract.DIRECT)
    move_direct(plan, source, target)
    spots = slot_spots(target.layout, 0, target.addresses(0))
    table = DigestTable(landed_parts(plan, spots, plan.transfers))
    assert table.compute(1) == digest_tensors(reference.items())
    target.view("w", 1)[2, 1] ^= 1
    assert table.compute(1) != digest_tensors(reference.items())


# --- slots ------------------------------------------------------------------------------------------


def simple() -> tuple[Model, Model, RefitPlan]:
    tensors: Any = {"a": ("float32", (8,), [whole((8,))]), "b": ("int8", (5,), [whole((5,))])}
    source, target = build(1, tensors), build(1, tensors)
    return source, target, make(source, target, Contract.STREAM)


@pytest.mark.parametrize(
    "cut",
    [
        Cut(2, 0, 4, 0), Cut(-1, 0, 4, 0), Cut(0, 0, 36, 0), Cut(0, 32, 4, 0), Cut(0, -4, 4, 0),
        Cut(0, 0, -4, 0), Cut(0, 0, 4, -4), Cut(0, 0, 32, 484), Cut(0, 2, 4, 0), Cut(0, 0, 6, 0),
        Cut(0, 2**62, 2**62, 0), Cut(1, 0, 5, 2**63 - 1),
    ],
)  # fmt: skip
def test_slot_metadata_that_points_elsewhere_is_refused(cut: Cut) -> None:
    _, _, plan = simple()
    good = decode_entries(encode_entries([Cut(0, 4, 28, 0)]), plan, 512)
    assert cuts_of(good) == [Cut(0, 4, 28, 0)]
    with pytest.raises(ProtocolError, match="slot metadata"):
        decode_entries(encode_entries([cut]), plan, 512)


def test_slot_metadata_is_whole_rows() -> None:
    _, _, plan = simple()
    with pytest.raises(ProtocolError, match="31 B is not a list of 32 B rows"):
        decode_entries(bytes(31), plan, 512)


def test_staging_holds_everything_or_only_what_has_no_address() -> None:
    _, target, _ = simple()
    plan = plan_staging(target.layout, 0, Placement.STAGED)
    assert (dict(plan.offsets), plan.num_bytes) == ({(0, 0): 0, (1, 0): 256}, 512)
    assert plan_staging(target.layout, 0, Placement.IN_PLACE).num_bytes == 0
    assert plan.spots(target.layout, 1000)[1, 0] == Spot(Box.whole((5,)), 1256, (1,), "int8")
