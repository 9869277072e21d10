"""The cost model on clusters small enough to count by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.cost.constants import Constants, read_constants
from weightsync.cost.estimates import busiest_card
from weightsync.cost.study import BROADCAST, FORWARDED, P2P, Setup, Study, study
from weightsync.errors import ConfigError
from weightsync.planning.topology import Reach
from weightsync.types import TensorMeta

MIB = 2**20


def metas(num_experts: int = 4) -> list[TensorMeta]:
    """Every matrix is 1 MiB in bf16: 512 rows of 1,024."""
    names = ["model.layers.0.mlp.gate.weight"]
    names += [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(num_experts)]
    return [TensorMeta(name, "bfloat16", (512, 1024)) for name in names]


def found(num_experts: int = 4, **options: Any) -> Study:
    return study(
        metas(num_experts), Setup(**{"trainer": {"ep": 4}, "engine": {"ep": 4}, **options})
    )


def test_every_link_of_a_small_cluster() -> None:
    """Four trainer ranks on two hosts, four engine ranks on two others; the gate is everywhere."""
    s = found(gpus_per_host=2)
    assert s.loads.nic_out.tolist() == [2 * MIB] * 4 + [0] * 4
    assert s.loads.nic_in.tolist() == [0] * 4 + [2 * MIB] * 4
    assert s.loads.total_bytes == 8 * MIB
    assert s.loads.by_reach == {Reach.GPU: 0, Reach.HOST: 0, Reach.NETWORK: 8 * MIB}
    assert s.loads.operations.tolist() == [2] * 4
    assert s.loads.host_pairs[:2, 2:].sum() == 8 * MIB
    # Forwarded, each host takes the gate once: six boxes over the network, two over NVLink.
    assert s.forwarded.nic_in.sum() == 6 * MIB
    assert s.forwarded.nvlink_in.sum() == s.forwarded.relay_out.sum() == 2 * MIB
    assert s.forwarded.engine_in.tolist() == s.loads.engine_in.tolist()


def test_seconds_are_bytes_of_the_busiest_card_at_its_rate() -> None:
    s = found(gpus_per_host=2, line_bytes_per_s=1e6)
    c = s.setup.constants
    p2p = s.estimate(P2P)
    assert p2p.terms["move"] == pytest.approx(2 * MIB / (1e6 * c.nic_share.value))
    assert p2p.seconds == pytest.approx(sum(p2p.terms.values()))
    assert s.estimate(BROADCAST).terms["move"] == pytest.approx(
        5 * MIB / (1e6 * c.broadcast_share.value)
    )
    # Two cards of a host bring three boxes; without forwarding, four.
    assert s.estimate("lower bound").seconds == pytest.approx(1.5 * MIB / 1e6)
    assert s.estimate("lower bound, no forwarding").seconds == pytest.approx(2 * MIB / 1e6)
    assert "trainer rank 0 (host 0), sending" in p2p.bound_by


def test_on_shared_gpus_nothing_crosses_the_network() -> None:
    s = found(gpus_per_host=4, is_colocated=True)
    assert s.loads.by_reach == {Reach.GPU: 8 * MIB, Reach.HOST: 0, Reach.NETWORK: 0}
    assert busiest_card(s.loads, s.cluster) == ("no network card", 0)
    assert s.estimate("lower bound").seconds == 0


def test_gpus_may_share_a_card() -> None:
    s = found(gpus_per_host=4, nics_per_host=1)
    assert s.loads.nic_out.tolist() == [8 * MIB, 0]
    assert s.loads.nic_in.tolist() == [0, 8 * MIB]


def test_small_engines_share_a_host() -> None:
    s = found(engine={"tp": 1}, num_engines=3, gpus_per_host=2)
    assert [sites.host for sites in s.cluster.engines] == [(2,), (2,), (3,)]


def test_fp8_travels_as_half_the_bytes_and_scales() -> None:
    s = found(wire="fp8")
    blocks = 4 * 8 * 4  # of 128 x 128, fp32
    # The router is not quantised.
    assert s.loads.total_bytes == 4 * (MIB + MIB // 2 + blocks)
    assert s.estimate(P2P).terms["quantise"] > 0


@given(
    trainer=st.sampled_from([{"fsdp": 3}, {"ep": 4}, {"ep": 4, "dp": 8}, {"fsdp": 2, "tp": 2}]),
    engine=st.sampled_from([{"tp": 4}, {"ep": 4}, {"tp": 2, "ep": 4}, {"dp": 2}]),
    num_engines=st.integers(1, 3), gpus=st.integers(1, 4), is_colocated=st.booleans(),
)  # fmt: skip
def test_what_leaves_arrives_and_forwarding_loses_nothing(
    trainer: dict[str, int], engine: dict[str, int], num_engines: int, gpus: int, is_colocated: bool
) -> None:
    options = {"trainer": trainer, "engine": engine, "num_engines": num_engines}
    s = found(**options, gpus_per_host=gpus)
    if is_colocated:
        if s.target.world_size * num_engines > s.source.world_size:
            with pytest.raises(ConfigError, match="do not fit on the trainer's"):
                found(**options, gpus_per_host=gpus, is_colocated=True)
            return
        s = found(**options, gpus_per_host=gpus, is_colocated=True)
    total = sum(p.total_bytes for p in s.plans)
    for loads in (s.loads, s.forwarded):
        assert loads.nic_out.sum() == loads.nic_in.sum() == loads.by_reach[Reach.NETWORK]
        assert loads.host_pairs.sum() == loads.by_reach[Reach.NETWORK]
        assert loads.trainer_out.sum() + loads.relay_out.sum() == total
        assert loads.nvlink_out.sum() + loads.relay_out.sum() == loads.nvlink_in.sum()
        assert sum(loads.by_reach.values()) == loads.total_bytes == total
    assert (s.forwarded.nic_in <= s.loads.nic_in.max()).all()
    assert np.array_equal(s.forwarded.engine_in, s.loads.engine_in)
    least = s.estimate("lower bound").seconds
    for way in (P2P, FORWARDED, BROADCAST):
        assert s.estimate(way).seconds >= least * 0.999


# --- constants --------------------------------------------------------------------------------------


def test_every_constant_says_where_it_is_from() -> None:
    for name, entry in Constants().to_json().items():
        assert entry["source"].startswith(("measured: ", "published: ")), name
        assert entry["value"] > 0


def test_a_measured_file_replaces_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps({"nic_share": {"value": 0.5, "source": "measured: here"}}))
    found = read_constants(path)
    assert found.nic_share.value == 0.5
    assert found.control_s == Constants().control_s
    assert Constants.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "expected an object"),
        ("{", "cannot be read"),
        (
            '{"nic_shares": {"value": 1, "source": ""}}',
            "unknown constant 'nic_shares'; known: nic_",
        ),
        ('{"nic_share": 1}', r"'nic_share' is 1, expected"),
        ('{"nic_share": {"value": 1.5, "source": ""}}', "'nic_share' cannot be 1.5"),
        ('{"control_s": {"value": -1, "source": ""}}', "'control_s' cannot be -1"),
    ],
)
def test_constants_that_cannot_be_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "constants.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_constants(path)
