"""One NIXL agent over UCX: registrations, a peer, and reads that are prepared once.

Only what reading needs is here: nothing is ever exported for writing, and a target's own memory is
registered without its metadata leaving the process.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from weightsync.deadline import Deadline
from weightsync.device_tables import CPU
from weightsync.errors import (
    PeerLostError,
    TransportError,
    UnavailableError,
)
from weightsync.transports.nixl_binding import (
    PieceSteps,
    Span,
    Transfer,
    descriptors,
    load_nixl,
    memory_type,
)
from weightsync.transports.nixl_reads import Reads, cut, pieces
from weightsync.types import format_bytes

#: The serving thread sleeps in poll(2) and wakes by itself this often, in case UCX misses an event.
_SERVE_WAKE_US: Final = 100_000
#: A transfer is given up between pieces, so a piece should take some 10 ms on a slow path.
_PIECE_BYTES: Final = 32 * 2**20
_PIECE_READS: Final = 1024
_IN_FLIGHT: Final = 2
#: A device moves more than a terabyte in a second, and what was posted is soon over.
_DEVICE_PIECE_BYTES: Final = 512 * 2**20
#: Waiting: first without sleeping, then in steps that a software path survives (it moves 512 KiB at
#: a time, and only while it is polled), then gently.
_SPIN_S: Final = 50e-6
_SLEEP_S: Final = 50e-6
_PATIENT_AFTER_S: Final = 1.0
_PATIENT_SLEEP_S: Final = 1e-3
#: How long an abandoned read may take to leave the wire before its agent is torn down.
_QUIET_LIMIT_S: Final = 2.0


class Agent:
    """An agent, its registrations, and at most one peer.

    Any thread may use it: every call of NIXL is made under one lock, because a UCX worker without
    a progress thread belongs to one thread at a time. ``close`` interrupts a running read.
    """

    def __init__(self, name: str, *, serves: bool, ucx: Mapping[str, str] | None = None) -> None:
        """``serves``: answer a peer's reads on a thread of NIXL's own (asleep while nothing comes).

        ``ucx``: settings of this agent without their ``UCX_``; the environment wins over them.
        """
        self._bind = load_nixl().nixlBind
        self._errors = tuple(
            kind for kind in vars(self._bind).values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        )  # fmt: skip
        self._lock = threading.RLock()
        self._lost: str | None = None
        self._generation = 0
        self._peer: str | None = None
        self._known: set[Span] = set()
        self._registered: list[Any] = []
        self._transfers: weakref.WeakSet[Transfer] = weakref.WeakSet()
        options = self._bind.nixlAgentConfig()
        options.useProgThread = serves
        options.pthrDelay = _SERVE_WAKE_US
        options.syncMode = self._bind.NIXL_THREAD_SYNC_STRICT
        try:
            self._nixl = self._bind.nixlAgent(name, options)
            self._backend = self._nixl.createBackend(
                "UCX", {"engine_config": ",".join(f"{k}={v}" for k, v in (ucx or {}).items())}
            )
        except self._errors as error:
            raise UnavailableError(
                f"NIXL's UCX backend does not start: {error}. If UCX_TLS is set it must hold 'tcp' "
                "or another transport with active messages; UCX_LOG_LEVEL=info says more"
            ) from error

    def lost(self) -> str | None:
        """Why this agent is of no use any more, or None."""
        return self._lost

    def _check_open(self) -> None:
        if self._lost is not None:
            raise PeerLostError(self._lost)

    # -- memory ---------------------------------------------------------------------------------

    def register(self, spans: Sequence[Span]) -> list[Any]:
        """Make memory known to the network; the result is for :meth:`deregister`."""
        made: list[Any] = []
        with self._lock:
            self._check_open()
            try:
                for device in sorted({span.device for span in spans}):
                    rows = [span for span in spans if span.device == device]
                    kind, index = memory_type(self._bind, device)
                    table = descriptors([r.ptr for r in rows], [r.num_bytes for r in rows], index)
                    listed = self._bind.nixlRegDList(kind, table)
                    self._nixl.registerMem(listed, [self._backend])
                    made.append(listed)
            except self._errors as error:
                self._deregister(made)
                raise _registration_error(spans, error) from error
            self._registered.extend(made)
        return made

    def deregister(self, registered: Sequence[Any]) -> None:
        """Forget memory. Prepared reads make themselves anew when they run next."""
        with self._lock:
            if self._lost is None and registered:
                self._forget_prepared()
                self._deregister(registered)
                gone = set(map(id, registered))  # NIXL compares lists by value
                self._registered = [r for r in self._registered if id(r) not in gone]

    def _deregister(self, registered: Sequence[Any]) -> None:
        for listed in registered:
            with contextlib.suppress(*self._errors):
                self._nixl.deregisterMem(listed, [self._backend])

    def metadata(self) -> bytes:
        """What a peer needs to read everything that is registered here."""
        with self._lock:
            self._check_open()
            packed: bytes = self._nixl.getLocalMD()
            return packed

    # -- the peer -------------------------------------------------------------------------------

    def load_peer(self, metadata: bytes, spans: Sequence[Span]) -> None:
        """Learn what the peer has registered; ``spans`` is what will be read.

        Metadata is added to what is known, which keeps the connection. Where a new span overlaps an
        old one, or was registered anew under another key, everything is learned again, over a new
        connection; UCX keeps a socket of the old one until the agent ends.
        """
        with self._lock:
            self._check_open()
            fresh = set(spans) - self._known
            if fresh and _any_overlap(fresh | self._known):
                self._forget_peer()
            try:
                try:
                    self._peer = self._nixl.loadRemoteMD(metadata)
                except self._errors:
                    if self._peer is None:
                        raise
                    self._forget_peer()
                    self._peer = self._nixl.loadRemoteMD(metadata)
            except self._errors as error:
                raise UnavailableError(
                    f"the trainer's NIXL metadata ({len(metadata)} B) cannot be used: {error}. Both "
                    "ends need one NIXL release and a network that UCX can use (UCX_NET_DEVICES)"
                ) from error
            self._known |= set(spans)

    def forget_peer(self) -> None:
        """What the peer has registered is to be learned again."""
        with self._lock:
            if self._lost is None:
                self._forget_peer()

    def _forget_peer(self) -> None:
        self._forget_prepared()
        if self._peer is not None:
            with contextlib.suppress(*self._errors):
                self._nixl.invalidateRemoteMD(self._peer)
        self._peer = None
        self._known.clear()

    def _forget_prepared(self) -> None:
        self._generation += 1
        for transfer in list(self._transfers):
            transfer.release()

    # -- reading --------------------------------------------------------------------------------

    def prepare(self, reads: Reads, source_device: str, target_device: str) -> Transfer:
        """Reads of the peer's registered memory into ours, ready to run again and again."""
        is_host = CPU in (source_device, target_device)
        piece_bytes = _PIECE_BYTES if is_host else _DEVICE_PIECE_BYTES
        reads = cut(reads, piece_bytes)
        ranges = pieces(reads.num_bytes, piece_bytes, _PIECE_READS)
        return self.prepare_pieces(reads, ranges, source_device, target_device, _IN_FLIGHT)

    def prepare_pieces(
        self,
        reads: Reads,
        ranges: Sequence[tuple[int, int]],
        source_device: str,
        target_device: str,
        num_in_flight: int,
    ) -> Transfer:
        """Like :meth:`prepare`, in given pieces: index ranges of the reads."""
        transfer = Transfer(reads, ranges, source_device, target_device, num_in_flight)
        with self._lock:
            self._check_open()
            self._build(transfer)
        return transfer

    def _build(self, transfer: Transfer) -> None:
        if transfer.generation == self._generation:
            return
        bind, nixl, backends = self._bind, self._nixl, [self._backend]
        reads = transfer.reads
        try:
            sides = []
            for owner, ptrs, device in (
                (bind.NIXL_INIT_AGENT, reads.target_ptr, transfer.target_device),
                (self._peer, reads.source_ptr, transfer.source_device),
            ):
                kind, index = memory_type(bind, device)
                table = descriptors(ptrs, reads.num_bytes, index)
                sides.append(nixl.prepXferDlist(owner, bind.nixlXferDList(kind, table), backends))
                transfer.adopt(nixl.releasedDlistH, sides[-1])
            for first, last in transfer.pieces:
                index_range = np.arange(first, last, dtype=np.int32)
                handle = nixl.makeXferReq(
                    bind.NIXL_READ, sides[0], index_range, sides[1], index_range, "", backends
                )
                transfer.adopt(nixl.releaseXferReq, handle)
                transfer.handles.append(handle)
        except self._errors as error:
            transfer.release()
            raise TransportError(
                f"NIXL cannot prepare {len(reads)} reads of {format_bytes(reads.total_bytes)}: {error}"
            ) from error
        transfer.generation = self._generation
        self._transfers.add(transfer)

    def read(
        self,
        transfer: Transfer,
        deadline: Deadline,
        lost: Callable[[], str | None],
        steps: PieceSteps | None = None,
    ) -> None:
        """Run a prepared transfer to its end.

        When it raises, nothing of it lands any more: pieces under way are waited for, and where they
        do not end the agent is torn down, which takes the connection (and the queues of a network
        card) with it.
        """
        posted: deque[Any] = deque()  # None: landed at once
        num_landed = 0

        def check() -> None:
            self._check_open()
            deadline.check()
            if (reason := lost()) is not None:
                raise deadline.lost(reason)

        def land() -> None:
            nonlocal num_landed
            if posted[0] is not None:
                self._wait(posted[0], check)
            posted.popleft()
            if steps is not None:
                steps.landed(num_landed)
            num_landed += 1

        try:
            check()
            with self._lock:
                self._check_open()
                self._build(transfer)
            for piece, handle in enumerate(transfer.handles):
                check()
                if steps is not None:
                    steps.before(piece)
                posted.append(handle if self._post(handle) else None)
                while len(posted) >= transfer.num_in_flight:
                    land()
            while posted:
                land()
        except self._errors as error:
            self._fail(error, deadline, lost)
        except BaseException:
            self._quiet(posted, is_hopeless=lost() is not None)
            raise

    def _post(self, handle: Any) -> bool:
        """True while it is under way. May itself do the copying (shared memory does)."""
        with self._lock:
            self._check_open()
            return self._is_running(self._nixl.postXferReq(handle, ""))

    def _poll(self, handle: Any) -> bool:
        with self._lock:
            self._check_open()
            return self._is_running(self._nixl.getXferStatus(handle))

    def _is_running(self, status: Any) -> bool:
        if status == self._bind.NIXL_IN_PROG:
            return True
        if status == self._bind.NIXL_SUCCESS:
            return False
        failure: Exception = self._bind.nixlBackendError(str(status))
        raise failure

    def _wait(self, handle: Any, check: Callable[[], None]) -> None:
        start_s = time.monotonic()
        while self._poll(handle):
            check()
            waited_s = time.monotonic() - start_s
            if waited_s > _SPIN_S:
                time.sleep(_SLEEP_S if waited_s < _PATIENT_AFTER_S else _PATIENT_SLEEP_S)

    def _quiet(self, posted: deque[Any], *, is_hopeless: bool) -> None:
        """Wait until abandoned pieces have left the wire, or tear the agent down."""
        end_s = time.monotonic() + (0.0 if is_hopeless else _QUIET_LIMIT_S)
        try:
            while posted:
                if posted[0] is None or not self._poll(posted[0]):
                    posted.popleft()
                elif time.monotonic() >= end_s:
                    self.close("a read that was given up did not end; connect again")
                    return
                else:
                    time.sleep(_SLEEP_S)
        except PeerLostError:
            return  # closed meanwhile: torn down already
        except self._errors:
            self.close("a read that was given up failed; connect again")

    def _fail(self, error: Exception, deadline: Deadline, lost: Callable[[], str | None]) -> None:
        """NIXL cannot recover from an error of a transfer: the agent goes, and with it the peer."""
        self.close(f"{deadline.peer}: a NIXL read failed ({error}); connect again")
        # The channel notices a death at about the time that UCX does, and knows better what happened.
        end_s = time.monotonic() + 0.2
        while (reason := lost()) is None and time.monotonic() < end_s:
            time.sleep(1e-3)
        if reason is not None:
            raise deadline.lost(reason) from error
        raise TransportError(
            f"{deadline.peer}: a NIXL read failed in stage {deadline.stage!r}: {error}; this endpoint "
            "is lost, a new one may work (UCX_LOG_LEVEL=info says more)"
        ) from error

    def close(self, reason: str = "this end was closed") -> None:
        """Tear everything down. Idempotent; from any thread."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            self._forget_peer()
            self._deregister(self._registered)
            self._registered.clear()
            del self._nixl, self._backend


def _any_overlap(spans: Iterable[Span]) -> bool:
    ordered = sorted(spans, key=lambda span: (span.device, span.ptr, span.num_bytes))
    return any(
        a.device == b.device and a.ptr + a.num_bytes > b.ptr for a, b in itertools.pairwise(ordered)
    )


def _registration_error(spans: Sequence[Span], error: Exception) -> UnavailableError:
    total = sum(span.num_bytes for span in spans)
    most = max(spans, key=lambda span: span.num_bytes)
    return UnavailableError(
        f"{len(spans)} spans, {format_bytes(total)} in total (largest: {format_bytes(most.num_bytes)} "
        f"at {most.ptr:#x} on {most.device}) cannot be registered: {error}. The device may not take "
        "as much at once: move through a ring instead (stream), whose memory is bounded"
    )
