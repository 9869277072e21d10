"""The checks behind ``weightsync doctor``."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from weightsync import native
from weightsync.cli.bench_figures import versions
from weightsync.cli.doctor_peer import PeerProcess
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.memory import HostMemory, available_bytes
from weightsync.packages import is_installed
from weightsync.tables import segment_rows, table
from weightsync.transports import get_transport, transport_names
from weightsync.transports.base import TargetEndpoint
from weightsync.types import Contract, RegionAddress, format_bytes

_PROBE_BYTES = 64 * 2**20
_PROBE_LIMIT_S = 20.0
_SMALL_SHM_BYTES = 256 * 2**20


class Verdict(StrEnum):
    """How a check came out."""

    OK = "ok"
    SLOW = "slow"
    NO = "no"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def run_doctor(*, is_json: bool) -> int:
    """Check, print; the exit status is 1 when no transport between processes works at all."""
    findings = [*machine_findings(), *package_findings()]
    transports: list[Finding] = []
    for name in transport_names():
        transports += transport_findings(name)
    findings += transports
    if is_json:
        rows = [{**asdict(f), "verdict": f.verdict.value} for f in findings]
        print(json.dumps({"findings": rows, "versions": versions()}, indent=1))
    else:
        _print(findings)
    between = [f for f in transports if not f.what.startswith("loopback")]
    return 0 if any(f.verdict is not Verdict.NO for f in between) else 1


def _print(findings: list[Finding]) -> None:
    for name, version in versions().items():
        print(f"{name:<14}{version}")
    print()
    for f in findings:
        print(f"[{f.verdict.value:>4}] {f.what:<26}{f.detail}")
        if f.remedy:
            print(f"{'':33}-> {f.remedy}")


# --- machine --------------------------------------------------------------------------------------


def machine_findings() -> list[Finding]:
    """CPU, memory, shared memory, locked memory, tracing rights, GPU."""
    info = native.build_info()
    return [
        Finding("cpu", Verdict.INFO, f"{len(os.sched_getaffinity(0))} for this process"),
        Finding("memory", Verdict.INFO, f"{format_bytes(available_bytes())} available"),
        Finding("native core", Verdict.OK, ", ".join(f"{k}: {v}" for k, v in info.items())),
        _shared_memory(),
        _locked_memory(),
        _trace_scope(),
        _gpu(),
    ]


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding(
            "/dev/shm", Verdict.NO, str(error), "mount a tmpfs there (p2p over shared memory)"
        )
    detail = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    if usage.free < _SMALL_SHM_BYTES:
        return Finding(
            "/dev/shm", Verdict.SLOW, detail,
            "p2p over shared memory needs room: docker run --shm-size=1g",
        )  # fmt: skip
    return Finding("/dev/shm", Verdict.OK, detail)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", Verdict.OK, "unlimited")
    return Finding(
        "memlock", Verdict.INFO, format_bytes(soft),
        "enough on one host; NICs pin what they register: ulimit -l unlimited",
    )  # fmt: skip


def _trace_scope() -> Finding:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    try:
        scope = path.read_text().strip()
    except OSError:
        return Finding(
            "ptrace scope", Verdict.OK, "no yama: processes of one user may read each other"
        )
    verdict = Verdict.OK if scope in ("0", "1") else Verdict.SLOW
    remedy = (
        "" if verdict is Verdict.OK else "sysctl kernel.yama.ptrace_scope=1, or SharedArena sources"
    )
    return Finding("ptrace scope", verdict, f"{scope} (1 is cured by the trainer itself)", remedy)


def _gpu() -> Finding:
    if native.has_cuda():
        return Finding("gpu", Verdict.INFO, "CUDA build")
    return Finding("gpu", Verdict.INFO, f"CPU memory only: {native.cuda_unavailable_reason()}")


def package_findings() -> list[Finding]:
    """Optional packages and what they are for."""
    wanted = (
        ("torch", "hf", "models as sources and engines"),
        ("transformers", "hf", "bench with real models"),
        ("matplotlib", "bench", "bench --plot"),
    )
    found = []
    for package, extra, use in wanted:
        if not is_installed(package):
            remedy = f"pip install 'weightsync[{extra}]'"
            found.append(Finding(package, Verdict.INFO, f"not installed ({use})", remedy))
        else:
            found.append(Finding(package, Verdict.OK, use))
    return found


# --- transports -----------------------------------------------------------------------------------


def transport_findings(name: str) -> list[Finding]:
    """Each contract of a transport; between two real processes where it crosses them."""
    try:
        capabilities = get_transport(name).capabilities()
    except WeightSyncError as error:
        return [Finding(name, Verdict.NO, str(error))]
    found = []
    for contract, have in capabilities.contracts.items():
        what = f"{name} {contract.value}"
        if not have.is_usable:
            found.append(Finding(what, Verdict.NO, have.reason, have.remedy))
        elif name == "loopback":
            found.append(Finding(what, Verdict.OK, "within one process"))
        elif contract is Contract.DIRECT:
            found.append(_measured(name, what))
        else:
            found.append(Finding(what, Verdict.OK, have.reason or "a ring of slots"))
    return found


def _measured(name: str, what: str) -> Finding:
    """Read from a child process and time it."""
    try:
        with PeerProcess(name, _PROBE_BYTES) as peer:
            deadline = Deadline(_PROBE_LIMIT_S, peer="the doctor's peer", stage="probe")
            endpoint = get_transport(name).open_target(peer.descriptor, deadline)
            with endpoint:
                publication = peer.publication(deadline)
                probe = endpoint.probe_direct(deadline)
                if not probe.is_usable:
                    return Finding(what, Verdict.NO, probe.reason, probe.remedy)
                rate, path = _read_rate(endpoint, publication, deadline), endpoint.path
    except WeightSyncError as error:
        return Finding(what, Verdict.NO, str(error))
    verdict = Verdict.SLOW if probe.is_slow else Verdict.OK
    reason = f"; {probe.reason}" if probe.is_slow else ""
    return Finding(what, verdict, f"{rate:.2f} GB/s by {path}{reason}", probe.remedy)


def _read_rate(endpoint: TargetEndpoint, publication: dict[str, Any], deadline: Deadline) -> float:
    with HostMemory.anonymous(_PROBE_BYTES) as memory:
        native.prefault(memory.ptr, memory.num_bytes)
        direct = endpoint.direct()
        local = [RegionAddress(0, memory.ptr, memory.num_bytes)]
        address = direct.open(publication, local, deadline)[0]
        rows = segment_rows(
            (_PROBE_BYTES,), source=(address, (1,), 1), target=(memory.ptr, (1,), 1)
        )
        prepared = direct.prepare(table(rows, 13))
        best_s = float("inf")
        for _ in range(4):
            start_s = time.perf_counter()
            direct.read(prepared, deadline)
            best_s = min(best_s, time.perf_counter() - start_s)
    return _PROBE_BYTES / best_s / 1e9
