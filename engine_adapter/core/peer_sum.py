"""Sums of a few kilobytes over ranks whose GPUs map each other's memory: one kernel each, in graphs too.

NCCL takes some 20 us for what a decode step adds after every layer; this takes a few. Larger parts, and
ranks that cannot map each other, are NCCL's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine_adapter.core.cuda_launch import WORDS, launch_on
from weightsync import native, native_cuda_core
from weightsync.device_tables import write_bytes
from weightsync.errors import TransportError

if TYPE_CHECKING:
    from engine_adapter.core.parallel import Group

_log = logging.getLogger(__name__)

#: Parts up to here: beyond it links are busy longer than a kernel takes to begin.
SLOT_BYTES: Final = 2 * 2**20
#: A rank that is awaited this long is lost; sums are NaN then, and requests fail.
LIMIT_S: Final = 30.0
_HANDLE_BYTES: Final = 256


class PeerSum:
    """The mailboxes of a group's ranks, as this rank maps them."""

    def __init__(self, rank: int, mailboxes: list[int], device: torch.device) -> None:
        self._rank, self._mailboxes, self._device = rank, mailboxes, device

    def sum(self, part: Tensor) -> Tensor | None:
        """A new tensor with the sum over ranks, in rank order in fp32, rounded once; None for what is
        too large, or of another kind."""
        num_bytes = part.nbytes
        is_fit = part.is_contiguous() and part.dtype in WORDS and part.data_ptr() % 16 == 0
        if not is_fit or not 0 < num_bytes <= SLOT_BYTES or num_bytes % 16:
            return None
        total = torch.empty_like(part)
        sizes = native_cuda_core.PeerSumSizes(
            num_bytes, SLOT_BYTES, int(LIMIT_S * 1e9), self._rank, len(self._mailboxes)
        )
        native_cuda_core.peer_sum(
            WORDS[part.dtype], sizes, part.data_ptr(), total.data_ptr(), self._mailboxes,
            launch_on(self._device),
        )  # fmt: skip
        return total


def open_mailboxes(group: Group, device: torch.device) -> PeerSum | None:
    """Make and exchange mailboxes, all ranks together; None, on all of them, if one cannot."""
    if not 2 <= group.size <= native_cuda_core.MAX_PEERS:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    mine, handle = 0, b""
    mapped: list[int] = []
    reasons: list[str] = []
    with _noting(reasons):
        mine, handle = _make_mailbox(group.size, index)
    told = _exchange(group, handle)
    if all(told):
        with _noting(reasons):
            for rank, other in enumerate(told):
                is_mine = rank == group.rank
                mapped.append(mine if is_mine else native.extension.cuda_map(other, index))
    is_done = all(_exchange(group, b"mapped" if len(mapped) == group.size else b""))
    others = [base for base in mapped if base != mine]
    if not is_done:
        _close(mine, others, index)
        reason = "; ".join(reasons) or "another rank could not map a mailbox"
        _log.info("ranks add by NCCL alone: %s", reason)
        return None
    found = PeerSum(group.rank, mapped, device)
    weakref.finalize(found, _close, mine, others, index).atexit = False
    return found


@contextmanager
def _noting(reasons: list[str]) -> Iterator[None]:
    """What one rank cannot do is no error: all go on without."""
    try:
        yield
    except (native.CudaError, TransportError) as error:
        reasons.append(str(error))


def _make_mailbox(size: int, index: int) -> tuple[int, bytes]:
    num_bytes = native_cuda_core.mailbox_bytes(size, SLOT_BYTES)
    ptr = native.extension.cuda_malloc(num_bytes, index)
    try:
        write_bytes(ptr, bytes(native_cuda_core.MAILBOX_HEAD_BYTES), f"cuda:{index}")
        return ptr, native.extension.cuda_export(ptr, index)
    except BaseException:
        native.extension.cuda_free(ptr, index)
        raise


def _close(mine: int, others: list[int], index: int) -> None:
    for base in others:
        native.extension.cuda_unmap(base, index)
    if mine:
        native.extension.cuda_free(mine, index)


def _exchange(group: Group, message: bytes) -> list[bytes]:
    """What every rank says, by way of the host; at most ``_HANDLE_BYTES`` - 1 bytes."""
    padded = bytes([len(message)]) + message.ljust(_HANDLE_BYTES - 1, b"\0")
    found = group.gather(torch.tensor(list(padded), dtype=torch.uint8))
    texts = [bytes(words.tolist()) for words in found]
    return [text[1 : 1 + text[0]] for text in texts]
