"""Memory of CUDA's virtual memory management on its way to another process.

Such memory (torch's ``expandable_segments:True``, memory savers, sleep modes) has no handle of 64 bytes: each
mapped piece travels as a file descriptor beside a frame ``pieces``. Both sides close a descriptor at
once: the trainer when it was sent, the engine when its reader thread took it off the wire, since a
model has thousands of pieces and a process may often open a thousand files. A piece that was unmapped and
mapped again is another piece, with another identity.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from weightsync import native
from weightsync.device_tables import cuda_errors
from weightsync.errors import ProtocolError, TransportError, UnavailableError
from weightsync.transports.frames import MAX_FDS, close_fds
from weightsync.transports.link import Link, check_fields

_LOG = logging.getLogger(__name__)

PIECES_KIND: Final = "pieces"
_PIECES_FIELDS: Final = {"kind": str, "epoch": int, "uuid": str, "ids": list}


def send_pieces(
    link: Link, epoch: int, uuid: str, pieces: Sequence[tuple[int, str]], index: int
) -> None:
    """Send the pieces (address, id) of an epoch; without any: what came before is worth nothing."""
    for start in range(0, max(1, len(pieces)), MAX_FDS):
        part = pieces[start : start + MAX_FDS]
        fds: list[int] = []
        try:
            for ptr, _ in part:
                with cuda_errors(f"the trainer's memory at {ptr:#x}"):
                    fds.append(native.extension.cuda_export_fd(ptr, index))
            ids = [identity for _, identity in part]
            link.send({"kind": PIECES_KIND, "epoch": epoch, "uuid": uuid, "ids": ids}, fds)
        finally:
            close_fds(fds)


class PieceBoard:
    """The engine's end: pieces that arrived, as handles, until somebody maps them.

    ``take`` runs on the thread that reads the channel.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._index = 0
        self._handles: dict[str, int] = {}
        self._failure = ""
        self._is_closed = False

    def take(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """Import what came, and close it. What CUDA refuses is told to whoever wants to map it."""
        try:
            fields = check_fields(message, _PIECES_FIELDS, f"frame {PIECES_KIND!r}")
            ids = fields["ids"]
            if len(ids) != len(fds) or not all(isinstance(i, str) for i in ids):
                raise ProtocolError(f"{len(ids)} pieces came with {len(fds)} descriptors")
            with self._lock:
                if self._is_closed:
                    return
                if fields["epoch"] != self._epoch or not ids:
                    self._drop()
                self._epoch = fields["epoch"]
                if ids and not self._failure:
                    self._import(fields["uuid"], ids, fds)
        finally:
            close_fds(fds)

    def _import(self, uuid: str, ids: Sequence[str], fds: Sequence[int]) -> None:
        found = find_device(uuid)
        # A GPU that this process does not show can be mapped all the same, into one that it does.
        index = self._index = 0 if found is None else found
        try:
            for identity, fd in zip(ids, fds, strict=True):
                if identity not in self._handles:
                    self._handles[identity] = native.extension.cuda_import_fd(fd, index)
        except native.CudaError as error:
            self._failure = str(error)

    def claim(self, ids: Sequence[str]) -> list[int]:
        """The handles of these pieces, the caller's from here on."""
        with self._lock:
            if self._failure:
                raise UnavailableError(f"the trainer's memory cannot be opened: {self._failure}")
            missing = [i for i in ids if i not in self._handles]
            if missing:
                raise TransportError(
                    f"{len(missing)} of {len(ids)} pieces of the trainer's memory are not here "
                    f"(first: {missing[0]}): an earlier attempt to map them failed, or they were "
                    "withdrawn"
                )
            return [self._handles.pop(i) for i in ids]

    def drop(self, epoch: int) -> None:
        """Let go of what nobody claimed of this epoch, or of an earlier one."""
        with self._lock:
            if self._epoch <= epoch:
                self._drop()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop()

    def _drop(self) -> None:
        self._failure = ""
        handles, self._handles = self._handles, {}
        release_handles(list(handles.values()), self._index)


def release_handles(handles: Sequence[int], index: int) -> None:
    """All of them, also when CUDA refuses one."""
    for handle in handles:
        try:
            native.extension.cuda_release_handle(handle, index)
        except native.CudaError:  # of an earlier kernel: the device is of no use any more
            _LOG.exception("a piece of the trainer's memory was not released")


def find_device(uuid: str) -> int | None:
    """The number in this process of the GPU with this UUID (hexadecimal)."""
    if not native.has_cuda():
        return None
    for index in range(native.extension.cuda_num_devices()):
        if native.extension.cuda_device_uuid(index).hex() == uuid:
            return index
    return None
