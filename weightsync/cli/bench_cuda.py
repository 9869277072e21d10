"""``bench --device cuda``: models drawn on the device, and a device copy as the ceiling."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

from weightsync import native
from weightsync.cli.bench_device import BenchDevice
from weightsync.cli.bench_model import ModelChoice, add_tensor, bits_of, change_all, load
from weightsync.device_tables import cuda_index
from weightsync.errors import CapacityError, ConfigError
from weightsync.presets import get_preset
from weightsync.types import Placement, format_bytes

_CEILING_BYTES = 8 * 2**30
#: Two blocks a multiple of some power of two apart share memory channels and copy a tenth slower.
_CEILING_SHIFT_BYTES = 4096
_CEILING_COPIES = 4
_SPARE_BYTES = 2 * 10**9  # contexts, tables, and what comes and goes
_MIN_CEILING_BYTES = 64 * 2**20
#: torch keeps tensors of 1 to 10 MiB in blocks of 20 MiB, which they may not fill.
_ROUNDING = 1.12


def check_device(name: str) -> str:
    """``cpu`` or ``cuda:N``. Raises :class:`ConfigError` saying what is missing, and how to get it."""
    if name == "cpu":
        return name
    wanted = "cuda:0" if name == "cuda" else name
    index = cuda_index(wanted)
    if index >= (count := native.extension.cuda_num_devices()):
        raise ConfigError(f"--device {name}: this machine shows {count} CUDA devices")
    return wanted


def check_device_room(choice: ModelChoice, placement: str, free_bytes: int) -> None:
    """Refuse a model that does not fit, before anything is allocated."""
    copies = 3 if placement == Placement.STAGED.value else 2
    need = int(copies * choice.total_bytes * _ROUNDING) + _SPARE_BYTES
    if need > free_bytes:
        hint = "; --placement in_place needs one copy less" if copies == 3 else ""
        raise CapacityError(
            f"model {choice.name!r} needs about {format_bytes(need)} of device memory ({copies} "
            f"copies of {format_bytes(choice.total_bytes)}), and {free_bytes} bytes "
            f"({format_bytes(free_bytes)}) are free{hint}"
        )


class CudaDevice(BenchDevice):
    """One GPU, which both processes use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._index = cuda_index(name)

    def load(self, choice: ModelChoice, mask: int) -> Any:
        import torch

        torch.set_grad_enabled(False)
        if choice.directory is not None:
            module = load(choice, mask=0).to(self._name)
        else:
            module = drawn_module(str(choice.preset), self._name, order_seed=mask)
        if mask:
            change_all(module, mask)
        torch.cuda.synchronize(self._name)
        return module

    def room_bytes(self) -> int:
        import torch

        torch.cuda.synchronize(self._name)
        torch.cuda.empty_cache()
        return native.extension.cuda_free_bytes(self._index)

    def used_bytes(self) -> int:
        _, total, *_ = native.extension.cuda_device_info(self._index)
        return total - native.extension.cuda_free_bytes(self._index)

    def ceiling(self, total_bytes: int) -> dict[str, Any]:
        """Device copies between two blocks of at most 8 GiB, by events; the best of a few.

        The blocks are given back at once. The other process must be quiet.
        """
        import torch

        room = max(_MIN_CEILING_BYTES, (self.room_bytes() - _SPARE_BYTES) // 2)
        size = min(_CEILING_BYTES, max(total_bytes, _MIN_CEILING_BYTES), room)
        found = []
        with torch.cuda.device(self._index):
            source = torch.ones(size, dtype=torch.uint8, device=self._name)
            block = torch.zeros(size + _CEILING_SHIFT_BYTES, dtype=torch.uint8, device=self._name)
            target = block[_CEILING_SHIFT_BYTES:]
            for _ in range(_CEILING_COPIES):
                events: list[Any] = [torch.Event(self._name, enable_timing=True) for _ in range(2)]
                start, stop = events
                start.record()
                target.copy_(source)
                stop.record()
                stop.synchronize()
                found.append(start.elapsed_time(stop) * 1e-3)
            del source, block, target
        torch.cuda.empty_cache()
        what = f"device copy of {format_bytes(size)}, by events"
        return {"gb_per_s": size / min(found) / 1e9, "what": what}

    def drop_ceiling(self) -> None:
        return None

    def num_different(self, module: Any, preset: str, mask: int) -> int | None:
        return count_different(module, preset, self._name, mask)


def count_different(module: Any, preset: str, device: str, mask: int) -> int:
    """Draws one tensor after the other again and compares every bit; no further copy is held."""
    import torch

    parameters = dict(module.named_parameters())
    found = 0
    for name, wanted in _drawn(preset, device, order_seed=None):
        bits = bits_of(wanted)
        wanted.view(bits).bitwise_xor_(mask)
        found += not torch.equal(parameters[name].data.view(bits), wanted.view(bits))
        del wanted
    torch.cuda.empty_cache()
    return found


def drawn_module(preset: str, device: str, order_seed: int) -> Any:
    """A module with a preset's names and shapes, drawn on ``device``, with no file.

    Equal on every call; each tensor is an allocation of its own, made in an order shuffled by
    ``order_seed``, so that two processes place them differently.
    """
    import torch

    root = torch.nn.Module()
    tensors = dict(_drawn(preset, device, order_seed))
    for name, _, _ in get_preset(preset).tensors():
        add_tensor(root, name, tensors.pop(name))
    return root


def _drawn(preset: str, device: str, order_seed: int | None) -> Iterator[tuple[str, Any]]:
    """Name and normal values, from a generator that the name seeds."""
    import torch

    model = get_preset(preset)
    shapes = list(model.tensors())
    if order_seed is not None:
        random.Random(order_seed).shuffle(shapes)
    generator = torch.Generator(device)
    for name, dtype, shape in shapes:
        generator.manual_seed(zlib.crc32(name.encode()))
        value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        yield name, value.normal_(0.0, model.initializer_range, generator=generator)
