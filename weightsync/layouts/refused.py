"""What is no layout by name, told apart by its names and types, with what to do instead."""

from __future__ import annotations

import re
import sys
from typing import Any

from weightsync.errors import LayoutError

_ADAPTER = re.compile(
    r"(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer)(\.|$)"
)
_FLAT = re.compile(r"(^|\.)(_fsdp_wrapped_module|_flat_param)(\.|$|_)")
_OPTIMIZER = re.compile(
    r"(^|\.)(exp_avg(_sq)?|max_exp_avg_sq|momentum_buffer|param_groups|optimizer(_state)?|"
    r"fp32_from_fp16_params|single_partition_of_fp32_groups|param_and_grad_buffers?)(\.|$)|^state\.\d"
)

_MERGE = (
    "adapters are not sent: merge them first (merge_adapter(), with rules that drop lora_ names and "
    "rename base_layer, or merge_and_unload())"
)
_NO_FLAT = (
    "FSDP1 keeps flat slices that are no boxes of tensors: use FSDP2 (fully_shard), or send a full state "
    "dict of FSDP1 from one rank"
)
_NO_OPTIMIZER = (
    "a shard of an optimizer's state is not a weight: send the module, or its state_dict(); a distributed "
    "optimizer must first write its fp32 masters back into the parameters"
)


def check_source(name: str, tensor: Any) -> None:
    """Refuse what no rule could make a tensor of, before the rules. Raises :class:`LayoutError`."""
    if _FLAT.search(name) or type(tensor).__name__ == "FlatParameter":
        raise LayoutError(f"{name!r}: {_NO_FLAT}")
    if hasattr(tensor, "ds_shape") and not getattr(tensor, "numel", int)():
        raise LayoutError(
            f"{name!r}: partitioned by ZeRO-3 (its shape is {tuple(tensor.ds_shape)}, nothing is here): "
            "gather it (GatheredParameters) and send it from one rank"
        )


def check_name(name: str) -> None:
    """Refuse adapters and optimizer state that the rules left. Raises :class:`LayoutError`."""
    if "lora_" in name or "base_layer" in name:
        if _ADAPTER.search(name):
            raise LayoutError(f"{name!r}: {_MERGE}")
    elif _OPTIMIZER.search(name):
        raise LayoutError(f"{name!r}: {_NO_OPTIMIZER}")


def check_module(module: Any) -> None:
    """Refuse FSDP1 by its class, whatever its names. Raises :class:`LayoutError`."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is None:
        return
    for path, child in module.named_modules():
        if isinstance(child, fsdp):
            raise LayoutError(f"{path or 'the module'!r} is FullyShardedDataParallel: {_NO_FLAT}")
