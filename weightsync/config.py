"""The one module that reads the environment."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import TypeVar

from weightsync.errors import ConfigError

_Choice = TypeVar("_Choice", bound=Enum)


def cache_dir() -> Path:
    """Where generated checkpoints live: ``$WEIGHTSYNC_CACHE``, else the user's cache directory."""
    if explicit := os.environ.get("WEIGHTSYNC_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "weightsync"


def armed_fault() -> str | None:
    """``$WEIGHTSYNC_FAULT``: a fault point at which this process ends itself (tests only)."""
    return os.environ.get("WEIGHTSYNC_FAULT") or None


def control_token() -> str | None:
    """``$WEIGHTSYNC_TOKEN``: the control token where none is given in code."""
    return os.environ.get("WEIGHTSYNC_TOKEN") or None


def rank_host() -> str | None:
    """``$WEIGHTSYNC_HOST``: the address on which rank 0 hears the other ranks of its side; needed where
    they run on several machines."""
    return os.environ.get("WEIGHTSYNC_HOST") or None


def num_threads() -> int:
    """``$WEIGHTSYNC_NUM_THREADS``, else the CPUs of this process, at most 8."""
    if explicit := os.environ.get("WEIGHTSYNC_NUM_THREADS"):
        if not explicit.isdecimal() or int(explicit) < 1:
            raise ConfigError(f"WEIGHTSYNC_NUM_THREADS={explicit!r} is not a count of at least 1")
        return int(explicit)
    return max(1, min(8, len(os.sched_getaffinity(0))))


def set_default_env(name: str, value: str) -> None:
    """Set a variable that a library of ours reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def library_setting(name: str) -> str | None:
    """A variable that a library of ours reads, to explain what it does."""
    return os.environ.get(name)


def p2p_device_way() -> str | None:
    """``$WEIGHTSYNC_P2P_DEVICE_WAY``: how ``p2p`` reaches device memory within one machine."""
    return os.environ.get("WEIGHTSYNC_P2P_DEVICE_WAY") or None


class DecodePlace(Enum):
    """Where an engine decodes deltas of weights that lie on a GPU."""

    HOST = "host"  # their old values are copied there
    DEVICE = "device"  # but what a device does not decode


def decode_place() -> DecodePlace:
    """``$WEIGHTSYNC_DECODE``: ``device`` (default), or ``host``."""
    return _chosen("WEIGHTSYNC_DECODE", DecodePlace.DEVICE)


class ExpertProducts(Enum):
    """Who multiplies experts on a GPU."""

    OWN = "own"  # our kernels, with what is around the products
    TORCH = "torch"


def expert_products() -> ExpertProducts:
    """``$WEIGHTSYNC_EXPERTS``: ``own`` (default) or ``torch``."""
    return _chosen("WEIGHTSYNC_EXPERTS", ExpertProducts.OWN)


class SmallProducts(Enum):
    """Who multiplies few rows of states with a weight on a GPU."""

    OWN = "own"  # our kernel, where it has the libraries' bits
    TORCH = "torch"


def small_products() -> SmallProducts:
    """``$WEIGHTSYNC_SMALL_PRODUCTS``: ``own`` (default) or ``torch``."""
    return _chosen("WEIGHTSYNC_SMALL_PRODUCTS", SmallProducts.OWN)


def _chosen(variable: str, default: _Choice) -> _Choice:
    """A member of the default's kind by its value. Raises :class:`ConfigError` for what is none."""
    kind = type(default)
    name = os.environ.get(variable) or default.value
    try:
        return kind(name)
    except ValueError as error:
        known = ", ".join(member.value for member in kind)
        raise ConfigError(f"{variable}={name!r}; known: {known}") from error
