"""Layouts of whole clusters from a description: no weights, no processes, no devices.

For plans and predictions. A model is a list of metas in checkpoint names; a description is how many
ways each kind of parallelism cuts it. Every rank has one region, its boxes dense one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weightsync.errors import ConfigError
from weightsync.layout import NO_REGION, Layout, PlacedBox, Region, TensorLayout
from weightsync.layouts.quantised import Wired, paired_metas, wire_metas
from weightsync.layouts.roles import ModelSizes, Place, Role, model_sizes, place_of
from weightsync.presets import get_preset
from weightsync.tables import dense_strides
from weightsync.types import BUCKET_ALIGNMENT_BYTES, Box, SlotKind, TensorMeta, item_bytes

Range = tuple[int, int]
Held = Iterable[tuple[int, Box]]  # (rank, box)


def preset_metas(name: str) -> tuple[TensorMeta, ...]:
    """The tensors of a preset's checkpoint. Raises :class:`ConfigError` for an unknown one."""
    return tuple(TensorMeta(*tensor) for tensor in get_preset(name).tensors())


def floor_part(extent: int, index: int, count: int) -> Range:
    """Part ``index`` of ``count`` nearly equal parts of ``range(extent)``, as engines cut."""
    return index * extent // count, (index + 1) * extent // count


def ceil_part(extent: int, index: int, count: int) -> Range:
    """Part ``index`` of ``count`` parts of ``ceil(extent / count)``, the last ones shorter or empty:
    as ``torch.chunk`` and DTensor cut."""
    size = -(-extent // count)
    return min(index * size, extent), min((index + 1) * size, extent)


def cut(box: Box, dim: int, part: Range) -> Box:
    """``box`` with ``part`` of dimension ``dim``, counted within it."""
    start, stop = list(box.start), list(box.stop)
    start[dim], stop[dim] = box.start[dim] + part[0], box.start[dim] + part[1]
    return Box(tuple(start), tuple(stop))


# --- engines ---------------------------------------------------------------------------------------


def engine_layout(
    metas: Sequence[TensorMeta],
    *,
    tp: int = 1,
    ep: int = 1,
    dp: int = 1,
    wire: str = "bfloat16",
    head_dim: int | None = None,
) -> Layout:
    """What each rank of one engine holds; equal to what the bundled core declares for TP, EP and TP x EP.

    There are ``max(tp * dp, ep)`` ranks. Attention, dense MLPs and the vocabulary are cut over ``tp``;
    ``rank % tp`` is the tensor-parallel rank, so ``dp`` (attention data parallel, or replicas) is the
    slower index, and where ``ep > tp * dp`` they are replicas too. Experts go in ``ep`` parts; one
    part's experts are cut in width over ``max(1, tp // ep)`` neighbouring ranks: ``ep = 1`` cuts them
    over ``tp``, ``ep >= tp`` leaves them whole. Expert part ``(rank // width) % ep`` is a rank's.

    ``wire`` is ``bfloat16`` (slots take the metas' dtypes, bytes land in place) or ``fp8`` (see
    :func:`weightsync.layouts.quantised.wire_metas`: opaque slots with fp8 and bf16 wire forms and their
    scales). ``head_dim`` is needed where no ``q_norm`` shows it and it is not 128. Several engines are
    several layouts.

    Raises :class:`ConfigError` for counts that do not fit each other or the model.
    """
    _check_counts(tp=tp, ep=ep, dp=dp)
    world = max(tp * dp, ep)
    width = max(1, tp // ep)
    if (tp % ep and ep % tp) or world % (tp * dp) or world % (ep * width):
        raise ConfigError(
            f"tp={tp}, ep={ep}, dp={dp}: one of tp and ep must divide the other, and tp * dp and ep "
            f"the number of ranks, {world}"
        )
    grid = _EngineGrid(world, tp, ep, width, model_sizes(metas, head_dim))
    return _build(world, wire_metas(metas, wire), grid)


@dataclass(frozen=True)
class _EngineGrid:
    world: int
    tp: int
    ep: int
    width: int
    sizes: ModelSizes

    def __post_init__(self) -> None:
        kv = self.sizes.num_kv_heads
        if kv % self.tp and self.sizes.is_guess:
            raise ConfigError(
                f"tp={self.tp} cuts key projections within heads, if these have 128 elements; give "
                "head_dim= of the model"
            )
        if kv and kv % self.tp and self.tp % kv:
            raise ConfigError(f"{kv} key heads and tp={self.tp}: one must divide the other")
        if self.sizes.num_heads % self.tp:
            raise ConfigError(
                f"{self.sizes.num_heads} attention heads cannot be cut by tp={self.tp}"
            )

    def first_rank(self, name: str, place: Place) -> int:
        return 0

    def held(self, meta: TensorMeta, place: Place) -> Held:
        if place.expert is not None:
            return self._expert(meta, place)
        return [(rank, self._part(meta, place.role, rank % self.tp)) for rank in range(self.world)]

    def _expert(self, meta: TensorMeta, place: Place) -> Held:
        """The ranks whose range of experts has it; several where experts are replicated."""
        part = _part_with(place.expert or 0, self.sizes.num_experts, self.ep)
        block = self.ep * self.width
        for start in range(part * self.width, self.world, block):
            for w in range(self.width):
                yield start + w, _cut_role(meta, place.role, w, self.width)

    def _part(self, meta: TensorMeta, role: Role, index: int) -> Box:
        heads = self.sizes.num_kv_heads
        if role is Role.KV_HEADS and heads % self.tp:
            head = index // (self.tp // heads)
            return _cut_role(meta, role, head, heads)
        return _cut_role(meta, role, index, self.tp)


def _part_with(expert: int, num_experts: int, count: int) -> int:
    """The part that :func:`floor_part` puts ``expert`` in."""
    return ((expert + 1) * count - 1) // num_experts


def _cut_role(
    meta: TensorMeta,
    role: Role,
    index: int,
    count: int,
    part: Callable[[int, int, int], Range] = floor_part,
) -> Box:
    whole = Box.whole(meta.shape)
    if role is Role.REPLICATED or not meta.shape:
        return whole
    dim = 1 if role is Role.COLUMNS and len(meta.shape) > 1 else 0
    return cut(whole, dim, part(meta.shape[dim], index, count))


# --- trainers --------------------------------------------------------------------------------------


def trainer_layout(
    metas: Sequence[TensorMeta],
    *,
    fsdp: int = 1,
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dp: int = 1,
) -> Layout:
    """What each rank of a trainer holds.

    A pipeline stage has ``S = max(dp * fsdp * tp, ep)`` ranks and there are ``pp * S``; the mesh is
    [pp, dp, fsdp, tp], the last index fastest: ``rank = ((stage * dp + replica) * fsdp + shard) * tp +
    tp_rank``. Where ``ep`` is the larger, dense tensors have ``S / (dp * fsdp * tp)`` times as many
    replicas. Stage ``s`` has layers ``s * layers // pp`` up to ``(s + 1) * layers // pp``; the embedding
    is on the first, all else outside of layers on the last.

    Dense tensors are cut by ``tp`` as in an engine, but in chunks of DTensor (``ceil``), then in rows
    by ``fsdp``. Experts are one stacked tensor, as transformers keeps them: the experts of a layer
    go in ``ep`` parts (part ``rank % ep`` of a stage's ranks: neighbours hold different ones, as in
    Megatron), each part's in chunks over the ``fsdp * tp / ep`` ranks that share it (in rows of each tensor
    if they are more than the experts); with ``ep = 1`` they are chunked over ``fsdp`` and cut in width by
    ``tp``. Further ranks are replicas.

    Raises :class:`ConfigError` for counts that do not fit each other.
    """
    _check_counts(fsdp=fsdp, tp=tp, ep=ep, pp=pp, dp=dp)
    inner = dp * fsdp * tp
    stage = max(inner, ep)
    if stage % inner or stage % ep:
        raise ConfigError(
            f"ep={ep} and dp * fsdp * tp = {inner}: one must divide the other, as expert parallel "
            "uses the same ranks"
        )
    sizes = model_sizes(metas, head_dim=1)
    if pp > max(1, sizes.num_layers):
        raise ConfigError(f"pp={pp}: the model has {sizes.num_layers} layers")
    grid = _TrainerGrid(stage, fsdp, tp, ep, pp, dp, sizes)
    return _build(pp * stage, paired_metas(metas), grid)


@dataclass(frozen=True)
class _TrainerGrid:
    stage: int  # ranks of a pipeline stage
    fsdp: int
    tp: int
    ep: int
    pp: int
    dp: int
    sizes: ModelSizes

    def first_rank(self, name: str, place: Place) -> int:
        """Of the pipeline stage that has it."""
        if place.layer is not None:
            return self.stage * _part_with(place.layer, self.sizes.num_layers, self.pp)
        return 0 if "embed_tokens" in name else self.stage * (self.pp - 1)

    def held(self, meta: TensorMeta, place: Place) -> Held:
        own = self._dense if place.expert is None else self._expert
        return ((rank, box) for rank in range(self.stage) for box in own(meta, place, rank))

    def _dense(self, meta: TensorMeta, place: Place, rank: int) -> Iterable[Box]:
        box = _cut_role(meta, place.role, rank % self.tp, self.tp, ceil_part)
        yield self._rows(box, rank // self.tp % self.fsdp, self.fsdp)

    def _rows(self, box: Box, index: int, count: int) -> Box:
        return cut(box, 0, ceil_part(box.shape[0], index, count)) if box.start else box

    def _expert(self, meta: TensorMeta, place: Place, rank: int) -> Iterable[Box]:
        expert, num_experts = place.expert or 0, self.sizes.num_experts
        if self.ep == 1:
            experts = ceil_part(num_experts, rank // self.tp % self.fsdp, self.fsdp)
            box = _cut_role(meta, place.role, rank % self.tp, self.tp, ceil_part)
            if experts[0] <= expert < experts[1]:
                yield box
            return
        first, stop = floor_part(num_experts, rank % self.ep, self.ep)
        if not first <= expert < stop:
            return
        sharers = max(1, self.fsdp * self.tp // self.ep)
        index = rank // self.ep % sharers
        if sharers > stop - first:
            yield self._rows(Box.whole(meta.shape), index, sharers)
            return
        chunk = ceil_part(stop - first, index, sharers)
        if chunk[0] <= expert - first < chunk[1]:
            yield Box.whole(meta.shape)


# --- building --------------------------------------------------------------------------------------


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ConfigError(f"{name}={count!r} must be a whole number of at least 1")


class _Grid(Protocol):
    """Which ranks hold what. What ``held`` says depends on role, expert and shape alone, and its ranks
    count from ``first_rank``."""

    def first_rank(self, name: str, place: Place) -> int: ...

    def held(self, meta: TensorMeta, place: Place) -> Held: ...


#: Rank, box, its dense strides in bytes and its elements.
_Spot = tuple[int, Box, tuple[int, ...], int]


def _build(world: int, listed: Iterable[Wired], grid: _Grid) -> Layout:
    used_bytes, tensors = [0] * world, []
    known: dict[tuple[Any, ...], list[_Spot]] = {}  # layers are alike
    for wired in listed:
        meta = wired.forms[0]
        place = place_of(meta.name)
        key = (
            place.role,
            place.expert,
            meta.shape,
            meta.dtype,
            wired.weight and wired.weight.shape,
        )
        if key not in known:
            known[key] = _spots(wired, place, grid)
        first, item, placed = grid.first_rank(meta.name, place), item_bytes(meta.dtype), []
        for spot_rank, box, strides, count in known[key]:
            rank = first + spot_rank
            if wired.kind is SlotKind.OPAQUE:
                placed.append(PlacedBox(rank, box, NO_REGION, 0, (0,) * len(strides), meta.dtype))
                continue
            placed.append(PlacedBox(rank, box, 0, used_bytes[rank], strides, meta.dtype))
            used_bytes[rank] += count * item
            used_bytes[rank] += -used_bytes[rank] % BUCKET_ALIGNMENT_BYTES
        tensors.append(TensorLayout(meta.name, wired.forms, tuple(placed), wired.kind))
    regions = tuple((Region(used),) for used in used_bytes)
    return Layout(world, tuple(tensors), regions)


def _spots(wired: Wired, place: Place, grid: _Grid) -> list[_Spot]:
    """Where a tensor lies, without empty boxes; scales lie where the blocks of their weight do."""
    meta = wired.forms[0]
    item, found = item_bytes(meta.dtype), []
    for rank, whole in grid.held(wired.weight or meta, place):
        box = wired.scale_box(whole) if wired.weight is not None else whole
        if box.num_elements or not meta.num_elements:
            found.append((rank, box, dense_strides(box.shape, item), box.num_elements))
    return found
