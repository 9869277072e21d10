"""Which of several holders gives a box: the nearest, and among those the one with least to do.

Greedy, large boxes first, what leaves no choice before everything else; integers and indices only,
so every process that plans finds the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightsync.planning.columns import LayoutColumns
from weightsync.planning.cover import Drafted
from weightsync.planning.topology import Reach, Sites

Int64 = npt.NDArray[np.int64]

#: Heap entries: bytes of the card, bytes of the rank, place among the candidates, placement, rank.
_Entry = tuple[int, int, int, int, int]
_Heap = tuple[Reach, list[_Entry]]


@dataclass(frozen=True)
class Move:
    """One engine's part: its draft, where its ranks sit, the bytes of each row."""

    drafted: Drafted
    pairs: Int64  # [tensors, 2] as the draft was made of
    sites: Sites
    num_bytes: Int64


@dataclass
class _Loads:
    """Bytes that leave each network card, and each rank by any way."""

    sites: Sites
    nic: dict[int, int] = field(default_factory=dict)
    rank: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nic = dict.fromkeys(self.sites.nic, 0)
        self.rank = [0] * self.sites.num_ranks

    def of(self, rank: int) -> tuple[int, int]:
        return self.nic[self.sites.nic[rank]], self.rank[rank]

    def add(self, rank: int, num_bytes: int, reach: Reach) -> None:
        self.rank[rank] += num_bytes
        if reach is Reach.NETWORK:
            self.nic[self.sites.nic[rank]] += num_bytes


def choose_sources(source: LayoutColumns, sites: Sites, moves: Sequence[Move]) -> list[Int64]:
    """For each move int64 [n]: the source placement (within its tensor) that gives each row.

    The moves share the source's load.
    """
    loads = _Loads(sites)
    chosen = [_without_choice(move.drafted) for move in moves]
    for move, placed in zip(moves, chosen, strict=True):
        fixed = np.flatnonzero(placed >= 0)
        rows = source.first[move.pairs[move.drafted.tensor[fixed], 0]] + placed[fixed]
        _add_fixed(loads, move, source.rank[rows], fixed)
    for move, placed in zip(moves, chosen, strict=True):
        _Chooser(source, move, loads).choose(placed)
    return chosen


def _without_choice(drafted: Drafted) -> Int64:
    """The only candidate of each row, or -1."""
    first = drafted.choice_first[drafted.choice]
    is_only = drafted.choice_first[drafted.choice + 1] - first == 1
    only = drafted.candidates[first] if len(drafted.candidates) else first
    placed: Int64 = np.where(is_only, only, -1)
    return placed


def _add_fixed(loads: _Loads, move: Move, ranks: Int64, rows: Int64) -> None:
    theirs, ours = np.array(loads.sites.host), np.array(move.sites.host)
    sizes = move.num_bytes[rows]
    is_far = theirs[ranks] != ours[move.drafted.target_rank[rows]]
    for reach, part in ((Reach.NETWORK, is_far), (Reach.HOST, ~is_far)):
        sums = np.zeros(loads.sites.num_ranks, dtype=np.int64)
        np.add.at(sums, ranks[part], sizes[part])
        for rank in np.flatnonzero(sums).tolist():
            loads.add(rank, int(sums[rank]), reach)


class _Chooser:
    """Chooses for the rows of one move that have a choice."""

    def __init__(self, source: LayoutColumns, move: Move, loads: _Loads) -> None:
        self._source, self._move, self._loads = source, move, loads
        self._first = source.first[move.pairs[:, 0]]
        self._heaps: dict[tuple[bytes, bytes, int, int], _Heap] = {}
        self._near: dict[tuple[bytes, bytes], tuple[set[int], list[tuple[int, int]]]] = {}
        self._sets: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def choose(self, placed: Int64) -> None:
        """Fill in what is -1."""
        drafted, sizes = self._move.drafted, self._move.num_bytes
        open_rows = np.flatnonzero(placed < 0)
        order = open_rows[np.argsort(-sizes[open_rows], kind="stable")]
        columns = (drafted.tensor, drafted.choice, drafted.target_rank, sizes)
        asked = zip(*(column[order].tolist() for column in columns), strict=True)
        placed[order] = [self._choose_one(*row) for row in asked]

    def _choose_one(self, tensor: int, choice: int, target_rank: int, num_bytes: int) -> int:
        reach, heap = self._heap(tensor, choice, target_rank)
        loads = self._loads
        while True:
            nic, rank_bytes, place, placed, rank = heap[0]
            now = loads.of(rank)
            if (nic, rank_bytes) == now:
                loads.add(rank, num_bytes, reach)
                return placed
            heapq.heapreplace(heap, (*now, place, placed, rank))  # loads only grow

    def _heap(self, tensor: int, choice: int, target_rank: int) -> _Heap:
        """The nearest candidates; tensors with the same holders share it."""
        key = self._sets.get((tensor, choice))
        if key is None:
            drafted = self._move.drafted
            first, stop = drafted.choice_first[choice : choice + 2]
            placed = drafted.candidates[first:stop]
            ranks = self._source.rank[self._first[tensor] + placed]
            key = self._sets[tensor, choice] = (placed.tobytes(), ranks.tobytes())
            if key not in self._near:
                hosts = {self._loads.sites.host[r] for r in ranks.tolist()}
                pairs = list(zip(placed.tolist(), ranks.tolist(), strict=True))
                self._near[key] = hosts, pairs
        hosts, pairs = self._near[key]
        ours = self._move.sites
        host, gpu = ours.host[target_rank], ours.gpu[target_rank]
        if host not in hosts:
            host = gpu = -1
        where = (*key, host, gpu)
        heap = self._heaps.get(where)
        if heap is None:
            heap = self._heaps[where] = self._nearest(pairs, host, gpu)
        return heap

    def _nearest(self, pairs: list[tuple[int, int]], host: int, gpu: int) -> _Heap:
        sites = self._loads.sites
        entries = [(*self._loads.of(r), i, p, r) for i, (p, r) in enumerate(pairs)]
        on_host = [e for e in entries if sites.host[e[4]] == host]
        on_gpu = [e for e in on_host if sites.gpu[e[4]] == gpu]
        reach = Reach.GPU if on_gpu else Reach.HOST if on_host else Reach.NETWORK
        heap = on_gpu or on_host or entries
        heapq.heapify(heap)
        return reach, heap
