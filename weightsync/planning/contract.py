"""Stream or direct: decided once, from what works here and from two-term costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weightsync.errors import UnavailableError
from weightsync.layout import Layout
from weightsync.planning.columns import MemoryColumns, columns_of, memory_of
from weightsync.planning.transfers import PlannedTensor, Transfer, Transfers
from weightsync.types import (
    Availability,
    Capabilities,
    Contract,
    ContractChoice,
    RegionKind,
)

Int64 = npt.NDArray[np.int64]


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
    if not have.reads_cuda and not have.streams_cuda:
        raise UnavailableError(
            f"transport {have.name!r} moves host memory only, and the trainer's tensors lie on "
            f"{theirs}; between two processes of one CUDA device use transport='ipc', else 'p2p'"
        )
    stream = Availability(True)
    if not have.streams_cuda:
        stream = Availability(
            False, "a stream moves host memory only; send CUDA tensors as a module, mapping or list"
        )
    contracts = {Contract.STREAM: stream}
    if have.reads_cuda:
        contracts[Contract.DIRECT] = Availability(True)
    return replace(
        have,
        contracts=contracts,
        costs={**have.costs, **have.cuda_costs},
        direct_converts=have.direct_converts or have.cuda_converts,
    )


def _devices(layout: Layout) -> set[str]:
    return {region.device for regions in layout.regions for region in regions if region.num_bytes}


class SourceMemory:
    """The source's memory as columns: what the choice looks at, and what shares tell targets. Made once
    for several engines."""

    def __init__(self, layout: Layout) -> None:
        counts = [len(t.placed) for t in layout.tensors]
        self.first: Int64 = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=self.first[1:])
        self.memory: MemoryColumns = memory_of(layout)
        self.start: Int64 = columns_of(layout).start
        temporary = [
            layout.regions[p.rank][p.region].kind is RegionKind.TEMPORARY
            for t in layout.tensors
            for p in t.placed
        ]
        self.is_temporary = np.array(temporary, dtype=bool)

    def rows(self, tensors: Sequence[PlannedTensor], transfers: Transfers) -> Int64:
        """[transfers] rows of the source placements."""
        origin = np.array([t.source for t in tensors], dtype=np.int64)
        if not len(transfers):
            return np.zeros(0, dtype=np.int64)
        found: Int64 = self.first[origin[transfers.tensor]] + transfers.source_placed
        return found


def choose_contract(
    tensors: Sequence[PlannedTensor],
    transfers: Transfers,
    source: SourceMemory,
    *,
    bucket_bytes: int,
    have: Capabilities,
    choice: ContractChoice,
) -> tuple[Contract, str]:
    """The contract and why; from what works and from ``num_ops * op_s + bytes / bandwidth``.

    Raises :class:`UnavailableError`.
    """
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
    size = int(transfers.num_bytes.sum())
    num_ops = _num_runs(transfers, source.memory, source.rows(tensors, transfers))
    direct_s = have.costs[Contract.DIRECT].seconds(num_ops, size)
    stream_s = have.costs[Contract.STREAM].seconds(-(-size // bucket_bytes), size)
    why = f"predicted {direct_s:.4f} s direct, {stream_s:.4f} s stream"
    return (Contract.DIRECT if direct_s <= stream_s else Contract.STREAM), why


def _direct_obstacle(
    tensors: Sequence[PlannedTensor],
    transfers: Transfers,
    source: SourceMemory,
    have: Capabilities,
) -> str:
    direct = have.contracts.get(Contract.DIRECT)
    if direct is None:
        return "this transport has no direct reads"
    if not direct.is_usable:
        return f"{direct.reason}. {direct.remedy}".strip()
    rows, memory = source.rows(tensors, transfers), source.memory
    numbers = {d: i for i, d in enumerate(memory.dtypes)}
    wire = np.array([numbers.get(t.meta.dtype, -1) for t in tensors], dtype=np.int64)
    converts = wire[transfers.tensor] != memory.dtype[rows] if len(rows) else rows.astype(bool)
    if have.direct_converts:
        converts = np.zeros(len(rows), dtype=bool)
    refused = np.flatnonzero(converts | source.is_temporary[rows])
    if not len(refused):
        return ""
    i = int(refused[0])
    name = tensors[transfers.tensor[i]].meta.name
    if converts[i]:
        stored = memory.dtypes[memory.dtype[rows[i]]]
        return f"{name!r} is converted on the way ({stored} -> wire)"
    return f"{name!r} is a temporary tensor"


def num_direct_ops(
    tensors: Sequence[PlannedTensor], transfers: Sequence[Transfer], source: Layout
) -> int:
    """Contiguous runs of the source that direct reads would touch."""
    columns, memory = Transfers.of(transfers), SourceMemory(source)
    return _num_runs(columns, memory.memory, memory.rows(tensors, columns))


def run_counts(
    transfers: Transfers, source: SourceMemory, tensors: Sequence[PlannedTensor]
) -> Int64:
    """[transfers] contiguous runs of the source in each."""
    return _runs(transfers, source.memory, source.rows(tensors, transfers))


def _num_runs(transfers: Transfers, memory: MemoryColumns, rows: Int64) -> int:
    return int(_runs(transfers, memory, rows).sum())


def _runs(transfers: Transfers, memory: MemoryColumns, rows: Int64) -> Int64:
    if not len(rows):
        return rows
    dense, count = memory.item_bytes[rows].copy(), np.ones(len(rows), dtype=np.int64)
    # Padded dimensions have one element and change nothing.
    for d in reversed(range(min(transfers.start.shape[1], memory.strides_bytes.shape[1]))):
        extent, stride = transfers.extent[:, d], memory.strides_bytes[rows, d]
        is_gap = (extent > 1) & (stride != dense)
        count = np.where(is_gap, count * extent, count)
        dense = np.where(is_gap, stride * extent, dense * extent)
    return count
