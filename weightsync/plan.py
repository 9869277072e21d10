"""RefitPlan: which bytes go from which rank to which rank, computed once from two layouts.

Pure and deterministic, integers only: no address, no device, no clock. ``binding.py`` turns a plan
and addresses into segment tables; that is redone when an address changes, the plan is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.bucket import Cut, cut_buckets
from weightsync.errors import (
    DTypeMismatchError,
    LayoutError,
    MissingNameError,
    ProtocolError,
    ShapeMismatchError,
    UnavailableError,
    UnknownNameError,
)
from weightsync.layout import Layout, PlacedBox, TensorLayout
from weightsync.manifest import name_some
from weightsync.types import (
    BUCKET_ALIGNMENT_BYTES,
    Availability,
    Box,
    Capabilities,
    Contract,
    ContractChoice,
    RegionKind,
    SlotKind,
    TensorMeta,
    format_bytes,
    item_bytes,
)

#: Bytes that describe one entry of a slot: four int64 (see ``stream_entries`` in binding.py).
ENTRY_BYTES = 32

_MAX_BUCKET_BYTES = 2**48


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor on its way: its one wire form and its place in both layouts."""

    meta: TensorMeta  # named as the target names it
    source: int  # index in the source layout's tensors
    target: int  # index in the target layout's tensors


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a tensor that one source placement gives to one target placement."""

    tensor: int  # index in RefitPlan.tensors
    source_placed: int  # index in that tensor's placements
    target_placed: int
    source_rank: int
    target_rank: int
    box: Box
    num_bytes: int  # in wire form


@dataclass(frozen=True)
class RefitPlan:
    """Everything about one movement that does not depend on addresses."""

    source_digest: str  # of the layouts it was computed from
    target_digest: str
    tensors: tuple[PlannedTensor, ...]
    transfers: tuple[Transfer, ...]
    contract: Contract
    contract_reason: str
    bucket_bytes: int
    aliases: Mapping[str, str]  # tied names of the source -> the name that travels

    @cached_property
    def total_bytes(self) -> int:
        return sum(t.num_bytes for t in self.transfers)

    @cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(t.meta for t in self.tensors)

    @cached_property
    def transfer_bytes(self) -> npt.NDArray[np.int64]:
        """[transfers] bytes of each, in wire form."""
        return np.array([t.num_bytes for t in self.transfers], dtype=np.int64)

    @cached_property
    def transfer_units(self) -> npt.NDArray[np.int64]:
        """[transfers] bytes of one element of each, in wire form."""
        items = [item_bytes(t.meta.dtype) for t in self.tensors]
        return np.array([items[t.tensor] for t in self.transfers], dtype=np.int64)

    @cached_property
    def buckets(self) -> tuple[tuple[Cut, ...], ...]:
        """The slots of a stream; ``Cut.item`` is the transfer."""
        sizes = (t.num_bytes for t in self.transfers)
        cuts = cut_buckets(sizes, self.bucket_bytes, max_entries(self.bucket_bytes))
        return tuple(tuple(c) for c in cuts)

    @cached_property
    def digest(self) -> str:
        body = json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> bytes."""
        found: dict[tuple[int, int], int] = {}
        for t in self.transfers:
            pair = (t.source_rank, t.target_rank)
            found[pair] = found.get(pair, 0) + t.num_bytes
        return found

    def explain(self) -> str:
        """The plan in words, for people."""
        lines = [
            f"{len(self.tensors)} tensors, {len(self.transfers)} transfers, "
            f"{format_bytes(self.total_bytes)}, contract {self.contract}: {self.contract_reason}"
        ]
        if self.contract is Contract.STREAM:
            lines.append(
                f"{len(self.buckets)} buckets of at most {format_bytes(self.bucket_bytes)}"
            )
        for (source, target), size in sorted(self.bytes_by_pair().items()):
            lines.append(f"trainer rank {source} -> engine rank {target}: {format_bytes(size)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; :meth:`from_json` is its exact inverse."""
        return {
            "source_digest": self.source_digest,
            "target_digest": self.target_digest,
            "tensors": [
                [t.meta.name, t.meta.dtype, t.meta.shape, t.source, t.target] for t in self.tensors
            ],
            "transfers": [
                [t.tensor, t.source_placed, t.target_placed, t.source_rank, t.target_rank,
                 t.box.start, t.box.stop]
                for t in self.transfers
            ],
            "contract": self.contract.value,
            "contract_reason": self.contract_reason,
            "bucket_bytes": self.bucket_bytes,
            "aliases": dict(self.aliases),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Any) -> RefitPlan:
        """Parse. Raises :class:`ProtocolError` or :class:`LayoutError`."""
        try:
            tensors = tuple(
                PlannedTensor(TensorMeta(str(n), str(d), tuple(map(int, s))), int(a), int(b))
                for n, d, s, a, b in value["tensors"]
            )
            transfers = tuple(_transfer_from_json(t, tensors) for t in value["transfers"])
            return cls(
                str(value["source_digest"]),
                str(value["target_digest"]),
                tensors,
                transfers,
                Contract(value["contract"]),
                str(value["contract_reason"]),
                int(value["bucket_bytes"]),
                {str(k): str(v) for k, v in value["aliases"].items()},
            )
        except LayoutError:
            raise
        except (
            AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise ProtocolError(f"malformed plan: {error!r}") from error


def _transfer_from_json(value: Any, tensors: Sequence[PlannedTensor]) -> Transfer:
    *numbers, start, stop = value
    i, held, wanted, source_rank, target_rank = map(int, numbers)
    if min(i, held, wanted, source_rank, target_rank) < 0:
        raise ProtocolError(f"malformed plan: a negative index in transfer {value!r}")
    box = Box(tuple(map(int, start)), tuple(map(int, stop)))
    size = _wire_bytes(box, tensors[i].meta)
    return Transfer(i, held, wanted, source_rank, target_rank, box, size)


def _wire_bytes(box: Box, meta: TensorMeta) -> int:
    return box.num_elements * item_bytes(meta.dtype)


def max_entries(bucket_bytes: int) -> int:
    """Entries that a slot's metadata has room for: a 32nd of the slot, at least 64."""
    return max(64, bucket_bytes // 32 // ENTRY_BYTES)


def slot_bytes(bucket_bytes: int) -> int:
    """Size of a stream slot: the bucket and behind it room for its entries."""
    return -(-(bucket_bytes + max_entries(bucket_bytes) * ENTRY_BYTES) // 4096) * 4096


def check_plan(plan: RefitPlan, source: Layout, target: Layout) -> None:
    """What an engine rank checks of a plan it was sent, before it trusts a single offset in it.

    Raises :class:`ProtocolError` or :class:`LayoutError` naming the tensor.
    """
    if plan.target_digest != target.digest:
        raise ProtocolError(
            "the plan was made for another layout than this engine's; connect again"
        )
    if plan.source_digest != source.digest:
        raise ProtocolError(
            "the plan was made for another layout than the trainer's; connect again"
        )
    if not BUCKET_ALIGNMENT_BYTES <= plan.bucket_bytes < _MAX_BUCKET_BYTES:
        raise ProtocolError(f"plan: a bucket of {plan.bucket_bytes} B cannot be")
    if len({p.target for p in plan.tensors}) != len(plan.tensors):
        raise ProtocolError("plan: a tensor is listed twice")
    for planned in plan.tensors:
        _check_tensor(planned, source, target)
    brought: dict[tuple[int, int], list[Box]] = {}
    for t in plan.transfers:
        planned = plan.tensors[t.tensor]
        _check_transfer(t, planned, source, target)
        brought.setdefault((planned.target, t.target_placed), []).append(t.box)
    for planned in plan.tensors:
        for j, placed in enumerate(target.tensors[planned.target].placed):
            if not _is_exact_cover(placed.box, brought.get((planned.target, j), [])):
                raise ProtocolError(
                    f"plan: {placed.box} of {planned.meta.name!r} is not brought exactly once"
                )


def _check_tensor(planned: PlannedTensor, source: Layout, target: Layout) -> None:
    sides = ((planned.source, source), (planned.target, target))
    if not all(0 <= index < len(layout.tensors) for index, layout in sides):
        raise ProtocolError(f"plan: tensor {planned.meta.name!r} points outside the layout")
    theirs, mine = source.tensors[planned.source], target.tensors[planned.target]
    if planned.meta not in mine.wire_forms:
        raise ProtocolError(f"plan: {planned.meta} is not a wire form of {mine.name!r}")
    if mine.kind is SlotKind.AFFINE and any(p.dtype != planned.meta.dtype for p in mine.placed):
        raise ProtocolError(f"plan: {planned.meta} is not how the slot {mine.name!r} is stored")
    offered = [w.dtype for w in theirs.wire_forms]
    if planned.meta.dtype not in offered or theirs.shape != planned.meta.shape:
        raise ProtocolError(f"plan: the trainer's {theirs.name!r} does not offer {planned.meta}")


def _check_transfer(t: Transfer, planned: PlannedTensor, source: Layout, target: Layout) -> None:
    name, num_dims = planned.meta.name, len(planned.meta.shape)
    theirs, mine = source.tensors[planned.source].placed, target.tensors[planned.target].placed
    if len(t.box.start) != num_dims:
        raise ProtocolError(f"plan: {t.box} is not a box of {name!r}, which has {num_dims} dims")
    if t.source_placed >= len(theirs) or not _holds(theirs[t.source_placed].box, t.box):
        raise ProtocolError(f"plan: a transfer of {name!r} leaves its source")
    if t.target_placed >= len(mine) or not _holds(mine[t.target_placed].box, t.box):
        raise ProtocolError(f"plan: a transfer of {name!r} leaves its slot")
    ranks = (theirs[t.source_placed].rank, mine[t.target_placed].rank)
    if ranks != (t.source_rank, t.target_rank):
        raise ProtocolError(
            f"plan: a transfer of {name!r} from rank {t.source_rank} to {t.target_rank}, whose "
            f"memory is on ranks {ranks}"
        )


def _is_exact_cover(whole: Box, parts: Sequence[Box]) -> bool:
    """Whether the parts, all within ``whole``, hold each of its elements exactly once."""
    if not whole.num_elements:
        return all(part == whole for part in parts)
    if sum(part.num_elements for part in parts) != whole.num_elements:
        return False
    if len(parts) == 1 or not whole.shape:
        return len(parts) == 1
    active: list[Box] = []
    for part in sorted(parts, key=lambda box: box.start):
        active = [box for box in active if box.stop[0] > part.start[0]]
        if not part.num_elements or any(box.intersect(part) for box in active):
            return False
        active.append(part)
    return True


def _holds(outer: Box, inner: Box) -> bool:
    return not inner.num_elements or outer.intersect(inner) == inner


# --- making a plan --------------------------------------------------------------------------------


def make_plan(
    source: Layout,
    target: Layout,
    *,
    bucket_bytes: int,
    capabilities: Capabilities,
    choice: ContractChoice = ContractChoice.AUTO,
) -> RefitPlan:
    """The plan that brings every tensor of ``source`` to wherever ``target`` holds it.

    Raises :class:`UnknownNameError` (a name the engine does not have), :class:`ShapeMismatchError`,
    :class:`DTypeMismatchError`, :class:`MissingNameError` (a box that no source rank holds) or
    :class:`UnavailableError` (a contract that cannot be had).
    """
    tensors = _match(source, target)
    transfers: list[Transfer] = []
    for i, planned in enumerate(tensors):
        transfers += _transfers(i, planned, source, target)
    have = on_devices(source, target, capabilities)
    contract, reason = _choose_contract(
        tensors, transfers, source, bucket_bytes=bucket_bytes, have=have, choice=choice
    )
    return RefitPlan(
        source.digest,
        target.digest,
        tuple(tensors),
        tuple(transfers),
        contract,
        reason,
        bucket_bytes,
        dict(source.aliases),
    )


def _match(source: Layout, target: Layout) -> list[PlannedTensor]:
    """Pair the tensors of both sides by name, through the aliases of both."""
    names: dict[str, str] = {t.name: t.name for t in source.tensors} | dict(source.aliases)
    unknown = [n for n in names if target.canonical(n) is None]
    if unknown:
        first = unknown[0]
        raise UnknownNameError(
            f"{len(unknown)} tensors of the trainer are not tensors of the engine: "
            f"{name_some(unknown)}; {first!r}: {target.closest(first)}. Declare a rename or drop "
            "rule, or do not send them"
        )
    by_target: dict[str, str] = {}
    for name, origin in names.items():
        slot = target.canonical(name)
        if slot is not None and by_target.setdefault(slot, origin) != origin:
            raise LayoutError(
                f"the engine ties {name!r} to {slot!r}, the trainer holds them as two tensors "
                f"({by_target[slot]!r} and {origin!r}); send one of them, or untie the engine"
            )
    return [
        PlannedTensor(
            _wire_form(source.tensors[source.index[origin]], target.tensors[target.index[slot]]),
            source.index[origin],
            target.index[slot],
        )
        for slot, origin in by_target.items()
    ]


def _wire_form(source: TensorLayout, target: TensorLayout) -> TensorMeta:
    if source.shape != target.shape:
        raise ShapeMismatchError(
            f"{target.name!r}: the trainer has shape {source.shape}, the engine {target.shape}"
        )
    offered = {w.dtype for w in source.wire_forms}
    for form in target.wire_forms:
        if form.dtype in offered:
            return form
    wanted = ", ".join(w.dtype for w in target.wire_forms)
    raise DTypeMismatchError(
        f"{target.name!r}: the trainer offers {', '.join(sorted(offered))}, the engine takes {wanted}; "
        "the only cast on the way is fp32 -> bf16 (cast='fp32_to_bf16')"
    )


def _transfers(
    tensor: int, planned: PlannedTensor, source: Layout, target: Layout
) -> Iterable[Transfer]:
    """Cover each target box by boxes of the source, each element once."""
    sources = source.tensors[planned.source].placed
    for j, wanted in enumerate(target.tensors[planned.target].placed):
        if not wanted.box.num_elements:
            # Empty tensors travel as a name without bytes, so that coverage sees them.
            if sources:
                yield _transfer(tensor, planned, (0, sources[0]), (j, wanted), wanted.box)
            continue
        rest = [wanted.box]
        for i, held in _spread(sources, wanted.rank):
            left: list[Box] = []
            for box in rest:
                common = held.box.intersect(box)
                if common is None:
                    left.append(box)
                    continue
                yield _transfer(tensor, planned, (i, held), (j, wanted), common)
                left += box.subtract(common)
            rest = left
            if not rest:
                break
        if rest:
            raise MissingNameError(
                f"{planned.meta.name!r}: no trainer rank holds {rest[0]} of shape "
                f"{planned.meta.shape}, which engine rank {wanted.rank} needs"
            )


def _spread(placed: Sequence[PlacedBox], target_rank: int) -> Iterable[tuple[int, PlacedBox]]:
    """Source placements, replicas rotated so that target ranks start at different ones."""
    order = list(enumerate(placed))
    shift = target_rank % max(1, len(order))
    return order[shift:] + order[:shift]


def _transfer(
    tensor: int,
    planned: PlannedTensor,
    held: tuple[int, PlacedBox],
    wanted: tuple[int, PlacedBox],
    box: Box,
) -> Transfer:
    size = _wire_bytes(box, planned.meta)
    return Transfer(tensor, held[0], wanted[0], held[1].rank, wanted[1].rank, box, size)


# --- stream or direct -----------------------------------------------------------------------------


def on_devices(source: Layout, target: Layout, have: Capabilities) -> Capabilities:
    """What a transport can do between the devices of two layouts.

    Raises :class:`UnavailableError` for a pair that nothing joins yet.
    """
    sides = [_devices(source), _devices(target)]
    if all(devices <= {"cpu"} for devices in sides):
        return have
    (theirs, ours) = (", ".join(sorted(devices)) or "nowhere" for devices in sides)
    if any(len(devices) > 1 for devices in sides):
        raise UnavailableError(
            f"the trainer's tensors lie on {theirs}, the engine's on {ours}: each side must hold "
            "them on one device"
        )
    if any(device.partition(":")[0] != "cuda" for devices in sides for device in devices):
        raise UnavailableError(
            f"the trainer's tensors lie on {theirs}, the engine's on {ours}: both must lie on the "
            "host, or both on one CUDA device"
        )
    if not have.reads_cuda:
        raise UnavailableError(
            f"transport {have.name!r} moves host memory only, and the trainer's tensors lie on "
            f"{theirs}; between two processes of one CUDA device use transport='ipc', else 'p2p'"
        )
    stream = Availability(True)
    if not have.streams_cuda:
        stream = Availability(
            False, "a stream moves host memory only; send CUDA tensors as a module, mapping or list"
        )
    return replace(
        have,
        contracts={Contract.DIRECT: Availability(True), Contract.STREAM: stream},
        costs={**have.costs, **have.cuda_costs},
        direct_converts=have.direct_converts or have.cuda_converts,
    )


def _devices(layout: Layout) -> set[str]:
    return {region.device for regions in layout.regions for region in regions if region.num_bytes}


def _choose_contract(
    tensors: Sequence[PlannedTensor],
    transfers: Sequence[Transfer],
    source: Layout,
    *,
    bucket_bytes: int,
    have: Capabilities,
    choice: ContractChoice,
) -> tuple[Contract, str]:
    """Decided once, from what works and from ``num_ops * op_s + bytes / bandwidth``."""
    obstacle = _direct_obstacle(tensors, transfers, source, have)
    if choice is ContractChoice.DIRECT:
        if obstacle:
            raise UnavailableError(f"contract 'direct' of {have.name!r} cannot be used: {obstacle}")
        return Contract.DIRECT, "asked for"
    stream = have.contracts.get(Contract.STREAM)
    no_stream = "this transport has no stream" if stream is None else stream.reason
    if choice is ContractChoice.STREAM:
        if stream is None or not stream.is_usable:
            raise UnavailableError(
                f"contract 'stream' of {have.name!r} cannot be used: {no_stream}"
            )
        return Contract.STREAM, "asked for"
    if obstacle:
        if stream is None or not stream.is_usable:
            raise UnavailableError(
                f"transport {have.name!r}: direct: {obstacle}; stream: {no_stream}"
            )
        return Contract.STREAM, f"direct cannot be used: {obstacle}"
    if stream is None or not stream.is_usable:
        return Contract.DIRECT, f"stream cannot be used: {no_stream}"
    size = sum(t.num_bytes for t in transfers)
    direct_s = have.costs[Contract.DIRECT].seconds(num_direct_ops(tensors, transfers, source), size)
    stream_s = have.costs[Contract.STREAM].seconds(-(-size // bucket_bytes), size)
    why = f"predicted {direct_s:.4f} s direct, {stream_s:.4f} s stream"
    return (Contract.DIRECT if direct_s <= stream_s else Contract.STREAM), why


def _direct_obstacle(
    tensors: Sequence[PlannedTensor],
    transfers: Sequence[Transfer],
    source: Layout,
    have: Capabilities,
) -> str:
    direct = have.contracts.get(Contract.DIRECT)
    if direct is None:
        return "this transport has no direct reads"
    if not direct.is_usable:
        return f"{direct.reason}. {direct.remedy}".strip()
    for t in transfers:
        planned = tensors[t.tensor]
        placed = source.tensors[planned.source].placed[t.source_placed]
        if placed.dtype != planned.meta.dtype and not have.direct_converts:
            return f"{planned.meta.name!r} is converted on the way ({placed.dtype} -> wire)"
        if source.regions[placed.rank][placed.region].kind is RegionKind.TEMPORARY:
            return f"{planned.meta.name!r} is a temporary tensor"
    return ""


def num_direct_ops(
    tensors: Sequence[PlannedTensor], transfers: Sequence[Transfer], source: Layout
) -> int:
    """Contiguous runs of the source that direct reads would touch."""
    runs = 0
    for t in transfers:
        planned = tensors[t.tensor]
        placed = source.tensors[planned.source].placed[t.source_placed]
        dense, count = item_bytes(placed.dtype), 1
        for extent, stride in zip(
            reversed(t.box.shape), reversed(placed.strides_bytes), strict=True
        ):
            if extent > 1 and stride != dense:
                count, dense = count * extent, stride * extent
            else:
                dense *= extent
        runs += count
    return runs
