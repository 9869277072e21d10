"""A gloo group of its own, for host memory.

Made of torch's ``ProcessGroupGloo`` and a store of the trainer's on a free port, beside whatever groups
the process has. gloo itself cannot be stopped: its operations end when their time is over, or when
their sockets do. So :meth:`GlooCollective.abort` shuts exactly the sockets of this group, which it knows
by the ports that gloo listens on.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.errors import (
    DeadlineError,
    MissingDependencyError,
    TransportError,
    UnavailableError,
)
from weightsync.packages import is_installed
from weightsync.transports.collective import Check, Collective, Pending, Seat, run_aside
from weightsync.transports.link import check_fields

_LOG = logging.getLogger(__name__)

_STORE_FIELDS: Final = {"host": str, "port": int}
#: The longest that gloo lets one operation take; what gives it up sooner is :meth:`abort`.
_OPERATION_LIMIT_S: Final = 24 * 3600.0
#: Operations that run at once, each on a thread of gloo's.
_NUM_THREADS: Final = 2
_MAX_VIEWS: Final = 256

# What one ``create_device`` opens is told from what others open by comparing before and after.
_device_lock = threading.Lock()


def require_gloo() -> Any:
    """``torch.distributed``. Raises :class:`MissingDependencyError` or :class:`UnavailableError`."""
    if not is_installed("torch"):
        raise MissingDependencyError("torch", "hf", "broadcast moves host memory over its gloo")
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise UnavailableError(
            "broadcast: this torch was built without gloo; install a wheel of torch that has it, or "
            "use transport='p2p'"
        )
    return torch.distributed


class GlooStore:
    """Where the members of one group find each other: a server on a free port of ``host``."""

    def __init__(self, host: str) -> None:
        dist = require_gloo()
        version = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.create_server((host, 0), family=version) as server:
                self.host, self.port = host, int(server.getsockname()[1])
                handed_over = os.dup(server.fileno())
        except OSError as error:
            raise UnavailableError(
                f"broadcast: no port of {host!r} can be listened on: {error}; name an address of this "
                "machine"
            ) from error
        # Given the socket: left to itself it listens on every address of the machine.
        self.store = dist.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=handed_over,
            timeout=timedelta(seconds=30),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """For the other members."""
        return {"host": self.host, "port": self.port}


def join_store(address: Any, limit_s: float) -> Any:
    """Another member's end of a :class:`GlooStore`."""
    fields = check_fields(address, _STORE_FIELDS, "frame 'group', 'rendezvous'")
    return require_gloo().TCPStore(
        fields["host"], fields["port"], is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=max(limit_s, 1e-3)),
    )  # fmt: skip


class _GlooPending(Pending):
    def __init__(self, work: Any, group: GlooCollective, tensor: Any) -> None:
        self._work, self._group, self._tensor = work, group, tensor

    def wait(self, limit_s: float) -> bool:
        work = self._work
        if work is None:
            return True
        try:
            try:
                work.wait(timedelta(seconds=limit_s))
            except RuntimeError:
                if not work.is_completed():
                    return False  # only this wait ran out
                work.wait(timedelta(seconds=1))  # it ended in between: how?
        except RuntimeError as error:
            raise TransportError(f"gloo: {self._group.why(error)}") from error
        self._work = self._tensor = None
        return True


class GlooCollective(Collective):
    """See the module."""

    name = "gloo"
    holds_device = False

    def __init__(self, group: Any, ports: frozenset[int]) -> None:
        """``ports``: those that the gloo of every member listens on."""
        self._group, self._ports = group, ports
        self._lock = threading.Lock()
        self._is_aborted = False
        self._views: dict[tuple[int, int], Any] = {}
        dist = require_gloo()
        self._options = dist.distributed_c10d.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._options.timeout = timedelta(seconds=_OPERATION_LIMIT_S)
        _live.add(self)

    def broadcast(self, ptr: int, num_bytes: int) -> Pending:
        tensor = self._view(ptr, num_bytes)
        with self._lock:
            if self._group is None:
                raise TransportError("gloo: the group was ended here")
            try:
                work = self._group.broadcast([tensor], self._options)
            except RuntimeError as error:
                raise TransportError(f"gloo: {self.why(error)}") from error
        return _GlooPending(work, self, tensor)

    def _view(self, ptr: int, num_bytes: int) -> Any:
        key = (ptr, num_bytes)
        if key not in self._views:
            import torch

            if len(self._views) >= _MAX_VIEWS:
                del self._views[next(iter(self._views))]
            array = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(ptr))
            self._views[key] = torch.from_numpy(array)
        return self._views[key]

    def why(self, error: Exception) -> str:
        """The reason in one line: gloo's own begins with a place in its sources."""
        if self._is_aborted:
            return "the group was ended here"
        text = str(error).partition("] ")[2] or str(error)
        return text.partition(". ")[0][:300]

    def abort(self) -> None:
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
            group, self._group = self._group, None
        for sock in _sockets():
            with contextlib.suppress(OSError), sock:
                if _ports_of(sock) & self._ports:
                    sock.shutdown(socket.SHUT_RDWR)
        self._views.clear()
        # Its end waits for what is under way, which the sockets have ended.
        del group


_live: weakref.WeakSet[GlooCollective] = weakref.WeakSet()


@atexit.register
def _abort_all() -> None:
    """An interpreter that ends would wait for operations of a peer that stands still."""
    for group in list(_live):
        group.abort()


def make_gloo(
    seat: Seat, store: Any, prefix: str, host: str, deadline: Deadline, check: Check
) -> GlooCollective:
    """Join the group; returns when all members have. ``host``: this member's own address.

    Raises :class:`DeadlineError`, :class:`TransportError`, or what ``check`` raises.
    """

    def make() -> GlooCollective:
        return _make(seat, store, prefix, host, max(deadline.remaining_s(), 0.05))

    try:
        return run_aside(make, GlooCollective.abort, deadline, check)
    except RuntimeError as error:
        check()
        if deadline.remaining_s() <= 0 or "timeout" in str(error).lower():
            raise DeadlineError(
                deadline.peer, deadline.stage, deadline.limit_s, deadline.elapsed_s()
            ) from error
        raise TransportError(
            f"{deadline.peer}: no gloo group of {seat.size} on {host}: {str(error)[:300]}"
        ) from error


def _make(seat: Seat, store: Any, prefix: str, host: str, limit_s: float) -> GlooCollective:
    dist = require_gloo()
    own = dist.PrefixStore(prefix, store)
    options = dist.ProcessGroupGloo._Options()
    with _device_lock:
        before = _listening()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        opened = _listening() - before
    options._threads = _NUM_THREADS
    options._timeout = timedelta(seconds=limit_s)
    # Another thread that began to listen in this very moment makes it unclear which port is gloo's.
    port = next(iter(opened)) if len(opened) == 1 else 0
    if not port:
        _LOG.warning(
            "broadcast: gloo's port on %s is not known: a broadcast cannot be stopped", host
        )
    own.set(f"port/{seat.rank}", str(port))
    group = dist.ProcessGroupGloo(own, seat.rank, seat.size, options)
    ports = {int(own.get(f"port/{rank}")) for rank in range(seat.size)} - {0}
    return GlooCollective(group, frozenset(ports))


# --- sockets of this process --------------------------------------------------------------------------


def _sockets() -> Iterator[socket.socket]:
    """Every TCP socket of this process, each as a descriptor of its own that the caller closes."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(entry)))
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
            else:
                sock.close()


def _listening() -> set[int]:
    """Ports that this process listens on."""
    found = set()
    for sock in _sockets():
        with contextlib.suppress(OSError), sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(int(sock.getsockname()[1]))
    return found


def _ports_of(sock: socket.socket) -> set[int]:
    """Of both ends of a connection; none of a socket that only listens."""
    return {int(sock.getsockname()[1]), int(sock.getpeername()[1])}


def gloo_finding() -> Mapping[str, str]:
    """What ``doctor`` says of it."""
    import torch

    return {"gloo": f"of torch {torch.__version__}"}
