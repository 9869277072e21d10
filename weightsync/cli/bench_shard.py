"""A loaded model as one rank of a trainer holds it: real DTensors on real meshes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from weightsync.errors import ConfigError
from weightsync.layouts.roles import Role, place_of

#: Dimensions of a mesh, the outermost first: ranks of one stage differ in all but ``pp``.
MESH_DIMS: Final = ("pp", "dp", "fsdp", "ep", "tp")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DIM: Final = {
    Role.VOCABULARY: 0, Role.HEADS: 0, Role.KV_HEADS: 0, Role.ROWS: 0, Role.COLUMNS: 1,
}  # fmt: skip


def shard(module: Any, layout: Mapping[str, int], rank: int) -> Any:
    """What rank ``rank`` of a trainer of this layout sends: the module with sharded parameters, or (of
    pipeline stages) the parameters of its stage by name. A collective call.

    ``layout`` gives the sizes of :data:`MESH_DIMS`; those that are not there are 1.
    """
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {dim: layout.get(dim, 1) for dim in MESH_DIMS}
    if sum(sizes.values()) == len(sizes):
        return module
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=MESH_DIMS)
    if sizes["tp"] > 1:
        _distribute(module, mesh["tp"], _tp_dim)
    if sizes["ep"] > 1:
        _distribute(module, mesh["ep"], _ep_dim)
    if sizes["fsdp"] > 1 or sizes["dp"] > 1:
        _fully_shard(module, mesh, sizes)
    if sizes["pp"] == 1:
        return module
    stage = mesh.get_local_rank("pp")
    named = dict(module.named_parameters())
    return {n: p for n, p in named.items() if stage in _stages_of(n, named, sizes["pp"])}


def _distribute(module: Any, mesh: Any, dim_of: Any) -> None:
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    done: dict[int, Any] = {}  # tied parameters stay one
    for name, parent, leaf, parameter in _parameters(module):
        dim = dim_of(name, parameter)
        if id(parameter) not in done:
            placement = Replicate() if dim is None else Shard(dim)
            made = distribute_tensor(parameter.data, mesh, [placement])
            done[id(parameter)] = torch.nn.Parameter(made, requires_grad=False)
        setattr(parent, leaf, done[id(parameter)])


def _parameters(module: Any) -> list[tuple[str, Any, str, Any]]:
    """(name, module that holds it, its name there, parameter) of each."""
    found = []
    for prefix, parent in module.named_modules():
        for leaf, parameter in parent.named_parameters(recurse=False):
            found.append((f"{prefix}.{leaf}" if prefix else leaf, parent, leaf, parameter))
    return found


def _tp_dim(name: str, parameter: Any) -> int | None:
    """Fused experts have their own dimension in front."""
    if name.endswith("experts.gate_up_proj"):
        return None  # gate above up: a slice of rows would be of neither
    if name.endswith("experts.down_proj"):
        return 2
    dim = _DIM.get(place_of(name).role)
    return dim if dim is not None and dim < parameter.dim() else None


def _ep_dim(name: str, parameter: Any) -> int | None:
    return 0 if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else None


def _fully_shard(module: Any, mesh: Any, sizes: Mapping[str, int]) -> None:
    from torch.distributed.fsdp import fully_shard

    if sizes["ep"] > 1:
        raise ConfigError("bench shards experts by fsdp or by ep, not by both; use one of them")
    dims = tuple(dim for dim in ("dp", "fsdp") if sizes[dim] > 1)
    over = mesh[dims if len(dims) > 1 else dims[0]]
    for name, child in module.named_modules():
        if re.fullmatch(r"(.*\.)?layers\.\d+", name):
            fully_shard(child, mesh=over)
    fully_shard(module, mesh=over)


def _stages_of(name: str, named: Mapping[str, Any], num_stages: int) -> tuple[int, ...]:
    """Layers in equal parts; what comes before them is the first stage's, what comes after the last's;
    a tied embedding is on both."""
    last = num_stages - 1
    found = _LAYER.search(name)
    if found is None:
        is_tied = "embed_tokens" in name and not any("lm_head" in n for n in named)
        if is_tied:
            return (0, last)
        return (0,) if "embed_tokens" in name else (last,)
    num_layers = 1 + max(int(m[1]) for n in named if (m := _LAYER.search(n)) is not None)
    return (int(found[1]) * num_stages // num_layers,)
