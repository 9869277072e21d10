"""NIXL's binding, loaded late: memory, descriptors, and the handles of prepared reads.

The binding classes are used rather than NIXL's Python wrapper, which hard-codes a progress thread
that spins (a whole core, idle or not), logs to standard output, and pickles.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weightsync import config
from weightsync.errors import MissingDependencyError, UnavailableError
from weightsync.transports.nixl_reads import Reads

NIXL_MODULES: Final = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")

#: Defaults only; what the user has set stays.
_ENVIRONMENT: Final = {
    # Both libraries log to the terminal, for example about CUDA plugins on a machine without CUDA.
    # What matters comes back as an error of ours; INFO (NIXL) and info (UCX) show the rest.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
    # Without it UCX reads device memory of its own GPU through the host, 2000 times slower.
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
    # UCX would keep what it mapped of a trainer until this process ends: the memory of a trainer that
    # is gone would not be free. What is read again and again is kept mapped by us (p2p_cuda.py).
    "UCX_CUDA_IPC_CACHE": "n",
}


class Span(NamedTuple):
    """Memory of one device: ``cpu`` or ``cuda:<index>``."""

    ptr: int
    num_bytes: int
    device: str


def load_nixl() -> Any:
    """The first NIXL that can be imported."""
    for name, value in _ENVIRONMENT.items():
        config.set_default_env(name, value)
    tried = []
    for module in NIXL_MODULES:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            tried.append(f"{module}: {error}")
    raise MissingDependencyError("nixl", extra="p2p", why="tried " + "; ".join(tried))


def memory_type(bind: Any, device: str) -> tuple[Any, int]:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return bind.DRAM_SEG, 0
    if kind == "cuda":
        return bind.VRAM_SEG, int(index or 0)
    raise UnavailableError(f"device {device!r}: p2p moves memory of 'cpu' and 'cuda' devices")


class PieceSteps(Protocol):
    """What is done between the pieces of a transfer, on the reading thread."""

    def before(self, piece: int) -> None:
        """It is about to be posted."""

    def landed(self, piece: int) -> None:
        """Its bytes are here; pieces land in order."""


class Transfer:
    """Reads and the NIXL handles that run them: one for each piece, an index range of the reads.

    ``num_in_flight`` pieces are under way at a time.
    """

    def __init__(
        self,
        reads: Reads,
        pieces: Sequence[tuple[int, int]],
        source_device: str,
        target_device: str,
        num_in_flight: int,
    ) -> None:
        self.reads = reads
        self.pieces = pieces
        self.source_device = source_device
        self.target_device = target_device
        self.num_in_flight = num_in_flight
        self.generation = -1
        self.handles: list[Any] = []
        self._owned: list[tuple[Callable[[Any], None], Any]] = []
        self._finalizer = weakref.finalize(self, _release, self._owned)

    def adopt(self, release: Callable[[Any], None], handle: Any) -> None:
        self._owned.append((release, handle))

    def release(self) -> None:
        """Give the handles back; the transfer may be built again."""
        self.generation = -1
        self.handles.clear()
        _release(self._owned)


def _release(owned: list[tuple[Callable[[Any], None], Any]]) -> None:
    while owned:  # requests before the lists that they point into
        release, handle = owned.pop()
        with contextlib.suppress(Exception):  # an abandoned read: it goes with its agent
            release(handle)


def descriptors(
    ptrs: Sequence[int] | npt.NDArray[np.int64],
    sizes: Sequence[int] | npt.NDArray[np.int64],
    device_index: int,
) -> npt.NDArray[np.uint64]:
    table = np.empty((len(ptrs), 3), dtype=np.uint64)
    table[:, 0] = ptrs
    table[:, 1] = sizes
    table[:, 2] = device_index
    return table
