"""Digests by rank: each engine rank's part of a manifest, and the whole, from pieces digested once."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from layouts import Model, build, fill, replicated, whole

from weightsync.binding import landed_parts, slot_spots
from weightsync.device_tables import CPU, owned_digests
from weightsync.digest import DigestTable, digest_tensors, part_rows
from weightsync.digest_shares import DigestShares, digest_shares
from weightsync.manifest import Digests
from weightsync.plan import RefitPlan, make_plan
from weightsync.transports.loopback import LoopbackTransport
from weightsync.types import Box


def planned(source: Model, target: Model) -> RefitPlan:
    have = LoopbackTransport().capabilities()
    return make_plan(source.layout, target.layout, bucket_bytes=512, capabilities=have)


def summed(shares: DigestShares, source: Model) -> Digests:
    """What the trainer's ranks digest, each of its own memory, added up."""
    total: Digests = np.zeros(shares.num_owners, dtype=np.uint64)
    for rank in range(source.layout.world_size):
        rows, owners = [], []
        parts = shares.parts(rank, source.layout, source.addresses(rank))
        for part, owner in zip(*parts, strict=True):
            new = part_rows(part)
            rows += new
            owners += [owner] * len(new)
        total += owned_digests(rows, owners, shares.num_owners, CPU).run(1)
    return total


def landed(plan: RefitPlan, target: Model, rank: int) -> dict[str, int]:
    spots = slot_spots(target.layout, rank, target.addresses(rank))
    here = [t for t in plan.transfers if t.target_rank == rank]
    return DigestTable(landed_parts(plan, spots, here)).compute(1)


@given(st.data())
def test_every_rank_can_check_what_it_got(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    box, ranks = Box.whole(shape), (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    tensors: list[dict[str, Any]] = [
        {
            "w": ("int8", shape, data.draw(replicated(box, size))),
            "small": ("int8", (3,), [whole((3,), size - 1)]),
        }
        for size in ranks
    ]
    source, target = build(ranks[0], tensors[0]), build(ranks[1], tensors[1])
    rng = np.random.default_rng(0)
    reference = {
        "w": rng.integers(-99, 99, shape).astype(np.int8),
        "small": rng.integers(-99, 99, 3).astype(np.int8),
    }
    fill(source, reference)
    fill(target, reference)
    plan = planned(source, target)
    shares = digest_shares(plan, *ranks)
    sums = summed(shares, source)
    for rank in range(ranks[1]):
        names = [meta.name for meta in shares.metas(rank)]
        found = dict(zip(names, shares.for_rank(rank, sums).tolist(), strict=True))
        assert found == landed(plan, target, rank)
    names = [meta.name for meta in plan.metas]
    assert dict(zip(names, shares.whole(sums).tolist(), strict=True)) == digest_tensors(
        reference.items()
    )


def test_what_several_ranks_get_is_digested_once() -> None:
    shape = (8, 4)
    source = build(1, {"w": ("int8", shape, [whole(shape)])})
    target = build(3, {"w": ("int8", shape, [whole(shape, rank) for rank in range(3)])})
    shares = digest_shares(planned(source, target), 1, 3)
    assert len(shares.pieces[0]) == 1
    assert shares.num_owners == 1


def test_one_rank_on_each_side_has_one_owner_a_tensor() -> None:
    tensors: Any = {name: ("int8", (4,), [whole((4,))]) for name in "abc"}
    source, target = build(1, tensors), build(1, tensors)
    shares = digest_shares(planned(source, target), 1, 1)
    assert shares.owner_tensor.tolist() == [0, 1, 2]
    sums: Digests = np.arange(3, dtype=np.uint64) + 5
    assert shares.for_rank(0, sums).tolist() == shares.whole(sums).tolist() == [5, 6, 7]
