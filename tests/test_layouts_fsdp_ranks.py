"""Real FSDP2 ranks over gloo: their boxes are what gathering every tensor gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from processes import Child

from weightsync.layout import Layout, join_layouts
from weightsync.layouts import check_layout
from weightsync.naming import FusedExperts, apply_rules

pytest.importorskip("torch")
SIZE, LIMIT_S = 4, 60.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Child]]:
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    with ExitStack() as stack:
        children = [stack.enter_context(Child("fsdp_rank:serve")) for _ in range(SIZE)]
        for rank, child in enumerate(children):
            child.send({"store": store, "rank": rank, "size": SIZE})
        yield children
        for child in children:
            child.send("stop")
        assert [child.receive(LIMIT_S) for child in children] == ["stopped"] * SIZE


@pytest.mark.parametrize("mesh", [[4], [2, 2]], ids=["fsdp", "hsdp"])
def test_trained_ranks_give_what_gathering_gives(ranks: list[Child], mesh: list[int]) -> None:
    for child in ranks:
        child.send(mesh)
    found = [child.receive(LIMIT_S) for child in ranks]
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
    replicas = mesh[0] if len(mesh) == 2 else 1
    assert held == replicas * sum(v.size for v in expected.values())
