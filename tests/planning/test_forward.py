"""Boxes that one rank of a host reads and hands on: what each rank gets, what the network carries."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import Held, Model, build
from meshes import CAN, Array, clusters

from weightsync.errors import ConfigError, ProtocolError
from weightsync.layout import Layout
from weightsync.plan import RefitPlan, plan_engines
from weightsync.planning.bind import bind_reads
from weightsync.planning.forward import HandingOn, check_relays
from weightsync.planning.share import RankShare
from weightsync.planning.topology import Sites, sites_in_order
from weightsync.types import Box

ALWAYS = HandingOn(network_bytes_per_us=1, host_bytes_per_us=10, step_us=0)


def plans_on(
    source: Layout, targets: list[Layout], gpus: int, handing_on: HandingOn | None = ALWAYS
) -> tuple[tuple[RefitPlan, ...], Sites, list[Sites]]:
    """Trainer hosts first, then those of each engine."""
    trainer = sites_in_order(source.world_size, gpus_per_host=gpus)
    first, engines = max(trainer.host) + 1, []
    for target in targets:
        engines.append(sites_in_order(target.world_size, gpus_per_host=gpus, first_host=first))
        first = max(engines[-1].host) + 1
    plans = plan_engines(
        source, targets, bucket_bytes=2**20, capabilities=CAN, source_sites=trainer,
        target_sites=engines, handing_on=handing_on,
    )  # fmt: skip
    return plans, trainer, engines


def part(model: Model, tensor: int, placed: int, box: Box) -> Array:
    entry = model.layout.tensors[tensor]
    base = entry.placed[placed].box.start
    inside = (slice(a - o, b - o) for a, b, o in zip(box.start, box.stop, base, strict=True))
    found: Array = model.view(entry.name, placed)[(*inside, ...)]
    return found


def execute(plan: RefitPlan, source: Model, target: Model) -> None:
    """Reads first; then what others read is copied from where it landed."""
    assert plan.via is not None
    for straight in (True, False):
        for t, via in zip(plan.transfers, plan.via.tolist(), strict=True):
            if (via < 0) is not straight or not t.num_bytes:
                continue
            planned = plan.tensors[t.tensor]
            landed = part(target, planned.target, t.target_placed, t.box)
            if straight:
                landed[...] = part(source, planned.source, t.source_placed, t.box)
            else:
                giver = plan.transfers[via]
                landed[...] = part(target, planned.target, giver.target_placed, t.box)


@given(clusters(), st.integers(1, 4))
def test_every_rank_gets_its_boxes_and_a_host_reads_each_once(
    case: tuple[Model, list[Model], dict[str, Array]], gpus: int
) -> None:
    source, targets, reference = case
    plans, _, engines = plans_on(source.layout, [t.layout for t in targets], gpus)
    for plan, target, sites in zip(plans, targets, engines, strict=True):
        for memory in target.memory:
            memory[:] = 0xAA
        execute(plan, source, target)
        for name, value in reference.items():
            for j, p in enumerate(target.layout.tensors[target.layout.index[name]].placed):
                wanted = value[tuple(map(slice, p.box.start, p.box.stop))]
                np.testing.assert_array_equal(target.view(name, j), wanted)
        readers: dict[Any, set[int]] = {}
        for t, is_read in zip(plan.transfers, plan.is_read.tolist(), strict=True):
            if is_read and t.num_bytes:
                key = (t.tensor, t.box, sites.host[t.target_rank])
                readers.setdefault(key, set()).add(t.target_rank)
        assert all(len(ranks) == 1 for ranks in readers.values())
        again = RefitPlan.from_json(json.loads(json.dumps(plan.to_json())))
        assert again.digest == plan.digest
        assert sum(plan.bytes_by_pair().values()) == int(
            plan.transfers.num_bytes[plan.is_read].sum()
        )


def everywhere(ranks: int, sizes: tuple[int, ...]) -> Layout:
    return build(
        ranks,
        {
            f"t{i}": ("int8", (n,), [Held(r, Box.whole((n,)), (0,)) for r in range(ranks)])
            for i, n in enumerate(sizes)
        },
    ).layout


def test_cards_of_a_host_share_what_it_reads() -> None:
    (plan,), _, _ = plans_on(everywhere(2, (64,) * 8), [everywhere(4, (64,) * 8)], gpus=4)
    reads = Counter(plan.transfers.target_rank[plan.is_read].tolist())
    assert reads == {0: 2, 1: 2, 2: 2, 3: 2}
    assert "24 boxes, 1.54 kB, are handed on" in plan.explain()


@pytest.mark.parametrize(
    ("rates", "least"),
    [((50, 400, 6), 343), ((50, 50, 6), None), ((50, 40, 0), None), ((1, 10, 0), 0)],
)
def test_small_boxes_and_slow_links_do_not_pay(
    rates: tuple[int, int, int], least: int | None
) -> None:
    when = HandingOn(*rates)
    assert when.least_bytes == least
    sizes = (342, 343, 5000)
    (plan,), _, _ = plans_on(everywhere(1, sizes), [everywhere(2, sizes)], 2, when)
    handed = sorted(plan.transfers.num_bytes[~plan.is_read].tolist())
    assert handed == ([] if least is None else [n for n in sizes if n >= least])


def test_nothing_is_handed_on_unless_asked_or_within_one_host_of_the_trainer() -> None:
    layout = everywhere(2, (64,))
    (plan,), _, _ = plans_on(layout, [layout], 2, None)
    assert plan.via is None
    sites = sites_in_order(2, gpus_per_host=2)
    (plan,) = plan_engines(
        layout, [layout], bucket_bytes=2**20, capabilities=CAN, source_sites=sites,
        target_sites=[sites], handing_on=ALWAYS,
    )  # fmt: skip
    assert plan.is_read.all()


def test_rates_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="rates must be at least 1"):
        HandingOn(0, 10, 0)


def handed_on() -> RefitPlan:
    (plan,), _, _ = plans_on(everywhere(1, (64, 32)), [everywhere(3, (64, 32))], gpus=3)
    return plan


def test_shares_say_who_hands_on_and_trainers_give_only_what_is_read() -> None:
    source = everywhere(1, (64, 32))
    plan = handed_on()
    shares = [plan.share(source, target_rank=r) for r in range(3)]
    for share in shares:
        assert share.relay is not None
        again = RankShare.from_json(json.loads(json.dumps(share.to_json())))
        assert again.digest == share.digest
        assert again.relay is not None
        assert again.relay.tolist() == share.relay.tolist()
    assert sum(int((s.relay >= 0).sum()) for s in shares if s.relay is not None) == 4
    assert plan.share(source, source_rank=0).num_bytes == 96
    handing = next(s for s in shares if s.relay is not None and (s.relay >= 0).any())
    with pytest.raises(ProtocolError, match="no transport of this version does"):
        bind_reads(handing, {}, {})


def test_relays_that_cannot_be() -> None:
    plan = handed_on()
    assert plan.via is not None
    given = np.flatnonzero(plan.via >= 0)
    tensor = plan.transfers.tensor
    other = int(np.flatnonzero((plan.via < 0) & (tensor != tensor[given[0]]))[0])
    for row, via in ((given[0], len(plan.transfers)), (given[0], -2), (given[0], other),
                     (given[0], given[0]), (given[0], given[1])):  # fmt: skip
        wrong = plan.via.copy()
        wrong[row] = via
        with pytest.raises(ProtocolError, match="plan: "):
            check_relays(plan.transfers, wrong)
        with pytest.raises(ProtocolError, match="plan: "):
            RefitPlan.from_json({**plan.to_json(), "via": wrong.tolist()})
    with pytest.raises(ProtocolError, match="1 relays for 6 transfers"):
        replace(plan, via=plan.via[:1])


def test_a_share_with_relays_that_cannot_be() -> None:
    share = handed_on().share(everywhere(1, (64, 32)), target_rank=2).to_json()
    for relay in ([-2, 0], [2, 0], [0]):
        with pytest.raises(ProtocolError, match=r"points outside of it|relays for"):
            RankShare.from_json({**share, "relay": relay})
