"""Rates and fixed costs, each with where it comes from; a measured file replaces the defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, and who measured or published it."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What predictions are made of. Rates in bytes a second, times in seconds, shares of one."""

    nic_share: Constant = Constant(
        0.885,
        "published: prime-rl over NIXL, engines reading 82.5 GB each of GLM-5.2 on 64 + 32 H200, "
        "44.26 of 50 GB/s a card",
    )
    nic_op_s: Constant = Constant(
        5.2e-6,
        "measured: NIXL 1.5.1 READ of 4,096 descriptors of 256 KiB between two H200, 4.4 to 5.9 us "
        "each; over NVLink, taken for cards too",
    )
    nvlink_bytes_per_s: Constant = Constant(
        370e9, "measured: segment copy of 100,000 x 8 KiB pulled between two H200 (NV18)"
    )
    device_copy_bytes_per_s: Constant = Constant(
        3.79e12, "measured: segment copy of 20,000 x 8 KiB on an H200, read plus written"
    )
    device_read_bytes_per_s: Constant = Constant(
        4.6e12, "measured: plain reads of 8 GiB on an H200"
    )
    quantise_bytes_per_s: Constant = Constant(
        3.64e12,
        "measured: the slowest of our own copy kernels on an H200, read plus written; the kernel "
        "that quantises does not exist yet",
    )
    control_s: Constant = Constant(
        0.010,
        "measured: an update of a model of 2 MB (weightsync bench --model tiny --transport ipc), all "
        "messages and waits of one engine of one rank",
    )
    broadcast_share: Constant = Constant(
        0.97, "published: torchcomms, 48.5 of 50 GB/s a card; what a collective reaches at best"
    )
    broadcast_call_s: Constant = Constant(
        45e-6, "measured: NCCL 2.28.9 broadcast for each tensor between two H200, 2,000 x 6.3 MB"
    )

    def to_json(self) -> dict[str, Any]:
        """Name -> value and source."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: {"value": c.value, "source": c.source} for name, c in found.items()}

    @classmethod
    def from_json(cls, value: Any, where: str = "constants") -> Constants:
        """Defaults, with what ``value`` names replaced. Raises :class:`ConfigError`."""
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected an object of constants, got {value!r}")
        known = [f.name for f in fields(cls)]
        found = {}
        for name, entry in value.items():
            if name not in known:
                raise ConfigError(f"{where}: unknown constant {name!r}; known: {', '.join(known)}")
            try:
                number, source = float(entry["value"]), str(entry["source"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f'{where}: {name!r} is {entry!r}, expected {{"value": number, "source": text}}'
                ) from error
            if not math.isfinite(number) or number <= 0 or ("share" in name and number > 1):
                raise ConfigError(f"{where}: {name!r} cannot be {number}")
            found[name] = Constant(number, source)
        return replace(cls(), **found)


def read_constants(path: Path) -> Constants:
    """From a file that ``weightsync doctor --constants`` wrote. Raises :class:`ConfigError`."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"constants cannot be read from {path}: {error}") from error
    return Constants.from_json(value, str(path))
