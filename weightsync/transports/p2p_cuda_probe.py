"""Whether p2p reads between CUDA devices take the fast way: found out with memory of the devices.

UCX copies through the host, a thousand times slower and without a word, where its CUDA modules are
missing or switched off, and where it takes device memory for host memory. So known bytes are written
to the trainer's device, read by NIXL into memory of the engine's device, and compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from weightsync import config
from weightsync.deadline import Deadline
from weightsync.device_tables import CudaCopy, DeviceMemory, bytes_at, write_bytes
from weightsync.errors import ProtocolError, TransportError, UnavailableError
from weightsync.native import CONVERT_NONE
from weightsync.transports.base import Availability
from weightsync.transports.link import check_fields
from weightsync.transports.nixl_agent import Agent
from weightsync.transports.nixl_binding import Span, Transfer
from weightsync.transports.nixl_reads import Reads
from weightsync.transports.p2p_cuda import Key, PeerMemory, export_at, parse_handles

#: The fast way needs some of its time to begin; the slow one takes 0.1 s for this.
PROBE_BYTES: Final = 64 * 2**20
_PART_BYTES: Final = 8 * 2**20
_PATTERN_BYTES: Final = 2**20
_ROUNDS: Final = 6
_LIMIT_S: Final = 0.5
#: Within one host: NVLink and one GPU make 200 GB/s and more, PCIe 5 some 40, PCIe 4 some 20; through
#: the host it is 0.5.
_FLOOR_BYTES_PER_S: Final = 8e9

#: More than any device of today copies: a difference of two times may be nothing.
_CEILING_BYTES_PER_S: Final = 3e12

#: UCX's transports for device memory within one host; its group ``cuda`` holds both.
_NEEDED_TRANSPORTS: Final = ("cuda_copy", "cuda_ipc")

_FIELDS: Final = {"ptr": int, "device": str, "handle": str}


def cuda_pattern(endpoint: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Known bytes, different for each endpoint, repeated all over the probed memory."""
    words = np.arange(_PATTERN_BYTES // 8, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    return (words ^ np.uint64(int(endpoint, 16))).view(np.uint8)


class CudaProbeSource:
    """The trainer's known bytes, until the engine has read them."""

    def __init__(self, agent: Agent, endpoint: str, device: str) -> None:
        self._agent = agent
        self._memory = DeviceMemory(PROBE_BYTES, device)
        self._device = device
        try:
            ptr = self._memory.ptr
            write_bytes(ptr, cuda_pattern(endpoint).tobytes(), device)
            rest = PROBE_BYTES // _PATTERN_BYTES - 1
            dims = (1, 0, 0, 1, 0, 0, rest, 0, _PATTERN_BYTES)  # the first block, again and again
            row = [ptr, ptr + _PATTERN_BYTES, _PATTERN_BYTES, CONVERT_NONE, *dims]
            CudaCopy(np.array([row], dtype=np.int64), device).run()
            self._registered = agent.register([Span(ptr, PROBE_BYTES, device)])
            self._handle = export_at(ptr, device)
        except BaseException:
            self._memory.close()
            raise

    def to_json(self) -> dict[str, Any]:
        """For the descriptor."""
        return {"ptr": self._memory.ptr, "device": self._device, "handle": self._handle}

    def retire(self) -> None:
        """The engine is done with them."""
        self._agent.deregister(self._registered)
        self._memory.close()

    def close(self) -> None:
        """After the agent."""
        self._memory.close()


class CudaProbe:
    """Reads them, in the way that is to be used; needed only while connecting."""

    def __init__(
        self, agent: Agent, endpoint: str, about: Mapping[str, Any], device: str, *, one_host: bool
    ) -> None:
        fields = check_fields(about, _FIELDS, "p2p descriptor, 'cuda'")
        if fields["device"].partition(":")[0] != "cuda":
            raise ProtocolError(f"p2p descriptor, 'cuda': device {fields['device'][:40]!r}")
        self._agent = agent
        self.key = Key(0, parse_handles([fields["handle"]], "p2p descriptor, 'cuda'")[0])
        self._source = Span(fields["ptr"], PROBE_BYTES, fields["device"])
        self._device = device
        self._is_one_host = one_host
        self._pattern = cuda_pattern(endpoint)
        self._memory = DeviceMemory(PROBE_BYTES, device)
        self._is_mapped = False
        self.rate_bytes_per_s = 0.0

    def run_mapped(self, kept: PeerMemory) -> Availability | None:
        """By a copy out of mapped memory; None where it cannot be mapped."""
        if not kept.replace([self.key]):
            return None
        self._clear()
        row = [kept.address_of(self.key), self._memory.ptr, PROBE_BYTES, CONVERT_NONE]
        copy = CudaCopy(np.array([[*row, *(1, 0, 0) * 3]], dtype=np.int64), self._device)
        kept.run(copy)
        if not self._is_right():
            return None
        self._is_mapped = True
        self.rate_bytes_per_s = _rate(lambda: kept.run(copy), PROBE_BYTES)
        return Availability(True)

    def run_nixl(
        self, metadata: bytes, deadline: Deadline, lost: Callable[[], str | None]
    ) -> Availability:
        """By NIXL. Raises :class:`UnavailableError` where that cannot read device memory at all."""
        self._clear()
        self._agent.load_peer(metadata, [self._source])
        registered = self._agent.register([Span(self._memory.ptr, PROBE_BYTES, self._device)])
        whole, part = self._transfer(PROBE_BYTES), self._transfer(_PART_BYTES)
        try:
            self._agent.read(whole, deadline, lost)
        except TransportError as error:
            raise UnavailableError(
                f"p2p cannot read memory of a CUDA device: {error}. {_remedy()}"
            ) from error
        if not self._is_right():
            reason = "a p2p read of known bytes of a CUDA device brought others"
            return Availability(False, reason, _remedy())
        rate = _rate(lambda: self._agent.read(whole, deadline, lost), PROBE_BYTES)
        if rate >= _FLOOR_BYTES_PER_S:  # what a large read makes, without its beginning
            start = _rate(lambda: self._agent.read(part, deadline, lost), _PART_BYTES)
            more_s = PROBE_BYTES / rate - _PART_BYTES / start
            slope = (PROBE_BYTES - _PART_BYTES) / max(more_s, 1e-9)
            rate = min(max(rate, slope), _CEILING_BYTES_PER_S)
        self.rate_bytes_per_s = rate
        for transfer in (whole, part):
            transfer.release()
        self._agent.deregister(registered)
        return judge(rate, is_one_host=self._is_one_host)

    def _transfer(self, num_bytes: int) -> Transfer:
        row = [np.array([n]) for n in (self._source.ptr, self._memory.ptr, num_bytes)]
        return self._agent.prepare(Reads(*row), self._source.device, self._device)

    def _clear(self) -> None:
        for at in _samples():
            write_bytes(self._memory.ptr + at, bytes(_PATTERN_BYTES), self._device)

    def _is_right(self) -> bool:
        found = [bytes_at(self._memory.ptr + at, _PATTERN_BYTES, self._device) for at in _samples()]
        return all(np.array_equal(block, self._pattern) for block in found)

    @property
    def path(self) -> str:
        rate = f"{self.rate_bytes_per_s / 1e9:.1f} GB/s"
        if self._is_mapped:
            return f"mapped device memory ({rate})"
        if not self._is_one_host:
            return f"ucx (network, device memory, {rate})"
        way = "cuda_ipc" if self.rate_bytes_per_s >= _FLOOR_BYTES_PER_S else "through the host"
        return f"ucx (device memory, {way}, {rate})"

    def close(self) -> None:
        """Its memory; the path is remembered. After what was read last."""
        self._memory.close()


def _samples() -> Iterator[int]:
    """Offsets of the blocks that are looked at."""
    yield from range(0, PROBE_BYTES, 8 * _PATTERN_BYTES)
    yield PROBE_BYTES - _PATTERN_BYTES


def _rate(read: Callable[[], object], num_bytes: int) -> float:
    """Bytes a second of the best of a few; one is enough where it takes long."""
    best_s, spent_s = float("inf"), 0.0
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        read()
        took_s = time.perf_counter() - start_s
        best_s, spent_s = min(best_s, took_s), spent_s + took_s
        if spent_s > _LIMIT_S:
            break
    return num_bytes / best_s


def judge(rate_bytes_per_s: float, *, is_one_host: bool) -> Availability:
    """What a measured rate means."""
    if rate_bytes_per_s >= _FLOOR_BYTES_PER_S or not is_one_host:
        return Availability(True)
    return Availability(
        True,
        f"p2p reads between CUDA devices of one machine run at {rate_bytes_per_s / 1e9:.2f} GB/s, "
        f"below {_FLOOR_BYTES_PER_S / 1e9:.0f}: UCX copies through the host instead of cuda_ipc",
        _remedy(),
        is_slow=True,
    )


def _lacks(tls: str) -> list[str]:
    """Which of the transports that device memory needs a value of UCX_TLS leaves out.

    A list of names and groups, or of those to leave out behind a ``^`` (UCX: "Transports to use").
    """
    is_inverse = tls.startswith("^")
    named = set(tls.removeprefix("^").split(","))
    if named & {"all", "cuda"}:
        named |= set(_NEEDED_TRANSPORTS)
    return [name for name in _NEEDED_TRANSPORTS if (name in named) is is_inverse]


def _remedy() -> str:
    """The settings that cure it, those first that are known to be wrong here."""
    found = []
    tls = config.library_setting("UCX_TLS")
    if tls is not None and (lacks := _lacks(tls)):
        names = ", ".join(f"'{name}'" for name in lacks)
        found.append(f"UCX_TLS={tls} lacks {names} (and keep 'tcp' in it)")
    zcopy = config.library_setting("UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
    if zcopy not in ("y", "yes", "on", "1"):
        found.append(f"UCX_CUDA_IPC_ENABLE_GET_ZCOPY is {zcopy}, it must be y")
    if found:
        return "In this process " + "; ".join(found) + ". The same holds for the trainer"
    return (
        "In both processes, before they start: UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y; 'cuda_copy', "
        "'cuda_ipc' and 'tcp' in UCX_TLS, if it is set; UCX_MODULE_DIR=<the folder of "
        "libuct_cuda.so>, if UCX does not find it; and no container between them that hides one "
        "process from the other"
    )
