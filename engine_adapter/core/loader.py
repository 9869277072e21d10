"""Weights from a Hugging Face directory into slots: each rank reads only the bytes of its boxes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine_adapter.core.config import ModelConfig
from engine_adapter.core.slots import SlotTable
from weightsync.checkpoints import FileTensor, read_header, read_index
from weightsync.errors import (
    ConfigError,
    DTypeMismatchError,
    LayoutError,
    MissingNameError,
    UnknownNameError,
)
from weightsync.naming import Drop, FusedExperts, Rule, apply_rules

_FLOATS: Final = ("bfloat16", "float16", "float32", "float64")

#: What files may hold beyond the model's tensors, and fused experts under their files' names.
RULES: Final[tuple[Rule, ...]] = (
    Drop(r".*\.rotary_emb\.inv_freq", "follows from config.json"),
    FusedExperts(),
)


def checkpoint_dtype(directory: Path, config: ModelConfig) -> str:
    """Torch's word for what the configuration names, else for what most tensors are stored in."""
    if config.dtype is not None:
        return config.dtype
    return Counter(e.dtype for e in read_index(directory)).most_common(1)[0][0]


def load_weights(directory: Path, slots: SlotTable, config: ModelConfig) -> dict[str, str]:
    """Write every slot from the directory's safetensors, cast to the slot's dtype.

    Returns names that were left out by rule, and why. A tied head in the files must equal the
    embedding. Raises :class:`ConfigError` for a directory without a checkpoint,
    :class:`UnknownNameError`, :class:`MissingNameError`, :class:`ShapeMismatchError` or
    :class:`DTypeMismatchError` naming the tensor.
    """
    if (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"{directory} holds a LoRA adapter: adapters are not served; merge it into its base"
        )
    expected = _expected_names(slots, config)
    written: set[str] = set()
    tied: list[tuple[str, Tensor]] = []
    dropped: dict[str, str] = {}
    for name, tensor in _file_tensors(directory):
        ruled = apply_rules([(name, tensor)], RULES)
        dropped |= ruled.dropped
        for found, part in ruled.named:
            if found in slots.aliases:
                tied.append((found, part))
                continue
            if found not in expected:
                raise UnknownNameError(
                    f"{directory}: {name!r} is not a tensor of the model; "
                    f"{slots.layout().closest(found)}"
                )
            if found in slots.slots:  # else another rank's expert
                slots.write(found, part)
            written.add(found)
    for found, part in tied:
        canonical = slots.aliases[found]
        if canonical in written:
            _check_tied(slots, canonical, found, part)
        else:
            slots.write(canonical, part)
            written.add(canonical)
    missing = sorted(expected - written)
    if missing:
        raise MissingNameError(
            f"{directory}: {len(missing)} tensors of the model are in no file: {missing[:5]}"
        )
    return dropped


def _expected_names(slots: SlotTable, config: ModelConfig) -> set[str]:
    """The names of the whole model: this rank's slots and other ranks' experts."""
    names = set(slots.slots)
    if config.experts is not None:
        for layer in config.experts.layers:
            for e in range(config.experts.num_experts):
                prefix = f"model.layers.{layer}.mlp.experts.{e}."
                names |= {f"{prefix}{p}_proj.weight" for p in ("gate", "up", "down")}
    return names


def _check_tied(slots: SlotTable, canonical: str, name: str, tensor: Tensor) -> None:
    """A second name of the same tensor: the same values, or the file contradicts config.json."""
    slot = slots.slot(canonical)
    for placed in slot.read():
        index = tuple(slice(a, b) for a, b in zip(placed.box.start, placed.box.stop, strict=True))
        if tuple(tensor.shape) != slot.shape or not torch.equal(
            tensor[index].to(slot.dtype), placed.view.cpu()
        ):
            raise LayoutError(
                f"{name!r} differs from {canonical!r}, which config.json ties it to "
                "(tie_word_embeddings); one of the two is wrong"
            )


def _file_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, mapped, not read: pages come as they are copied."""
    files = dict.fromkeys(entry.file for entry in read_index(directory))
    for file in files:
        path = directory / file
        header = read_header(path)
        mapped = np.memmap(path, dtype=np.uint8, mode="c") if path.stat().st_size else None
        for entry in header:
            if mapped is not None:
                yield entry.meta.name, _tensor(path, entry, mapped)


def _tensor(path: Path, entry: FileTensor, mapped: np.ndarray) -> Tensor:
    meta = entry.meta
    if meta.dtype not in _FLOATS:
        raise DTypeMismatchError(
            f"{path}: {meta.name!r} is stored as {meta.dtype}; quantised checkpoints are not "
            f"served yet, known: {', '.join(_FLOATS)}"
        )
    if re.search(r"\.lora_[AB]\.", meta.name):
        raise ConfigError(f"{path}: {meta.name!r} is part of a LoRA adapter; merge it first")
    data = mapped[entry.offset_bytes : entry.offset_bytes + meta.num_bytes]
    flat = torch.from_numpy(data).view(getattr(torch, meta.dtype))
    return flat.view(meta.shape)
