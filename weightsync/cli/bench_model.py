"""The models that ``bench`` moves: a directory, a written checkpoint, or drawn in memory."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightsync import config
from weightsync.errors import CapacityError, ConfigError
from weightsync.memory import available_bytes
from weightsync.presets import PRESETS, get_preset
from weightsync.sources import resolve_bucket
from weightsync.types import Placement, TensorMeta, format_bytes

#: Presets above this are drawn in each process, with no file.
_DRAWN_ABOVE_BYTES = 20 * 10**9
#: What a process needs beside tensors: the interpreter, torch, transformers.
_PROCESS_BYTES = 600 * 10**6


@dataclass(frozen=True)
class ModelChoice:
    """Which model, how large, and where it comes from. ``directory`` None: drawn from the preset."""

    name: str
    num_tensors: int
    total_bytes: int
    preset: str | None
    directory: str | None


def choose_model(name: str) -> ModelChoice:
    """Look the model up without allocating or writing anything."""
    directory = Path(name).expanduser()
    if name not in PRESETS and directory.is_dir():
        from weightsync.checkpoints import read_index

        entries = read_index(directory)
        size = sum(TensorMeta(e.name, e.dtype, e.shape).num_bytes for e in entries)
        return ModelChoice(str(directory), len(entries), size, None, str(directory))
    if name not in PRESETS and ("/" in name or name.startswith(".")):
        raise ConfigError(f"model {name!r} is not a directory here")
    preset = get_preset(name)
    count = sum(1 for _ in preset.tensors())
    return ModelChoice(name, count, preset.total_bytes, name, None)


def check_room(choice: ModelChoice, placement: str, bucket: str) -> None:
    """Refuse a model that does not fit, before anything is allocated."""
    copies = 3 if placement == Placement.STAGED.value else 2
    slot = min(choice.total_bytes, resolve_bucket(bucket))
    rings = 4 * slot  # two slots on each side
    need = copies * choice.total_bytes + rings + 2 * _PROCESS_BYTES
    have = available_bytes()
    if need > have:
        raise CapacityError(
            f"model {choice.name!r} needs {need} bytes of memory here ({copies} copies of "
            f"{format_bytes(choice.total_bytes)} in two processes, up to {format_bytes(rings)} of "
            f"slots), and {have} bytes ({format_bytes(have)}) are available"
        )


def ready_checkpoint(choice: ModelChoice) -> ModelChoice:
    """Write the preset's checkpoint to the user's cache, once, if it is one that has a file."""
    if choice.directory is not None or choice.total_bytes > _DRAWN_ABOVE_BYTES:
        return choice
    from weightsync.checkpoints import cached_checkpoint

    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        tenths = 10 * done // max(total, 1)
        if tenths != shown:
            shown = tenths
            show_progress(f"writing {choice.name} to the cache: {10 * tenths} %")

    directory = cached_checkpoint(get_preset(choice.name), config.cache_dir(), progress=progress)
    return ModelChoice(
        choice.name, choice.num_tensors, choice.total_bytes, choice.preset, str(directory)
    )


def show_progress(text: str) -> None:
    """One line on the terminal that overwrites itself; a plain line elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"weightsync bench: {text}", file=sys.stderr, flush=True)


#: The engine starts with these bits flipped, which no later change of the trainer's ever flips.
ENGINE_MASK = 4


def load(choice: ModelChoice, mask: int) -> Any:
    """The module in this process; a ``mask`` above 0 makes its weights other ones."""
    import torch

    torch.set_grad_enabled(False)
    if choice.directory is not None:
        from weightsync.checkpoints import load_model, read_index

        _hush_transformers()
        sizes: Counter[str] = Counter()
        for entry in read_index(Path(choice.directory)):
            sizes[entry.dtype] += TensorMeta(entry.name, entry.dtype, entry.shape).num_bytes
        module = load_model(Path(choice.directory), sizes.most_common(1)[0][0])
    else:
        module = drawn_module(str(choice.preset))
    if mask:
        change_all(module, mask)
    return module


def drawn_module(preset: str) -> Any:
    """A module tree with a preset's names and shapes and cheap random weights."""
    import torch

    root = torch.nn.Module()
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2**20, generator=generator).to(torch.bfloat16)
    for name, dtype, shape in get_preset(preset).tensors():
        data = torch.empty(shape, dtype=getattr(torch, dtype))
        flat = data.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            part_of = flat[start : start + noise.numel()]
            part_of.copy_(noise[: part_of.numel()])
        add_tensor(root, name, data)
    return root


def add_tensor(root: Any, name: str, data: Any) -> None:
    """Make ``data`` a parameter of the tree under ``root``, with the modules on the way."""
    import torch

    *path, leaf = name.split(".")
    node = root
    for part in path:
        if part not in node._modules:
            node.add_module(part, torch.nn.Module())
        node = node._modules[part]
    node.register_parameter(leaf, torch.nn.Parameter(data, requires_grad=False))


def mask_of(version: int) -> int:
    """Bits that the trainer flips before a refit: never none, never the engine's."""
    return version % 3 + 1


def change_all(module: Any, mask: int) -> None:
    """Flip low bits of every element of every parameter; values stay finite and near."""
    for parameter in module.parameters():
        parameter.data.view(bits_of(parameter)).bitwise_xor_(mask)


def bits_of(tensor: Any) -> Any:
    """The integer dtype of the size of its elements."""
    import torch

    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _hush_transformers() -> None:
    try:
        from transformers.utils import logging
    except ImportError:
        return  # loading says what is missing
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
