"""New weights by ``ipc`` for an engine with decode graphs whose memory goes and comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_engines import params, prompts, same, small_engine
from core_models import make_model, save_model, torch
from core_traffic import LENGTHS, LIMIT_S, Traffic
from processes import Child

from engine_adapter.bundled import BundledAdapter
from engine_adapter.core.decode_graphs import DecodeGraphs
from weightsync.errors import ReleasedError
from weightsync.receiver import Receiver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:rows of products"),  # of tiny models: they are padded
]

ON_CUDA = {"device": "cuda:0", "decode": "graphs", "memory": "releasable"}
SAMPLED = params(max_tokens=24, temperature=0.8)


def test_updates_by_ipc_with_memory_released_in_between(tmp_path: Path) -> None:
    directories = [
        save_model(make_model("dense", torch.float32, seed), tmp_path / str(seed))
        for seed in (0, 1)
    ]
    fresh = [small_engine(d, **ON_CUDA).generate(prompts(*LENGTHS), SAMPLED) for d in directories]
    engine = small_engine(directories[0], **ON_CUDA)
    graphs = engine.decode_steps
    assert isinstance(graphs, DecodeGraphs)
    with (
        engine,
        Receiver(BundledAdapter(engine)) as receiver,
        Child("core_cuda_trainer:serve") as child,
    ):
        child.send(receiver.url)
        assert child.receive(LIMIT_S) == "connected"
        pointers, captured = engine.model.slots.fingerprint(), graphs.num_captures
        for version, seed in enumerate((0, 1, 0), start=1):
            with Traffic(engine) as traffic:
                traffic.wait_for(4)
                child.send((version, seed))
                assert child.receive(LIMIT_S) == version
                traffic.wait_for(4)
            assert not traffic.errors
            for output, expected in zip(
                engine.generate(prompts(*LENGTHS), SAMPLED), fresh[seed], strict=True
            ):
                assert same(output, expected)
        engine.release_memory()
        engine.resume_memory()
        for storage in engine.model.slots.storages.values():
            storage.fill_(torch.nan)
        torch.cuda.synchronize()
        with pytest.raises(ReleasedError, match="'weights' is empty"):
            engine.generate(prompts(3), SAMPLED)
        child.send((4, 1))
        assert child.receive(LIMIT_S) == 4
        for output, expected in zip(
            engine.generate(prompts(*LENGTHS), SAMPLED), fresh[1], strict=True
        ):
            assert same(output, expected)
        assert engine.model.slots.fingerprint() == pointers
        assert graphs.num_captures == captured
        child.send(None)
