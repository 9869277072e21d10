"""RefitPlan: which bytes go from which rank to which rank, computed once from two layouts.

Pure and deterministic, integers only: no address, no device, no clock. ``binding.py`` turns a plan
and addresses into segment tables; that is redone when an address changes, the plan is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.bucket import Cut, cut_stream
from weightsync.errors import (
    DTypeMismatchError,
    LayoutError,
    MissingNameError,
    ProtocolError,
    ShapeMismatchError,
    UnknownNameError,
)
from weightsync.layout import Layout, TensorLayout
from weightsync.manifest import name_some
from weightsync.planning.balance import Move, choose_sources
from weightsync.planning.check import check_plan
from weightsync.planning.columns import LayoutColumns, columns_of
from weightsync.planning.contract import SourceMemory, choose_contract, num_direct_ops, on_devices
from weightsync.planning.cover import Drafted, draft
from weightsync.planning.forward import HandingOn, check_relays, choose_relays
from weightsync.planning.share import RankShare, share_of
from weightsync.planning.topology import Sites, one_card_each
from weightsync.planning.transfers import PlannedTensor, Transfer, Transfers, padded
from weightsync.types import (
    Box,
    Capabilities,
    Contract,
    ContractChoice,
    TensorMeta,
    format_bytes,
    item_bytes,
)

__all__ = [
    "ENTRY_BYTES", "PlannedTensor", "RefitPlan", "Transfer", "Transfers", "check_plan", "make_plan",
    "max_entries", "num_direct_ops", "on_devices", "plan_engines", "slot_bytes",
]  # fmt: skip

Int64 = npt.NDArray[np.int64]

#: Bytes that describe one entry of a slot: four int64 (see ``stream_entries`` in binding.py).
ENTRY_BYTES = 32

_MOST_PAIRS = 32  # that explain() lists


@dataclass(frozen=True)
class RefitPlan:
    """Everything about one movement that does not depend on addresses."""

    source_digest: str  # of the layouts it was computed from
    target_digest: str
    tensors: tuple[PlannedTensor, ...]
    transfers: Transfers  # any sequence of Transfer is taken
    contract: Contract
    contract_reason: str
    bucket_bytes: int
    aliases: Mapping[str, str]  # tied names of the source -> the name that travels
    #: int64 [transfers] the transfer whose target hands the box on to this one's, -1: straight from
    #: the trainer. None: nothing is handed on.
    via: Int64 | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "transfers", Transfers.of(self.transfers))
        if self.via is not None:
            check_relays(self.transfers, self.via)

    @cached_property
    def total_bytes(self) -> int:
        return int(self.transfers.num_bytes.sum())

    @cached_property
    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(t.meta for t in self.tensors)

    @property
    def transfer_bytes(self) -> Int64:
        """[transfers] bytes of each, in wire form."""
        return self.transfers.num_bytes

    @property
    def is_read(self) -> npt.NDArray[np.bool_]:
        """[transfers] whether the target reads the box from the trainer itself."""
        return np.ones(len(self.transfers), dtype=bool) if self.via is None else self.via < 0

    @cached_property
    def transfer_units(self) -> Int64:
        """[transfers] bytes of one element of each, in wire form."""
        items = np.array([item_bytes(t.meta.dtype) for t in self.tensors], dtype=np.int64)
        return items[self.transfers.tensor] if len(items) else items

    @cached_property
    def buckets(self) -> tuple[tuple[Cut, ...], ...]:
        """The slots of a stream; ``Cut.item`` is the transfer."""
        sizes = self.transfer_bytes.tolist()
        cuts = cut_stream(sizes, self.bucket_bytes, max_entries(self.bucket_bytes))
        return tuple(tuple(c) for c in cuts)

    @cached_property
    def digest(self) -> str:
        """sha256 of everything in it; the same on every machine and in every process."""
        metas = self.metas
        head = self._head_json() | {
            "names": [m.name for m in metas],
            "wire": [m.dtype for m in metas],
        }
        found = hashlib.sha256(json.dumps(head, separators=(",", ":"), sort_keys=True).encode())
        shapes = [m.shape for m in metas]
        places = [(t.source, t.target) for t in self.tensors]
        for numbers in (
            padded(shapes, 1),
            padded([(len(s),) for s in shapes], 0),
            padded(places, 0),
        ):
            found.update(numbers.astype("<i8").tobytes())
        found.update(self.transfers.to_bytes())
        if self.via is not None:
            found.update(self.via.astype("<i8").tobytes())
        return found.hexdigest()

    def share(
        self,
        source: Layout | SourceMemory,
        *,
        source_rank: int | None = None,
        target_rank: int | None = None,
    ) -> RankShare:
        """What one rank needs of it. ``source`` is the layout it was made of; for many shares make
        ``SourceMemory(layout)`` once."""
        memory = SourceMemory(source) if isinstance(source, Layout) else source
        return share_of(self, memory, source_rank=source_rank, target_rank=target_rank)

    def bytes_by_pair(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> bytes that are read; not what other targets hand on."""
        pairs, which = np.unique(
            np.stack([self.transfers.source_rank, self.transfers.target_rank], axis=1),
            axis=0, return_inverse=True,
        )  # fmt: skip
        sums = np.zeros(len(pairs), dtype=np.int64)
        read = self.transfers.num_bytes * self.is_read
        np.add.at(sums, which.reshape(-1), read)
        found = zip(pairs.tolist(), sums.tolist(), strict=True)
        return {(a, b): n for (a, b), n in found if n or self.via is None}

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
        pairs = sorted(self.bytes_by_pair().items())
        if len(pairs) > _MOST_PAIRS:
            busiest = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:_MOST_PAIRS]
            lines.append(f"the busiest {_MOST_PAIRS} of {len(pairs)} pairs of ranks:")
            pairs = busiest
        for (source, target), size in pairs:
            lines.append(f"trainer rank {source} -> engine rank {target}: {format_bytes(size)}")
        handed = self.transfers.num_bytes[~self.is_read]
        if len(handed):
            lines.append(
                f"{len(handed)} boxes, {format_bytes(int(handed.sum()))}, are handed on by another rank "
                "of their host"
            )
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; :meth:`from_json` is its exact inverse."""
        tensors = [
            [t.meta.name, t.meta.dtype, t.meta.shape, t.source, t.target] for t in self.tensors
        ]
        rows = self.transfers.to_json()
        handed = {} if self.via is None else {"via": self.via.tolist()}
        return self._head_json() | {"tensors": tensors, "transfers": rows} | handed

    def _head_json(self) -> dict[str, Any]:
        return {
            "source_digest": self.source_digest,
            "target_digest": self.target_digest,
            "contract": self.contract.value,
            "contract_reason": self.contract_reason,
            "bucket_bytes": self.bucket_bytes,
            "aliases": dict(self.aliases),
        }

    @classmethod
    def from_json(cls, value: Any) -> RefitPlan:
        """Parse. Raises :class:`ProtocolError` or :class:`LayoutError`."""
        try:
            tensors = tuple(
                PlannedTensor(TensorMeta(str(n), str(d), tuple(map(int, s))), int(a), int(b))
                for n, d, s, a, b in value["tensors"]
            )
            transfers = Transfers.from_json(value["transfers"], tensors)
            return cls(
                str(value["source_digest"]),
                str(value["target_digest"]),
                tensors,
                transfers,
                Contract(value["contract"]),
                str(value["contract_reason"]),
                int(value["bucket_bytes"]),
                {str(k): str(v) for k, v in value["aliases"].items()},
                np.array(value["via"], dtype=np.int64) if "via" in value else None,
            )
        except (LayoutError, ProtocolError):
            raise
        except (
            AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise ProtocolError(f"malformed plan: {error!r}") from error


def max_entries(bucket_bytes: int) -> int:
    """Entries that a slot's metadata has room for: a 32nd of the slot, at least 64."""
    return max(64, bucket_bytes // 32 // ENTRY_BYTES)


def slot_bytes(bucket_bytes: int) -> int:
    """Size of a stream slot: the bucket and behind it room for its entries."""
    return -(-(bucket_bytes + max_entries(bucket_bytes) * ENTRY_BYTES) // 4096) * 4096


# --- making a plan --------------------------------------------------------------------------------


def make_plan(
    source: Layout,
    target: Layout,
    *,
    bucket_bytes: int,
    capabilities: Capabilities,
    choice: ContractChoice = ContractChoice.AUTO,
    source_sites: Sites | None = None,
    target_sites: Sites | None = None,
) -> RefitPlan:
    """The plan that brings every tensor of ``source`` to wherever ``target`` holds it.

    Raises :class:`UnknownNameError` (a name the engine does not have), :class:`ShapeMismatchError`,
    :class:`DTypeMismatchError`, :class:`MissingNameError` (a box that no source rank holds) or
    :class:`UnavailableError` (a contract that cannot be had).
    """
    (plan,) = plan_engines(
        source,
        [target],
        bucket_bytes=bucket_bytes,
        capabilities=capabilities,
        choice=choice,
        source_sites=source_sites,
        target_sites=None if target_sites is None else [target_sites],
    )
    return plan


def plan_engines(
    source: Layout,
    targets: Sequence[Layout],
    *,
    bucket_bytes: int,
    capabilities: Capabilities,
    choice: ContractChoice = ContractChoice.AUTO,
    source_sites: Sites | None = None,
    target_sites: Sequence[Sites] | None = None,
    handing_on: HandingOn | None = None,
) -> tuple[RefitPlan, ...]:
    """One plan for each engine, made together so that replicas of the source share the work.

    A box that several trainer ranks hold comes from the one that is nearest (one GPU, one host,
    network) and, among those, whose network card has the least to send to all engines. Sites say
    where ranks are; without them every rank counts as a host of its own. With ``handing_on`` a box
    that several ranks of one host need is read by one of them and handed on, where that pays; no
    transport of this version can carry such a plan out. Raises as :func:`make_plan`.
    """
    theirs = one_card_each(source.world_size) if source_sites is None else source_sites
    first_host = max(theirs.host, default=0) + 1
    ours = target_sites or [one_card_each(t.world_size, first_host) for t in targets]
    _check_sites(source, theirs, "the trainer")
    for target, sites in zip(targets, ours, strict=True):
        _check_sites(target, sites, "the engine")
    columns, memory = columns_of(source), SourceMemory(source)
    drafts: dict[int, _EngineDraft] = {}  # engines that are one object are drafted once
    for target in targets:
        if id(target) not in drafts:
            drafts[id(target)] = _draft_engine(source, columns, target)
    moves = [
        Move(drafts[id(t)].drafted, drafts[id(t)].pairs, sites, drafts[id(t)].num_bytes)
        for t, sites in zip(targets, ours, strict=True)
    ]
    chosen = choose_sources(columns, theirs, moves)
    moved = [
        _transfers(drafts[id(t)], placed, columns)
        for t, placed in zip(targets, chosen, strict=True)
    ]
    vias: Sequence[Int64 | None] = [None] * len(moved)
    if handing_on is not None:
        vias = choose_relays(moved, theirs, ours, handing_on)
    plans = []
    for target, transfers, via in zip(targets, moved, vias, strict=True):
        made = drafts[id(target)]
        have = on_devices(source, target, capabilities)
        contract, reason = choose_contract(
            made.tensors, transfers, memory, bucket_bytes=bucket_bytes, have=have, choice=choice
        )
        plans.append(
            RefitPlan(
                source.digest, target.digest, made.tensors, transfers, contract, reason,
                bucket_bytes, dict(source.aliases), via,
            )
        )  # fmt: skip
    return tuple(plans)


def _check_sites(layout: Layout, sites: Sites, side: str) -> None:
    if sites.num_ranks != layout.world_size:
        raise LayoutError(
            f"places of {sites.num_ranks} ranks are given for {side}, whose layout has "
            f"{layout.world_size}"
        )


@dataclass(frozen=True, eq=False)
class _EngineDraft:
    tensors: tuple[PlannedTensor, ...]
    pairs: Int64  # [tensors, 2] places in both layouts
    drafted: Drafted
    num_dims: Int64  # [rows]
    num_bytes: Int64  # [rows]


def _draft_engine(source: Layout, columns: LayoutColumns, target: Layout) -> _EngineDraft:
    tensors = tuple(_match(source, target))
    pairs = np.array([(t.source, t.target) for t in tensors], dtype=np.int64).reshape(-1, 2)

    def missing(i: int, placed: int, box: Box) -> MissingNameError:
        planned, dims = tensors[i], len(tensors[i].meta.shape)
        part = Box(box.start[:dims], box.stop[:dims])
        rank = target.tensors[planned.target].placed[placed].rank
        return MissingNameError(
            f"{planned.meta.name!r}: no trainer rank holds {part} of shape "
            f"{planned.meta.shape}, which engine rank {rank} needs"
        )

    drafted = draft(columns, columns_of(target), pairs, missing)
    sizes = [(len(t.meta.shape), item_bytes(t.meta.dtype)) for t in tensors]
    dims, items = np.array(sizes, dtype=np.int64).reshape(-1, 2)[drafted.tensor].T
    volumes = np.prod(drafted.stop - drafted.start, axis=1)
    return _EngineDraft(tensors, pairs, drafted, dims, volumes * items)


def _transfers(made: _EngineDraft, placed: Int64, source: LayoutColumns) -> Transfers:
    drafted = made.drafted
    ranks = source.rank[source.first[made.pairs[drafted.tensor, 0]] + placed]
    columns = (
        drafted.tensor, placed, drafted.target_placed, ranks, drafted.target_rank, made.num_dims,
        made.num_bytes,
    )  # fmt: skip
    return Transfers(np.stack(columns, axis=1), drafted.start, drafted.stop)


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
        for slot, origin in sorted(by_target.items(), key=lambda item: target.index[item[0]])
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
