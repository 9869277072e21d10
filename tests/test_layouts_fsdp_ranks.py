"""Real FSDP2 ranks over gloo: their boxes are what gathering every tensor gives."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from nursery import fork_with_torch

from weightsync.layout import Layout, join_layouts
from weightsync.layouts import check_layout
from weightsync.naming import FusedExperts, apply_rules

pytest.importorskip("torch")
SIZE, LIMIT_S = 3, 180.0


@pytest.mark.timeout(240)  # three processes that import torch
def test_trained_ranks_give_what_gathering_gives(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = [stack.enter_context(fork_with_torch("fsdp_rank:serve")) for _ in range(SIZE)]
        for rank, child in enumerate(ranks):
            child.send({"store": str(tmp_path / "store"), "rank": rank, "size": SIZE})
        found = [child.receive(LIMIT_S) for child in ranks]
        assert [child.wait() for child in ranks] == [0] * SIZE
    gathered = found[0]["whole"]
    named = [(n, np.array(v, np.float32).reshape(shape)) for n, (shape, v) in gathered.items()]
    expected = dict(apply_rules(named, [FusedExperts()]).named)
    layout = join_layouts([Layout.from_json(f["layout"]) for f in found])
    check_layout(layout)
    assert {t.name: t.shape for t in layout.tensors} == {n: v.shape for n, v in expected.items()}
    for rank in found:
        for name, start, stop, values in rank["boxes"]:
            part = expected[name][tuple(map(slice, start, stop))]
            np.testing.assert_array_equal(np.float32(values), part.flatten(), err_msg=name)
    held = sum(len(values) for rank in found for *_, values in rank["boxes"])
    assert held == sum(v.size for v in expected.values())
