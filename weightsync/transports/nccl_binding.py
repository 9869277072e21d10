"""The few calls of NCCL that a group of our own needs.

The library is the one that torch brings, by its C interface: torch's own process group would watch over
a communicator with a thread that may end the process, and cannot be stopped at a deadline of ours.
Communicators are non-blocking: every call returns, and :meth:`Communicator.check` says how far it is.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import threading
import time
from functools import cache
from typing import Any, Final

from weightsync import config
from weightsync.errors import MissingDependencyError, TransportError, UnavailableError

_SUCCESS: Final = 0
_INVALID_USAGE: Final = 5
_IN_PROGRESS: Final = 7
_UINT8: Final = 1  # ncclUint8
_ID_BYTES: Final = 128
_MAGIC: Final = 0xCAFEBEEF
_UNDEFINED: Final = -(2**31)
#: The version of the configuration below: newer libraries fill in what it lacks.
_CONFIG_VERSION: Final = 21800
_FIRST_VERSION: Final = 21800
_PAUSE_S: Final = 5e-6

#: Settings that change how two ends talk: they must agree.
SETTINGS: Final = (
    "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE",
    "NCCL_MNNVL_ENABLE",
)  # fmt: skip


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


class _Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.18."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


@cache
def load() -> Any:
    """The library. Raises :class:`MissingDependencyError` or :class:`UnavailableError`."""
    for path in (*_installed(), "libnccl.so.2"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        _declare(library)
        if (found := _version_of(library)) < _FIRST_VERSION:
            raise UnavailableError(
                f"NCCL {version_text(found)} is older than {version_text(_FIRST_VERSION)}, the first "
                "whose calls can be given up"
            )
        return library
    raise MissingDependencyError(
        "NCCL (libnccl.so.2) is not installed; it comes with torch's CUDA wheels, or: pip install "
        "nvidia-nccl-cu13. Without it use transport='ipc' on one machine, 'p2p' between machines"
    )


def _installed() -> list[str]:
    """Where packages have put it: the very file that torch loads, so that there is one of it."""
    found = []
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found += [str(f.locate()) for f in files if f.name.startswith("libnccl.so")]
    return found


def _declare(library: Any) -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(pointer), ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.POINTER(_Config),
    ]  # fmt: skip
    library.ncclBroadcast.argtypes = [
        pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer,
    ]  # fmt: skip
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [pointer]
    library.ncclGetLastError.restype = ctypes.c_char_p


def _version_of(library: Any) -> int:
    found = ctypes.c_int(0)
    library.ncclGetVersion(ctypes.byref(found))
    return found.value


def version() -> int:
    """As the library counts: 22809 is 2.28.9."""
    return _version_of(load())


def version_text(number: int) -> str:
    """For people."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def settings() -> dict[str, str]:
    """What is set of :data:`SETTINGS`."""
    found = {name: config.library_setting(name) for name in SETTINGS}
    return {name: value for name, value in found.items() if value is not None}


def new_id() -> bytes:
    """What names a group: 128 bytes that every member must be told. Raises :class:`TransportError`."""
    library, made = load(), _UniqueId()
    if (code := library.ncclGetUniqueId(ctypes.byref(made))) != _SUCCESS:
        raise TransportError(f"NCCL: no group can be named here: {_text(library, code, None)}")
    return bytes(made)


def _text(library: Any, code: int, communicator: Any) -> str:
    words = library.ncclGetErrorString(code).decode(errors="replace")
    more = (library.ncclGetLastError(communicator) or b"").decode(errors="replace").strip()
    return f"{words} ({more[:300]})" if more else words


class Communicator:
    """One member's end. Calls come from any thread, one at a time; the device is the caller's to set."""

    def __init__(self, name: bytes, rank: int, size: int) -> None:
        """Begins; :meth:`check` is true when all members have come."""
        self._library = load()
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        self._lock = threading.Lock()
        if len(name) != _ID_BYTES:
            raise TransportError(f"NCCL: a group is named by {_ID_BYTES} bytes, not {len(name)}")
        wanted = _Config(
            size=ctypes.sizeof(_Config), magic=_MAGIC, version=_CONFIG_VERSION, blocking=0,
            cga_cluster_size=_UNDEFINED, min_ctas=_UNDEFINED, max_ctas=_UNDEFINED, net_name=None,
            split_share=_UNDEFINED,
        )  # fmt: skip
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(self._handle), size, _UniqueId.from_buffer_copy(name), rank,
            ctypes.byref(wanted),
        )  # fmt: skip
        if code not in (_SUCCESS, _IN_PROGRESS):
            reason = self._reason(code)
            self.abort()
            raise TransportError(reason)

    def _reason(self, code: int) -> str:
        text = f"NCCL: {_text(self._library, code, self._handle)}"
        if code == _INVALID_USAGE:
            text += "; two members on one GPU are refused: use transport='ipc' there"
        return text

    def check(self) -> bool:
        """Whether nothing is in progress. Raises :class:`TransportError` if the group is broken."""
        with self._lock:
            return self._check()

    def _check(self) -> bool:
        if self._handle is None:
            raise TransportError("NCCL: the group was ended here")
        state = ctypes.c_int(_SUCCESS)
        code = self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(state))
        for found in (code, state.value):
            if found not in (_SUCCESS, _IN_PROGRESS):
                raise TransportError(self._reason(found))
        return state.value == _SUCCESS

    def broadcast(self, ptr: int, num_bytes: int, stream: int) -> None:
        """From rank 0 to all, in place, on a CUDA stream of the device; on return it is on the stream.

        The first one makes connections, and waits for the others; :meth:`abort` ends that.
        """
        with self._lock:
            if self._handle is None:
                raise TransportError("NCCL: the group was ended here")
            code = self._library.ncclBroadcast(ptr, ptr, num_bytes, _UINT8, 0, self._handle, stream)
            if code not in (_SUCCESS, _IN_PROGRESS):
                raise TransportError(self._reason(code))
        while not self.check():  # a thread of NCCL's puts it on the stream
            time.sleep(_PAUSE_S)

    def abort(self) -> None:
        """End it and what is under way. Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None and handle.value:
                self._library.ncclCommAbort(handle)
