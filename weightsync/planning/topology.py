"""Where ranks sit: which of them share a GPU, a host, a network card."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from weightsync.errors import ConfigError

Int64 = npt.NDArray[np.int64]


class Reach(IntEnum):
    """How two ranks meet, the nearest first."""

    GPU = 0  # one GPU: a device copy
    HOST = 1  # one host: NVLink, or memory of the host
    NETWORK = 2


@dataclass(frozen=True)
class Sites:
    """[ranks] host, GPU of that host and network card of each rank; cards are numbered over all
    hosts."""

    host: tuple[int, ...]
    gpu: tuple[int, ...]
    nic: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.host) == len(self.gpu) == len(self.nic):
            raise ConfigError(
                f"{len(self.host)} hosts, {len(self.gpu)} GPUs and {len(self.nic)} cards are named; "
                "each rank has one of each"
            )

    @property
    def num_ranks(self) -> int:
        return len(self.host)


@dataclass(frozen=True, eq=False)
class Places:
    """:class:`Sites` as columns, int64 [ranks] each."""

    host: Int64
    gpu: Int64
    nic: Int64

    @classmethod
    def of(cls, sites: Sites) -> Places:
        return cls(*(np.array(c, dtype=np.int64) for c in (sites.host, sites.gpu, sites.nic)))


def reach_of(theirs: Places, ours: Places, source: Int64, target: Int64) -> Int64:
    """[n] the :class:`Reach` between ranks of two sides, pair by pair."""
    is_host = theirs.host[source] == ours.host[target]
    is_gpu = is_host & (theirs.gpu[source] == ours.gpu[target])
    found: Int64 = np.where(is_gpu, Reach.GPU, np.where(is_host, Reach.HOST, Reach.NETWORK))
    return found


def sites_in_order(
    num_ranks: int, *, gpus_per_host: int, nics_per_host: int | None = None, first_host: int = 0
) -> Sites:
    """Ranks fill host after host, one GPU each; GPUs of a host share its cards evenly."""
    nics = gpus_per_host if nics_per_host is None else nics_per_host
    if min(num_ranks, gpus_per_host, nics) < 1 or first_host < 0:
        raise ConfigError(
            f"{num_ranks} ranks on hosts of {gpus_per_host} GPUs and {nics} network cards: each "
            "count must be at least one"
        )
    host = [first_host + r // gpus_per_host for r in range(num_ranks)]
    gpu = [r % gpus_per_host for r in range(num_ranks)]
    nic = [h * nics + g * nics // gpus_per_host for h, g in zip(host, gpu, strict=True)]
    return Sites(tuple(host), tuple(gpu), tuple(nic))


def one_card_each(num_ranks: int, first_host: int = 0) -> Sites:
    """Nothing is known: every rank is a host of its own."""
    return sites_in_order(num_ranks, gpus_per_host=1, first_host=first_host)
