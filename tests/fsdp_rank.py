"""One rank of a real FSDP2 trainer, for tests: trains, then says which boxes it holds."""

from __future__ import annotations

import datetime
from typing import Any

from processes import Pipe


def serve(pipe: Pipe) -> None:
    """Join the group, train a small mixture of experts, and send this rank's boxes; rank 0 also sends all
    parameters as gathering gives them."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    task = pipe.receive()
    rank, size = task["rank"], task["size"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(task["store"], size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    model = _trained(rank, size)
    boxes = _boxes(model, rank, size)
    named = [(n, p.full_tensor().detach()) for n, p in model.named_parameters()]
    whole = {n: [list(t.shape), t.flatten().tolist()] for n, t in named} if rank == 0 else {}
    pipe.send(boxes | {"whole": whole})
    dist.destroy_process_group()


def _model() -> Any:
    import torch

    class Layer(torch.nn.Module):  # type: ignore[misc]
        """Experts fused as transformers fuses them; sizes that no number of ranks divides."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ParameterDict(
                {
                    "gate_up_proj": torch.nn.Parameter(torch.randn(3, 10, 7)),
                    "down_proj": torch.nn.Parameter(torch.randn(3, 7, 5)),
                }
            )

        def forward(self, x: Any) -> Any:
            gate, up = torch.einsum("bh,ewh->ebw", x, self.experts["gate_up_proj"]).chunk(2, -1)
            return x + torch.einsum("ebw,ehw->bh", gate.sigmoid() * up, self.experts["down_proj"])

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(13, 7)
            self.layers = torch.nn.ModuleList([Layer(), Layer()])
            self.head = torch.nn.Linear(7, 13)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    return Model()


def _trained(rank: int, size: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(5) + rank
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(tokens)  # leaves the root gathered
    return model


def _boxes(model: Any, rank: int, size: int) -> dict[str, Any]:
    from distributed_ranks import memory_of

    from weightsync.naming import FusedExperts
    from weightsync.sources import ModuleSource
    from weightsync.types import CastPolicy

    source = ModuleSource([FusedExperts()], CastPolicy.STRICT, rank, size)
    local, _ = source.collect(model)
    boxes = [
        [t.name, p.box.start, p.box.stop, memory_of(local, t.name, j).flatten().tolist()]
        for t in local.layout.tensors
        for j, p in enumerate(t.placed)
    ]
    return {"layout": local.layout.to_json(), "boxes": boxes}
